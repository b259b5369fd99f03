"""`accelerate launch` with the shipped configurations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from rank_launcher import free_port

CONFIGS = Path(__file__).parents[2] / "accelerate_configs"
PROCESSES = {"single_gpu": 1, "cpu_2proc": 2, "ddp_2gpu_pcie": 2, "ddp_4gpu_pcie": 4, "ddp_2node_pcie": 4}


def start(config: str, folder: Path, port: int, *flags: str) -> subprocess.Popen[bytes]:
    here = Path(__file__)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / f"{config}.yaml")]
    command += ["--main_process_port", str(port), *flags, str(here.with_name("launched_script.py")), str(folder)]
    paths = [str(here.parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        environment.pop(name, None)
    with (folder / f"{port}-{''.join(flags[-1:])}.txt").open("w") as printed:
        return subprocess.Popen(command, env=environment, stdout=printed, stderr=subprocess.STDOUT)


def finish(launchers: list[subprocess.Popen[bytes]], folder: Path) -> str:
    """What the launchers printed. When one fails or time is up, the others are ended: they may wait for it."""
    end = time.monotonic() + 240
    while time.monotonic() < end and None in (codes := [launcher.poll() for launcher in launchers]) and not any(codes):
        time.sleep(0.1)
    for launcher in launchers:
        launcher.terminate()  # kill() would leave its ranks behind
        launcher.wait(60)
    printed = [path.read_text() for path in sorted(folder.glob("*.txt"))]
    assert set(codes) == {0}, f"{codes} (None: ended here)\n" + "\n".join(text[-4000:] for text in printed)
    return "".join(printed)


def results(folder: Path, num_ranks: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(num_ranks)]


def test_two_processes_on_the_cpu_train_to_equal_weights(tmp_path: Path) -> None:
    printed = finish([start("cpu_2proc", tmp_path, free_port())], tmp_path)
    first, second = results(tmp_path, 2)
    assert first["weights"] == second["weights"]
    assert first["settings"]["optimizer_placement"] == "host"
    assert first["settings"]["optimizer_sharding"] == "sharded"
    assert printed.count("trl-budget ") == 1, "the table is printed once"
    saved = {path.name for path in (tmp_path / "checkpoint-2").iterdir()}
    assert {"optimizer.pt", "scheduler.pt", "model.safetensors", "rng_state_0.pth", "rng_state_1.pth"} <= saved


def test_two_nodes_of_two_processes_train_to_equal_weights(tmp_path: Path) -> None:
    """The GPU configuration, on a machine where the script asks for the CPU; both nodes are this machine."""
    port = free_port()
    flags = ("--main_process_ip", "127.0.0.1", "--machine_rank")
    finish([start("ddp_2node_pcie", tmp_path, port, *flags, str(node)) for node in range(2)], tmp_path)
    ranks = results(tmp_path, 4)
    assert len({rank["weights"] for rank in ranks}) == 1
    assert all(rank["log"] == ranks[0]["log"] for rank in ranks)
    assert all(rank["settings"]["optimizer_placement"] == "host" for rank in ranks)


@pytest.mark.parametrize("name", PROCESSES)
def test_each_configuration_says_for_whom_it_is_and_sets_nothing_for_nccl(name: str) -> None:
    text = (CONFIGS / f"{name}.yaml").read_text()
    assert text.startswith("# For ")
    settings = yaml.safe_load(text)
    assert settings["num_processes"] == PROCESSES[name]
    assert settings["mixed_precision"] == "no", "bf16 comes from the training arguments"
    assert not any("nccl" in str(part).lower() for item in settings.items() for part in item)


def test_every_configuration_is_known_here() -> None:
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == set(PROCESSES)

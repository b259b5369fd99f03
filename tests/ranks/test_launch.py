"""`accelerate launch` with the shipped configurations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from rank_launcher import free_port

CONFIGS = Path(__file__).parents[2] / "accelerate_configs"
PROCESSES = {"single_gpu": 1, "cpu_2proc": 2, "ddp_2gpu_pcie": 2, "ddp_4gpu_pcie": 4, "ddp_2node_pcie": 4}


def start(config: str, folder: Path, port: int, *flags: str) -> subprocess.Popen[str]:
    here = Path(__file__)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / f"{config}.yaml")]
    command += ["--main_process_port", str(port), *flags, str(here.with_name("launched_script.py")), str(folder)]
    paths = [str(here.parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        environment.pop(name, None)
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(launchers: list[subprocess.Popen[str]]) -> list[str]:
    """What each launcher printed."""
    try:
        printed = [launcher.communicate(timeout=200) for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
    for launcher, (_, errors) in zip(launchers, printed, strict=True):
        assert launcher.returncode == 0, errors[-4000:]
    return [output for output, _ in printed]


def results(folder: Path, num_ranks: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(num_ranks)]


def test_two_processes_on_the_cpu_train_to_equal_weights(tmp_path: Path) -> None:
    (printed,) = finish([start("cpu_2proc", tmp_path, free_port())])
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
    finish([start("ddp_2node_pcie", tmp_path, port, *flags, str(node)) for node in range(2)])
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

"""`accelerate launch` with the shipped configurations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from rank_launcher import free_port

CONFIGS = Path(__file__).parents[2] / "accelerate_configs"
PROCESSES = {"single_gpu": 1, "cpu_2proc": 2, "ddp_2gpu_pcie": 2, "ddp_4gpu_pcie": 4, "ddp_2node_pcie": 4}


def test_two_processes_on_the_cpu_train_to_equal_weights(tmp_path: Path) -> None:
    here = Path(__file__)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / "cpu_2proc.yaml")]
    command += ["--main_process_port", str(free_port()), str(here.with_name("launched_script.py")), str(tmp_path)]
    paths = [str(here.parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        environment.pop(name, None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    assert first["weights"] == second["weights"]
    assert first["settings"]["optimizer_placement"] == "host"
    assert first["settings"]["optimizer_sharding"] == "sharded"
    assert done.stdout.count("trl-budget ") == 1, "the table is printed once"
    saved = {path.name for path in (tmp_path / "checkpoint-2").iterdir()}
    assert {"optimizer.pt", "scheduler.pt", "model.safetensors", "rng_state_0.pth", "rng_state_1.pth"} <= saved


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

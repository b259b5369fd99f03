"""TRL's own GRPO script trains, with nothing but the class name swapped."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tiny import digit_dataset, save_tiny_model


def test_trl_grpo_script_trains_with_the_class_swapped(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    (tmp_path / "data").mkdir()
    digit_dataset(16).to_json(str(tmp_path / "data" / "train.jsonl"))
    here = Path(__file__)
    flags = {
        "model_name_or_path": model,
        "dataset_name": str(tmp_path / "data"),
        "output_dir": str(tmp_path / "out"),
        "reward_funcs": "tiny.digit_reward",
        "max_steps": "2",
        "logging_steps": "1",
        "per_device_train_batch_size": "4",
        "num_generations": "4",
        "max_completion_length": "6",
        "use_cpu": "true",
        "bf16": "false",
        "report_to": "none",
        "learning_rate": "1e-3",
    }
    command = [sys.executable, str(here.with_name("swapped_script.py"))]
    command += [part for name, value in flags.items() for part in (f"--{name}", value)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(here.parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert re.search(r"optimizer_placement +host", done.stdout)
    assert "Training completed" in done.stdout
    assert (tmp_path / "out" / "model.safetensors").exists()
    state = json.loads((tmp_path / "out" / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["global_step"] == 2

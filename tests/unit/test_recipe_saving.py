"""What a recipe keeps: checkpoints that a cut run goes on from, its record, the model."""

from __future__ import annotations

import argparse
import json
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from tiny import make_trainer, max_difference, weights
from transformers import AutoModelForCausalLM, TrainerCallback

from trl_budget import BudgetGRPOConfig, BudgetGRPOTrainer

pytest.importorskip("matplotlib", reason="the recipes draw their reward")
sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
import _saving
from _curves import record_run


def arguments_of(folder: Path, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", type=Path, default=folder)
    parser.add_argument("--shape-only", action="store_true")
    _saving.add_saving_arguments(parser)
    return parser.parse_args(words)


class Cut(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3:
            raise KeyboardInterrupt


def run(folder: Path, *words: str, is_cut: bool = False) -> Any:
    arguments = arguments_of(folder, *words)
    settings = {
        "max_steps": 5,
        "logging_steps": 1,
        "optimizer_placement": "host",
        **_saving.saving_settings(arguments),
    }
    kwargs = {"callbacks": [Cut()] if is_cut else []}
    folder.mkdir(exist_ok=True)
    trainer = make_trainer(BudgetGRPOTrainer, folder, config_class=BudgetGRPOConfig, trainer_kwargs=kwargs, **settings)
    recorder = record_run(trainer, 1, folder, {})
    if is_cut:
        with pytest.raises(KeyboardInterrupt):
            _saving.train_and_save(trainer, arguments)
    else:
        _saving.train_and_save(trainer, arguments)
    return trainer, [record["step"] for record in recorder.records]


def test_a_run_that_was_cut_goes_on_and_loses_neither_weights_nor_its_record(tmp_path: Path) -> None:
    whole, steps = run(tmp_path / "whole", "--save-steps", "0")
    assert steps == [1, 2, 3, 4, 5]
    assert not list((tmp_path / "whole").glob("checkpoint-*"))
    run(tmp_path / "cut", "--save-steps", "2", is_cut=True)
    record = tmp_path / "cut" / "rewards.json"
    assert [entry["step"] for entry in json.loads(record.read_text())["steps"]] == [1, 2]
    resumed, steps = run(tmp_path / "cut", "--save-steps", "2", "--resume")
    assert steps == [1, 2, 3, 4, 5]
    assert max_difference(weights(resumed), weights(whole)) == 0.0
    assert [path.name for path in (tmp_path / "cut").glob("checkpoint-*")] in (["checkpoint-4"], ["checkpoint-5"])
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "cut" / "model", dtype="float32").state_dict()
    assert max_difference(saved, weights(resumed)) == 0.0


def test_a_new_run_begins_its_record_anew(tmp_path: Path) -> None:
    run(tmp_path, "--save-steps", "0", is_cut=True)
    _, steps = run(tmp_path, "--save-steps", "0")
    assert steps == [1, 2, 3, 4, 5]


def test_random_weights_are_not_kept(tmp_path: Path) -> None:
    run(tmp_path, "--shape-only")
    assert not (tmp_path / "model").exists() and not list(tmp_path.glob("checkpoint-*"))


def test_a_disk_without_room_for_two_checkpoints_is_named_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")(0, 0, 2**20)
    monkeypatch.setattr(_saving.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(SystemExit, match="--save-steps 0"):
        run(tmp_path)
    run(tmp_path, "--save-steps", "0")

"""The programs of `tests/gpu/test_colocated_cuda.py` over the fake engine: they run, and their figures hold."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_vllm import FakeLLM, stand_in_for_vllm
from tiny import max_difference
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))
import colocated_program as program


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake engine, which can sleep on a CPU, and sizes for it."""

    def build_card(self: Any, policy: nn.Module) -> Any:
        for model in [policy, self.ref_model]:
            if model is not None:  # loaded weights are mapped from their file, which cannot be parked
                for parameter in model.parameters():
                    parameter.data = parameter.data.clone()
        return super(program.ProgramTrainer, self)._build_card(policy)

    monkeypatch.setattr(program, "build_engine", FakeLLM)
    monkeypatch.setattr(program.ProgramTrainer, "_build_card", build_card)
    monkeypatch.setattr(program.ProgramTrainer, "_can_engine_sleep", lambda *_: True)
    stand_in_for_vllm(monkeypatch)
    monkeypatch.setattr("trl_budget.rollout_policy.SHARED_DTYPES", ("bfloat16", "float32"))
    small = {
        "use_cpu": True,
        "bf16": False,
        "model_init_kwargs": {"dtype": "float32"},
        "max_completion_length": 6,
        "per_device_train_batch_size": 4,
    }
    monkeypatch.setattr(program, "SETTINGS", {**program.SETTINGS, **small})
    monkeypatch.setattr(program, "NUM_NEW_TOKENS", 6)
    monkeypatch.setattr(program, "NUM_CYCLES", 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return program.save_model(tmp_path_factory.mktemp("model"), "tiny", torch.float32)


def run(name: str, model: Path, tmp_path: Path) -> dict[str, Any]:
    result = program.PROGRAMS[name](model, tmp_path / name)
    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # set for vLLM; the next trainer would train on "cpu:0"
        os.environ.pop(variable, None)
    return result


@pytest.mark.parametrize("way", ["sharing", "copying"])
def test_greedy_completions_are_judged_on_the_present_weights(way: str, model: Path, tmp_path: Path) -> None:
    figures = run(way, model, tmp_path)
    assert figures["settings"]["share_vllm_weights"] == ("on" if way == "sharing" else "off")
    assert [len(gaps) for gaps in figures["present"]] == [24] * 5
    assert max(gap for gaps in figures["present"] for gap in gaps) < 1e-4
    assert max(gap for gaps in figures["stale"] for gap in gaps) > 0.1
    assert all(awake["policy_bytes"] < 1024 for awake in figures["awake"])
    assert figures["keys"][0] == figures["keys"][1] and figures["loaded"] == 0.0


def test_the_rounding_of_a_policy_that_is_prepared_for_bf16_is_measured(model: Path, tmp_path: Path) -> None:
    trainer = program.build(model, tmp_path, bf16=True, use_vllm=False, max_steps=1)
    trainer.train()  # Accelerate's autocast stands before the policy's forward from here on
    prompts = program.GreedyAfterEachStep.PROMPTS
    error, _ = program.rounding(trainer.model, prompts, [[3 + i for i in range(6)] for _ in prompts])
    assert 0.0 < error < 0.1


def test_the_stale_engine_is_found(model: Path, tmp_path: Path) -> None:
    figures = run("stale", model, tmp_path)
    assert "log-probs of vLLM" in figures["error"] and figures["step"] == 1


def test_the_reference_follows(model: Path, tmp_path: Path) -> None:
    figures = run("reference", model, tmp_path)
    assert figures["difference"] == 0.0 and figures["num_values"] > 10 and figures["is_parked"]
    assert max(figures["kl"]) < 0.01


def test_gradients_of_every_way_are_the_same(model: Path, tmp_path: Path) -> None:
    try:
        runs = [run(f"gradients_{way}", model, tmp_path) for way in ("resident", "copying", "sharing")]
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
    for other in runs[1:]:
        assert len(other["steps"]) == 3
        for ours, expected in zip(other["steps"], runs[0]["steps"], strict=True):
            assert len(expected) == 24 and max_difference(ours, expected) == 0.0


def test_the_base_under_adapters_keeps_its_bits(model: Path, tmp_path: Path) -> None:
    figures = run("adapters", program.save_model(tmp_path / "bf16", "tiny"), tmp_path)
    assert figures["moved"] and all(".lora_" in name for name in figures["moved"])
    assert figures["num_verified"] == 3 and len(figures["merge_bytes"]) == 6


def test_the_rows_of_stored_keys_are_sorted(model: Path) -> None:
    keys = program.stored_keys(model)
    assert keys == sorted(keys) and "model.layers.1.mlp.up_proj.weight" in keys

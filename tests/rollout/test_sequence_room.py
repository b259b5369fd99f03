"""Context and KV cache are checked against the rows before the engine starts, after it, and before it generates."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_vllm import FakeLLM
from test_colocated_vllm import CPU_ENGINE
from test_handover import HandoverTrainer, _engine, build, events, folder  # noqa: F401

from trl_budget.errors import DeviceMemoryError, SettingsError


def test_completions_that_cannot_become_as_long_as_asked_for_are_told_of_before_anything_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(OSError, match="no such model"):
        build(str(tmp_path / "no such model"), tmp_path, max_completion_length=64)
    assert "leaves 63 after a prompt of 1, and max_completion_length is 64" in caplog.text


def test_a_cache_that_holds_no_row_is_refused_when_the_engine_has_started(folder: str, tmp_path: Path) -> None:  # noqa: F811
    class Small(HandoverTrainer):
        def _engine_class(self, **arguments: Any) -> FakeLLM:
            return FakeLLM(arguments, cache=(1, 16))

    with pytest.raises(DeviceMemoryError, match="KV cache holds 16 tokens, and max_completion_length=20"):
        build(folder, tmp_path, trainer_class=Small, max_completion_length=20)


def test_an_engine_without_room_for_its_cache_is_refused_in_our_words(folder: str, tmp_path: Path) -> None:  # noqa: F811
    class Full(HandoverTrainer):
        def _engine_class(self, **arguments: Any) -> FakeLLM:
            raise ValueError(
                "To serve at least one request with the model's max seq len (64), (2.0 GiB KV cache is needed, which "
                "is larger than the available KV cache memory (1.0 GiB). Based on the available memory, the estimated "
                "maximum model length is 32. "
            )

    with pytest.raises(DeviceMemoryError, match="Set vllm_max_model_length=32, which fits") as failure:
        build(folder, tmp_path, trainer_class=Full)
    assert isinstance(failure.value.__cause__, ValueError)


def test_a_prompt_that_is_too_long_is_named_before_any_is_generated(folder: str, tmp_path: Path) -> None:  # noqa: F811
    trainer = build(folder, tmp_path, vllm_max_model_length=19, share_vllm_weights="off")  # prompts of 19 tokens
    with pytest.raises(SettingsError, match=r"Prompt 0 of 4 has 19 tokens, and vLLM's context .* has 19"):
        trainer.train()
    names = events(trainer, with_residents=False)
    assert "generate" not in names and names[-1] == "sleep"
    assert trainer.residents() == "policy"


@pytest.mark.parametrize(("context", "times"), [(25, 0), (24, 1)])
def test_completions_that_are_cut_are_trained_on_and_told_of_once(
    context: int,
    times: int,
    folder: str,  # noqa: F811
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = build(folder, tmp_path, vllm_max_model_length=context, max_steps=2)  # 19 tokens and 6
    trainer.train()
    assert trainer.state.global_step == 2
    assert caplog.text.count("vLLM cuts completions short") == times


@pytest.mark.vllm
@pytest.mark.skipif(torch.cuda.is_available(), reason="runs vLLM's CPU backend, and a CUDA device is visible")
@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("prompt", r"SettingsError: Prompt 0 of 4 has 19 tokens, and vLLM's context"),
        ("cache", r"DeviceMemoryError: vLLM's KV cache needs [0-9.]+ GiB for one sequence of 600000 tokens"),
    ],
)
def test_real_vllm_is_not_asked_for_what_it_cannot_hold(kind: str, error: str, tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("long_row_program.py")), kind, str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, **CPU_ENGINE}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert re.search(error, done.stdout), done.stdout[-2000:]

"""Real vLLM on the CPU generates with the policy's own weights, and follows them when they change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(torch.cuda.is_available(), reason="runs vLLM's CPU backend, and a CUDA device is visible"),
]
CPU_ENGINE = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1", "TORCHDYNAMO_DISABLE": "1"}


@pytest.fixture(scope="module", params=["Qwen3, tied", "Qwen2 with biases", "Llama", "Gemma2, no head in vLLM"])
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("shared") / "measured.json"
    command = [
        sys.executable,
        str(Path(__file__).with_name("shared_engine_program.py")),
        request.param,
        "cpu",
        str(out),
    ]
    done = subprocess.run(command, env={**os.environ, **CPU_ENGINE}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


def test_the_engine_has_loaded_what_the_policy_has(measured: dict[str, Any]) -> None:
    assert measured["num_views"] >= measured["num_parameters"] > 20
    assert measured["difference_before"] is None


def test_vllm_generates_what_the_policy_finds_best(measured: dict[str, Any]) -> None:
    assert measured["first"]["gap"] < 1e-3
    assert measured["first"]["logp_distance"] < 1e-5


def test_vllm_follows_a_change_of_the_policy_in_place(measured: dict[str, Any]) -> None:
    assert measured["first_after_changes"]["logp_distance"] > 1e-3
    assert measured["after_changes"]["gap"] < 1e-3
    assert measured["after_changes"]["logp_distance"] < 1e-5
    assert measured["first_unshared"] is None


def test_gradients_are_those_of_a_separate_copy(measured: dict[str, Any]) -> None:
    assert measured["gradient_difference"] == 0.0

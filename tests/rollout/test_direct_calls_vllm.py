"""Real vLLM on the CPU, asleep between rollouts as far as its executor goes, answers calls from a callback."""

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
ASLEEP = ["kv_cache", "weights"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("direct") / "measured.json"
    command = [sys.executable, str(Path(__file__).with_name("direct_call_program.py")), str(out)]
    done = subprocess.run(command, env={**os.environ, **CPU_ENGINE}, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


def test_an_engine_that_sleeps_answers_and_sleeps_again(measured: dict[str, Any]) -> None:
    assert measured["settings"]["park_policy_during_rollout"] == "on"
    assert [(s["asleep_before"], s["asleep_after"]) for s in measured["steps"]] == [(ASLEEP, ASLEEP)] * 2
    assert [(s["num_chat_tokens"], s["num_rpc_answers"]) for s in measured["steps"]] == [(6, 1)] * 2


def test_it_answers_with_the_present_weights(measured: dict[str, Any]) -> None:
    assert max(step["logp_distance"] for step in measured["steps"]) < 1e-4
    assert [step["norm_distance"] for step in measured["steps"]] == [0.0, 0.0]
    assert len(measured["gaps"]) == 2 and max(measured["gaps"]) < 1e-4


def test_what_users_find_at_llm_is_an_llm(measured: dict[str, Any]) -> None:
    assert (measured["is_llm"], measured["max_model_len"]) == (True, 128)

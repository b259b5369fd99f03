"""Real vLLM on a GPU with the policy's own weights: they survive its sleep, and it follows them when they change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.vllm]
PROGRAM = Path(__file__).parents[1] / "rollout" / "shared_engine_program.py"
BF16_TIES = 0.25  # log-prob; logits of a few units are rounded to 0.03, twice, after layers that round differently


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("shared") / "measured.json"
    command = [sys.executable, str(PROGRAM), "Qwen3, tied", "cuda", str(out)]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(out.read_text())


def test_the_engine_has_loaded_what_the_policy_has(measured: dict[str, Any]) -> None:
    assert measured["num_views"] == measured["num_parameters"] + 1, "the tied head has a name of its own"
    assert measured["difference_before"] is None


def test_a_policy_from_the_host_adds_less_than_a_mebibyte_to_the_card(measured: dict[str, Any]) -> None:
    assert measured["added_bytes"] < 2**20, "its buffers"


def test_vllm_generates_what_the_policy_finds_best(measured: dict[str, Any]) -> None:
    assert measured["first"]["gap"] < BF16_TIES
    assert measured["first"]["logp_distance"] < BF16_TIES


def test_sleep_at_level_2_gives_the_kv_cache_back_to_the_card(measured: dict[str, Any]) -> None:
    for cycle in measured["cycles"]:
        assert cycle["asleep_bytes"] > 2**30
        assert cycle["freed_bytes"] >= 0.95 * cycle["asleep_bytes"]
        assert cycle["asleep_bytes_awake"] == 0


def test_sleep_at_level_2_leaves_the_bits_of_the_weights(measured: dict[str, Any]) -> None:
    assert [cycle["difference_asleep"] for cycle in measured["cycles"]] == [None, None]


def test_vllm_follows_changes_that_were_made_while_it_slept(measured: dict[str, Any]) -> None:
    assert measured["first_after_changes"]["logp_distance"] > 2 * BF16_TIES
    assert measured["after_changes"]["gap"] < BF16_TIES
    assert measured["after_changes"]["logp_distance"] < BF16_TIES
    assert measured["first_unshared"] is None


def test_gradients_are_those_of_a_separate_copy(measured: dict[str, Any]) -> None:
    assert measured["gradient_difference"] == 0.0

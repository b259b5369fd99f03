"""A check of the rollout that fails on one of two gloo ranks ends the run on both, long before the timeout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import rollout_programs as programs
from rank_launcher import run_ranks
from tiny import save_tiny_model

TIMEOUT = 50.0
REUSES = pytest.mark.parametrize("reuse", ["off", "require"])


def run(program: Any, tmp_path: Path, *args: Any) -> list[Any]:
    folder = save_tiny_model(tmp_path / "model")
    return run_ranks(program, 2, tmp_path, folder, tmp_path, *args, group_timeout=TIMEOUT, seconds=60.0)


def assert_told(results: list[Any], kind: str, words: str) -> None:
    """Rank 1 raises its own error and rank 0 hears of it."""
    other, failing = results
    assert failing["kind"] == kind and words in failing["message"]
    assert other["kind"] == "RankError"
    assert "Rank 1 failed" in other["message"] and f"{kind}: " in other["message"] and words in other["message"]
    assert max(result["seconds"] for result in results) < TIMEOUT / 2


@REUSES
def test_one_engine_whose_log_probs_are_off_is_found_though_the_mean_over_ranks_is_small(
    reuse: str, tmp_path: Path
) -> None:
    results = run(programs.one_engine_is_off, tmp_path, reuse)
    assert_told(results, "StalePolicyError", "differ by 0.800")
    assert [result["step"] for result in results] == [0, 0]
    for result in results:
        assert result["metric"] == [pytest.approx(0.4, abs=1e-3)], "the metric is no longer stock's"


@REUSES
def test_a_weight_that_one_sync_loses_ends_the_run_before_the_update(reuse: str, tmp_path: Path) -> None:
    results = run(programs.one_sync_loses_a_weight, tmp_path, reuse)
    assert_told(results, "WeightSyncError", "k_proj")
    assert [result["step"] for result in results] == [1, 1]


@pytest.mark.parametrize("phase", ["rollout", "score", "update", "optimizer step"])
def test_one_card_over_the_budget_ends_the_run_in_the_same_step(phase: str, tmp_path: Path) -> None:
    results = run(programs.one_rank_holds_too_much, tmp_path, phase)
    assert_told(results, "DeviceMemoryError", f"In phase '{phase}' the card holds 20.00 GiB")
    assert [result["step"] for result in results] == [0, 0]
    assert 80 in results[1]["caps"], "torch would fail under the cap before the ranks meet"
    assert 80 not in results[0]["caps"]


def test_no_engine_starts_where_one_rank_has_no_room(tmp_path: Path) -> None:
    assert_told(run(programs.one_engine_has_no_room, tmp_path), "DeviceMemoryError", "no room.")


@REUSES
def test_checks_cost_one_exchange_a_rollout_and_a_rank_may_call_its_engine_alone(reuse: str, tmp_path: Path) -> None:
    for result in run(programs.trains, tmp_path, reuse):
        assert result["num_rollouts"] > 3
        assert result["num_checks"] == result["num_rollouts"]
        assert result["same"] == (True, 0.0)

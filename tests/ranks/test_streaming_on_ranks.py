"""Gradients that leave during backward, and token budgets, on two ranks that share one host optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_launcher import run_ranks
from streaming_programs import (
    BUDGETS,
    PLACEMENTS,
    SHARDINGS,
    budgets,
    interrupted,
    steps,
    trained,
    unequal_cards,
    with_and_without_drop,
)
from tiny import max_difference

Results = list[dict[Any, Any]]


@pytest.fixture(scope="module")
def stepped(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_ranks(steps, 2, tmp_path_factory.mktemp("steps"))


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("trained")
    return run_ranks(trained, 2, folder, folder, group_timeout=None, seconds=300.0)


@pytest.fixture(scope="module")
def passes(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("budgets")
    return run_ranks(budgets, 2, folder, folder, group_timeout=None, seconds=300.0)


def assert_same(a: Any, b: Any) -> None:
    """Equal to the last bit, whatever the tensors are nested in."""
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_streamed_steps_have_the_bits_of_gradients_that_left_at_the_end(stepped: Results, sharding: str) -> None:
    for result in stepped:
        device, host = (result[sharding, placement] for placement in PLACEMENTS)
        for key in ("norms", "reduced", "state", "owned_bytes"):
            assert_same(host[key], device[key])
        # The frozen parameter is each rank's own.
        assert_same(host["history"], device["history"])


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_late_gradients_and_errors_of_a_host_thread_reach_every_rank(tmp_path: Any, sharding: str) -> None:
    first, second = run_ranks(interrupted, 2, tmp_path, sharding, group_timeout=10.0)
    for result in (first, second):
        assert result["late"][0] == "SettingsError" and "clip_grad_norm_" in result["late"][1]
        assert result["steps"] == 1
    for call in ("step", "zero_grad"):
        assert second[call][0] == "HostThreadError" and first[call][0] == "RankError"
        assert "Rank 1 failed" in first[call][1] and "HostThreadError" in first[call][1]
    assert_same(first["weights"], second["weights"])


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_step_that_is_dropped_after_its_reduction_leaves_nothing_behind(
    tmp_path: Any, placement: str, set_to_none: bool
) -> None:
    results = run_ranks(with_and_without_drop, 2, tmp_path, placement, set_to_none)
    first, second = (dropped["late"] for dropped, _ in results)
    assert first[0] == "RankError" and "Rank 1 failed" in first[1]
    assert second[0] == "SettingsError" and "clip_grad_norm_" in second[1]
    for dropped, expected in results:
        assert_same(dropped["looked"], expected["own"])
        assert all(g is None if set_to_none else not g.any() for g in dropped["left"])
        assert_same(dropped["weights"], expected["weights"])


@pytest.mark.parametrize("case", ["accumulation", "whole script"])
def test_the_trainer_is_the_same_to_the_last_bit_with_either_placement(trainers: Results, case: str) -> None:
    for result in trainers:
        device, host = (result[case, placement] for placement in PLACEMENTS)
        if case == "accumulation":
            assert [r.pop("settings")["gradient_placement"] for r in (device, host)] == list(PLACEMENTS)
        assert_same(host, device)


def test_the_ranks_stay_equal_through_a_whole_script(trainers: Results) -> None:
    first, second = (result["whole script", "host"] for result in trainers)
    for key in ("best", "resumed", "again"):
        assert max_difference(first[key], second[key]) == 0.0
    assert first["are_casts"] and second["are_casts"] and first["moved"] > 0
    assert "model.safetensors" in first["files"]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("case", BUDGETS)
def test_passes_with_the_host_optimizer_give_ddps_gradient_and_metrics(
    passes: Results, case: str, placement: str
) -> None:
    for result in passes:
        ours, stock = result["ours", case, placement], result["stock", case]
        difference = (ours["gradients"][0] - stock["gradients"][0]).norm() / stock["gradients"][0].norm()
        assert difference <= 1e-6
        assert [entry.keys() for entry in ours["log"]] == [entry.keys() for entry in stock["log"]]
        for step, bound in ((0, 1e-6), (1, 1e-4)):  # Adam amplifies the rounding of small gradients
            for key, value in stock["log"][step].items():
                assert ours["log"][step][key] == pytest.approx(value, rel=bound, abs=bound), key


@pytest.mark.parametrize("case", BUDGETS)
@pytest.mark.parametrize("kind", ["ours", "bf16"])
def test_passes_leave_the_ranks_equal_and_do_not_depend_on_the_placement(
    passes: Results, case: str, kind: str
) -> None:
    first, second = passes
    for placement in PLACEMENTS:
        for key in ("gradients", "weights"):
            assert_same(first[kind, case, placement][key], second[kind, case, placement][key])
    assert_same(first[kind, case, "host"], first[kind, case, "device"])


def test_ranks_whose_cards_differ_agree_on_budget_and_layout(tmp_path: Any) -> None:
    first, second = run_ranks(unequal_cards, 2, tmp_path, tmp_path, group_timeout=None)
    assert first == second
    assert first["memory"] == (4096, "packed")
    assert first["fault"][1] == "trimmed"

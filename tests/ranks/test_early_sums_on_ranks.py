"""Sums over ranks that begin while the last backward runs: the bits of sums that begin afterwards."""

from __future__ import annotations

from typing import Any

import pytest
from early_fault_programs import (
    Program,
    ahead,
    interrupted,
    looks_and_goes_on,
    misused,
    rank_0_fails_to_sum,
    rank_0_is_ahead_and_drops_late,
    rank_1_begins_another,
    rank_1_repeats,
    rank_1_repeats_without_a_word,
)
from early_programs import STEPS, all_steps, refusals, repeated, threads_that_sum, trainers
from rank_launcher import run_ranks
from test_streaming_on_ranks import assert_same

Results = list[dict[Any, Any]]
SHARDINGS = ("sharded", "rank0", "replicated")


@pytest.fixture(scope="module", params=[2, 3])
def stepped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_ranks(all_steps, request.param, tmp_path_factory.mktemp("steps"), SHARDINGS)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_steps_whose_last_backward_is_known_have_the_bits_of_others(stepped: Results, sharding: str) -> None:
    for result in stepped:
        early, late = result[sharding, True], result[sharding, False]
        for key in ("norms", "history", "state"):
            assert_same(early[key], late[key])


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_from_the_second_step_on_every_gradient_that_all_ranks_make_is_summed_early(
    stepped: Results, sharding: str
) -> None:
    for step in range(STEPS):
        names = [name for result in stepped for name in result[sharding, True]["early"][step]]
        assert len(names) == len(set(names)), "each by one rank"
        if step > 0:
            assert len(names) == 7, "all but the frozen one, one without a gradient, and one with rank 0's alone"
        assert not any(result[sharding, False]["early"][step] for result in stepped)


def test_between_nodes_sums_begin_after_the_last_backward(tmp_path: Any) -> None:
    for result in run_ranks(all_steps, 4, tmp_path, ("sharded",), num_nodes=2):
        assert not any(result["sharded", True]["early"])
        for key in ("norms", "history", "state"):
            assert_same(result["sharded", True][key], result["sharded", False][key])


def test_what_would_be_counted_by_one_rank_only_ends_the_step_on_all_and_the_next_is_clean(tmp_path: Any) -> None:
    first, second = run_ranks(refusals, 2, tmp_path)
    for key in ("backward", "by hand", "begin"):
        assert second[key][0] == "SettingsError"
        assert "sum_ranks_during_backward=False" in second[key][1]
        assert first[key][0] in ("RankError", "SettingsError")
        assert "sum_ranks_during_backward=False" in first[key][1]
    for result in (first, second):
        assert_same(result["weights"], result["expected"])


@pytest.mark.parametrize(
    ("misuse", "shapes"),
    [
        (looks_and_goes_on, ()),
        (rank_1_begins_another, ((40, 30),)),  # one parameter, which the other rank sums
        (rank_1_repeats, ()),
        (rank_1_repeats_without_a_word, ()),
        (rank_0_is_ahead_and_drops_late, ()),
        (rank_0_fails_to_sum, ()),
    ],
)
def test_sums_of_gradients_that_are_not_the_step_s_are_refused_on_all_until_the_step_is_dropped(
    tmp_path: Any, misuse: Program, shapes: tuple[tuple[int, ...], ...]
) -> None:
    for result in run_ranks(misused, 2, tmp_path, misuse, *shapes):
        for name, text, _ in result["errors"]:
            assert name in ("RankError", "SettingsError")
            assert "zero_grad() on every rank" in text
            assert "sum_ranks_during_backward=False" in text
        assert_same(result["weights"], result["expected"])


def test_a_rank_that_has_begun_one_more_backward_sums_early_again_after_the_next_step(tmp_path: Any) -> None:
    for result in run_ranks(ahead, 2, tmp_path):
        assert_same(result["weights"], result["expected"])


def test_an_interrupted_step_is_dropped_when_its_sums_have_ended(tmp_path: Any) -> None:
    results = run_ranks(interrupted, 2, tmp_path)
    assert results[0]["interrupts"] == ["interrupted", "interrupted"]
    assert results[0]["has_waited"]
    for result in results:
        assert_same(result["weights"], result["expected"])


def test_a_parameter_with_two_gradients_in_a_backward_is_left_for_later(tmp_path: Any) -> None:
    first, second = run_ranks(repeated, 2, tmp_path)
    assert_same(first["weights"], second["weights"])
    (of_first, of_second) = first["early"]
    assert [len(a) + len(b) for a, b in zip(of_first, of_second, strict=True)] == [0, 1, 1]


def test_early_sums_wait_their_turn_on_the_thread_that_sums_micro_batches(tmp_path: Any) -> None:
    for result in run_ranks(threads_that_sum, 2, tmp_path):
        assert result["early"] == result["background"]
        assert result["late"] and result["background"].isdisjoint(result["late"])


def test_the_trainer_sums_every_gradient_early_but_in_the_first_backward_and_changes_no_bit(tmp_path: Any) -> None:
    results = run_ranks(trainers, 2, tmp_path, tmp_path, group_timeout=None, seconds=300.0)
    for name in ("micro-batches", "passes"):
        for result in results:
            for key in ("history", "log", "state"):
                assert_same(result[name, "host", True][key], result[name, "device", True][key])
                assert_same(result[name, "host", True][key], result[name, "host", False][key])
            assert not result[name, "device", True]["early"] + result[name, "host", False]["early"]
            assert result[name, "host", True]["settings"]["sum_ranks_during_backward"] == "on"
            assert result[name, "device", True]["settings"]["sum_ranks_during_backward"] == "off"
            assert "sum_ranks_during_backward" not in result[name, "host", False]["settings"]
        num_parameters = len(results[0][name, "host", True]["state"])
        per_step = [sum(counts) for counts in zip(*(r[name, "host", True]["early"] for r in results), strict=True)]
        assert per_step == [num_parameters] * len(per_step)
        assert len(per_step) == len(results[0][name, "host", True]["history"])

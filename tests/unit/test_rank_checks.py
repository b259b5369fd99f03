"""What a check finds is raised at once by a process that is alone, and kept until the ranks meet by one of several."""

from __future__ import annotations

from typing import Any

import pytest

from trl_budget.errors import DeviceMemoryError, RankError, StalePolicyError, WeightSyncError
from trl_budget.rank_checks import RankChecks


class FakeRanks:
    """Rank 0 of two, whose other rank says what `other` holds."""

    rank = 0

    def __init__(self, other: str | None = None) -> None:
        self.other = other
        self.said: list[tuple[str, Any, str | None]] = []

    def exchange(self, operation: str, message: Any = None, *, error: str | None = None) -> list[Any]:
        self.said.append((operation, message, error))
        if self.other is not None and error is None:
            raise RankError(self.other)
        return [message, "of rank 1"]

    def failure_of(self, rank: int, operation: str, error: str) -> RankError:
        return RankError(f"{rank} {operation} {error}")


def checks_of(ranks: FakeRanks) -> RankChecks:
    return RankChecks(ranks)  # type: ignore[arg-type]


def test_a_process_alone_raises_at_once_and_exchanges_nothing() -> None:
    checks = RankChecks()
    error = WeightSyncError("lost.")
    with pytest.raises(WeightSyncError) as raised:
        checks.report(error)
    assert raised.value is error
    assert checks.meet("check", 3) == [3]


def test_one_of_several_goes_on_until_the_ranks_meet_and_raises_what_it_found_first() -> None:
    ranks = FakeRanks()
    checks = checks_of(ranks)
    first = WeightSyncError("lost.")
    checks.report(first)
    checks.report(DeviceMemoryError("too much."))
    with pytest.raises(WeightSyncError) as raised:
        checks.meet("check")
    assert raised.value is first
    assert ranks.said == [("check", None, "WeightSyncError: lost.")]


def test_what_was_raised_is_not_said_again() -> None:
    ranks = FakeRanks()
    checks = checks_of(ranks)
    checks.report(WeightSyncError("lost."))
    with pytest.raises(WeightSyncError):
        checks.meet("check")
    assert checks.meet("check", 3) == [3, "of rank 1"]
    assert ranks.said[1] == ("check", 3, None)


def test_both_ranks_raise_their_own_where_both_failed() -> None:
    checks = checks_of(FakeRanks(other="rank 1 failed"))
    checks.report(WeightSyncError("lost."))
    with pytest.raises(WeightSyncError):
        checks.meet("check")


def test_what_another_rank_found_is_raised() -> None:
    with pytest.raises(RankError, match="rank 1 failed"):
        checks_of(FakeRanks(other="rank 1 failed")).meet("check")


@pytest.mark.parametrize(("rank", "kind"), [(0, StalePolicyError), (1, RankError)])
def test_what_all_found_about_one_rank_is_its_own_there_and_a_rank_error_elsewhere(
    rank: int, kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        checks_of(FakeRanks()).raise_for(rank, "check", StalePolicyError("stale."))

"""A rank that fails, dies, differs or stays away: a clear error on every other rank, within the group's timeout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import failure_programs as programs
import pytest
import torch
from rank_launcher import rank_environment, run_ranks

TIMEOUT = 10.0


@pytest.mark.parametrize(
    ("program", "args", "dead"),
    [
        pytest.param(programs.dies_while_stepping, ("sharded",), 0, id="while stepping, sharded"),
        pytest.param(programs.dies_while_stepping, ("rank0",), 0, id="while stepping, rank0"),
        pytest.param(programs.dies_before_the_reduction, (), 1, id="before the reduction"),
    ],
)
def test_a_rank_that_dies_is_named_on_the_others(
    tmp_path: Path, program: Any, args: tuple[str, ...], dead: int
) -> None:
    results = run_ranks(program, 2, tmp_path, *args, group_timeout=TIMEOUT, may_die=(dead,))
    assert results[dead] is None
    kind, message, seconds = results[1 - dead]
    assert kind == "RankError" and seconds < TIMEOUT + 3
    assert f"ank {1 - dead}" in message and "resume" in message


def test_an_error_while_stepping_is_raised_on_every_rank(tmp_path: Path) -> None:
    first, second = run_ranks(programs.fails_while_stepping, 2, tmp_path, group_timeout=TIMEOUT)
    assert second[:2] == ("SettingsError", "the reason of rank 1.")
    assert first[0] == "RankError" and "Rank 1 failed" in first[1] and "the reason of rank 1." in first[1]
    assert first[2] < TIMEOUT
    assert all(torch.equal(a, b) for a, b in zip(first[3], second[3], strict=True)), "the step after was not received"


def test_a_rank_that_stays_away_costs_the_timeout_and_no_more(tmp_path: Path) -> None:
    kind, message, seconds = run_ranks(programs.does_not_come, 2, tmp_path, 12.0, group_timeout=3.0)[0]
    assert kind == "RankError" and 2.0 < seconds < 10.0
    assert "'reduce gradients'" in message and "ddp_timeout" in message


def test_memory_refused_on_one_rank_is_an_error_on_both(tmp_path: Path) -> None:
    first, second = run_ranks(programs.refused_on_rank_1, 2, tmp_path, group_timeout=TIMEOUT)
    assert second[0] == "HostMemoryError" and "2 ranks on one node" in second[1]
    assert first[0] == "RankError" and "HostMemoryError" in first[1] and "Rank 1 failed" in first[1]


def test_ranks_that_differ_are_refused_on_both(tmp_path: Path) -> None:
    expected = {
        "shape": ("of shape (5,)", "of shape (6,)"),
        "number": ("of shape (5,)", "nothing"),
        "dtype": ("as float32", "as bfloat16"),
        "sharding": ("rank0", "sharded"),
    }
    for result in run_ranks(programs.differs_on_rank_1, 2, tmp_path, group_timeout=TIMEOUT):
        for what, words in expected.items():
            kind, message, _ = result[what]
            assert kind == "SettingsError", what
            assert all(word in message for word in words), message


def test_nodes_of_different_size_are_refused_on_every_rank(tmp_path: Path) -> None:
    environments = [rank_environment(rank, 4, 2, 0) | {"WORLD_SIZE": "3"} for rank in range(3)]
    results = run_ranks(
        programs.nodes_of_different_size, 3, tmp_path, group_timeout=TIMEOUT, environments=environments
    )
    for kind, message, _ in results:
        assert kind == "SettingsError" and "2, 1 processes" in message


def test_shared_memory_is_gone_when_the_ranks_are_killed(tmp_path: Path) -> None:
    run_ranks(programs.waits_to_be_killed, 2, tmp_path, tmp_path, group_timeout=TIMEOUT, may_die=(0,))
    for rank in range(2):
        maps = (tmp_path / f"maps-{rank}").read_text().splitlines()
        assert len(maps) >= 6 and all("(deleted)" in line for line in maps), (
            "a file with a name would outlive its ranks"
        )
    assert not list(Path("/dev/shm").glob("trl-budget-*"))

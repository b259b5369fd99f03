"""Pieces of the several-rank step that one process can check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import BASE_SETTINGS

from trl_budget import BudgetGRPOConfig, HostAdamW, SettingsError
from trl_budget.checkpoints import without_optimizer
from trl_budget.ranks import NodeLayout, node_name
from trl_budget.sharding import resolve_optimizer_sharding
from trl_budget.shared_state import SharedSlot
from trl_budget.team import Arrivals


def slot(stepper: int, progress: int) -> Any:
    zeros = torch.zeros(1)
    parameter = torch.nn.Parameter(zeros.clone())
    return SharedSlot(
        parameter, "", zeros, zeros, zeros, zeros, zeros, stepper=stepper, progress=torch.tensor(progress)
    )


def test_weights_are_taken_while_their_rank_still_steps_the_next_ones() -> None:
    done, late, other = slot(1, 7), slot(1, 6), slot(2, 7)
    arrivals = Arrivals([done, late, other], 7, None)
    assert set(arrivals.ready()) == {done, other}
    assert list(arrivals.ready()) == []
    late.progress.fill_(7)
    assert list(arrivals.ready()) == [late]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ([{"GROUP_RANK": str(r // 2)} for r in range(4)], ((0, 1), (2, 3))),
        ([{"LOCAL_WORLD_SIZE": "2"} for _ in range(4)], ((0, 1), (2, 3))),
        ([{"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0", "GROUP_RANK": "0"} for _ in range(2)], ((0, 1),)),
        ([{} for _ in range(3)], ((0, 1, 2),)),
        ([{"GROUP_RANK": str(r % 2)} for r in range(4)], ((0, 2), (1, 3))),
    ],
    ids=["torchrun", "numbered node by node", "two ranks on one card", "one machine", "interleaved"],
)
def test_nodes_are_found_from_the_launcher(
    environment: list[dict[str, str]], expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []
    for rank, variables in enumerate(environment):
        for name in ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        names.append(node_name(rank))
    assert NodeLayout.of(names).nodes == expected


def test_an_unknown_sharding_is_refused_by_name(tmp_path: Path) -> None:
    for build in (
        lambda: BudgetGRPOConfig(str(tmp_path), optimizer_sharding="zero3", **BASE_SETTINGS),
        lambda: HostAdamW([torch.nn.Parameter(torch.ones(2))], sharding="zero3"),
    ):
        with pytest.raises(SettingsError, match=r"'zero3'.*auto, replicated, rank0, sharded"):
            build()


def test_one_rank_owns_everything_whatever_was_asked() -> None:
    assert {resolve_optimizer_sharding(name, 1) for name in ("auto", "replicated", "rank0", "sharded")} == {"sharded"}
    assert resolve_optimizer_sharding("auto", 2) == "sharded"


def test_stocks_loader_sees_everything_of_a_checkpoint_but_the_optimizer(tmp_path: Path) -> None:
    for name in ("optimizer.pt", "scheduler.pt", "entropy_ctrl_state.json"):
        (tmp_path / name).write_text(name)
    with without_optimizer(str(tmp_path)) as folder:
        assert {path.name for path in Path(folder).iterdir()} == {"scheduler.pt", "entropy_ctrl_state.json"}
        assert (Path(folder) / "scheduler.pt").read_text() == "scheduler.pt"
    assert (tmp_path / "optimizer.pt").exists() and (tmp_path / "scheduler.pt").exists()

"""Gradients back in `parameter.grad` on several ranks: own sums before they are reduced, the mean afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adamw_programs import FROZEN, LEARNING_RATE, NOWHERE, SHAPES, start_weights
from gradient_edit_programs import DROPPED, EDITED, LOCAL, MAX_NORM, edit_all
from rank_launcher import run_ranks
from test_shared_step import sum_of_passes
from torch import Tensor
from torch.nn import Parameter

SHARDED = [("sharded", torch.float32), ("sharded", torch.bfloat16)]
CASES = [*SHARDED, ("replicated", torch.bfloat16), ("rank0", torch.bfloat16)]
LAYOUTS = {"one node": 1, "two nodes": 2}


@pytest.fixture(scope="module", params=LAYOUTS.values(), ids=LAYOUTS.keys())
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return run_ranks(edit_all, 2, tmp_path_factory.mktemp("ranks"), CASES, num_nodes=request.param)


def cast(gradient: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if gradient is None else gradient.to(dtype)


def assert_same(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert (a is None) == (b is None), index
        assert a is None or torch.equal(a, b), index


def clipped_mean(dtype: torch.dtype, norm: Tensor) -> list[Tensor | None]:
    """Of the ranks' sums, of which rank 1 has zeroed one."""
    coefficient = torch.clamp(MAX_NORM / (norm + 1e-6), max=1.0)
    gradients: list[Tensor | None] = []
    for index in range(len(SHAPES)):
        sums = [sum_of_passes(0, rank, index, dtype) for rank in range(2)]
        if index == LOCAL:
            sums[1] = torch.zeros(SHAPES[index])
        there = [s for s in sums if s is not None]
        gradients.append(sum(there[1:], there[0]) / 2 * coefficient if there else None)
    return gradients


def edited(gradients: list[Tensor | None]) -> list[Tensor | None]:
    gradients = [None if g is None else g.clone() for g in gradients]
    gradients[EDITED][5:9] = 0
    gradients[DROPPED] = None
    gradients[NOWHERE] = torch.full(SHAPES[NOWHERE], 0.5)
    return gradients


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{str(case[1]).removeprefix('torch.')}")
def test_own_sums_before_the_mean_after_and_edits_are_stepped(
    ranks: list[dict[Any, Any]], case: tuple[str, torch.dtype]
) -> None:
    dtype = case[1]
    mean = clipped_mean(dtype, ranks[0][case]["norm"])
    twins = [Parameter(p.detach().float()) for p in start_weights(0, dtype)]
    for twin, gradient in zip(twins, edited(mean), strict=True):
        twin.grad = gradient
    torch.optim.AdamW(twins, lr=LEARNING_RATE, fused=True).step()
    for rank, result in enumerate(ranks):
        assert_same(result[case]["own"], [cast(sum_of_passes(0, rank, i, dtype), dtype) for i in range(len(SHAPES))])
        assert_same(result[case]["mean"], [cast(gradient, dtype) for gradient in mean])
        assert_same(result[case]["gradients"], edited(mean))
        expected = torch.nn.utils.get_total_norm([g for g in edited(mean) if g is not None])
        assert result[case]["after"].item() == pytest.approx(expected.item(), rel=1e-6)
        for index, twin in enumerate(twins):
            if index != FROZEN:
                assert torch.equal(result[case]["masters"][index], twin.detach()), index
                assert torch.equal(result[case]["weights"][index], twin.detach().to(dtype)), index


def test_zero_grad_after_clipping_leaves_nothing_to_step(ranks: list[dict[Any, Any]]) -> None:
    assert [result["zeroed"] for result in ranks] == [True, True]


def test_edits_that_differ_between_ranks_are_refused_on_all_of_them(ranks: list[dict[Any, Any]]) -> None:
    for result in ranks:
        assert "differs between ranks 0 and 1" in result["differ"]
        assert "Make the same edits on every rank" in result["differ"]


@pytest.mark.parametrize("sharding", ["sharded", "replicated", "rank0"])
def test_weights_swapped_in_for_a_save_cost_the_masters_no_bit(ranks: list[dict[Any, Any]], sharding: str) -> None:
    for result in ranks:
        swapped = result["swapped", sharding]
        assert all(values.to(torch.bfloat16).eq(0.25).all() for values in swapped["during"])
        assert_same(swapped["after"], swapped["before"])
        assert swapped["adopted"] == []
        assert any(not torch.equal(v, v.to(torch.bfloat16).float()) for v in swapped["before"]), "low bits to lose"

"""One optimizer for all ranks: every rank gets the bits of one `torch.optim.AdamW` that steps the mean gradient.

Ranks start from different weights, run different numbers of passes, and hold gradients of different sizes; one
parameter has gradients on rank 0 only, one nowhere, one is frozen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adamw_programs import (
    FROZEN,
    LEARNING_RATE,
    NOWHERE,
    SHAPES,
    groups_of,
    max_norm_of,
    measure_in_rows,
    num_passes,
    pass_gradients,
    start_weights,
    train_all,
)
from rank_launcher import run_ranks
from torch import Tensor
from torch.nn import Parameter

SHARDINGS = ("auto", "replicated", "rank0", "sharded")
DTYPES = (torch.float32, torch.bfloat16)
CASES = [(sharding, dtype) for sharding in SHARDINGS for dtype in DTYPES]
LAYOUTS = {"2 ranks": (2, 1), "4 ranks": (4, 1), "2 nodes of 2 ranks": (4, 2)}


@pytest.fixture(scope="module", params=LAYOUTS.values(), ids=LAYOUTS.keys())
def layout(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    num_ranks, num_nodes = request.param
    folder = tmp_path_factory.mktemp("ranks")
    return request.param, run_ranks(train_all, num_ranks, folder, SHARDINGS, DTYPES, num_nodes=num_nodes)


def sum_of_passes(step: int, rank: int, index: int, dtype: torch.dtype) -> Tensor | None:
    passes = [pass_gradients(step, rank, number, dtype)[index] for number in range(num_passes(step, rank))]
    if passes[0] is None:
        return None
    total = passes[0].float()
    for gradient in passes[1:]:
        total = total + gradient.float()
    return total


def mean_gradient(step: int, index: int, dtype: torch.dtype, num_ranks: int, num_nodes: int) -> Tensor | None:
    """Summed in rank order on each node, then over nodes, in fp32, and divided."""
    per_node = num_ranks // num_nodes
    sums = [sum_of_passes(step, rank, index, dtype) for rank in range(num_ranks)]
    if all(s is None for s in sums):
        return None
    sums = [torch.zeros(SHAPES[index]) if s is None else s for s in sums]
    nodes = [sums[node * per_node : (node + 1) * per_node] for node in range(num_nodes)]
    totals = []
    for ranks in nodes:
        total = ranks[0].clone()
        for s in ranks[1:]:
            total += s
        totals.append(total)
    return torch.stack(totals).sum(0) / num_ranks if num_nodes > 1 else totals[0] / num_ranks


def stock_run(
    dtype: torch.dtype, num_ranks: int, num_nodes: int
) -> tuple[list[Parameter], list[list[Tensor]], list[Tensor]]:
    """Rank 0's weights in fp32, stepped by torch's AdamW."""
    twins = [Parameter(p.detach().float(), requires_grad=p.requires_grad) for p in start_weights(0, dtype)]
    stock = torch.optim.AdamW(groups_of(twins), lr=LEARNING_RATE, fused=True)
    history, norms = [], []
    for step in range(5):
        for index, twin in enumerate(twins):
            twin.grad = None if index == FROZEN else mean_gradient(step, index, dtype, num_ranks, num_nodes)
        if (max_norm := max_norm_of(step)) is not None:
            norms.append(torch.nn.utils.clip_grad_norm_(twins, max_norm))
        stock.step()
        history.append([twin.detach().clone() for twin in twins])
    return twins, history, norms


@pytest.mark.parametrize(("sharding", "dtype"), CASES)
def test_every_rank_has_the_weights_of_rank_0_after_every_step(layout: Any, sharding: str, dtype: torch.dtype) -> None:
    _, results = layout
    for rank, result in enumerate(results):
        for index in range(len(SHAPES)):
            if index != FROZEN:
                ours, first = result[sharding, dtype]["start"][index], start_weights(0, dtype)[index].detach()
                assert torch.equal(ours, first), f"rank {rank} starts parameter {index} from other weights"
        for step, weights in enumerate(result[sharding, dtype]["history"]):
            for index, (ours, first) in enumerate(
                zip(weights, results[0][sharding, dtype]["history"][step], strict=True)
            ):
                assert index == FROZEN or torch.equal(ours, first), f"rank {rank}, step {step}, parameter {index}"


@pytest.mark.parametrize(("sharding", "dtype"), CASES)
def test_weights_masters_and_moments_are_those_of_stock_adamw(layout: Any, sharding: str, dtype: torch.dtype) -> None:
    (num_ranks, num_nodes), results = layout
    _, history, norms = stock_run(dtype, num_ranks, num_nodes)
    for result in (result[sharding, dtype] for result in results):
        assert torch.equal(torch.stack(result["norms"]), torch.stack(norms))
        for step, weights in enumerate(result["history"]):
            for index, weight in enumerate(weights):
                expected = history[step][index].to(dtype)
                assert index == FROZEN or torch.equal(weight, expected), f"step {step}, parameter {index}"
        for index, entry in result["state"].items():
            assert torch.equal(entry["master_weights"], history[-1][index])
            assert entry["step"].item() == (0 if index == NOWHERE else 5)


@pytest.mark.parametrize(("sharding", "dtype"), CASES)
def test_the_reduced_gradient_is_that_of_one_process(layout: Any, sharding: str, dtype: torch.dtype) -> None:
    """One process that ran all ranks' passes, in fp64."""
    (num_ranks, _), results = layout
    step = 2  # clipped without binding
    for index in range(len(SHAPES)):
        ours = results[1][sharding, dtype]["reduced"][1][index]
        sums = [sum_of_passes(step, rank, index, dtype) for rank in range(num_ranks)]
        if index in (FROZEN, NOWHERE):
            assert ours is None
            continue
        expected = torch.stack([s.double() for s in sums if s is not None]).sum(0) / num_ranks
        assert (ours - expected).norm() / expected.norm() <= 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_rank_owns_its_share_of_the_optimizer(layout: Any, dtype: torch.dtype) -> None:
    (num_ranks, num_nodes), results = layout
    per_node = num_ranks // num_nodes
    sizes = [torch.Size(shape).numel() for index, shape in enumerate(SHAPES) if index != FROZEN]
    for rank, result in enumerate(results):
        assert result["replicated", dtype]["owned_bytes"] == 12 * sum(sizes)
        assert result["rank0", dtype]["owned_bytes"] == (12 * sum(sizes) if rank % per_node == 0 else 0)
        assert abs(result["sharded", dtype]["owned_bytes"] - 12 * sum(sizes) / per_node) <= 12 * max(sizes)
    owned = sum(result["sharded", dtype]["owned_bytes"] for result in results)
    assert owned == 12 * sum(sizes) * num_nodes


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_norms_measured_in_rows_are_accurate_and_the_same_on_all_ranks(num_nodes: int, tmp_path: Path) -> None:
    """As for parameters on a GPU; the norm comes with the sum on one node, and after it on two."""
    results = run_ranks(measure_in_rows, 4, tmp_path, SHARDINGS, num_nodes=num_nodes)
    gradients = [
        [pass_gradients(0, rank, 0, torch.bfloat16)[index] for rank in range(4)] for index in range(len(SHAPES))
    ]
    means = [sum(g.double() for g in ranks if g is not None) / 4 for ranks in gradients if ranks[0] is not None]
    norm = torch.stack([mean.norm() for mean in means]).norm()
    expected = [norm.item(), 1.0, (means[6].norm() / norm).item()]
    for result in results:
        for sharding in SHARDINGS:
            assert [n.item() for n in result[sharding]] == pytest.approx(expected, rel=4e-6)
            assert result[sharding] == results[0]["auto"]

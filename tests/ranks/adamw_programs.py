"""What each rank runs in the tests of `HostAdamW` over several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from trl_budget import HostAdamW, gradient_norm, rank_sums

SHAPES = ((1,), (17,), (1025,), (33, 7), (), (4, 3, 5), (700, 401), (64, 9), (5,), (3,))
FROZEN, NOWHERE, ON_RANK_0 = 7, 8, 9  # indices of a frozen parameter and of those with gradients nowhere, on rank 0
LEARNING_RATE = 1e-3


def start_weights(rank: int, dtype: torch.dtype) -> list[Parameter]:
    generator = torch.Generator().manual_seed(100 + rank)
    parameters = [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    parameters[FROZEN].requires_grad_(False)
    return parameters


def pass_gradients(step: int, rank: int, number: int, dtype: torch.dtype) -> list[Tensor | None]:
    """The gradients of one backward; ranks differ in size and in which parameters take part."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * rank + number)
    gradients = [(torch.randn(shape, generator=generator) * (1 + rank)).to(dtype) for shape in SHAPES]
    absent = {FROZEN, NOWHERE} | ({ON_RANK_0} if rank != 0 else set())
    return [None if index in absent else gradient for index, gradient in enumerate(gradients)]


def num_passes(step: int, rank: int) -> int:
    return 1 + (step + rank) % 3


def groups_of(parameters: list[Parameter]) -> list[dict[str, Any]]:
    return [{"params": parameters[:4], "weight_decay": 0.1}, {"params": parameters[4:], "lr": LEARNING_RATE / 2}]


def backward(parameters: list[Parameter], gradients: list[Tensor | None]) -> None:
    torch.stack(
        [(p * g).sum().float() for p, g in zip(parameters, gradients, strict=True) if g is not None]
    ).sum().backward()


def max_norm_of(step: int) -> float | None:
    """Not clipped, clipping that binds, clipping that does not, in turn."""
    return (None, 1.0, 1e6)[step % 3]


def bits(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def train(
    sharding: str,
    dtype: torch.dtype,
    steps: int = 5,
    *,
    gradient_placement: str = "auto",
    prepare: Callable[[HostAdamW], None] | None = None,
) -> dict[str, Any]:
    rank = dist.get_rank()
    parameters = start_weights(rank, dtype)
    optimizer = HostAdamW(
        groups_of(parameters), lr=LEARNING_RATE, sharding=sharding, gradient_placement=gradient_placement
    )
    if prepare is not None:
        prepare(optimizer)
    start = bits(parameters)
    norms, history, reduced = [], [], []
    for step in range(steps):
        for number in range(num_passes(step, rank)):
            backward(parameters, pass_gradients(step, rank, number, dtype))
        if (max_norm := max_norm_of(step)) is not None:
            norms.append(optimizer.clip_grad_norm_(max_norm))
            gradients = [optimizer.gradient(p) if p.requires_grad else None for p in parameters]
            reduced.append([None if g is None else g.clone() for g in gradients])
        optimizer.step()
        history.append(bits(parameters))
    entries = optimizer.state_dict()["state"]
    return {
        "start": start,
        "norms": norms,
        "history": history,
        "reduced": reduced,
        "state": {index: {k: v.clone() for k, v in entry.items()} for index, entry in entries.items()},
        "owned_bytes": optimizer.owned_bytes,
        "host_bytes": optimizer.host_bytes,
    }


def train_all(shardings: tuple[str, ...], dtypes: tuple[torch.dtype, ...]) -> dict[Any, Any]:
    return {(sharding, dtype): train(sharding, dtype) for sharding in shardings for dtype in dtypes}


def measure_in_rows(shardings: tuple[str, ...]) -> dict[str, list[Tensor]]:
    """Norms of three clips in one step, the first of which binds, as for GPU parameters and in several chunks."""
    gradient_norm.is_measured_in_rows = rank_sums.is_measured_in_rows = lambda _: True
    rank_sums.CHUNK_ELEMENTS = 4 * gradient_norm.ROW_ELEMENTS
    norms = {}
    for sharding in shardings:
        parameters = start_weights(dist.get_rank(), torch.bfloat16)
        optimizer = HostAdamW(parameters, sharding=sharding)
        backward(parameters, pass_gradients(0, dist.get_rank(), 0, torch.bfloat16))
        norms[sharding] = [optimizer.clip_grad_norm_(max_norm) for max_norm in (1.0, 1e6)]
        norms[sharding].append(optimizer.clip_grad_norm_(1e6, parameters[6]))
    return norms

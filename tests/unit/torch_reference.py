"""The independent expectation of the unit tests: `torch.optim.AdamW` stepping plain fp32 twins of the parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

STOCK_FLAGS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False, "fused": False}}
MIXED_SHAPES = ((1,), (17,), (1025,), (33, 7), (), (4, 3, 5))

Gradients = Sequence[Tensor | None]


def random_parameters(shapes: Iterable[tuple[int, ...]], dtype: torch.dtype, seed: int = 0) -> list[Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def fp32_twins(parameters: Iterable[Parameter]) -> list[Parameter]:
    return [Parameter(p.detach().float().clone(), requires_grad=p.requires_grad) for p in parameters]


def stock_adamw(params: Any, implementation: str, **settings: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, **STOCK_FLAGS[implementation], **settings)


def random_gradients(parameters: Iterable[Parameter], seed: int) -> list[Tensor | None]:
    """One gradient per parameter in the parameter's dtype; None where it is frozen."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return [torch.randn(p.shape, generator=generator).to(p.dtype) if p.requires_grad else None for p in parameters]


def backward(parameters: Iterable[Parameter], gradients: Gradients) -> Tensor:
    """A real backward whose gradients are exactly `gradients`; they are converted to the parameter's dtype."""
    pairs = zip(parameters, gradients, strict=True)
    loss = torch.stack([(p * g.to(p.dtype)).sum().float() for p, g in pairs if g is not None]).sum()
    loss.backward()
    return loss


def train_pair(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[Parameter],
    stock: torch.optim.Optimizer,
    twins: Sequence[Parameter],
    steps: Iterable[int] = range(5),
    max_norm: float | None = None,
) -> None:
    """Steps both optimizers with the same gradients, one after the other."""
    for step in steps:
        gradients = random_gradients(parameters, step)
        backward(parameters, gradients)
        if max_norm is not None:
            optimizer.clip_grad_norm_(max_norm)
        optimizer.step()
        optimizer.zero_grad()
        backward(twins, gradients)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(twins, max_norm)
        stock.step()
        stock.zero_grad()


def assert_same_bits(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[Parameter],
    stock: torch.optim.Optimizer,
    twins: Sequence[Parameter],
) -> None:
    """Weights, masters, moments and step counts, each with a difference of exactly zero."""
    for index, (parameter, twin) in enumerate(zip(parameters, twins, strict=True)):
        assert torch.equal(parameter.detach(), twin.detach().to(parameter.dtype)), f"weights of parameter {index}"
        ours, expected = optimizer.state.get(parameter), stock.state.get(twin)
        if ours is None:
            assert not expected, f"parameter {index} has no state"
            continue
        assert torch.equal(ours["master_weights"], twin.detach()), f"master weights of parameter {index}"
        for key in ("step", "exp_avg", "exp_avg_sq"):
            value = expected[key] if expected else torch.zeros_like(ours[key])  # torch makes state with the gradient
            assert ours[key].dtype == torch.float32
            assert torch.equal(ours[key], value), f"{key} of parameter {index}"

"""Gradients of several backwards are summed in fp32 on the host, and nothing of an earlier step gets in."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint
from torch_reference import (
    assert_same_bits,
    backward,
    fp32_twins,
    random_gradients,
    random_parameters,
    stock_adamw,
)

from trl_budget import host_adamw
from trl_budget.errors import SettingsError
from trl_budget.host_adamw import HostAdamW

NUM_BACKWARDS = 16
SHAPES = ((1025,), (33, 7), ())


@pytest.fixture(autouse=True, params=["device", "host"], ids=["at the end of backward", "streamed"])
def _gradient_placement(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test of this file holds for both."""
    chosen = functools.partial(host_adamw.HostAdamW, gradient_placement=request.param)
    monkeypatch.setattr(sys.modules[__name__], "HostAdamW", chosen)
    monkeypatch.setenv("TRL_BUDGET_HOST_THREADS", "3")


def bf16_gradients(seed: int) -> list[Tensor]:
    """One pass's gradients: a common part, so that sums grow and bf16 sums lose low bits."""
    generator = torch.Generator().manual_seed(seed)
    return [(1 + torch.randn(shape, generator=generator)).to(torch.bfloat16) for shape in SHAPES]


def global_error(sums: list[Tensor], exact: list[Tensor]) -> float:
    difference = torch.cat([(a.double() - b).flatten() for a, b in zip(sums, exact, strict=True)])
    return float(difference.norm() / torch.cat([b.flatten() for b in exact]).norm())


def poison(optimizer: HostAdamW, parameter: Parameter) -> None:
    """Fills the accumulator with NaN where it lies; it is only stale content to a correct optimizer."""
    accumulator = optimizer._slots[parameter].accumulator
    assert accumulator is not None
    accumulator.fill_(torch.nan)


def test_sixteen_backwards_are_summed_in_fp32() -> None:
    parameters = random_parameters(SHAPES, torch.bfloat16)
    optimizer = HostAdamW(parameters)
    passes = [bf16_gradients(seed) for seed in range(NUM_BACKWARDS)]
    for gradients in passes:
        backward(parameters, gradients)
    exact = [torch.stack(column).double().sum(0) for column in zip(*passes, strict=True)]
    in_bf16 = [column[0].clone() for column in zip(*passes, strict=True)]
    for gradients in passes[1:]:
        for total, gradient in zip(in_bf16, gradients, strict=True):
            total.add_(gradient)
    error = global_error([optimizer.gradient(p) for p in parameters], exact)
    assert error < 1e-6
    assert global_error(in_bf16, exact) > 1000 * error


def test_the_gradient_of_one_backward_is_exact() -> None:
    parameters = random_parameters(SHAPES, torch.bfloat16)
    optimizer = HostAdamW(parameters)
    gradients = bf16_gradients(seed=0)
    backward(parameters, gradients)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert optimizer.gradient(parameter).dtype == torch.float32
        assert torch.equal(optimizer.gradient(parameter), gradient.float())


def test_a_long_gradient_is_summed_over_every_chunk() -> None:
    parameter = Parameter(torch.zeros(2**25 + 3, dtype=torch.bfloat16))  # one download chunk is 2**25 elements
    optimizer = HostAdamW([parameter])
    for _ in range(2):
        parameter.grad = torch.ones_like(parameter)
        optimizer.gradient(parameter)
    num_wrong = int((optimizer.gradient(parameter) != 2).sum())  # not within assert: pytest would explain 2**25 values
    assert num_wrong == 0


def test_a_bf16_gradient_is_gone_from_the_parameter_after_backward() -> None:
    parameters = random_parameters(SHAPES, torch.bfloat16)
    optimizer = HostAdamW(parameters)
    backward(parameters, bf16_gradients(seed=0))
    assert [p.grad for p in parameters] == [None] * len(SHAPES)
    assert optimizer.gradient(parameters[0]) is not None


def test_an_fp32_gradient_on_the_cpu_stays_in_the_parameter() -> None:
    parameters = random_parameters(SHAPES, torch.float32)
    optimizer = HostAdamW(parameters)
    gradients = bf16_gradients(seed=0)
    backward(parameters, gradients)
    optimizer.step()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert torch.equal(parameter.grad, gradient.float())


def skipped_step(optimizer: HostAdamW) -> None:
    [parameter] = optimizer.param_groups[0]["params"]
    parameter.grad = torch.full_like(parameter, torch.nan)
    optimizer.step()
    assert optimizer.num_consecutive_skipped_steps == 1


@pytest.mark.parametrize(
    "end_step",
    [
        pytest.param(lambda optimizer: optimizer.step(), id="a step"),
        pytest.param(skipped_step, id="a skipped step"),
        pytest.param(lambda optimizer: optimizer.zero_grad(), id="zero_grad"),
        pytest.param(lambda optimizer: (optimizer.clip_grad_norm_(0.1), optimizer.zero_grad()), id="clip, zero_grad"),
        pytest.param(lambda optimizer: optimizer.load_state_dict(optimizer.state_dict()), id="loading a state"),
    ],
)
def test_the_first_gradient_of_a_step_replaces_what_was_left_by(end_step: Callable[[HostAdamW], object]) -> None:
    [parameter] = random_parameters([(33, 7)], torch.bfloat16)
    optimizer = HostAdamW([parameter])
    backward([parameter], [torch.full((33, 7), 3.0)])
    end_step(optimizer)
    assert optimizer.gradient(parameter) is None
    poison(optimizer, parameter)
    backward([parameter], [torch.full((33, 7), 0.5)])
    assert torch.equal(optimizer.gradient(parameter), torch.full((33, 7), 0.5))


def test_a_parameter_left_out_of_one_step_is_not_stepped_with_its_old_gradient() -> None:
    parameters = random_parameters([(17,), (17,)], torch.bfloat16)
    optimizer = HostAdamW(parameters)
    backward(parameters, [torch.ones(17), torch.ones(17)])
    optimizer.step()
    optimizer.zero_grad()
    before = optimizer.state[parameters[1]]["master_weights"].clone()
    backward(parameters, [torch.ones(17), None])
    optimizer.step()
    assert torch.equal(optimizer.state[parameters[1]]["master_weights"], before)
    assert optimizer.state[parameters[1]]["step"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("drops_first", [False, True], ids=["", "after zero_grad to None"])
@pytest.mark.parametrize("clip", [False, True], ids=["unclipped", "clipped"])
def test_gradients_set_to_zero_are_stepped_as_zeros_where_torch_has_them(
    clip: bool, drops_first: bool, dtype: torch.dtype
) -> None:
    """Of three parameters one is always used, one in the first step only, one never."""
    parameters = random_parameters([(17,), (33, 7), (5,)], dtype)
    twins = fp32_twins(parameters)
    optimizer, stock = HostAdamW(parameters, lr=1e-2), stock_adamw(twins, "fused", lr=1e-2)
    for weights, stepper in ((parameters, optimizer), (twins, stock)):
        for step in range(4):
            gradients = random_gradients(parameters, step)
            backward(weights, [gradients[0], gradients[1] if step == 0 else None, None])
            if clip:
                optimizer.clip_grad_norm_(0.5) if stepper is optimizer else clip_grad_norm_(twins, 0.5)
            stepper.step()
            if drops_first and step == 1:
                stepper.zero_grad()
            stepper.zero_grad(set_to_none=False)
    assert_same_bits(optimizer, parameters, stock, twins)
    assert [stock.state[twin].get("step") for twin in twins] == [4, 2 if drops_first else 4, None]
    assert optimizer.gradient(parameters[2]) is None


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        raise ArithmeticError("on purpose")


def test_a_backward_after_one_that_failed_midway_gives_its_own_gradients() -> None:
    late, early = random_parameters([(17,), (17,)], torch.bfloat16)
    optimizer = HostAdamW([late, early])
    with pytest.raises(ArithmeticError, match="on purpose"):
        (FailsInBackward.apply(late * 2) * early).sum().backward()
    optimizer.zero_grad()
    for parameter in (late, early):
        poison(optimizer, parameter)
    backward([late, early], [torch.full((17,), 2.0), torch.full((17,), 3.0)])
    assert late.grad is None and early.grad is None
    assert torch.equal(optimizer.gradient(late), torch.full((17,), 2.0))
    assert torch.equal(optimizer.gradient(early), torch.full((17,), 3.0))


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_checkpointing_gives_the_gradients_of_torch(use_reentrant: bool) -> None:
    def gradients(with_host_adamw: bool) -> list[Tensor]:
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Linear(8, 8, dtype=torch.bfloat16) for _ in range(3))
        optimizer = HostAdamW(layers.parameters()) if with_host_adamw else None
        hidden = torch.randn(4, 8).to(torch.bfloat16).requires_grad_()
        for layer in layers:
            hidden = checkpoint(nn.Sequential(layer, nn.Tanh()), hidden, use_reentrant=use_reentrant)
        hidden.sum().backward()
        return [optimizer.gradient(p) if optimizer else p.grad.float() for p in layers.parameters()]

    for ours, expected in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_a_weight_shared_by_checkpointed_blocks_gets_the_sum_of_its_uses(use_reentrant: bool) -> None:
    weight = Parameter(torch.full((5,), 2.0, dtype=torch.bfloat16))
    optimizer = HostAdamW([weight])
    inputs = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=torch.bfloat16, requires_grad=True)
    hidden = checkpoint(lambda x: x * weight, inputs, use_reentrant=use_reentrant)
    checkpoint(lambda x: x * weight, hidden, use_reentrant=use_reentrant).sum().backward()
    assert weight.grad is None
    assert torch.equal(optimizer.gradient(weight), 2 * 2.0 * inputs.detach().float())  # d(x w^2)/dw = 2 x w


def test_a_tied_weight_gets_the_sum_of_its_uses() -> None:
    embedding = nn.Embedding(4, 3, dtype=torch.bfloat16)
    head = nn.Linear(3, 4, bias=False, dtype=torch.bfloat16)
    head.weight = embedding.weight
    nn.init.ones_(embedding.weight)
    optimizer = HostAdamW([*embedding.parameters()])
    head(embedding(torch.tensor([2]))).sum().backward()
    expected = torch.ones(4, 3)  # as head: every row gets the embedded ones
    expected[2] += 4  # as embedding: row 2 gets the sum over four output rows of ones
    assert torch.equal(optimizer.gradient(embedding.weight), expected)


def test_a_gradient_set_by_hand_is_added_to_that_of_backward() -> None:
    [parameter] = random_parameters([(17,)], torch.bfloat16)
    optimizer = HostAdamW([parameter])
    backward([parameter], [torch.full((17,), 2.0)])
    parameter.grad = torch.full((17,), 2.0**-9, dtype=torch.bfloat16)  # lost if added in bf16
    assert torch.equal(optimizer.gradient(parameter), torch.full((17,), 2.0 + 2.0**-9))
    assert parameter.grad is None


@pytest.mark.parametrize("num_passes", [1, 2])
def test_gradients_that_are_not_contiguous_are_summed_by_index(num_passes: int) -> None:
    [parameter] = random_parameters([(3, 4)], torch.bfloat16)
    optimizer = HostAdamW([parameter])
    gradient = torch.arange(12.0).view(4, 3).t()
    for _ in range(num_passes):
        parameter.grad = gradient.to(torch.bfloat16)
        assert not parameter.grad.is_contiguous()
        optimizer.gradient(parameter)
    assert torch.equal(optimizer.gradient(parameter), num_passes * gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_sparse_gradient_is_refused_by_name(dtype: torch.dtype) -> None:
    embedding = nn.Embedding(5, 4, sparse=True, dtype=dtype)
    optimizer = HostAdamW(embedding.named_parameters())
    with pytest.raises(SettingsError, match=r"weight has a sparse gradient.*sparse=False"):
        embedding(torch.tensor([1, 2])).sum().backward()
        optimizer.step()


def test_a_parameter_unfrozen_after_construction_is_summed_in_fp32_from_its_first_backward() -> None:
    frozen, trained = random_parameters([(17,), (17,)], torch.bfloat16)
    frozen.requires_grad_(False)
    optimizer = HostAdamW([frozen, trained])
    frozen.requires_grad_(True)
    for value in (2.0, 2.0**-9):  # lost if added in bf16
        backward([frozen, trained], [torch.full((17,), value)] * 2)
        assert frozen.grad is None
    assert torch.equal(optimizer.gradient(frozen), torch.full((17,), 2.0 + 2.0**-9))

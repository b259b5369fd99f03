"""Gradients that have left come back to `parameter.grad`, and what is done to them there counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import Parameter
from torch_reference import (
    MIXED_SHAPES,
    assert_same_bits,
    backward,
    fp32_twins,
    random_gradients,
    random_parameters,
    stock_adamw,
)

from trl_budget import gradient_access
from trl_budget.errors import SettingsError
from trl_budget.host_adamw import HostAdamW

BF16 = torch.bfloat16
PLACEMENTS = pytest.mark.parametrize("placement", ["device", "host"])


def with_sums(placement: str = "device", max_norm: float | None = None) -> tuple[HostAdamW, list[Parameter]]:
    """An optimizer whose fp32 sums of two backwards are no bf16 numbers."""
    parameters = random_parameters(MIXED_SHAPES, BF16)
    optimizer = HostAdamW(parameters, gradient_placement=placement)
    for seed in range(2):
        backward(parameters, random_gradients(parameters, seed))
    if max_norm is not None:
        optimizer.clip_grad_norm_(max_norm)
    return optimizer, parameters


def sums(optimizer: HostAdamW, parameters: list[Parameter]) -> list[torch.Tensor]:
    return [optimizer.gradient(p).clone() for p in parameters]


@PLACEMENTS
@pytest.mark.parametrize("max_norm", [None, 0.5], ids=["before clipping", "after clipping"])
def test_the_gradient_so_far_is_in_parameter_grad_and_looking_changes_no_bit(
    placement: str, max_norm: float | None
) -> None:
    optimizer, parameters = with_sums(placement, max_norm)
    expected = sums(*with_sums(placement, max_norm))
    assert any(not torch.equal(e, e.to(BF16).float()) for e in expected), "sums need low bits to lose"
    with optimizer.editable_gradients():
        for parameter, e in zip(parameters, expected, strict=True):
            assert parameter.grad.dtype == BF16
            assert torch.equal(parameter.grad, e.to(BF16))
    assert all(parameter.grad is None for parameter in parameters)
    assert all(torch.equal(a, b) for a, b in zip(sums(optimizer, parameters), expected, strict=True))


@PLACEMENTS
@pytest.mark.parametrize("max_norm", [None, 0.5], ids=["before clipping", "after clipping"])
def test_an_element_that_is_written_counts_and_its_neighbours_keep_every_bit(
    placement: str, max_norm: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient_access, "BLOCK_ELEMENTS", 16)
    optimizer, parameters = with_sums(placement, max_norm)
    expected = sums(*with_sums(placement, max_norm))
    with optimizer.editable_gradients():
        parameters[3].grad[5:9] = 0
        parameters[2].grad[1000] = 2.0
    expected[3][5:9] = 0
    expected[2][1000] = 2.0
    assert all(torch.equal(a, b) for a, b in zip(sums(optimizer, parameters), expected, strict=True))


def halve(parameter: Parameter) -> None:
    parameter.grad.mul_(0.5)


def replace(parameter: Parameter) -> None:
    parameter.grad = torch.full_like(parameter, 3.0)


def drop(parameter: Parameter) -> None:
    parameter.grad = None


@PLACEMENTS
@pytest.mark.parametrize("edit", [halve, replace, drop], ids=lambda edit: edit.__name__)
def test_the_step_is_torchs_with_the_edited_gradient(placement: str, edit: Callable[[Parameter], None]) -> None:
    parameters = random_parameters(MIXED_SHAPES, BF16)
    twins = fp32_twins(parameters)
    stock, optimizer = stock_adamw(twins, "fused"), HostAdamW(parameters, gradient_placement=placement)
    for step in range(3):
        gradients = random_gradients(parameters, step)
        for twin, gradient in zip(twins, gradients, strict=True):
            twin.grad = gradient.float()
        edit(twins[3])
        stock.step()
        backward(parameters, gradients)
        with optimizer.editable_gradients():
            edit(parameters[3])
        optimizer.step()
    if edit is drop:
        assert optimizer.state[parameters[3]]["step"] == 0
        del parameters[3], twins[3]
    assert_same_bits(optimizer, parameters, stock, twins)


def test_a_gradient_can_be_given_to_a_parameter_that_had_none() -> None:
    parameters = random_parameters([(17,), (17,)], BF16)
    optimizer = HostAdamW(parameters)
    backward(parameters, [torch.ones(17), None])
    with optimizer.editable_gradients():
        assert parameters[1].grad is None
        parameters[1].grad = torch.full((17,), 0.25, dtype=BF16)
    assert torch.equal(optimizer.gradient(parameters[1]), torch.full((17,), 0.25))
    before = parameters[1].detach().clone()
    optimizer.step()
    assert not torch.equal(parameters[1], before)


def test_a_later_backward_adds_to_what_was_edited() -> None:
    [parameter] = random_parameters([(17,)], BF16)
    optimizer = HostAdamW([parameter])
    backward([parameter], [torch.ones(17)])
    with optimizer.editable_gradients():
        parameter.grad.fill_(0.5)
    backward([parameter], [torch.ones(17)])
    assert torch.equal(optimizer.gradient(parameter), torch.full((17,), 1.5))


def test_a_norm_measured_before_is_measured_again() -> None:
    optimizer, parameters = with_sums()
    optimizer.clip_grad_norm_(1.0)
    with optimizer.editable_gradients():
        parameters[0].grad.fill_(torch.inf)
    before = [p.detach().clone() for p in parameters]
    optimizer.step()
    assert optimizer.num_consecutive_skipped_steps == 1
    assert all(torch.equal(a, b) for a, b in zip(parameters, before, strict=True))


def test_torchs_own_clipping_works_inside() -> None:
    optimizer, parameters = with_sums()
    with optimizer.editable_gradients():
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    assert optimizer.clip_grad_norm_(torch.inf).item() == pytest.approx(0.5, rel=1e-2)


def run_backward(optimizer: HostAdamW, parameters: list[Parameter]) -> None:
    backward(parameters, random_gradients(parameters, 5))


def clip(optimizer: HostAdamW, parameters: list[Parameter]) -> None:
    optimizer.clip_grad_norm_(1.0)


def step(optimizer: HostAdamW, parameters: list[Parameter]) -> None:
    optimizer.step()


@PLACEMENTS
@pytest.mark.parametrize("use", [run_backward, clip, step], ids=lambda use: use.__name__)
def test_a_backward_a_clip_and_a_step_inside_are_refused_and_the_gradients_stay(
    placement: str, use: Callable[[HostAdamW, list[Parameter]], None]
) -> None:
    optimizer, parameters = with_sums(placement)
    expected = sums(*with_sums(placement))
    refused = pytest.raises(SettingsError, match=r"inside `editable_gradients\(\)`.*End the `with` block")
    with refused, optimizer.editable_gradients():
        parameters[0].grad.zero_()
        use(optimizer, parameters)
    assert all(parameter.grad is None for parameter in parameters)
    assert all(torch.equal(a, b) for a, b in zip(sums(optimizer, parameters), expected, strict=True))


def test_zero_grad_inside_drops_everything() -> None:
    optimizer, parameters = with_sums()
    with optimizer.editable_gradients():
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in parameters)
    assert [optimizer.gradient(p) for p in parameters] == [None] * len(parameters)


def test_a_sparse_gradient_is_refused_by_name() -> None:
    [parameter] = random_parameters([(5, 3)], BF16)
    optimizer = HostAdamW([("table", parameter)])
    backward([parameter], [torch.ones(5, 3)])
    with pytest.raises(SettingsError, match="table has a sparse gradient"), optimizer.editable_gradients():
        parameter.grad = parameter.grad.to_sparse()


def test_parameters_stepped_in_place_need_nothing() -> None:
    [parameter] = random_parameters([(17,)], torch.float32)
    optimizer = HostAdamW([parameter])
    backward([parameter], [torch.ones(17)])
    gradient = parameter.grad
    with optimizer.editable_gradients():
        assert parameter.grad is gradient
        parameter.grad[3] = 7.0
    assert optimizer.gradient(parameter)[3] == 7.0


def test_a_gradient_that_was_taken_away_is_no_zero() -> None:
    parameters = random_parameters([(8,), (5,)], torch.bfloat16)
    twins = fp32_twins(parameters)
    optimizer, stock = HostAdamW(parameters, lr=1e-2), stock_adamw(twins, "fused", lr=1e-2)
    gradients = random_gradients(parameters, seed=1)
    for owner, made in ((parameters, gradients), (twins, [gradient.float() for gradient in gradients])):
        backward(owner, made)
    with optimizer.editable_gradients():
        parameters[0].grad = None
    twins[0].grad = None
    for each in (optimizer, stock):
        each.step()
        each.zero_grad(set_to_none=False)
        each.step()
    assert optimizer.state[parameters[0]]["step"].item() == 0
    assert torch.equal(optimizer.state[parameters[0]]["master_weights"], twins[0])
    assert torch.equal(optimizer.state[parameters[1]]["master_weights"], twins[1])

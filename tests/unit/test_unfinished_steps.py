"""An error or an interrupt inside a step: nobody trains or saves half stepped weights; a whole state mends them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

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
    train_pair,
)

from trl_budget.errors import HalfSteppedError
from trl_budget.host_adamw import HostAdamW

in_place_and_separate = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
FAILING = 3  # the index of the parameter whose step fails


class Run:
    """A trained pair, what was saved of it, and a step that fails at one parameter."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.parameters = random_parameters(MIXED_SHAPES, dtype)
        self.twins = fp32_twins(self.parameters)
        self.optimizer = HostAdamW(self.parameters, lr=1e-2)
        self.stock = stock_adamw(self.twins, "fused", lr=1e-2)
        self.train(range(2))
        self.weights = [p.detach().clone() for p in self.parameters]
        self.saved = copy.deepcopy(self.optimizer.state_dict())

    def train(self, steps: Any) -> None:
        train_pair(self.optimizer, self.parameters, self.stock, self.twins, steps=steps)

    def fail(self, error: type[BaseException] = ArithmeticError) -> None:
        step_block = self.optimizer._step_block

        def fail_at_one(slot: Any, *rest: Any) -> None:
            if slot.parameter is self.parameters[FAILING]:
                raise error("on purpose")
            step_block(slot, *rest)

        self.optimizer._step_block = fail_at_one
        backward(self.parameters, random_gradients(self.parameters, seed=9))
        with pytest.raises(error, match="on purpose"):
            self.optimizer.step()
        del self.optimizer._step_block
        self.optimizer.zero_grad()

    def reload_weights(self) -> None:
        with torch.no_grad():
            for parameter, values in zip(self.parameters, self.weights, strict=True):
                parameter.copy_(values)

    def replace_weights(self) -> None:
        for parameter, values in zip(self.parameters, self.weights, strict=True):
            parameter.data = values.clone()

    def assert_continues(self) -> None:
        self.optimizer.check_whole()
        assert_same_bits(self.optimizer, self.parameters, self.stock, self.twins)
        self.train(range(2, 4))
        assert_same_bits(self.optimizer, self.parameters, self.stock, self.twins)


CALLS: dict[str, Callable[[Run], object]] = {
    "step": lambda run: run.optimizer.step(),
    "clip": lambda run: run.optimizer.clip_grad_norm_(1.0),
    "state_dict": lambda run: run.optimizer.state_dict(),
    "check_whole": lambda run: run.optimizer.check_whole(),
}


@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
@in_place_and_separate
def test_after_an_error_inside_a_step_nothing_goes_on(
    dtype: torch.dtype, call: Callable[[Run], object], error: type[BaseException]
) -> None:
    run = Run(dtype)
    run.fail(error)
    counts = {int(run.optimizer.state[p]["step"]) for p in run.parameters}
    assert counts == {2, 3}, "some parameters were stepped and others not"
    with pytest.raises(HalfSteppedError, match=rf"{error.__name__}.*parameter 0.*half stepped.*load_state_dict"):
        call(run)


@in_place_and_separate
def test_an_error_before_anything_is_stepped_leaves_the_optimizer_whole(dtype: torch.dtype) -> None:
    run = Run(dtype)
    run.optimizer.param_groups[0]["lr"] = "fast"
    backward(run.parameters, random_gradients(run.parameters, seed=9))
    with pytest.raises(ValueError, match="lr='fast' is of type str"):
        run.optimizer.step()
    run.optimizer.param_groups[0]["lr"] = 1e-2
    run.optimizer.zero_grad()
    run.assert_continues()


@pytest.mark.parametrize("restore", [Run.reload_weights, Run.replace_weights])
@pytest.mark.parametrize("is_weights_first", [True, False], ids=["weights, state", "state, weights"])
def test_parameters_stepped_in_place_are_whole_after_weights_and_state(
    is_weights_first: bool, restore: Callable[[Run], None]
) -> None:
    run = Run(torch.float32)
    run.fail()
    if is_weights_first:
        restore(run)
        with pytest.raises(HalfSteppedError, match="Load the model's weights, and the state"):
            run.optimizer.check_whole()
    run.optimizer.load_state_dict(copy.deepcopy(run.saved))
    if not is_weights_first:
        with pytest.raises(HalfSteppedError, match="Load the model's weights, and the state"):
            run.optimizer.step()
        restore(run)
        run.optimizer.follow_parameters()
    run.assert_continues()


def test_masters_in_a_state_make_bf16_parameters_whole() -> None:
    run = Run(torch.bfloat16)
    run.fail()
    run.optimizer.load_state_dict(copy.deepcopy(run.saved))
    run.assert_continues()


def test_a_state_without_masters_does_not_make_bf16_parameters_whole() -> None:
    run = Run(torch.bfloat16)
    run.fail()
    run.reload_weights()
    run.optimizer.load_state_dict(copy.deepcopy(run.stock.state_dict()))
    with pytest.raises(HalfSteppedError, match=r"An optimizer step \(ArithmeticError\).*master_weights included"):
        run.optimizer.step()


def test_a_load_that_is_interrupted_is_not_trained_with_until_it_has_been_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(torch.bfloat16)

    class Interrupts(dict):
        def __getitem__(self, key: str) -> Any:
            raise KeyboardInterrupt("on purpose")

    state = copy.deepcopy(run.saved)
    state["state"][FAILING] = Interrupts(state["state"][FAILING])
    with pytest.raises(KeyboardInterrupt):
        run.optimizer.load_state_dict(state)
    with pytest.raises(HalfSteppedError, match=r"Loading a state \(KeyboardInterrupt\)"):
        run.optimizer.step()
    run.optimizer.load_state_dict(run.saved)
    run.assert_continues()


def test_a_parameter_that_took_no_part_in_the_failed_step_needs_no_masters() -> None:
    used, unused = random_parameters([(17,), (17,)], torch.bfloat16)
    optimizer = HostAdamW([used, unused])
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer._step_block = lambda *_: exec("raise ArithmeticError")
    backward([used], [torch.ones(17)])
    with pytest.raises(ArithmeticError):
        optimizer.step()
    del saved["state"][1]["master_weights"]
    optimizer.load_state_dict(saved)
    optimizer.check_whole()


def test_parameters_that_leave_the_optimizer_leave_nothing_half_stepped() -> None:
    run = Run(torch.bfloat16)
    run.fail()
    new = [Parameter(torch.zeros(3))]
    run.optimizer.regroup(new, implementation="fused", lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    run.optimizer.check_whole()

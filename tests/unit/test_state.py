"""Saving and loading: exact, in torch's format, and into the very memory that was allocated at construction."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
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

from trl_budget.errors import SettingsError
from trl_budget.host_adamw import HostAdamW

TENSORS = ("step", "exp_avg", "exp_avg_sq", "master_weights")
in_place_and_separate = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state()
    GradientState._reset_state()
    PartialState._reset_state()


def addresses(optimizer: HostAdamW) -> list[int]:
    return [entry[key].data_ptr() for entry in optimizer.state.values() for key in TENSORS]


def snapshot(optimizer: HostAdamW) -> list[torch.Tensor]:
    return [entry[key].clone() for entry in optimizer.state.values() for key in TENSORS]


def assert_unchanged(optimizer: HostAdamW, before: list[torch.Tensor]) -> None:
    after = snapshot(optimizer)
    assert len(after) == len(before) and all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def trained(dtype: torch.dtype, num_steps: int = 4) -> tuple[Any, list[Parameter], Any, list[Parameter]]:
    parameters = random_parameters(MIXED_SHAPES, dtype)
    twins = fp32_twins(parameters)
    optimizer, stock = HostAdamW(parameters, lr=1e-2), stock_adamw(twins, "fused", lr=1e-2)
    train_pair(optimizer, parameters, stock, twins, steps=range(num_steps))
    return optimizer, parameters, stock, twins


@in_place_and_separate
@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mmap"])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path: Path, mmap: bool, dtype: torch.dtype) -> None:
    optimizer, parameters, stock, twins = trained(dtype)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    resumed = random_parameters(MIXED_SHAPES, dtype, seed=99)
    with torch.no_grad():
        for new, old in zip(resumed, parameters, strict=True):
            new.copy_(old)
    second = HostAdamW(resumed, lr=0.5)
    second.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True, mmap=mmap))
    assert_same_bits(second, resumed, stock, twins)
    train_pair(second, resumed, stock, twins, steps=range(4, 8))
    assert stock.state[twins[0]]["step"] == 8
    assert_same_bits(second, resumed, stock, twins)


@in_place_and_separate
def test_loading_keeps_the_memory_dtype_and_device_of_the_state(dtype: torch.dtype) -> None:
    optimizer, *_ = trained(dtype)
    saved = optimizer.state_dict()
    second = HostAdamW(random_parameters(MIXED_SHAPES, dtype, seed=5))
    before = addresses(second)
    second.load_state_dict(saved)
    assert addresses(second) == before
    tensors = [entry[key] for entry in second.state.values() for key in TENSORS]
    assert {(t.dtype, t.device.type) for t in tensors} == {(torch.float32, "cpu")}


def test_loading_masters_refreshes_bf16_weights_that_differ() -> None:
    optimizer, parameters, *_ = trained(torch.bfloat16)
    others = random_parameters(MIXED_SHAPES, torch.bfloat16, seed=5)
    HostAdamW(others).load_state_dict(optimizer.state_dict())
    for other, parameter in zip(others, parameters, strict=True):
        assert torch.equal(other.detach(), parameter.detach())


def test_loading_drops_the_gradients_of_the_running_step() -> None:
    optimizer, parameters, stock, twins = trained(torch.bfloat16)
    backward(parameters, random_gradients(parameters, seed=77))
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    assert_same_bits(optimizer, parameters, stock, twins)


def test_accelerates_wrapper_keeps_the_state_where_it_is(accelerator: Accelerator) -> None:
    optimizer, parameters, stock, twins = trained(torch.bfloat16)
    before = addresses(optimizer)
    wrapped = accelerator.prepare(optimizer)
    assert addresses(optimizer) == before
    assert_same_bits(optimizer, parameters, stock, twins)
    wrapped.load_state_dict(wrapped.state_dict())
    assert addresses(optimizer) == before
    assert_same_bits(optimizer, parameters, stock, twins)


def test_training_through_accelerates_wrapper_has_the_bits_of_torch(accelerator: Accelerator) -> None:
    optimizer, parameters, stock, twins = trained(torch.bfloat16)
    wrapped = accelerator.prepare(optimizer)
    for step in range(4, 8):
        gradients = random_gradients(parameters, step)
        for weights, stepper in ((parameters, wrapped), (twins, stock)):
            backward(weights, gradients)
            stepper.step()
            stepper.zero_grad()
    assert_same_bits(optimizer, parameters, stock, twins)


@in_place_and_separate
def test_a_state_of_torch_is_continued_with_the_present_weights_as_masters(dtype: torch.dtype) -> None:
    _, _, stock, twins = trained(torch.bfloat16)
    parameters = [Parameter(twin.detach().to(dtype)) for twin in twins]
    optimizer = HostAdamW(parameters)
    optimizer.load_state_dict(stock.state_dict())
    with torch.no_grad():
        for twin, parameter in zip(twins, parameters, strict=True):
            twin.copy_(parameter)
    train_pair(optimizer, parameters, stock, twins, steps=range(4, 8))
    assert_same_bits(optimizer, parameters, stock, twins)


def test_weights_written_before_a_state_of_torch_is_loaded_become_the_masters() -> None:
    optimizer, parameters, stock, _ = trained(torch.bfloat16)
    written = [p.detach() * 2 for p in parameters]
    with torch.no_grad():
        for parameter, value in zip(parameters, written, strict=True):
            parameter.copy_(value)
    optimizer.load_state_dict(stock.state_dict())
    for parameter, value in zip(parameters, written, strict=True):
        assert torch.equal(parameter.detach(), value)
        assert torch.equal(optimizer.state[parameter]["master_weights"].to(torch.bfloat16), value)


def test_loading_a_state_of_torch_without_an_entry_resets_that_parameter() -> None:
    optimizer, parameters, *_ = trained(torch.bfloat16)
    masters = [optimizer.state[p]["master_weights"].clone() for p in parameters]
    optimizer.load_state_dict(stock_adamw(fp32_twins(parameters), "fused").state_dict())  # never stepped
    for parameter, master in zip(parameters, masters, strict=True):
        entry = optimizer.state[parameter]
        assert not any(bool(entry[key].any()) for key in ("step", "exp_avg", "exp_avg_sq"))
        assert torch.equal(entry["master_weights"], master)


def test_the_learning_rate_and_other_group_settings_are_loaded() -> None:
    optimizer, *_ = trained(torch.bfloat16)
    second = HostAdamW(random_parameters(MIXED_SHAPES, torch.bfloat16), lr=0.5, betas=(0.1, 0.2), eps=1.0)
    second.load_state_dict(optimizer.state_dict())
    group = second.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"]) == (1e-2, (0.9, 0.999), 1e-8)


def damage(state_dict: dict[str, Any], how: str) -> dict[str, Any]:
    """A copy whose second parameter, or whose group, does not fit."""
    entry = dict(state_dict["state"][1])
    group = dict(state_dict["param_groups"][0])
    if how.startswith("shape of "):
        entry[how.removeprefix("shape of ")] = torch.zeros(18)
    elif how.startswith("no "):
        del entry[how.removeprefix("no ")]
    else:
        group[how] = True
    return {"state": {**state_dict["state"], 1: entry}, "param_groups": [group]}


@pytest.mark.parametrize(
    "how",
    [
        *(f"shape of {key}" for key in ("exp_avg", "exp_avg_sq", "master_weights")),
        *(f"no {key}" for key in ("step", "exp_avg", "exp_avg_sq")),
        *("amsgrad", "maximize", "capturable", "differentiable"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(how: str) -> None:
    donor, *_ = trained(torch.bfloat16, num_steps=2)
    optimizer, parameters, *_ = trained(torch.bfloat16)
    before, weights = snapshot(optimizer), [p.detach().clone() for p in parameters]
    bad = damage(donor.state_dict(), how)
    bad["param_groups"][0]["lr"] = 0.125
    with pytest.raises(SettingsError):
        optimizer.load_state_dict(bad)
    assert_unchanged(optimizer, before)
    assert all(torch.equal(p, weight) for p, weight in zip(parameters, weights, strict=True))
    assert optimizer.param_groups[0]["lr"] == 1e-2


def test_groups_of_another_length_are_refused_and_change_nothing() -> None:
    donor, *_ = trained(torch.bfloat16, num_steps=2)
    optimizer, *_ = trained(torch.bfloat16)
    before = snapshot(optimizer)
    bad = donor.state_dict()
    bad["param_groups"][0]["params"] = [0, 1]
    with pytest.raises(ValueError, match="param"):
        optimizer.load_state_dict(bad)
    assert_unchanged(optimizer, before)


def test_a_bad_shape_for_a_parameter_unfrozen_just_now_changes_nothing() -> None:
    parameters = random_parameters([(17,), (17,)], torch.bfloat16)
    parameters[1].requires_grad_(False)
    optimizer = HostAdamW(parameters)
    before = snapshot(optimizer)
    parameters[1].requires_grad_(True)
    entry = {"step": torch.tensor(3.0), "exp_avg": torch.ones(17), "exp_avg_sq": torch.ones(17)}
    bad = {0: entry, 1: {**entry, "exp_avg": torch.ones(5)}}
    with pytest.raises(SettingsError, match="exp_avg"):
        optimizer.load_state_dict({"state": bad, "param_groups": optimizer.state_dict()["param_groups"]})
    after = snapshot(optimizer)[: len(before)]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


@in_place_and_separate
def test_masters_are_saved_only_where_the_parameter_is_not_its_own(dtype: torch.dtype) -> None:
    optimizer, *_ = trained(dtype)
    keys = {frozenset(entry) for entry in optimizer.state_dict()["state"].values()}
    moments = {"step", "exp_avg", "exp_avg_sq"}
    assert keys == {frozenset(moments if dtype == torch.float32 else moments | {"master_weights"})}


def test_reading_the_state_dict_takes_nothing_from_the_live_state() -> None:
    optimizer, *_ = trained(torch.float32)
    before = addresses(optimizer)
    optimizer.state_dict()
    assert addresses(optimizer) == before


def test_loading_masters_of_a_bf16_run_sets_an_fp32_parameter_whose_storage_was_replaced() -> None:
    optimizer, _, _, twins = trained(torch.bfloat16)
    parameters = random_parameters(MIXED_SHAPES, torch.float32, seed=5)
    second = HostAdamW(parameters)
    for parameter in parameters:
        parameter.data = parameter.data.clone()
    second.load_state_dict(optimizer.state_dict())
    for parameter, twin in zip(parameters, twins, strict=True):
        assert torch.equal(parameter.detach(), twin.detach())

"""Edits of `optimizer.state` do what they do to `torch.optim.AdamW`, or are refused by name; copies are refused."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch_reference import (
    MIXED_SHAPES,
    assert_same_bits,
    fp32_twins,
    random_parameters,
    stock_adamw,
    train_pair,
)

from trl_budget.errors import SettingsError
from trl_budget.host_adamw import HostAdamW

in_place_and_separate = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
Edit = Callable[[Any, list[Parameter]], object]


def trained(dtype: torch.dtype) -> tuple[HostAdamW, list[Parameter], Any, list[Parameter]]:
    parameters = random_parameters([*MIXED_SHAPES, (17,)], dtype)
    twins = fp32_twins(parameters)
    optimizer, stock = HostAdamW(parameters, lr=1e-2), stock_adamw(twins, "fused", lr=1e-2)
    train_pair(optimizer, parameters, stock, twins, steps=range(3))
    return optimizer, parameters, stock, twins


def moments_like(parameter: Parameter, seed: int) -> Tensor:
    return torch.rand(parameter.shape, generator=torch.Generator().manual_seed(seed))


def replace(optimizer: Any, parameters: list[Parameter], key: str) -> None:
    for seed, parameter in enumerate(parameters):
        optimizer.state[parameter][key] = moments_like(parameter, seed)


def replace_step(optimizer: Any, parameters: list[Parameter]) -> None:
    for parameter in parameters[1:]:
        optimizer.state[parameter]["step"] = torch.tensor(40.0)


def replace_entry(optimizer: Any, parameters: list[Parameter]) -> None:
    optimizer.state[parameters[2]] = {
        "step": torch.tensor(7.0),
        "exp_avg": moments_like(parameters[2], 1),
        "exp_avg_sq": moments_like(parameters[2], 2),
    }


def exchange_moments(optimizer: Any, parameters: list[Parameter]) -> None:
    entry = optimizer.state[parameters[3]]
    entry["exp_avg"], entry["exp_avg_sq"] = entry["exp_avg_sq"], entry["exp_avg"].abs_()


def exchange_entries(optimizer: Any, parameters: list[Parameter]) -> None:
    """Moments and steps of the two parameters of shape [17] change places; masters stay."""
    first, second = (optimizer.state[parameters[index]] for index in (1, -1))
    for key in ("step", "exp_avg", "exp_avg_sq"):
        first[key], second[key] = second[key], first[key]


def delete_by_hand(optimizer: Any, parameters: list[Parameter]) -> None:
    optimizer.state[parameters[0]].clear()
    optimizer.state.pop(parameters[3])


EDITS: dict[str, Edit] = {
    "clear": lambda optimizer, _: optimizer.state.clear(),
    "another defaultdict": lambda optimizer, _: setattr(optimizer, "state", defaultdict(dict)),
    "del": lambda optimizer, parameters: optimizer.state.__delitem__(parameters[2]),
    "emptied entries": delete_by_hand,
    "exp_avg": lambda optimizer, parameters: replace(optimizer, parameters, "exp_avg"),
    "exp_avg_sq": lambda optimizer, parameters: replace(optimizer, parameters, "exp_avg_sq"),
    "step": replace_step,
    "a whole entry": replace_entry,
    "moments exchanged": exchange_moments,
    "entries exchanged": exchange_entries,
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
@in_place_and_separate
def test_steps_after_an_edit_have_the_bits_of_torch(dtype: torch.dtype, edit: Edit) -> None:
    optimizer, parameters, stock, twins = trained(dtype)
    slabs = {p: dict(entry) for p, entry in optimizer.state.items()}
    edit(optimizer, parameters)
    edit(stock, twins)
    train_pair(optimizer, parameters, stock, twins, steps=range(3, 6))
    assert_same_bits(optimizer, parameters, stock, twins)
    for parameter, entry in slabs.items():
        assert all(optimizer.state[parameter][key] is tensor for key, tensor in entry.items()), "published again"


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
@in_place_and_separate
def test_a_state_saved_after_an_edit_is_continued_with_the_bits_of_torch(dtype: torch.dtype, edit: Edit) -> None:
    optimizer, parameters, stock, twins = trained(dtype)
    edit(optimizer, parameters)
    edit(stock, twins)
    saved = copy.deepcopy(optimizer.state_dict())
    resumed = [Parameter(p.detach().clone()) for p in parameters]
    second = HostAdamW(resumed, lr=1e-2)
    second.load_state_dict(saved)
    train_pair(second, resumed, stock, twins, steps=range(3, 5))
    assert_same_bits(second, resumed, stock, twins)


@in_place_and_separate
def test_after_clear_the_state_dict_has_zeros_and_masters_keep_their_bits(dtype: torch.dtype) -> None:
    optimizer, parameters, _, twins = trained(dtype)
    optimizer.state.clear()
    entries = optimizer.state_dict()["state"]
    assert len(entries) == len(parameters) and not optimizer.state, "looking changes nothing"
    for index, twin in enumerate(twins):
        assert not any(entries[index][key].any() for key in ("step", "exp_avg", "exp_avg_sq"))
        assert ("master_weights" in entries[index]) == (dtype == torch.bfloat16)
        assert torch.equal(entries[index].get("master_weights", parameters[index]), twin.detach())


@in_place_and_separate
def test_masters_put_into_an_entry_become_the_weights(dtype: torch.dtype) -> None:
    optimizer, parameters, *_ = trained(dtype)
    values = {p: moments_like(p, seed) for seed, p in enumerate(parameters)}
    for parameter, value in values.items():
        optimizer.state[parameter]["master_weights"] = value
    saved = copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.adopt_external_writes()
    for index, (parameter, value) in enumerate(values.items()):
        assert torch.equal(saved[index]["master_weights"], value)
        assert torch.equal(optimizer.state[parameter]["master_weights"], value)
        assert torch.equal(parameter.detach(), value.to(dtype))


def test_masters_put_into_an_entry_whose_parameter_got_new_storage_are_not_lost() -> None:
    optimizer, [first, *_], *_ = trained(torch.float32)
    optimizer.state[first]["master_weights"] = torch.full_like(first, 0.25)
    first.data = torch.zeros_like(first)
    optimizer.adopt_external_writes()
    assert torch.equal(first.detach(), torch.full_like(first, 0.25))


def test_moments_reset_with_zeros_like_the_bf16_parameter_are_served() -> None:
    optimizer, parameters, stock, twins = trained(torch.bfloat16)
    for weights, stepper in ((parameters, optimizer), (twins, stock)):
        for parameter in weights:
            stepper.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
    train_pair(optimizer, parameters, stock, twins, steps=[3])
    assert_same_bits(optimizer, parameters, stock, twins)


@in_place_and_separate
def test_keys_of_the_users_own_stay_and_are_saved(dtype: torch.dtype) -> None:
    optimizer, parameters, stock, twins = trained(dtype)
    optimizer.state[parameters[1]].update(mine=5, exp_avg=torch.zeros(17))
    stock.state[twins[1]]["exp_avg"] = torch.zeros(17)
    train_pair(optimizer, parameters, stock, twins, steps=[3])
    assert_same_bits(optimizer, parameters, stock, twins)
    assert optimizer.state[parameters[1]]["mine"] == optimizer.state_dict()["state"][1]["mine"] == 5


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("exp_avg", torch.zeros(16), r"torch.float32 tensor of shape \(16,\)"),
        ("exp_avg_sq", torch.zeros(17, dtype=torch.float64), "torch.float64 tensor"),
        ("exp_avg", torch.zeros(17, dtype=torch.int64), "torch.int64 tensor"),
        ("master_weights", torch.zeros(17, 1), r"shape \(17, 1\)"),
        ("step", torch.zeros(2), r"shape \(2,\)"),
        ("step", 3, "a int"),
        ("exp_avg", None, "a NoneType"),
    ],
    ids=str,
)
def test_what_cannot_be_stepped_is_refused_by_name_and_nothing_is_written(key: str, value: Any, found: str) -> None:
    parameters = dict(zip(("first", "second"), random_parameters([(17,), (17,)], torch.bfloat16), strict=True))
    optimizer = HostAdamW(parameters.items())
    optimizer.state[parameters["first"]]["exp_avg"] = torch.ones(17)
    slab = optimizer._slots[parameters["first"]].exp_avg
    optimizer.state[parameters["second"]][key] = value
    parameters["first"].grad = torch.ones_like(parameters["first"])
    for action in (optimizer.step, optimizer.state_dict):
        with pytest.raises(SettingsError, match=rf"{found}.*as {key} of second.*delete the whole entry"):
            action()
    assert not slab.any()


def test_an_entry_that_lacks_a_moment_is_refused_by_name() -> None:
    optimizer, parameters, *_ = trained(torch.bfloat16)
    del optimizer.state[parameters[1]]["exp_avg"]
    with pytest.raises(SettingsError, match="holds nothing as exp_avg of parameter 1"):
        optimizer.adopt_external_writes()


@in_place_and_separate
def test_an_edited_state_survives_regrouping_and_a_state_loaded_over_it_wins(dtype: torch.dtype) -> None:
    optimizer, parameters, stock, twins = trained(dtype)
    saved = copy.deepcopy(optimizer.state_dict())
    EDITS["exp_avg"](optimizer, parameters)
    optimizer.regroup(parameters, implementation="fused", lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2)
    assert torch.equal(optimizer._slots[parameters[1]].exp_avg, moments_like(parameters[1], 1))
    optimizer.state.clear()
    EDITS["exp_avg_sq"](optimizer, []) or optimizer.load_state_dict(saved)
    train_pair(optimizer, parameters, stock, twins, steps=[3])
    assert_same_bits(optimizer, parameters, stock, twins)


def test_a_regrouped_optimizer_forgets_deleted_entries_of_parameters_that_left() -> None:
    optimizer, parameters, *_ = trained(torch.bfloat16)
    optimizer.state.clear()
    optimizer.regroup(parameters[1:], implementation="fused", lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2)
    assert set(optimizer.state) == set(parameters[1:])


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
@in_place_and_separate
def test_a_copy_of_the_optimizer_is_refused_and_names_the_state_dict(
    dtype: torch.dtype, duplicate: Callable[[object], object]
) -> None:
    optimizer, parameters, stock, twins = trained(dtype)
    with pytest.raises(SettingsError, match=r"7 parameters.*copied or pickled.*optimizer\.state_dict\(\)") as refused:
        duplicate(optimizer)
    assert "load_state_dict" in str(refused.value)
    train_pair(optimizer, parameters, stock, twins, steps=[3])
    assert_same_bits(optimizer, parameters, stock, twins)

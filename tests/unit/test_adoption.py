"""What others write to the weights between two steps becomes the master weights, and nothing else does."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import nn
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

from trl_budget import compute_weights
from trl_budget.compute_weights import checksums
from trl_budget.errors import SettingsError
from trl_budget.host_adamw import HostAdamW

ROWS, COLUMNS = 33, 7


def other_values(parameter: Parameter) -> torch.Tensor:
    return random_parameters([tuple(parameter.shape)], parameter.dtype, seed=42)[0].detach()


@torch.no_grad()
def write_by_copy(parameter: Parameter) -> None:
    parameter.copy_(other_values(parameter))


def write_by_load_state_dict(parameter: Parameter) -> None:
    module = nn.Module()
    module.register_parameter("weight", parameter)
    module.load_state_dict({"weight": other_values(parameter)})


def write_by_data_copy(parameter: Parameter) -> None:
    parameter.data.copy_(other_values(parameter))


def write_by_data_mul(parameter: Parameter) -> None:
    parameter.data.mul_(2)


def write_one_element(parameter: Parameter) -> None:
    parameter.data.view(-1)[-1] += 1


def write_by_new_data(parameter: Parameter) -> None:
    parameter.data = other_values(parameter)


def swap_rows(parameter: Parameter) -> None:
    parameter.data[[3, 20]] = parameter.data[[20, 3]]


def swap_columns(parameter: Parameter) -> None:
    parameter.data[:, [0, 5]] = parameter.data[:, [5, 0]]


@torch.no_grad()
def swap_columns_in_place(parameter: Parameter) -> None:
    parameter[:, [0, 5]] = parameter[:, [5, 0]]


def flip_signs_of_a_pair(parameter: Parameter) -> None:
    """The sign bits of one positive and one negative neighbour change places."""
    row = parameter.data[0]
    row[[int(row.argmax()), int(row.argmin())]] *= -1


WRITES = (
    write_by_copy,
    write_by_load_state_dict,
    write_by_data_copy,
    write_by_data_mul,
    write_one_element,
    write_by_new_data,
    swap_rows,
    swap_columns,
    swap_columns_in_place,
    flip_signs_of_a_pair,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_the_next_step_starts_from_what_was_written_by(write: Callable[[Parameter], None], dtype: torch.dtype) -> None:
    parameters = random_parameters([(ROWS, COLUMNS), (17,)], dtype)
    twins = fp32_twins(parameters)
    stock, optimizer = stock_adamw(twins, "fused"), HostAdamW(parameters)
    train_pair(optimizer, parameters, stock, twins, steps=range(2))
    cast = twins[0].detach().to(dtype)
    write(parameters[0])
    written = parameters[0].detach()
    assert not torch.equal(written, cast), "the write has to change something"
    with torch.no_grad():
        twins[0].copy_(torch.where(written != cast, written.float(), twins[0]))
    train_pair(optimizer, parameters, stock, twins, steps=range(2, 4))
    assert_same_bits(optimizer, parameters, stock, twins)


def test_the_initial_weights_can_be_restored_through_data() -> None:
    [parameter] = random_parameters([(ROWS, COLUMNS)], torch.bfloat16)
    initial = parameter.detach().clone()
    optimizer = HostAdamW([parameter], lr=1.0)
    backward([parameter], random_gradients([parameter], seed=0))
    optimizer.step()
    parameter.data.copy_(initial)
    optimizer.adopt_external_writes()
    assert torch.equal(optimizer.state[parameter]["master_weights"], initial.float())


def test_a_write_that_undoes_an_adopted_one_is_adopted() -> None:
    [parameter] = random_parameters([(ROWS, COLUMNS)], torch.bfloat16)
    initial = parameter.detach().clone()
    optimizer = HostAdamW([parameter])
    for values in (other_values(parameter), initial):
        parameter.data.copy_(values)
        optimizer.adopt_external_writes()
        assert torch.equal(optimizer.state[parameter]["master_weights"], values.float())


def test_elements_exchanged_in_a_vector_are_adopted() -> None:
    parameter = Parameter(torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16))
    optimizer = HostAdamW([parameter])
    parameter.data[[0, 2]] = parameter.data[[2, 0]]
    optimizer.adopt_external_writes()
    assert optimizer.state[parameter]["master_weights"].tolist() == [3.0, 2.0, 1.0]


def test_adopted_parameters_are_named_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    parameters = random_parameters([(17,), (17,), (17,)], torch.bfloat16)
    optimizer = HostAdamW(zip(("first", "second", "third"), parameters, strict=True))
    write_by_copy(parameters[1])
    with caplog.at_level("WARNING"):
        optimizer.step()
    [message] = caplog.messages
    assert "second" in message and "first" not in message and "third" not in message


def test_adopt_external_writes_returns_the_names_once() -> None:
    parameters = random_parameters([(17,), (17,)], torch.bfloat16)
    optimizer = HostAdamW(zip(("first", "second"), parameters, strict=True))
    write_by_data_copy(parameters[1])
    assert optimizer.adopt_external_writes() == ["second"]
    assert optimizer.adopt_external_writes() == []


def test_only_elements_that_differ_are_adopted() -> None:
    [parameter] = random_parameters([(1025,)], torch.bfloat16)
    optimizer = HostAdamW([parameter], lr=1e-4)
    backward([parameter], random_gradients([parameter], seed=0))
    optimizer.step()
    expected = optimizer.state[parameter]["master_weights"].clone()
    assert not torch.equal(expected, parameter.detach().float()), "masters need low bits to lose"
    parameter.data[7] = 5.0
    expected[7] = 5.0
    optimizer.adopt_external_writes()
    assert torch.equal(optimizer.state[parameter]["master_weights"], expected)


@pytest.mark.parametrize("through_data", [True, False], ids=["through .data", "in place"])
def test_weights_swapped_out_and_back_leave_the_masters_alone(
    through_data: bool, caplog: pytest.LogCaptureFixture
) -> None:
    parameters = random_parameters(MIXED_SHAPES, torch.bfloat16)
    twins = fp32_twins(parameters)
    stock, optimizer = stock_adamw(twins, "fused", lr=1e-4), HostAdamW(parameters, lr=1e-4)
    train_pair(optimizer, parameters, stock, twins, steps=range(2))
    for parameter in parameters:
        kept = parameter.detach().clone()
        target = parameter.data if through_data else parameter.detach()
        target.fill_(0.25)  # the average is evaluated here
        target.copy_(kept)
    train_pair(optimizer, parameters, stock, twins, steps=range(2, 4))
    assert_same_bits(optimizer, parameters, stock, twins)
    assert caplog.messages == []


def test_training_without_foreign_writes_warns_of_none(caplog: pytest.LogCaptureFixture) -> None:
    parameters = random_parameters(MIXED_SHAPES, torch.bfloat16)
    optimizer = HostAdamW(parameters)
    for step in range(3):
        backward(parameters, random_gradients(parameters, step))
        optimizer.step()
    assert caplog.messages == []


def test_a_write_to_a_parameter_without_a_gradient_is_adopted() -> None:
    parameters = random_parameters([(17,), (17,)], torch.bfloat16)
    optimizer = HostAdamW(parameters)
    write_by_copy(parameters[1])
    backward(parameters, [torch.ones(17), None])
    optimizer.step()
    assert torch.equal(optimizer.state[parameters[1]]["master_weights"], other_values(parameters[1]).float())


def test_values_that_are_not_numbers_are_adopted_too() -> None:
    [parameter] = random_parameters([(17,)], torch.bfloat16)
    optimizer = HostAdamW([parameter])
    parameter.data[4] = torch.nan
    optimizer.adopt_external_writes()
    assert optimizer.state[parameter]["master_weights"].isnan().nonzero().tolist() == [[4]]


def test_an_fp32_parameter_with_new_storage_is_stepped_there_and_published() -> None:
    [parameter] = random_parameters([(17,)], torch.float32)
    optimizer = HostAdamW([parameter])
    replaced = parameter.data
    untouched = replaced.clone()
    write_by_new_data(parameter)
    backward([parameter], [torch.ones(17)])
    optimizer.step()
    assert torch.equal(replaced, untouched)
    assert optimizer.state[parameter]["master_weights"].data_ptr() == parameter.data_ptr()


def test_an_fp32_parameter_cast_to_bf16_after_construction_is_refused_by_name() -> None:
    [parameter] = random_parameters([(17,)], torch.float32)
    optimizer = HostAdamW([("embedding", parameter)])
    parameter.data = parameter.data.to(torch.bfloat16)
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(SettingsError, match=r"embedding was fp32.*now torch.bfloat16 on cpu.*build HostAdamW"):
        optimizer.step()


@pytest.mark.parametrize("batch_elements", [10, 100, 2**18])
def test_a_checksum_does_not_depend_on_the_parameters_it_is_taken_with(
    batch_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = [*MIXED_SHAPES, (0,), (0, 5), (ROWS, COLUMNS), (2, 64)]
    parameters = [p for dtype in (torch.bfloat16, torch.float32) for p in random_parameters(shapes, dtype)]
    monkeypatch.setattr(compute_weights, "CHECKSUM_BATCH_ELEMENTS", batch_elements)
    together = checksums(parameters)
    assert together.shape == (len(parameters), 3)
    assert torch.equal(together, torch.cat([checksums([p]) for p in parameters]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("seed", range(30))
def test_exchanges_fills_and_flips_at_random_places_change_the_checksum(seed: int, dtype: torch.dtype) -> None:
    generator = random.Random(seed)
    shape = (generator.randint(2, 40), generator.randint(2, 40))
    [parameter] = random_parameters([shape], dtype, seed)
    before = checksums([parameter])
    flat, original = parameter.data.view(-1), parameter.detach().clone()
    i, j = generator.sample(range(flat.numel()), 2)
    row, column = (generator.sample(range(n), 2) for n in shape)
    writes = (
        lambda: flat.index_copy_(0, torch.tensor([i, j]), flat[[j, i]]),
        lambda: parameter.data.index_copy_(0, torch.tensor(row), original[row[::-1]]),
        lambda: parameter.data.index_copy_(1, torch.tensor(column), original[:, column[::-1]]),
        lambda: parameter.data.fill_(0.25),
        lambda: parameter.data.neg_(),
        lambda: flat.index_fill_(0, torch.tensor([i, j]), -1.5),
    )
    for index, write in enumerate(writes):
        write()
        assert not torch.equal(checksums([parameter]), before), index
        parameter.data.copy_(original)
        assert torch.equal(checksums([parameter]), before)


# Weights swapped in for a save


def swapped(dtype: torch.dtype = torch.bfloat16) -> tuple[HostAdamW, list[Parameter], list[torch.Tensor]]:
    """An optimizer after a step, its parameters with an average in them, and the trained weights."""
    parameters = random_parameters(MIXED_SHAPES, dtype)
    optimizer = HostAdamW(parameters, lr=1e-4)
    backward(parameters, random_gradients(parameters, 0))
    optimizer.step()
    kept = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters[1:]:
        parameter.data.view(-1)[::2] = 0.25
    return optimizer, parameters, kept


def masters_of(optimizer: HostAdamW, parameters: list[Parameter]) -> list[torch.Tensor]:
    return [optimizer.state[p]["master_weights"].clone() for p in parameters]


def test_a_save_of_swapped_weights_holds_their_masters_and_the_trained_ones_keep_every_bit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    optimizer, parameters, kept = swapped()
    before = masters_of(optimizer, parameters)
    assert any(not torch.equal(b, k.float()) for b, k in zip(before, kept, strict=True)), "low bits to lose"
    with optimizer.masters_of_present_weights():
        saved = [entry["master_weights"].clone() for entry in optimizer.state_dict()["state"].values()]
    for parameter, master, old, k in zip(parameters, saved, before, kept, strict=True):
        assert torch.equal(master, torch.where(parameter.detach() == k, old, parameter.detach().float()))
    for parameter, k in zip(parameters, kept, strict=True):
        parameter.data.copy_(k)
    assert optimizer.adopt_external_writes() == []
    assert all(torch.equal(a, b) for a, b in zip(masters_of(optimizer, parameters), before, strict=True))
    assert caplog.messages == []


def test_swapped_weights_that_stay_are_adopted_after_the_save_as_without_one() -> None:
    results = []
    for saves in (True, False):
        optimizer, parameters, _ = swapped()
        if saves:
            with optimizer.masters_of_present_weights():
                pass
        backward(parameters, random_gradients(parameters, 1))
        optimizer.step()
        results.append(masters_of(optimizer, parameters))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_save_amid_an_accumulation_leaves_the_gradients_alone() -> None:
    optimizer, parameters, _ = swapped()
    before = masters_of(optimizer, parameters)
    backward(parameters, random_gradients(parameters, 1))
    sums = [optimizer.gradient(p).clone() for p in parameters]
    with optimizer.masters_of_present_weights():
        assert any(not torch.equal(a, b) for a, b in zip(masters_of(optimizer, parameters), before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(masters_of(optimizer, parameters), before, strict=True))
    assert all(torch.equal(optimizer.gradient(p), s) for p, s in zip(parameters, sums, strict=True))


def test_a_save_takes_no_memory_for_the_masters_between_steps() -> None:
    optimizer, parameters, _ = swapped()
    accumulators = [optimizer._slots[p].accumulator.data_ptr() for p in parameters]
    before = masters_of(optimizer, parameters)
    with optimizer.masters_of_present_weights():
        stashed = [optimizer._slots[p].accumulator for p in parameters[1:]]
        assert all(torch.equal(a, b) for a, b in zip(stashed, before[1:], strict=True))
        assert [optimizer.gradient(p) for p in parameters] == [None] * len(parameters)
    assert [optimizer._slots[p].accumulator.data_ptr() for p in parameters] == accumulators


def test_a_save_that_fails_leaves_the_masters_as_they_were() -> None:
    optimizer, parameters, _ = swapped()
    before = masters_of(optimizer, parameters)
    with pytest.raises(OSError, match="disk full"), optimizer.masters_of_present_weights():
        raise OSError("disk full")
    assert all(torch.equal(a, b) for a, b in zip(masters_of(optimizer, parameters), before, strict=True))


def test_a_save_of_weights_stepped_in_place_has_nothing_to_lend() -> None:
    optimizer, parameters, _ = swapped(torch.float32)
    with optimizer.masters_of_present_weights():
        assert all(optimizer.state[p]["master_weights"].data_ptr() == p.data_ptr() for p in parameters)

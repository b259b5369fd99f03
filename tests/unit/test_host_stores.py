"""Forwards that begin while others wait for their backward: each finds room, and no store is made that need not be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from trl_budget.activation_slab import padded
from trl_budget.errors import ActivationGoneError
from trl_budget.host_stores import HostStores

CPU = torch.device("cpu")


def keep_pass(stores: HostStores, seed: int, tokens: int = 5) -> list[tuple[Any, Tensor]]:
    inputs = [torch.full((1, tokens, 3), float(10 * seed + layer)) for layer in range(2)]
    stores.begin_pass(2, inputs[0])
    kept = [(stores.keep(value), value) for value in inputs]
    stores.leave_device()
    return kept


def take_pass(kept: list[tuple[Any, Tensor]]) -> None:
    for activation, value in reversed(kept):
        assert torch.equal(activation.take(), value)


def bytes_of_pass(tokens: int = 5) -> int:
    return 2 * padded(tokens * 3 * 4)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_three_passes_wait_and_come_back_in_any_order(order: tuple[int, ...]) -> None:
    stores = HostStores(CPU, 0)
    passes = [keep_pass(stores, seed, tokens) for seed, tokens in enumerate((5, 90, 40))]
    for number in order:
        take_pass(passes[number])
    assert stores.used_bytes == stores.device_bytes == 0


def test_memory_is_as_much_as_waited_at_once() -> None:
    stores = HostStores(CPU, 0)
    for _ in range(3):
        first, second = keep_pass(stores, 0), keep_pass(stores, 1)
        take_pass(second)
        take_pass(first)
    assert stores.host_bytes == 2 * bytes_of_pass()


def test_a_store_with_room_takes_a_second_pass() -> None:
    stores = HostStores(CPU, 2 * bytes_of_pass())
    first, second = keep_pass(stores, 0), keep_pass(stores, 1)
    assert stores.host_bytes == 2 * bytes_of_pass()
    take_pass(second)
    take_pass(first)


def test_what_was_given_up_makes_room_while_it_is_referred_to_and_says_so_when_taken() -> None:
    stores = HostStores(CPU, 0)
    aborted = keep_pass(stores, 0)
    stores.give_up()
    assert stores.used_bytes == stores.device_bytes == 0
    kept = keep_pass(stores, 1)
    assert stores.host_bytes == bytes_of_pass()
    with pytest.raises(ActivationGoneError, match="training began anew"):
        aborted[-1][0].take()
    del aborted
    take_pass(kept)

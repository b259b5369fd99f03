"""Activations come back with every bit, whatever is taken, dropped or given up, and the host memory is a stack."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trl_budget.activation_slab import stack_bytes
from trl_budget.activation_store import DeviceStore
from trl_budget.errors import ActivationGoneError, HostMemoryError, SettingsError
from trl_budget.host_store import HostActivation, HostStore, _on_device
from trl_budget.pinned import HostSlab, host_slab_bytes

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def store_of(capacity_bytes: int) -> HostStore:
    return HostStore(CPU, capacity_bytes)


def activation(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape or (1, 3, 5), generator=torch.Generator().manual_seed(seed)).to(dtype)


def poison_above(store: HostStore, start: int) -> None:
    """NaN wherever nothing is kept; of bytes 255 all floats are NaN."""
    store._slab._slab.storage[start:].fill_(255)


def same_bits(ours: Tensor, expected: Tensor) -> bool:
    same_kind = (ours.shape, ours.dtype, ours.requires_grad) == (expected.shape, expected.dtype, False)
    return same_kind and torch.equal(ours.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


moves = st.lists(
    st.one_of(
        st.tuples(st.just("keep"), st.integers(0, 400), st.sampled_from(DTYPES)),
        st.tuples(st.sampled_from(["take", "take", "drop", "take any", "drop any", "leave"]), st.integers(0, 10**6)),
    ),
    max_size=60,
)


def test_an_activation_without_elements_holds_no_bytes() -> None:
    store = HostStore(torch.device("cpu"), 3 * 256)
    below, empty = store.keep(torch.ones(1, 1, 4)), store.keep(torch.ones(1, 0, 4))
    below.take()
    assert store.used_bytes == 0
    assert empty.take().shape == (1, 0, 4)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(moves=moves)
def test_any_order_of_keeping_taking_and_dropping_gives_the_values_back(moves: list[tuple]) -> None:
    store = store_of(60 * 3328)
    kept: list[tuple[HostActivation, Tensor, int]] = []
    for number, (move, *details) in enumerate(moves):
        if move == "keep":
            tensor = activation(number, details[0], dtype=details[1])
            start = store.used_bytes
            kept.append((store.keep(tensor.clone()), tensor, start))
        elif move == "leave":
            store.leave_device()
        elif kept:
            handle, tensor, _ = kept.pop(details[0] % len(kept) if move.endswith("any") else -1)
            if move.startswith("take"):
                assert same_bits(handle.take(), tensor)
            del handle
        poison_above(store, store.used_bytes)
        assert sum(len(_on_device(entry)) for entry in store._stack) <= 2
        assert (store.used_bytes == 0) == (not any(tensor.nbytes for _, tensor, _ in kept))
    assert all(same_bits(handle.take(), tensor) for handle, tensor, _ in reversed(kept))


def test_a_pass_fills_exactly_what_its_layers_were_counted_to_need() -> None:
    store = store_of(stack_bytes(3, 30))
    kept = [store.keep(activation(i)) for i in range(3)]
    assert store.used_bytes == store.host_bytes == 3 * 256
    with pytest.raises(HostMemoryError, match=r"reserve\(\)"):
        store.keep(activation(3))
    assert same_bits(kept[2].take(), activation(2))
    assert store.used_bytes == 2 * 256


def test_a_pass_that_was_given_up_leaves_the_stack_empty() -> None:
    store = store_of(stack_bytes(4, 30))
    for _ in range(3):
        kept = [store.keep(activation(i)) for i in range(4)]
        kept.pop().take()
        del kept
        assert store.used_bytes == 0
        store.leave_device()
        assert store.device_bytes == 0


def test_what_is_dropped_in_the_middle_gives_its_bytes_back_when_it_is_on_top() -> None:
    store = store_of(stack_bytes(3, 30))
    kept = [store.keep(activation(i)) for i in range(3)]
    del kept[1]
    assert store.used_bytes == 3 * 256
    kept[1].take()
    assert store.used_bytes == 256
    store.keep(activation(7)), store.keep(activation(8))
    assert same_bits(kept[0].take(), activation(0))


def test_two_forwards_before_their_backwards_may_run_backward_in_either_order() -> None:
    for order in ((0, 1), (1, 0)):
        store = store_of(stack_bytes(6, 30))
        passes = [[store.keep(activation(10 * p + i)) for i in range(3)] for p in range(2)]
        for p in order:
            for i in (2, 1, 0):
                assert same_bits(passes[p][i].take(), activation(10 * p + i))
        assert (store.used_bytes, store.device_bytes) == (0, 0)


def test_what_is_fetched_is_the_nearest_one_below_that_is_still_wanted() -> None:
    store = store_of(4096)
    kept = {n: store.keep(activation(0, n)) for n in (10, 20, 30, 40)}
    del kept[20]
    kept[30].take()
    assert store.device_bytes == 2 * (40 + 10)


def test_what_was_dropped_under_others_leaves_the_device_at_the_next_call() -> None:
    store = store_of(4096)
    kept = {n: store.keep(activation(0, n)) for n in (10, 20, 30)}
    kept[20].take()
    del kept[10]
    store.reserve(0)
    assert store.device_bytes == 2 * 30


class CountedCopies:
    """Counts the copies that nobody has waited for yet, and calls back at a wait."""

    def __init__(self) -> None:
        self.under_way: set[int] = set()
        self.num_copies = 0
        self.at_next_wait: list = []

    def send(self, source: Tensor, staged: Tensor) -> int:
        self.num_copies += 1
        self.under_way.add(self.num_copies)
        staged.copy_(source)
        return self.num_copies

    def fetch(self, staged: Tensor, sent: int) -> tuple[Tensor, int]:
        tensor = torch.empty_like(staged)
        return tensor, self.send(staged, tensor)

    def wait(self, copy: int, tensor: Tensor) -> None:
        self.under_way.remove(copy)
        while self.at_next_wait:
            self.at_next_wait.pop().clear()

    def finish(self) -> None:
        pass


@pytest.mark.parametrize("order", [(3, 2, 1, 0), (2, 3, 1, 0), (1, 3, 2, 0), (0, 1, 2, 3), (3,), (1,), ()], ids=str)
@pytest.mark.parametrize("end", ["another call", "the store's own"])
def test_no_device_tensor_is_let_go_of_before_its_copy_was_waited_for(order: tuple[int, ...], end: str) -> None:
    copies = CountedCopies()
    store = HostStore(CPU, 4096, copies=copies)
    kept = [store.keep(activation(i)) for i in range(4)]
    for i in order:
        kept[i].take()
    kept.clear()
    if end == "another call":
        store.reserve(0)
    del store
    assert copies.under_way == set()


def test_a_collection_in_the_middle_of_a_call_lets_go_of_nothing_too_early() -> None:
    copies = CountedCopies()
    store = HostStore(CPU, 4096, copies=copies)
    lower = [store.keep(activation(0))]
    store.keep(activation(1)).take()
    fetched = copies.num_copies
    store.keep(activation(2))
    assert fetched in copies.under_way
    copies.at_next_wait.append(lower)
    store.leave_device()
    assert copies.under_way == set() and store.used_bytes == 0


def test_an_activation_is_taken_once() -> None:
    store = store_of(4096)
    kept = store.keep(activation(0))
    kept.take()
    with pytest.raises(ActivationGoneError, match="retain_graph=True"):
        kept.take()


@pytest.mark.parametrize("has_left", [False, True])
def test_what_is_kept_carries_no_graph_and_comes_back_contiguous(has_left: bool) -> None:
    store = store_of(4096)
    source = (torch.arange(12.0, requires_grad=True) * 2).view(3, 4).t()
    kept = store.keep(source)
    if has_left:
        store.leave_device()
    taken = kept.take()
    assert taken.is_contiguous() and taken.grad_fn is None and not taken.requires_grad
    assert torch.equal(taken, source)


@pytest.mark.parametrize("moment", ["at the next layer", "in backward", "when the device is cleared"])
def test_a_layer_that_writes_its_input_is_told(moment: str) -> None:
    store = store_of(4096)
    hidden_states = activation(0)
    kept = store.keep(hidden_states)
    hidden_states.add_(1)
    with pytest.raises(SettingsError, match="activation_offload='off'"):
        {"at the next layer": lambda: store.keep(activation(1)), "in backward": kept.take}.get(
            moment, store.leave_device
        )()


def test_writes_to_what_has_left_the_device_do_not_matter() -> None:
    store = store_of(4096)
    hidden_states = activation(0)
    kept, _ = store.keep(hidden_states), store.keep(activation(1))
    hidden_states.add_(1)
    assert same_bits(kept.take(), activation(0))


# Host memory


@pytest.fixture
def before() -> Iterator[int]:
    gc.collect()
    yield host_slab_bytes()


def test_the_memory_is_taken_at_construction_and_counted(before: int) -> None:
    store = store_of(10_240)
    assert host_slab_bytes() - before == store.host_bytes == 10_240


def test_memory_grows_between_passes_and_the_old_goes_first(before: int, caplog: pytest.LogCaptureFixture) -> None:
    held = []

    def allocate(nbytes: int, *, pin: bool, purpose: str) -> HostSlab:
        held.append(host_slab_bytes() - before)
        return HostSlab(nbytes, pin=pin, purpose=purpose)

    store = HostStore(CPU, 1024, allocate=allocate)
    with caplog.at_level(logging.INFO, logger="trl_budget"):
        store.reserve(3 * 2**30)
    assert held == [0, 0]
    assert store.host_bytes == host_slab_bytes() - before == 3 * 2**30
    [line] = [record.getMessage() for record in caplog.records]
    assert "3.00 GiB" in line


def test_what_is_reserved_again_is_not_taken_again(before: int) -> None:
    store = store_of(2048)
    slab = store._slab._slab
    kept = store.keep(activation(0))
    store.reserve(2048 - 256)
    del kept
    store.reserve(2048)
    assert store._slab._slab is slab


def test_memory_in_use_is_not_replaced() -> None:
    store = store_of(stack_bytes(2, 30))
    kept = [store.keep(activation(i)) for i in range(2)]
    with pytest.raises(HostMemoryError, match=r"2 activations.*activation_offload='off'"):
        store.reserve(stack_bytes(3, 30))
    assert all(same_bits(kept[i].take(), activation(i)) for i in (1, 0))
    store.reserve(stack_bytes(3, 30))
    assert store.host_bytes == 3 * 256


def test_no_memory_is_taken_before_it_is_reserved(before: int) -> None:
    store = store_of(0)
    assert host_slab_bytes() == before
    store.reserve(256)
    assert same_bits(store.keep(activation(0)).take(), activation(0))


def test_a_refusal_to_page_lock_names_the_field_and_leaves_nothing(before: int) -> None:
    def allocate(nbytes: int, *, pin: bool, purpose: str) -> HostSlab:
        return HostSlab(nbytes, pin=pin, purpose=purpose, register=lambda address, nbytes: 2)

    store = HostStore(CPU, 0, pin=True, allocate=allocate)
    with pytest.raises(HostMemoryError, match="activation_offload='off'") as error:
        store.reserve(2**20)
    assert "CUDA error 2" in str(error.value.__cause__)
    assert store.host_bytes == 0
    del error
    gc.collect()
    assert host_slab_bytes() == before


def test_more_than_the_machine_has_is_refused_before_it_is_mapped() -> None:
    def never(nbytes: int, *, pin: bool, purpose: str) -> HostSlab:
        raise AssertionError("nothing is mapped")

    with pytest.raises(HostMemoryError, match=r"offloaded activations.*activation_offload='off'"):
        HostStore(CPU, 2**50, allocate=never)


def test_the_device_store_keeps_the_tensor_itself() -> None:
    hidden_states = activation(0)
    taken = DeviceStore().keep(hidden_states).take()
    assert taken.data_ptr() == hidden_states.data_ptr()

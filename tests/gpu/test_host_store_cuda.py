"""Activations on their way to the host and back, on a card: values, device memory, and streams that run ahead.

Shapes with long copies and little arithmetic: an activation of 64 MiB takes far longer to copy than to make, and the
allocator hands its memory out again as soon as it is let go of.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from trl_budget.activation_slab import stack_bytes
from trl_budget.activation_store import ActivationStore, DeviceStore, KeptActivation
from trl_budget.host_store import HostStore
from trl_budget.pinned import host_slab_bytes

pytestmark = pytest.mark.gpu
MIB = 2**20
LAYERS, SHAPE = 12, (1, 8192, 4096)
NBYTES = 64 * MIB
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _empty_card() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    yield
    gc.collect()
    torch.cuda.empty_cache()


def new_store(layers: int = LAYERS) -> HostStore:
    return HostStore(CUDA, stack_bytes(layers, NBYTES))


def poison(store: HostStore) -> None:
    """NaN in all host memory; nothing may be under way."""
    torch.cuda.synchronize()
    store._slab._slab.storage.fill_(255)


def pattern(seed: int) -> Tensor:
    values = torch.arange(SHAPE[1] * SHAPE[2], device="cuda", dtype=torch.int32).add_(seed * 7).remainder_(251)
    return values.to(torch.bfloat16).view(SHAPE)


def forward(store: ActivationStore, base: int, layers: int = LAYERS) -> list[KeptActivation]:
    """Every layer's output is a new tensor; NaN goes where its input lay as soon as the store has let go of it."""
    kept = []
    for i in range(layers):
        hidden_states = pattern(base + i)
        kept.append(store.keep(hidden_states))
        del hidden_states
        torch.full(SHAPE, float("nan"), device="cuda", dtype=torch.bfloat16)
    return kept


def backward(kept: list[KeptActivation], base: int) -> list[Tensor]:
    """One flag a layer, on the device: whether its input came back exactly."""
    flags = []
    while kept:
        taken = kept.pop().take()
        flags.append((taken == pattern(base + len(kept))).all())
        taken.fill_(float("nan"))
        del taken
        torch.full(SHAPE, float("nan"), device="cuda", dtype=torch.bfloat16)
    return flags


def assert_all(flags: list[Tensor]) -> None:
    wrong = [index for index, flag in enumerate(flags) if not bool(flag)]
    assert wrong == []


@pytest.mark.parametrize("is_host_ahead", [False, True], ids=["", "with the host far ahead of the card"])
def test_every_input_comes_back_exactly(is_host_ahead: bool) -> None:
    store = new_store()
    for repeat in range(5):
        poison(store)
        if is_host_ahead:
            torch.cuda._sleep(500_000_000)
        flags = backward(forward(store, 100 * repeat), 100 * repeat)
        assert_all(flags)


def test_passes_that_follow_each_other_at_once_use_the_same_host_memory() -> None:
    store = new_store()
    poison(store)
    flags = []
    for repeat in range(10):
        flags += backward(forward(store, 100 * repeat), 100 * repeat)
    assert store.host_bytes == LAYERS * NBYTES
    assert_all(flags)


def test_a_pass_that_was_given_up_does_not_touch_the_next() -> None:
    store = new_store()
    flags = []
    for taken in (0, 1, 5):
        torch.cuda._sleep(200_000_000)
        kept = forward(store, 1000)
        for _ in range(taken):
            kept.pop().take().fill_(float("nan"))
        del kept
        flags += backward(forward(store, 10 * taken), 10 * taken)
    assert_all(flags)


def test_two_forwards_before_their_backwards() -> None:
    store = new_store(2 * LAYERS)
    passes = {base: forward(store, base) for base in (100, 200)}
    assert_all([flag for base, kept in passes.items() for flag in backward(kept, base)])


def test_a_backward_on_a_side_stream_gets_what_the_forward_kept() -> None:
    store = new_store()
    side = torch.cuda.Stream()
    flags = []
    for repeat in range(3):
        torch.cuda._sleep(100_000_000)
        kept = forward(store, 100 * repeat)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            flags += backward(kept, 100 * repeat)
        torch.cuda.current_stream().wait_stream(side)
    assert_all(flags)


def test_leaving_the_device_before_backward_frees_all_of_it_and_loses_nothing() -> None:
    store = new_store()
    before = torch.cuda.memory_allocated()
    kept = forward(store, 5)
    assert torch.cuda.memory_allocated() - before == NBYTES
    store.leave_device()
    assert torch.cuda.memory_allocated() == before
    torch.full((4, *SHAPE), float("nan"), device="cuda", dtype=torch.bfloat16)
    assert_all(backward(kept, 5))
    assert torch.cuda.memory_allocated() - before < MIB


class Layer(torch.autograd.Function):
    """Adds one to its input, which it keeps in a store; its backward halves the gradient and adds the input to it."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, hidden_states: Tensor, store: ActivationStore) -> Tensor:
        ctx.kept = store.keep(hidden_states)
        return hidden_states + 1

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * 0.5 + ctx.kept.take(), None


def test_gradients_through_autograd_are_those_of_activations_that_stay() -> None:
    def gradient(store: ActivationStore) -> Tensor:
        start = pattern(3).requires_grad_()
        hidden_states: Tensor = start
        for _ in range(LAYERS):
            hidden_states = Layer.apply(hidden_states, store)
        hidden_states.sum().backward()
        assert start.grad is not None
        return start.grad

    assert bool((gradient(new_store()) == gradient(DeviceStore())).all())


def peak_bytes(layers: int, *, is_host_ahead: bool) -> int:
    store = new_store(layers)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    if is_host_ahead:
        torch.cuda._sleep(500_000_000)
    backward(forward(store, 0, layers), 0)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("is_host_ahead", [False, True], ids=["", "with the host far ahead of the card"])
def test_the_peak_does_not_depend_on_the_number_of_layers(is_host_ahead: bool) -> None:
    few, many = (peak_bytes(layers, is_host_ahead=is_host_ahead) for layers in (4, 16))
    assert many - few < MIB


def test_twenty_passes_grow_neither_the_card_nor_the_host_with_the_host_far_ahead() -> None:
    store = new_store()
    backward(forward(store, 0), 0)
    torch.cuda.synchronize()
    reserved, pinned = torch.cuda.memory_reserved(), host_slab_bytes(pinned_only=True)
    for repeat in range(20):
        torch.cuda._sleep(200_000_000)
        backward(forward(store, repeat), repeat)
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() == reserved
    assert host_slab_bytes(pinned_only=True) == pinned


def test_neither_forward_nor_backward_waits_for_the_card() -> None:
    store = new_store(4)
    backward(forward(store, 0, 4), 0)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # a second
    behind = torch.cuda.Event()
    behind.record()
    flags = backward(forward(store, 1, 4), 1)
    assert not behind.query()
    assert_all(flags)


def test_growing_between_passes_releases_the_old_memory_and_keeps_values_exact() -> None:
    before = host_slab_bytes(pinned_only=True)
    store = new_store(2)
    torch.cuda._sleep(200_000_000)
    kept = forward(store, 0, 2)
    kept.pop().take()
    del kept
    store.reserve(stack_bytes(LAYERS, NBYTES))
    assert host_slab_bytes(pinned_only=True) - before == LAYERS * NBYTES
    assert_all(backward(forward(store, 9), 9))


def test_dropping_the_store_with_copies_under_way_leaves_the_card_usable() -> None:
    before = host_slab_bytes(pinned_only=True)
    store = new_store()
    torch.cuda._sleep(200_000_000)
    kept = forward(store, 0)
    kept.pop().take()
    del store, kept
    gc.collect()
    assert host_slab_bytes(pinned_only=True) == before
    assert_all(backward(forward(DeviceStore(), 3), 3))

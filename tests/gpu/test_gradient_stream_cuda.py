"""Gradients that leave the card while backward runs: streams, events, device memory. Exact against ones that do not.

Shapes with long copies and little arithmetic, so that whatever is not ordered shows: a gradient of 64 MiB takes far
longer to copy than to make.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from trl_budget import HostAdamW, HostThreadError, streams
from trl_budget.gradient_stream import GradientStream

pytestmark = pytest.mark.gpu
MIB = 2**20
LAYERS, ELEMENTS = 16, 2**25  # 64 MiB of bf16 each


@pytest.fixture(autouse=True)
def _empty_card() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    yield
    gc.collect()
    torch.cuda.empty_cache()


def layers(count: int = LAYERS, elements: int = ELEMENTS) -> list[Parameter]:
    return [Parameter(torch.zeros(elements, device="cuda", dtype=torch.bfloat16)) for _ in range(count)]


class Layer(torch.autograd.Function):
    """Adds one number of its weight to the value; its backward makes a gradient of `scale` and a pattern."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, value: Tensor, weight: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.shape = scale, weight.shape
        return value + weight[0].float()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        # The allocator hands out what the layer above has just given back: NaN goes there, then this gradient.
        torch.full(ctx.shape, float("nan"), device="cuda", dtype=torch.bfloat16)
        pattern = torch.arange(ctx.shape[0], device="cuda", dtype=torch.int32).remainder_(251)
        return gradient, pattern.to(torch.bfloat16).mul_(ctx.scale), None


def run_backward(parameters: list[Parameter], scale: float) -> None:
    value = torch.zeros((), device="cuda", requires_grad=True)
    for index, parameter in enumerate(parameters):
        value = Layer.apply(value, parameter, scale * (index + 1))
    value.backward()


def small_ring(optimizer: HostAdamW) -> HostAdamW:
    """A ring of 8 MiB and copies of 1 MiB: every gradient is cut, and every backward waits for the host threads."""
    stream = GradientStream(optimizer._engines, optimizer._background, ring_bytes=8 * MIB, chunk_bytes=MIB)
    stream.prepare(optimizer._slots.values())
    optimizer._gradients.collector = stream
    return optimizer


def sums(optimizer: HostAdamW, parameters: list[Parameter]) -> list[Tensor]:
    return [optimizer.gradient(p).clone() for p in parameters]


def assert_same(ours: list[Tensor], expected: list[Tensor]) -> None:
    for index, (a, b) in enumerate(zip(ours, expected, strict=True)):
        assert bool((a == b).all()), f"layer {index}"  # no torch.equal in assert: pytest would explain 2**25 values


def poison(optimizer: HostAdamW) -> None:
    optimizer._gradients.collector.wait()
    optimizer._gradients.collector._slab.view(torch.float32).fill_(float("nan"))


@pytest.mark.parametrize("ring", ["as it is", "small"])
@pytest.mark.parametrize("held_bytes", [0, 128 * MIB], ids=["given back at once", "a few held"])
def test_a_gradient_is_read_before_its_memory_is_written_again(
    ring: str, held_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "HELD_GRADIENT_BYTES", held_bytes)
    parameters = layers()
    optimizer = HostAdamW(parameters)
    if ring == "small":
        small_ring(optimizer)
    pattern = torch.arange(ELEMENTS, dtype=torch.int32).remainder_(251).to(torch.bfloat16)
    for repeat in range(3):
        optimizer.zero_grad()
        poison(optimizer)
        run_backward(parameters, 1.0 + repeat)
        expected = [(pattern * ((1.0 + repeat) * (index + 1))).float() for index in range(LAYERS)]
        assert_same(sums(optimizer, parameters), expected)


def test_100_backwards_in_a_row_have_the_sums_of_gradients_that_stay_to_the_end() -> None:
    def collected(placement: str) -> list[Tensor]:
        parameters = layers(4)
        optimizer = HostAdamW(parameters, gradient_placement=placement)
        for index in range(100):
            run_backward(parameters, 1.0 + index % 7)
        return sums(optimizer, parameters)

    streamed = collected("host")
    gc.collect()
    assert_same(streamed, collected("device"))


def test_steps_that_follow_each_other_at_once_have_the_bits_of_gradients_that_stay_to_the_end() -> None:
    def trained(placement: str) -> list[Tensor]:
        parameters = layers(4)
        optimizer = HostAdamW(parameters, lr=1e-2, gradient_placement=placement)
        for index in range(10):
            for _ in range(2):
                run_backward(parameters, 0.001 * (1 + index))
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().cpu() for p in parameters] + [optimizer.state[p]["exp_avg_sq"] for p in parameters]

    streamed = trained("host")
    gc.collect()
    assert_same(streamed, trained("device"))


def test_a_backward_on_a_side_stream_is_read_right() -> None:
    parameters = layers(4)
    optimizer = HostAdamW(parameters)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(5):
        with torch.cuda.stream(side):
            torch.cuda._sleep(10_000_000)
            run_backward(parameters, 1.0)
        run_backward(parameters, 2.0)
    pattern = torch.arange(ELEMENTS, dtype=torch.int32).remainder_(251).to(torch.bfloat16)
    expected = [torch.zeros(ELEMENTS) for _ in parameters]
    for index, total in enumerate(expected):
        for _ in range(5):
            for scale in (1.0, 2.0):
                total += (pattern * (scale * (index + 1))).float()
    assert_same(sums(optimizer, parameters), expected)


def test_backward_returns_while_the_card_still_works() -> None:
    parameters = layers(2, 2**20)
    optimizer = HostAdamW(parameters)
    run_backward(parameters, 1.0)
    optimizer.zero_grad()
    torch.cuda._sleep(2_000_000_000)  # a second
    run_backward(parameters, 1.0)
    assert len(optimizer._gradients.collector._progress._num_open) == 2
    assert optimizer.gradient(parameters[0])[1] == 1.0


def peak_bytes(placement: str, *, is_host_ahead: bool) -> int:
    parameters = layers()
    optimizer = HostAdamW(parameters, gradient_placement=placement)
    run_backward(parameters, 1.0)
    optimizer.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        if is_host_ahead:
            torch.cuda._sleep(500_000_000)
        run_backward(parameters, 1.0)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("is_host_ahead", [False, True], ids=["", "with the host far ahead of the card"])
def test_few_gradients_are_on_the_card_at_a_time(is_host_ahead: bool) -> None:
    gradient, temporaries = 2 * ELEMENTS, 4 * ELEMENTS + 2 * ELEMENTS  # the int32 pattern, and its bf16 or the NaN
    assert peak_bytes("host", is_host_ahead=is_host_ahead) <= streams.HELD_GRADIENT_BYTES + gradient + temporaries
    gc.collect()
    assert peak_bytes("device", is_host_ahead=is_host_ahead) >= LAYERS * gradient


def test_the_allocator_takes_no_more_memory_with_the_host_far_ahead_of_the_card() -> None:
    parameters = layers()
    optimizer = HostAdamW(parameters)
    run_backward(parameters, 1.0)
    torch.cuda.synchronize()
    reserved = torch.cuda.memory_reserved()
    for _ in range(5):
        torch.cuda._sleep(500_000_000)
        run_backward(parameters, 1.0)
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() == reserved
    optimizer.zero_grad()


class FailingLanding:
    def synchronize(self) -> None:
        raise OSError("the bus is gone")


def test_an_error_of_a_host_thread_reaches_the_next_call_and_training_goes_on() -> None:
    parameters = layers(2, 2**20)
    optimizer = HostAdamW(parameters)
    [engine] = optimizer._engines.values()
    send, calls = engine.sender.send, []

    def fails_once(source: Tensor, staged: Tensor) -> object:
        landing = send(source, staged)
        calls.append(landing)
        return FailingLanding() if len(calls) == 1 else landing

    engine.sender.send = fails_once
    with pytest.raises(HostThreadError) as error:
        run_backward(parameters, 1.0)
        optimizer.step()
    assert isinstance(error.value.__cause__, OSError)
    optimizer.zero_grad()
    run_backward(parameters, 1.0)
    assert optimizer.gradient(parameters[1])[3] == 6.0


def test_uploads_of_several_threads_write_what_one_thread_writes() -> None:
    """All pieces go through one device buffer: copy and cast of a piece must not be torn apart by another's."""
    parameters = layers(8)
    optimizer = HostAdamW(parameters, lr=1.0, betas=(0.0, 0.0), eps=1e-8, weight_decay=0.0)
    for repeat in range(10):
        run_backward(parameters, 1.0 + repeat)
        optimizer.step()
        for p in parameters:
            assert bool((p.detach().cpu() == optimizer.state[p]["master_weights"].to(torch.bfloat16)).all())


def test_deleting_the_optimizer_while_gradients_are_under_way_leaves_the_card_usable() -> None:
    parameters = layers(4)
    optimizer = HostAdamW(parameters)
    torch.cuda._sleep(500_000_000)
    run_backward(parameters, 1.0)
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("trl-budget-host")]
    assert names
    del optimizer
    gc.collect()
    torch.cuda.synchronize()
    run_backward(parameters, 1.0)
    assert parameters[0].grad is not None

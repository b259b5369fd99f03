"""Order of the copies, on a simulated device that runs its streams in the worst order the events allow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from simulated_streams import SimulatedDevice
from torch import Tensor

from trl_budget.activation_slab import stack_bytes
from trl_budget.activation_streams import StreamedCopies
from trl_budget.host_store import HostActivation, HostStore

SHAPE = (1, 4, 8)
NBYTES = 4 * 32
LAYERS = 6
ORDERS = [{"slow": name} for name in ("compute", "download", "upload")] + [{"seed": seed} for seed in range(20)]


def device_and_store(order: dict[str, Any], layers: int = LAYERS) -> tuple[SimulatedDevice, HostStore]:
    device = SimulatedDevice(**order)
    return device, HostStore(torch.device("cpu"), stack_bytes(layers, NBYTES), copies=StreamedCopies(device))


def forward(device: SimulatedDevice, store: HostStore, base: float, layers: int = LAYERS) -> list[HostActivation]:
    """Layer i writes base + i into its input's memory; what layers leave is used by the next ones."""
    kept = []
    hidden_states = device.empty(SHAPE)
    device.fill(hidden_states, base)
    for i in range(layers):
        kept.append(store.keep(hidden_states))
        output = device.empty(SHAPE)
        device.fill(output, base + i + 1)
        hidden_states = output
    return kept


def backward(device: SimulatedDevice, kept: list[HostActivation], seen: list[list[float]]) -> None:
    while kept:
        taken = kept.pop().take()
        device.read(taken, seen)
        temporary = device.empty(SHAPE)
        device.fill(temporary, -1.0)
        device.fill(taken, -2.0)
        del taken, temporary  # their memory is the next one's at once


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_every_layer_gets_its_input_back_with_the_host_ahead_of_the_device(order: dict[str, Any]) -> None:
    device, store = device_and_store(order)
    seen: list[list[float]] = []
    for base in (100.0, 200.0, 300.0):
        backward(device, forward(device, store, base), seen)
    device.run_all()
    assert seen == [[base + i] for base in (100.0, 200.0, 300.0) for i in reversed(range(LAYERS))]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_pass_that_is_given_up_half_way_does_not_touch_the_next(order: dict[str, Any]) -> None:
    device, store = device_and_store(order)
    seen: list[list[float]] = []
    for layers, taken in ((LAYERS, 0), (LAYERS, 1), (LAYERS, 3), (2, 1)):
        kept = forward(device, store, 100.0, layers)
        for _ in range(taken):
            device.fill(kept.pop().take(), -2.0)
        del kept
        backward(device, forward(device, store, 200.0), seen)
    device.run_all()
    assert seen == [[200.0 + i] for i in reversed(range(LAYERS))] * 4


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_device_that_was_cleared_before_backward_fetches_everything(order: dict[str, Any]) -> None:
    device, store = device_and_store(order)
    seen: list[list[float]] = []
    kept = forward(device, store, 100.0)
    store.leave_device()
    assert store.device_bytes == 0
    head = device.empty(SHAPE)
    device.fill(head, -3.0)
    kept_taken = kept.pop().take()
    device.read(kept_taken, seen)
    del kept_taken
    store.leave_device()
    device.fill(device.empty(SHAPE), -4.0)
    backward(device, kept, seen)
    device.run_all()
    assert seen == [[100.0 + i] for i in reversed(range(LAYERS))]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_two_forwards_whose_backwards_run_in_the_same_order(order: dict[str, Any]) -> None:
    device, store = device_and_store(order, layers=2 * LAYERS)
    seen: list[list[float]] = []
    passes = [forward(device, store, base) for base in (100.0, 200.0)]
    for kept in passes:
        backward(device, kept, seen)
    device.run_all()
    assert seen == [[base + i] for base in (100.0, 200.0) for i in reversed(range(LAYERS))]


def test_device_memory_does_not_grow_with_layers_or_passes() -> None:
    def peak(layers: int, passes: int) -> int:
        device, store = device_and_store({"slow": "download"}, layers)
        for _ in range(passes):
            backward(device, forward(device, store, 1.0, layers), [])
        return device.peak_bytes // NBYTES

    # Forward: a layer's input and output. Backward: taken, fetched, temporary.
    assert peak(3, 1) == peak(30, 1) == peak(30, 20) == 3


def test_growing_waits_for_the_copies_that_are_under_way() -> None:
    device, store = device_and_store({"slow": "upload"})
    kept = forward(device, store, 100.0)
    kept.pop().take()
    del kept
    assert device.download.queue
    store.reserve(stack_bytes(2 * LAYERS, NBYTES))
    assert not any(stream.queue for stream in (device.compute, device.download, device.upload))


class LoggedStream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.num_events = name, log, 0

    def wait_stream(self, other: LoggedStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        self.num_events += 1
        return f"{self.name} event {self.num_events}"


class LoggedDevice:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.compute, self.download, self.upload = (LoggedStream(n, self.log) for n in ("M", "D", "U"))

    def current(self) -> LoggedStream:
        return self.compute

    def new_tensor(self, like: Tensor) -> Tensor:
        self.log.append("M allocates")
        return torch.empty_like(like)

    def copy(self, target: Tensor, source: Tensor, stream: LoggedStream) -> None:
        target.copy_(source)
        self.log.append(f"{stream.name} copies {int(source.flatten()[0])}")

    def use(self, tensor: Tensor, stream: LoggedStream) -> None:
        self.log.append(f"{stream.name} uses {int(tensor.flatten()[0])}")


def test_the_order_of_a_pass_of_three_layers() -> None:
    device = LoggedDevice()
    store = HostStore(torch.device("cpu"), stack_bytes(3, NBYTES), copies=StreamedCopies(device))
    kept = [store.keep(torch.full(SHAPE, float(i))) for i in (1, 2, 3)]
    down = ["D waits for M", "D waits for U"]
    assert device.log == [
        *down, "D copies 1",
        "M uses 1", "M waits for D event 1", *down, "D copies 2",
        "M uses 2", "M waits for D event 2", *down, "D copies 3",
    ]  # fmt: skip
    device.log.clear()
    for i in (2, 1, 0):
        kept[i].take()
        device.log.append("")
    up = ["M allocates", "U waits for M"]
    assert device.log == [
        "M uses 3", "M waits for D event 3", *up, "U waits for D event 2", "U copies 2", "",
        "M uses 2", "M waits for U event 1", *up, "U waits for D event 1", "U copies 1", "",
        "M uses 1", "M waits for U event 2", "",
    ]  # fmt: skip

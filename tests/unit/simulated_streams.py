"""Streams of a device that does not exist: work is queued and runs later, in the worst order that events allow.

Device memory comes from one pool, as torch's caching allocator gives it: what a tensor leaves is handed out at once to
the next one, without a look at the queues. A copy that is not ordered behind the work it needs, or ahead of the work
that overwrites it, therefore moves wrong values.
"""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class SimulatedEvent:
    def __init__(self) -> None:
        self.is_done = False


class SimulatedStream:
    def __init__(self, device: SimulatedDevice, name: str) -> None:
        self.device = device
        self.name = name
        self.queue: deque[Callable[[], bool]] = deque()  # each returns whether it could run

    def put(self, work: Callable[[], None]) -> None:
        def run() -> bool:
            work()
            return True

        self.queue.append(run)

    def record_event(self) -> SimulatedEvent:
        event = SimulatedEvent()
        self.put(lambda: setattr(event, "is_done", True))
        return event

    def wait_event(self, event: SimulatedEvent) -> None:
        self.queue.append(lambda: event.is_done)

    def wait_stream(self, other: SimulatedStream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.device.run_all()


class SimulatedDevice:
    """See `activation_streams.DeviceStreams`.

    Args:
        seed: of the order in which streams get on; None: the stream named `slow` runs only when nothing else can.
        slow: "compute", "download" or "upload".
    """

    def __init__(self, seed: int | None = None, slow: str = "") -> None:
        self.compute, self.download, self.upload = (
            SimulatedStream(self, n) for n in ("compute", "download", "upload")
        )
        self._random = None if seed is None else random.Random(seed)
        self._slow = slow
        self._memory: dict[int, Tensor] = {}  # by address; never freed
        self._free: dict[int, list[int]] = {}
        self._live: list[tuple[StorageWeakRef, int]] = []
        self.peak_bytes = 0

    @property
    def live_bytes(self) -> int:
        self._collect()
        return sum(self._memory[address].nbytes for _, address in self._live)

    def current(self) -> SimulatedStream:
        return self.compute

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        self._collect()
        nbytes = torch.empty(shape, dtype=dtype, device="meta").nbytes
        if not (free := self._free.setdefault(nbytes, [])):
            memory = torch.full((nbytes,), 255, dtype=torch.uint8)
            self._memory[memory.data_ptr()] = memory
            free.append(memory.data_ptr())
        address = free.pop()
        tensor = _at(address, nbytes).view(dtype).view(shape)
        self._live.append((StorageWeakRef(tensor.untyped_storage()), address))
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return tensor

    def _collect(self) -> None:
        for reference, address in self._live:
            if reference.expired():
                self._free[self._memory[address].nbytes].append(address)
        self._live = [(reference, address) for reference, address in self._live if not reference.expired()]

    def _unreferenced(self, tensor: Tensor) -> Tensor:
        """The same memory through a tensor that does not keep the device's tensor alive."""
        if tensor.data_ptr() not in self._memory:
            return tensor  # of the host
        return _at(tensor.data_ptr(), tensor.nbytes).view(tensor.dtype).view(tensor.shape)

    def new_tensor(self, like: Tensor) -> Tensor:
        return self.empty(tuple(like.shape), like.dtype)

    def fill(self, tensor: Tensor, value: float) -> None:
        """Queues a write on the compute stream."""
        memory = self._unreferenced(tensor)
        self.compute.put(lambda: memory.fill_(value))

    def read(self, tensor: Tensor, into: list[list[float]]) -> None:
        """Queues a look at the distinct values on the compute stream."""
        memory = self._unreferenced(tensor)
        self.compute.put(lambda: into.append(memory.unique().tolist()))

    def copy(self, target: Tensor, source: Tensor, stream: SimulatedStream) -> None:
        to, what = self._unreferenced(target), self._unreferenced(source)
        stream.put(lambda: to.copy_(what))

    def use(self, tensor: Tensor, stream: SimulatedStream) -> None:
        assert stream is self.compute

    def run_all(self) -> None:
        streams = [self.compute, self.download, self.upload]
        while any(stream.queue for stream in streams):
            if self._random is not None:
                self._random.shuffle(streams)
            else:
                streams.sort(key=lambda stream: stream.name == self._slow)
            assert any(_advance(stream) for stream in streams), "streams wait for each other"


def _advance(stream: SimulatedStream) -> bool:
    if stream.queue and stream.queue[0]():
        stream.queue.popleft()
        return True
    return False


def _at(address: int, nbytes: int) -> Tensor:
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)

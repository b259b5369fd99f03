"""Copies between host and device that overlap with host arithmetic.

With its sibling `activation_streams.py` the only module that issues `non_blocking` copies. Each direction has a stream
of its own. Gradients come down through page-locked staging, which is touched by the host only after the event behind
its last copy. Masters go up as they are and are cast on the card. Bit-exact: bytes are moved, casts are torch's.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trl_budget.pinned import HostSlab

DOWNLOAD_CHUNK_BYTES = 64 * 2**20
UPLOAD_CHUNK_BYTES = 16 * 2**20
DOWNLOAD_BUFFERS = 3
# Gradients that may stay on the device behind copies still under way: 2.4 ms of copying at 55 GB/s, 20 ms at 6.5.
HELD_GRADIENT_BYTES = 128 * 2**20


@dataclass
class _Buffer:
    slab: HostSlab
    event: torch.cuda.Event

    def view(self, dtype: torch.dtype, num_elements: int) -> Tensor:
        return self.slab.view(dtype)[:num_elements]


class Landing(Protocol):
    """The end of one copy to the host."""

    def synchronize(self) -> None:
        """Blocks the calling thread until the copy has landed."""


class GradientSender(Protocol):
    """Sends the gradients of one device to host memory. Called by one thread at a time."""

    def send(self, source: Tensor, staged: Tensor) -> Landing:
        """Begins to copy the flat `source` into `staged`, host memory of its dtype and length."""

    def free_when_sent(self, gradient: Tensor) -> None:
        """Takes a gradient whose copies have all been begun; the caller drops its own reference."""

    def free_all(self) -> None:
        """Lets go of every gradient that was taken."""


class DownloadSender:
    """Sends gradients down the copy stream of a CUDA device, without the host waiting.

    What orders what, for a gradient made on stream M and copied on stream D:

    - D waits for M before each copy, so a copy reads the finished gradient.
    - The landing is an event on D behind the copy; the host reads staging after it, and gives staging out again for
      the next copy only after it has read.
    - M waits for an event on D behind the gradient's last copy before the reference is dropped. The allocator hands
      the memory to work that is queued on M later, so that work runs after the copy. No `record_stream` on D: the
      block would then be free only once the host sees D's event done, and a host that has queued far ahead of the
      device would take new memory for every gradient in between. Dropped this way, gradients hold at most
      `HELD_GRADIENT_BYTES` behind the one being made, however far ahead the host is.
    - Memory that came from another stream than M gets `record_stream(M)`, which orders its reuse behind that same
      wait; torch ignores the call where M is the stream it came from.

    Args:
        device: the CUDA device.
        stream: D.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device = device
        self._stream = stream
        self._held: deque[tuple[Tensor, torch.cuda.Stream, torch.cuda.Event]] = deque()
        self._held_bytes = 0

    def send(self, source: Tensor, staged: Tensor) -> torch.cuda.Event:
        """Copies on D; `source` has to be ready on the current stream. Returns the event behind the copy.

        The event is a blocking one: the host thread that waits for it sleeps, and leaves its core to others.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        landing = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(self._stream):
            staged.copy_(source, non_blocking=True)
            landing.record(self._stream)
        return landing

    def free_when_sent(self, gradient: Tensor) -> None:
        """Keeps `gradient`, ready on the current stream, until that stream has been told to wait for its copies."""
        made_on = torch.cuda.current_stream(self._device)
        gradient.record_stream(made_on)
        sent = torch.cuda.Event()
        sent.record(self._stream)
        self._held.append((gradient, made_on, sent))
        self._held_bytes += gradient.nbytes
        while self._held_bytes > HELD_GRADIENT_BYTES:
            self._free_oldest()

    def free_all(self) -> None:
        """Drops every gradient held, in order."""
        while self._held:
            self._free_oldest()

    def _free_oldest(self) -> None:
        gradient, made_on, sent = self._held.popleft()
        made_on.wait_event(sent)
        self._held_bytes -= gradient.nbytes


class HostSender:
    """The same for gradients that are in host memory already: a copy that has landed when `send` returns."""

    def send(self, source: Tensor, staged: Tensor) -> Landing:
        """Copies on the calling thread."""
        staged.copy_(source)
        return _Landed()

    def free_when_sent(self, gradient: Tensor) -> None:
        """Nothing to wait for."""

    def free_all(self) -> None:
        """Nothing is held."""


class _Landed:
    def synchronize(self) -> None:
        pass


class CopyEngine:
    """Staged, asynchronous copies for one CUDA device.

    Args:
        device: the CUDA device.
        pin: page-lock the staging buffers. False measures what pageable memory costs; copies then block the host.
    """

    def __init__(self, device: torch.device, *, pin: bool = True) -> None:
        self.device = device
        self.download_stream = torch.cuda.Stream(device)
        self.upload_stream = torch.cuda.Stream(device)
        self.sender = DownloadSender(device, self.download_stream)
        self._pin = pin
        self._download_ring: deque[_Buffer] = deque()
        self._upload_lock = threading.Lock()
        with torch.cuda.stream(self.upload_stream):
            self._upload_staging = torch.empty(UPLOAD_CHUNK_BYTES, dtype=torch.uint8, device=device)

    @property
    def missing_download_bytes(self) -> int:
        """Host memory that `prepare_download` will take."""
        return 0 if self._download_ring else DOWNLOAD_BUFFERS * DOWNLOAD_CHUNK_BYTES

    def prepare_download(self) -> None:
        """Page-locks the staging of `download`, before the first backward rather than in it."""
        if not self._download_ring:
            self._download_ring = _ring(DOWNLOAD_BUFFERS, DOWNLOAD_CHUNK_BYTES, "gradient staging", self._pin)

    def download(self, pieces: Iterable[tuple[Tensor, Callable[[Tensor], None]]]) -> None:
        """Copies flat device tensors to staging and hands each to its consumer, while the next ones are under way.

        Args:
            pieces: `(source, consume)`. `source` is a flat device tensor of at most `DOWNLOAD_CHUNK_BYTES`, ready on
                the current stream; `consume` gets its copy, valid until it returns.

        When this returns every source has been read, so its memory may be freed without `record_stream`.
        """
        self.prepare_download()
        self.download_stream.wait_stream(torch.cuda.current_stream(self.device))
        in_flight: deque[tuple[_Buffer, Tensor, Callable[[Tensor], None]]] = deque()
        for source, consume in pieces:
            if len(in_flight) == len(self._download_ring):
                _consume(in_flight)
            buffer = self._download_ring[0]
            self._download_ring.rotate(-1)
            staged = buffer.view(source.dtype, source.numel())
            with torch.cuda.stream(self.download_stream):
                staged.copy_(source, non_blocking=True)
                buffer.event.record(self.download_stream)
            in_flight.append((buffer, staged, consume))
        while in_flight:
            _consume(in_flight)

    def begin_upload(self) -> None:
        """Orders the uploads that follow behind all work queued so far, which may still read the old values."""
        self.upload_stream.wait_stream(torch.cuda.current_stream(self.device))

    def upload(self, source: Tensor, target: Tensor) -> None:
        """Copies the flat host `source` to the card and casts it there into the flat device `target`.

        The host does not wait where `source` is page-locked, so `source` must keep its values until `finish_upload`.
        Any thread may call: copy and cast of a piece are queued together, since all pieces share one device buffer.

        Args:
            source: at most `UPLOAD_CHUNK_BYTES`.
            target: as many elements, of any dtype.
        """
        with self._upload_lock, torch.cuda.stream(self.upload_stream):
            staged = self._upload_staging.view(source.dtype)[: source.numel()]
            staged.copy_(source, non_blocking=True)
            target.copy_(staged)

    def finish_upload(self) -> None:
        """Blocks until every upload has landed; afterwards any stream reads the new values."""
        self.upload_stream.synchronize()


class CopyEngines(dict[torch.device, CopyEngine]):
    """One `CopyEngine` per CUDA device, made when a device is first used.

    Args:
        pin: page-lock the staging buffers.
    """

    def __init__(self, *, pin: bool) -> None:
        super().__init__()
        self._pin = pin

    def __missing__(self, device: torch.device) -> CopyEngine:
        self[device] = engine = CopyEngine(device, pin=self._pin)
        return engine


def _ring(count: int, nbytes: int, purpose: str, pin: bool) -> deque[_Buffer]:
    return deque(_Buffer(HostSlab(nbytes, pin=pin, purpose=purpose), torch.cuda.Event()) for _ in range(count))


def _consume(in_flight: deque[tuple[_Buffer, Tensor, Callable[[Tensor], None]]]) -> None:
    buffer, staged, consume = in_flight.popleft()
    buffer.event.synchronize()
    consume(staged)

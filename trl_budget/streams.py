"""Copies between host and device that overlap with host arithmetic.

The only module that issues `non_blocking` copies. Each direction has a stream of its own. Gradients come down through
a small ring of page-locked staging buffers; a buffer is touched by the host only after the event behind its last copy.
Masters go up as they are and are cast on the card. Bit-exact: bytes are moved, casts are torch's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from trl_budget.pinned import HostSlab

DOWNLOAD_CHUNK_BYTES = 64 * 2**20
UPLOAD_CHUNK_BYTES = 16 * 2**20
DOWNLOAD_BUFFERS = 3


@dataclass
class _Buffer:
    slab: HostSlab
    event: torch.cuda.Event

    def view(self, dtype: torch.dtype, num_elements: int) -> Tensor:
        return self.slab.view(dtype)[:num_elements]


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
        self._download_ring = _ring(DOWNLOAD_BUFFERS, DOWNLOAD_CHUNK_BYTES, "gradient staging", pin)
        with torch.cuda.stream(self.upload_stream):
            self._upload_staging = torch.empty(UPLOAD_CHUNK_BYTES, dtype=torch.uint8, device=device)

    def download(self, pieces: Iterable[tuple[Tensor, Callable[[Tensor], None]]]) -> None:
        """Copies flat device tensors to staging and hands each to its consumer, while the next ones are under way.

        Args:
            pieces: `(source, consume)`. `source` is a flat device tensor of at most `DOWNLOAD_CHUNK_BYTES`, ready on
                the current stream; `consume` gets its copy, valid until it returns.

        When this returns every source has been read, so its memory may be freed without `record_stream`.
        """
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

        Args:
            source: at most `UPLOAD_CHUNK_BYTES`.
            target: as many elements, of any dtype.
        """
        with torch.cuda.stream(self.upload_stream):
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

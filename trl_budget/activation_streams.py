"""Copies of activations to the host and back, beside the work that makes and uses them.

The sibling of `streams.py` for tensors that come back: what is sent down in forward is fetched in backward, each way
on a stream of its own. Only `finish` blocks the host, all other order is kept by events that streams wait for.
Bit-exact: bytes are moved.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class ActivationCopies(Protocol):
    """Moves the activations of one device. Called by one thread at a time."""

    def send(self, source: Tensor, staged: Tensor) -> Any:
        """Begins to copy `source`, ready on the current stream, into `staged`, host memory of its shape and dtype.

        Returns:
            The end of the copy; the caller keeps a reference to `source` until `wait` has been told of it.
        """

    def fetch(self, staged: Tensor, sent: Any) -> tuple[Tensor, Any]:
        """Begins to copy `staged`, whose copy down ends at `sent`, to new device memory.

        Returns:
            The device tensor and the end of the copy; the tensor is neither used nor dropped before `wait`.
        """

    def wait(self, copy: Any, tensor: Tensor) -> None:
        """Orders what the current stream does next behind `copy`, so that `tensor` may be used and dropped."""

    def finish(self) -> None:
        """Blocks until every copy has ended, so that the host memory may be freed."""


class DeviceStreams(Protocol):
    """The streams of one device: a thin layer over `torch.cuda`, so that their order can be tested without one."""

    @property
    def download(self) -> Any:
        """The stream of the copies to the host."""

    @property
    def upload(self) -> Any:
        """The stream of the copies from the host."""

    def current(self) -> Any:
        """The stream on which the caller's work is queued, whose memory `new_tensor` takes."""

    def new_tensor(self, like: Tensor) -> Tensor:
        """Uninitialised device memory of the shape and dtype of `like`, allocated on the current stream."""

    def copy(self, target: Tensor, source: Tensor, stream: Any) -> None:
        """Queues a copy on `stream`."""

    def use(self, tensor: Tensor, stream: Any) -> None:
        """Tells the allocator that `stream` uses `tensor`; without effect where it was allocated on that stream."""


class CudaStreams:
    """The streams of a CUDA device.

    Args:
        device: with an index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.download = torch.cuda.Stream(device)
        self.upload = torch.cuda.Stream(device)

    def current(self) -> torch.cuda.Stream:
        """The calling thread's stream on the device; autograd sets it to the one of the forward."""
        return torch.cuda.current_stream(self._device)

    def new_tensor(self, like: Tensor) -> Tensor:
        """See `DeviceStreams`."""
        return torch.empty(like.shape, dtype=like.dtype, device=self._device)

    def copy(self, target: Tensor, source: Tensor, stream: torch.cuda.Stream) -> None:
        """See `DeviceStreams`; the host does not wait where the host tensor is page-locked."""
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def use(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        """See `DeviceStreams`."""
        tensor.record_stream(stream)


class StreamedCopies:
    """Copies that overlap with the work of the stream they are asked for on.

    What orders what, for an activation made on stream M, sent on stream D, fetched on stream U:

    - D waits for M before the copy down, so it reads the finished activation; it waits for U as well, so the host
      memory that it writes is not read by the copy up of what lay there before.
    - M waits for the event behind the copy down before the activation is dropped, as in `streams.DownloadSender` and
      for its reason: the allocator gives the memory to work queued on M later, so a host far ahead of the device takes
      no new memory.
    - The memory for the way back is allocated on M, whose earlier work may still use it: U waits for M before the copy
      up, and for the event behind the copy down, which may have been queued a moment ago.
    - M waits for the event behind the copy up before the tensor is used or dropped.
    """

    def __init__(self, streams: DeviceStreams) -> None:
        self._streams = streams

    def send(self, source: Tensor, staged: Tensor) -> Any:
        """See `ActivationCopies`. Queued on D; returns the event behind the copy."""
        download = self._streams.download
        download.wait_stream(self._streams.current())
        download.wait_stream(self._streams.upload)
        self._streams.copy(staged, source, download)
        return download.record_event()

    def fetch(self, staged: Tensor, sent: Any) -> tuple[Tensor, Any]:
        """See `ActivationCopies`. Queued on U; returns the tensor and the event behind the copy."""
        upload = self._streams.upload
        target = self._streams.new_tensor(staged)
        upload.wait_stream(self._streams.current())
        upload.wait_event(sent)
        self._streams.copy(target, staged, upload)
        return target, upload.record_event()

    def wait(self, copy: Any, tensor: Tensor) -> None:
        """See `ActivationCopies`. `copy` is the event that `send` or `fetch` returned for `tensor`."""
        current = self._streams.current()
        self._streams.use(tensor, current)
        current.wait_event(copy)

    def finish(self) -> None:
        """See `ActivationCopies`."""
        self._streams.download.synchronize()
        self._streams.upload.synchronize()


class SynchronousCopies:
    """The same for activations that are in host memory already: a copy is done when its call returns."""

    def send(self, source: Tensor, staged: Tensor) -> None:
        """Copies on the calling thread."""
        staged.copy_(source)

    def fetch(self, staged: Tensor, sent: None) -> tuple[Tensor, None]:
        """Copies on the calling thread."""
        return staged.clone(), None

    def wait(self, copy: None, tensor: Tensor) -> None:
        """Nothing to wait for."""

    def finish(self) -> None:
        """Nothing is under way."""

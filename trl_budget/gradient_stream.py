"""Gradients leave for the host one by one while backward runs, and host threads sum them in fp32.

A gradient is copied to staging as soon as backward has made it and its device memory is given back, see
`streams.DownloadSender`. Host threads wait for the copy and add it to the accumulator, during the rest of backward and
the next forward. The sums have the bits of `GradientAccumulator`'s: the first gradient of a step is converted, later
ones are added in the order in which backward made them.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trl_budget.errors import HostThreadError
from trl_budget.grad_offload import ADD_BLOCK_ELEMENTS, add_gradient
from trl_budget.host_threads import HostThreads, ThreadScratch
from trl_budget.parameter_slots import ParameterSlot
from trl_budget.pinned import HostSlab
from trl_budget.staging_ring import ALIGNMENT_BYTES, Space, StagingRing
from trl_budget.streams import CopyEngines, GradientSender, HostSender, Landing

# One copy: long enough for the bus (2 MB take 36 us at 55 GB/s), short enough for sums to begin early.
CHUNK_BYTES = 16 * 2**20
# Gradients that have landed and wait for the host threads. Adding is slower than copying (16 against 55 GB/s of bf16
# on 16 cores), so the ring takes in what a burst brings: half a GiB, of the 1 GiB that a node may spend besides state.
RING_BYTES = 512 * 2**20


@dataclass(eq=False)
class _Piece:
    """One copy under way: what it will be added to, and how many of its blocks are still to be added."""

    slot_id: int
    space: Space
    num_blocks: int
    is_first: bool
    landing: Landing
    tensors: tuple[Tensor, Tensor] | None  # the accumulator's part and the staged copy, until the last block is added


class _Progress:
    """What sender and host threads tell each other. Holds no tensor: a thread about to return must not keep any."""

    def __init__(self, ring: StagingRing) -> None:
        self._ring = ring
        self._changed = threading.Condition()  # guards everything here
        self._num_open: Counter[int] = Counter()  # pieces under way, by slot
        self.error: BaseException | None = None
        self.is_error_reported = False

    def take_space(self, num_bytes: int) -> Space:
        """Blocks until the ring has space."""
        with self._changed:
            while (space := self._ring.take(num_bytes)) is None:
                self._changed.wait()
            return space

    def begin(self, piece: _Piece) -> None:
        with self._changed:
            self._num_open[piece.slot_id] += 1

    def finish(self, piece: _Piece, num_blocks: int, error: BaseException | None) -> None:
        with self._changed:
            self.error = self.error or error
            piece.num_blocks -= num_blocks
            if piece.num_blocks > 0:
                return
            piece.tensors = None
            self.give_back(piece.space)
            self._num_open[piece.slot_id] -= 1
            if self._num_open[piece.slot_id] <= 0:  # below it where an interrupt came before `begin`
                del self._num_open[piece.slot_id]

    def give_back(self, space: Space) -> None:
        with self._changed:
            self._ring.give_back(space)
            self._changed.notify_all()

    def wait(self, slot_id: int | None = None) -> None:
        """Blocks until nothing of the slot, or of any slot, is under way."""
        with self._changed:
            while self._num_open if slot_id is None else slot_id in self._num_open:
                self._changed.wait()


class GradientStream:
    """Sends gradients to the host and sums them there, with a bounded number of bytes on the way.

    Staging is a ring of fixed size: while it is full, `on_gradient` blocks, and backward with it. One gradient of a
    parameter is summed at a time, the next one waits for it.

    Args:
        engines: copy engines, by CUDA device.
        threads: add the gradients.
        pin: page-lock the staging of CUDA gradients.
        ring_bytes: size of the staging ring; less is taken where all gradients together are smaller.
        chunk_bytes: largest copy; a gradient above that is cut.
        sender: sends gradients of any device, in place of the engines' senders.
    """

    takes_gradients_as_they_come = True

    def __init__(
        self,
        engines: CopyEngines,
        threads: HostThreads,
        *,
        pin: bool = True,
        ring_bytes: int = RING_BYTES,
        chunk_bytes: int = CHUNK_BYTES,
        sender: GradientSender | None = None,
    ) -> None:
        self._engines = engines
        self._threads = threads
        self._pin = pin
        self._ring_bytes = ring_bytes
        self._chunk_bytes = min(chunk_bytes, ring_bytes)
        self._sender = sender
        self._host_sender = HostSender()
        self._slab: HostSlab | None = None
        self._progress = _Progress(StagingRing(0))
        self._scratch = ThreadScratch()
        self._sending = threading.Lock()  # one gradient at a time, also where several threads run a backward

    def staging_bytes(self, parameters: Sequence[Tensor]) -> int:
        """The ring, as long as there is none."""
        if self._slab is not None or not parameters:
            return 0
        needed = sum(p.nbytes + ALIGNMENT_BYTES for p in parameters)
        num_bytes = min(self._ring_bytes, max(needed, self._chunk_bytes))
        return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def prepare(self, slots: Iterable[ParameterSlot]) -> None:
        """Allocates staging and starts the threads: page-locking in a backward could hold up other processes."""
        parameters = [slot.parameter for slot in slots if not slot.is_in_place]
        num_bytes = self.staging_bytes(parameters)
        if num_bytes == 0:
            return
        is_pinned = self._pin and any(p.is_cuda for p in parameters)
        self._slab = HostSlab(num_bytes, pin=is_pinned, purpose="gradient staging")
        self._progress = _Progress(StagingRing(num_bytes))
        self._threads.start()

    @torch.no_grad()
    def on_gradient(self, slot: ParameterSlot) -> None:
        """Sends `slot.parameter.grad` and sets it to None. The gradient has to be ready on the current stream.

        Raises:
            HostThreadError: adding an earlier gradient failed.
        """
        with self._sending:
            self._report_error()
            gradient = slot.parameter.grad
            if gradient is None:  # another thread has taken it meanwhile
                return
            assert slot.accumulator is not None
            self._progress.wait(id(slot))
            slot.scale_accumulator()
            source = gradient.contiguous().view(-1)
            target = slot.accumulator.view(-1)
            sender = self._sender_for(gradient.device)
            num_elements = self._chunk_bytes // source.element_size()
            for start in range(0, source.numel(), num_elements):
                stop = start + num_elements
                self._send_piece(sender, slot, source[start:stop], target[start:stop])
            sender.free_when_sent(source)
            slot.parameter.grad = None
            slot.accumulator_is_filled = True

    def _send_piece(self, sender: GradientSender, slot: ParameterSlot, source: Tensor, target: Tensor) -> None:
        assert self._slab is not None
        space = self._progress.take_space(source.nbytes)
        try:
            staged = self._slab.storage[space.start : space.start + source.nbytes].view(source.dtype)
            landing = sender.send(source, staged)
        except BaseException:
            self._progress.give_back(space)
            raise
        starts = range(0, source.numel(), ADD_BLOCK_ELEMENTS)
        is_first = not slot.accumulator_is_filled
        piece = _Piece(id(slot), space, len(starts), is_first, landing, (target, staged))
        num_queued = 0
        try:
            self._progress.begin(piece)
            for start in starts:
                self._threads.submit(_add_block, self._progress, self._scratch, piece, start)
                num_queued += 1
        except BaseException as error:  # an interrupt, or the interpreter is shutting down
            self._progress.finish(piece, len(starts) - num_queued, error)
            raise

    def _sender_for(self, device: torch.device) -> GradientSender:
        if self._sender is not None:
            return self._sender
        return self._engines[device].sender if device.type == "cuda" else self._host_sender

    def collect(self, slots: Sequence[ParameterSlot]) -> None:
        """Sends the `parameter.grad` of every slot and lets go of all device memory; the sums may still be under way.

        At the end of a backward, on the stream that the caller goes on with: what that stream does next on the device
        may wait for the last copies.
        """
        for slot in slots:
            self.on_gradient(slot)
        self._free_device_memory()
        self._report_error()

    def _free_device_memory(self) -> None:
        with self._sending:
            for sender in [self._sender, *(engine.sender for engine in self._engines.values())]:
                if sender is not None:
                    sender.free_all()

    def wait(self) -> None:
        """Blocks until every gradient sent is in its accumulator.

        Raises:
            HostThreadError: adding one failed, so the sums are not to be used.
        """
        self._progress.wait()
        self._free_device_memory()
        try:
            self._report_error()
        finally:
            self._progress.error, self._progress.is_error_reported = None, False

    def discard(self) -> None:
        """Blocks until nothing is under way any more; an error that has been reported already is forgotten.

        Raises:
            HostThreadError: adding a gradient failed, and nobody has been told yet.
        """
        was_reported = self._progress.is_error_reported
        try:
            self.wait()
        except HostThreadError:
            if not was_reported:
                raise

    def _report_error(self) -> None:
        if self._progress.error is not None:
            self._progress.is_error_reported = True
            raise HostThreadError(
                "A host thread could not add a gradient to its fp32 accumulator, so the gradients of this step are "
                "incomplete. Drop them with optimizer.zero_grad() and see the error above for the cause."
            ) from self._progress.error


def _add_block(progress: _Progress, scratch: ThreadScratch, piece: _Piece, start: int) -> None:
    """Runs on the host threads: waits for the copy and adds one block of it."""
    error: BaseException | None = None
    try:
        piece.landing.synchronize()
        assert piece.tensors is not None
        target, staged = (tensor[start : start + ADD_BLOCK_ELEMENTS] for tensor in piece.tensors)
        add_gradient(target, staged, scratch, is_first=piece.is_first)
        del target, staged
    except BaseException as raised:
        error = raised
    progress.finish(piece, 1, error)

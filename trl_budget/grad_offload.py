"""Gradients move to fp32 accumulators on the host: the hooks, the sum, and the move when a backward ends.

Sums over micro-batches are fp32, never bf16: the first gradient of a step is converted, later ones are added. Moving
them while backward still runs is `gradient_stream.py`'s job. Nothing is clipped here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from trl_budget.errors import SettingsError
from trl_budget.host_threads import HostThreads, ThreadScratch
from trl_budget.parameter_slots import ParameterSlot
from trl_budget.streams import DOWNLOAD_CHUNK_BYTES, CopyEngines

# torch's mixed-dtype `fp32.add_(bf16)` takes .603 s for 1e9 elements on 16 cores; converting into a buffer that stays
# in cache and adding fp32 to fp32 takes .131 s (.125 s in blocks a quarter as long, which cost four times the calls;
# benchmarks/results/host_kernels.json).
ADD_BLOCK_ELEMENTS = 2**22


class GradientCollector(Protocol):
    """Moves gradients of slots that are not stepped in place from `parameter.grad` to their accumulators.

    Attributes:
        takes_gradients_as_they_come: whether `on_gradient` leaves nothing in `parameter.grad` for the backward's end.
    """

    takes_gradients_as_they_come: bool

    def staging_bytes(self, parameters: Sequence[Tensor]) -> int:
        """Host memory that `prepare` will take for slots of these parameters, beside what it has."""

    def prepare(self, slots: Iterable[ParameterSlot]) -> None:
        """Allocates what moving these slots' gradients needs."""

    def on_gradient(self, slot: ParameterSlot) -> None:
        """`slot.parameter.grad` has just been made by a backward that still runs."""

    def collect(self, slots: Sequence[ParameterSlot]) -> None:
        """A backward has ended, or somebody asks: takes the `parameter.grad` of each slot."""

    def wait(self) -> None:
        """Returns when the accumulators hold everything that was taken."""

    def discard(self) -> None:
        """As `wait`, for accumulators whose content will be dropped."""


class GradientAccumulator:
    """Leaves gradients where they are until their backward ends, then moves all of them, and returns when it is done.

    Args:
        engines: copy engines, by CUDA device.
        threads: add the gradients.
    """

    takes_gradients_as_they_come = False

    def __init__(self, engines: CopyEngines, threads: HostThreads) -> None:
        self._engines = engines
        self._threads = threads
        self._scratch = ThreadScratch()

    def staging_bytes(self, parameters: Sequence[Tensor]) -> int:
        """Three buffers for every CUDA device that has none yet."""
        devices = {p.device for p in parameters if p.is_cuda}
        return sum(self._engines[device].missing_download_bytes for device in devices)

    def prepare(self, slots: Iterable[ParameterSlot]) -> None:
        """Page-locks the staging of every CUDA device."""
        for device in {slot.parameter.device for slot in slots}:
            if device.type == "cuda":
                self._engines[device].prepare_download()

    def on_gradient(self, slot: ParameterSlot) -> None:
        """Nothing yet: the gradient stays in `parameter.grad`."""

    def wait(self) -> None:
        """Nothing is under way once `collect` has returned."""

    def discard(self) -> None:
        """Nothing is under way once `collect` has returned."""

    @torch.no_grad()
    def collect(self, slots: Sequence[ParameterSlot]) -> None:
        """Adds every pending `parameter.grad` to its accumulator and sets it to None."""
        by_device: dict[torch.device, list[ParameterSlot]] = {}
        for slot in slots:
            gradient = slot.parameter.grad
            if slot.is_in_place or gradient is None:
                continue
            slot.scale_accumulator()
            # Here, on the current stream: the copy stream waits for that one once, before the first piece.
            slot.parameter.grad = gradient.contiguous()
            by_device.setdefault(gradient.device, []).append(slot)
        for device, pending in by_device.items():
            pieces = self._pieces(pending)
            if device.type == "cuda":
                self._engines[device].download(pieces)
            else:
                for source, consume in pieces:
                    consume(source)
            for slot in pending:
                slot.parameter.grad = None
                slot.accumulator_is_filled = True

    def _pieces(self, slots: Iterable[ParameterSlot]) -> Iterator[tuple[Tensor, Callable[[Tensor], None]]]:
        for slot in slots:
            assert slot.accumulator is not None
            gradient = slot.parameter.grad
            assert gradient is not None
            source = gradient.reshape(-1)
            accumulator = slot.accumulator.view(-1)
            chunk = DOWNLOAD_CHUNK_BYTES // source.element_size()
            for start in range(0, source.numel(), chunk):
                target = accumulator[start : start + chunk]
                yield source[start : start + chunk], self._adder(target, is_first=not slot.accumulator_is_filled)

    def _adder(self, target: Tensor, *, is_first: bool) -> Callable[[Tensor], None]:
        def add(staged: Tensor) -> None:
            def add_block(start: int) -> None:
                block = slice(start, start + ADD_BLOCK_ELEMENTS)
                add_gradient(target[block], staged[block], self._scratch, is_first=is_first)

            self._threads.run(add_block, range(0, staged.numel(), ADD_BLOCK_ELEMENTS))

        return add


@torch.no_grad()
def add_gradient(target: Tensor, gradient: Tensor, scratch: ThreadScratch, *, is_first: bool) -> None:
    """Adds one block of a gradient to its accumulator, in fp32.

    Args:
        target: `[n]`, fp32, host; written.
        gradient: `[n]`, fp32 or bf16, host; read.
        scratch: where a bf16 block is converted.
        is_first: the first gradient of a step replaces what `target` holds.
    """
    if is_first:
        target.copy_(gradient)
    elif gradient.dtype == torch.float32:
        target.add_(gradient)
    else:
        target.add_(scratch.take(gradient.numel()).copy_(gradient))


def check_gradient(slot: ParameterSlot) -> None:
    """Refuses sparse gradients.

    Raises:
        SettingsError: `parameter.grad` is sparse.
    """
    if slot.parameter.grad is not None and slot.parameter.grad.is_sparse:
        raise SettingsError(
            f"{slot.name} has a sparse gradient. AdamW needs dense gradients, as torch's does. "
            "Build the embedding with sparse=False."
        )


class BackwardHooks:
    """Calls back whenever a backward has made the gradient of a hooked parameter, and once when that backward ends.

    The callbacks run inside `loss.backward()`, so their time counts as backward's and their errors reach the caller.
    With reentrant checkpointing each nested backward has an end of its own, which only splits the sum. The hooks hold
    the callbacks' owner weakly: a parameter outlives its optimizer without keeping the optimizer's memory.

    Args:
        on_gradient: gets the parameter, on the thread and the CUDA stream that made `parameter.grad`.
        on_end: gets nothing, on the thread that called backward; not called where a backward raises.

    Source: `queue_callback` is how torch's DDP and FSDP finish a backward (torch/nn/parallel/distributed.py).
    """

    def __init__(self, on_gradient: weakref.WeakMethod, on_end: weakref.WeakMethod) -> None:
        self._on_gradient = on_gradient
        self._on_end = on_end
        self._graph_task = -1
        self._handles: list[RemovableHandle] = []

    def attach(self, parameter: Tensor) -> None:
        """Hooks one leaf parameter."""
        this = weakref.ref(self)

        def on_gradient(parameter: Tensor) -> None:
            hooks = this()
            if hooks is not None:
                hooks.on_gradient(parameter)

        self._handles.append(parameter.register_post_accumulate_grad_hook(on_gradient))

    def on_gradient(self, parameter: Tensor) -> None:
        """Calls back and queues the end's callback, once per backward: a failed one leaves no stale flag behind."""
        graph_task = torch._C._current_graph_task_id()
        if graph_task != self._graph_task:
            self._graph_task = graph_task
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        callback = self._on_gradient()
        if callback is not None:
            callback(parameter)

    def _end(self) -> None:
        callback = self._on_end()
        if callback is not None:
            callback()

    def detach(self) -> None:
        """Removes every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

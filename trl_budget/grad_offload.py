"""Gradients move to fp32 accumulators on the host when a backward ends.

Sums over micro-batches are fp32, never bf16: the first gradient of a step is converted, later ones are added. A
gradient is freed on the device as soon as it has been read. Nothing is scaled or clipped here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from trl_budget.errors import SettingsError
from trl_budget.parameter_slots import ParameterSlot
from trl_budget.streams import DOWNLOAD_CHUNK_BYTES, CopyEngines

# torch's mixed-dtype `fp32.add_(bf16)` takes .603 s for 1e9 elements on 16 cores; converting into a buffer that stays
# in cache and adding fp32 to fp32 takes .125 s (benchmarks/results/host_kernels.json).
ADD_CHUNK_ELEMENTS = 2**20


class GradientAccumulator:
    """Drains `parameter.grad` of slots that are not stepped in place.

    Args:
        engines: copy engines, by CUDA device.
    """

    def __init__(self, engines: CopyEngines) -> None:
        self._engines = engines
        self._scratch = torch.empty(ADD_CHUNK_ELEMENTS, dtype=torch.float32)

    @torch.no_grad()
    def drain(self, slots: Iterable[ParameterSlot]) -> None:
        """Adds every pending `parameter.grad` to its accumulator and sets it to None."""
        by_device: dict[torch.device, list[ParameterSlot]] = {}
        for slot in slots:
            gradient = slot.parameter.grad
            if slot.is_in_place or gradient is None:
                continue
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
                consume = self._adder(target) if slot.accumulator_is_filled else _copier(target)
                yield source[start : start + chunk], consume

    def _adder(self, target: Tensor) -> Callable[[Tensor], None]:
        def add(staged: Tensor) -> None:
            if staged.dtype == torch.float32:
                target.add_(staged)
                return
            for start in range(0, staged.numel(), ADD_CHUNK_ELEMENTS):
                piece = staged[start : start + ADD_CHUNK_ELEMENTS]
                converted = self._scratch[: piece.numel()].copy_(piece)
                target[start : start + piece.numel()].add_(converted)

        return add


def _copier(target: Tensor) -> Callable[[Tensor], None]:
    def copy(staged: Tensor) -> None:
        target.copy_(staged)

    return copy


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


class BackwardEndHook:
    """Calls back once at the end of every backward that reaches one of the hooked parameters.

    The callback runs inside `loss.backward()`, so its time counts as backward's and its errors reach the caller. With
    reentrant checkpointing it runs at the end of each nested backward, which only splits the sum. The hooks hold the
    callback's owner weakly: a parameter outlives its optimizer without keeping the optimizer's memory.

    Source: `queue_callback` is how torch's DDP and FSDP finish a backward (torch/nn/parallel/distributed.py).
    """

    def __init__(self, callback: weakref.WeakMethod) -> None:
        self._callback = callback
        self._graph_task = -1
        self._handles: list[RemovableHandle] = []

    def attach(self, parameter: Tensor) -> None:
        """Hooks one leaf parameter."""
        this = weakref.ref(self)

        def on_gradient(_: Tensor) -> None:
            hook = this()
            if hook is not None:
                hook.on_gradient()

        self._handles.append(parameter.register_post_accumulate_grad_hook(on_gradient))

    def on_gradient(self) -> None:
        """Queues the callback, once per backward: a failed backward leaves no stale flag behind."""
        graph_task = torch._C._current_graph_task_id()
        if graph_task == self._graph_task:
            return
        self._graph_task = graph_task
        torch.autograd.Variable._execution_engine.queue_callback(self._run)

    def _run(self) -> None:
        callback = self._callback()
        if callback is not None:
            callback()

    def detach(self) -> None:
        """Removes every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

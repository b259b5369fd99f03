"""Gradients that have left for the host come back to `parameter.grad` for a while, and edits of them are taken over.

Shown is the fp32 sum cast to the parameter's dtype. Elements that still equal that cast afterwards keep every fp32
bit; the others become what was written. Of several ranks, each sees and edits its own sum before the gradients are
reduced, and all of them the mean afterwards, as under DDP.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor

from trl_budget.compute_weights import checksums
from trl_budget.errors import SettingsError
from trl_budget.grad_offload import check_gradient
from trl_budget.host_gradients import HostGradients
from trl_budget.parameter_slots import ParameterSlot
from trl_budget.ranks import Ranks
from trl_budget.reduction import SharedGradients
from trl_budget.shared_state import SharedSlot

BLOCK_ELEMENTS = 2**22  # compared at once, so that no temporary is as large as an embedding


class GradientLoan:
    """Lends the gradients of one process.

    Args:
        slots: the optimizer's slots.
        gradients: theirs, collected.
    """

    def __init__(self, slots: Iterable[ParameterSlot], gradients: HostGradients) -> None:
        self._slots = [slot for slot in slots if not slot.is_in_place]
        self._gradients = gradients

    @contextmanager
    def lent(self) -> Iterator[None]:
        """`parameter.grad` holds the gradients inside; see `HostAdamW.editable_gradients`."""
        self._gradients.settle()
        try:
            with torch.no_grad():
                for slot in self._slots:
                    self._show(slot)
            self._gradients.is_lent = True
            yield
            with torch.no_grad():
                self._end()
        finally:
            self._gradients.is_lent = False
            for slot in self._slots:
                slot.parameter.grad = None

    def _show(self, slot: ParameterSlot) -> None:
        if slot.gradient is not None:
            # Cast on the host, where fp32 is: the device never holds more than the gradients themselves.
            cast_gradient = slot.gradient.to(slot.parameter.dtype)
            slot.parameter.grad = cast_gradient.to(slot.parameter.device, copy=True)

    def _end(self) -> None:
        for slot in self._slots:
            check_gradient(slot)
        changed = [slot for slot in self._slots if self._take_over(slot, slot.parameter.grad)]
        if changed:
            self._gradients.forget_norm()

    def _take_over(self, slot: ParameterSlot, edited: Tensor | None) -> bool:
        """Returns whether anything was edited."""
        had_gradient = slot.gradient is not None
        if edited is None:
            slot.forget_gradient()
            slot.had_gradient = False  # as torch: None is no zero, which `zero_grad(set_to_none=False)` would make
            return had_gradient
        assert slot.accumulator is not None
        slot.accumulator_is_filled = True
        return write_edits(slot.accumulator, edited, had_gradient=had_gradient)


class SharedGradientLoan(GradientLoan):
    """Lends the gradients of several ranks. Collective once they have been reduced.

    Args:
        slots: the optimizer's slots, in the same order on every rank.
        gradients: theirs, collected.
        ranks: the processes of the job.
    """

    def __init__(self, slots: Iterable[ParameterSlot], gradients: SharedGradients, ranks: Ranks) -> None:
        super().__init__(slots, gradients)
        self._is_reduced = gradients.is_reduced
        self._ranks = ranks

    def _end(self) -> None:
        if not self._is_reduced:
            super()._end()
            return
        self._agree()
        super()._end()
        self._gradients.forget_norm()  # on every rank, also where another one has written
        self._ranks.exchange("take over edited gradients")

    def _take_over(self, slot: ParameterSlot, edited: Tensor | None) -> bool:
        if not self._is_reduced:
            return super()._take_over(slot, edited)
        shared = cast(SharedSlot, slot)
        had_gradient = shared.reduced is not None
        shared.had_gradient = edited is not None and shared.had_gradient
        shared.reduced = None if edited is None else shared.peers[shared.reducer]
        if shared.reduced is None or edited is None or shared.reducer != self._ranks.local_rank:
            return had_gradient != (edited is not None)
        return write_edits(shared.reduced, edited, had_gradient=had_gradient)

    def _agree(self) -> None:
        """All ranks have read the mean, and have made the same of it: one copy serves them all.

        Raises:
            SettingsError: on every rank, where gradients differ.
        """
        gradients = {slot: slot.parameter.grad for slot in self._slots if slot.parameter.grad is not None}
        present = [tensor.contiguous() for tensor in gradients.values()]
        # Without the last, floating-point sum: cards of different kinds may round it differently.
        sums = dict(zip(gradients, checksums(present)[:, :2].tolist(), strict=True)) if present else {}
        everyone = self._ranks.exchange("compare edited gradients", [sums.get(slot) for slot in self._slots])
        for index, slot in enumerate(self._slots):
            other = next((rank for rank, its in enumerate(everyone) if its[index] != everyone[0][index]), None)
            if other is not None:
                raise SettingsError(
                    f"The gradient of {slot.name} was edited and now differs between ranks 0 and {other}. The ranks "
                    "step one set of master weights, so there is no telling whose gradient is meant. Make the same "
                    "edits on every rank."
                )


def write_edits(target: Tensor, edited: Tensor, *, had_gradient: bool) -> bool:
    """Writes every element that is not the cast of what stands there. Returns whether there was one.

    Args:
        target: fp32, host, contiguous; written.
        edited: of the same shape, any floating dtype and device; read.
        had_gradient: whether `target` holds a gradient; all of it is written where not.
    """
    flat, goal = edited.reshape(-1), target.view(-1)
    is_changed = not had_gradient
    for start in range(0, goal.numel(), BLOCK_ELEMENTS):
        block = goal[start : start + BLOCK_ELEMENTS]
        written = flat[start : start + BLOCK_ELEMENTS].to("cpu")
        if not had_gradient:
            block.copy_(written)
            continue
        differs = written != block.to(written.dtype)
        if bool(differs.any()):
            block.copy_(torch.where(differs, written.float(), block))
            is_changed = True
    return is_changed

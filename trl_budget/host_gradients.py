"""The fp32 host gradients of the running step: collected, measured, clipped, forgotten.

Clipping as `torch.nn.utils.clip_grad_norm_` does it, with the norm of `gradient_norm.py`. Accumulators are scaled
late, block by block, while the step has them in cache.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor
from torch.nn import Parameter

from trl_budget.errors import HostThreadError, SettingsError
from trl_budget.grad_offload import GradientCollector, check_gradient
from trl_budget.gradient_norm import is_finite, norm_of_norms, norms_of
from trl_budget.host_threads import HostThreads, ThreadScratch
from trl_budget.parameter_slots import ParameterSlot

logger = logging.getLogger(__name__)


class HostGradients:
    """Gradients of a set of slots.

    Args:
        slots: the optimizer's slots; a live view, slots may be added and dropped.
        collector: moves `parameter.grad` to the host.
        threads: measure the norm.

    Attributes:
        is_lent: whether `parameter.grad` shows what has left already; no backward, clip or step may run then.
    """

    def __init__(
        self, slots: Mapping[Parameter, ParameterSlot], collector: GradientCollector, threads: HostThreads
    ) -> None:
        self._slots = slots
        self._threads = threads
        self.collector = collector
        self.is_lent = False
        self._norm: Tensor | None = None
        self._scratch = ThreadScratch()

    def on_gradient(self, parameter: Tensor) -> None:
        """Called by the hooks: a running backward has made `parameter.grad`.

        Raises:
            SettingsError: the gradients are lent.
        """
        self._refuse_if_lent()
        slot = self._slots.get(cast(Parameter, parameter))
        if slot is not None and not slot.is_in_place and parameter.grad is not None:
            check_gradient(slot)
            self._norm = None
            self.collector.on_gradient(slot)

    def drain(self) -> None:
        """Moves every pending `parameter.grad` to its accumulator and waits for what is under way.

        Raises:
            HostThreadError: summing failed; what has been summed is dropped.
            SettingsError: the gradients are lent.
        """
        self._refuse_if_lent()
        with self._forgetting_lost_sums():
            self._collect(self._slots.values())
            self.collector.wait()

    def _refuse_if_lent(self) -> None:
        if self.is_lent:
            raise SettingsError(
                "A backward, a clip or a step ran inside `editable_gradients()`. `parameter.grad` shows sums that are "
                "on the host already there, and would be added to them a second time. End the `with` block first."
            )

    def wait(self) -> None:
        """As `drain`, for what has left `parameter.grad` already."""
        with self._forgetting_lost_sums():
            self.collector.wait()

    @contextmanager
    def _forgetting_lost_sums(self) -> Iterator[None]:
        try:
            yield
        except HostThreadError:
            self.forget()
            raise

    def on_backward_end(self, built: Iterable[ParameterSlot]) -> None:
        """Called by the hooks: a backward has ended, in which the slots `built` had no hooks yet.

        Where gradients are taken as they come, those of other slots are left alone: another thread's backward may be
        at work on them.
        """
        self._collect(built if self.collector.takes_gradients_as_they_come else self._slots.values())

    def _collect(self, slots: Iterable[ParameterSlot]) -> None:
        pending = [slot for slot in slots if slot.parameter.grad is not None]
        for slot in pending:
            check_gradient(slot)
        separate = [slot for slot in pending if not slot.is_in_place]
        if separate:
            self._norm = None
        self.collector.collect(separate)

    def norm(self) -> Tensor:
        """The norm over everything a step would use. Measured again where user code can reach the gradients."""
        is_reachable = any(slot.is_in_place for slot in self._slots.values())
        if self._norm is None or is_reachable:
            return self._measure({p: slot.gradient for p, slot in self._slots.items() if slot.gradient is not None})
        return self._norm

    def clip(self, max_norm: float, parameters: Iterable[Tensor]) -> Tensor:
        """Measures and scales the gradients of `parameters`, see `HostAdamW.clip_grad_norm_`."""
        gradients = self._of(parameters)
        norm = self._measure(gradients)
        is_whole = gradients.keys() == {slot.parameter for slot in self._slots.values() if slot.gradient is not None}
        if is_whole:
            self._norm = norm
        coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        if not math.isfinite(coefficient.item()) or coefficient.item() == 1.0:  # a factor of 1 changes no bit
            return norm
        if math.isinf(norm.item()):
            if not self._are_finite(gradients):
                return norm
            self._norm = torch.zeros(()) if is_whole else self._norm
            logger.warning(
                "The gradient norm overflows fp32, though all %d gradients are finite. Clipping to %s multiplies them "
                "with 0, as torch's does, so this step follows momentum and weight decay alone.",
                len(gradients),
                max_norm,
            )
        for parameter, gradient in gradients.items():
            slot = self._slots.get(cast(Parameter, parameter))
            if slot is None or slot.is_in_place:
                gradient.mul_(coefficient.to(gradient.device))
            else:
                slot.clip_coefficient = coefficient
        return norm

    def are_finite(self, norm: float) -> bool:
        """Whether a step may use the gradients, whose norm is given. Reads them only where fp32 has no such norm."""
        if math.isfinite(norm):
            return True
        gradients: dict[Tensor, Tensor] = {p: g for p, slot in self._slots.items() if (g := slot.gradient) is not None}
        return math.isinf(norm) and self._are_finite(gradients)

    def _are_finite(self, gradients: Mapping[Tensor, Tensor]) -> bool:
        return all(is_finite(gradient) for gradient in gradients.values())

    def _measure(self, gradients: Mapping[Tensor, Tensor]) -> Tensor:
        return norm_of_norms(list(self._norms(gradients).values()))

    def _norms(self, gradients: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        flat = {parameter: gradient.to("cpu", torch.float32) for parameter, gradient in gradients.items()}
        return norms_of(flat, self._threads)

    def of(self, slot: ParameterSlot) -> Tensor | None:
        """The slot's gradient, with earlier clipping applied."""
        slot.scale_accumulator()
        return slot.gradient

    def _of(self, parameters: Iterable[Tensor]) -> dict[Tensor, Tensor]:
        """The gradient of each parameter that has one, in the order given, with earlier clipping applied."""
        gradients: dict[Tensor, Tensor] = {}
        for parameter in parameters:
            slot = self._slots.get(cast(Parameter, parameter))
            if slot is not None:
                slot.scale_accumulator()
            gradient = parameter.grad if slot is None else slot.gradient
            if gradient is not None:
                gradients[parameter] = gradient
        return gradients

    def settle(self) -> None:
        """Multiplies what is still to be clipped, so that `slot.gradient` is what a step would use."""
        for slot in self._slots.values():
            slot.scale_accumulator()

    def forget_norm(self) -> None:
        """The gradients have been edited: what was measured counts no more."""
        self._norm = None

    def clipped(self, slot: ParameterSlot, block: Tensor) -> Tensor:
        """A flat block of the slot's gradient times its pending coefficient, valid until this thread's next call."""
        if slot.clip_coefficient is None:
            return block
        return torch.mul(block, slot.clip_coefficient, out=self._scratch.take(block.numel()))

    def zero(self, set_to_none: bool) -> None:
        """Forgets the accumulated gradients, or makes zeros of all that were not forgotten this way before."""
        if set_to_none:
            try:
                self.forget()
            finally:
                for slot in self._slots.values():
                    slot.had_gradient = False
            return
        with self._forgetting_lost_sums():
            self.collector.discard()
        self._norm = None
        for slot in self._slots.values():
            if slot.accumulator is not None and (slot.accumulator_is_filled or slot.had_gradient):
                slot.accumulator.zero_()
                slot.accumulator_is_filled = True
                slot.clip_coefficient = None

    def forget(self) -> None:
        """Marks every accumulator empty; `parameter.grad` is left alone."""
        try:
            self.collector.discard()
        finally:
            for slot in self._slots.values():
                slot.forget_gradient()
        self._norm = None

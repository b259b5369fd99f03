"""Remembers that a step, or the load of a state, ended midway, until what it left has been replaced.

An error or an interrupt inside a step leaves some parameters stepped and others not; nothing can tell which elements.
Nothing is undone here: whoever would go on with such weights, or save them, is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from trl_budget.errors import HalfSteppedError
from trl_budget.parameter_slots import ParameterSlot


@dataclass
class _Remains:
    """What is left of one parameter.

    Attributes:
        weights: storage address and version counter of a parameter that is its own master, when the operation had
            ended: another write, the model's reload, moves them. None where a state with masters is needed.
        is_loaded: whether moments and step count have been replaced since.
    """

    weights: tuple[int, int] | None = None
    is_loaded: bool = False


class UnfinishedSteps:
    """Slots that an operation has left midway; none as long as everything is well."""

    def __init__(self) -> None:
        self._remains: dict[ParameterSlot, _Remains] = {}
        self._cause = ""

    @contextmanager
    def during(self, operation: str, slots: Iterable[ParameterSlot]) -> Iterator[None]:
        """Marks the slots for the length of an operation that writes them, and for good where it does not end well.

        Args:
            operation: what a later error calls it.
            slots: all that are written, on whichever rank.
        """
        written = list(slots)
        before, cause = dict(self._remains), self._cause
        self._cause = operation
        self._remains.update({slot: _Remains() for slot in written})
        try:
            yield
        except BaseException as error:
            self._cause = f"{operation} ({type(error).__name__})"
            for slot in written:
                self._remains[slot] = _Remains(_weights(slot) if slot.is_in_place else None)
            raise
        self._remains, self._cause = before, cause

    def loaded(self, slot: ParameterSlot, *, with_masters: bool) -> None:
        """A whole load has replaced the slot's moments and step count, and its masters where `with_masters`."""
        if with_masters:
            self.forget(slot)
        elif slot in self._remains:
            self._remains[slot].is_loaded = True

    def forget(self, slot: ParameterSlot) -> None:
        """The slot is whole, or gone."""
        self._remains.pop(slot, None)

    @property
    def first(self) -> ParameterSlot | None:
        """One that is not whole; None where all are."""
        for slot, remains in list(self._remains.items()):
            is_rewritten = slot.is_in_place and remains.weights not in (None, _weights(slot))
            if not (remains.is_loaded and is_rewritten):
                return slot
            self.forget(slot)
        return None

    def check(self) -> None:
        """Refuses to go on with weights of different steps.

        Raises:
            HalfSteppedError: names the operation that ended midway, a parameter, and what makes it whole.
        """
        slot = self.first
        if slot is None:
            return
        saved = "the model's weights, and the state" if slot.is_in_place else "the state, master_weights included,"
        raise HalfSteppedError(
            f"{self._cause} ended midway: the weights and moments of {len(self._remains)} parameters, the first is "
            f"{slot.name}, may be half stepped. To train them further, or to save them, would mix two steps. Load "
            f"{saved} that HostAdamW saved last (load_state_dict), or resume from the last checkpoint."
        )


def _weights(slot: ParameterSlot) -> tuple[int, int]:
    return slot.parameter.data_ptr(), slot.parameter._version

"""Masters of the weights that are in the model just now, for as long as a checkpoint is written.

A callback may put averaged weights into the model before a save and the trained ones back after it. What is saved
beside the average are its masters; the trained weights' own keep every bit. Between steps the gradient accumulators
are free, so the masters wait there and no memory is taken; one that holds a gradient is left alone, for a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from trl_budget.compute_weights import ComputeWeights
from trl_budget.parameter_slots import ParameterSlot
from trl_budget.team import OneRank


@contextmanager
def masters_of_present_weights(
    slots: Sequence[ParameterSlot], compute_weights: ComputeWeights, team: OneRank
) -> Iterator[None]:
    """Inside, the masters are those of the parameters as they are; afterwards, what they were before.

    What was written stays unadopted: written back before the next step, it leaves no trace. Collective with several
    ranks: all come before anyone goes on inside, and all have ended before a master is put back.

    Args:
        slots: those with masters apart from the parameter.
        compute_weights: what this library has written to the parameters; not changed.
        team: the ranks that share the masters.
    """
    with team.reporting("look for foreign writes"), torch.no_grad():
        changed = team.agree_on_writes(compute_weights.changed(slots), slots)
    if not changed:
        yield
        return
    kept: list[tuple[ParameterSlot, Tensor]] = []
    try:
        with team.together("lend masters"), torch.no_grad():
            for slot in changed:
                if slot.is_stepped_here:
                    kept.append((slot, _stashed(slot)))
                    compute_weights.adopt(slot)
        with team.together("put masters back"):
            yield
    finally:
        for slot, masters in kept:
            slot.master_weights.copy_(masters)


def _stashed(slot: ParameterSlot) -> Tensor:
    accumulator = slot.accumulator
    assert accumulator is not None
    if slot.accumulator_is_filled or slot.gradient is not None:  # the ranks' mean may stand in an empty one
        return slot.master_weights.clone()
    return accumulator.copy_(slot.master_weights)

"""The mean gradient over all ranks, its norm, and the order in which the ranks wait for each other.

Each rank sums the accumulators of its share of the parameters in rank order, in fp32, and divides by the number of
ranks, as DDP's mean; between nodes gloo sums what the nodes have summed. The result and the norm are the same bits on
every rank, and the same whichever rank steps. Nothing passes through NCCL.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import Parameter

from trl_budget.errors import SettingsError
from trl_budget.grad_offload import GradientCollector
from trl_budget.gradient_norm import norm_of_norms
from trl_budget.host_gradients import HostGradients
from trl_budget.host_threads import HostThreads
from trl_budget.parameter_slots import ParameterSlot
from trl_budget.rank_sums import RankSums
from trl_budget.ranks import Ranks
from trl_budget.shared_state import SharedSlot


class SharedGradients(HostGradients):
    """Gradients of slots that several ranks share; reduced once a step, when they are first clipped or measured.

    Args:
        slots: the optimizer's slots; a live view, in the same order on every rank.
        collector: moves `parameter.grad` to the host.
        threads: sum the ranks' accumulators.
        ranks: the processes of the job.
    """

    def __init__(
        self,
        slots: Mapping[Parameter, ParameterSlot],
        collector: GradientCollector,
        threads: HostThreads,
        ranks: Ranks,
    ) -> None:
        super().__init__(slots, collector, threads)
        self._ranks = ranks
        self._is_reduced = False
        self._sums = RankSums(threads, ranks)

    def _shared_slots(self) -> list[SharedSlot]:
        return [cast(SharedSlot, slot) for slot in self._slots.values()]

    def on_gradient(self, parameter: Tensor) -> None:
        """Called by the hooks: a running backward has made `parameter.grad`.

        Raises:
            SettingsError: as `drain`.
        """
        self._refuse_late_gradients()
        super().on_gradient(parameter)

    def drain(self) -> None:
        """Moves every pending `parameter.grad` to this rank's accumulator.

        Raises:
            SettingsError: the step's gradients have been reduced already; others may be reading the accumulators.
        """
        self._refuse_late_gradients()
        super().drain()

    def _refuse_late_gradients(self) -> None:
        if not self._is_reduced or self.is_lent:  # lent ones are refused by what follows, for a reason of their own
            return
        late = [slot.name for slot in self._slots.values() if slot.parameter.grad is not None]
        if late:
            raise SettingsError(
                f"A backward made gradients ({late[0]}) after the gradients of this step had been reduced over "
                f"{self._ranks.world_size} ranks. Its gradients would be counted by one rank only. Run all backwards "
                "of a step before clip_grad_norm_, and step() after it."
            )

    def reduce(self) -> None:
        """Makes the mean over all ranks, once a step. Collective. A norm must be exchanged before it is read."""
        if self._is_reduced:
            return
        slots = self._shared_slots()
        filled = self._ranks.exchange("reduce gradients", bytes(slot.accumulator_is_filled for slot in slots))
        here = [filled[rank] for rank in self._ranks.node_ranks]
        sums: list[tuple[SharedSlot, Sequence[Tensor]]] = []
        for index, slot in enumerate(slots):
            slot.is_reduced = True
            slot.reduced = slot.peers[slot.reducer] if any(flags[index] for flags in filled) else None
            if slot.reduced is not None and slot.reducer == self._ranks.local_rank:
                sums.append((slot, [peer for peer, flags in zip(slot.peers, here, strict=True) if flags[index]]))
        self._sums.run(sums)
        self._sum_nodes(slot for slot in slots if slot.reducer == self._ranks.local_rank)
        self._is_reduced = True

    def _sum_nodes(self, slots: Iterable[SharedSlot]) -> None:
        if self._ranks.num_nodes == 1:
            return
        for slot in slots:
            if slot.reduced is None:
                continue
            self._ranks.sum_over_nodes(slot.reduced.view(-1))
            slot.reduced.div_(self._ranks.world_size)

    @property
    def is_reduced(self) -> bool:
        """Whether `slot.gradient` is the mean over all ranks, the same on every rank at the same call."""
        return self._is_reduced

    def settle(self) -> None:
        """As one process, in the one copy that all ranks read; collective then."""
        if not self._is_reduced:
            super().settle()
            return
        self._of(self._slots)
        self._ranks.exchange("settle clipping")

    def forget_norm(self) -> None:
        """The gradients have been edited: what was measured counts no more."""
        self._sums.row_norms.clear()
        super().forget_norm()

    def of(self, slot: ParameterSlot) -> Tensor | None:
        """The slot's gradient, clipping included. A copy where other ranks may be reading it."""
        gradient = slot.gradient
        if gradient is None or slot.clip_coefficient is None:
            return gradient
        return gradient * slot.clip_coefficient

    def norm(self) -> Tensor:
        """The norm over the mean gradients, the same bits on every rank. Collective."""
        self.reduce()
        if self._norm is None:
            self._norm = self._measure(
                {p: slot.gradient for p, slot in self._slots.items() if slot.gradient is not None}
            )
        return self._norm

    def _of(self, parameters: Iterable[Tensor]) -> dict[Tensor, Tensor]:
        self.reduce()
        gradients: dict[Tensor, Tensor] = {}
        for parameter in parameters:
            slot = cast("SharedSlot | None", self._slots.get(cast(Parameter, parameter)))
            if slot is not None and slot.clip_coefficient is not None:
                # In the one copy that all read: by the rank that made it, before the norms are exchanged.
                if slot.reduced is not None and slot.reducer == self._ranks.local_rank:
                    slot.reduced.mul_(slot.clip_coefficient)
                    self._sums.row_norms.pop(slot, None)
                slot.clip_coefficient = None
            gradient = parameter.grad if slot is None else slot.gradient
            if gradient is not None:
                gradients[parameter] = gradient
        return gradients

    def _measure(self, gradients: Mapping[Tensor, Tensor]) -> Tensor:
        """As one process; a shared gradient's norm is taken once, on the first node, by the rank that reduced it."""
        numbers: dict[Tensor, int] = {parameter: number for number, parameter in enumerate(self._slots)}
        here = self._ranks.local_rank
        elsewhere = {slot.parameter for slot in self._shared_slots() if slot.reducer != here}
        norms = self._norms({p: gradient for p, gradient in gradients.items() if p not in elsewhere})
        shared = {numbers[p]: norm.item() for p, norm in norms.items() if p in numbers}
        everyone = self._ranks.exchange("exchange norms", shared)
        known: dict[int, float] = {}
        for rank in self._ranks.layout.nodes[0]:
            known.update(everyone[rank])
        ordered = [torch.tensor(known[numbers[p]]) if p in numbers else norms[p] for p in gradients]
        return norm_of_norms(ordered)

    def _are_finite(self, gradients: Mapping[Tensor, Tensor]) -> bool:
        """Each rank reads what it has reduced, and its own gradients of other parameters. Collective."""
        here = self._ranks.local_rank
        elsewhere = {slot.parameter for slot in self._shared_slots() if slot.reducer != here}
        own = super()._are_finite({p: gradient for p, gradient in gradients.items() if p not in elsewhere})
        return all(self._ranks.exchange("look for infinite gradients", own))

    def _norms(self, gradients: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        rows: dict[Tensor, Tensor] = {slot.parameter: norms for slot, norms in self._sums.row_norms.items()}
        others = super()._norms({p: gradient for p, gradient in gradients.items() if p not in rows})
        return {p: norm_of_norms(rows[p]) if p in rows else others[p] for p in gradients}

    def zero(self, set_to_none: bool) -> None:
        """Forgets the accumulated gradients, or sets this rank's to zero."""
        if self._is_reduced:
            had_gradient = [slot.gradient is not None for slot in self._slots.values()]
            self.forget()
            for slot, had in zip(self._slots.values(), had_gradient, strict=True):
                slot.accumulator_is_filled = had
        super().zero(set_to_none)

    def forget(self) -> None:
        """Marks every accumulator empty. All ranks must have read them."""
        self._sums.row_norms.clear()
        self._is_reduced = False
        super().forget()

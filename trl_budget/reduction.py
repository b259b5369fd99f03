"""The mean gradient over all ranks, its norm, and the order in which the ranks wait for each other.

Each rank sums the accumulators of its share of the parameters in rank order, in fp32, and divides by the number of
ranks, as DDP's mean; between nodes gloo sums what the nodes have summed. The result and the norm are the same bits on
every rank, and the same whichever rank steps and however early it was summed. Nothing passes through NCCL.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Parameter

from trl_budget.early_sums import HAS_ORDERED_STORES, EarlySums
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
        threads: sum the ranks' accumulators when no backward runs.
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
        self._num_last_backwards = 0  # the same on every rank, from one reduction to the next
        self._early: EarlySums | None = None
        # Until they are forgotten: what the other ranks may have begun to sum, and what this one has summed.
        self._told: set[SharedSlot] = set()
        self._summed_early: set[SharedSlot] = set()
        self._refusal: str | None = None  # raised where the other ranks hear of it
        # By slot: how many gradients the backward made that was last said to begin, and whether all of them made one.
        self._made: WeakKeyDictionary[SharedSlot, int] = WeakKeyDictionary()
        self._made_once: WeakKeyDictionary[SharedSlot, bool] = WeakKeyDictionary()

    def _shared_slots(self) -> list[SharedSlot]:
        return [cast(SharedSlot, slot) for slot in self._slots.values()]

    def on_gradient(self, parameter: Tensor) -> None:
        """Called by the hooks: a running backward has made `parameter.grad`.

        Raises:
            SettingsError: as `drain`.
        """
        self._refuse_late_gradients()
        slot = cast("SharedSlot | None", self._slots.get(cast(Parameter, parameter)))
        if slot is None or parameter.grad is None:
            return
        self._note_second(slot)
        super().on_gradient(parameter)
        self._made[slot] = self._made.get(slot, 0) + 1
        if self._early is not None and self._made_once.get(slot, False):
            self._told.add(slot)
            self._early.expect(slot)

    def begin_backward(self, *, is_last: bool) -> None:
        """Remembers how many gradients the backward before made of each slot; in the last one, sums begin early.

        Only of slots that every backward so far has made one gradient of: a second one would come too late.
        """
        if not torch.is_grad_enabled():  # a loss that is only looked at
            return
        for slot, number in self._made.items():
            self._made_once[slot] = number == 1 and self._made_once.get(slot, True)
        self._made.clear()
        self._end_early()
        self._num_last_backwards += is_last
        if self._told:
            self._refuse(f"Another backward began after the last one of a step ({next(iter(self._told)).name}).")
        elif is_last and self.can_sum_early:
            self._early = self._begin_early()

    @property
    def can_sum_early(self) -> bool:
        """Whether sums over ranks may begin before the last backward has ended."""
        return HAS_ORDERED_STORES and self._ranks.num_nodes == 1 and self.collector.takes_gradients_as_they_come

    def _begin_early(self) -> EarlySums:
        this = weakref.ref(self)  # the thread must not keep all of this alive

        def sum_ranks(slots: Sequence[SharedSlot]) -> None:
            if (gradients := this()) is not None:
                gradients._sum_ranks(slots)

        slots, is_summed = self._shared_slots(), self.collector.is_summed
        return EarlySums(self._num_last_backwards, slots, self._ranks.local_rank, is_summed, sum_ranks)

    def _end_early(self) -> None:
        """Nothing is summed early from here on; what this rank has told the others is taken back.

        Raises what summing raised, or what interrupted the wait for it; the next call waits again then.
        """
        early = self._early
        if early is None:
            return
        try:
            self._summed_early |= early.end()
        except BaseException as error:
            self._refuse(f"Summing over the ranks failed ({error!r}).")
            raise
        finally:
            if not early.is_running:
                early.clear()
                self._early = None

    def drain(self) -> None:
        """Moves every pending `parameter.grad` to this rank's accumulator.

        Raises:
            SettingsError: the step's gradients have been reduced already, or some of them: others may be reading the
                accumulators.
        """
        self._refuse_late_gradients()
        for slot in self._shared_slots():
            if slot.parameter.grad is not None:
                self._note_second(slot)
        super().drain()
        if self._refusal is not None:
            raise SettingsError(self._refusal)

    def _refuse_late_gradients(self) -> None:
        if not self._is_reduced:
            return
        late = [slot.name for slot in self._slots.values() if slot.parameter.grad is not None]
        if late:
            raise SettingsError(
                f"A backward made gradients ({late[0]}) after the gradients of this step had been reduced over "
                f"{self._ranks.world_size} ranks. Its gradients would be counted by one rank only. Run all backwards "
                "of a step before clip_grad_norm_, and step() after it."
            )

    def _note_second(self, slot: SharedSlot) -> None:
        if slot in self._told:
            self._refuse(f"{slot.name} got another gradient after the one of the step's last backward.")

    def _refuse(self, what: str) -> None:
        self._refusal = self._refusal or (
            f"{what} The {self._ranks.world_size} ranks had begun to sum their gradients, so some would be missing in "
            "the mean or be counted twice. Call zero_grad() on every rank to drop the step. Set "
            "sum_ranks_during_backward=False, or leave begin_backward out, to sum when all backwards are over."
        )

    def reduce(self) -> None:
        """Makes the mean over all ranks, once a step. Collective. A norm must be exchanged before it is read.

        Raises:
            SettingsError: on every rank, where a gradient that was summed early is no longer its rank's.
        """
        if self._is_reduced:
            return
        self._end_early()
        slots = self._shared_slots()
        filled = self._compare(slots)
        here = [filled[rank] for rank in self._ranks.node_ranks]
        sums: list[tuple[SharedSlot, Sequence[Tensor]]] = []
        for index, slot in enumerate(slots):
            slot.is_reduced = True
            slot.reduced = slot.peers[slot.reducer] if any(flags[index] for flags in filled) else None
            if slot.reduced is not None and slot.reducer == self._ranks.local_rank and slot not in self._summed_early:
                sums.append((slot, [peer for peer, flags in zip(slot.peers, here, strict=True) if flags[index]]))
        self._sums.run(sums)
        self._sum_nodes(slot for slot in slots if slot.reducer == self._ranks.local_rank)
        self._is_reduced = True

    def _compare(self, slots: Sequence[SharedSlot]) -> Sequence[bytes]:
        """Of every rank, which slots it has a gradient of. Collective; no rank sums early."""
        sets = ({slot for slot in slots if slot.accumulator_is_filled}, self._told, self._summed_early)
        flags = [bytes(slot in chosen for slot in slots) for chosen in sets]
        everyone = self._ranks.exchange("reduce gradients", (self._num_last_backwards, *flags))
        numbers, filled, told, summed = zip(*everyone, strict=True)
        self._num_last_backwards = max(numbers)
        for index, slot in enumerate(slots):
            is_current = len(set(numbers)) == 1 and all(of_rank[index] for of_rank in told)
            if any(of_rank[index] for of_rank in summed) and not is_current:
                self._refuse(f"A rank dropped or repeated the last backward of a step ({slot.name}), another did not.")
                raise SettingsError(self._refusal)
        return filled

    def _sum_ranks(self, slots: Sequence[SharedSlot]) -> None:
        """Sums slots of which every rank has a gradient, beside a backward, whose sums need the same cores."""
        self.collector.run_in_turn(lambda: self._sums.run_here([(slot, slot.peers) for slot in slots]))

    def _sum_nodes(self, slots: Iterable[SharedSlot]) -> None:
        if self._ranks.num_nodes == 1:
            return
        for slot in slots:
            if slot.reduced is None:
                continue
            self._ranks.sum_over_nodes(slot.reduced.view(-1))
            slot.reduced.div_(self._ranks.world_size)

    def of(self, slot: ParameterSlot) -> Tensor | None:
        """The slot's gradient, clipping included. A copy where other ranks may be reading it."""
        self._end_early()  # nobody is writing it
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

    def _norms(self, gradients: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        rows: dict[Tensor, Tensor] = {slot.parameter: norms for slot, norms in self._sums.row_norms.items()}
        others = super()._norms({p: gradient for p, gradient in gradients.items() if p not in rows})
        return {p: norm_of_norms(rows[p]) if p in rows else others[p] for p in gradients}

    def zero(self, set_to_none: bool) -> None:
        """Forgets the accumulated gradients, or sets this rank's to zero."""
        had_gradient = [slot.gradient is not None for slot in self._slots.values()]
        if self._is_reduced or self._told or self._refusal or self._early is not None:
            self.forget()
            for slot, had in zip(self._slots.values(), had_gradient, strict=True):
                slot.accumulator_is_filled = had
        super().zero(set_to_none)

    def forget(self) -> None:
        """Marks every accumulator empty. All ranks must have read them."""
        try:
            self._end_early()
        finally:
            if self._early is None:  # nothing is forgotten where the wait was interrupted
                self._forget_step()

    def _forget_step(self) -> None:
        self._told.clear()
        self._summed_early.clear()
        if self._refusal is not None:  # what the backwards of a refused step made is no rule
            self._made.clear()
        self._refusal = None
        self._sums.row_norms.clear()
        self._is_reduced = False
        super().forget()

"""What an optimizer does with the other ranks of its job: `OneRank` nothing, `NodeTeam` one step shared by all.

`join_team` chooses once. Ranks make the same calls in the same order; an error of one is raised on all.
"""

from __future__ import annotations

import os
import platform
import select
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import cast

import torch
from torch.nn import Parameter

from trl_budget.compute_weights import checksums
from trl_budget.errors import RankError, SettingsError
from trl_budget.grad_offload import GradientCollector
from trl_budget.gradient_access import GradientLoan, SharedGradientLoan
from trl_budget.host_gradients import HostGradients
from trl_budget.host_threads import HostThreads
from trl_budget.node_memory import NodeMemory
from trl_budget.parameter_slots import HostState, ParameterSlot
from trl_budget.pinned import ParameterSlabs
from trl_budget.ranks import Ranks, current_ranks
from trl_budget.reduction import SharedGradients
from trl_budget.sharding import check_optimizer_sharding, resolve_optimizer_sharding
from trl_budget.shared_state import SharedHostState, SharedSlabs, SharedSlot, check_same_parameters

POLL_SECONDS = 2e-4
# Counters and masters are plain stores, which other cores see in program order on x86 only.
HAS_ORDERED_STORES = platform.machine() in ("x86_64", "AMD64")


class Arrivals:
    """Slots that other local ranks step, each handed out once, when its new masters are complete.

    Args:
        slots: in the order in which they are stepped.
        number: of the step, what their progress will show.
        team: whose processes are waited for.
    """

    def __init__(self, slots: Sequence[ParameterSlot], number: int, team: NodeTeam | None) -> None:
        self._queues: dict[int, list[SharedSlot]] = {}
        for slot in reversed(slots):
            shared = cast(SharedSlot, slot)
            self._queues.setdefault(shared.stepper, []).append(shared)
        self._number = number
        self._team = team

    def ready(self) -> Iterator[ParameterSlot]:
        """Those that are complete now, without waiting."""
        if not HAS_ORDERED_STORES:
            return
        for queue in self._queues.values():
            while queue and int(queue[-1].progress) == self._number:
                yield queue.pop()

    def all(self) -> Iterator[ParameterSlot]:
        """The rest, each as soon as it is complete. Ends early where a stepper has failed: all will hear of it.

        Raises:
            RankError: a stepper died, or none has finished anything within the timeout.
        """
        if self._team is None:
            return
        if not HAS_ORDERED_STORES:
            self._team.ranks.exchange("step before refresh")
        deadline = time.monotonic() + self._team.ranks.timeout.total_seconds()
        while any(self._queues.values()):
            arrived = [
                queue.pop()
                for queue in self._queues.values()
                if queue and abs(int(queue[-1].progress)) == self._number
            ]
            if any(int(slot.progress) < 0 for slot in arrived):
                return
            yield from arrived
            if arrived:
                deadline = time.monotonic() + self._team.ranks.timeout.total_seconds()
                continue
            time.sleep(POLL_SECONDS)
            self._team.check_alive(deadline)


class OneRank:
    """A job of one process."""

    mode = "sharded"
    num_local_ranks = 1
    world_size = 1

    def host_state(self, *, pin_memory: bool) -> HostState:
        """What allocates masters, moments and accumulators."""
        return HostState(pin_memory=pin_memory)

    def gradients(
        self, slots: Mapping[Parameter, ParameterSlot], collector: GradientCollector, threads: HostThreads
    ) -> HostGradients:
        """What collects, measures and clips."""
        return HostGradients(slots, collector, threads)

    def loan(self, slots: Sequence[ParameterSlot], gradients: HostGradients) -> GradientLoan:
        """What brings gradients back to `parameter.grad`."""
        return GradientLoan(slots, gradients)

    def master_slabs(self, names: Mapping[Parameter, str], *, pin: bool) -> ParameterSlabs:
        """Empty slabs for the masters of the parameters in `names`."""
        return ParameterSlabs("master weights", pin=pin)

    @property
    def writes_masters(self) -> bool:
        """Whether this rank fills the masters when they are captured."""
        return True

    def reporting(self, operation: str) -> AbstractContextManager[None]:
        """Errors raised inside reach the other ranks."""
        return nullcontext()

    def together(self, operation: str) -> AbstractContextManager[None]:
        """As `reporting`, and all ranks leave at the same time."""
        return nullcontext()

    def agree_on_writes(
        self, changed: Sequence[ParameterSlot], slots: Sequence[ParameterSlot]
    ) -> Sequence[ParameterSlot]:
        """The slots whose parameters have been written by others, the same on every rank.

        Args:
            changed: those this rank has found.
            slots: all that were looked at.
        """
        return changed

    def union(self, names: Sequence[str]) -> list[str]:
        """The names of all ranks, in rank order, each once."""
        return list(names)

    @contextmanager
    def stepping(self, slots: Sequence[ParameterSlot]) -> Iterator[Arrivals]:
        """For the length of a step over `slots`: the slots that arrive from other ranks."""
        yield Arrivals([], 0, None)

    def publish(self, slot: ParameterSlot) -> None:
        """Tells the other ranks that a slot's new masters are complete."""


class NodeTeam(OneRank):
    """The ranks of a job that step one optimizer for each node. Building it is collective.

    Args:
        ranks: the processes.
        sharding: the `optimizer_sharding` asked for.
    """

    def __init__(self, ranks: Ranks, sharding: str) -> None:
        self.ranks = ranks
        self.world_size = ranks.world_size
        self.num_local_ranks = ranks.local_world_size
        self.mode = resolve_optimizer_sharding(sharding, ranks.local_world_size)
        modes = ranks.exchange("compare optimizer_sharding", self.mode)
        if len(set(modes)) > 1:
            raise SettingsError(
                f"optimizer_sharding is {', '.join(modes)} on the {len(modes)} ranks. They share one optimizer, whose "
                "layout must be one. Set optimizer_sharding to the same value on every rank."
            )
        self._memory = NodeMemory(ranks)
        self._number = 0
        self._watched = {rank: os.pidfd_open(ranks.pids[rank]) for rank in ranks.node_ranks if rank != ranks.rank}

    def __del__(self) -> None:
        for descriptor in vars(self).get("_watched", {}).values():
            os.close(descriptor)

    def host_state(self, *, pin_memory: bool) -> HostState:
        """What allocates masters, moments and accumulators, shared by the node."""
        return SharedHostState(pin_memory=pin_memory, ranks=self.ranks, memory=self._memory, sharding=self.mode)

    def gradients(
        self, slots: Mapping[Parameter, ParameterSlot], collector: GradientCollector, threads: HostThreads
    ) -> HostGradients:
        """What collects, reduces, measures and clips."""
        return SharedGradients(slots, collector, threads, self.ranks)

    def loan(self, slots: Sequence[ParameterSlot], gradients: HostGradients) -> GradientLoan:
        """What brings gradients back to `parameter.grad`, the same mean on every rank once it has been made."""
        return SharedGradientLoan(slots, cast(SharedGradients, gradients), self.ranks)

    def master_slabs(self, names: Mapping[Parameter, str], *, pin: bool) -> ParameterSlabs:
        """Empty slabs for the masters, shared by the node where masters are. Collective.

        Raises:
            SettingsError: ranks with different parameters.
        """
        check_same_parameters(self.ranks, names)
        if self.mode == "replicated":
            return super().master_slabs(names, pin=pin)
        return SharedSlabs("master weights", pin=pin, memory=self._memory)

    @property
    def writes_masters(self) -> bool:
        """Whether this rank fills the masters when they are captured."""
        return self.mode == "replicated" or self.ranks.local_rank == 0

    def reporting(self, operation: str) -> AbstractContextManager[None]:
        """Errors raised inside reach the other ranks."""
        return self.ranks.reporting(operation)

    def together(self, operation: str) -> AbstractContextManager[None]:
        """As `reporting`, and all ranks leave at the same time."""
        return self.ranks.together(operation)

    def agree_on_writes(
        self, changed: Sequence[ParameterSlot], slots: Sequence[ParameterSlot]
    ) -> Sequence[ParameterSlot]:
        """As `OneRank`. Writes must have been made on every rank, as under DDP; the owner adopts.

        Raises:
            SettingsError: on every rank, where the ranks' weights differ after the writes.
        """
        found = set(changed)
        flags = self.ranks.exchange("look for foreign writes", bytes(slot in found for slot in slots))
        union = [slot for index, slot in enumerate(slots) if any(flag[index] for flag in flags)]
        if not union:
            return union
        # Without the last, floating-point sum: cards of different kinds may round it differently.
        own = checksums([slot.parameter for slot in union])[:, :2].tolist()
        sums = self.ranks.exchange("compare foreign writes", own)
        for index, slot in enumerate(union):
            other = next((rank for rank, its in enumerate(sums) if its[index] != sums[0][index]), None)
            if other is not None:
                raise SettingsError(
                    f"{slot.name} was written since the last optimizer step and now differs between ranks 0 and "
                    f"{other}. The ranks have one set of master weights, so there is no telling whose values are "
                    "meant. Write the same values on every rank, or on none."
                )
        return union

    def union(self, names: Sequence[str]) -> list[str]:
        """The names of all ranks, in rank order, each once. Collective."""
        return list(
            dict.fromkeys(name for named in self.ranks.exchange("name foreign writes", names) for name in named)
        )

    @contextmanager
    def stepping(self, slots: Sequence[ParameterSlot]) -> Iterator[Arrivals]:
        """For the length of a step over `slots`: the slots that arrive from other ranks."""
        self._number += 1
        with self.ranks.together("step"):
            try:
                yield Arrivals([slot for slot in slots if not slot.is_stepped_here], self._number, self)
            except BaseException:
                for slot in slots:
                    if slot.is_stepped_here:
                        cast(SharedSlot, slot).progress.fill_(-self._number)
                raise

    def publish(self, slot: ParameterSlot) -> None:
        """Tells the other ranks that a slot's new masters are complete."""
        cast(SharedSlot, slot).progress.fill_(self._number)

    def check_alive(self, deadline: float) -> None:
        """Checks the other processes of the node.

        Raises:
            RankError: one has ended, or the deadline (`time.monotonic`) has passed.
        """
        poll = select.poll()
        for descriptor in self._watched.values():
            poll.register(descriptor, select.POLLIN)
        ended = {descriptor for descriptor, _ in poll.poll(0)}
        dead = [rank for rank, descriptor in self._watched.items() if descriptor in ended]
        if dead:
            raise RankError(
                f"Rank {dead[0]} (process {self.ranks.pids[dead[0]]}) ended while rank {self.ranks.rank} waited for "
                "the weights it steps. The step cannot be finished without it. Find its error in the logs and resume "
                "from the last checkpoint."
            )
        if time.monotonic() > deadline:
            raise RankError(
                f"Rank {self.ranks.rank} waited {self.ranks.timeout.total_seconds():.0f} s for weights that another "
                "rank of this node steps. That rank is alive but does not come forward. Find out what it does (a "
                "debugger, `py-spy dump`), or raise ddp_timeout."
            )


def join_team(sharding: str) -> OneRank:
    """The team of this process. Collective where the default process group has several ranks.

    Raises:
        SettingsError: `sharding` is not known or not the same on every rank.
    """
    check_optimizer_sharding(sharding)
    ranks = current_ranks()
    return OneRank() if ranks is None else NodeTeam(ranks, sharding)


@torch.no_grad()
def broadcast_untrained(team: OneRank, model: torch.nn.Module) -> None:
    """Gives every rank rank 0's frozen parameters and buffers, as DDP's constructor does. Collective."""
    if isinstance(team, NodeTeam):
        frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        team.ranks.broadcast([*frozen, *model.buffers()])

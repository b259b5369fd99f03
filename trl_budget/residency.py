"""Which owner may hold device memory in which phase of a step, and what each then holds, in measured bytes.

An owner is what holds weights on the device: the policy, the reference model, a reward model. A phase first sends away
what it does not list and then brings back what it does, so that two owners are never there together unless a phase
lists both. vLLM's own memory is no owner here; it shows in the bytes used on the card. Nothing is computed.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch

from trl_budget.errors import ParkedError, SettingsError


class Phase(enum.StrEnum):
    """The phases of a step, in their order."""

    START = "start"
    """The engine starts, and takes what is free."""
    ROLLOUT = "rollout"
    SCORE = "score"
    UPDATE = "update"
    STEP = "optimizer step"


NOBODY: frozenset[str] = frozenset()
POLICY = frozenset({"policy"})
DEFAULT_RESIDENT: Mapping[Phase, frozenset[str]] = MappingProxyType(
    {Phase.START: NOBODY, Phase.ROLLOUT: NOBODY, Phase.SCORE: POLICY, Phase.UPDATE: POLICY, Phase.STEP: POLICY}
)


class Owner(Protocol):
    """What holds device memory and can give it back. `ParkedWeights` is one."""

    @property
    def name(self) -> str:
        """What tables and errors call it."""

    @property
    def is_parked(self) -> bool:
        """Whether its memory has been given back, wholly or in part."""

    @property
    def device_bytes(self) -> int:
        """Bytes it holds on the device now."""

    def park(self) -> None:
        """Gives the memory back; nothing where that is done, the rest where an `unpark()` failed."""

    def unpark(self) -> None:
        """Takes the memory again, with the bytes that were in it."""


@dataclass(frozen=True)
class MemoryUse:
    """Device memory in use: on the card, by every process and library, and by torch's tensors in this process.

    `allocated_bytes` counts vLLM's pool also while it sleeps and holds nothing; `used_bytes` does not.
    """

    used_bytes: int
    allocated_bytes: int


@dataclass(frozen=True)
class ResidencyRow:
    """What was on the device when a phase had been entered."""

    phase: Phase
    owner_bytes: Mapping[str, int]
    use: MemoryUse


class Residency:
    """Parks and unparks owners as the phases of a step begin.

    Args:
        owners: with distinct names; brought back in this order.
        resident: the names of the owners that each phase holds on the device, for every phase.
        measure: reads what the device holds; None reads the current CUDA device, or gives zeros without one.

    Raises:
        SettingsError: two owners of one name, a phase that is missing, or a name that no owner has.
    """

    def __init__(
        self,
        owners: Sequence[Owner],
        *,
        resident: Mapping[Phase, frozenset[str]] = DEFAULT_RESIDENT,
        measure: Callable[[], MemoryUse] | None = None,
    ) -> None:
        _check_table([owner.name for owner in owners], resident)
        self._owners = {owner.name: owner for owner in owners}
        self._resident = resident
        self._measure = measure or measured_memory_use
        self._phase = Phase.START
        self._presences: Counter[str] = Counter()
        self._bytes_when_present = {owner.name: owner.device_bytes for owner in owners}
        self._last_cycle: dict[Phase, ResidencyRow] = {}
        self._cycle: dict[Phase, ResidencyRow] = {}

    @property
    def phase(self) -> Phase:
        """The phase entered last; `START` before any."""
        return self._phase

    def enter(self, phase: Phase, when_left: Callable[[], None] = lambda: None) -> None:
        """Leaves on the device what `phase` lists and nothing else, and records a row.

        It does so inside `present()` too: who is not listed leaves.

        Args:
            phase: that begins.
            when_left: called when all have left who must and nobody has come yet.

        Raises:
            ParkedError: an owner could not come back; it is parked, as is whoever the phase does not list. Its error
                is the cause.
            HostMemoryError: an owner could not leave; the phase has not been entered.
        """
        listed = self._resident[phase]
        self._park([owner for name, owner in self._owners.items() if name not in listed])
        self._phase = phase
        when_left()
        for name, owner in self._owners.items():
            if name in listed:
                self._unpark(owner)
        self._record(phase)

    @contextmanager
    def present(self, name: str) -> Iterator[None]:
        """Holds one owner on the device inside the `with`; it leaves afterwards unless the phase lists it.

        Nests, with the same owner too: it leaves at the end of the outermost. An exception inside changes nothing.

        Args:
            name: of the owner.

        Raises:
            SettingsError: no owner has that name.
            ParkedError: it could not come back, and is parked.
        """
        owner = self._owner(name)
        self._unpark(owner)
        self._presences[name] += 1
        try:
            yield
        finally:
            self._presences[name] -= 1
            if not self._presences[name] and name not in self._resident[self._phase]:
                self._park([owner])

    def restore_presences(self) -> None:
        """Brings back who is inside a `present()` and left in a phase that has been entered and ended there.

        Raises:
            ParkedError: one could not come back, and is parked.
        """
        for name, num_presences in self._presences.items():
            if num_presences > 0:
                self._unpark(self._owners[name])

    def rows(self) -> list[ResidencyRow]:
        """The rows of the last full cycle and of the running one, oldest first.

        A cycle ends when a phase begins that comes earlier in a step; a phase that is entered again in a row, as with
        gradient accumulation, keeps one row, the newest.
        """
        return [*self._last_cycle.values(), *self._cycle.values()]

    def table(self) -> str:
        """The rows of one step as text, in GiB: of the newest cycle that reached the optimizer step, if one did."""
        cycles = [cycle for cycle in (self._cycle, self._last_cycle) if Phase.STEP in cycle]
        rows = (cycles[0] if cycles else self._cycle).values()
        lines = [["GiB", *self._owners, "allocated by torch", "used on the card"]]
        for row in rows:
            figures = [*row.owner_bytes.values(), row.use.allocated_bytes, row.use.used_bytes]
            lines.append([row.phase.value, *(f"{nbytes / 2**30:.2f}" for nbytes in figures)])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(_aligned(line, widths) for line in lines)

    def _owner(self, name: str) -> Owner:
        if name not in self._owners:
            raise SettingsError(
                f"{name!r} was to be present on the device and is no owner. The owners are "
                f"{', '.join(self._owners) or 'none'}, and nothing else is moved. Name one of them."
            )
        return self._owners[name]

    def _park(self, owners: Sequence[Owner]) -> None:
        present = [owner for owner in owners if not owner.is_parked]
        self._bytes_when_present.update({owner.name: owner.device_bytes for owner in present})
        for owner in owners:
            owner.park()  # also one that is parked: it may be back in part
        if present:
            release_cached_memory()  # not in every phase: what torch keeps is used again in the next

    def _unpark(self, owner: Owner) -> None:
        if not owner.is_parked:
            return
        try:
            owner.unpark()
        except Exception as error:
            owner.park()
            release_cached_memory()
            use = self._measure()
            raise ParkedError(
                f"The {owner.name}'s {self._bytes_when_present[owner.name] / 2**30:.2f} GiB could not come back to "
                f"the device in phase {self._phase.value!r}: {error}. The card has {use.used_bytes / 2**30:.2f} GiB "
                f"in use, {use.allocated_bytes / 2**30:.2f} of them by torch here, and what is left is too little. "
                "Set vllm_enable_sleep_mode=True, a larger device_memory_budget if there is one, or end other "
                "processes on the card."
            ) from error

    def _record(self, phase: Phase) -> None:
        order = list(Phase)
        if any(order.index(entered) > order.index(phase) for entered in self._cycle):
            self._last_cycle, self._cycle = self._cycle, {}
        held = {name: owner.device_bytes for name, owner in self._owners.items()}
        self._cycle[phase] = ResidencyRow(phase, held, self._measure())


def measured_memory_use() -> MemoryUse:
    """What the current CUDA device holds; zeros while CUDA is not in use."""
    if not torch.cuda.is_initialized():
        return MemoryUse(used_bytes=0, allocated_bytes=0)
    free, total = torch.cuda.mem_get_info()
    return MemoryUse(used_bytes=total - free, allocated_bytes=torch.cuda.memory_allocated())


def release_cached_memory() -> None:
    """Hands memory that torch holds for reuse back to the card, so that another allocator can map it."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _check_table(names: Sequence[str], resident: Mapping[Phase, frozenset[str]]) -> None:
    missing = [phase.value for phase in Phase if phase not in resident]
    unknown = sorted(frozenset[str]().union(*resident.values()).difference(names))
    if len(set(names)) == len(names) and not missing and not unknown:
        return
    raise SettingsError(
        f"The owners of device memory are {', '.join(names) or 'none'}; the table of phases lacks "
        f"{', '.join(missing) or 'none'} and lists {', '.join(unknown) or 'nobody'} that is no owner. Each phase has "
        "to say by name who stays. Give owners distinct names, and `resident` every phase with names of owners."
    )


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = zip(cells, widths, strict=True)
    return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)])

"""Makes a large card act as a small one: `device_memory_budget`.

The cap of torch's allocator follows from the budget before each phase, and a use above the budget ends the run.
Arithmetic on byte counts: nothing is parked, freed or moved here, and no value of the training depends on it. Source
for what the cap counts: `alloc_block` and `setMemoryFraction` in torch's `c10/cuda/CUDACachingAllocator.cpp`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

import torch

from trl_budget.errors import DeviceMemoryError, SettingsError

GIB = 2**30
LEAST_BUDGET_BYTES = GIB
_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("", 1024), ("b", 1000), ("i", 1024), ("ib", 1024))
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(value: str | float) -> int:
    """Bytes that `value` stands for.

    Args:
        value: a number with a unit, or a number of bytes that is at least `LEAST_BUDGET_BYTES`. `KiB`, `MiB`, `GiB`,
            `TiB`, their short forms `Ki` and so on, and the letters `K`, `M`, `G`, `T` alone are powers of 1024; `kB`,
            `MB`, `GB`, `TB` powers of 1000; `B` is a byte. Case and spaces do not matter; parts of a byte are dropped.

    Raises:
        SettingsError: `value` is none of these, or not positive, or a small number without a unit.
    """
    match = _SIZE.fullmatch(str(value))
    unit = match[2].lower() if match else ""
    nbytes = int(Fraction(match[1]) * _UNITS[unit]) if match and unit in _UNITS else 0
    if nbytes <= 0:
        raise SettingsError(
            f"{value!r} is no size in bytes. A size is a positive number with a unit, KiB to TiB or K to T for powers "
            "of 1024 and kB to TB for powers of 1000, or a number of bytes. Write '16GiB', '24 GB' or 17179869184."
        )
    if match and not unit and nbytes < LEAST_BUDGET_BYTES:
        unit = "GiB" if nbytes < 2**10 else "MiB" if nbytes < 2**20 else "KiB"
        raise SettingsError(
            f"{value!r} is a size without a unit, {nbytes} bytes. No card has so few, so another unit must have been "
            f"meant. Set device_memory_budget='{match[1].removesuffix('.0')}{unit}' if that is what you meant."
        )
    return nbytes


@dataclass(frozen=True)
class CardMemory:
    """Bytes of one card, read at one moment.

    Attributes:
        total: of the card.
        free: of the card, whoever holds the rest.
        reserved: by torch's allocator in this process, a sleeping pool included.
        unmapped: of `reserved`, what has no memory behind it: vLLM's pool while it sleeps.
    """

    total: int
    free: int
    reserved: int
    unmapped: int

    @property
    def used(self) -> int:
        """Held by anyone."""
        return self.total - self.free

    @property
    def outside_torch(self) -> int:
        """Held by contexts, NCCL, CUDA graphs and other processes."""
        return self.used - (self.reserved - self.unmapped)

    def within(self, budget: int, baseline: int = 0) -> CardMemory:
        """What a card of `budget` bytes would show, for checks of vLLM that are to fail where that card would.

        Args:
            budget: bytes.
            baseline: bytes of other processes, which that card would not have.
        """
        return replace(self, total=budget, free=max(0, min(self.free, budget + baseline - self.used)))


def allocator_cap(budget: int, memory: CardMemory) -> int:
    """What torch's allocator may reserve at most, so that the card never holds more than `budget` bytes.

    torch tests what it has reserved, the sleeping pool included, against the cap. So the pool is added to the cap, and
    what is held outside torch is taken off it. Both follow from `unmapped`, and cancel: the cap is `reserved` and what
    is left of the budget, also where the pool's own count is off, as after vLLM has unmapped unused blocks behind
    torch's back. Holds as long as the pool neither wakes nor falls asleep.
    """
    return budget + memory.unmapped - memory.outside_torch


def memory_fraction(cap: int, total: int) -> float:
    """`cap` as torch takes it: a share of the card in (0, 1], of which torch makes `cap` again, or a byte less.

    From torch 2.10 on, 1.0 lifts the cap. More is refused, so a cap of the whole card or above cannot be expressed.
    """
    return min(max(cap, 1) / total, 1.0)


def engine_utilization(budget: int | None, total: int, wanted: float) -> float:
    """The share of the real card that gives vLLM's engine what it would get on the small one.

    Args:
        budget: bytes of the small card; None without one.
        total: bytes of the real card.
        wanted: the user's `vllm_gpu_memory_utilization`, a share of the small card.
    """
    return wanted if budget is None else wanted * budget / total


class DeviceMemoryBudget:
    """Trains as if the card had `budget` bytes.

    The budget covers all that this process holds on the card. The allocator's cap prevents a breach by torch; one by
    anything else (NCCL, CUDA graphs, vLLM waking its pool) is seen by `check`.

    What other processes hold shows in the card's figures only. Give it as `baseline`, read before this process
    touched the card; what they take later counts as this process's.

    Args:
        budget: bytes.
        device: the CUDA device.
        unmapped_bytes: gives the bytes of vLLM's pool that are unmapped at the time.
        read: gives the card's memory. Asks CUDA and torch by default.
        set_cap: takes the bytes that torch's allocator may reserve; the card's total or more lifts the cap.
        baseline: bytes that other processes hold.
        expected_pool: bytes of the pool that will sleep on the card, to be refused here and not at the first update.

    Attributes:
        budget: bytes.
        peaks: highest use in bytes that was seen in each phase, at its beginning and by `check`.

    Raises:
        SettingsError: the budget is below 1 GiB, below what is in use, above what the card has, or so near to it that
            torch could not be capped while the pool sleeps.
    """

    def __init__(
        self,
        budget: int,
        device: torch.device,
        *,
        unmapped_bytes: Callable[[], int],
        read: Callable[[], CardMemory] | None = None,
        set_cap: Callable[[int], None] | None = None,
        baseline: int = 0,
        expected_pool: int = 0,
    ) -> None:
        self.budget = budget
        self.peaks: dict[str, int] = {}
        self._baseline = baseline
        self._read = read or (lambda: read_card_memory(device, unmapped_bytes()))
        self._set_cap = set_cap or (lambda nbytes: _cap_allocator(device, nbytes))
        memory = self._read()
        _check_budget(budget, baseline, memory)
        asleep = replace(memory, reserved=memory.reserved + expected_pool, unmapped=memory.unmapped + expected_pool)
        self._check_cap_exists(asleep, allocator_cap(budget + baseline, asleep))

    def begin(self, phase: str, *, pool_wakes: bool = False) -> None:
        """Sets the allocator's cap for `phase`.

        Args:
            phase: the name, for errors and `peaks`.
            pool_wakes: vLLM's pool, asleep now, will be awake in this phase. torch has to hand its cached memory back
                (`torch.cuda.empty_cache`) before the pool wakes: vLLM maps it without asking torch.

        Raises:
            DeviceMemoryError: more than the budget is in use.
            SettingsError: torch cannot be capped, see the class.
        """
        memory = self._observe(phase, {})
        cap = allocator_cap(self.budget + self._baseline, memory)
        if pool_wakes:
            cap -= memory.unmapped
        self._check_cap_exists(memory, cap)
        self._set_cap(cap)

    def check(self, phase: str, owners: Mapping[str, int]) -> None:
        """Fails if the card holds more than the budget.

        Args:
            phase: the name of the phase that is ending.
            owners: bytes of the card by owner, for the error; nothing for what sleeps or is parked.

        Raises:
            DeviceMemoryError: more than the budget is in use.
        """
        self._observe(phase, owners)

    def lift(self) -> None:
        """Lets torch's allocator have the whole card again."""
        self._set_cap(self._read().total)

    def _observe(self, phase: str, owners: Mapping[str, int]) -> CardMemory:
        memory = self._read()
        used = max(0, memory.used - self._baseline)
        self.peaks[phase] = max(self.peaks.get(phase, 0), used)
        if used > self.budget:
            excess = used - self.budget
            share = math.ceil(100 * excess / self.budget) / 100
            held = held_by(owners or {"torch": memory.reserved - memory.unmapped}, used, "contexts and others")
            raise DeviceMemoryError(
                f"In phase '{phase}' the card holds {gib(used)} ({held}), and device_memory_budget is "
                f"{gib(self.budget)}. A card of that size would have run out of memory. "
                f"Set device_memory_budget='{_round_up(used)}GiB', or hold {gib(excess)} less: "
                f"vllm_gpu_memory_utilization lower by {share:.2f} where vLLM is awake in this phase, "
                "a smaller max_tokens_per_microbatch where it is not."
            )
        return memory

    def _check_cap_exists(self, memory: CardMemory, cap: int) -> None:
        """Refuses a cap above the card, unless the card itself ends where the budget does."""
        if cap < memory.total or self.budget + self._baseline >= memory.total:
            return
        largest = self.budget - (cap - memory.total)
        raise SettingsError(
            f"device_memory_budget is {gib(self.budget)} and vLLM's sleeping pool {gib(memory.unmapped)}, on a card "
            f"of {gib(memory.total)}. torch counts the pool although it sleeps, and takes no cap above the card, so "
            "that it could not be held to the budget. Remove device_memory_budget, set it below "
            f"'{_round_down(largest)}GiB', or lower vllm_gpu_memory_utilization so that the pool is smaller."
        )


def read_card_memory(device: torch.device, unmapped: int) -> CardMemory:
    """The memory of a CUDA device now.

    Args:
        device: the CUDA device.
        unmapped: bytes of vLLM's pool that are unmapped.
    """
    free, total = torch.cuda.mem_get_info(device)
    return CardMemory(total=total, free=free, reserved=torch.cuda.memory_reserved(device), unmapped=unmapped)


def held_by(owners: Mapping[str, int], used: int, rest: str) -> str:
    """Who holds the card, largest owner first, for errors.

    Args:
        owners: bytes by owner.
        used: bytes held in all.
        rest: name of whoever holds what no owner does.
    """
    held = sorted(owners.items(), key=lambda owner: -owner[1])
    held.append((rest, max(0, used - sum(owners.values()))))
    return ", ".join(f"{name} {gib(nbytes)}" for name, nbytes in held)


def gib(nbytes: int) -> str:
    """Bytes as GiB, for errors."""
    return f"{nbytes / GIB:.2f} GiB"


def _cap_allocator(device: torch.device, nbytes: int) -> None:
    index = torch.cuda.current_device() if device.index is None else device.index
    fraction = memory_fraction(nbytes, torch.cuda.get_device_properties(index).total_memory)
    torch.cuda.set_per_process_memory_fraction(fraction, index)


def _check_budget(budget: int, baseline: int, memory: CardMemory) -> None:
    used = max(0, memory.used - baseline)
    available = memory.total - baseline
    if LEAST_BUDGET_BYTES <= budget <= available and used <= budget:
        return
    raise SettingsError(
        f"device_memory_budget is {gib(budget)}; the card has {gib(memory.total)}, of which other processes "
        f"hold {gib(baseline)} and this one {gib(used)}. A budget below 1 GiB or below what is in use leaves nothing "
        "to train with, and one above what the card has cannot be kept. "
        f"Set device_memory_budget between '{_round_up(max(LEAST_BUDGET_BYTES, used))}GiB' and "
        f"'{_round_down(available)}GiB', or None for the whole card."
    )


def _round_up(nbytes: int) -> str:
    return f"{math.ceil(10 * nbytes / GIB) / 10:.1f}"


def _round_down(nbytes: int) -> str:
    return f"{math.floor(10 * nbytes / GIB) / 10:.1f}"

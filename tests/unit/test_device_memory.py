"""A budgeted card holds no more than its budget, and a sleeping pool takes nothing from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_budget import BudgetGRPOConfig
from trl_budget.device_memory import (
    LEAST_BUDGET_BYTES,
    CardMemory,
    DeviceMemoryBudget,
    allocator_cap,
    engine_utilization,
    memory_fraction,
    parse_bytes,
)
from trl_budget.errors import DeviceMemoryError, SettingsError

GIB = 2**30
CUDA = torch.device("cuda", 0)
gibibytes = st.integers(min_value=0, max_value=200).map(lambda n: n * GIB // 4)


class FakeCard:
    """Counts as torch and CUDA do: the pool is part of `reserved`, and of `used` while it is mapped."""

    def __init__(self, total: int, outside: int = 0, reserved: int = 0) -> None:
        self.total, self.outside, self.reserved = total, outside, reserved
        self.unmapped = 0
        self.allowed: int | None = None

    @property
    def used(self) -> int:
        return self.outside + self.reserved - self.unmapped

    def read(self) -> CardMemory:
        return CardMemory(self.total, self.total - self.used, self.reserved, self.unmapped)

    def set_cap(self, nbytes: int) -> None:
        fraction = memory_fraction(nbytes, self.total)
        self.allowed = int(fraction * self.total) if fraction < 1.0 else None

    def allocate(self, nbytes: int) -> bool:
        refused = self.allowed is not None and self.reserved + nbytes > self.allowed
        if refused or self.used + nbytes > self.total:
            return False
        self.reserved += nbytes
        return True

    def budget(self, nbytes: int, **settings: int) -> DeviceMemoryBudget:
        read: Callable[[], CardMemory] = self.read
        return DeviceMemoryBudget(
            nbytes, CUDA, unmapped_bytes=lambda: self.unmapped, read=read, set_cap=self.set_cap, **settings
        )


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        ("16GiB", 17179869184),
        ("24 GB", 24000000000),
        ("1.5GiB", 1610612736),
        ("512MiB", 536870912),
        ("1.1GB", 1100000000),
        ("2 TiB", 2199023255552),
        ("8kB", 8000),
        ("8KiB", 8192),
        (" 16 gib ", 17179869184),
        ("17179869184", 17179869184),
        ("17179869184 B", 17179869184),
        (17179869184, 17179869184),
        (17179869184.0, 17179869184),
        (2**30, 2**30),
        ("24G", 24 * 2**30),
        ("24g", 24 * 2**30),
        ("24Gi", 24 * 2**30),
        ("1.5 G", 3 * 2**29),
        ("512M", 2**29),
        ("512mi", 2**29),
        ("8K", 8192),
        ("2T", 2**41),
        ("24 B", 24),
        ("512b", 512),
    ],
)
def test_a_size_is_read_with_its_unit(value: str | int, nbytes: int) -> None:
    assert parse_bytes(value) == nbytes


@pytest.mark.parametrize(
    "value", ["16X", "GiB", "", "-1GiB", "1,5GiB", "16GiB 2", "0GiB", 0, -5, True, -16.0, 0.5, "1e9", None]
)
def test_a_size_that_is_none_is_refused_with_what_is_accepted(value: object) -> None:
    with pytest.raises(SettingsError, match="Write '16GiB', '24 GB' or 17179869184"):
        parse_bytes(value)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (24, "24GiB"),
        ("24", "24GiB"),
        (24.0, "24GiB"),
        (" 24 ", "24GiB"),
        ("1.5", "1.5GiB"),
        (24576, "24576MiB"),
        ("25165824", "25165824KiB"),
    ],
    ids=repr,
)
def test_a_small_number_without_a_unit_is_refused_with_the_unit_to_write(value: object, written: str) -> None:
    with pytest.raises(SettingsError) as error:
        parse_bytes(value)
    assert f"{value!r} is a size without a unit" in str(error.value)
    assert f"Set device_memory_budget='{written}'" in str(error.value)


@pytest.mark.parametrize("value", [24, "24", 24.0])
def test_a_config_with_a_budget_without_a_unit_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(SettingsError, match="Set device_memory_budget='24GiB'"):
        BudgetGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", device_memory_budget=value)


@given(st.integers(LEAST_BUDGET_BYTES, 2**48))
def test_a_number_of_bytes_that_a_card_may_have_needs_no_unit(nbytes: int) -> None:
    assert parse_bytes(nbytes) == parse_bytes(str(nbytes)) == nbytes


def test_outside_torch_leaves_out_what_is_reserved_but_unmapped() -> None:
    memory = CardMemory(total=80 * GIB, free=70 * GIB, reserved=20 * GIB, unmapped=13 * GIB)
    assert memory.used == 10 * GIB
    assert memory.outside_torch == 3 * GIB


@given(budget=gibibytes, outside=gibibytes, ours=gibibytes, unmapped=gibibytes)
def test_a_reservation_up_to_the_cap_uses_the_budget_and_no_more(
    budget: int, outside: int, ours: int, unmapped: int
) -> None:
    card = FakeCard(1000 * GIB, outside, ours + unmapped)
    card.unmapped = unmapped
    room = allocator_cap(budget, card.read()) - card.reserved
    assert card.used + room == budget


@given(cap=st.integers(1, 200 * GIB), total=st.integers(8 * GIB, 200 * GIB))
def test_torch_makes_the_cap_again_of_the_fraction(cap: int, total: int) -> None:
    fraction = memory_fraction(cap, total)
    assert 0 < fraction <= 1
    assert min(cap, total) - 1 <= int(fraction * total) <= min(cap, total)


def test_a_cap_of_nothing_is_still_a_cap() -> None:
    assert 0 < memory_fraction(-GIB, 80 * GIB) < 1e-9


@given(
    outside=st.integers(0, 3 * GIB),
    resident=st.integers(0, 8 * GIB),
    pool=st.integers(0, 40 * GIB),
    requests=st.lists(st.integers(2**20, 6 * GIB), max_size=20),
)
def test_a_card_that_respects_the_cap_never_breaches(
    outside: int, resident: int, pool: int, requests: list[int]
) -> None:
    card = FakeCard(139 * GIB, outside, resident)
    budget = card.budget(16 * GIB)
    card.reserved += pool
    card.unmapped = pool
    budget.begin("update")
    for request in requests:
        card.allocate(request)
        budget.check("update", {})
    assert budget.peaks["update"] == card.used <= 16 * GIB


@pytest.mark.parametrize("pool", [0, 10 * GIB, 13 * GIB])
def test_a_sleeping_pool_does_not_shrink_what_the_update_may_allocate(pool: int) -> None:
    card = FakeCard(139 * GIB, outside=GIB, reserved=3 * GIB)
    card.reserved += pool
    card.unmapped = pool
    budget = card.budget(24 * GIB)
    budget.begin("update")
    assert card.allocate(20 * GIB - 2**20)
    assert not card.allocate(2 * 2**20)


def test_a_pool_that_will_wake_is_kept_free_in_the_cap() -> None:
    card = FakeCard(139 * GIB, outside=GIB, reserved=16 * GIB)
    card.unmapped = 13 * GIB
    budget = card.budget(24 * GIB)
    budget.begin("rollout", pool_wakes=True)
    card.unmapped = 0
    assert card.allocate(7 * GIB - 2**20)  # 24 without 1 outside, 3 reserved and 13 awake
    assert not card.allocate(2 * 2**20)
    budget.check("rollout", {})


def test_the_cap_follows_what_is_held_outside_torch() -> None:
    card = FakeCard(139 * GIB, outside=GIB)
    budget = card.budget(16 * GIB)
    budget.begin("score")
    card.outside = 3 * GIB
    budget.begin("update")
    assert not card.allocate(14 * GIB)
    assert card.allocate(13 * GIB - 1)


def test_blocks_that_vllm_unmapped_behind_torchs_back_leave_the_room_unchanged() -> None:
    card = FakeCard(139 * GIB, outside=GIB, reserved=12 * GIB)
    card.unmapped = 10 * GIB
    memory = card.read()
    counted_by_vllm = CardMemory(memory.total, memory.free, memory.reserved, unmapped=8 * GIB)
    assert allocator_cap(16 * GIB, counted_by_vllm) == allocator_cap(16 * GIB, memory)


def test_a_breach_names_phase_owners_limit_and_what_would_fit() -> None:
    card = FakeCard(139 * GIB, outside=GIB)
    budget = card.budget(16 * GIB)
    card.reserved = 16 * GIB
    owners = {"policy": 4 * GIB, "vLLM KV cache": 8 * GIB}
    with pytest.raises(DeviceMemoryError) as failure:
        budget.check("rollout", owners)
    message = str(failure.value)
    assert "In phase 'rollout' the card holds 17.00 GiB" in message
    assert "(vLLM KV cache 8.00 GiB, policy 4.00 GiB, contexts and others 5.00 GiB)" in message
    assert "device_memory_budget is 16.00 GiB" in message
    assert "device_memory_budget='17.0GiB'" in message
    assert "vllm_gpu_memory_utilization lower by 0.07" in message  # 1 / 16, rounded up


def test_use_up_to_the_budget_is_no_breach_and_a_byte_more_is() -> None:
    card = FakeCard(139 * GIB)
    budget = card.budget(16 * GIB)
    card.outside = 16 * GIB
    budget.check("update", {})
    card.outside += 1
    with pytest.raises(DeviceMemoryError):
        budget.check("update", {})


def test_a_phase_does_not_begin_above_the_budget() -> None:
    card = FakeCard(139 * GIB)
    budget = card.budget(16 * GIB)
    card.outside = 17 * GIB
    with pytest.raises(DeviceMemoryError, match="In phase 'update'"):
        budget.begin("update")
    assert card.allowed is None


def test_peaks_keep_the_highest_use_of_each_phase() -> None:
    card = FakeCard(139 * GIB)
    budget = card.budget(16 * GIB)
    for phase, used in [("rollout", 9), ("rollout", 12), ("rollout", 3), ("update", 7)]:
        card.outside = used * GIB
        budget.check(phase, {})
    assert budget.peaks == {"rollout": 12 * GIB, "update": 7 * GIB}


def test_what_other_processes_hold_does_not_count() -> None:
    card = FakeCard(139 * GIB, outside=30 * GIB)
    budget = card.budget(16 * GIB, baseline=30 * GIB)
    budget.begin("update")
    assert card.allocate(16 * GIB - 1)
    assert not card.allocate(2)
    budget.check("update", {})
    assert budget.peaks["update"] == 16 * GIB - 1


def test_lifting_the_cap_gives_torch_the_whole_card() -> None:
    card = FakeCard(139 * GIB)
    budget = card.budget(16 * GIB)
    budget.begin("update")
    assert not card.allocate(100 * GIB)
    budget.lift()
    assert card.allocate(100 * GIB)


@pytest.mark.parametrize(
    ("budget", "outside", "baseline"),
    [
        (80 * GIB + 1, 0, 0),
        (GIB - 1, 0, 0),
        (16 * GIB, 17 * GIB, 0),
        (16 * GIB, 19 * GIB, 2 * GIB),
        (70 * GIB, 20 * GIB, 20 * GIB),
    ],
    ids=["above the card", "below 1 GiB", "below what is in use", "the same beside others", "above what others leave"],
)
def test_a_budget_that_cannot_be_kept_is_refused(budget: int, outside: int, baseline: int) -> None:
    with pytest.raises(SettingsError, match="Set device_memory_budget between"):
        FakeCard(80 * GIB, outside).budget(budget, baseline=baseline)


@pytest.mark.parametrize("budget", [GIB, 16 * GIB, 80 * GIB])
def test_any_budget_between_a_gibibyte_and_the_card_is_accepted(budget: int) -> None:
    FakeCard(80 * GIB, outside=GIB).budget(budget).begin("update")


def test_the_refusal_names_the_budgets_that_work() -> None:
    with pytest.raises(SettingsError, match=r"between '3\.5GiB' and '75\.0GiB'"):
        FakeCard(80 * GIB, outside=int(8.42 * GIB)).budget(100 * GIB, baseline=5 * GIB)


def test_a_pool_too_large_for_torchs_cap_is_refused_at_construction() -> None:
    card = FakeCard(24 * GIB, outside=GIB)
    card.budget(16 * GIB, expected_pool=8 * GIB)
    with pytest.raises(SettingsError, match=r"set it below '12\.0GiB'"):  # 12 - 1 outside + 13 asleep = 24
        card.budget(16 * GIB, expected_pool=13 * GIB)


def test_a_pool_too_large_for_torchs_cap_is_refused_when_a_phase_begins() -> None:
    card = FakeCard(24 * GIB, outside=GIB)
    budget = card.budget(16 * GIB)
    card.reserved = card.unmapped = 13 * GIB
    with pytest.raises(SettingsError, match=r"sleeping pool 13\.00 GiB, on a card of 24\.00 GiB"):
        budget.begin("update")


def test_a_budget_of_the_whole_card_needs_no_cap() -> None:
    card = FakeCard(24 * GIB, outside=GIB)
    budget = card.budget(24 * GIB, expected_pool=20 * GIB)
    card.reserved = card.unmapped = 20 * GIB
    budget.begin("update")
    assert card.allocate(22 * GIB)


def test_the_engine_gets_on_the_large_card_what_it_would_get_on_the_small_one() -> None:
    assert 139 * GIB * engine_utilization(16 * GIB, 139 * GIB, 0.9) == pytest.approx(0.9 * 16 * GIB, abs=16)


def test_the_engines_share_stays_without_a_budget() -> None:
    assert engine_utilization(None, 139 * GIB, 0.3) == 0.3


def test_a_large_card_within_a_budget_shows_what_the_small_card_would() -> None:
    memory = FakeCard(139 * GIB, outside=30 * GIB, reserved=4 * GIB).read()
    small = memory.within(16 * GIB, baseline=29 * GIB)
    assert (small.total, small.free, small.used) == (16 * GIB, 11 * GIB, 5 * GIB)


def test_a_budget_does_not_invent_memory_that_others_hold() -> None:
    memory = FakeCard(139 * GIB, outside=137 * GIB).read()
    assert memory.within(16 * GIB, baseline=130 * GIB).free == 2 * GIB
    assert memory.within(16 * GIB, baseline=0).free == 0

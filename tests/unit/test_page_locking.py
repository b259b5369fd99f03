"""One field decides what is page-locked, everywhere, and says what pageable memory costs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import BASE_SETTINGS, comparable_log, make_trainer, max_difference, weights
from transformers import HfArgumentParser
from trl import GRPOConfig

from trl_budget import BudgetGRPOConfig, BudgetGRPOTrainer, HostAdamW, HostMemoryError, SettingsError, page_locking
from trl_budget.page_locking import CopySpeed, check_given_optimizer, copy_speed, locks_pages, page_locking_rows
from trl_budget.parking import ParkedWeights
from trl_budget.pinned import HostSlab

CPU = torch.device("cpu")
OFFLOADED = {"config_class": BudgetGRPOConfig, "gradient_checkpointing": True, "activation_offload": "on"}


@pytest.fixture
def cpu_behind_a_bus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The CPU counts as a device to which memory is copied; returns the bytes that are asked to be page-locked."""
    asked: list[int] = []
    monkeypatch.setattr(page_locking, "_DEVICES_BEHIND_A_BUS", ("cpu",))
    monkeypatch.setattr("trl_budget.pinned._cuda_host_register", lambda address, nbytes: asked.append(nbytes) or 0)
    monkeypatch.setattr("trl_budget.pinned._cuda_host_unregister", lambda address: None)
    monkeypatch.setattr(page_locking, "copy_speed", lambda device, slab: CopySpeed(1.0, 2.0))
    return asked


@pytest.fixture
def facts_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Masters are captured as on CUDA."""
    monkeypatch.setattr(BudgetGRPOTrainer, "_casts_policy", property(lambda self: self._is_host_placement))
    yield
    gc.collect()


def config(folder: Path, **settings: Any) -> BudgetGRPOConfig:
    return BudgetGRPOConfig(str(folder), **{**BASE_SETTINGS, **settings})


# The field


def test_host_memory_is_page_locked_by_default_and_only_beside_a_bus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, default, off = GRPOConfig(str(tmp_path), **BASE_SETTINGS), config(tmp_path), None
    assert [locks_pages(args) for args in (plain, default)] == [False, False]
    monkeypatch.setattr(page_locking, "_DEVICES_BEHIND_A_BUS", ("cpu",))
    off = config(tmp_path, pin_host_memory=False)
    assert [locks_pages(args) for args in (plain, default, off)] == [True, True, False]


@pytest.mark.parametrize("value", ["False", "off", None, 0, 1], ids=repr)
def test_what_is_neither_true_nor_false_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(SettingsError, match=r"pin_host_memory=.* is neither True nor False"):
        config(tmp_path, pin_host_memory=value)


@pytest.mark.parametrize(
    ("words", "expected"),
    [([], True), (["--pin_host_memory", "False"], False), (["--no_pin_host_memory"], False)],
)
def test_the_command_line_turns_it_off(tmp_path: Path, words: list[str], expected: bool) -> None:
    arguments = ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "False", "--report_to", "none"]
    [args] = HfArgumentParser(BudgetGRPOConfig).parse_args_into_dataclasses([*arguments, *words])
    assert args.pin_host_memory is expected


# What it costs


def test_the_row_compares_pageable_with_page_locked_copies(tmp_path: Path, cpu_behind_a_bus: list[int]) -> None:
    speeds = {False: CopySpeed(3.14, 4.0), True: CopySpeed(55.0, 54.2)}
    [row] = page_locking_rows(config(tmp_path, pin_host_memory=False), lambda device, slab: speeds[slab.is_pinned])
    assert (row.name, row.value) == ("pin_host_memory", "False")
    assert "pageable copies run at 3.1 GB/s to the host and 4.0 to the device" in row.reason
    assert "page-locked 55.0 GB/s to the host and 54.2 to the device" in row.reason
    assert cpu_behind_a_bus == [64 * 2**20]


def test_the_row_says_where_not_even_a_small_piece_can_be_page_locked(
    tmp_path: Path, cpu_behind_a_bus: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trl_budget.pinned._cuda_host_register", lambda address, nbytes: 2)
    [row] = page_locking_rows(config(tmp_path, pin_host_memory=False), lambda device, slab: CopySpeed(3.0, 4.0))
    assert "not even 64 MiB can be page-locked here" in row.reason


def test_nothing_is_measured_where_memory_is_page_locked_or_never_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> CopySpeed:
        raise AssertionError("nothing is measured")

    assert page_locking_rows(config(tmp_path, pin_host_memory=False), never) == []
    monkeypatch.setattr(page_locking, "_DEVICES_BEHIND_A_BUS", ("cpu",))
    assert page_locking_rows(config(tmp_path), never) == []


def test_a_speed_is_the_bytes_of_the_slab_over_the_time_of_the_fastest_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that counts its own readings: copies take 9, 3, 1 and 2 s down, 9, 8, 4 and 5 s up."""
    times = [9, 3, 1, 2, 9, 8, 4, 5]
    readings = iter([reading for seconds in times for reading in (100.0, 100.0 + seconds)])
    monkeypatch.setattr("time.perf_counter", lambda: next(readings))
    waits: list[torch.device] = []
    slab = HostSlab(10**9 // 1000, pin=False, purpose="test")
    assert copy_speed(CPU, slab, waits.append) == CopySpeed(to_host=1e-3, to_device=1e-3 / 4)
    assert waits == [CPU] * 16


# Who is told


@pytest.mark.usefixtures("facts_of_a_gpu")
@pytest.mark.parametrize("pins", [True, False])
def test_masters_and_activations_are_page_locked_as_the_field_says(
    tmp_path: Path, cpu_behind_a_bus: list[int], pins: bool
) -> None:
    trainer = make_trainer(BudgetGRPOTrainer, tmp_path, pin_host_memory=pins, max_steps=1, **OFFLOADED)
    masters = sum(slab.nbytes for slab in trainer._master_weights.slabs)
    assert trainer._host_adamw.pin_memory is pins
    assert all(slab.is_pinned is pins for slab in trainer._master_weights.slabs)
    trainer.train()
    activations = trainer._layer_passes._store.host_bytes
    assert activations > 0
    # The trial of copies is the only memory that is page-locked without being asked for.
    assert set(cpu_behind_a_bus) == ({masters, activations} if pins else {page_locking.TRIAL_BYTES})
    assert [row.value for row in trainer.resolved_settings if row.name == "pin_host_memory"] == ["False"] * (not pins)


def test_the_training_is_the_same_bits_and_on_the_cpu_there_is_no_row(tmp_path: Path) -> None:
    trained = []
    for pins in (True, False):
        trainer = make_trainer(BudgetGRPOTrainer, tmp_path, pin_host_memory=pins, max_steps=2, **OFFLOADED)
        trainer.train()
        assert "pin_host_memory" not in {row.name for row in trainer.resolved_settings}
        trained.append(trainer)
    locked, pageable = trained
    assert comparable_log(locked) == comparable_log(pageable)
    assert max_difference(weights(locked), weights(pageable)) == 0.0


def test_an_optimizer_that_was_page_locked_against_the_field_is_refused(
    tmp_path: Path, cpu_behind_a_bus: list[int]
) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(4))]
    pinned, pageable = HostAdamW(parameters).pin_memory, False
    off = config(tmp_path, pin_host_memory=False)
    with pytest.raises(SettingsError, match=r"HostAdamW that was built with pin_memory=True.*pin_memory=False, or"):
        check_given_optimizer(off, pinned)
    check_given_optimizer(off, pageable)
    check_given_optimizer(config(tmp_path), pinned)
    check_given_optimizer(config(tmp_path), pageable)


def test_on_the_cpu_the_field_refuses_no_optimizer(tmp_path: Path) -> None:
    check_given_optimizer(config(tmp_path, pin_host_memory=False), True)


def test_a_refusal_to_park_names_the_field() -> None:
    def refuse(nbytes: int, *, pin: bool, purpose: str) -> HostSlab:
        return HostSlab(nbytes, pin=pin, purpose=purpose, register=lambda address, nbytes: 2)

    parked = ParkedWeights(torch.nn.Linear(2, 2), "policy", device_type="cpu", pin=True, allocate=refuse)
    with pytest.raises(HostMemoryError, match="pin_host_memory=False where page-locking was refused"):
        parked.park()

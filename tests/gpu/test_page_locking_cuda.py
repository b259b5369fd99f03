"""What a refused page-lock leaves behind, and a training without page-locked memory."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from test_trainer_cuda import ON_GPU, supplied_rollouts
from tiny import BASE_SETTINGS, comparable_log, make_trainer, max_difference, weights

from trl_budget import BudgetGRPOConfig, BudgetGRPOTrainer, HostAdamW, SettingsError
from trl_budget.host_store import HostStore
from trl_budget.page_locking import copy_speed, page_locking_rows
from trl_budget.parking import ParkedWeights
from trl_budget.pinned import HostSlab, _cuda_host_register, host_slab_bytes

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
MIB = 2**20
ALREADY_REGISTERED = 712


@pytest.fixture(autouse=True)
def _no_slabs() -> None:
    gc.collect()


def launch() -> float:
    return torch.empty(1, device="cuda").fill_(3.0).item()


def test_without_care_the_next_launch_reports_a_refusal() -> None:
    """What is mended is there: CUDA hands the error of a refused call to whoever asks next."""
    slab = HostSlab(MIB, pin=True, purpose="test")
    launch()
    assert int(torch.cuda.cudart().cudaHostRegister(slab.storage.data_ptr(), MIB, 0)) == ALREADY_REGISTERED
    with pytest.raises(RuntimeError):
        launch()
    assert launch() == 3.0


def test_a_refused_page_lock_is_forgotten_by_cuda() -> None:
    slab = HostSlab(MIB, pin=True, purpose="test")
    launch()
    assert _cuda_host_register(slab.storage.data_ptr(), MIB) == ALREADY_REGISTERED
    assert launch() == 3.0


def test_speeds_are_those_of_a_bus() -> None:
    for pin in (True, False):
        speed = copy_speed(CUDA, HostSlab(64 * MIB, pin=pin, purpose="test"))
        assert 0.1 < speed.to_host < 500 and 0.1 < speed.to_device < 500


def test_the_trial_of_copies_gives_its_memory_back(tmp_path: Path) -> None:
    torch.cuda.empty_cache()
    before, reserved = host_slab_bytes(), torch.cuda.memory_reserved()
    args = BudgetGRPOConfig(str(tmp_path), **{**BASE_SETTINGS, **ON_GPU}, pin_host_memory=False)
    [row] = page_locking_rows(args)
    assert "page-locked" in row.reason
    gc.collect()
    assert (host_slab_bytes(), torch.cuda.memory_reserved()) == (before, reserved)


def train(path: Path, **settings: Any) -> Any:
    levers = {"gradient_checkpointing": True, "activation_offload": "on", "config_class": BudgetGRPOConfig}
    kwargs = {"rollout_func": supplied_rollouts}
    trainer = make_trainer(BudgetGRPOTrainer, path, trainer_kwargs=kwargs, **{**ON_GPU, **levers, **settings})
    before = host_slab_bytes(pinned_only=True)
    trainer.train()
    return trainer, before


@pytest.mark.parametrize("gradient_placement", ["host", "device"])
def test_pageable_memory_trains_the_same_bits_and_nothing_is_page_locked(
    tmp_path: Path, gradient_placement: str
) -> None:
    settings = {"gradient_placement": gradient_placement, "max_steps": 3}
    locked, _ = train(tmp_path / "locked", **settings)
    log, values = comparable_log(locked), weights(locked)
    assert "pin_host_memory" not in {row.name for row in locked.resolved_settings}
    assert host_slab_bytes(pinned_only=True) > 0
    del locked
    gc.collect()
    assert host_slab_bytes(pinned_only=True) == 0
    pageable, before = train(tmp_path / "pageable", pin_host_memory=False, **settings)
    assert before == host_slab_bytes(pinned_only=True) == 0
    assert host_slab_bytes() > 0
    assert [row.value for row in pageable.resolved_settings if row.name == "pin_host_memory"] == ["False"]
    assert comparable_log(pageable) == log
    assert max_difference(weights(pageable), values) == 0.0


def test_weights_park_and_activations_wait_in_pageable_memory() -> None:
    before = host_slab_bytes(pinned_only=True)
    model = torch.nn.Linear(2048, 2048, device="cuda")
    expected = model.weight.detach().cpu()
    parked = ParkedWeights(model, "policy", pin=False)
    parked.park()
    parked.unpark()
    assert torch.equal(model.weight.detach().cpu(), expected)
    store = HostStore(CUDA, 64 * MIB, pin=False)
    inputs = [torch.randn(1, 1024, 1024, device="cuda") for _ in range(4)]
    kept = [store.keep(hidden_states) for hidden_states in inputs]
    assert all(torch.equal(entry.take(), x) for entry, x in zip(reversed(kept), reversed(inputs), strict=True))
    assert host_slab_bytes(pinned_only=True) == before


def test_a_page_locked_optimizer_against_the_field_is_refused(tmp_path: Path) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(4, device="cuda"))]
    kwargs = {"optimizers": (HostAdamW(parameters), None)}
    settings = {**ON_GPU, "config_class": BudgetGRPOConfig, "pin_host_memory": False}
    with pytest.raises(SettingsError, match="built with pin_memory=True"):
        make_trainer(BudgetGRPOTrainer, tmp_path, trainer_kwargs=kwargs, **settings)

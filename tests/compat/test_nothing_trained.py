"""A policy without a weight to train: stock's training, and a table that says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from compat_pairs import log_of
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import make_trainer, max_difference, tiny_model, weights
from torch import nn
from trl import GRPOTrainer

from trl_budget import BudgetGRPOConfig, BudgetGRPOTrainer, SettingsError


def frozen(folder: Path) -> nn.Module:
    return tiny_model().requires_grad_(False)


def adapter_that_is_not_trainable(folder: Path) -> nn.Module:
    get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(folder)
    return PeftModel.from_pretrained(tiny_model(), folder, is_trainable=False)


POLICIES = pytest.mark.parametrize("policy", [frozen, adapter_that_is_not_trainable], ids=lambda p: p.__name__)
CHECKPOINTING = {"gradient_checkpointing": True, "max_steps": 2}


def build(base: type, folder: Path, policy: Callable[[Path], nn.Module], **settings: Any) -> Any:
    if base is BudgetGRPOTrainer:
        settings["config_class"] = BudgetGRPOConfig
    return make_trainer(base, folder, model=policy(folder / "adapter"), **{**CHECKPOINTING, **settings})


def row(trainer: Any, name: str) -> Any:
    return next(row for row in trainer.resolved_settings if row.name == name)


@POLICIES
def test_the_table_says_that_nothing_is_trained(tmp_path: Path, policy: Callable[[Path], nn.Module]) -> None:
    trainer = build(BudgetGRPOTrainer, tmp_path, policy)
    assert row(trainer, "trained weights").value == "0 trained weights"
    assert "every step leaves the model as it is" in row(trainer, "trained weights").reason
    is_adapter = policy is adapter_that_is_not_trainable
    assert ("is_trainable=True" in row(trainer, "trained weights").reason) == is_adapter
    placement = row(trainer, "optimizer_placement")
    assert (placement.value, placement.reason) == ("device", "no weight of the policy requires a gradient")
    assert not [r for r in trainer.resolved_settings if "full-parameter training" in r.reason]


@POLICIES
def test_training_is_stocks(tmp_path: Path, policy: Callable[[Path], nn.Module]) -> None:
    logs = []
    for base in (GRPOTrainer, BudgetGRPOTrainer):
        trainer = build(base, tmp_path / base.__name__, policy)
        before = weights(trainer)
        trainer.train()
        assert max_difference(weights(trainer), before) == 0.0
        logs.append(log_of(trainer))
    assert logs[0] == logs[1]


@POLICIES
def test_on_the_host_too(tmp_path: Path, policy: Callable[[Path], nn.Module]) -> None:
    trainer = build(BudgetGRPOTrainer, tmp_path, policy, optimizer_placement="host")
    before = weights(trainer)
    trainer.train()
    assert max_difference(weights(trainer), before) == 0.0
    assert row(trainer, "trained weights").value == "0 trained weights"


@POLICIES
@pytest.mark.parametrize("lever", [{"activation_offload": "on"}, {"tiled_mlp": 7}], ids=["offload", "tiles"])
def test_levers_for_long_rows_are_refused_with_the_reason(
    tmp_path: Path, policy: Callable[[Path], nn.Module], lever: dict[str, Any]
) -> None:
    with pytest.raises(SettingsError, match=r"no weight of the policy requires a gradient"):
        build(BudgetGRPOTrainer, tmp_path, policy, **lever)

"""A subclass of `BudgetGRPOTrainer` behaves as the same subclass of `GRPOTrainer` does."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from compat_pairs import assert_works, placement
from tiny import make_trainer, tiny_model
from trl import GRPOTrainer

from trl_budget import BudgetGRPOTrainer, HostAdamW, SettingsError

BASES = (GRPOTrainer, BudgetGRPOTrainer)


def assert_subclass_works(tmp_path: Path, make: Any, **settings: Any) -> tuple[Any, Any]:
    """`make(base)` builds the subclass; both bases must train alike."""
    stock_class, ours_class = (make(base) for base in BASES)
    return assert_works(tmp_path, stock_class=stock_class, ours_class=ours_class, **{"max_steps": 2, **settings})


def test_the_trainer_is_a_grpo_trainer(tmp_path: Path) -> None:
    trainer = make_trainer(BudgetGRPOTrainer, tmp_path)
    assert isinstance(trainer, GRPOTrainer)
    assert issubclass(BudgetGRPOTrainer, GRPOTrainer)


def test_overridden_compute_loss(tmp_path: Path) -> None:
    def make(base: type) -> type:
        class Mine(base):
            def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
                return 0.5 * super()._compute_loss(model, inputs)

        return Mine

    assert_subclass_works(tmp_path, make, gradient_accumulation_steps=2)


def test_overridden_calculate_rewards(tmp_path: Path) -> None:
    def make(base: type) -> type:
        class Mine(base):
            def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
                rewards = super()._calculate_rewards(*args, **kwargs)
                return rewards * torch.arange(1.0, len(rewards) + 1)[:, None]

        return Mine

    assert_subclass_works(tmp_path, make)


def test_overridden_get_decay_parameter_names(tmp_path: Path) -> None:
    def make(base: type) -> type:
        class Mine(base):
            def get_decay_parameter_names(self, model: Any) -> list[str]:
                return [name for name in super().get_decay_parameter_names(model) if "mlp" in name]

        return Mine

    _, ours = assert_subclass_works(tmp_path, make, weight_decay=0.5)
    decayed = next(g for g in ours._host_adamw.param_groups if g["weight_decay"] == 0.5)
    assert len(decayed["params"]) == 6


def test_create_optimizer_that_calls_super_and_uses_an_attribute_set_after_init(tmp_path: Path) -> None:
    def make(base: type) -> type:
        class Mine(base):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                self.slow_factor = 0.1

            def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
                is_new = self.optimizer is None
                optimizer = super().create_optimizer(model)
                if is_new:
                    optimizer.param_groups[1]["lr"] *= self.slow_factor
                return optimizer

        return Mine

    _, ours = assert_subclass_works(tmp_path, make)
    rates = [group["initial_lr"] for group in ours._host_adamw.param_groups]
    assert rates == pytest.approx([1e-3, 1e-4])


def test_create_optimizer_that_calls_super_on_a_bf16_model(tmp_path: Path) -> None:
    class Mine(BudgetGRPOTrainer):
        def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
            return super().create_optimizer(model)

    trainer = make_trainer(Mine, tmp_path, model=tiny_model(torch.bfloat16), max_steps=2)
    trainer.train()
    assert isinstance(trainer._host_adamw, HostAdamW)
    assert {state["master_weights"].dtype for state in trainer._host_adamw.state.values()} == {torch.float32}


def make_with_sgd(base: type) -> type:
    class Mine(base):
        def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
            if self.optimizer is None:
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.args.learning_rate, momentum=0.9)
            return self.optimizer

    return Mine


def test_create_optimizer_that_returns_another_torch_optimizer(tmp_path: Path) -> None:
    stock_class, ours_class = (make_with_sgd(base) for base in BASES)
    results = []
    for trainer_class in (stock_class, ours_class):
        trainer = make_trainer(
            trainer_class, tmp_path / trainer_class.__base__.__name__, max_steps=2, learning_rate=1.0
        )
        trainer.train()
        results.append((trainer, [p.detach().clone() for p in trainer.model.parameters()]))
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))
    assert results[1][0]._host_adamw is None
    assert isinstance(results[1][0].optimizer.optimizer, torch.optim.SGD)


def test_the_printed_table_does_not_claim_a_host_step_that_another_optimizer_does(tmp_path: Path) -> None:
    trainer = make_trainer(make_with_sgd(BudgetGRPOTrainer), tmp_path, max_steps=1)
    trainer.train()
    assert "optimizer" not in {setting.name for setting in trainer.resolved_settings}


def test_another_torch_optimizer_is_refused_once_the_policy_was_cast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(make_with_sgd(BudgetGRPOTrainer), tmp_path, max_steps=1)
    trainer._facts = dataclasses.replace(trainer._facts, device_type="cuda", bf16=True)  # where the policy is cast
    with pytest.raises(SettingsError, match=r"chosen for training is a SGD.*optimizer_placement='device'"):
        trainer.train()


def test_a_mixin_before_the_trainer(tmp_path: Path) -> None:
    class ScaledLoss:
        def __init__(self, *args: Any, scale: float = 3.0, **kwargs: Any) -> None:
            self.scale = scale
            super().__init__(*args, **kwargs)

        def compute_loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return self.scale * super().compute_loss(*args, **kwargs)

        def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
            return super().create_optimizer(model)

    assert_subclass_works(tmp_path, lambda base: type("Mine", (ScaledLoss, base), {}), max_grad_norm=0.0)


def test_a_subclass_with_fewer_arguments(tmp_path: Path) -> None:
    def make(base: type) -> type:
        class Mine(base):
            def __init__(self, model: Any, args: Any, **kwargs: Any) -> None:
                super().__init__(model, kwargs.pop("reward_funcs"), args, kwargs.pop("train_dataset"), **kwargs)

        return Mine

    _, ours = assert_subclass_works(tmp_path, make)
    assert placement(ours) == "host"


def test_overridden_training_step_that_reads_and_scales_gradients_in_fp32(tmp_path: Path) -> None:
    def make(base: type) -> type:
        class Mine(base):
            def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
                loss = super().training_step(*args, **kwargs)
                for parameter in self.model.parameters():
                    parameter.grad.mul_(0.5)
                return loss

        return Mine

    assert_subclass_works(tmp_path, make, gradient_accumulation_steps=2)

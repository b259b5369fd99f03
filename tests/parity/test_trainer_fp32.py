"""fp32 on the CPU: ours against stock `GRPOTrainer`, same seed, 0.0 on every weight and every metric."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import comparable_log, make_trainer, max_difference, save_tiny_model, weights
from trl import GRPOTrainer

from trl_budget import BudgetGRPOTrainer, HostAdamW

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")


def assert_same_training(tmp_path: Path, model: object = None, **settings: object) -> None:
    stock = make_trainer(GRPOTrainer, tmp_path / "stock", model=model, **settings)
    stock.train()
    ours = make_trainer(BudgetGRPOTrainer, tmp_path / "ours", model=model, **settings)
    before = weights(ours)
    ours.train()
    assert isinstance(ours._host_adamw, HostAdamW)
    assert max_difference(weights(ours), before) > 1e-4, "the weights must have moved for equality to mean something"
    assert max_difference(weights(ours), weights(stock)) == 0.0
    assert comparable_log(ours) == comparable_log(stock)
    assert {"loss", "grad_norm", "entropy", "reward", "learning_rate"} <= comparable_log(ours)[0].keys()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_equals_stock_for_every_loss_type(tmp_path: Path, loss_type: str) -> None:
    level = "sequence" if loss_type == "luspo" else "token"
    assert_same_training(tmp_path, loss_type=loss_type, importance_sampling_level=level)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"gradient_accumulation_steps": 3}, id="gradient accumulation"),
        pytest.param({"num_iterations": 2}, id="two iterations"),
        pytest.param({"steps_per_generation": 4, "gradient_accumulation_steps": 2}, id="two steps per generation"),
        pytest.param({"lr_scheduler_type": "cosine", "warmup_steps": 2}, id="cosine schedule with warmup"),
        pytest.param({"weight_decay": 0.1}, id="weight decay groups"),
        pytest.param({"max_grad_norm": 0.01}, id="clipping binds"),
        pytest.param({"max_grad_norm": 0.0}, id="clipping off"),
        pytest.param({"optim": "adamw_torch"}, id="the loop implementation"),
        pytest.param({"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6}, id="other betas and eps"),
        pytest.param({"entropy_coef": 0.01}, id="entropy bonus"),
        pytest.param({"gradient_checkpointing": True}, id="gradient checkpointing"),
        pytest.param(
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
            id="reentrant gradient checkpointing",
        ),
        pytest.param({"bf16": True}, id="bf16 autocast over fp32 parameters"),
        pytest.param({"top_entropy_quantile": 0.5}, id="top entropy quantile"),
    ],
)
def test_equals_stock_with(tmp_path: Path, settings: dict[str, object]) -> None:
    assert_same_training(tmp_path, **settings)


@pytest.mark.parametrize("sync", [False, True], ids=["fixed reference", "synchronised reference"])
def test_equals_stock_with_a_reference_model(tmp_path: Path, sync: bool) -> None:
    folder = save_tiny_model(tmp_path / "model")
    assert_same_training(
        tmp_path, model=folder, beta=0.05, sync_ref_model=sync, ref_model_sync_steps=2, num_iterations=2
    )


def test_equals_stock_when_the_model_is_named_by_a_string(tmp_path: Path) -> None:
    assert_same_training(tmp_path, model=save_tiny_model(tmp_path / "model"))

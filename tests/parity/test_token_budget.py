"""Token-budget passes against stock `GRPOTrainer`: gradients, every logged metric, the entropy controller."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tiny import byte_tokenizer, comparable_log, make_trainer, save_tiny_model, tiny_model
from trl import GRPOTrainer

from trl_budget import BudgetGRPOConfig, BudgetGRPOTrainer

pytestmark = pytest.mark.usefixtures("one_thread")

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")
SETTINGS: dict[str, Any] = {
    "gradient_accumulation_steps": 4,
    "per_device_train_batch_size": 4,
    "max_completion_length": 16,
    "max_steps": 2,
}


def uneven_rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Prompts of 3 to 11 tokens and completions of 1 to 13, some of them ended, another set at every step."""
    tokenizer, step = byte_tokenizer(), trainer.state.global_step
    lengths = [(row * 5 + step * 3) % 13 for row in range(len(prompts))]
    prompt_ids = [[3 + row % 7] * (row % 9) + tokenizer(p)["input_ids"][:3] for row, p in enumerate(prompts)]
    completions = [[2 + (row * 31 + step * 7 + i * 13) % 250 for i in range(n)] for row, n in enumerate(lengths)]
    completions = [(ids or [2]) + [1] * (row % 3 == 0) for row, ids in enumerate(completions)]
    return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": None}


class RecordsGradients:
    """Mixin: keeps the flat gradient of every optimizer step, before clipping."""

    gradients: list[torch.Tensor]

    def _clip_grad_norm(self, model: Any) -> Any:
        flat = torch.cat([p.grad.flatten().clone() for p in self.model.parameters() if p.grad is not None])
        self.gradients = [*vars(self).get("gradients", []), flat]
        return super()._clip_grad_norm(model)


class StockRecording(RecordsGradients, GRPOTrainer):
    pass


class OursRecording(RecordsGradients, BudgetGRPOTrainer):
    pass


def train(trainer_class: type, path: Path, model: Any = None, trainer_kwargs: Any = None, **settings: Any) -> Any:
    is_ours = issubclass(trainer_class, BudgetGRPOTrainer)
    kwargs = {"rollout_func": uneven_rollouts, **(trainer_kwargs or {})}
    config = {"config_class": BudgetGRPOConfig} if is_ours else {}
    trainer = make_trainer(
        trainer_class, path, model=model, trainer_kwargs=kwargs, **config, **{**SETTINGS, **settings}
    )
    trainer.train()
    return trainer


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def assert_same(ours: Any, stock: Any, tolerance: float = 1e-6) -> None:
    """The first gradient (weights equal), and every logged number of the first step; later ones drift with Adam."""
    assert relative(ours.gradients[0], stock.gradients[0]) <= tolerance
    assert len(ours.gradients) == len(stock.gradients)
    ours_log, stock_log = comparable_log(ours), comparable_log(stock)
    assert [entry.keys() for entry in ours_log] == [entry.keys() for entry in stock_log]
    for key, value in stock_log[0].items():
        assert ours_log[0][key] == pytest.approx(value, rel=tolerance, abs=tolerance), key
    for key, value in stock_log[1].items():
        assert ours_log[1][key] == pytest.approx(value, rel=100 * tolerance, abs=100 * tolerance), key


def count_forwards(trainer: Any) -> list[int]:
    """Rows times columns of every forward of the policy."""
    seen: list[int] = []
    trainer.model.model.register_forward_pre_hook(
        lambda _m, args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    return seen


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("layout", ["stock", "off", "on"])
def test_passes_of_a_budget_give_stocks_gradient_and_metrics(tmp_path: Path, loss_type: str, layout: str) -> None:
    settings = {"loss_type": loss_type, "beta": 0.05, "entropy_coef": 0.02, "num_iterations": 1}
    folder = save_tiny_model(tmp_path / "model")
    stock = train(StockRecording, tmp_path, folder, **settings)
    ours = train(OursRecording, tmp_path, folder, **settings, padding_free=layout, max_tokens_per_microbatch=60)
    assert_same(ours, stock)


@pytest.mark.parametrize("budget", [1, 30, 60, 120, 100_000, None])
@pytest.mark.parametrize("layout", ["stock", "off", "on"])
def test_any_budget_gives_stocks_gradient(tmp_path: Path, budget: int | None, layout: str) -> None:
    stock = train(StockRecording, tmp_path, loss_type="bnpo", entropy_coef=0.02)
    ours = train(
        OursRecording,
        tmp_path,
        loss_type="bnpo",
        entropy_coef=0.02,
        padding_free=layout,
        max_tokens_per_microbatch=budget,
    )
    assert_same(ours, stock)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"importance_sampling_level": "sequence"}, id="sequence level"),
        pytest.param({"num_iterations": 2}, id="two iterations"),
        pytest.param({"steps_per_generation": 8}, id="two steps per generation"),
        pytest.param({"steps_per_generation": 2}, id="two generations per step"),
        pytest.param({"mask_truncated_completions": True}, id="all-masked rows"),
        pytest.param({"top_entropy_quantile": 0.5}, id="top entropy quantile"),
        pytest.param({"off_policy_mask_threshold": 0.5}, id="off-policy mask"),
        pytest.param({"delta": 1.5, "num_iterations": 2}, id="two-sided clipping"),
        pytest.param({"gradient_checkpointing": True}, id="gradient checkpointing"),
        pytest.param(
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
            id="reentrant gradient checkpointing",
        ),
        pytest.param({"pad_to_multiple_of": 8}, id="padding to a multiple"),
        pytest.param({"gradient_accumulation_steps": 1}, id="no accumulation"),
        pytest.param({"bf16": True}, id="bf16 autocast"),
    ],
)
def test_passes_equal_stock_with(tmp_path: Path, settings: dict[str, Any]) -> None:
    stock = train(StockRecording, tmp_path, **settings)
    ours = train(OursRecording, tmp_path, **settings, padding_free="on", max_tokens_per_microbatch=50)
    assert_same(ours, stock, tolerance=2e-2 if settings.get("bf16") else 1e-6)


def test_adaptive_entropy_moves_its_coefficient_as_stock_does(tmp_path: Path) -> None:
    settings = {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 5.54, "max_steps": 5}
    stock = train(StockRecording, tmp_path, **settings)
    ours = train(OursRecording, tmp_path, **settings, padding_free="on", max_tokens_per_microbatch=40)
    assert ours.entropy_coef == stock.entropy_coef != 0.01
    assert [e["entropy_coef"] for e in comparable_log(ours)[:-1]] == [
        e["entropy_coef"] for e in comparable_log(stock)[:-1]
    ]
    assert ours._last_world_entropy == pytest.approx(stock._last_world_entropy, rel=1e-4)


def test_a_window_cut_short_by_the_end_of_the_epoch_equals_stock(tmp_path: Path) -> None:
    settings = {"num_train_epochs": 1, "max_steps": -1, "gradient_accumulation_steps": 3, "steps_per_generation": 3}
    stock = train(StockRecording, tmp_path, **settings)
    ours = train(OursRecording, tmp_path, **settings, padding_free="on", max_tokens_per_microbatch=50)
    assert_same(ours, stock)


def test_evaluation_equals_stock(tmp_path: Path) -> None:
    kwargs = {"eval_dataset": make_eval()}
    settings = {"per_device_eval_batch_size": 4, "num_generations_eval": 4, "entropy_coef": 0.02}
    stock = train(StockRecording, tmp_path, trainer_kwargs=kwargs, **settings).evaluate()
    ours = train(
        OursRecording, tmp_path, trainer_kwargs=kwargs, **settings, padding_free="on", max_tokens_per_microbatch=30
    ).evaluate()
    assert ours.keys() == stock.keys()
    for key, value in stock.items():
        if not any(part in key for part in ("runtime", "per_second", "time")):
            assert ours[key] == pytest.approx(value, rel=1e-4, abs=1e-4), key


def make_eval() -> Any:
    from tiny import digit_dataset

    return digit_dataset(8)


@pytest.mark.parametrize("layout", ["stock", "on"])
def test_adapters_equal_stock(tmp_path: Path, layout: str) -> None:
    def kwargs() -> dict[str, Any]:
        return {"peft_config": LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)}

    stock = train(StockRecording, tmp_path, trainer_kwargs=kwargs(), beta=0.05)
    repadded = train(StockRecording, tmp_path, trainer_kwargs=kwargs(), beta=0.05, pad_to_multiple_of=8)
    budget = {"padding_free": layout, "max_tokens_per_microbatch": 60}
    ours = train(OursRecording, tmp_path, trainer_kwargs=kwargs(), beta=0.05, **budget)
    # Random adapters amplify rounding: stock itself moves by 2.6e-6 when its padding changes.
    noise = relative(repadded.gradients[0], stock.gradients[0])
    assert_same(ours, stock, tolerance=1e-6 if layout == "stock" else max(1e-6, noise))


def test_no_pass_exceeds_the_budget_and_all_real_tokens_run_once(tmp_path: Path) -> None:
    def run(**settings: Any) -> list[int]:
        config = {**SETTINGS, "max_steps": 1, **settings}
        kwargs = {"rollout_func": uneven_rollouts}
        trainer = make_trainer(
            BudgetGRPOTrainer, tmp_path, config_class=BudgetGRPOConfig, trainer_kwargs=kwargs, **config
        )
        seen = count_forwards(trainer)
        trainer.train()
        return seen

    packed = run(padding_free="on", max_tokens_per_microbatch=60)
    trimmed = run(padding_free="off", max_tokens_per_microbatch=60)
    padded = run(padding_free="stock", max_tokens_per_microbatch=None)
    merged = run(padding_free="on", max_tokens_per_microbatch=100_000)
    assert max(packed) <= 60
    assert max(trimmed) <= 60
    assert len(merged) == 1
    assert sum(packed) == sum(merged) < sum(trimmed) < sum(padded)


def test_a_subclass_with_its_own_loss_keeps_stocks_micro_batches(tmp_path: Path) -> None:
    class Mine(BudgetGRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
            return super()._compute_loss(model, inputs) * 2

    kwargs = {"rollout_func": uneven_rollouts}
    trainer = make_trainer(
        Mine,
        tmp_path,
        config_class=BudgetGRPOConfig,
        trainer_kwargs=kwargs,
        padding_free="on",
        max_tokens_per_microbatch=50,
        **SETTINGS,
    )
    seen = count_forwards(trainer)
    trainer.train()
    assert len(seen) == SETTINGS["gradient_accumulation_steps"] * SETTINGS["max_steps"]
    row = next(s for s in trainer.resolved_settings if s.name == "max_tokens_per_microbatch")
    assert row.value == "None"
    assert "_compute_loss" in row.reason


def test_an_exception_in_a_window_leaves_nothing_for_the_next_training(tmp_path: Path) -> None:
    ours = train(OursRecording, tmp_path, padding_free="on", max_tokens_per_microbatch=50)
    ours._pending.append({"left": "behind"})
    ours._window_position = 3
    ours.args.max_steps = 3
    ours.train()
    assert ours._pending == []
    assert ours._window_position == 0


def test_models_of_one_process_do_not_share_a_window(tmp_path: Path) -> None:
    model = tiny_model()
    first = train(OursRecording, tmp_path, model, padding_free="on", max_tokens_per_microbatch=50)
    second = train(OursRecording, tmp_path, model, padding_free="on", max_tokens_per_microbatch=50)
    assert all(torch.equal(a, b) for a, b in zip(first.gradients, second.gradients, strict=True))

"""Resuming, best models and foreign writes: no bit of the masters, moments or steps is lost or invented."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compat_pairs import assert_compute_is_cast_of_masters, log_of, masters_of, state_of
from safetensors.torch import load_file
from tiny import digit_dataset, make_trainer, max_difference, tiny_model, weights
from transformers import TrainerCallback
from trl import GRPOTrainer

from trl_budget import BudgetGRPOTrainer

BF16 = torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
LONG = {
    "max_steps": 8,
    "save_strategy": "steps",
    "save_steps": 4,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 1,
    "gradient_accumulation_steps": 2,
    "max_completion_length": 4,
    "weight_decay": 0.1,
}
SHORT = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "max_completion_length": 4}


def train(base: type, path: Path, resume: Path | None = None, **settings: Any) -> Any:
    trainer = make_trainer(base, path, **settings)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


def saved_optimizer(checkpoint: Path) -> dict[str, Any]:
    return torch.load(checkpoint / "optimizer.pt", weights_only=True)


@DTYPES
def test_resume_equals_the_uninterrupted_run(tmp_path: Path, dtype: torch.dtype) -> None:
    model = tiny_model(dtype)
    whole = train(BudgetGRPOTrainer, tmp_path / "whole", model=model, **LONG)
    checkpoint = tmp_path / "whole" / "checkpoint-4"
    resumed = train(BudgetGRPOTrainer, tmp_path / "resumed", checkpoint, model=tiny_model(dtype, seed=1), **LONG)
    assert max_difference(state_of(whole), state_of(resumed)) == 0.0
    assert {name.split("/")[0] for name in state_of(whole)} >= {"weights", "master_weights", "exp_avg", "step"}
    assert log_of(whole)[:-1] == log_of(resumed)[:-1]
    assert {entry["step"].item() for entry in resumed._host_adamw.state.values()} == {8.0}


def test_resume_in_the_same_trainer_equals_the_uninterrupted_run(tmp_path: Path) -> None:
    """What happened after the checkpoint must be forgotten: masters, moments and steps."""
    whole = train(BudgetGRPOTrainer, tmp_path, model=tiny_model(BF16), **LONG)
    expected = state_of(whole)
    whole.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert max_difference(state_of(whole), expected) == 0.0


def test_resume_with_two_iterations_equals_stock(tmp_path: Path) -> None:
    """The middle of a generation's reuse: both start over with fresh completions."""
    settings = {**SHORT, "num_iterations": 2, "save_steps": 3}
    results = []
    for base in (GRPOTrainer, BudgetGRPOTrainer):
        path = tmp_path / base.__name__
        train(base, path, **settings)
        results.append(train(base, path, path / "checkpoint-3", **settings))
    assert max_difference(*(weights(trainer) for trainer in results)) == 0.0
    assert log_of(results[0]) == log_of(results[1])


def test_a_bf16_checkpoint_keeps_fp32_masters_beside_bf16_weights(tmp_path: Path) -> None:
    trainer = train(BudgetGRPOTrainer, tmp_path, model=tiny_model(BF16), **{**SHORT, "max_steps": 2})
    stored = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    state = saved_optimizer(tmp_path / "checkpoint-2")["state"]
    assert {tensor.dtype for tensor in stored.values()} == {BF16}
    assert {entry[key].dtype for entry in state.values() for key in entry} == {torch.float32}
    in_order = [p for group in trainer._host_adamw.param_groups for p in group["params"]]
    names = {p: name for name, p in trainer.model.named_parameters()}
    for index, parameter in enumerate(in_order):
        assert torch.equal(state[index]["master_weights"], masters_of(trainer)[names[parameter]])


def test_an_fp32_checkpoint_has_the_keys_and_values_of_stocks(tmp_path: Path) -> None:
    states = []
    for base in (GRPOTrainer, BudgetGRPOTrainer):
        train(base, tmp_path / base.__name__, **{**SHORT, "max_steps": 2})
        states.append(saved_optimizer(tmp_path / base.__name__ / "checkpoint-2"))
    stock, ours = states
    assert stock["state"].keys() == ours["state"].keys()
    for index, entry in stock["state"].items():
        assert entry.keys() == ours["state"][index].keys()
        assert all(torch.equal(value, ours["state"][index][key]) for key, value in entry.items())
    for a, b in zip(stock["param_groups"], ours["param_groups"], strict=True):
        assert {key: b.get(key, "missing") for key in a} == a, "stock reads fused and foreach from the saved groups"


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch"])
@pytest.mark.parametrize(
    "bases",
    [
        pytest.param((GRPOTrainer, BudgetGRPOTrainer), id="stock's resumed by ours"),
        pytest.param((BudgetGRPOTrainer, GRPOTrainer), id="ours resumed by stock"),
    ],
)
def test_a_checkpoint_changes_hands_without_losing_a_bit(tmp_path: Path, bases: tuple[type, ...], optim: str) -> None:
    settings = {**SHORT, "optim": optim, "lr_scheduler_type": "cosine"}
    expected = train(GRPOTrainer, tmp_path / "whole", **settings)
    train(bases[0], tmp_path / "first", **settings)
    checkpoint = tmp_path / "first" / "checkpoint-2"
    resumed = train(bases[1], tmp_path / "second", checkpoint, model=tiny_model(seed=1), **settings)
    assert max_difference(weights(resumed), weights(expected)) == 0.0
    assert log_of(resumed)[:-1] == log_of(expected)[:-1]


def test_a_bf16_checkpoint_of_stock_is_resumed_with_its_weights_as_masters(tmp_path: Path) -> None:
    train(GRPOTrainer, tmp_path / "stock", model=tiny_model(BF16), **SHORT)
    checkpoint = tmp_path / "stock" / "checkpoint-2"
    settings = {**SHORT, "learning_rate": 0.0, "max_steps": 3}
    (checkpoint / "scheduler.pt").unlink()
    (checkpoint / "optimizer.pt").unlink()
    ours = train(BudgetGRPOTrainer, tmp_path / "ours", checkpoint, model=tiny_model(BF16, seed=1), **settings)
    stored = load_file(checkpoint / "model.safetensors")
    assert all(torch.equal(masters_of(ours)[name], tensor.float()) for name, tensor in stored.items())


def test_a_whole_bf16_checkpoint_of_stock_is_resumed(tmp_path: Path) -> None:
    train(GRPOTrainer, tmp_path / "stock", model=tiny_model(BF16), **SHORT)
    checkpoint = tmp_path / "stock" / "checkpoint-2"
    ours = train(BudgetGRPOTrainer, tmp_path / "ours", checkpoint, model=tiny_model(BF16, seed=1), **SHORT)
    assert {entry["step"].item() for entry in ours._host_adamw.state.values()} == {4.0}
    assert {entry["exp_avg"].dtype for entry in ours._host_adamw.state.values()} == {torch.float32}
    assert_compute_is_cast_of_masters(ours)


@DTYPES
def test_resume_of_save_only_model_starts_from_the_saved_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    settings = {**SHORT, "save_only_model": True}
    train(BudgetGRPOTrainer, tmp_path, model=tiny_model(dtype), **settings)
    checkpoint = tmp_path / "checkpoint-2"
    assert not (checkpoint / "optimizer.pt").exists()
    still = {**settings, "learning_rate": 0.0}
    other = tiny_model(dtype, seed=1)
    resumed = train(BudgetGRPOTrainer, tmp_path / "r", checkpoint, model=other, **still)
    stored = load_file(checkpoint / "model.safetensors")
    assert all(torch.equal(masters_of(resumed)[name], tensor.float()) for name, tensor in stored.items())
    assert all(torch.equal(weights(resumed)[name], tensor) for name, tensor in stored.items())


def test_resume_of_save_only_model_equals_stock(tmp_path: Path) -> None:
    settings = {**SHORT, "save_only_model": True}
    train(GRPOTrainer, tmp_path, **settings)
    model = tiny_model(seed=1)
    checkpoint = tmp_path / "checkpoint-2"
    bases = (GRPOTrainer, BudgetGRPOTrainer)
    resumed = [train(base, tmp_path / base.__name__, checkpoint, model=model, **settings) for base in bases]
    assert max_difference(*(weights(trainer) for trainer in resumed)) == 0.0


# The best model

BEST = {
    **SHORT,
    "max_steps": 3,
    "save_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_rank",
    "greater_is_better": True,
}


class Rank(TrainerCallback):
    """Makes the first checkpoint the best."""

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any) -> None:
        metrics["eval_rank"] = -float(state.global_step)


def best_kwargs() -> dict[str, Any]:
    return {"eval_dataset": digit_dataset(1), "callbacks": [Rank()]}


@DTYPES
def test_the_best_model_is_loaded_into_weights_and_masters(tmp_path: Path, dtype: torch.dtype) -> None:
    trainer = train(BudgetGRPOTrainer, tmp_path, model=tiny_model(dtype), trainer_kwargs=best_kwargs(), **BEST)
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    best = load_file(tmp_path / "checkpoint-1" / "model.safetensors")
    assert all(torch.equal(weights(trainer)[name], tensor) for name, tensor in best.items())
    assert_compute_is_cast_of_masters(trainer)
    last = load_file(tmp_path / "checkpoint-3" / "model.safetensors")
    assert any(not torch.equal(tensor, best[name]) for name, tensor in last.items())


def test_a_further_train_starts_from_the_best_bf16_weights(tmp_path: Path) -> None:
    trainer = train(BudgetGRPOTrainer, tmp_path, model=tiny_model(BF16), trainer_kwargs=best_kwargs(), **BEST)
    best = load_file(tmp_path / "checkpoint-1" / "model.safetensors")
    seen: list[float] = []

    class First(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(
                max((masters_of(trainer)[n].to(BF16).float() - t.float()).abs().max() for n, t in best.items())
            )

    trainer.add_callback(First())
    trainer.args.max_steps, trainer.args.save_strategy = 1, "no"
    trainer.train()
    assert seen == [0.0]
    assert_compute_is_cast_of_masters(trainer)


def test_a_further_train_after_the_best_model_equals_stock(tmp_path: Path) -> None:
    results = []
    for base in (GRPOTrainer, BudgetGRPOTrainer):
        trainer = train(base, tmp_path / base.__name__, trainer_kwargs=best_kwargs(), **BEST)
        trainer.train()
        results.append(trainer)
    assert max_difference(*(weights(trainer) for trainer in results)) == 0.0
    assert log_of(results[0]) == log_of(results[1])


# Foreign writes


class Average(TrainerCallback):
    """Writes the mean of the present and the initial weights into the model after each step."""

    def __init__(self, model: torch.nn.Module, through_data: bool, steps: tuple[int, ...]) -> None:
        self._initial = {name: p.detach().clone() for name, p in model.named_parameters()}
        self._through_data = through_data
        self._steps = steps
        self.written: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step not in self._steps:
            return
        for name, p in kwargs["model"].named_parameters():
            mean = (p.detach().float() + self._initial[name].float()) / 2
            self.written[name] = mean.to(p.dtype)
            if self._through_data:
                p.data = self.written[name].clone()
            else:
                p.copy_(self.written[name])


@pytest.mark.parametrize("through_data", [True, False], ids=["through .data", "through copy_"])
def test_a_weight_averaging_callback_equals_stock_in_fp32(tmp_path: Path, through_data: bool) -> None:
    results = []
    for base in (GRPOTrainer, BudgetGRPOTrainer):
        kwargs = {"callbacks": [Average(tiny_model(), through_data, (1, 2, 3))]}
        results.append(train(base, tmp_path / base.__name__, trainer_kwargs=kwargs, max_steps=4))
    assert max_difference(*(weights(trainer) for trainer in results)) == 0.0
    assert log_of(results[0]) == log_of(results[1])


@pytest.mark.parametrize("through_data", [True, False], ids=["through .data", "through copy_"])
def test_weights_averaged_by_a_callback_reach_the_masters_of_a_bf16_policy(tmp_path: Path, through_data: bool) -> None:
    average = Average(tiny_model(BF16), through_data, (2,))
    kept: list[dict[str, torch.Tensor]] = []

    class Keep(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            for group in kwargs["optimizer"].param_groups:
                group["lr"] = 0.0 if state.global_step == 2 else group["lr"]

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            kept.append(masters_of(trainer))

    settings = {"max_steps": 3, "weight_decay": 0.0, "lr_scheduler_type": "constant"}
    kwargs = {"callbacks": [average, Keep()]}
    trainer = make_trainer(BudgetGRPOTrainer, tmp_path, model=tiny_model(BF16), trainer_kwargs=kwargs, **settings)
    trainer.train()
    for name, written in average.written.items():
        expected = torch.where(written == kept[1][name].to(BF16), kept[1][name], written.float())
        assert torch.equal(kept[2][name], expected), name
    assert_compute_is_cast_of_masters(trainer)


def test_a_checkpoint_saved_after_a_foreign_write_holds_it_in_the_masters(tmp_path: Path) -> None:
    kwargs = {"callbacks": [Average(tiny_model(BF16), True, (2,))]}
    settings = {**SHORT, "max_steps": 2, "trainer_kwargs": kwargs}
    train(BudgetGRPOTrainer, tmp_path, model=tiny_model(BF16), **settings)
    stored = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    still = {**SHORT, "learning_rate": 0.0, "max_steps": 3}
    resumed = train(BudgetGRPOTrainer, tmp_path / "r", tmp_path / "checkpoint-2", model=tiny_model(BF16), **still)
    difference = max((masters_of(resumed)[n].to(BF16).float() - t.float()).abs().max() for n, t in stored.items())
    assert difference <= 2e-3, "one more step of at most the learning rate lies between"

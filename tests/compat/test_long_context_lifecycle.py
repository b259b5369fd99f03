"""The long-context levers while users interfere: callbacks, hooks, subclasses, errors, second runs. fp32 on the CPU.

Offload alone keeps every bit of stock TRL's gradients. Tiles and groups of heads are within 1e-6 of their norm.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compat_pairs import log_of, without_times
from lever_pairs import (
    ALL,
    LEVERS,
    Gradients,
    assert_nothing_kept,
    assert_same_steps,
    assert_trains_as_stock,
    build,
    prompts,
    run,
    watched,
)
from tiny import max_difference, tiny_model, weights
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.modeling_layers import GradientCheckpointingLayer
from trl import GRPOTrainer

from trl_budget import BudgetGRPOTrainer
from trl_budget.errors import UnservedLayerError
from trl_budget.pinned import host_slab_bytes

pytestmark = pytest.mark.usefixtures("one_thread")

EITHER = pytest.mark.parametrize("levers", LEVERS.values(), ids=LEVERS.keys())


class Call(TrainerCallback):
    """Calls a function of the model and the step when training begins and after every step."""

    def __init__(self, function: Callable[[Any, int], object]) -> None:
        self._function = function

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._function(kwargs["model"], 0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._function(kwargs["model"], state.global_step)


def calling(function: Callable[[Any, int], object]) -> dict[str, Any]:
    return {"kwargs": lambda: {"callbacks": [Call(function)]}, "max_steps": 3}


# Callbacks and hooks


@EITHER
def test_a_callback_that_leaves_the_model_in_eval_mode(levers: dict[str, Any], tmp_path: Path) -> None:
    assert_trains_as_stock(tmp_path, levers, **calling(lambda model, step: model.eval()))


@EITHER
def test_checkpointing_turned_off_in_between_is_told_and_trains_as_stock(
    levers: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def toggle(model: Any, step: int) -> None:
        if step == 1:
            model.gradient_checkpointing_disable()
        else:
            model.gradient_checkpointing_enable({"use_reentrant": False})

    assert_trains_as_stock(tmp_path, levers, **calling(toggle))
    warnings = [record.getMessage() for record in caplog.records if "long-context levers" in record.getMessage()]
    assert len(warnings) == 1 and "gradient_checkpointing_enable()" in warnings[0]


@EITHER
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_layer_in_eval_mode_runs_without_checkpointing(index: int, levers: dict[str, Any], tmp_path: Path) -> None:
    def change(trainer: Any) -> None:
        trainer.model.register_forward_pre_hook(lambda model, _: model.model.layers[index].eval() and None)

    assert_trains_as_stock(
        tmp_path, levers, model=tiny_model(num_hidden_layers=3, num_key_value_heads=2), change=change, max_steps=2
    )


def larger(_: nn.Module, __: Any, output: Any) -> Any:
    return output * 1.5 if isinstance(output, Tensor) else (output[0] * 1.5, *output[1:])


@EITHER
@pytest.mark.parametrize("where", ["mlp", "self_attn.o_proj", "self_attn.q_proj"])
def test_forward_hooks_from_a_callback_take_part(where: str, levers: dict[str, Any], tmp_path: Path) -> None:
    def add(model: Any, step: int) -> None:
        if step == 0:
            model.model.layers[0].get_submodule(where).register_forward_hook(larger)

    assert_trains_as_stock(tmp_path, levers, **calling(add))


@EITHER
def test_backward_hooks_within_a_layer_take_part(levers: dict[str, Any], tmp_path: Path) -> None:
    def change(trainer: Any) -> None:
        mlp = trainer.model.model.layers[1].mlp
        mlp.register_full_backward_hook(lambda _, gradients, __: (gradients[0] * 2,))

    assert_trains_as_stock(tmp_path, levers, change=change, max_steps=2)


@EITHER
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_full_backward_hook"])
def test_hooks_of_a_whole_layer_take_part_or_are_refused(kind: str, levers: dict[str, Any], tmp_path: Path) -> None:
    """transformers 5.17 runs them within the checkpointed call, where they would see tiles; 5.24 around it."""
    hook = larger if kind == "register_forward_hook" else lambda _, gradients, __: (gradients[0] * 2,)

    def change(trainer: Any) -> None:
        getattr(trainer.model.model.layers[0], kind)(hook)

    if levers == ALL and "__init_subclass__" not in vars(GradientCheckpointingLayer):
        with pytest.raises(UnservedLayerError, match="has hooks"):
            run(BudgetGRPOTrainer, tmp_path, change=change, **levers)
    else:
        assert_trains_as_stock(tmp_path, levers, change=change, max_steps=2)


@EITHER
def test_gradients_are_accumulated_once_per_parameter_and_backward(levers: dict[str, Any], tmp_path: Path) -> None:
    counts: list[dict[str, int]] = []

    def change(trainer: Any) -> None:
        counts.append(count := {})

        for name, parameter in trainer.model.named_parameters():
            count[name] = 0

            def hook(_: Tensor, name: str = name, count: dict[str, int] = count) -> None:
                count[name] += 1

            parameter.register_post_accumulate_grad_hook(hook)

    assert_trains_as_stock(tmp_path, levers, change=change, max_steps=2, gradient_accumulation_steps=2)
    assert counts[0] == counts[1] and set(counts[1].values()) == {4}


# Subclasses


def with_two_losses(base: type) -> type:
    class Mine(base):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Tensor:
            return super().compute_loss(*args, **kwargs) + 0.5 * super().compute_loss(*args, **kwargs)

    return Mine


def with_a_forward_of_its_own(base: type) -> type:
    class Mine(base):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            logits = model(input_ids=inputs["prompt_ids"], attention_mask=inputs["prompt_mask"]).logits
            return loss + 0.1 * logits.float().logsumexp(-1).mean()

    return Mine


def row_by_row(base: type) -> type:
    class Mine(base):
        def _get_per_token_logps_and_entropies(
            self, model: Any, ids: Tensor, mask: Tensor, keep: int, batch_size: Any = None, *args: Any, **kwargs: Any
        ) -> Any:
            return super()._get_per_token_logps_and_entropies(model, ids, mask, keep, 1, *args, **kwargs)

    return Mine


def with_checkpointing_off_before_backward(base: type) -> type:
    class Mine(base):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().compute_loss(*args, **kwargs)
            self.model.gradient_checkpointing_disable()
            self.model.eval()
            return loss

        def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Tensor:
            model.gradient_checkpointing_enable()
            return super().training_step(model, *args, **kwargs)

    return Mine


@EITHER
@pytest.mark.parametrize(
    "make", [with_two_losses, with_a_forward_of_its_own, row_by_row, with_checkpointing_off_before_backward]
)
def test_a_subclass_trains_as_the_same_subclass_of_stock(make: Any, levers: dict[str, Any], tmp_path: Path) -> None:
    assert_trains_as_stock(tmp_path, levers, make=make, max_steps=3)


def test_two_forwards_for_one_loss_take_host_memory_for_two_of_the_longest_rows(tmp_path: Path) -> None:
    held: list[int] = []
    settings = calling(lambda model, step: held.append(host_slab_bytes()))
    run(with_two_losses(BudgetGRPOTrainer), tmp_path, **ALL, **{**settings, "max_steps": 6})
    layers, rows, columns, hidden = 2, 4, 9 + 10, 64
    assert held[0] < held[1] <= held[-1] <= held[0] + 2 * layers * rows * columns * hidden * 4


# Errors and second runs


class Interrupted(Exception):
    pass


def failing_once(base: type, moment: str) -> type:
    class Failing(base):
        has_failed = False

        def fail_at(self, now: str) -> None:
            if now == moment and self.state.global_step == 1 and not self.has_failed:
                self.has_failed = True
                raise Interrupted

        def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Tensor:
            norm = self.model.model.norm
            with norm.register_forward_hook(lambda *_: self.fail_at("forward") if torch.is_grad_enabled() else None):
                loss = super().compute_loss(model, *args, **kwargs)
            self.fail_at("loss")
            self.model.model.layers[0].mlp.up_proj.weight.register_post_accumulate_grad_hook(
                lambda _: self.fail_at("backward")
            )
            return loss

        def _clip_grad_norm(self, model: Any) -> Any:
            self.fail_at("step")
            return super()._clip_grad_norm(model)

    return Failing


@EITHER
@pytest.mark.parametrize("moment", ["forward", "loss", "backward", "step"])
def test_training_goes_on_after_an_error_that_is_still_referred_to(
    moment: str, levers: dict[str, Any], tmp_path: Path
) -> None:
    """As in a notebook, where the last traceback keeps the frames, and with them the graph of the aborted step."""
    errors, results, held = [], [], []
    for base, settings in ((GRPOTrainer, {}), (BudgetGRPOTrainer, levers)):
        steps: list[Gradients] = []
        trainer = build(watched(failing_once(base, moment), steps), tmp_path, max_steps=2, **settings)
        with pytest.raises(Interrupted) as error:
            trainer.train()
        errors.append(error)
        held.append(host_slab_bytes())
        steps.clear()
        trainer.train()
        results.append(steps)
    assert_same_steps(results[1], results[0], levers)
    assert_nothing_kept(trainer)
    assert host_slab_bytes() == held[1]


@EITHER
def test_a_second_run_trains_as_stocks_and_takes_no_more_memory(levers: dict[str, Any], tmp_path: Path) -> None:
    held: list[int] = []

    def make(base: type) -> type:
        class Twice(base):
            def train(self, *args: Any, **kwargs: Any) -> Any:
                super().train(*args, **kwargs)
                held.append(host_slab_bytes())
                result = super().train(*args, **kwargs)
                held.append(host_slab_bytes())
                return result

        return Twice

    assert_trains_as_stock(tmp_path, levers, make=make, max_steps=2)
    assert held[2] == held[3]


def test_host_memory_goes_with_the_trainer(tmp_path: Path) -> None:
    gc.collect()
    before = host_slab_bytes()
    trainer, _ = run(BudgetGRPOTrainer, tmp_path, **ALL)
    assert host_slab_bytes() > before
    del trainer
    gc.collect()
    assert host_slab_bytes() == before


@EITHER
def test_eight_steps_equal_four_a_resume_and_four(levers: dict[str, Any], tmp_path: Path) -> None:
    settings = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4, "learning_rate": 1e-3, **levers}
    whole, _ = run(BudgetGRPOTrainer, tmp_path / "whole", **settings)
    resumed = build(BudgetGRPOTrainer, tmp_path / "resumed", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert max_difference(weights(resumed), weights(whole)) == 0.0
    assert log_of(resumed)[:8] == log_of(whole)[:8]
    assert "trl_budget" not in (tmp_path / "whole" / "checkpoint-8" / "config.json").read_text()


@EITHER
def test_evaluation_before_within_and_after_leaves_stocks_gradient(levers: dict[str, Any], tmp_path: Path) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4, "max_steps": 3}
    settings["kwargs"] = lambda: {"eval_dataset": prompts(4)}
    found: list[dict[str, float]] = []

    def make(base: type) -> type:
        class Evaluating(base):
            def train(self, *args: Any, **kwargs: Any) -> Any:
                found.append(without_times(self.evaluate()))
                result = super().train(*args, **kwargs)
                found.append(without_times(self.evaluate()))
                return result

        return Evaluating

    assert_trains_as_stock(tmp_path, levers, make=make, **settings)
    assert found[2] == found[0] and "eval_loss" in found[1]
    assert found[3] == pytest.approx(found[1], rel=2e-4, abs=2e-6)

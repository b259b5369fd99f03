"""User code between the micro-batches of an optimizer step: with a budget it sees and does what it does in stock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_choices import choose_as_on_cuda, row
from test_reuse import OursVllm, StockVllm, build
from test_token_budget import OursRecording, StockRecording, relative, uneven_rollouts
from tiny import comparable_log, make_trainer, max_difference, weights
from transformers import TrainerCallback

from trl_budget import BudgetGRPOConfig, SettingsError

LAYOUTS: dict[str, dict[str, Any]] = {
    "as on CUDA": {},
    "stock's rows and a budget": {"padding_free": "stock", "max_tokens_per_microbatch": 4096},
    "stock's rows and passes of one row": {"padding_free": "stock", "max_tokens_per_microbatch": 8},
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


@pytest.fixture(autouse=True)
def _on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_as_on_cuda(monkeypatch)


class Probe(TrainerCallback):
    """TRL's loss of a buffered micro-batch, asked for between two others."""

    def __init__(self, *, evaluates: bool = False, differentiates: bool = False) -> None:
        self.trainer: Any = None
        self.seen: list[float] = []
        self._evaluates, self._differentiates = evaluates, differentiates

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        trainer = self.trainer
        trainer.model.train(not self._evaluates)
        with torch.set_grad_enabled(self._differentiates):
            loss = trainer.compute_loss(trainer.model, dict(trainer._buffered_inputs[0]))
        trainer.model.train()
        self.seen.append(loss.item())


class ZeroGrad(TrainerCallback):
    """Drops the gradients of the first micro-batch."""

    trainer: Any = None

    def __init__(self) -> None:
        self._num_calls = 0

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        if self._num_calls == 0:
            self.trainer.model.zero_grad()
        self._num_calls += 1


def run(trainer_class: type, path: Path, callback: Any = None, **settings: Any) -> Any:
    config = {"config_class": BudgetGRPOConfig} if issubclass(trainer_class, OursRecording) else {}
    kwargs = {"rollout_func": uneven_rollouts, "callbacks": [] if callback is None else [callback]}
    settings = {"max_steps": 2, "gradient_accumulation_steps": 4, "max_completion_length": 16, **settings}
    trainer = make_trainer(trainer_class, path, trainer_kwargs=kwargs, **config, **settings)
    if callback is not None:
        callback.trainer = trainer
    trainer.train()
    return trainer


@every_layout
@pytest.mark.parametrize("kind", [{}, {"evaluates": True}, {"differentiates": True}], ids=str)
def test_a_loss_asked_for_inside_a_window_is_right_and_leaves_the_update_alone(
    tmp_path: Path, layout: dict[str, Any], kind: dict[str, bool]
) -> None:
    probes = Probe(**kind), Probe(**kind)
    stock = run(StockRecording, tmp_path / "stock", probes[0])
    ours = run(OursRecording, tmp_path / "ours", probes[1], **layout)
    assert probes[1].seen == pytest.approx(probes[0].seen, abs=2e-6)
    assert len(probes[0].seen) == 6
    assert relative(ours.gradients[0], stock.gradients[0]) < 1e-6
    for a, b in zip(comparable_log(ours), comparable_log(stock), strict=True):
        assert a == pytest.approx(b, rel=2e-4, abs=2e-6)


def twice(base: type) -> type:
    class Twice(base):
        """A loss of its own before each update's, as a subclass that compares two policies asks for it."""

        losses: tuple[float, ...] = ()
        probes: tuple[float, ...] = ()

        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            prepared = self._prepare_inputs(inputs)
            self.probes += (self.compute_loss(model, dict(prepared)).item(),)
            loss = super().training_step(model, inputs, num_items_in_batch)
            self.losses += (loss.item(),)
            return loss

    return Twice


@every_layout
def test_an_own_training_step_sees_the_loss_of_each_micro_batch(tmp_path: Path, layout: dict[str, Any]) -> None:
    stock = run(twice(StockRecording), tmp_path / "stock", loss_type="grpo")
    ours = run(twice(OursRecording), tmp_path / "ours", loss_type="grpo", **layout)
    assert ours.losses[:4] == pytest.approx(stock.losses[:4], abs=2e-6)
    assert ours.probes[:4] == pytest.approx(stock.probes[:4], abs=2e-6)
    assert relative(ours.gradients[0], stock.gradients[0]) < 1e-6
    assert "split, never merged: training_step may look" in row(ours, "max_tokens_per_microbatch").reason


@every_layout
def test_a_hook_on_a_gradient_is_called_once_for_each_micro_batch(tmp_path: Path, layout: dict[str, Any]) -> None:
    runs = []
    for trainer_class in (StockRecording, OursRecording):
        config = {"config_class": BudgetGRPOConfig, **layout} if trainer_class is OursRecording else {}
        kwargs = {"rollout_func": uneven_rollouts}
        settings = {"max_steps": 1, "gradient_accumulation_steps": 4, "max_completion_length": 16}
        trainer = make_trainer(trainer_class, tmp_path, trainer_kwargs=kwargs, **config, **settings)
        for parameter in trainer.model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        trainer.train()
        runs.append(trainer)
    stock, ours = runs
    assert relative(ours.gradients[0], stock.gradients[0]) < 1e-6
    assert "is called once for each micro-batch" in row(ours, "max_tokens_per_microbatch").reason


@every_layout
def test_a_loss_asked_for_while_inputs_are_prepared_is_not_the_updates(tmp_path: Path, layout: dict[str, Any]) -> None:
    class Prepares:
        probes: tuple[float, ...] = ()

        def _prepare_inputs(self, generation_batch: Any) -> Any:
            inputs = super()._prepare_inputs(generation_batch)  # type: ignore[misc]
            self.probes += (self.compute_loss(self.model, dict(inputs)).item(),)  # type: ignore[attr-defined]
            return inputs

    stock = run(type("Stock", (Prepares, StockRecording), {}), tmp_path / "stock")
    ours = run(type("Ours", (Prepares, OursRecording), {}), tmp_path / "ours", **layout)
    assert ours.probes[:4] == pytest.approx(stock.probes[:4], abs=2e-6)
    assert relative(ours.gradients[0], stock.gradients[0]) < 1e-6


@every_layout
def test_gradients_dropped_between_micro_batches_are_dropped(tmp_path: Path, layout: dict[str, Any]) -> None:
    whole = run(StockRecording, tmp_path / "whole")
    stock = run(StockRecording, tmp_path / "stock", ZeroGrad())
    ours = run(OursRecording, tmp_path / "ours", ZeroGrad(), **layout)
    assert relative(whole.gradients[0], stock.gradients[0]) > 0.1
    assert relative(ours.gradients[0], stock.gradients[0]) < 1e-6
    assert "ZeroGrad.on_substep_end may look" in row(ours, "max_tokens_per_microbatch").reason


def test_micro_batches_are_merged_where_nobody_looks(tmp_path: Path) -> None:
    ours = run(OursRecording, tmp_path / "ours")
    assert row(ours, "max_tokens_per_microbatch").reason.endswith("stock's micro-batches are merged and split")
    assert ours._pass_settings.merges_micro_batches


def test_a_callback_added_later_is_served(tmp_path: Path) -> None:
    stock = run(StockRecording, tmp_path / "stock", ZeroGrad())
    kwargs = {"rollout_func": uneven_rollouts}
    settings = {"max_steps": 2, "gradient_accumulation_steps": 4, "max_completion_length": 16}
    ours = make_trainer(
        OursRecording, tmp_path / "ours", trainer_kwargs=kwargs, config_class=BudgetGRPOConfig, **settings
    )
    callback = ZeroGrad()
    callback.trainer = ours
    ours.add_callback(callback)
    ours.train()
    assert relative(ours.gradients[0], stock.gradients[0]) < 1e-6


class SamplingProbe(Probe):
    """As `Probe`; what it asks for must not show in the statistics of the rollout."""


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_loss_asked_for_besides_does_not_count_as_sampled(tmp_path: Path, evaluates: bool) -> None:
    logs = []
    for trainer_class in (StockVllm, OursVllm):
        trainer = build(trainer_class, tmp_path / trainer_class.__name__, max_steps=2)
        probe = SamplingProbe(evaluates=evaluates)
        probe.trainer = trainer
        trainer.add_callback(probe)
        trainer.train()
        logs.append([{k: v for k, v in entry.items() if "sampling" in k} for entry in comparable_log(trainer)])
    assert logs[0][0]
    for stock, ours in zip(*logs, strict=True):
        assert ours == pytest.approx(stock, rel=1e-5, abs=1e-6)


def test_a_required_reuse_that_noise_forbids_is_refused_when_the_trainer_is_built(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"='require' was asked for, but neftune_noise_alpha=5\.0"):
        build(OursVllm, tmp_path, max_steps=1, neftune_noise_alpha=5.0, reuse_old_logprobs="require")
    trainer = build(OursVllm, tmp_path, max_steps=1, neftune_noise_alpha=5.0)
    assert row(trainer, "reuse_old_logprobs").value == "off"


def test_the_row_of_reuse_follows_a_setting_that_changes(tmp_path: Path) -> None:
    trainer = build(OursVllm, tmp_path, max_steps=1)
    assert row(trainer, "reuse_old_logprobs").value == "on"
    trainer.args.neftune_noise_alpha = 5.0
    trainer.train()
    assert row(trainer, "reuse_old_logprobs").value == "off"
    assert "neftune_noise_alpha=5.0" in row(trainer, "reuse_old_logprobs").reason


def test_weights_after_a_probed_run_are_those_of_stock(tmp_path: Path) -> None:
    stock = run(StockRecording, tmp_path / "stock", Probe())
    ours = run(OursRecording, tmp_path / "ours", Probe(), padding_free="stock", max_tokens_per_microbatch=None)
    assert max_difference(weights(ours), weights(stock)) == 0.0

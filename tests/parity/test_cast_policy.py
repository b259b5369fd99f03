"""The policy that CUDA gets, bf16 compute weights cast from fp32 masters, exercised on the CPU.

Only the placement facts are replaced; everything after them is the code that a GPU runs, but for copies and pinning.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import comparable_log, digit_dataset, make_trainer, save_tiny_model, tiny_model
from transformers import TrainerCallback
from trl import GRPOTrainer

from trl_budget import BudgetGRPOConfig, BudgetGRPOTrainer, upstream

CHECKPOINTS = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "lr_scheduler_type": "cosine"}


@pytest.fixture(autouse=True)
def _facts_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    collect = upstream.placement_facts
    monkeypatch.setattr(
        upstream,
        "placement_facts",
        lambda *args, **kwargs: dataclasses.replace(collect(*args, **kwargs), device_type="cuda", bf16=True),
    )


def masters(trainer: Any) -> dict[str, torch.Tensor]:
    state = trainer._host_adamw.state
    return {n: state[p]["master_weights"].clone() for n, p in trainer.model.named_parameters() if p in state}


def assert_compute_is_cast(trainer: Any) -> None:
    for name, master in masters(trainer).items():
        p = trainer.model.get_parameter(name)
        assert torch.equal(p.detach(), master.to(p.dtype)), name


class CheckEveryStep(TrainerCallback):
    def __init__(self) -> None:
        self.trainer: Any = None
        self.steps = 0

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert_compute_is_cast(self.trainer)
        self.steps += 1


def test_masters_are_the_fp32_weights_and_compute_weights_their_cast_after_every_step(tmp_path: Path) -> None:
    model = tiny_model()
    original = {name: p.detach().clone() for name, p in model.named_parameters()}
    check = CheckEveryStep()
    trainer = make_trainer(BudgetGRPOTrainer, tmp_path, model=model, trainer_kwargs={"callbacks": [check]})
    check.trainer = trainer
    assert all(torch.equal(master, original[name]) for name, master in masters(trainer).items())
    assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}
    assert trainer.model.lm_head.weight is trainer.model.model.embed_tokens.weight
    trainer.train()
    assert check.steps == 5
    assert any(not torch.equal(master, original[name]) for name, master in masters(trainer).items())


@pytest.mark.parametrize("model_init_kwargs", [None, {"dtype": "float32"}], ids=["default dtype", "float32"])
def test_the_reference_model_starts_as_the_policy_so_the_first_kl_is_zero(
    tmp_path: Path, model_init_kwargs: dict[str, Any] | None
) -> None:
    folder = save_tiny_model(tmp_path / "model")
    settings = {"beta": 0.1, "model_init_kwargs": model_init_kwargs, "max_steps": 2}
    trainer = make_trainer(BudgetGRPOTrainer, tmp_path, model=folder, **settings)
    assert {p.dtype for p in trainer.ref_model.parameters()} == {torch.bfloat16}
    assert trainer.args.model_init_kwargs == model_init_kwargs
    trainer.train()
    assert trainer.state.log_history[0]["kl"] == 0.0
    assert trainer.state.log_history[1]["kl"] != 0.0


def test_cast_lm_head_to_fp32_gets_the_fp32_values_back(tmp_path: Path) -> None:
    model = tiny_model(tie_word_embeddings=False)
    original = model.lm_head.weight.detach().clone()
    trainer = make_trainer(BudgetGRPOTrainer, tmp_path, model=model, cast_lm_head_to_fp32=True)
    assert torch.equal(trainer.model.lm_head.weight.detach(), original)
    trainer.train()
    assert trainer.model.lm_head.weight.dtype == torch.float32
    assert_compute_is_cast(trainer)


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_the_first_kl_is_zero_with_an_fp32_head(tmp_path: Path, is_tied: bool) -> None:
    folder = save_tiny_model(tmp_path / "model", tie_word_embeddings=is_tied)
    settings = {"beta": 0.1, "cast_lm_head_to_fp32": True, "max_steps": 2}
    trainer = make_trainer(BudgetGRPOTrainer, tmp_path, model=folder, **settings)
    head, original = trainer.ref_model.lm_head.weight, load_file(Path(folder) / "model.safetensors")
    assert head.dtype == torch.float32
    assert torch.equal(head.detach(), original["model.embed_tokens.weight" if is_tied else "lm_head.weight"])
    trainer.train()
    assert trainer.state.log_history[0]["kl"] == 0.0
    assert trainer.state.log_history[1]["kl"] != 0.0


SYNC = {"beta": 0.05, "sync_ref_model": True, "ref_model_mixup_alpha": 0.01, "ref_model_sync_steps": 1}


class KeepMasters(TrainerCallback):
    trainer: Any = None

    def __init__(self) -> None:
        self.history: list[dict[str, torch.Tensor]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.history.append(masters(self.trainer))


def test_a_reference_that_follows_by_small_shares_is_mixed_in_fp32(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    keep = KeepMasters()
    kwargs = {"callbacks": [keep]}
    trainer = make_trainer(BudgetGRPOTrainer, tmp_path, model=folder, trainer_kwargs=kwargs, max_steps=8, **SYNC)
    keep.trainer = trainer
    [row] = [row for row in trainer.resolved_settings if row.name == "sync_ref_model"]
    assert row.value.endswith("GiB") and "mixed in fp32" in row.reason
    expected = masters(trainer)
    trainer.train()
    for policy in keep.history:
        for name, values in expected.items():
            values.mul_(1.0 - SYNC["ref_model_mixup_alpha"]).add_(policy[name], alpha=SYNC["ref_model_mixup_alpha"])
    assert len(keep.history) == 8
    for name, p in trainer.ref_model.named_parameters():
        assert p.dtype == torch.bfloat16
        assert torch.equal(p.detach(), expected[name].to(torch.bfloat16)), name


@pytest.mark.parametrize("base", [GRPOTrainer, BudgetGRPOTrainer], ids=["stock", "ours"])
def test_a_resumed_run_starts_with_the_reference_as_it_is_loaded(tmp_path: Path, base: type) -> None:
    folder = save_tiny_model(tmp_path / "model")
    settings = {**CHECKPOINTS, **SYNC}
    make_trainer(base, tmp_path, model=folder, **{**settings, "max_steps": 2}).train()
    settings |= {"max_steps": 3, "ref_model_sync_steps": 3, "save_strategy": "no"}
    resumed = make_trainer(base, tmp_path, model=folder, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    ends = masters(resumed) if base is BudgetGRPOTrainer else dict(resumed.model.named_parameters())
    loaded = dict(tiny_model().named_parameters())
    for name, p in resumed.ref_model.named_parameters():
        share = SYNC["ref_model_mixup_alpha"]
        expected = loaded[name].detach().mul(1.0 - share).add_(ends[name].detach(), alpha=share)
        assert torch.equal(p.detach(), expected.to(p.dtype)), name


def test_resume_equals_an_uninterrupted_run(tmp_path: Path) -> None:
    whole = make_trainer(BudgetGRPOTrainer, tmp_path, model=tiny_model(), **CHECKPOINTS)
    whole.train()
    resumed = make_trainer(BudgetGRPOTrainer, tmp_path, model=tiny_model(seed=1), **CHECKPOINTS)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for name, master in masters(whole).items():
        assert torch.equal(masters(resumed)[name], master), name
        p, q = whole.model.get_parameter(name), resumed.model.get_parameter(name)
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(whole._host_adamw.state[p][key], resumed._host_adamw.state[q][key]), (name, key)


def with_own_create_optimizer(base: type) -> type:
    class Mine(base):
        def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
            return super().create_optimizer(model)

    return Mine


@pytest.mark.parametrize("trainer_class", [BudgetGRPOTrainer, with_own_create_optimizer(BudgetGRPOTrainer)])
def test_weights_resumed_without_optimizer_state_are_trained_on(tmp_path: Path, trainer_class: type) -> None:
    settings = {**CHECKPOINTS, "save_only_model": True}
    first = make_trainer(trainer_class, tmp_path, model=tiny_model(), **settings)
    first.train()
    saved = {n: p.detach().clone() for n, p in first.model.named_parameters()}
    resumed = make_trainer(trainer_class, tmp_path, model=tiny_model(seed=1), **{**settings, "max_steps": 5})
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    for name, p in resumed.model.named_parameters():
        assert (p - saved[name]).abs().max() <= 10 * first.args.learning_rate, name  # one step away, not a model away


class AtTheStart(TrainerCallback):
    """Keeps the optimizer's state as it is when the first resumed step begins."""

    def __init__(self) -> None:
        self.state: dict[int, dict[str, torch.Tensor]] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        entries = kwargs["optimizer"].optimizer.state
        ordered = [p for group in kwargs["optimizer"].param_groups for p in group["params"]]
        self.state = {i: {k: v.clone() for k, v in entries[p].items()} for i, p in enumerate(ordered)}


def test_an_fp32_checkpoint_of_stock_trl_gives_the_masters_all_their_bits(tmp_path: Path) -> None:
    make_trainer(GRPOTrainer, tmp_path, model=tiny_model(), **CHECKPOINTS).train()
    start = AtTheStart()
    kwargs = {"callbacks": [start]}
    ours = make_trainer(BudgetGRPOTrainer, tmp_path, model=tiny_model(seed=1), trainer_kwargs=kwargs, **CHECKPOINTS)
    ours.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    weights = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    saved = torch.load(tmp_path / "checkpoint-2" / "optimizer.pt", weights_only=True)["state"]
    names = {p: name for name, p in ours.model.named_parameters()}
    ordered = [names[p] for group in ours.optimizer.param_groups for p in group["params"]]
    for index, name in enumerate(ordered):
        assert torch.equal(start.state[index]["master_weights"], weights[name]), name
        assert torch.equal(start.state[index]["exp_avg"], saved[index]["exp_avg"]), name


def test_evaluating_first_and_training_twice(tmp_path: Path) -> None:
    kwargs = {"eval_dataset": digit_dataset(4)}
    trainer = make_trainer(BudgetGRPOTrainer, tmp_path, model=tiny_model(), max_steps=2, trainer_kwargs=kwargs)
    assert trainer.evaluate()["eval_loss"] is not None
    trainer.train()
    assert trainer.optimizer.optimizer is trainer._host_adamw, (
        "wrapped twice, Accelerate moves the state to the device"
    )
    after_first = masters(trainer)
    trainer.train()
    assert any(not torch.equal(master, after_first[name]) for name, master in masters(trainer).items())
    assert_compute_is_cast(trainer)


def test_saving_writes_the_bf16_policy(tmp_path: Path) -> None:
    trainer = make_trainer(BudgetGRPOTrainer, tmp_path, model=tiny_model(), max_steps=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    loaded = type(trainer.model).from_pretrained(tmp_path / "saved", dtype="auto")
    for (name, p), q in zip(trainer.model.named_parameters(), loaded.parameters(), strict=True):
        assert q.dtype == torch.bfloat16
        assert torch.equal(p.detach(), q.detach()), name


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"gradient_accumulation_steps": 2, "max_tokens_per_microbatch": 64},
        {"gradient_checkpointing": True},
        {"max_grad_norm": 1e-3},
    ],
    ids=["plain", "two micro-batches a step", "merged and split", "checkpointing", "clipping binds"],
)
def test_gradients_that_leave_during_backward_train_as_gradients_that_leave_at_its_end(
    tmp_path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_BUDGET_HOST_THREADS", "2")

    def trained(placement: str) -> Any:
        config = {"config_class": BudgetGRPOConfig, "gradient_placement": placement, **settings}
        trainer = make_trainer(BudgetGRPOTrainer, tmp_path, model=tiny_model(), **config)
        trainer.train()
        return trainer

    streamed, at_the_end = trained("auto"), trained("device")
    [row] = [row for row in streamed.resolved_settings if row.name == "gradient_placement"]
    assert row.value == "host"
    is_merged = "max_tokens_per_microbatch" in settings
    assert ("2 times a step" in row.reason) == (settings.get("gradient_accumulation_steps") == 2 and not is_merged)
    [row] = [row for row in streamed.resolved_settings if row.name == "optimizer"]
    assert re.search(r"on \d+ cores? of the CPU", row.reason)
    assert comparable_log(streamed) == comparable_log(at_the_end)
    for name, master in masters(at_the_end).items():
        assert torch.equal(masters(streamed)[name], master), name


# Gradients that user code touches

PLACEMENTS = pytest.mark.parametrize("placement", ["device", "host"])
ONE_STEP = {"max_steps": 1, "weight_decay": 0.0}
MASKED = "model.layers.0.mlp.up_proj.weight"


def trained_with(tmp_path: Path, callback: TrainerCallback, placement: str, **settings: Any) -> Any:
    config = {"config_class": BudgetGRPOConfig, "gradient_placement": placement, **ONE_STEP, **settings}
    kwargs = {"callbacks": [callback]}
    trainer = make_trainer(BudgetGRPOTrainer, tmp_path, model=tiny_model(), trainer_kwargs=kwargs, **config)
    callback.trainer = trainer
    trainer.train()
    return trainer


class Mask(TrainerCallback):
    """Trains the lower half of a matrix only."""

    trainer: Any = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with self.trainer.editable_gradients():
            kwargs["model"].get_parameter(MASKED).grad[:64] = 0


@PLACEMENTS
@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0], ids=["clipped", "not clipped"])
def test_gradients_masked_before_the_step_are_not_stepped(
    tmp_path: Path, placement: str, max_grad_norm: float
) -> None:
    trainer = trained_with(tmp_path, Mask(), placement, max_grad_norm=max_grad_norm)
    plain = trained_with(tmp_path, TrainerCallback(), placement, max_grad_norm=max_grad_norm)
    original = tiny_model().get_parameter(MASKED).detach()
    for name, master in masters(plain).items():
        expected = torch.cat([original[:64], master[64:]]) if name == MASKED else master
        assert torch.equal(masters(trainer)[name], expected), name
    assert not torch.equal(masters(plain)[MASKED][:64], original[:64])


class DropTheStep(TrainerCallback):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["model"].zero_grad()


@PLACEMENTS
def test_model_zero_grad_before_the_step_leaves_nothing_to_step(tmp_path: Path, placement: str) -> None:
    trainer = trained_with(tmp_path, DropTheStep(), placement, max_steps=2)
    original = dict(tiny_model().named_parameters())
    assert all(torch.equal(master, original[name].detach()) for name, master in masters(trainer).items())
    assert {entry["step"].item() for entry in trainer._host_adamw.state.values()} == {0.0}


class DropTheFirstMicroBatch(TrainerCallback):
    """Also keeps what each backward made, and what is stepped."""

    trainer: Any = None

    def __init__(self, set_to_none: bool = True) -> None:
        self._set_to_none = set_to_none
        self.made: dict[str, list[torch.Tensor]] = {}
        self.stepped: dict[str, torch.Tensor] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for name, p in kwargs["model"].named_parameters():
            self.made[name] = []
            p.register_hook(lambda gradient, kept=self.made[name]: kept.append(gradient.clone()))

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["model"].zero_grad(set_to_none=self._set_to_none)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.stepped = {n: self.trainer._host_adamw.gradient(p).clone() for n, p in kwargs["model"].named_parameters()}


@PLACEMENTS
@pytest.mark.parametrize("set_to_none", [True, False])
def test_model_zero_grad_after_a_micro_batch_drops_its_gradients(
    tmp_path: Path, placement: str, set_to_none: bool
) -> None:
    callback = DropTheFirstMicroBatch(set_to_none)
    settings = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.0, "max_tokens_per_microbatch": None}
    settings["padding_free"] = "stock"
    trained_with(tmp_path, callback, placement, **settings)
    assert callback.made.keys() == callback.stepped.keys()
    for name, (first, second) in callback.made.items():
        assert torch.equal(callback.stepped[name], second.float()), name
        assert first.any()


def test_callbacks_that_may_want_gradients_are_told_of_the_way_to_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained_with(tmp_path, Mask(), "auto")
    [message] = [message for message in caplog.messages if "parameter.grad" in message]
    assert "Mask.on_pre_optimizer_step" in message and "trainer.editable_gradients()" in message
    caplog.clear()
    trained_with(tmp_path, AtTheStart(), "auto")
    assert not [message for message in caplog.messages if "parameter.grad" in message]


def test_the_policy_is_a_plain_module_again_when_its_trainer_is_gone(tmp_path: Path) -> None:
    trainer = make_trainer(BudgetGRPOTrainer, tmp_path, model=tiny_model())
    policy = trainer.model
    copied = copy.deepcopy(policy)
    assert "zero_grad" in vars(policy)
    del trainer
    gc.collect()
    assert "zero_grad" not in vars(policy)
    copied.zero_grad()


class Average(TrainerCallback):
    """Puts the mean of the trained and the initial weights in for every save and, unless it stays, takes it out."""

    def __init__(self, stays: bool = False) -> None:
        self._stays = stays
        self._initial: dict[str, torch.Tensor] = {}
        self._kept: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._initial = {name: p.detach().clone() for name, p in kwargs["model"].named_parameters()}

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            for name, p in kwargs["model"].named_parameters():
                self._kept[name] = p.detach().clone()
                p.copy_((p.float() + self._initial[name].float()) / 2)

    @torch.no_grad()
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for name, p in kwargs["model"].named_parameters():
            if not self._stays and name in self._kept:
                p.copy_(self._kept[name])


def saved_with(tmp_path: Path, *callbacks: TrainerCallback) -> Any:
    settings = {**CHECKPOINTS, "max_steps": 3, "learning_rate": 1e-5, "trainer_kwargs": {"callbacks": [*callbacks]}}
    trainer = make_trainer(BudgetGRPOTrainer, tmp_path, model=tiny_model(), **settings)
    trainer.train()
    return trainer


def test_an_average_swapped_in_for_a_save_costs_the_masters_no_bit(tmp_path: Path) -> None:
    swapped, plain = saved_with(tmp_path / "swapped", Average()), saved_with(tmp_path / "plain")
    for name, master in masters(plain).items():
        assert torch.equal(masters(swapped)[name], master), name
    weights = load_file(tmp_path / "swapped" / "checkpoint-2" / "model.safetensors")
    others = load_file(tmp_path / "plain" / "checkpoint-2" / "model.safetensors")
    assert any(not torch.equal(value, others[name]) for name, value in weights.items())
    names = {p: name for name, p in swapped.model.named_parameters()}
    ordered = [names[p] for group in swapped.optimizer.param_groups for p in group["params"]]
    state = torch.load(tmp_path / "swapped" / "checkpoint-2" / "optimizer.pt", weights_only=True)["state"]
    for index, name in enumerate(ordered):
        assert torch.equal(state[index]["master_weights"].to(torch.bfloat16), weights[name]), name


def test_an_average_that_stays_after_a_save_is_trained_on(tmp_path: Path) -> None:
    stayed, plain = saved_with(tmp_path / "stayed", Average(stays=True)), saved_with(tmp_path / "plain")
    assert_compute_is_cast(stayed)
    assert any(not torch.equal(masters(stayed)[name], master) for name, master in masters(plain).items())
    resumed = make_trainer(
        BudgetGRPOTrainer,
        tmp_path,
        model=tiny_model(seed=1),
        **{**CHECKPOINTS, "max_steps": 3, "learning_rate": 1e-5},
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "stayed" / "checkpoint-2"))
    assert all(torch.equal(masters(stayed)[name], master) for name, master in masters(resumed).items())

"""A bf16 policy on the CPU: compute weights are the masters' cast, and the masters are torch's AdamW in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compat_pairs import assert_compute_is_cast_of_masters, budget_trainer, masters_of
from tiny import make_trainer, max_difference, tiny_model, weights
from transformers import TrainerCallback
from trl import GRPOTrainer

SETTINGS = {"gradient_accumulation_steps": 3, "max_steps": 5, "max_grad_norm": 0.5, "weight_decay": 0.1}
TIED = "lm_head.weight"


class Watch(TrainerCallback):
    """Calls back once per optimizer step, before and after it, with the trainer."""

    trainer: Any = None

    def __init__(self, before: Any = None, after: Any = None) -> None:
        self._before, self._after = before, after

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._before is not None:
            self._before(self.trainer)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._after is not None:
            self._after(self.trainer)


def watched(tmp_path: Path, watch: Watch, **settings: Any) -> Any:
    trainer = budget_trainer(
        tmp_path, model=tiny_model(torch.bfloat16), trainer_kwargs={"callbacks": [watch]}, **{**SETTINGS, **settings}
    )
    watch.trainer = trainer
    return trainer


def fp32_reference(initial: dict[str, torch.Tensor], trainer: Any, optim: str) -> tuple[Any, dict[str, Any]]:
    """torch's AdamW on fp32 clones, in stock's groups."""
    clones = {name: torch.nn.Parameter(value.float()) for name, value in initial.items() if name != TIED}
    decayed = set(trainer.get_decay_parameter_names(trainer.model))
    groups = [
        {"params": [p for name, p in clones.items() if (name in decayed) == has_decay], "weight_decay": decay}
        for has_decay, decay in ((True, SETTINGS["weight_decay"]), (False, 0.0))
    ]
    kind = {"fused": True} if optim == "adamw_torch_fused" else {"foreach": True}
    return torch.optim.AdamW(groups, lr=trainer.args.learning_rate, **kind), clones


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch"])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_masters_are_torch_adamw_over_the_fp32_gradients(tmp_path: Path, optim: str, schedule: str) -> None:
    steps: list[tuple[dict[str, torch.Tensor], float]] = []

    def record(trainer: Any) -> None:
        gradients = {n: trainer._host_adamw.gradient(p).clone() for n, p in trainer.model.named_parameters()}
        steps.append((gradients, trainer.lr_scheduler.get_last_lr()[0]))

    trainer = watched(tmp_path, Watch(before=record), optim=optim, lr_scheduler_type=schedule)
    reference, clones = fp32_reference(weights(trainer), trainer, optim)
    trainer.train()
    assert len(steps) == 5 and len({rate for _, rate in steps}) == 5
    for gradients, rate in steps:
        for group in reference.param_groups:
            group["lr"] = rate
        for name, clone in clones.items():
            assert gradients[name].dtype == torch.float32
            clone.grad = gradients[name]
        reference.step()
    assert max_difference(masters_of(trainer), {name: clone.detach() for name, clone in clones.items()}) == 0.0
    assert_compute_is_cast_of_masters(trainer)


def test_the_gradients_stepped_are_clipped_to_the_bound(tmp_path: Path) -> None:
    norms: list[float] = []

    def measure(trainer: Any) -> None:
        gradients = [trainer._host_adamw.gradient(p) for p in trainer.model.parameters()]
        norms.append(torch.nn.utils.get_total_norm(gradients).item())

    trainer = watched(tmp_path, Watch(before=measure))
    trainer.train()
    logged = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert min(logged) > SETTINGS["max_grad_norm"], "clipping has to bind"
    assert norms == pytest.approx([SETTINGS["max_grad_norm"]] * 5, rel=1e-5)


def test_compute_weights_are_the_cast_of_the_masters_after_every_step(tmp_path: Path) -> None:
    steps: list[int] = []

    def compare(trainer: Any) -> None:
        assert_compute_is_cast_of_masters(trainer)
        steps.append(trainer.state.global_step)

    trainer = watched(tmp_path, Watch(after=compare), max_steps=2)
    trainer.train()
    assert steps == [0, 1]


def test_masters_keep_updates_that_bf16_weights_would_lose(tmp_path: Path) -> None:
    settings = {**SETTINGS, "learning_rate": 1e-6, "weight_decay": 0.0}
    model = tiny_model(torch.bfloat16)
    stock = make_trainer(GRPOTrainer, tmp_path / "stock", model=model, **settings)
    stock.train()
    ours = budget_trainer(tmp_path / "ours", model=model, **settings)
    initial = weights(ours)
    ours.train()
    assert {p.dtype for p in ours.model.parameters()} == {torch.bfloat16}
    large = "model.layers.0.self_attn.q_norm.weight"
    assert torch.equal(weights(stock)[large], initial[large]), "1e-6 is below bf16's resolution at 1"
    assert not torch.equal(masters_of(ours)[large], initial[large].float())


def test_weights_differ_from_stock_adam_in_pure_bf16(tmp_path: Path) -> None:
    model = tiny_model(torch.bfloat16)
    stock = make_trainer(GRPOTrainer, tmp_path / "stock", model=model, **SETTINGS)
    stock.train()
    ours = budget_trainer(tmp_path / "ours", model=model, **SETTINGS)
    ours.train()
    difference = max_difference(weights(ours), weights(stock))
    assert 0.0 < difference < 2 * 5 * ours.args.learning_rate + 2**-8


def test_micro_batches_are_summed_in_fp32(tmp_path: Path) -> None:
    """What torch's leaf hooks see of each backward, bf16, summed in fp32 in order, is the gradient stepped."""
    seen: dict[str, list[torch.Tensor]] = {}
    differences: list[float] = []

    def compare(trainer: Any) -> None:
        for name, p in trainer.model.named_parameters():
            expected = seen[name].pop(0).float()
            while seen[name]:
                expected += seen[name].pop(0).float()
            differences.append((trainer._host_adamw.gradient(p) - expected).abs().max().item())

    trainer = watched(tmp_path, Watch(before=compare), max_steps=2, max_grad_norm=0.0)
    for name, p in trainer.model.named_parameters():
        seen[name] = []
        p.register_hook(lambda gradient, kept=seen[name]: kept.append(gradient.clone()))
    trainer.train()
    assert differences and max(differences) == 0.0

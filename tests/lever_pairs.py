"""Trainers with the long-context levers beside stock's, and the gradients of every step of both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tiny import make_trainer, tiny_model
from torch import Tensor
from trl import GRPOTrainer

from trl_budget import BudgetGRPOConfig, BudgetGRPOTrainer

Gradients = dict[str, Tensor]
SHAPE = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
ALL: dict[str, Any] = {"activation_offload": "on", "tiled_mlp": 7, "attention_head_groups": 2}
OFFLOAD: dict[str, Any] = {"activation_offload": "on", "tiled_mlp": "off", "attention_head_groups": "off"}
OFF = {"activation_offload": "off", "tiled_mlp": "off", "attention_head_groups": "off"}
LEVERS = {"all levers": ALL, "offload alone": OFFLOAD}
PACKED = {"padding_free": "on", "max_tokens_per_microbatch": 50}
BASE = {"gradient_checkpointing": True, "max_completion_length": 10, "max_steps": 1, "learning_rate": 1e-6}


def prompts(rows: int = 64) -> Dataset:
    """Prompts of several lengths, so that rows are padded."""
    return Dataset.from_list([{"prompt": "x" * (i * 3 % 7) + "7? ", "digit": "7"} for i in range(rows)])


def lora(**settings: Any) -> LoraConfig:
    """Adapters whose second factor is not zero."""
    return LoraConfig(**{"r": 4, "target_modules": "all-linear", "init_lora_weights": False, **settings})


def watched(trainer_class: type, steps: list[Gradients]) -> type:
    """A subclass that leaves the gradients of every step, before they are clipped, in `steps`."""

    class Watched(trainer_class):  # type: ignore[misc]
        def _clip_grad_norm(self, model: Any) -> Any:
            host = getattr(self, "_host_adamw", None)
            found = {}
            for name, parameter in self.model.named_parameters():
                gradient = parameter.grad if host is None or not parameter.requires_grad else host.gradient(parameter)
                if gradient is not None:
                    found[name] = gradient.detach().clone()
            steps.append(found)
            return super()._clip_grad_norm(model)

    return Watched


def build(trainer_class: type, folder: Path, model: Any = None, kwargs: Any = dict, **settings: Any) -> Any:
    """A trainer; `kwargs()` gives further arguments of it."""
    if issubclass(trainer_class, BudgetGRPOTrainer):
        settings["config_class"] = BudgetGRPOConfig
    model = tiny_model(**SHAPE) if model is None else model
    given = {"train_dataset": prompts(), **kwargs()}
    return make_trainer(trainer_class, folder, model, trainer_kwargs=given, **{**BASE, **settings})


def run(
    trainer_class: type, folder: Path, *, change: Callable[[Any], object] = lambda trainer: None, **settings: Any
) -> tuple[Any, list[Gradients]]:
    """A trainer that has trained, and its gradients; `change` is called between construction and training."""
    steps: list[Gradients] = []
    trainer = build(watched(trainer_class, steps), folder, **settings)
    change(trainer)
    trainer.train()
    assert steps and steps[0]
    return trainer, steps


def difference(ours: Gradients, expected: Gradients) -> float:
    """Norm of the difference over the norm, of all gradients together."""
    assert ours.keys() == expected.keys()
    norm = torch.stack([value.double().norm() for value in expected.values()]).norm()
    assert norm > 0
    return float(torch.stack([(ours[n].double() - expected[n].double()).norm() for n in expected]).norm() / norm)


def assert_same_steps(ours: list[Gradients], expected: list[Gradients], levers: dict[str, Any]) -> None:
    """0.0 for offload alone; else 1e-6 in the first step, and in later ones what weights that differ a little make."""
    differences = [difference(mine, its) for mine, its in zip(ours, expected, strict=True)]
    assert differences[0] <= (0.0 if levers == OFFLOAD else 1e-6)
    assert max(differences) <= (0.0 if levers == OFFLOAD else 1e-4)


def assert_nothing_kept(trainer: Any) -> None:
    """No activation waits in host memory or on the device."""
    store = trainer._layer_passes._store
    assert store.used_bytes == store.device_bytes == 0


def assert_trains_as_stock(
    tmp_path: Path,
    levers: dict[str, Any],
    *,
    make: Callable[[type], type] = lambda base: base,
    ours_only: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[Any, Any]:
    """Stock and ours with `levers`; `make(base)` builds a user's subclass of either, `ours_only` are our fields."""
    stock, expected = run(make(GRPOTrainer), tmp_path / "stock", **settings)
    ours, found = run(make(BudgetGRPOTrainer), tmp_path / "ours", **levers, **(ours_only or {}), **settings)
    assert_same_steps(found, expected, levers)
    assert_nothing_kept(ours)
    return stock, ours

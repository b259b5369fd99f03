"""What each rank runs in the tests of the whole trainer over several ranks."""

from __future__ import annotations

import dataclasses
import gc
import os
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from tiny import comparable_log, make_trainer, save_tiny_model, tiny_model, weights
from torch import Tensor, nn
from transformers import TrainerCallback
from trl import GRPOTrainer

from trl_budget import BudgetGRPOConfig, BudgetGRPOTrainer, SettingsError, upstream

CASES: dict[str, dict[str, Any]] = {
    "the defaults": {},
    "gradient accumulation": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.01},
    "two iterations, clipping off": {"num_iterations": 2, "max_grad_norm": 0.0, "loss_type": "grpo"},
}


class KeepWeights(TrainerCallback):
    """The policy's weights after every optimizer step."""

    def __init__(self) -> None:
        self.history: list[dict[str, Tensor]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        policy = kwargs["model"]
        self.history.append({name: value.detach().clone() for name, value in policy.state_dict().items()})


def rank() -> int:
    return int(os.environ["RANK"])


def model_of_this_rank(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Other weights on every rank, a frozen layer and a buffer that differ as well."""
    model = tiny_model(dtype, seed=rank())
    model.model.layers[0].mlp.down_proj.weight.requires_grad_(False)
    model.register_buffer("of_this_rank", torch.full((3,), float(rank())))
    return model


def run(trainer_class: type, folder: Path, resume: str | None = None, **settings: Any) -> dict[str, Any]:
    keep = KeepWeights()
    trainer = make_trainer(
        trainer_class,
        folder,
        model=settings.pop("model", None) or model_of_this_rank(),
        trainer_kwargs={"callbacks": [keep]},
        **settings,
    )
    before = weights(trainer)
    trainer.train(resume_from_checkpoint=resume)
    result = {
        "log": comparable_log(trainer),
        "before": before,
        "history": keep.history,
        "wrapped": type(trainer.model_wrapped).__name__,
        "weights": weights(trainer),
    }
    if isinstance(trainer, BudgetGRPOTrainer) and trainer._host_adamw is not None:
        names = {p: name for name, p in trainer.model.named_parameters()}
        state = trainer._host_adamw.state
        result["state"] = {names[p]: {k: v.clone() for k, v in entry.items()} for p, entry in state.items()}
        result["settings"] = {s.name: s.value for s in trainer.resolved_settings}
    return result


def pairs(folder: Path) -> dict[str, Any]:
    """Stock under DDP and ours, case by case; ours in every sharding for the defaults."""
    results: dict[str, Any] = {}
    for name, settings in CASES.items():
        results["stock", name] = run(GRPOTrainer, folder / "stock", **settings)
        results["ours", name] = run(BudgetGRPOTrainer, folder / "ours", **settings)
    for sharding in ("replicated", "rank0"):
        results["ours", sharding] = run(
            BudgetGRPOTrainer, folder, config_class=BudgetGRPOConfig, optimizer_sharding=sharding
        )
    results["refusal"] = adapters(folder)
    return results


def adapters(folder: Path) -> tuple[str, str]:
    """The class that wraps adapters under `auto`, and what `host` says."""
    lora = {"peft_config": LoraConfig(r=2, target_modules=["q_proj"])}
    settings = {"model": tiny_model(), "max_steps": 1, "trainer_kwargs": lora}
    trainer = make_trainer(BudgetGRPOTrainer, folder, **settings)
    trainer.train()
    try:
        make_trainer(BudgetGRPOTrainer, folder, config_class=BudgetGRPOConfig, optimizer_placement="host", **settings)
    except SettingsError as error:
        return type(trainer.model_wrapped).__name__, str(error)
    raise AssertionError("optimizer_placement='host' was served")


def with_facts_of_a_gpu(folder: Path) -> dict[str, Any]:
    """The bf16 policy that CUDA gets: trained whole, and resumed on other weights from the save after step 2."""
    collect = upstream.placement_facts
    upstream.placement_facts = lambda *args, **kwargs: dataclasses.replace(
        collect(*args, **kwargs), device_type="cuda", bf16=True
    )
    saves = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "lr_scheduler_type": "cosine"}
    original = {name: p.detach().clone() for name, p in model_of_this_rank().named_parameters()}
    whole = run(BudgetGRPOTrainer, folder / "whole", **saves)
    checkpoint = str(folder / "whole" / "checkpoint-2")
    resumed = run(BudgetGRPOTrainer, folder / "resumed", resume=checkpoint, **saves)
    sync = {"beta": 0.05, "sync_ref_model": True, "ref_model_mixup_alpha": 0.01, "ref_model_sync_steps": 1}
    name = str(folder / "model")
    if rank() == 0:
        save_tiny_model(folder / "model")
    torch.distributed.barrier()
    following = make_trainer(BudgetGRPOTrainer, folder, model=name, max_steps=3, **sync)
    following.train()
    reference = {name: p.detach().clone() for name, p in following.ref_model.named_parameters()}
    del following
    gc.collect()
    start = make_trainer(BudgetGRPOTrainer, folder, model=model_of_this_rank())
    state = start._host_adamw.state
    masters = {n: state[p]["master_weights"].clone() for n, p in start.model.named_parameters() if p in state}
    return {
        "original": original,
        "masters": masters,
        "start": weights(start),
        "whole": whole,
        "resumed": resumed,
        "reference": reference,
        "files": sorted(path.name for path in Path(checkpoint).iterdir()),
    }

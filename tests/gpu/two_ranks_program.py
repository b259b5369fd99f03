"""What each of two ranks on one card runs: the whole trainer, three steps, without vLLM."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from tiny import byte_tokenizer, comparable_log, make_trainer, tiny_model, weights
from torch import nn
from transformers import TrainerCallback

from trl_budget import BudgetGRPOConfig, BudgetGRPOTrainer

SETTINGS = {
    "use_cpu": False,
    "bf16": True,
    "ddp_backend": "gloo",
    "ddp_timeout": 120,
    "max_steps": 3,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.5,
}


def supplied_rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Completions that differ by rank and in length, the same in every run."""
    rank, step = trainer.accelerator.process_index, trainer.state.global_step
    completions = [
        [2 + (row * 31 + step * 7 + rank * 57 + i * 13) % 250 for i in range(3 + (row + rank) % 4)]
        for row in range(len(prompts))
    ]
    return {"prompt_ids": byte_tokenizer()(prompts)["input_ids"], "completion_ids": completions, "logprobs": None}


class CompareWithMasters(TrainerCallback):
    """Weights after every step, and max|compute - master.to(dtype)|."""

    def __init__(self) -> None:
        self.history: list[dict[str, torch.Tensor]] = []
        self.differences: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        optimizer, policy = kwargs["optimizer"].optimizer, kwargs["model"]
        pairs = [(p.detach().cpu(), entry["master_weights"]) for p, entry in optimizer.state.items()]
        self.differences.append(max((p.float() - m.to(p.dtype).float()).abs().max().item() for p, m in pairs))
        self.history.append({name: value.detach().cpu().clone() for name, value in policy.state_dict().items()})


def big_model(rank: int) -> nn.Module:
    return tiny_model(seed=rank, hidden_size=512, intermediate_size=2048, num_hidden_layers=4)


def masters_of(trainer: Any) -> dict[str, torch.Tensor]:
    state = trainer._host_adamw.state
    return {name: state[p]["master_weights"].clone() for name, p in trainer.model.named_parameters()}


def train(folder: Path, sharding: str) -> dict[str, Any]:
    compare = CompareWithMasters()
    trainer = make_trainer(
        BudgetGRPOTrainer,
        folder,
        model=big_model(int(os.environ["RANK"])),
        config_class=BudgetGRPOConfig,
        trainer_kwargs={"callbacks": [compare], "rollout_func": supplied_rollouts},
        optimizer_sharding=sharding,
        **SETTINGS,
    )
    before = weights(trainer)
    masters_start = {
        n: trainer._host_adamw.state[p]["master_weights"].clone() for n, p in trainer.model.named_parameters()
    }
    trainer.train()
    adamw = trainer._host_adamw
    return {
        "before": {name: value.cpu() for name, value in before.items()},
        "masters_start": masters_start,
        "masters": masters_of(trainer),
        "history": compare.history,
        "differences": compare.differences,
        "log": comparable_log(trainer),
        "wrapped": type(trainer.model_wrapped).__name__,
        "backend": torch.distributed.get_backend(),
        "devices": sorted({str(p.device) for p in trainer.model.parameters()}),
        "owned_bytes": adamw.owned_bytes,
        "num_elements": sum(p.numel() for p in trainer.model.parameters()),
    }


def train_all(folder: Path) -> dict[str, dict[str, Any]]:
    return {sharding: train(folder, sharding) for sharding in ("sharded", "rank0", "replicated")}

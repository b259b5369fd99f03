"""What each of two ranks on one card runs: the whole trainer, three steps, without vLLM."""

from __future__ import annotations

import gc
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


class AtTheStart(TrainerCallback):
    """The optimizer's state when the first resumed step begins, and the peak on the card until then."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        optimizer = kwargs["optimizer"].optimizer
        entries = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
        self.state = [{key: value.clone() for key, value in entry.items()} for entry in entries]
        self.peak_bytes = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def resume(folder: Path) -> dict[str, Any]:
    """Saves after step 1 and resumes on other weights."""
    rank = int(os.environ["RANK"])
    settings = {**SETTINGS, "max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    kwargs = {"rollout_func": supplied_rollouts}
    make_trainer(BudgetGRPOTrainer, folder, model=big_model(rank), trainer_kwargs=kwargs, **settings).train()
    gc.collect()
    start = AtTheStart()
    kwargs["callbacks"] = [start]
    trainer = make_trainer(
        BudgetGRPOTrainer, folder, model=big_model(rank + 5), trainer_kwargs=kwargs, **{**settings, "max_steps": 2}
    )
    before_bytes = 0
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before_bytes = torch.cuda.memory_allocated()
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    saved = torch.load(folder / "checkpoint-1" / "optimizer.pt", weights_only=True)["state"]
    pairs = [(entry, saved[index]) for index, entry in enumerate(start.state)]
    return {
        "equal": all(torch.equal(e[key], value) for e, of in pairs for key, value in of.items()),
        "num_entries": (len(start.state), len(saved)),
        "devices": sorted({str(value.device) for entry in start.state for value in entry.values()}),
        "added_bytes": start.peak_bytes - before_bytes,
        "num_elements": sum(p.numel() for p in trainer.model.parameters()),
    }


def train_all(folder: Path) -> dict[str, dict[str, Any]]:
    trained = {sharding: train(folder, sharding) for sharding in ("sharded", "rank0", "replicated")}
    return {**trained, "resume": resume(folder / "resume")}

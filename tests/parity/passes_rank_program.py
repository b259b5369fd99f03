"""One rank of `test_passes_two_ranks.py`: python FILE OUT. Trains every case with stock TRL under DDP and with ours.

RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT come from the environment. Writes OUT/rank<r>.pt: by case and
trainer the gradient of every optimizer step, the log, the weights and the shapes of every forward; or the error.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import torch  # noqa: E402
from peft import LoraConfig  # noqa: E402
from test_reuse import OursVllm, StockVllm, with_log_probs  # noqa: E402
from test_token_budget import OursRecording, StockRecording  # noqa: E402
from tiny import byte_tokenizer, comparable_log, make_trainer, tiny_model, weights  # noqa: E402

from trl_budget import BudgetGRPOConfig, BudgetGRPOTrainer  # noqa: E402

WINDOW: dict[str, Any] = {
    "gradient_accumulation_steps": 4,
    "per_device_train_batch_size": 4,
    "max_completion_length": 24,
    "max_steps": 2,
    "ddp_backend": "gloo",
}
ADAPTIVE = {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 5.54, "max_steps": 5}
# what stock and ours share, what only ours gets, which rollouts
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "grpo, packed": ({"loss_type": "grpo"}, {"padding_free": "on", "max_tokens_per_microbatch": 90}, "uneven"),
    # No token is within 1e-5 of a threshold. Half would be: rows of one prompt tie, and rounding would choose.
    "top entropy quantile": (
        {"top_entropy_quantile": 0.365},
        {"padding_free": "on", "max_tokens_per_microbatch": 150},
        "uneven",
    ),
    "grpo, trimmed": ({"loss_type": "grpo"}, {"padding_free": "off", "max_tokens_per_microbatch": 90}, "uneven"),
    "grpo, padded": ({"loss_type": "grpo"}, {"padding_free": "stock", "max_tokens_per_microbatch": 90}, "uneven"),
    "dapo": ({"loss_type": "dapo"}, {"padding_free": "on", "max_tokens_per_microbatch": 90}, "uneven"),
    "cispo": ({"loss_type": "cispo"}, {"padding_free": "on", "max_tokens_per_microbatch": 90}, "uneven"),
    "vespo": ({"loss_type": "vespo"}, {"padding_free": "on", "max_tokens_per_microbatch": 90}, "uneven"),
    "bnpo with an entropy bonus": (
        {"loss_type": "bnpo", "entropy_coef": 0.02},
        {"padding_free": "on", "max_tokens_per_microbatch": 90},
        "uneven",
    ),
    "a rank of tiny rows": (
        {"loss_type": "bnpo", "entropy_coef": 0.02},
        {"padding_free": "on", "max_tokens_per_microbatch": 40},
        "tiny",
    ),
    "a rank of tiny rows, trimmed": (
        {"loss_type": "grpo"},
        {"padding_free": "off", "max_tokens_per_microbatch": 40},
        "tiny",
    ),
    "a pass for every row": ({"loss_type": "grpo"}, {"padding_free": "on", "max_tokens_per_microbatch": 1}, "uneven"),
    "one pass": ({"loss_type": "bnpo"}, {"padding_free": "on", "max_tokens_per_microbatch": 100_000}, "uneven"),
    "sequence level": (
        {"importance_sampling_level": "sequence"},
        {"padding_free": "on", "max_tokens_per_microbatch": 90},
        "uneven",
    ),
    "adaptive entropy": (ADAPTIVE, {"padding_free": "on", "max_tokens_per_microbatch": 60}, "uneven"),
    "two iterations": ({"num_iterations": 2}, {"padding_free": "on", "max_tokens_per_microbatch": 90}, "uneven"),
    "two generations per step": (
        {"steps_per_generation": 2},
        {"padding_free": "on", "max_tokens_per_microbatch": 60},
        "uneven",
    ),
    "all-masked rows": (
        {"mask_truncated_completions": True, "loss_type": "bnpo", "entropy_coef": 0.02},
        {"padding_free": "on", "max_tokens_per_microbatch": 60},
        "uneven",
    ),
    "reuse of old log-probs": (
        {"vllm_importance_sampling_clip_max": 1.02, "steps_per_generation": 2},
        {"padding_free": "on", "max_tokens_per_microbatch": 60, "reuse_old_logprobs": "require"},
        "sampled",
    ),
    "adapters": ({}, {"padding_free": "stock", "max_tokens_per_microbatch": 90}, "uneven"),
    "adapters, packed": ({}, {"padding_free": "on", "max_tokens_per_microbatch": 90}, "uneven"),
    "gradient checkpointing": (
        {"gradient_checkpointing": True},
        {"padding_free": "on", "max_tokens_per_microbatch": 90},
        "uneven",
    ),
}


def rollouts(kind: str, rank: int) -> Any:
    """Rank 0's rows are long, rank 1's half as long or, "tiny", of three tokens each; "sampled": with log-probs."""

    def rollout_func(prompts: list[str], trainer: Any) -> dict[str, Any]:
        step = trainer.state.global_step
        prompt_ids = [byte_tokenizer()(p)["input_ids"][: 2 if kind == "tiny" and rank else 7] for p in prompts]
        lengths = [1 + (row * 5 + step * 3 + rank * 2) % (19 - 9 * rank) for row in range(len(prompts))]
        if kind == "tiny" and rank:
            lengths = [1] * len(prompts)
        ids = [[2 + (r * 31 + step * 7 + i * 13 + rank * 5) % 250 for i in range(n)] for r, n in enumerate(lengths)]
        ids = [row + [1] * (r % 3 == 0) for r, row in enumerate(ids)]
        made = {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": None}
        return with_log_probs(made, trainer) if kind == "sampled" else made

    return rollout_func


def record_events(trainer: BudgetGRPOTrainer) -> list[str]:
    """A list that grows with every call of TRL's loss, whose metrics all ranks gather, and with every backward."""
    events: list[str] = []
    loss_of, run_backward = trainer.loss_of, trainer.accelerator.backward

    def recorded_loss(*args: Any) -> torch.Tensor:
        events.append("loss")
        return loss_of(*args)

    def recorded_backward(*args: Any, **kwargs: Any) -> None:
        events.append("backward")
        run_backward(*args, **kwargs)

    trainer.loss_of, trainer.accelerator.backward = recorded_loss, recorded_backward
    return events


def run(name: str, trainer_class: type, out: Path, rank: int, **more: Any) -> dict[str, Any]:
    settings, budget, kind = CASES[name]
    is_ours = issubclass(trainer_class, BudgetGRPOTrainer)
    kwargs: dict[str, Any] = {"rollout_func": rollouts(kind, rank)}
    if name.startswith("adapters"):
        kwargs["peft_config"] = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    ours = {"config_class": BudgetGRPOConfig, "optimizer_placement": "device", **budget} if is_ours else {}
    trainer = make_trainer(
        trainer_class, out, model=tiny_model(), trainer_kwargs=kwargs, **ours, **{**WINDOW, **settings, **more}
    )
    forwards: list[int] = []
    trainer.accelerator.unwrap_model(trainer.model).get_input_embeddings().register_forward_pre_hook(
        lambda _module, args: forwards.append(args[0].numel())
    )
    events = record_events(trainer) if is_ours else []
    trainer.train()
    return {
        "events": events,
        "gradients": trainer.gradients,
        "log": comparable_log(trainer),
        "weights": weights(trainer),
        "forwards": forwards,
        "world_entropy": trainer._last_world_entropy,
        "wrapper": type(trainer.model_wrapped).__name__,
    }


def main() -> None:
    out, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    results: dict[str, Any] = {}
    for name in sys.argv[2:] or CASES:
        print(name, flush=True)
        try:
            results[name] = {
                "stock": run(name, StockVllm if CASES[name][2] == "sampled" else StockRecording, out, rank),
                "ours": run(name, OursVllm if CASES[name][2] == "sampled" else OursRecording, out, rank),
            }
            if name.startswith("adapters"):
                results[name]["repadded"] = run(name, StockRecording, out, rank, pad_to_multiple_of=8)
        except Exception:
            # The ranks are no longer in step: the rest of the cases would hang.
            results[name] = {"error": traceback.format_exc()}
            break
    torch.save(results, out / f"rank{rank}.pt")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

"""The update phase with packed rows and a token budget against stock TRL's padded micro-batches.

    python benchmarks/packed_update.py --commit $(git rev-parse HEAD) --output benchmarks/results/packed_update.json

Three batches of supplied rollouts: workload W, equal lengths, and one row of 16,384 tokens among short ones. Stock and
the `device` modes train bf16 parameters with bf16 Adam state on the GPU, so that only the passes differ; `repadded`
is stock with 64 more columns of padding, whose distance from stock is the noise of other matrix shapes.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from trl import GRPOConfig, GRPOTrainer
from update_phase import PhaseTimes, StepClock, TimedSteps, machine
from workload import SuppliedRollouts, build_model, dataset, reward, tokenizer, training_settings

from trl_budget import BudgetGRPOConfig, BudgetGRPOTrainer, __version__

BUDGET = 24_576
ON_DEVICE = {"optimizer_placement": "device"}
MODES: dict[str, dict[str, Any]] = {
    "stock": {},
    "repadded": {},
    "packed_device": {**ON_DEVICE, "padding_free": "on", "max_tokens_per_microbatch": BUDGET},
    "packed_8192_device": {**ON_DEVICE, "padding_free": "on", "max_tokens_per_microbatch": 8192},
    "trimmed_device": {**ON_DEVICE, "padding_free": "off", "max_tokens_per_microbatch": BUDGET},
    "packed_host": {"padding_free": "on", "max_tokens_per_microbatch": BUDGET},
    "auto": {},
}
STEPS = {"w": 4, "equal": 3, "one_long": 2}
ONLY_W = ("repadded", "packed_8192_device", "trimmed_device", "auto")


class CountedForwards:
    """Columns times rows of every forward of the policy's backbone in training."""

    def __init__(self, model: Any) -> None:
        self.tokens: list[int] = []
        self._handle = model.model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            self.tokens.append(kwargs["input_ids"].numel())

    def remove(self) -> None:
        self._handle.remove()


def arguments(mode: str, folder: str, rows: int, steps: int) -> GRPOConfig:
    settings = {**training_settings(folder, rows, steps), **MODES[mode]}
    if mode == "repadded":
        settings["pad_to_multiple_of"] = 256
    return (GRPOConfig if mode in ("stock", "repadded") else BudgetGRPOConfig)(**settings)


def run_batch(mode: str, kind: str, model: Any, steps: int, scale: float) -> dict[str, Any]:
    """Trains `steps` steps on one kind of batch and returns the figures."""
    times = PhaseTimes()
    clock = StepClock(times)
    rollouts = SuppliedRollouts(scale, kind)
    base = GRPOTrainer if mode in ("stock", "repadded") else BudgetGRPOTrainer
    trainer_class = type(f"Timed{base.__name__}", (TimedSteps, base), {"times": times})
    forwards = CountedForwards(model)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_class(
            model=model,
            reward_funcs=reward,
            args=arguments(mode, folder, len(rollouts.lengths), steps),
            train_dataset=dataset(),
            processing_class=tokenizer(),
            callbacks=[clock],
            rollout_func=rollouts,
        )
        trial = len(forwards.tokens)
        trainer.train()
    forwards.remove()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    passes = forwards.tokens[trial : trial + (len(forwards.tokens) - trial) // steps]
    checkpointed = trainer.args.gradient_checkpointing
    result = {
        "settings": {s.name: s.value for s in vars(trainer).get("resolved_settings", [])},
        "real_tokens": rollouts.num_tokens,
        "tokens_run": sum(passes),
        "passes": len(passes),
        "gradient_checkpointing": checkpointed,
        "samples": times.steps,
        "peak_allocated_gib": [peak / 2**30 for peak in clock.peaks],
        "update_seconds": [round(_update(step), 4) for step in times.steps],
        "log": [
            {k: v for k, v in e.items() if k in ("loss", "grad_norm", "entropy", "clip_ratio/region_mean")}
            for e in logged
        ],
    }
    result["median_update_seconds"] = statistics.median(result["update_seconds"][1:])
    return result


def _update(step: dict[str, float]) -> float:
    return step["training_step"] - step["prepare_inputs"] + step["norm_and_clip"] + step["optimizer"]


def run_mode(mode: str, shape: str, kinds: list[str], scale: float) -> dict[str, Any]:
    """Every batch in one process; the second one starts from weights that have moved by a few steps of 1e-6."""
    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available()
    is_host = mode in ("packed_host", "auto")
    model = build_model(
        shape, torch.float32 if is_host else torch.bfloat16, "cuda" if on_gpu and not is_host else "cpu"
    )
    results = {}
    for kind in kinds:
        results[kind] = run_batch(mode, kind, model, STEPS[kind] if mode != "repadded" else 2, scale)
        gc.collect()
    return results


def report(results: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Results with ratios to stock and what they were measured on."""
    stock = results.get("stock", {})
    ratios = {
        mode: {
            kind: batch["median_update_seconds"] / stock[kind]["median_update_seconds"]
            for kind, batch in batches.items()
            if kind in stock
        }
        for mode, batches in results.items()
    }
    return {
        "device": machine(),
        "versions": {name: version(name) for name in ("torch", "trl", "transformers", "accelerate")},
        "trl_budget": __version__,
        "commit": args.commit,
        "date": time.strftime("%Y-%m-%d"),
        "shape": args.shape,
        "command": shlex.join(["python", *sys.argv]),
        "update_ratio_to_stock": ratios,
        "modes": results,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-4b")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on every length, for a small machine")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--batches", nargs="+", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/packed_update.json"))
    parser.add_argument("--worker", choices=list(MODES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        args.output.write_text(json.dumps(run_mode(args.worker, args.shape, args.batches, args.scale)))
        return
    results: dict[str, Any] = {}
    for mode in args.modes:
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            batches = [kind for kind in args.batches if kind == "w" or mode not in ONLY_W]
            flags = ["--shape", args.shape, "--scale", str(args.scale), "--batches", *batches]
            subprocess.run(
                [sys.executable, __file__, "--worker", mode, "--output", file.name, *flags],
                check=True,
                stdout=sys.stderr,
            )
            results[mode] = json.loads(Path(file.name).read_text())
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(report(results, args), indent=1) + "\n")
        for kind, batch in results[mode].items():
            print(
                f"{mode:18s} {kind:9s} tokens {batch['tokens_run']:8,d} ({batch['real_tokens']:,d} real)  passes "
                f"{batch['passes']:3d}  update {batch['median_update_seconds']:7.2f} s  peak "
                f"{max(batch['peak_allocated_gib']):6.2f} GiB  {batch['log'][0]}",
                flush=True,
            )


if __name__ == "__main__":
    main()

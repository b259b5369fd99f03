"""The update phase of workload W, stock TRL and ours, one process after the other on one machine.

    python benchmarks/update_phase.py --commit $(git rev-parse HEAD) --output benchmarks/results/update_phase.json

Rollouts are supplied, so a step is forward, backward and the optimizer. Micro-batches are stock's own: 2 rows, 16 of
them. Each mode runs in a process of its own; the first step warms up and, for stock, allocates the Adam state.
`--set field=value` sets a field of the config, for stock only where `GRPOConfig` has it. `--timeline FILE` records
when each part of the last step of `ours` ran, without the synchronisation of the phase times (`plot_overlap.py`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
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
from timeline import Timeline
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from workload import NUM_ROWS, SuppliedRollouts, build_model, dataset, reward, tokenizer, training_settings

from trl_budget import BudgetGRPOConfig, BudgetGRPOTrainer, HostAdamW, __version__

MODES = {
    "stock_fp32": "stock TRL, fp32 parameters under bf16 autocast, fp32 Adam state on the GPU",
    "stock_bf16": "stock TRL, bf16 parameters and bf16 Adam state on the GPU",
    "ours": "bf16 policy, fp32 masters and moments on the host, gradients leave while backward runs",
    "ours_device_gradients": "the same, gradients leave when their backward ends",
    "ours_pageable": "as ours, with pageable host memory and staging",
}


class PhaseTimes:
    """Seconds per phase of each step, every boundary synchronised with the GPU.

    Args:
        synchronize: False leaves the overlap of GPU and host alone; phases are then the host's only.
    """

    def __init__(self, synchronize: bool = True) -> None:
        self._synchronize = _synchronize if synchronize else lambda: None
        self.steps: list[dict[str, float]] = []
        self._open: dict[str, float] = {}

    def start_step(self) -> None:
        self.steps.append({})

    def begin(self, phase: str) -> None:
        self._synchronize()
        self._open[phase] = time.perf_counter()

    def end(self, phase: str) -> None:
        self._synchronize()
        seconds = time.perf_counter() - self._open.pop(phase)
        self.steps[-1][phase] = self.steps[-1].get(phase, 0.0) + seconds


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class TimedSteps:
    """Mixin over a GRPO trainer: times its own phases and changes none of them."""

    times: PhaseTimes

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.times.begin("training_step")
        loss = super().training_step(*args, **kwargs)
        self.times.end("training_step")
        return loss

    def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        self.times.begin("prepare_inputs")
        inputs = super()._prepare_inputs(*args, **kwargs)
        self.times.end("prepare_inputs")
        return inputs

    def _clip_grad_norm(self, model: Any) -> Any:
        self.times.begin("norm_and_clip")
        norm = super()._clip_grad_norm(model)
        norm = norm.item()  # stock's is a tensor on the GPU, read when the step is logged
        self.times.end("norm_and_clip")
        return torch.tensor(norm)


class StepClock(TrainerCallback):
    """Times `optimizer.step()` and reads the peak of every step."""

    def __init__(self, times: PhaseTimes) -> None:
        self.times = times
        self.peaks: list[int] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.times.start_step()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self.times.begin("step")

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.times.begin("optimizer")

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.times.end("optimizer")

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.times.end("step")
        self.peaks.append(torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0)


class PageableHostAdamW(HostAdamW):
    """HostAdamW over pageable memory, to measure what page-locking is worth."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, pin_memory=False)


def training_arguments(mode: str, output_dir: str, args: argparse.Namespace) -> GRPOConfig:
    config_class = BudgetGRPOConfig if mode.startswith("ours") else GRPOConfig
    chosen = {"gradient_placement": "device"} if mode == "ours_device_gradients" else {}
    chosen.update(pair.split("=", 1) for pair in args.set)
    known = {field.name for field in dataclasses.fields(config_class)}
    settings = training_settings(output_dir, NUM_ROWS, args.steps)
    return config_class(**settings | {name: _parsed(value) for name, value in chosen.items() if name in known})


def _parsed(text: str) -> Any:
    """A number, a boolean, or the text itself."""
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except json.JSONDecodeError:
        return text


def run_mode(mode: str, args: argparse.Namespace) -> dict[str, Any]:
    """Builds one trainer, trains `args.steps` steps and returns its figures."""
    torch.manual_seed(0)
    is_ours = mode.startswith("ours")
    cuda = torch.cuda.is_available()
    dtype = torch.bfloat16 if mode == "stock_bf16" else torch.float32
    # Ours starts from fp32 weights in host memory, as `from_pretrained` leaves them; stock's are on the GPU already.
    model = build_model(args.shape, dtype, "cpu" if is_ours or not cuda else "cuda")
    num_parameters = sum(p.numel() for p in model.parameters())
    timeline = Timeline(args.timeline, args.steps - 1) if args.timeline and mode == "ours" else None
    times = PhaseTimes(synchronize=timeline is None)
    clock = StepClock(times)
    rollouts = SuppliedRollouts(args.scale)
    base = BudgetGRPOTrainer if is_ours else GRPOTrainer
    trainer_class = type(f"Timed{base.__name__}", (TimedSteps, base), {"times": times})
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_class(
            model=model,
            reward_funcs=reward,
            args=training_arguments(mode, folder, args),
            train_dataset=dataset(),
            processing_class=tokenizer(),
            callbacks=[clock, *([timeline] if timeline else [])],
            rollout_func=rollouts,
            optimizers=(_pageable(mode, model), None),
        )
        construction_seconds = time.perf_counter() - started
        if mode == "ours_device_gradients":
            _time_gradient_copies(trainer, times)
        if timeline is not None:
            timeline.watch(trainer)
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    result = {
        "description": MODES[mode],
        "num_parameters": num_parameters,
        "construction_seconds": construction_seconds,
        "peak_allocated_gib": [peak / 2**30 for peak in clock.peaks],
        "loss": [entry["loss"] for entry in logged],
        "grad_norm": [entry["grad_norm"] for entry in logged],
        "samples": times.steps,
        "host_gib": trainer._host_adamw.host_bytes / 2**30 if is_ours else 0.0,
    }
    return {**result, **summary(times.steps, clock.peaks)}


def _pageable(mode: str, model: Any) -> Any:
    if mode != "ours_pageable":
        return None
    masters = [(p, p.detach().float()) for p in model.parameters()]
    model.to(torch.bfloat16)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    optimizer = PageableHostAdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
    with torch.no_grad():
        for parameter, master in masters:
            optimizer.state[parameter]["master_weights"].copy_(master)
    return optimizer


def _time_gradient_copies(trainer: Any, times: PhaseTimes) -> None:
    collector = trainer._host_adamw._gradients.collector
    collect = collector.collect

    def timed(slots: Any) -> None:
        times.begin("gradient_copies")
        collect(slots)
        times.end("gradient_copies")

    collector.collect = timed


def summary(steps: list[dict[str, float]], peaks: list[int]) -> dict[str, float]:
    """Medians over the steps after the first."""
    measured = steps[1:]

    def median(*phases: str) -> float:
        return statistics.median(sum(step.get(phase, 0.0) for phase in phases) for step in measured)

    copies = median("gradient_copies")
    return {
        "forward_backward_seconds": median("training_step") - median("prepare_inputs") - copies,
        "gradient_copies_seconds": copies,
        "visible_optimizer_seconds": median("norm_and_clip", "optimizer"),
        "update_seconds": median("training_step", "norm_and_clip", "optimizer") - median("prepare_inputs"),
        "peak_allocated_gib_after_first_step": max(peaks[1:]) / 2**30,
    }


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    return {"gpu": gpu, "cpu_cores": len(os.sched_getaffinity(0)), "machine": platform.machine()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-4b")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on every length, for a small machine")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="a field of the config")
    parser.add_argument("--timeline", type=Path, help="JSON file for the intervals of the last step of `ours`")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/update_phase.json"))
    parser.add_argument("--worker", choices=list(MODES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        args.output.write_text(json.dumps(run_mode(args.worker, args)))
        return
    results: dict[str, Any] = {}
    for mode in args.modes:
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            flags = ["--shape", args.shape, "--steps", str(args.steps), "--scale", str(args.scale)]
            flags += [part for pair in args.set for part in ("--set", pair)]
            flags += ["--timeline", str(args.timeline)] if args.timeline else []
            command = [sys.executable, __file__, "--worker", mode, "--output", file.name, *flags]
            subprocess.run(command, check=True)
            results[mode] = json.loads(Path(file.name).read_text())
        _write(args, results)


def _write(args: argparse.Namespace, results: dict[str, Any]) -> None:
    """Writes after every mode, so that a run cut short keeps what it measured."""
    rollouts = SuppliedRollouts(args.scale)
    stock, ours = results.get("stock_bf16"), results.get("ours")
    keys = ("update_seconds", "visible_optimizer_seconds", "peak_allocated_gib_after_first_step")
    report = {
        "workload": {"shape": args.shape, "rows": NUM_ROWS, "real_tokens": rollouts.num_tokens, "rows_per_pass": 2},
        "device": machine(),
        "versions": {name: version(name) for name in ("torch", "trl", "transformers", "accelerate")},
        "trl_budget": __version__,
        "commit": args.commit,
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["python", *sys.argv]),
        "stock": {name: results[name] for name in results if name.startswith("stock")},
        "ours": {name: results[name] for name in results if name.startswith("ours")},
        "ratio": {key: ours[key] / stock[key] for key in keys if stock[key]} if stock and ours else {},
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(report, indent=1) + "\n")
    for name, result in results.items():
        print(
            f"{name:22s} forward+backward {result['forward_backward_seconds']:7.2f} s  gradient copies "
            f"{result['gradient_copies_seconds']:6.2f} s  optimizer {result['visible_optimizer_seconds']:6.2f} s  "
            f"peak {result['peak_allocated_gib_after_first_step']:6.2f} GiB  loss {result['loss']}"
        )


if __name__ == "__main__":
    main()

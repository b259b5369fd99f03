"""Peak memory and time of a training pass against the length of its row, stock TRL and ours, Qwen3-4B shape.

Rollouts are supplied: in every optimizer step two rows of one length, a pass each, shortest first. Every mode runs in
a process of its own, and its rows are merged into `--output` when it ends; a length that runs out of memory is
recorded and ends the mode. `--repeats` steps of each length: times are the last one's, the peak that of all. The slope
is that of the least-squares line through the peaks of 8,192 tokens and more.

    python benchmarks/context.py --modes stock_lora stock_full_bf16
    python benchmarks/context.py --modes ours_full_all --lengths 8192 32768 --set lm_head_chunk_size=8192
    python benchmarks/context.py --workload-w                           # workload W in passes of 24,576 tokens
    python benchmarks/context.py --modes ours_full_all --fit 16 24 48   # the longest row of each card, predicted
    python benchmarks/context.py --modes ours_full_all --fit 16 24 48 --budget card   # and 0.95 of it, run

`--budget SIZE` keeps the whole run within a device memory budget, stock's too. `--set field=value` sets a field of the
config, for stock only where `GRPOConfig` has it.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from context_figures import GIB, LengthClock, Row, is_out_of_memory, line_of, longest_row, shown
from context_modes import (
    MODES,
    WORKLOAD_W_TOKENS,
    RowsByLength,
    config_of,
    length_settings,
    lora_config,
    workload_w_settings,
)
from trl import GRPOTrainer
from update_phase import PhaseTimes, TimedSteps, machine
from workload import SuppliedRollouts, build_model, dataset, reward, tokenizer

from trl_budget import BudgetGRPOTrainer, __version__
from trl_budget.activation_memory import MemoryLevers, moments
from trl_budget.device_memory import DeviceMemoryBudget, parse_bytes
from trl_budget.upstream_model import model_shape

# What a card sold as 16, 24 or 48 GB leaves a run, in GiB: a display and the driver hold some.
CARDS = {16: 15.5, 24: 23.0, 48: 46.0}
FIT_SHARE = 0.95


@dataclass(frozen=True)
class Job:
    """What one process measures, as in the command line."""

    mode: str
    shape: str
    lengths: list[int]
    repeats: int
    chosen: list[str]
    budget: str | None = None
    workload_w: bool = False
    scale: float = 1.0

    def rollouts(self) -> Any:
        if self.workload_w:
            return SuppliedRollouts(self.scale)
        return RowsByLength(self.lengths, self.repeats)

    def config(self, output_dir: str, *, on_cpu: bool = False) -> Any:
        """The training arguments; those of CUDA make a context on the card in the process that builds them."""
        if self.workload_w:
            settings = workload_w_settings(output_dir, len(self.rollouts().lengths), self.repeats, self.scale)
        else:
            settings = length_settings(output_dir, self.lengths, self.repeats)
        settings["device_memory_budget"] = self.budget
        if on_cpu:
            settings |= {"use_cpu": True, "bf16": False}
        return config_of(MODES[self.mode], self.shape, settings, self.chosen)

    @property
    def longest_position(self) -> int:
        """Positions that the model's config must have."""
        return max(40_960, *self.lengths)


# One mode


def run_job(job: Job, keep: Any) -> dict[str, Any]:
    """Builds one trainer, trains all lengths, and returns its figures.

    Args:
        job: what to measure.
        keep: called with the figures so far after every step.
    """
    torch.manual_seed(0)
    figures: dict[str, Any] = {"description": MODES[job.mode].description, "device": machine(), "rows": []}
    times = PhaseTimes()
    labels = [WORKLOAD_W_TOKENS] if job.workload_w else sorted(job.lengths)

    def keep_rows(rows: list[Row]) -> None:
        figures["rows"] = rows
        keep(figures)

    clock = LengthClock(times, labels, job.repeats, keep_rows)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            trainer = build_trainer(job, folder, clock)
            figures["construction_seconds"] = time.perf_counter() - began
            figures["settings"] = {s.name: s.value for s in vars(trainer).get("resolved_settings", [])}
            if MODES[job.mode].is_ours:
                figures["predicted_bytes_per_token"] = predicted_bytes_per_token(trainer)
                reserve_host_memory(trainer, job)
            trainer.train()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            figures["rows"] = clock.rows_and_failure(str(error))
    return figures


def build_trainer(job: Job, output_dir: str, clock: LengthClock) -> Any:
    """A trainer of the mode over random weights of the shape."""
    mode, is_cuda = MODES[job.mode], torch.cuda.is_available()
    on_host = mode.is_ours and not mode.is_lora  # the fp32 weights that from_pretrained leaves
    dtype = torch.float32 if on_host else torch.bfloat16
    model = build_model(job.shape, dtype, "cpu" if on_host or not is_cuda else "cuda")
    model.config.max_position_embeddings = job.longest_position
    gc.collect()
    if is_cuda:
        torch.cuda.empty_cache()  # what made the weights; a budget counts what torch keeps
    if job.budget and is_cuda and not mode.is_ours:
        budget = DeviceMemoryBudget(parse_bytes(job.budget), torch.device("cuda"), unmapped_bytes=lambda: 0)
        budget.begin("update")
    base = BudgetGRPOTrainer if mode.is_ours else GRPOTrainer
    return type(f"Timed{base.__name__}", (TimedSteps, base), {"times": clock.times})(
        model=model,
        reward_funcs=reward,
        args=job.config(output_dir),
        train_dataset=dataset(),
        processing_class=tokenizer(),
        callbacks=[clock],
        rollout_func=job.rollouts(),
        peft_config=lora_config() if mode.is_lora else None,
    )


def predicted_bytes_per_token(trainer: Any) -> int:
    """What `activation_memory.py` says of the fullest moment of a very long row."""
    chosen = {setting.name: setting.value for setting in trainer.resolved_settings}
    tiles, groups = chosen["tiled_mlp"], chosen["attention_head_groups"]
    levers = MemoryLevers(
        chosen["activation_offload"] == "on",
        None if tiles == "off" else int(tiles),
        None if groups == "off" else int(groups),
    )
    return moments(model_shape(trainer), levers)[0].bytes_per_token


def reserve_host_memory(trainer: Any, job: Job) -> None:
    """Page-locks what the longest row's layer inputs need, 0.4 s a GiB, before anything is timed."""
    config = trainer.model.config
    longest = torch.empty(1, max(job.lengths), config.hidden_size, dtype=trainer.model.dtype, device="meta")
    trainer._layer_passes._store.begin_pass(config.num_hidden_layers, longest)


def run_alone(job: Job, limit: float) -> dict[str, Any]:
    """One job in a process of its own: its figures, and the end of its log where it failed."""
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder, "figures.json"), Path(folder, "log")
        command = [sys.executable, __file__, "--worker", json.dumps(dataclasses.asdict(job)), "--output", str(out)]
        with log.open("wb") as file:
            process, is_late = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT), False
            try:
                process.wait(limit)
            except subprocess.TimeoutExpired:
                is_late = True
                process.kill()
                process.wait()
        figures = json.loads(out.read_text()) if out.exists() else {"rows": []}
        if process.returncode != 0:
            why = f"took longer than {limit:g} s" if is_late else f"exit {process.returncode}"
            figures["error"] = f"{why}\n{log.read_text(errors='replace')[-3000:]}"
        return figures | line_of(figures["rows"])


def work(job: Job, out: Path) -> None:
    """Measures and writes the figures whenever a step has ended, so that a run cut short keeps its rows."""

    def keep(figures: dict[str, Any]) -> None:
        unfinished = out.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(figures))
        unfinished.rename(out)

    keep(run_job(job, keep))


# Files


def key_of(job: Job, card: int | None = None, label: str | None = None) -> str:
    """Under which name a mode's figures stand in the file: with all that makes it another measurement."""
    parts = [*(["w"] if job.workload_w else []), job.mode, *job.chosen, *([label] if label else [])]
    if card is not None:
        parts.append(f"card={card}")
    elif job.budget is not None:
        parts.append(f"budget={job.budget}")
    return "/".join(parts)


def write(args: argparse.Namespace, key: str, figures: dict[str, Any]) -> None:
    """Adds one mode's figures to the file; those of other modes stay, and a failure replaces no figures."""
    found = json.loads(args.output.read_text()) if args.output.exists() else {"modes": {}}
    if "error" in figures and found["modes"].get(key, {}).get("rows"):
        key += "/failed"
    figures = figures | {"command": shlex.join(["python", *sys.argv]), "commit": args.commit}
    report = {
        "shape": args.shape,
        "device": figures.pop("device", None) or found.get("device"),  # this process leaves the card alone
        "versions": {name: version(name) for name in ("torch", "trl", "transformers", "accelerate", "peft")},
        "trl_budget": __version__,
        "modes": found["modes"] | {key: figures | {"date": time.strftime("%Y-%m-%d")}},
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(report, indent=1) + "\n")
    print(shown(key, figures), flush=True)


# Commands


def measure(args: argparse.Namespace) -> None:
    """Every mode over the lengths, or over workload W."""
    for job in jobs(args):
        write(args, key_of(job, label=args.label), run_alone(job, args.limit))


def fit(args: argparse.Namespace) -> None:
    """The longest row of each card from a mode measured before; with `--budget`, a run of 0.95 of it."""
    for job in jobs(args):
        line_key = key_of(dataclasses.replace(job, budget=None))
        figures = json.loads(args.output.read_text())["modes"].get(line_key) if args.output.exists() else None
        if figures is None or longest_row(figures, 1.0) is None:
            raise SystemExit(
                f"{args.output} has no line of {line_key}. A prediction needs two lengths of 8,192 tokens and more, "
                "with peaks of a GPU. Measure the mode first, without --fit."
            )
        for card in args.fit:
            gib = CARDS[card] if args.budget in (None, "card") else parse_bytes(args.budget) / GIB
            predicted = longest_row(figures, gib)
            print(f"{line_key}: a card of {card} GB, {gib:g} GiB of it, holds a row of {predicted:,d} tokens")
            entry: dict[str, Any] = {"budget_gib": gib, "predicted_tokens": predicted, "rows": []}
            length = int(FIT_SHARE * (predicted or 0)) // 256 * 256
            if args.budget is not None and length > 0:
                entry |= run_alone(dataclasses.replace(job, lengths=[length], budget=f"{gib}GiB"), args.limit)
            write(args, key_of(job, card), entry)


def jobs(args: argparse.Namespace) -> list[Job]:
    """One per mode."""
    return [
        Job(
            mode=mode,
            shape=args.shape,
            lengths=sorted(args.lengths),
            repeats=args.repeats,
            chosen=args.set,
            budget=args.budget,
            workload_w=args.workload_w,
            scale=args.scale,
        )
        for mode in args.modes
    ]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), help="default: all; with --workload-w, two of ours")
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096, 8192, 16384, 32768, 65536], metavar="TOKENS")
    parser.add_argument("--repeats", type=int, default=2, help="steps of each length, or of workload W")
    parser.add_argument("--budget", help="device memory of the whole run, such as 16GiB; 'card' with --fit")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="a field of the config")
    parser.add_argument("--workload-w", action="store_true", help="full-parameter, passes of 24,576 tokens")
    parser.add_argument("--fit", nargs="+", type=int, choices=list(CARDS), metavar="GB", help="the longest row")
    parser.add_argument("--shape", default="qwen3-4b", choices=("qwen3-4b", "tiny"))
    parser.add_argument("--scale", type=float, default=1.0, help="factor on workload W, for a small machine")
    parser.add_argument("--limit", type=float, default=580, help="seconds that a mode may take")
    parser.add_argument("--label", help="a name beside the mode's, for another measurement of it")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/context.json"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.modes is None:
        args.modes = ["ours_full", "ours_full_all"] if args.workload_w else list(MODES)
    if args.workload_w and not all(MODES[name].is_ours for name in args.modes):
        parser.error("--workload-w packs passes of 24,576 tokens, and stock cannot: name modes of ours")
    if args.workload_w and args.fit:
        parser.error("--fit makes rows of one length, --workload-w those of workload W: give one of them")
    if args.budget == "card" and not args.fit:
        parser.error("--budget card is that of each card in --fit: give a size, or --fit")
    if args.fit and args.budget not in (None, "card") and len(args.fit) > 1:
        parser.error(f"--budget {args.budget} is one card and --fit names {len(args.fit)}: give --budget card")
    return args


def main() -> None:
    args = parse_arguments()
    if args.worker:
        work(Job(**json.loads(args.worker)), args.output)
        sys.stdout.flush()
        os._exit(0)  # after an aborted step, threads and streams need not be wound down
    with tempfile.TemporaryDirectory() as folder:
        for job in jobs(args):
            if job.budget == "card":
                job = dataclasses.replace(job, budget=None)
            job.config(folder, on_cpu=True)  # a field that is not known is named before anything runs
    (fit if args.fit else measure)(args)


if __name__ == "__main__":
    main()

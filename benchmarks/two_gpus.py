"""Two GPUs as a PCIe-only box: stock TRL's DDP over NCCL without peer access against one host optimizer for both.

    python benchmarks/two_gpus.py --commit $(git rev-parse HEAD) --output benchmarks/results/two_gpus.json

`NCCL_P2P_DISABLE=1` makes the cards exchange through host memory, as cards without NVLink or peer access do. Rollouts
are supplied: `--rows-per-card` rows with the lengths of workload W, repeated. Every mode is launched by `accelerate
launch` with `accelerate_configs/ddp_2gpu_pcie.yaml` (`one_card` and `one_card_both`, which trains on the rows of both
cards, with `single_gpu.yaml`) in processes of its own. Figures are merged into `--output` as each mode ends, so that
one file grows over several commands; on two H200 with 32 cores:

    --rows-per-card 128 --modes sharded one_card stock                           # 6 minutes
    --rows-per-card 32 --modes rank0 one_card_both sharded_24gib replicated      # 4 minutes
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from update_phase import PhaseTimes, StepClock, TimedSteps, machine
from workload import SuppliedRollouts, build_model, reward, tokenizer, training_settings

from trl_budget import BudgetGRPOConfig, BudgetGRPOTrainer, __version__
from trl_budget.compute_weights import checksums
from trl_budget.reduction import SharedGradients

CONFIGS = Path(__file__).parents[1] / "accelerate_configs"
PACKED = {"padding_free": "on", "max_tokens_per_microbatch": 24_576}
MODES: dict[str, dict[str, Any]] = {
    "one_card": PACKED,
    "one_card_both": PACKED,
    "sharded": {**PACKED, "optimizer_sharding": "sharded"},
    "stock": {},
    "rank0": {**PACKED, "optimizer_sharding": "rank0"},
    "replicated": {**PACKED, "optimizer_sharding": "replicated"},
    "sharded_24gib": {**PACKED, "optimizer_sharding": "sharded"},
}


class RankRollouts(SuppliedRollouts):
    """Workload W's rows for this rank: every rank starts at another row, so that their token counts differ.

    Args:
        scale: see `SuppliedRollouts`.
        rank: of this process.
        rows_per_card: rows beyond these are the next rank's.
    """

    def __init__(self, scale: float, rank: int, rows_per_card: int) -> None:
        super().__init__(scale)
        self._rank = rank
        self._rows_per_card = rows_per_card

    def _stored(self, row: int) -> int:
        card, row = divmod(row, self._rows_per_card)
        return (row + 5 * (self._rank + card)) % len(self.lengths)

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """Ignores the prompts' text and returns the stored ids, over and over."""
        rows = [self._stored(row) for row in range(len(prompts))]
        return {
            "prompt_ids": [self.prompts[row] for row in rows],
            "completion_ids": [self.completions[row] for row in rows],
            "logprobs": None,
        }


class RankEquality(TrainerCallback):
    """After each step: whether every weight has the same bits on all ranks, by checksum and by one tensor in full."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.are_equal: list[bool] = []
        self.host_gib: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        accelerator = self.trainer.accelerator
        parameters = list(self.trainer.model.parameters())
        sums = checksums(parameters)
        smallest = min(parameters, key=lambda p: p.numel()).detach().float()
        gathered = accelerator.gather(sums[None]), accelerator.gather(smallest[None])
        self.are_equal.append(all(torch.equal(ranks, ranks[:1].expand_as(ranks)) for ranks in gathered))
        self.host_gib.append(psutil.Process().memory_full_info().pss / 2**30)


def arguments(mode: str, folder: str, rows_per_card: int, steps: int) -> GRPOConfig:
    rows = 2 * rows_per_card if mode == "one_card_both" else rows_per_card
    settings = {**training_settings(folder, rows, steps), **MODES[mode]}
    return (GRPOConfig if mode == "stock" else BudgetGRPOConfig)(**settings)


def reward_by_card(rows_per_card: int) -> Callable[..., list[float]]:
    """`workload.reward` of each card's rows by themselves."""

    def reward_of_rows(completions: list[str], **_: Any) -> list[float]:
        starts = range(0, len(completions), rows_per_card)
        return [value for start in starts for value in reward(completions[start : start + rows_per_card])]

    return reward_of_rows


def time_details(gradients: Any, times: PhaseTimes) -> None:
    """Times what `norm_and_clip` is made of: the last host sums, waiting for the other ranks, the sum over ranks."""

    def timed(owner: Any, method: str) -> None:
        call = getattr(owner, method)

        def run(*args: Any, **kwargs: Any) -> Any:
            if not times.steps:  # before the first step
                return call(*args, **kwargs)
            times.begin(method)
            try:
                return call(*args, **kwargs)
            finally:
                times.end(method)

        setattr(owner, method, run)

    timed(gradients.collector, "wait")
    if isinstance(gradients, SharedGradients):
        timed(gradients, "reduce")
        timed(gradients._ranks, "exchange")


def run_rank(args: argparse.Namespace) -> dict[str, Any]:
    """One rank's training; returns its figures."""
    on_gpu = torch.cuda.is_available()
    config = arguments(args.worker, args.folder, args.rows_per_card, args.steps)
    rank = config.process_index
    if args.worker.endswith("24gib") and on_gpu:
        torch.cuda.set_per_process_memory_fraction(24 * 2**30 / torch.cuda.get_device_properties(0).total_memory)
    torch.manual_seed(0)
    is_stock = args.worker == "stock"
    model = build_model(
        args.shape, torch.bfloat16 if is_stock else torch.float32, str(config.device) if is_stock else "cpu"
    )
    if on_gpu:
        torch.cuda.empty_cache()
    times = PhaseTimes()
    clock, equality = StepClock(times), RankEquality()
    base = GRPOTrainer if is_stock else BudgetGRPOTrainer
    trainer_class = type(f"Timed{base.__name__}", (TimedSteps, base), {"times": times})
    started = time.perf_counter()
    trainer = trainer_class(
        model=model,
        reward_funcs=reward_by_card(args.rows_per_card),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": f"prompt {row}"} for row in range(64)]),
        processing_class=tokenizer(),
        callbacks=[clock, equality],
        rollout_func=RankRollouts(args.scale, rank, args.rows_per_card),
    )
    equality.trainer = trainer
    if not is_stock:
        time_details(trainer._host_adamw._gradients, times)
    construction_seconds = time.perf_counter() - started
    trainer.train()
    host = trainer._host_adamw if not is_stock else None
    return {
        "rank": rank,
        "construction_seconds": construction_seconds,
        "samples": times.steps,
        "peak_allocated_gib": [peak / 2**30 for peak in clock.peaks],
        "weights_equal_after_each_step": equality.are_equal,
        "process_pss_gib": equality.host_gib,
        "mapped_host_gib": host.host_bytes / 2**30 if host else 0.0,
        "owned_host_gib": host.owned_bytes / 2**30 if host else 0.0,
        "settings": {s.name: s.value for s in vars(trainer).get("resolved_settings", [])},
        "log": [
            {k: v for k, v in e.items() if k in ("loss", "grad_norm", "entropy")}
            for e in trainer.state.log_history
            if "loss" in e
        ],
    }


def summary(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the steps after the first, of the slowest rank; exchange and step also of the one that came last.

    A rank whose backward ends first waits for the other's in the exchange. The one that comes last waits for nothing.
    """

    def median(*phases: str, of_ranks: Callable[[Iterable[float]], float] = max) -> float:
        steps = zip(*(rank["samples"][1:] for rank in ranks), strict=True)
        return statistics.median(
            of_ranks(sum(rank.get(phase, 0.0) for phase in phases) for rank in step) for step in steps
        )

    return {
        "update_seconds": median("training_step", "norm_and_clip", "optimizer") - median("prepare_inputs"),
        "visible_exchange_and_step_seconds": median("norm_and_clip", "optimizer", of_ranks=min),
        "exchange_and_step_seconds_of_the_rank_that_waits": median("norm_and_clip", "optimizer"),
        "peak_allocated_gib": max(max(rank["peak_allocated_gib"]) for rank in ranks),
        "node_pss_gib": sum(max(rank["process_pss_gib"]) for rank in ranks),
        "ranks_equal": all(all(rank["weights_equal_after_each_step"]) for rank in ranks),
    }


@contextmanager
def gpu_clocks() -> Iterator[list[str]]:
    """One line a second and card while the block runs: time, index, SM clock, power, temperature, why it is slowed."""
    lines: list[str] = []
    if not torch.cuda.is_available():
        yield lines
        return
    query = "timestamp,index,clocks.sm,power.draw,temperature.gpu,clocks_event_reasons.active"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "-l", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield lines
        finally:
            process.terminate()
            lines += process.communicate()[0].splitlines()


def launch(mode: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs one mode and returns every rank's figures."""
    with tempfile.TemporaryDirectory() as folder:
        is_one_card = mode.startswith("one_card")
        config = "single_gpu.yaml" if is_one_card else args.config
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / config)]
        if is_one_card and not torch.cuda.is_available():
            command.append("--cpu")
        flags = ["--shape", args.shape, "--scale", str(args.scale), "--rows-per-card", str(args.rows_per_card)]
        flags += ["--steps", str(min(2, args.steps) if mode == "stock" else args.steps)]
        flags += ["--worker", mode, "--folder", folder]
        environment = {**os.environ, "NCCL_P2P_DISABLE": "1"}
        if is_one_card:  # transformers would use the second card as well, with DataParallel
            environment["CUDA_VISIBLE_DEVICES"] = "0"
        process = subprocess.Popen([*command, __file__, *flags], stdout=sys.stderr, env=environment)
        try:
            process.wait(args.limit)
        except subprocess.TimeoutExpired:
            process.terminate()  # the launcher ends the ranks
            process.wait()
        if process.returncode != 0:
            raise RuntimeError(f"{mode} ended with {process.returncode}, or took longer than {args.limit:g} s")
        return [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank*.json"))]


def report(found: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Everything measured so far, and what follows from it."""
    modes = found["modes"]
    scaling = dict(found.get("scaling_efficiency", {}))
    one_card = modes.get(f"one_card/rows={args.rows_per_card}")
    both = modes.get(key := f"sharded/rows={args.rows_per_card}")
    if one_card and both and one_card["commit"] == both["commit"]:
        scaling[key] = one_card["summary"]["update_seconds"] / both["summary"]["update_seconds"]
    return {
        "device": {**machine(), "num_gpus": torch.cuda.device_count(), "nccl": "NCCL_P2P_DISABLE=1"},
        "versions": {name: version(name) for name in ("torch", "trl", "transformers", "accelerate")},
        "trl_budget": __version__,
        "shape": args.shape,
        "scaling_efficiency": scaling,
        "modes": modes,
    }


def write(mode: str, ranks: list[dict[str, Any]], clocks: list[str], args: argparse.Namespace) -> None:
    """Adds one mode's figures to the file; those of other modes and other numbers of rows stay."""
    found = json.loads(args.output.read_text()) if args.output.exists() else {"modes": {}}
    found["modes"][f"{mode}/rows={args.rows_per_card}"] = {
        "summary": summary(ranks),
        "commit": args.commit,
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["python", *sys.argv]),
        "ranks": ranks,
        "gpu_clocks": clocks,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(report(found, args), indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-4b")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on every length, for a small machine")
    parser.add_argument("--rows-per-card", type=int, default=128)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--config", default="ddp_2gpu_pcie.yaml", help="of accelerate_configs/, for two processes")
    parser.add_argument("--limit", type=float, default=280, help="seconds that a mode may take")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/two_gpus.json"))
    parser.add_argument("--worker", choices=list(MODES), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        figures = run_rank(args)
        Path(args.folder, f"rank{figures['rank']}.json").write_text(json.dumps(figures))
        return
    has_failed = False
    for mode in args.modes:
        try:
            with gpu_clocks() as clocks:
                ranks = launch(mode, args)
        except RuntimeError as error:  # the other modes' figures do not depend on it
            print(f"FAILED: {error}", flush=True)
            has_failed = True
            continue
        write(mode, ranks, clocks, args)
        print(mode, json.dumps(summary(ranks)), ranks[0]["log"][-1], flush=True)
    sys.exit(has_failed)


if __name__ == "__main__":
    main()

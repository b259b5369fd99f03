"""The whole GRPO step with colocated vLLM: stock TRL on the whole card, ours on a card of 24 or 16 GiB.

Every mode runs in a process of its own (vLLM allows one engine a process) and its figures are merged into `--output`
as soon as it ends, so that one file grows over several commands. A mode that fails or takes longer than `--limit`
leaves its error there. One step warms up, `--steps` are measured. Weights are random, of the shape, made once.

`equal`: 64 completions of 1,024 tokens. `natural`: 128 rows (`--rows`) of up to 4,096 tokens, which end by themselves:
the end token's logit is raised by `--eos-bias`. How long rows then are depends on the draw of the random weights: with
5 they were 2,235 tokens on average; 5.6 makes a token 1.8 times as likely to be the last, which makes 1,500. Both
workloads have 8 rows per prompt, stock's micro-batches 4 rows, prompts 150 tokens.

Commands, with what they may take on one H200 (70 to 85 s of each mode are the engine's start with CUDA graphs):

    python benchmarks/full_step.py --make-folder                                              # 1 minute, once
    python benchmarks/full_step.py --modes stock ours_24gib ours_16gib                        # 9 minutes
    python benchmarks/full_step.py --modes all_off host_step packing                          # 9 minutes
    python benchmarks/full_step.py --modes reuse parking ours                                 # 8 minutes
    python benchmarks/full_step.py --modes ours_pageable ours_24gib_copying                   # 6 minutes
    python benchmarks/full_step.py --modes packing_alone reuse_alone parking_alone            # 8 minutes
    python benchmarks/full_step.py --workload natural --steps 1 --modes stock                 # 8 minutes
    python benchmarks/full_step.py --workload natural --steps 1 --modes ours_24gib            # 8 minutes
    python benchmarks/full_step.py --workload natural --steps 1 --modes ours_16gib --rows 64  # 8 minutes
    python benchmarks/full_step.py --generation-only --modes ours_24gib ours_24gib_copying    # 5 minutes
    python benchmarks/full_step.py --generation-only --modes ours_16gib ours_16gib_copying    # 5 minutes

`--set field=value` sets a field of the config in every mode that has it. `--generation-only` trains nothing and times
wake, sync, generation and sleep. `all_off` to `ours` turn one lever on after the other; `host_step`, and the modes
that end in `alone`, have a single one on (shared weights need the optimizer on the host and a policy that parks).
`--launch accelerate_configs/ddp_2gpu_pcie.yaml` starts every mode on two cards that do not reach each other, each with
an engine and the rows of its own; figures are the first card's.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch
from datasets import Dataset
from full_step_modes import EOS, MODES, Mode, workload_of
from step_figures import (
    GIB,
    CardSampler,
    PhaseClock,
    StepFigures,
    TimedPhases,
    kv_cache,
    line,
    samples,
    summary,
    synchronized_now,
)
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from update_phase import PageableHostAdamW, _parsed, machine
from workload import PROMPT_TOKENS, build_model, tokenizer

from trl_budget import BudgetGRPOConfig, BudgetGRPOTrainer, __version__

EOS_BIAS = 5.6

# Modes


def training_arguments(mode: Mode, args: argparse.Namespace, output_dir: str) -> GRPOConfig:
    """The config of a mode: the workload's fields, the mode's, then `--set`."""
    config_class = BudgetGRPOConfig if mode.is_ours else GRPOConfig
    workload, is_cuda = workload_of(args), torch.cuda.is_available()
    settings = {
        "output_dir": output_dir,
        "bf16": is_cuda,
        "use_cpu": not is_cuda,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": workload.rows // 4,
        "num_generations": 8,
        "max_completion_length": workload.max_completion,
        "generation_kwargs": workload.generation_kwargs,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": workload.max_completion + PROMPT_TOKENS + 10,
        "max_steps": 1 + args.steps,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    } | mode.settings
    settings |= {name: _parsed(value) for name, value in (pair.split("=", 1) for pair in args.set)}
    if not is_cuda:  # to try the script
        settings |= {"vllm_enable_sleep_mode": False, "vllm_gpu_memory_utilization": 0.3}
    known = {f.name for f in dataclasses.fields(config_class)}
    return config_class(**{name: value for name, value in settings.items() if name in known})


def prompts(rows: int) -> Dataset:
    """Prompts of 150 bytes, which are 150 tokens."""
    text = "".join(chr(ord("a") + i * i % 26) for i in range(PROMPT_TOKENS))
    return Dataset.from_list([{"prompt": f"{row:06d}" + text[6:]} for row in range(max(rows // 8, 1))])


def reward_of_ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Fixed by the tokens and uneven within a group, so that no advantage is zero."""
    return [sum(ids) % 97 / 97 for ids in completion_ids]


def make_folder(args: argparse.Namespace) -> Path:
    """Random bf16 weights of the shape and a byte tokenizer; appears only when complete."""
    folder = args.model_folder / args.shape
    if folder.exists():
        return folder
    unfinished = folder.with_name(folder.name + ".unfinished")
    model = build_model(args.shape, torch.bfloat16, "cpu")
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = EOS, 0
    model.save_pretrained(unfinished)
    tokenizer().save_pretrained(unfinished)
    unfinished.rename(folder)
    return folder


def build_trainer(mode: Mode, args: argparse.Namespace, output_dir: str, callback: StepFigures) -> Any:
    base = BudgetGRPOTrainer if mode.is_ours else GRPOTrainer
    trainer_class = type(f"Timed{base.__name__}", (TimedPhases, base), {"clock": callback.clock})
    model, optimizer = str(make_folder(args)), None
    if mode.is_pageable:
        model, optimizer = pageable_policy(model)
    return trainer_class(
        model=model,
        reward_funcs=reward_of_ids,
        args=training_arguments(mode, args, output_dir),
        train_dataset=prompts(workload_of(args).rows * int(os.environ.get("WORLD_SIZE", "1"))),
        processing_class=tokenizer(),
        callbacks=[callback],
        optimizers=(optimizer, None),
    )


def pageable_policy(folder: str) -> tuple[Any, PageableHostAdamW]:
    """A bf16 policy on the device and its optimizer, whose masters are the folder's weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    return model, PageableHostAdamW(model.parameters(), lr=1e-6, weight_decay=0.0)


class KeepSteps(TrainerCallback):
    """Writes the samples whenever a step has been logged: a run that is cut short leaves the steps that it made."""

    def __init__(self, figures: StepFigures, result: dict[str, Any], out: Path) -> None:
        self._figures, self._result, self._out = figures, result, out

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs is None or "loss" not in logs:
            return
        steps = samples(self._figures, state.log_history)
        unfinished = self._out.with_suffix(".unfinished")
        unfinished.write_text(json.dumps({**self._result, "samples": steps}))
        unfinished.rename(self._out)


def run_mode(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Builds one trainer, trains or generates, and returns its figures."""
    torch.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        torch.zeros(1, device="cuda")
    mode, sampler = MODES[name], CardSampler()
    sampler.start()
    figures = StepFigures(PhaseClock(), sampler)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(mode, args, folder, figures)
        result = {
            "description": mode.description,
            "device": machine(),
            "construction_seconds": time.perf_counter() - began,
            "construction_peak_card_gib": sampler.restart() / GIB,
            "settings": {s.name: s.value for s in vars(trainer).get("resolved_settings", [])},
            **kv_cache(trainer.vllm_generation),
        }
        if args.generation_only:
            result["samples"] = generate_only(trainer, args, figures)
        else:
            figures.watch(trainer.vllm_generation)
            if trainer.accelerator.is_main_process:
                trainer.add_callback(KeepSteps(figures, result, args.figures))
            trainer.train()
            result["samples"] = samples(figures, trainer.state.log_history)
            if mode.is_ours:
                result["residency_of_a_step"] = trainer._card.table().splitlines()
    sampler.stop()
    return {**result, **summary(result["samples"])}


def generate_only(trainer: Any, args: argparse.Namespace, figures: StepFigures) -> list[dict[str, float]]:
    """Rounds of wake, sync, generation and sleep over the prompts of a step; the first warms up."""
    engine, workload = trainer.vllm_generation, workload_of(args)
    ids = [row for text in prompts(workload.rows)["prompt"] for row in [tokenizer()(text)["input_ids"]] * 8]
    rows = []
    for _ in range(1 + args.steps):
        figures.sampler.restart()
        times = [synchronized_now()]
        with engine.session():
            engine.sync_weights()
            times.append(synchronized_now())
            engine.open()
            times.append(synchronized_now())
            completions = engine.generate(prompts=ids[: workload.rows], images=None, num_generations=8)[1]
            times.append(synchronized_now())
        times.append(synchronized_now())
        names = ("sync_seconds", "wake_seconds", "generation_seconds", "sleep_seconds")
        row = {name: end - start for name, start, end in zip(names, times[:-1], times[1:], strict=True)}
        tokens = sum(map(len, completions))
        row |= {"completion_tokens": tokens, "tokens_per_second": tokens / row["generation_seconds"]}
        rows.append({**row, "peak_card_gib": figures.sampler.restart() / GIB})
    return rows


# Files


def key_of(name: str, args: argparse.Namespace) -> str:
    """Under which name a mode's figures stand in the file: with all that makes it another measurement."""
    parts = [args.workload, name, *(["generation"] if args.generation_only else [])]
    parts += [f"launch={args.launch.stem}"] if args.launch else []
    parts += [f"rows={args.rows}"] if args.rows else []
    parts += [f"eos_bias={args.eos_bias:g}"] if args.workload == "natural" and args.eos_bias != EOS_BIAS else []
    return "/".join([*parts, *args.set])


def write(args: argparse.Namespace, name: str, figures: dict[str, Any]) -> None:
    """Adds one mode's figures to the file; those of other modes stay."""
    found = json.loads(args.output.read_text()) if args.output.exists() else {"modes": {}}
    packages = ("torch", "trl", "transformers", "accelerate", "vllm")
    figures |= {"command": shlex.join(["python", *sys.argv]), "commit": args.commit, "date": time.strftime("%Y-%m-%d")}
    report = {
        "shape": args.shape,
        "device": figures.pop("device", None) or found.get("device"),  # this process leaves the card alone
        "versions": {package: _version(package) for package in packages},
        "trl_budget": __version__,
        "modes": found["modes"] | {key_of(name, args): figures},
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(report, indent=1) + "\n")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def run_alone(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One mode in a process of its own: its figures, or the end of its log."""
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder, "figures.json"), Path(folder, "log")
        launcher = ["-m", "accelerate.commands.launch", "--config_file", str(args.launch)] if args.launch else []
        command = [sys.executable, *launcher, __file__, *sys.argv[1:], "--worker", name, "--figures", str(out)]
        environment = {**os.environ, "NCCL_P2P_DISABLE": "1"}
        with log.open("wb") as file:
            process, is_late = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment), False
            try:
                process.wait(args.limit)
            except subprocess.TimeoutExpired:
                is_late = True
            finally:
                end_with_children(process.pid)
                process.wait()
        text = log.read_text(errors="replace")
        if args.keep_logs:
            args.keep_logs.mkdir(parents=True, exist_ok=True)
            (args.keep_logs / f"{key_of(name, args).replace('/', '-')}.log").write_text(text)
        figures = json.loads(out.read_text()) if out.exists() else {}
        if process.returncode == 0:
            return figures
        why = f"took longer than {args.limit} s" if is_late else f"exit {process.returncode}"
        text = text[-3000:] if args.launch is None else text.split("ChildFailedError")[0][-9000:]
        return {**figures, "error": f"{text}\n{why}" if is_late else f"{why}\n{text}"}


def end_with_children(pid: int) -> None:
    """Kills a process and all that it has started: a launcher's ranks are in sessions of their own."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", default=["stock", "ours_24gib", "ours_16gib"], choices=list(MODES))
    parser.add_argument("--workload", default="equal", choices=("equal", "natural"))
    parser.add_argument("--rows", type=int, help="completions of a step, a multiple of 8")
    parser.add_argument("--eos-bias", type=float, default=EOS_BIAS, help="of the natural workload")
    parser.add_argument("--steps", type=int, default=2, help="measured, after one that warms up")
    parser.add_argument("--generation-only", action="store_true", help="no training; modes of ours only")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="a field of the config")
    parser.add_argument("--shape", default="qwen3-4b")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on completion lengths, for a small machine")
    parser.add_argument("--model-folder", type=Path, default=Path("out/models"), help="where the weights are kept")
    parser.add_argument("--make-folder", action="store_true", help="make the weights and stop")
    parser.add_argument("--limit", type=float, default=500, help="seconds that a mode may take")
    parser.add_argument("--keep-logs", type=Path, help="folder for the whole log of every mode")
    parser.add_argument("--launch", type=Path, help="a config of accelerate_configs/, for several processes")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/full_step.json"))
    parser.add_argument("--worker", choices=list(MODES), help=argparse.SUPPRESS)
    parser.add_argument("--figures", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.generation_only and not all(MODES[name].is_ours for name in args.modes):
        parser.error("--generation-only hands the card over as ours does, and stock cannot: name modes of ours")
    if args.launch and any(MODES[name].is_pageable for name in args.modes):
        parser.error("ours_pageable makes its optimizer before the processes have met: leave it or --launch out")
    if args.rows and args.rows % 8:
        parser.error(f"--rows {args.rows} is no multiple of 8, the completions of one prompt")
    return args


def main() -> None:
    args = parse_arguments()
    if args.worker:
        code = 1
        try:
            figures = run_mode(args.worker, args)
            if int(os.environ.get("RANK", "0")) == 0:
                args.figures.write_text(json.dumps(figures))
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # an engine's teardown may hang
    if args.make_folder:
        make_folder(args)
        return
    if not (args.model_folder / args.shape).exists():  # in a process of its own, which gives the card back
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--make-folder"], check=True)
    for name in args.modes:
        figures = run_alone(name, args)
        write(args, name, figures)
        print(line(key_of(name, args), figures), flush=True)


if __name__ == "__main__":
    main()

"""Measures the steps of a GRPO trainer: seconds per phase, memory, tokens. No step is changed by it."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import TrainerCallback

from trl_budget.upstream_vllm import sleeping_bytes

GIB = 2**30
PHASES = ("generation", "sync", "scoring", "update", "optimizer", "other")
LOGGED = ("reward", "loss", "grad_norm")
GAP = "sampling/sampling_logp_difference/mean"


class PhaseClock:
    """Seconds per phase of each step. A phase inside another stops the outer one's clock.

    Args:
        now: seconds, with the device's work done.
    """

    def __init__(self, now: Any = None) -> None:
        self._now = now or synchronized_now
        self._open: list[str] = []
        self._since = 0.0
        self._began: float | None = None
        self.steps: list[dict[str, float]] = []

    def start_step(self) -> None:
        self.steps.append({})
        self._began = self._now()

    def end_step(self) -> None:
        """Closes the step: what no phase took is `other`."""
        assert self._began is not None
        step = self.steps[-1]
        step["total"] = self._now() - self._began
        named = sum(seconds for phase, seconds in step.items() if phase not in ("total", "other"))
        step["other"] = step["total"] - named
        self._began = None

    def begin(self, phase: str) -> None:
        self._turn()
        self._open.append(phase)

    def end(self, phase: str) -> None:
        self._turn()
        assert self._open.pop() == phase

    @contextmanager
    def inside(self, phase: str) -> Iterator[None]:
        """The phase for the length of the block."""
        self.begin(phase)
        try:
            yield
        finally:
            self.end(phase)

    def _turn(self) -> None:
        now = self._now()
        if self._open and self._began is not None:
            step = self.steps[-1]
            step[self._open[-1]] = step.get(self._open[-1], 0.0) + now - self._since
        self._since = now


def synchronized_now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class CardSampler(threading.Thread):
    """The highest use of the card, by everyone, sampled every 50 ms since `restart`."""

    def __init__(self, read: Any = None, seconds: float = 0.05) -> None:
        super().__init__(daemon=True)
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._read = read or (lambda: used_bytes(device))  # the thread has a current device of its own
        self._seconds = seconds
        self._is_over = threading.Event()
        self.peak = 0

    def run(self) -> None:
        while not self._is_over.wait(self._seconds):
            self.peak = max(self.peak, self._read())

    def restart(self) -> int:
        """The peak until now, of which the next one forgets everything."""
        peak, self.peak = max(self.peak, self._read()), 0
        return peak

    def stop(self) -> None:
        self._is_over.set()
        self.join()


def used_bytes(device: int | None = None) -> int:
    """Of a CUDA device, the current one when None, by everyone; 0 without CUDA."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


class TimedPhases:
    """Mixin over a GRPO trainer: times its phases and changes none of them.

    Overrides no method of scoring or loss: ours would then neither pack rows nor reuse log-probs.
    """

    clock: PhaseClock

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.inside("update"):
            return super().training_step(*args, **kwargs)

    def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.inside("scoring"):  # rewards, reference and old log-probs
            return super()._prepare_inputs(*args, **kwargs)

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.inside("generation"):  # with waking and sleeping
            return super()._generate(*args, **kwargs)

    def _clip_grad_norm(self, model: Any) -> Any:
        with self.clock.inside("optimizer"):
            norm = super()._clip_grad_norm(model)
            return torch.tensor(norm.item())  # stock's is a tensor on the GPU, read when the step is logged


class StepFigures(TrainerCallback):
    """Peaks and tokens of every step, and the optimizer's seconds."""

    def __init__(self, clock: PhaseClock, sampler: CardSampler) -> None:
        self.clock = clock
        self.sampler = sampler
        self.num_tokens = 0
        self.sleeping_bytes = 0
        self.steps: list[dict[str, float]] = []

    def watch(self, engine: Any) -> None:
        """Counts the tokens and times the syncs of TRL's `VLLMGeneration`, or ours."""
        generate, sync = engine.generate, engine.sync_weights

        def counted(*args: Any, **kwargs: Any) -> Any:
            output = generate(*args, **kwargs)
            self.num_tokens += sum(len(ids) for ids in output[1])
            return output

        def timed(*args: Any, **kwargs: Any) -> None:
            with self.clock.inside("sync"):
                sync(*args, **kwargs)

        engine.generate, engine.sync_weights = counted, timed

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.clock.start_step()
        self.num_tokens = 0
        self.sampler.restart()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.clock.begin("optimizer")
        self.sleeping_bytes = sleeping_bytes() if torch.cuda.is_available() else 0

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.clock.end("optimizer")

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.clock.end_step()
        allocated = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        seconds = self.clock.steps[-1].get("generation", 0.0)
        self.steps.append(
            {
                "peak_allocated_gib": allocated / GIB,  # torch counts the pool that sleeps as well
                "sleeping_pool_gib": self.sleeping_bytes / GIB,
                "peak_card_gib": self.sampler.restart() / GIB,
                "completion_tokens": self.num_tokens,
                "tokens_per_second": self.num_tokens / seconds if seconds else 0.0,
            }
        )


def samples(figures: StepFigures, history: list[dict[str, float]]) -> list[dict[str, float]]:
    """One row per step: seconds per phase, memory, tokens and what was logged."""
    logged = [entry for entry in history if "loss" in entry]
    return [
        {**{f"{phase}_seconds": step.get(phase, 0.0) for phase in (*PHASES, "total")}, **row}
        | {key: entry.get(key) for key in LOGGED}
        | {"sampling_gap": entry.get(GAP)}
        for step, row, entry in zip(figures.clock.steps, figures.steps, logged, strict=True)
    ]


def summary(rows: list[dict[str, float]]) -> dict[str, float]:
    """Medians of the steps after the first; of peaks the highest, the first step's too."""
    found: dict[str, float] = {}
    for key in rows[0]:
        values = [row[key] for row in rows[1:] if row[key] is not None]
        if key.startswith("peak"):
            found[key] = max(row[key] for row in rows)
        elif values:
            found[key] = statistics.median(values)
    return found


def kv_cache(engine: Any) -> dict[str, float]:
    """Size of vLLM's cache."""
    config = engine.llm.llm_engine.vllm_config
    cache, model = config.cache_config, config.model_config
    tokens = (cache.num_gpu_blocks or 0) * cache.block_size
    heads, layers = model.get_num_kv_heads(config.parallel_config), model.get_num_layers(config.parallel_config)
    bytes_per_token = 2 * layers * heads * model.get_head_size() * model.dtype.itemsize
    return {"kv_cache_tokens": tokens, "kv_cache_gib": tokens * bytes_per_token / GIB}


def line(key: str, figures: dict[str, Any]) -> str:
    """A mode on one line."""
    if "error" in figures:
        lines = figures["error"].strip().splitlines()
        last = next((line for line in reversed(lines) if "Error" in line), lines[-1])
        return f"{key:40s} FAILED: {last[:300]}"
    shown = [f"{phase} {figures[f'{phase}_seconds']:.2f}" for phase in PHASES if f"{phase}_seconds" in figures]
    total = f"{figures['total_seconds']:.2f} s: " if "total_seconds" in figures else ""
    memory = f"card {figures['peak_card_gib']:.2f} GiB (start {figures['construction_peak_card_gib']:.2f})"
    cache = f"kv {figures['kv_cache_gib']:.2f} GiB, {figures['kv_cache_tokens']} tokens"
    rate = f"{figures['completion_tokens']:.0f} tokens at {figures['tokens_per_second']:.0f}/s"
    parity = " ".join(f"{k} {figures[k]:.4f}" for k in (*LOGGED, "sampling_gap") if k in figures)
    return f"{key:40s} {total}{', '.join(shown)}; {memory}; {cache}; {rate}; {parity}"

"""Records when each part of one training step ran, on the GPU's streams and on the host, on one clock.

GPU intervals are pairs of timed events on the stream that does the work, host intervals are `perf_counter` on the
thread that does it. Both count from one moment at which the GPU was idle.
"""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from trl_budget import gradient_stream


class Timeline(TrainerCallback):
    """Records the last step of a run, as a callback of its trainer.

    Args:
        path: JSON file that the intervals are written to: lane -> list of [start, stop, thread or stream], seconds.
        recorded_step: index of the step to record.
    """

    def __init__(self, path: Path, recorded_step: int) -> None:
        self.path = path
        self.recorded_step = recorded_step
        self.host: list[tuple[str, float, float, str]] = []
        self.device: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._origin_seconds = 0.0
        self._origin: torch.cuda.Event | None = None
        self._is_recording = False

    def watch(self, trainer: Any) -> None:
        """Wraps what the trainer's HostAdamW does; nothing is changed but the time it takes to note the time."""
        optimizer = trainer._host_adamw
        collector = optimizer._gradients.collector
        trainer.accelerator.backward = self._on_stream("backward", trainer.accelerator.backward, None)
        optimizer.clip_grad_norm_ = self._on_host("norm", optimizer.clip_grad_norm_)
        optimizer._step_block = self._on_host("clip and AdamW", optimizer._step_block)
        collector.wait = self._on_host("wait for the sums", collector.wait)
        gradient_stream.add_gradient = self._on_host("fp32 sum", gradient_stream.add_gradient)
        if not optimizer._engines:
            collector._host_sender.send = self._on_host("gradient copies", collector._host_sender.send)
        for engine in optimizer._engines.values():
            engine.sender.send = self._on_stream("gradient copies", engine.sender.send, engine.download_stream)
            engine.upload = self._on_stream("weight copies", engine.upload, engine.upload_stream)

    def _on_host(self, lane: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                if self._is_recording:
                    self.host.append((lane, started, time.perf_counter(), threading.current_thread().name))

        return timed

    def _on_stream(self, lane: str, function: Callable[..., Any], stream: Any) -> Callable[..., Any]:
        if not torch.cuda.is_available():
            return self._on_host(lane, function)

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self._is_recording:
                return function(*args, **kwargs)
            where = stream or torch.cuda.current_stream()
            started, stopped = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if lane == "gradient copies":  # the interval is the copy's, not the wait for the gradient
                where.wait_stream(torch.cuda.current_stream())
            started.record(where)
            result = function(*args, **kwargs)
            stopped.record(where)
            self.device.append((lane, started, stopped))
            return result

        return timed

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Starts the clock of the step to record."""
        if state.global_step != self.recorded_step:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            self._origin = torch.cuda.Event(enable_timing=True)
            self._origin.record()
        self._origin_seconds = time.perf_counter()
        self._is_recording = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Writes the recorded step."""
        if not self._is_recording:
            return
        self._is_recording = False
        lanes: dict[str, list[tuple[float, float, str]]] = {}
        for lane, start, stop, thread in self.host:
            lanes.setdefault(lane, []).append((start - self._origin_seconds, stop - self._origin_seconds, thread))
        if self._origin is not None:
            torch.cuda.synchronize()
            for lane, started, stopped in self.device:
                seconds = [self._origin.elapsed_time(event) / 1e3 for event in (started, stopped)]
                lanes.setdefault(lane, []).append((*seconds, "GPU"))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({"intervals": lanes}) + "\n")

"""What `context.py` makes of its samples: one row per length, the slope of memory over tokens, the longest row."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from step_figures import GIB, used_bytes
from update_phase import PhaseTimes, StepClock

from trl_budget.errors import DeviceMemoryError

SLOPE_FROM_TOKENS = 8192
OUT_OF_MEMORY = "out of memory"
Row = dict[str, Any]


class LengthClock(StepClock):
    """The figures of every step, grouped by the length of its rows.

    Args:
        times: of the trainer's phases.
        lengths: tokens of a row, in the order in which they run.
        repeats: steps of each length.
        keep: called with the rows so far after every step.
    """

    def __init__(self, times: PhaseTimes, lengths: list[int], repeats: int, keep: Callable[[list[Row]], None]) -> None:
        super().__init__(times)
        self._lengths, self._repeats, self._keep = lengths, repeats, keep
        self._card_bytes = 0
        self._samples: list[Row] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        super().on_step_begin(*args, **kwargs)
        self._card_bytes = used_bytes()

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().on_pre_optimizer_step(*args, **kwargs)
        self._card_bytes = max(self._card_bytes, used_bytes())

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        super().on_step_end(*args, **kwargs)
        self._card_bytes = max(self._card_bytes, used_bytes())

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """A step is logged after it has ended."""
        if logs is None or "loss" not in logs:
            return
        phases = self.times.steps[-1]
        forward_backward = phases["training_step"] - phases["prepare_inputs"]
        optimizer = phases.get("norm_and_clip", 0.0) + phases.get("optimizer", 0.0)
        self._samples.append(
            {
                **memory(self._card_bytes),
                "forward_backward_seconds": forward_backward,
                "update_seconds": forward_backward + optimizer,
                "loss": logs["loss"],
                "grad_norm": logs["grad_norm"],
            }
        )
        self._keep(self.rows())

    def rows(self) -> list[Row]:
        """One per length that has run at least once."""
        groups = [self._samples[i : i + self._repeats] for i in range(0, len(self._samples), self._repeats)]
        return [row_of(tokens, samples) for tokens, samples in zip(self._lengths, groups, strict=False)]

    def rows_and_failure(self, message: str) -> list[Row]:
        """The lengths that ran every time, and the one that was running when memory ran out."""
        done = len(self._samples) // self._repeats
        failed = {"tokens": self._lengths[done], **memory(used_bytes()), "error": OUT_OF_MEMORY}
        return [*self.rows()[:done], failed | {"message": message[:500]}]


def memory(card_bytes: int) -> dict[str, float | None]:
    """Peaks of this step: by torch's tensors, by torch, and the card's use by everyone; None without a GPU."""
    if not torch.cuda.is_available():
        return dict.fromkeys(("peak_allocated_gib", "peak_reserved_gib", "card_gib"))
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"peak_allocated_gib": allocated / GIB, "peak_reserved_gib": reserved / GIB, "card_gib": card_bytes / GIB}


def row_of(tokens: int, samples: list[Row]) -> Row:
    """The last sample's times and loss, the highest memory of all, and the samples."""
    highest = {
        name: max(sample[name] for sample in samples) if samples[0][name] is not None else None
        for name in ("peak_allocated_gib", "peak_reserved_gib", "card_gib")
    }
    return {"tokens": tokens, **samples[-1], **highest, "samples": samples}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the card, or what it may hold, was too small."""
    is_named = isinstance(error, torch.OutOfMemoryError | DeviceMemoryError)
    return is_named or "out of memory" in str(error).lower() or "CUBLAS_STATUS_ALLOC_FAILED" in str(error)


def line_of(rows: list[Row]) -> dict[str, float]:
    """The straight line of peak over tokens, by least squares over the rows of 8,192 tokens and more.

    A short row's peak is that of the LM head or of a tile, which do not grow with it, so the line bends upwards: what
    counts for longer rows is the slope between the two longest.

    Returns:
        `slope_gib_per_1000_tokens`, `intercept_gib`, `worst_error_gib` of the rows that it is made of, and
        `last_slope_gib_per_1000_tokens`; nothing with fewer than two of them.
    """
    points = [
        (row["tokens"], row["peak_allocated_gib"])
        for row in rows
        if row["tokens"] >= SLOPE_FROM_TOKENS and "error" not in row and row["peak_allocated_gib"] is not None
    ]
    if len(points) < 2:
        return {}
    slope, intercept = statistics.linear_regression(*zip(*points, strict=True))
    worst = max(abs(peak - intercept - slope * tokens) for tokens, peak in points)
    (tokens, peak), (more_tokens, higher_peak) = sorted(points)[-2:]
    last = (higher_peak - peak) / (more_tokens - tokens) if more_tokens > tokens else slope
    return {
        "slope_gib_per_1000_tokens": 1000 * slope,
        "last_slope_gib_per_1000_tokens": 1000 * last,
        "intercept_gib": intercept,
        "worst_error_gib": worst,
    }


def longest_row(figures: dict[str, Any], card_gib: float) -> int | None:
    """Tokens of the longest row that a card holds; None where the mode has no line, 0 where none fits.

    From the longest row that ran on, by the steepest of the line, of its last part and of what is predicted of a very
    long row; for what is shorter than that row, by the line. What the card holds outside torch (contexts) counts as in
    the longest row that ran; what torch keeps unused does not, since it gives that back before it runs out.
    """
    if "slope_gib_per_1000_tokens" not in figures:
        return None
    longest = max((row for row in figures["rows"] if "error" not in row), key=lambda row: row["tokens"])
    outside_torch = max(0.0, longest["card_gib"] - longest["peak_reserved_gib"])
    beyond = card_gib - outside_torch - longest["peak_allocated_gib"]
    if beyond >= 0:
        predicted = 1000 * figures.get("predicted_bytes_per_token", 0) / GIB
        slopes = (figures["slope_gib_per_1000_tokens"], figures.get("last_slope_gib_per_1000_tokens", 0.0), predicted)
        return longest["tokens"] + int(1000 * beyond / max(slopes))
    room = card_gib - outside_torch - figures["intercept_gib"]
    return max(0, int(1000 * room / figures["slope_gib_per_1000_tokens"]))


def shown(key: str, figures: dict[str, Any]) -> str:
    """A mode's figures for the terminal."""
    slopes = (figures.get(f"{name}slope_gib_per_1000_tokens", float("nan")) for name in ("", "last_"))
    lines = ["{}: {:.4f} GiB per 1,000 tokens, {:.4f} between the two longest".format(key, *slopes)]
    for row in figures.get("rows", []):
        peak = float("nan") if row["peak_allocated_gib"] is None else row["peak_allocated_gib"]
        rest = row.get("error") or (
            f"forward+backward {row['forward_backward_seconds']:8.2f} s  update {row['update_seconds']:8.2f} s  "
            f"loss {row['loss']:.6f}  grad_norm {row['grad_norm']:.5f}"
        )
        lines.append(f"  {row['tokens']:8,d} tokens  peak {peak:7.2f} GiB  {rest}")
    if "error" in figures:
        lines.append(f"  FAILED: {figures['error'].strip().splitlines()[-1]}")
    return "\n".join(lines)

"""Draws a step that `update_phase.py --timeline` has recorded: what ran when, on the GPU, the bus and the host.

python benchmarks/plot_overlap.py benchmarks/results/timeline.json --output docs/images/overlap.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from matplotlib.figure import Figure

LANES = {
    "backward": ("backward (GPU)", "tab:green"),
    "gradient copies": ("gradients, GPU to host", "tab:blue"),
    "fp32 sum": ("fp32 sums (host threads)", "tab:purple"),
    "wait for the sums": ("step waits for sums", "tab:red"),
    "norm": ("norm, waiting included", "tab:brown"),
    "clip and AdamW": ("clip, AdamW (host threads)", "tab:orange"),
    "weight copies": ("weights, host to GPU", "tab:cyan"),
}


def busy_seconds(intervals: list[list[float]]) -> float:
    """Length of the union of the intervals."""
    total, end = 0.0, float("-inf")
    for start, stop, *_ in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("timeline", type=Path)
    parser.add_argument("--title", default="One optimizer step")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    recorded = json.loads(args.timeline.read_text())["intervals"]
    lanes = [lane for lane in LANES if lane in recorded]
    figure = Figure(figsize=(10, 0.55 * len(lanes) + 1.2), layout="constrained")
    axes = figure.subplots()
    labels = []
    for row, lane in enumerate(lanes):
        label, colour = LANES[lane]
        spans = [(start, stop - start) for start, stop, *_ in recorded[lane]]
        axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=colour, alpha=0.7)
        busy = busy_seconds(recorded[lane])
        labels.append(f"{label}\n{busy:.2f} s busy")
        print(f"{label:28s} {len(spans):6d} intervals, busy {busy:.3f} s")
    axes.set(title=args.title, xlabel="seconds since the step began")
    axes.set_yticks(range(len(lanes)), labels)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(args.output, dpi=150)


if __name__ == "__main__":
    main()

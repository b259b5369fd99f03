"""Draws peak memory against the length of a row, from `context.py`'s results, with the cards it would fit.

python benchmarks/plot_context.py benchmarks/results/context.json --output docs/images/context.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from context import CARDS
from matplotlib.figure import Figure

MODES = {
    "stock_full_bf16": ("stock TRL, all weights (bf16 Adam)", "tab:red", "-"),
    "stock_lora": ("stock TRL, LoRA", "tab:orange", "--"),
    "ours_full": ("ours, all weights", "tab:cyan", "-"),
    "ours_full_offload_tiles": ("ours, all weights, inputs on the host, tiles", "tab:purple", "-"),
    "ours_full_all": ("ours, all weights, all levers", "tab:blue", "-"),
    "ours_lora": ("ours, LoRA", "tab:olive", "--"),
    "ours_lora_offload_tiles": ("ours, LoRA, inputs on the host, tiles", "tab:pink", "--"),
    "ours_lora_all": ("ours, LoRA, all levers", "tab:green", "--"),
}
SHOWN = ("stock_full_bf16", "stock_lora", "ours_full", "ours_full_all", "ours_lora_all")


def draw(modes: dict[str, Any], names: list[str], title: str = "Peak of a training pass") -> Figure:
    """Length on the x axis, peak of torch's tensors on the y axis.

    A cross stands where a length did not fit, a star where one ran within a card's budget, at the card's whole use.

    Args:
        modes: of the result file.
        names: which of them, in the legend's order; those that the file lacks are left out.
        title: above the picture.
    """
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    for name in (name for name in names if name in modes):
        label, colour, style = MODES[name]
        rows = modes[name]["rows"]
        fitting = [row for row in rows if "error" not in row and row["peak_allocated_gib"] is not None]
        tokens, peaks = [row["tokens"] for row in fitting], [row["peak_allocated_gib"] for row in fitting]
        axes.plot(tokens, peaks, style, color=colour, marker="o", markersize=4, label=label)
        for row in (row for row in rows if "error" in row and fitting):
            axes.plot([tokens[-1], row["tokens"]], [peaks[-1], row["card_gib"]], ":", color=colour, marker="")
            axes.plot([row["tokens"]], [row["card_gib"]], "x", color=colour, markersize=9)
            axes.annotate(f"{row['error']} ", (row["tokens"], row["card_gib"]), fontsize=8, ha="right", va="bottom")
        for row in _within_cards(modes, name):
            axes.plot(
                [row["tokens"]], [row["card_gib"]], "*", color=colour, markersize=12, label="within a card's budget"
            )
    for card, gib in CARDS.items():
        axes.axhline(gib, color="0.5", linewidth=1, linestyle=(0, (4, 4)))
        axes.text(1.0, gib, f"{card} GB", transform=axes.get_yaxis_transform(), ha="right", va="bottom", color="0.35")
    axes.set(title=title, xlabel="tokens of a row", ylabel="peak, GiB", ylim=(0, None))
    axes.set_xlim(0, None)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:g}k" if value else "0")
    measured = {row["tokens"] for name in names for row in modes.get(name, {"rows": []})["rows"]}
    axes.set_xticks(sorted(measured)[1:])  # the two shortest lie too near to each other
    axes.grid(alpha=0.3)
    labels = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))  # each label once
    figure.legend(labels.values(), labels.keys(), fontsize=9, loc="outside lower center", ncols=3)
    return figure


def _within_cards(modes: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The rows of a mode that ran within a card's budget, by the card's whole use."""
    runs = (figures["rows"] for key, figures in modes.items() if key.startswith(f"{name}/card="))
    return [row for rows in runs for row in rows if "error" not in row and row["card_gib"] is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(SHOWN))
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    report = json.loads(args.results.read_text())
    gpu = (report["device"] or {}).get("gpu", "no GPU")
    title = f"Peak of a training pass of one row, {report['shape']}, {gpu}"
    draw(report["modes"], args.modes, title).savefig(args.output, dpi=150)


if __name__ == "__main__":
    main()

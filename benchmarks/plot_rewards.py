"""Reward curves of several runs of one recipe in one picture.

python benchmarks/plot_rewards.py benchmarks/results/smollm2_{stock,packed}-?.json --output smollm2_reward.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from matplotlib.figure import Figure

WINDOW = 10
COLOURS = {"GRPOTrainer": "tab:orange", "BudgetGRPOTrainer": "tab:blue"}
STYLES = ("-", "--", ":")


def running_mean(values: list[float]) -> list[float]:
    """Mean of the last `WINDOW` values at every place."""
    return [sum(values[max(0, i + 1 - WINDOW) : i + 1]) / min(i + 1, WINDOW) for i in range(len(values))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="rewards.json files")
    parser.add_argument("--title", default="SmolLM2-135M-Instruct, reasoning-gym chain_sum, one H200")
    parser.add_argument("--steps", type=int, default=100, help="how many steps of each run are drawn")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for path in sorted(args.runs):
        run = json.loads(path.read_text())
        steps, seed = run["steps"][: args.steps], run["arguments"]["seed"]
        curve = running_mean([step["reward"] for step in steps])
        label = f"{run['trainer']}, seed {seed}"
        axes.plot([s["step"] for s in steps], curve, STYLES[seed % 3], color=COLOURS[run["trainer"]], label=label)
        mean = sum(s["reward"] for s in steps[-40:]) / 40
        print(f"{label:30s} first 10 steps {curve[9]:.3f}, last 40 {mean:.3f}, {len(steps)} steps")
    axes.set(title=args.title, xlabel="optimizer step", ylabel=f"verifier's score, mean of the last {WINDOW} steps")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(args.output, dpi=150)


if __name__ == "__main__":
    main()

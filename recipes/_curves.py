"""Shared by the recipes: a short progress display, the per-step record of a run, and the picture of its reward.

Only what the trainer logs is recorded; nothing is smoothed in `rewards.json`, only in the picture.
"""

import json
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch
from matplotlib.figure import Figure
from transformers import ProgressCallback, Trainer

# TRL 1.16 uses names that transformers 5.24 calls deprecated; whoever runs a recipe cannot change that.
warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")

RECORDED = (
    "reward",
    "reward_std",
    "frac_reward_zero_std",
    "loss",
    "grad_norm",
    "step_time",
    "completions/mean_length",
    "completions/clipped_ratio",
)
PACKAGES = ("trl", "transformers", "torch", "accelerate")


class RunRecorder(ProgressCallback):
    """The usual progress bar, one short line every few steps, and a record of every step.

    Replaces `ProgressCallback`, which writes the whole dictionary of metrics at each log. Needs `logging_steps=1`.
    """

    def __init__(self, print_every: int, write: Callable[["RunRecorder"], None], earlier: list[dict[str, float]]):
        """Prepare an empty record.

        Args:
            print_every: Optimizer steps between two printed lines, at least 1.
            write: Called with each printed line, so that a run cut short keeps what it recorded.
            earlier: Steps of a run that was cut; kept where this one resumes from a checkpoint, up to its step.
        """
        super().__init__()
        self.earlier = earlier
        self.print_every = print_every
        self.write = write
        self.records: list[dict[str, float]] = []
        self.total_seconds = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        """Start the bar and the clock."""
        super().on_train_begin(args, state, control, **kwargs)
        self.records = [record for record in self.earlier if record["step"] <= state.global_step]
        self.step_started_at = self.train_started_at = time.perf_counter()

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Record one optimizer step and, every `print_every` steps, print the means since the last line."""
        if "reward" not in logs:
            return
        now = time.perf_counter()
        kept = {name: value for name, value in logs.items() if name in RECORDED or is_reward_mean(name)}
        self.records.append({"step": state.global_step, **kept, "wall_seconds": now - self.step_started_at})
        self.step_started_at = now
        self.total_seconds = now - self.train_started_at
        if state.is_world_process_zero and state.global_step % self.print_every == 0:
            self.training_bar.write(self.summary_line())
            self.write(self)

    def summary_line(self) -> str:
        """Mean reward, loss, gradient norm and seconds per step over the last `print_every` steps."""
        recent = self.records[-self.print_every :]
        return (
            f"step {recent[-1]['step']:4d}"
            f"  reward {mean_of(recent, 'reward'):.3f}"
            f"  loss {mean_of(recent, 'loss'):+.4f}"
            f"  grad_norm {mean_of(recent, 'grad_norm'):.3f}"
            f"  {mean_of(recent, 'wall_seconds'):.2f} s/step"
        )

    def first_and_last_reward(self, window: int = 10) -> tuple[float, float]:
        """Mean reward at the two ends of the run.

        Args:
            window: Steps averaged at each end; at most half the run is used, at least one step.

        Returns:
            The mean reward of the first steps and of the last steps.
        """
        window = max(1, min(window, len(self.records) // 2))
        return mean_of(self.records[:window], "reward"), mean_of(self.records[-window:], "reward")


def is_reward_mean(name: str) -> bool:
    """Whether a logged metric is the mean of one reward function."""
    return name.startswith("rewards/") and name.endswith("/mean")


def mean_of(records: list[dict[str, float]], name: str) -> float:
    """Mean of one recorded metric, not a number where no step has it."""
    values = [record[name] for record in records if name in record]
    return sum(values) / len(values) if values else float("nan")


def record_run(trainer: Trainer, print_every: int, folder: Path, arguments: dict) -> RunRecorder:
    """Put a recorder in the place of the trainer's progress bar.

    Args:
        trainer: A trainer that has not started; its callbacks are changed.
        print_every: Optimizer steps between two printed lines and two writes of `rewards.json`.
        folder: Existing folder for `rewards.json`.
        arguments: Command-line arguments of the recipe.

    Returns:
        The recorder, which fills while the trainer runs.
    """
    path = folder / "rewards.json"
    earlier = json.loads(path.read_text())["steps"] if path.exists() else []
    recorder = RunRecorder(print_every, lambda record: write_rewards(path, trainer, record, arguments), earlier)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(recorder)
    return recorder


def write_rewards(path: Path, trainer: Trainer, recorder: RunRecorder, arguments: dict) -> None:
    """Write everything needed to compare two runs.

    Args:
        path: JSON file to write.
        trainer: The trainer that ran; its class name and device are noted.
        recorder: The record of the run.
        arguments: Command-line arguments of the recipe.
    """
    device = trainer.accelerator.device
    run = {
        "trainer": type(trainer).__name__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "num_processes": trainer.accelerator.num_processes,
        "versions": {package: version(package) for package in PACKAGES},
        "arguments": {name: str(value) if isinstance(value, Path) else value for name, value in arguments.items()},
        "train_seconds": recorder.total_seconds,
        "steps": recorder.records,
    }
    path.write_text(json.dumps(run, indent=1) + "\n")


def plot_rewards(path: Path, recorder: RunRecorder, title: str, reward_label: str, window: int = 10) -> None:
    """Draw the reward of every step and its running mean.

    Args:
        path: PNG file to write.
        recorder: The record of the run.
        title: Title of the picture.
        reward_label: Label of the vertical axis, with the reward's meaning.
        window: Steps in the running mean.
    """
    steps = [record["step"] for record in recorder.records]
    rewards = [record["reward"] for record in recorder.records]
    running = [mean_of(recorder.records[max(0, i + 1 - window) : i + 1], "reward") for i in range(len(steps))]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, rewards, color="tab:blue", alpha=0.35, marker=".", label="each step")
    axes.plot(steps, running, color="tab:blue", linewidth=2, label=f"mean of the last {window} steps")
    axes.set(title=title, xlabel="optimizer step", ylabel=reward_label)
    axes.set_ylim(bottom=min(0.0, *rewards))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)


def finish_run(
    folder: Path, trainer: Trainer, recorder: RunRecorder, arguments: dict, title: str, reward_label: str
) -> tuple[float, float]:
    """Write `rewards.json` and `reward.png`, and print the last line of a recipe.

    Args:
        folder: Existing folder to write to.
        trainer: The trainer that ran.
        recorder: The record of the run.
        arguments: Command-line arguments of the recipe.
        title: Title of the picture after the trainer's name.
        reward_label: Label of the picture's vertical axis.

    Returns:
        The mean reward of the first steps and of the last steps.
    """
    picture = folder / "reward.png"
    write_rewards(folder / "rewards.json", trainer, recorder, arguments)
    plot_rewards(picture, recorder, f"{type(trainer).__name__}, {title}", reward_label)
    first, last = recorder.first_and_last_reward()
    num_steps, seconds = len(recorder.records), recorder.total_seconds
    print(f"reward {first:.3f} -> {last:.3f} in {num_steps} steps and {seconds:.1f} s of training, see {picture}")
    return first, last

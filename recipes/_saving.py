"""Shared by the recipes: what is kept of a run, and how it goes on after it was cut."""

import argparse
import shutil
from pathlib import Path

from trl import GRPOTrainer

GIB = 2**30


def add_saving_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--save-steps` and `--resume`.

    Args:
        parser: Of the recipe's command line; it has `--output-dir`.
    """
    parser.add_argument(
        "--save-steps", type=int, default=50, help="optimizer steps between checkpoints, the last is kept; 0: none"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --output-dir")


def saving_settings(arguments: argparse.Namespace) -> dict:
    """Fields of the training arguments; random weights are not worth a checkpoint.

    Args:
        arguments: The parsed command line.
    """
    if arguments.save_steps == 0 or is_of_random_weights(arguments):
        return {"save_strategy": "no"}
    return {"save_strategy": "steps", "save_steps": arguments.save_steps, "save_total_limit": 1}


def train_and_save(trainer: GRPOTrainer, arguments: argparse.Namespace) -> None:
    """Train, from the last checkpoint if that is asked for, and save the model in `model` of the output folder.

    Args:
        trainer: A trainer that has not started.
        arguments: The parsed command line.

    Raises:
        SystemExit: The disk has no room for the checkpoints.
    """
    if trainer.args.save_strategy != "no" and trainer.is_local_process_zero():
        check_disk(arguments.output_dir, checkpoint_bytes(trainer))
    trainer.train(resume_from_checkpoint=arguments.resume or None)
    if not is_of_random_weights(arguments):
        trainer.save_model(str(arguments.output_dir / "model"))


def checkpoint_bytes(trainer: GRPOTrainer) -> int:
    """About what a checkpoint takes: trained weights, and 12 bytes of masters and moments for each.

    Args:
        trainer: A trainer that has not started.
    """
    return sum(p.nbytes + 12 * p.numel() for p in trainer.model.parameters() if p.requires_grad)


def check_disk(folder: Path, nbytes: int) -> None:
    """End where two checkpoints, the last and the one that is being written, and the model do not fit.

    Args:
        folder: Existing folder for the checkpoints.
        nbytes: Of one.

    Raises:
        SystemExit: With the bytes, and what to set.
    """
    kept = sum(file.stat().st_size for file in folder.glob("checkpoint-*/*"))
    free = shutil.disk_usage(folder).free + kept
    if free < 3 * nbytes:
        raise SystemExit(
            f"{folder} has {free / GIB:.0f} GiB free. A checkpoint takes about {nbytes / GIB:.0f} GiB, and one is "
            "deleted only when the next is written. Set --output-dir to a larger disk, or --save-steps 0 to keep the "
            "final model alone."
        )


def is_of_random_weights(arguments: argparse.Namespace) -> bool:
    """Whether the run only shows that a shape fits and how long it takes.

    Args:
        arguments: The parsed command line.
    """
    return getattr(arguments, "shape_only", False)

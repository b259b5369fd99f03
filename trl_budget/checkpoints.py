"""Loads a checkpoint's optimizer state where several ranks share it.

transformers' loader maps the file to each rank's own device when there are several ranks: 12 bytes per parameter onto
every card. Here the file is mapped into host memory, one page cache for all ranks, and each rank copies what it steps.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME


def load_optimizer_and_scheduler(optimizer: Any, scheduler: Any, checkpoint: str) -> None:
    """Loads both where both were saved, as transformers 5.24. Collective.

    Args:
        optimizer: a `HostAdamW`, or Accelerate's wrapper of one.
        scheduler: the learning rate schedule.
        checkpoint: folder.
    """
    optimizer_file, scheduler_file = Path(checkpoint) / OPTIMIZER_NAME, Path(checkpoint) / SCHEDULER_NAME
    if optimizer_file.is_file() and scheduler_file.is_file():
        optimizer.load_state_dict(torch.load(optimizer_file, map_location="cpu", mmap=True, weights_only=True))
        scheduler.load_state_dict(torch.load(scheduler_file, map_location="cpu", weights_only=True))


@contextmanager
def without_optimizer(checkpoint: str) -> Iterator[str]:
    """A folder like `checkpoint` in which stock's loader finds everything but the optimizer's state."""
    with tempfile.TemporaryDirectory() as folder:
        for path in Path(checkpoint).resolve().iterdir():
            if path.name != OPTIMIZER_NAME:
                (Path(folder) / path.name).symlink_to(path)
        yield folder

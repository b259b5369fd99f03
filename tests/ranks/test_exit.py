"""The end of a script whose ranks share an optimizer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("by_script", [(), ("destroy",)], ids=["no group destroyed", "default group destroyed"])
def test_ranks_that_are_done_do_not_die_at_exit(tmp_path: Path, by_script: tuple[str, ...]) -> None:
    """Half of them die by SIGABRT where the groups outlive the interpreter, and a launcher calls the run a failure."""
    script = Path(__file__).with_name("exiting_script.py")
    ended = subprocess.run(
        [sys.executable, str(script), str(tmp_path), "2", *by_script],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.stdout.split() == ["0"] * 8, ended.stderr[-4000:]

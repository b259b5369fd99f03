"""Real vLLM on the CPU, colocated: ours against stock TRL, 0.0 on every weight and every logged metric."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import max_difference

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(torch.cuda.is_available(), reason="runs vLLM's CPU backend, and a CUDA device is visible"),
]
CPU_ENGINE = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1", "TORCHDYNAMO_DISABLE": "1"}


def run(kind: str, folder: Path) -> dict[str, Any]:
    out = folder / f"{kind}.pt"
    script = Path(__file__).with_name("colocated_run.py")
    command = [sys.executable, str(script), kind, str(out)]
    done = subprocess.run(command, env={**os.environ, **CPU_ENGINE}, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(out, weights_only=True)


def test_training_with_colocated_vllm_equals_stock(tmp_path: Path) -> None:
    stock, ours = run("stock", tmp_path), run("ours", tmp_path)
    assert max_difference(ours["weights"], ours["before"]) > 1e-4
    assert ours["log"] == stock["log"]
    assert "sampling/sampling_logp_difference/mean" in ours["log"][0]
    assert max_difference(ours["weights"], stock["weights"]) == 0.0

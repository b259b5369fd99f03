"""Real vLLM on the CPU, colocated: ours against stock TRL, 0.0 on every weight and every logged metric."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_launcher import free_port, rank_environment
from tiny import max_difference

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(torch.cuda.is_available(), reason="runs vLLM's CPU backend, and a CUDA device is visible"),
]
CPU_ENGINE = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1", "TORCHDYNAMO_DISABLE": "1"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("colocated")
    return {kind: run(kind, folder) for kind in ("stock", "ours", "reusing", "packed")}


def test_olmo2_which_vllm_has_no_class_for_trains(tmp_path: Path) -> None:
    """vLLM decorates transformers' class, after which the trainer's own forward fails in stock TRL."""
    olmo2 = run("olmo2", tmp_path)
    assert max_difference(olmo2["weights"], olmo2["before"]) > 1e-4
    assert max(entry["sampling/sampling_logp_difference/mean"] for entry in olmo2["log"][:-1]) < 0.05


def run(kind: str, folder: Path) -> dict[str, Any]:
    out = folder / f"{kind.replace(' ', '-')}.pt"
    script = Path(__file__).with_name("colocated_run.py")
    command = [sys.executable, str(script), kind, str(out)]
    done = subprocess.run(command, env={**os.environ, **CPU_ENGINE}, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(out, weights_only=True)


def run_two(kind: str, folder: Path) -> list[dict[str, Any]]:
    """Two ranks, each with an engine of its own."""
    script, port = Path(__file__).with_name("colocated_run.py"), free_port()
    outs = [folder / f"{kind}-{rank}.pt" for rank in range(2)]
    started = []
    for rank, out in enumerate(outs):
        environment = {**os.environ, **CPU_ENGINE, **rank_environment(rank, 2, 1, port)}
        with out.with_suffix(".log").open("wb") as log:
            command = [sys.executable, str(script), kind, str(out)]
            started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    assert codes == [0, 0], "\n".join(out.with_suffix(".log").read_text()[-3000:] for out in outs)
    return [torch.load(out, weights_only=True) for out in outs]


def test_two_ranks_with_an_engine_each_train_as_stock_s_ddp(tmp_path: Path) -> None:
    stock, ours = run_two("stock", tmp_path), run_two("ours", tmp_path)
    assert max_difference(ours[0]["weights"], ours[0]["before"]) > 1e-4
    for rank in range(2):
        assert ours[rank]["log"] == stock[rank]["log"]
        assert max_difference(ours[rank]["weights"], stock[rank]["weights"]) == 0.0
    assert max_difference(ours[0]["weights"], ours[1]["weights"]) == 0.0


def test_training_with_colocated_vllm_equals_stock(runs: dict[str, dict[str, Any]]) -> None:
    stock, ours = runs["stock"], runs["ours"]
    assert max_difference(ours["weights"], ours["before"]) > 1e-4
    assert ours["log"] == stock["log"]
    assert "sampling/sampling_logp_difference/mean" in ours["log"][0]
    assert max_difference(ours["weights"], stock["weights"]) == 0.0


def test_adapters_train_as_in_stock_and_vllm_has_them_merged(tmp_path: Path) -> None:
    """Every tensor of vLLM is compared after every sync; stock's base has its old bits back after each."""
    stock, ours = run("stock lora", tmp_path), run("lora", tmp_path)
    assert ours["num_verified"] == 3
    assert ours["log"] == stock["log"]
    assert max_difference(ours["weights"], stock["weights"]) == 0.0
    moved = {name for name, value in ours["weights"].items() if not torch.equal(value, ours["before"][name])}
    assert moved and all(".lora_" in name for name in moved)


def test_reusing_old_logprobs_halves_the_forwards_and_changes_no_weight(runs: dict[str, dict[str, Any]]) -> None:
    stock, reusing = runs["stock"], runs["reusing"]
    rows = stock["forwards"][0]  # other shapes are trial forwards
    assert (stock["forwards"].count(rows), reusing["forwards"].count(rows)) == (6, 3)
    assert max_difference(reusing["weights"], stock["weights"]) == 0.0
    for ours_entry, stock_entry in zip(reusing["log"], stock["log"], strict=True):
        assert ours_entry == pytest.approx(stock_entry, rel=1.2e-7, abs=1e-9), "means are summed in another order"


def test_packed_passes_within_a_budget_train_as_stock(runs: dict[str, dict[str, Any]]) -> None:
    stock, packed = runs["stock"], runs["packed"]
    assert max(rows * columns for rows, columns in packed["forwards"]) <= 60
    assert 0.0 < max_difference(packed["weights"], stock["weights"]) < 5e-3
    assert packed["log"][0] == pytest.approx(stock["log"][0], rel=1e-5, abs=1e-5)

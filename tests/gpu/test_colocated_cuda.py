"""Colocated vLLM on a card, one engine a process: weights, memory, gradients and refusals. About eleven minutes.

The card has to be free: a budget counts what other processes hold, other tests' too. One program alone:
`pytest tests/gpu/test_colocated_cuda.py -k NAME`, NAME as in `colocated_program.PROGRAMS`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from rank_launcher import free_port, rank_environment
from tiny import max_difference

sys.path.insert(0, str(Path(__file__).parent))
import colocated_program as program

pytestmark = [pytest.mark.gpu, pytest.mark.vllm]
MIB = 2**20
SECONDS = 240
ENGINE = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
LARGE = ("sharing", "copying", "budget_copying", "adapters")
# A tie: each of two engines may be off by the rounding of bf16 in each of two logits.
ROUNDINGS_OF_A_TIE = 4
Run = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """What a program returned; each is run once."""
    folder = tmp_path_factory.mktemp("colocated")
    done: dict[str, dict[str, Any] | str] = {}

    def result(name: str) -> dict[str, Any]:
        if name not in done:
            try:
                done[name] = run_alone(name, folder)
            except AssertionError as error:
                done[name] = str(error)
        found = done[name]
        assert not isinstance(found, str), found
        return found

    return result


def saved_model(folder: Path, shape: str) -> Path:
    path = folder / shape
    return path if path.exists() else program.save_model(path, shape)


def run_alone(name: str, folder: Path) -> dict[str, Any]:
    model = saved_model(folder, "large" if name in LARGE else "tiny")
    return finish(start(name, model, folder / f"{name}.pt", {}), name)


def start(name: str, model: Path, out: Path, environment: dict[str, str]) -> tuple[subprocess.Popen[bytes], Path]:
    command = [sys.executable, program.__file__, name, str(model), str(out)]
    with out.with_suffix(".log").open("wb") as log:
        environment = {**os.environ, **ENGINE, **environment}
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT), out


def finish(started: tuple[subprocess.Popen[bytes], Path], name: str) -> dict[str, Any]:
    process, out = started
    began = time.monotonic()
    try:
        code: int | None = process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        code = None
    log = out.with_suffix(".log").read_text(errors="replace")[-6000:]
    assert code == 0, f"{name} {'ended with ' + str(code) if code else f'did not end in {SECONDS} s'}:\n{log}"
    print(f"{name}: {time.monotonic() - began:.0f} s")
    return torch.load(out, weights_only=False)


@pytest.mark.parametrize("way", ["sharing", "copying"])
def test_greedy_completions_are_those_of_the_present_weights_after_each_update(way: str, run: Run) -> None:
    figures = run(way)
    assert figures["settings"]["share_vllm_weights"] == ("on" if way == "sharing" else "off")
    assert figures["settings"]["park_policy_during_rollout"] == "on"
    assert len(figures["present"]) == 5
    for gaps, rounding in zip(figures["present"], figures["rounding"], strict=True):
        assert max(gaps) <= ROUNDINGS_OF_A_TIE * rounding, gaps
    ties = [gap for gaps in figures["present"] for gap in gaps if gap > 0.0]
    num_tokens = sum(map(len, figures["present"]))
    # Two engines round where one does against fp32: 1.4 times the error, and so 1.4 times the changes.
    assert len(ties) <= 2 * sum(figures["num_changed_by_rounding"]) + 0.02 * num_tokens, ties
    of_stale = mean(gap > 0.0 for gap in figures["stale"][1])
    assert 2 * len(ties) / num_tokens < of_stale, "the updates are too small to tell weights apart"
    assert max(figures["gap"]) < 0.2, figures["gap"]


@pytest.mark.parametrize("way", ["sharing", "copying"])
def test_every_sync_is_verified_and_passes(way: str, run: Run) -> None:
    assert run(way)["num_verified"] >= 10


def test_while_vllm_is_awake_the_policy_is_off_the_card_copying(run: Run) -> None:
    figures = run("copying")
    for awake in figures["awake"]:
        assert awake["policy_bytes"] < 64 * MIB
        assert awake["used_with_policy"] - awake["used"] >= awake["weight_bytes"] - 64 * MIB
        assert awake["used_again"] - awake["used"] < 64 * MIB
    first = figures["awake"][0]["used"]
    assert first - figures["used_when_adopted"] < figures["weight_bytes"] / 2, "more than kernels was loaded"


@pytest.mark.parametrize("way", ["sharing", "copying"])
def test_ten_rollouts_do_not_grow_the_use_of_the_card(way: str, run: Run) -> None:
    for used in run(way)["cycles"].values():
        assert len(used) == 10
        assert max(used) - used[0] < 16 * MIB, used


@pytest.mark.parametrize("way", ["sharing", "copying"])
def test_a_policy_that_was_saved_loads_in_stock_key_by_key(way: str, run: Run) -> None:
    figures = run(way)
    saved, original = figures["keys"]
    assert saved == original
    assert figures["loaded"] == 0.0


def test_saving_shared_weights_adds_less_than_64_mib_on_the_card_sharing(run: Run) -> None:
    assert run("sharing")["save_added_bytes"] < 64 * MIB


def test_a_stale_engine_is_found(run: Run) -> None:
    figures = run("stale")
    assert "log-probs of vLLM" in figures["error"]
    assert figures["step"] == 1


def test_a_reference_that_follows_the_policy_is_the_policy_and_parked(run: Run) -> None:
    figures = run("reference")
    assert figures["settings"]["share_vllm_weights"] == "on"
    assert figures["num_values"] > 10 and figures["is_parked"]
    assert figures["difference"] == 0.0
    assert max(figures["kl"]) < 0.01


def test_gradients_of_two_runs_are_equal_gradients(run: Run) -> None:
    """The control of the next test."""
    runs = [run(name)["steps"] for name in ("gradients_resident", "gradients_resident_again")]
    assert [max_difference(again, first) for first, again in zip(*runs, strict=True)] == [0.0] * 3


@pytest.mark.parametrize("way", ["sharing", "copying"])
def test_gradients_equal_those_of_a_policy_that_stays_gradients(way: str, run: Run) -> None:
    resident, other = run("gradients_resident"), run(f"gradients_{way}")
    assert resident["settings"]["park_policy_during_rollout"] == "off"
    assert other["settings"]["park_policy_during_rollout"] == "on"
    assert len(resident["steps"]) == len(other["steps"]) == 3
    assert all(bool(value.any()) for step in resident["steps"] for value in step.values())
    pairs = zip(resident["steps"], other["steps"], strict=True)
    assert [max_difference(ours, expected) for expected, ours in pairs] == [0.0] * 3


def test_an_update_may_allocate_up_to_the_budget_beside_a_sleeping_cache_budget(run: Run) -> None:
    figures = run("budget")
    assert figures["asleep"] > 9 * program.GIB
    assert figures["asleep"] + figures["left"] > 16 * program.GIB, "the pool alone left room for all that was tried"
    assert figures["fits"] and not figures["overruns"]


def test_a_breach_of_the_budget_raises_budget(run: Run) -> None:
    figures = run("budget")
    assert "device_memory_budget is 16.00 GiB" in figures["breach"]
    assert max(value for phase, value in figures["peaks"].items() if phase != "update") <= 16 * program.GIB


def test_a_policy_that_is_copied_comes_back_beside_what_sleeps_within_the_budget(run: Run) -> None:
    figures = run("budget_copying")
    assert figures["settings"]["share_vllm_weights"] == "off"
    assert figures["steps"] == 2
    assert figures["awake_together"] > 16 * program.GIB, "all would fit awake"
    assert max(figures["peaks"].values()) <= 16 * program.GIB


@pytest.mark.parametrize("given", ["string", "module"])
def test_a_high_utilization_starts_and_a_higher_one_is_refused_before_an_engine_is_built(given: str, run: Run) -> None:
    figures = run(f"utilization_{given}")
    assert "vllm_gpu_memory_utilization=0.999 asks for" in figures["error"]
    assert "Set vllm_gpu_memory_utilization=0.9" in figures["error"]
    assert figures["num_engines_then"] == 0
    assert figures["steps"] == 2
    assert figures["used"] > 0.75


def test_adapters_are_merged_a_layer_at_a_time_and_the_base_keeps_its_bits_adapters(run: Run) -> None:
    figures = run("adapters")
    assert figures["settings"]["park_policy_during_rollout"] == "on"
    assert figures["moved"] and all(".lora_" in name for name in figures["moved"])
    assert figures["num_verified"] >= 3
    assert len(figures["merge_bytes"]) == 2 * figures["num_verified"]  # loaded, and compared
    assert max(figures["merge_bytes"]) < figures["weight_bytes"] / 10
    assert max(figures["gap"]) < 0.1


def test_two_ranks_with_adapters_under_ddp_stay_equal_two_ranks(tmp_path: Path) -> None:
    model, port = saved_model(tmp_path, "tiny"), free_port()
    # LOCAL_RANK picks the card: both use the first.
    shared = {"LOCAL_RANK": "0", "ACCELERATE_USE_CPU": "false"}
    started = [
        start("two_ranks", model, tmp_path / f"rank{rank}.pt", rank_environment(rank, 2, 1, port) | shared)
        for rank in range(2)
    ]
    try:
        first, second = (finish(process, f"rank {rank}") for rank, process in enumerate(started))
    finally:
        for process, _ in started:
            process.kill()
    assert first["backend"] == "gloo" and first["wrapped"] == "DistributedDataParallel"
    assert first["settings"]["park_policy_during_rollout"] == "on"
    assert first["asleep"] == ["kv_cache", "weights"]
    assert len(first["history"]) == 3
    for ours, theirs in zip(first["history"], second["history"], strict=True):
        assert max_difference(ours, theirs) == 0.0
    assert max_difference(first["history"][0], first["history"][2]) > 1e-4
    assert max(first["gap"]) < 0.1

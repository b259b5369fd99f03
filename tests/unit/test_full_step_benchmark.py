"""The logic of `benchmarks/full_step.py`: clocks that nest, samples, summaries, arguments, a file that grows."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from argparse import Namespace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from trl import GRPOConfig

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import full_step
import step_figures

from trl_budget import BudgetGRPOConfig
from trl_budget.upstream_model import _SCORING_METHODS


class Seconds:
    """A clock whose every reading is given."""

    def __init__(self, *readings: float) -> None:
        self._readings = iter(readings)

    def __call__(self) -> float:
        return next(self._readings)


def arguments(tmp_path: Path, **changed: Any) -> Namespace:
    settings = {
        "workload": "equal",
        "rows": None,
        "scale": 1.0,
        "steps": 2,
        "set": [],
        "generation_only": False,
        "eos_bias": full_step.EOS_BIAS,
        "launch": None,
        "shape": "tiny",
        "commit": "c",
        "output": tmp_path / "results" / "full_step.json",
    }
    return Namespace(**{**settings, **changed})


def test_a_phase_inside_another_stops_the_outer_clock() -> None:
    clock = step_figures.PhaseClock(Seconds(0, 1, 3, 4, 9, 11, 12, 20))
    clock.start_step()
    with clock.inside("update"), clock.inside("scoring"), clock.inside("generation"):
        pass
    clock.end_step()
    assert clock.steps == [{"update": 2 + 1, "scoring": 1 + 2, "generation": 5, "total": 20, "other": 9}]


def test_a_phase_is_closed_by_an_error_and_counts_in_its_step_only() -> None:
    clock = step_figures.PhaseClock(Seconds(0, 1, 2, 3, 10, 11, 12, 13))
    clock.start_step()
    with pytest.raises(KeyError), clock.inside("update"):
        raise KeyError
    clock.end_step()
    clock.start_step()
    with clock.inside("sync"):
        pass
    clock.end_step()
    assert clock.steps == [{"update": 1, "total": 3, "other": 2}, {"sync": 1, "total": 3, "other": 2}]


def test_the_sampler_forgets_the_step_before() -> None:
    sampler = step_figures.CardSampler(Seconds(7, 3, 5))
    assert sampler.restart() == 7
    sampler.peak = 4
    assert sampler.restart() == 4
    assert sampler.restart() == 5


def test_timing_overrides_nothing_that_turns_a_lever_off() -> None:
    assert not set(_SCORING_METHODS) & vars(step_figures.TimedPhases).keys()


def test_the_first_step_counts_for_peaks_only() -> None:
    rows = [
        {"total_seconds": 100.0, "peak_card_gib": 9.0, "sampling_gap": 0.1},
        {"total_seconds": 10.0, "peak_card_gib": 5.0, "sampling_gap": None},
        {"total_seconds": 14.0, "peak_card_gib": 6.0, "sampling_gap": 0.3},
    ]
    assert step_figures.summary(rows) == {"total_seconds": 12.0, "peak_card_gib": 9.0, "sampling_gap": 0.3}


def test_workloads_are_those_of_the_docstring(tmp_path: Path) -> None:
    equal = full_step.workload_of(arguments(tmp_path))
    assert (equal.rows, equal.max_completion, equal.generation_kwargs) == (64, 1024, {"ignore_eos": True})
    natural = full_step.workload_of(arguments(tmp_path, workload="natural"))
    assert (natural.rows, natural.max_completion) == (128, 4096)
    assert natural.generation_kwargs == {"logit_bias": {full_step.EOS: 5.6}}
    assert full_step.key_of("ours", arguments(tmp_path, workload="natural")) == "natural/ours"
    assert full_step.key_of("ours", arguments(tmp_path, workload="natural", eos_bias=5.0)) == "natural/ours/eos_bias=5"
    launched = arguments(tmp_path, launch=Path("accelerate_configs/ddp_2gpu_pcie.yaml"))
    assert full_step.key_of("ours", launched) == "equal/ours/launch=ddp_2gpu_pcie"
    assert full_step.tokenizer().eos_token_id == full_step.EOS
    assert full_step.workload_of(arguments(tmp_path, workload="natural", rows=64)).rows == 64


def test_a_prompt_has_150_tokens_and_no_beginning_in_common_with_the_next() -> None:
    texts = full_step.prompts(64)["prompt"]
    assert len(texts) == 8 and len({text[:6] for text in texts}) == 8
    assert {len(full_step.tokenizer()(text)["input_ids"]) for text in texts} == {150}


@pytest.mark.parametrize("name", list(full_step.MODES))
def test_every_mode_has_a_config_and_stock_gets_stock_s(name: str, tmp_path: Path) -> None:
    mode = full_step.MODES[name]
    args = arguments(tmp_path, set=["vllm_gpu_memory_utilization=0.5", "padding_free=off"])
    config = full_step.training_arguments(mode, args, str(tmp_path))
    assert type(config) is (BudgetGRPOConfig if mode.is_ours else GRPOConfig)
    assert config.per_device_train_batch_size * config.gradient_accumulation_steps == 64
    assert config.max_steps == 3
    assert config.vllm_max_model_length >= 1024 + 150
    if mode.is_ours:
        assert config.padding_free == "off"
        ours = {key: vars(config)[key] for key in mode.settings if not key.startswith(("vllm_", "padding"))}
        assert ours == {key: mode.settings[key] for key in ours}


def test_the_arc_turns_on_one_lever_after_the_other() -> None:
    levers = ("optimizer_placement", "padding_free", "reuse_old_logprobs", "park_policy_during_rollout")
    arc = ["all_off", "host_step", "packing", "reuse", "parking", "ours"]
    chosen = [{key for key in full_step.MODES[name].settings if not key.startswith("vllm_")} for name in arc]
    for before, after in pairwise(chosen):
        assert after < before
    assert set(levers) <= chosen[0] and not chosen[-1]


def test_a_file_grows_and_keeps_what_other_settings_gave(tmp_path: Path) -> None:
    first = arguments(tmp_path)
    full_step.write(first, "ours", {"total_seconds": 1.0})
    full_step.write(arguments(tmp_path, set=["padding_free=off"]), "ours", {"total_seconds": 2.0})
    full_step.write(arguments(tmp_path, rows=64, workload="natural"), "ours", {"error": "out of memory"})
    full_step.write(first, "ours", {"total_seconds": 3.0})
    modes = json.loads(first.output.read_text())["modes"]
    assert modes["equal/ours"]["total_seconds"] == 3.0
    assert modes["equal/ours/padding_free=off"]["total_seconds"] == 2.0
    assert modes["natural/ours/rows=64"]["error"] == "out of memory"


def test_a_launcher_ends_with_the_ranks_that_it_started_in_sessions_of_their_own() -> None:
    rank = "import subprocess, sys; print(subprocess.Popen(['sleep', '60'], start_new_session=True).pid, flush=True)"
    command = [sys.executable, "-c", f"{rank}; import time; time.sleep(60)"]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    started = psutil.Process(int(launcher.stdout.readline()))
    full_step.end_with_children(launcher.pid)
    assert launcher.wait(10) == -signal.SIGKILL
    psutil.wait_procs([started], timeout=10)
    assert not started.is_running() or started.status() == psutil.STATUS_ZOMBIE
    full_step.end_with_children(launcher.pid)  # which is gone


def test_the_error_of_a_rank_is_shown_and_not_its_launcher_s() -> None:
    shown = step_figures.line("equal/ours", {"error": "exit 1\nOutOfMemoryError: no room\n=======\n"})
    assert "OutOfMemoryError: no room" in shown


def test_a_mode_that_failed_shows_its_last_line() -> None:
    shown = step_figures.line("equal/stock", {"error": "exit 1\nTraceback\nOutOfMemoryError: no room\n"})
    assert "FAILED" in shown and "OutOfMemoryError: no room" in shown and "\n" not in shown

"""The logic of `benchmarks/context.py`: rows of a length, configs, the line and its longest row, a file that grows."""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from trl import GRPOConfig

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import context
import context_figures
import context_modes
import plot_context

from trl_budget import BudgetGRPOConfig
from trl_budget.errors import DeviceMemoryError, SettingsError


@pytest.fixture(autouse=True)
def _collect_trainers() -> object:
    """Runs build trainers, which must not own what the next one trains."""
    yield
    gc.collect()


KNOWS_LEVERS = context_modes.LEVERS_OFF.keys() <= {field.name for field in dataclasses.fields(BudgetGRPOConfig)}
needs_levers = pytest.mark.skipif(not KNOWS_LEVERS, reason="BudgetGRPOConfig has no levers for long rows")
GIB = 2**30


def job(mode: str, **changed: Any) -> context.Job:
    return context.Job(**{"mode": mode, "shape": "tiny", "lengths": [64, 32], "repeats": 2, "chosen": []} | changed)


def peaks(**gib_by_tokens: float) -> list[dict[str, Any]]:
    times = {"forward_backward_seconds": 1.0, "update_seconds": 2.0, "loss": 0.0, "grad_norm": 1.0}
    return [
        {
            "tokens": int(name[1:]),
            "peak_allocated_gib": gib,
            "peak_reserved_gib": gib + 2,
            "card_gib": gib + 2.75,
            **times,
        }
        for name, gib in gib_by_tokens.items()
    ]


def at_step(number: int) -> Any:
    return Namespace(state=Namespace(global_step=number))


# Rollouts


def test_every_step_has_two_rows_of_its_length_shortest_first() -> None:
    rollouts = context_modes.RowsByLength([300, 500], repeats=2)
    made = [rollouts(["a", "b"], at_step(step)) for step in range(4)]
    tokens = [
        [len(p) + len(c) for p, c in zip(step["prompt_ids"], step["completion_ids"], strict=True)] for step in made
    ]
    assert tokens == [[300, 300], [300, 300], [500, 500], [500, 500]]
    assert len(made[0]["prompt_ids"][0]) == 150
    assert made[0]["prompt_ids"][0] == made[0]["prompt_ids"][1]
    assert made[0]["completion_ids"][0] != made[0]["completion_ids"][1]


def test_a_row_of_65536_tokens_meets_no_limit_of_the_tokenizer() -> None:
    row = context_modes.RowsByLength([65_536], 1)(["a", "b"], at_step(0))["completion_ids"][0]
    tokenizer = context.tokenizer()
    assert tokenizer.model_max_length > 65_536
    assert max(row) < len(tokenizer) and min(row) >= 2  # neither padding nor the end of a text
    assert len(tokenizer.decode(row)) > 30_000


# Configs


def test_stock_gets_stock_s_config_with_passes_of_one_row(tmp_path: Path) -> None:
    config = job("stock_lora", chosen=["padding_free=off"]).config(str(tmp_path))
    assert type(config) is GRPOConfig
    assert (config.per_device_train_batch_size, config.gradient_accumulation_steps, config.num_generations) == (
        1,
        2,
        2,
    )
    assert (config.max_steps, config.max_completion_length) == (4, 64)
    assert config.gradient_checkpointing


@needs_levers
@pytest.mark.parametrize("name", [name for name, mode in context_modes.MODES.items() if mode.is_ours])
def test_every_mode_of_ours_gets_its_levers_and_passes_of_one_row(name: str, tmp_path: Path) -> None:
    config = job(name).config(str(tmp_path))
    assert config.max_tokens_per_microbatch == 32
    chosen = (config.activation_offload, config.tiled_mlp, config.attention_head_groups)
    levers = {"off": ("off", "off", "off"), "offload_tiles": ("on", 32, "off"), "all": ("on", 32, 1)}
    assert chosen == levers[context_modes.MODES[name].levers]


def test_a_field_that_the_config_does_not_know_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no telepathy"):
        job("stock_lora", chosen=["telepathy=on"]).config(str(tmp_path))


def test_set_takes_numbers_booleans_none_and_text() -> None:
    assert [context_modes.parsed(text) for text in ("8192", "False", "None", "on")] == [8192, False, None, "on"]


# Figures


def test_the_line_goes_through_the_rows_from_8192_tokens() -> None:
    rows = peaks(_4096=40.0, _8192=10.0, _16384=12.0, _32768=16.0)
    line = context_figures.line_of(rows)
    assert line["slope_gib_per_1000_tokens"] == pytest.approx(1000 * 2 / 8192)
    assert line["intercept_gib"] == pytest.approx(8.0)
    assert line["worst_error_gib"] == pytest.approx(0.0, abs=1e-9)


def test_rows_without_memory_do_not_bend_the_line() -> None:
    rows = peaks(_8192=10.0, _16384=12.0)
    failed = {"tokens": 32_768, "peak_allocated_gib": 12.5, "card_gib": 13.0, "error": "out of memory"}
    assert context_figures.line_of([*rows, failed]) == context_figures.line_of(rows)
    assert context_figures.line_of([{"tokens": 8192, "peak_allocated_gib": None}] * 2) == {}


def test_the_longest_row_leaves_room_for_what_is_outside_torch() -> None:
    rows = peaks(_8192=10.0, _16384=12.0)
    figures = {"rows": rows, **context_figures.line_of(rows)}
    assert context_figures.longest_row(figures, 24.0) == pytest.approx((24 - 0.75 - 8) * 4096, abs=2)
    assert context_figures.longest_row(figures, 8.0) == 0
    assert context_figures.longest_row({"rows": rows}, 24.0) is None


def test_beyond_the_longest_row_the_steepest_of_what_is_known_counts() -> None:
    rows = peaks(_8192=10.0, _16384=10.1, _32768=14.0)  # the last part: 3.9 GiB in 16,384 tokens
    figures = {"rows": rows, **context_figures.line_of(rows)}
    assert figures["last_slope_gib_per_1000_tokens"] == pytest.approx(1000 * 3.9 / 16_384)
    room = 24 - 0.75 - 14
    assert context_figures.longest_row(figures, 24.0) == pytest.approx(32_768 + room / 3.9 * 16_384, abs=2)
    figures["predicted_bytes_per_token"] = 2**20
    assert context_figures.longest_row(figures, 24.0) == pytest.approx(32_768 + 1024 * room, abs=2)


def test_a_length_shows_its_last_times_and_its_highest_peak() -> None:
    samples = [
        {"peak_allocated_gib": 9.0, "peak_reserved_gib": 9.5, "card_gib": 9.9, "update_seconds": 3.0, "loss": 0.1},
        {"peak_allocated_gib": 8.0, "peak_reserved_gib": 9.6, "card_gib": 9.8, "update_seconds": 1.0, "loss": 0.2},
    ]
    row = context_figures.row_of(64, samples)
    assert (row["tokens"], row["peak_allocated_gib"], row["peak_reserved_gib"], row["card_gib"]) == (64, 9.0, 9.6, 9.9)
    assert (row["update_seconds"], row["loss"]) == (1.0, 0.2)


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("no"), True),
        (DeviceMemoryError("In phase 'update' the card holds"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling"), True),
        (RuntimeError("shape mismatch"), False),
    ],
)
def test_only_a_lack_of_memory_counts_as_one(error: Exception, is_memory: bool) -> None:
    assert context_figures.is_out_of_memory(error) == is_memory


# Runs


def test_a_mode_of_stock_runs_all_lengths_with_gradients_that_are_not_zero() -> None:
    kept: list[int] = []
    figures = context.run_job(job("stock_lora"), lambda so_far: kept.append(len(so_far["rows"])))
    assert [row["tokens"] for row in figures["rows"]] == [32, 64]
    assert [len(row["samples"]) for row in figures["rows"]] == [2, 2]
    assert kept == [1, 1, 2, 2]
    assert all(row["grad_norm"] > 1e-3 and row["peak_allocated_gib"] is None for row in figures["rows"])
    assert all(row["update_seconds"] >= row["forward_backward_seconds"] > 0 for row in figures["rows"])


@needs_levers
@pytest.mark.parametrize("name", [name for name, mode in context_modes.MODES.items() if mode.is_ours])
def test_every_mode_of_ours_runs_and_has_stock_s_gradient(name: str) -> None:
    stock = "stock_lora" if context_modes.MODES[name].is_lora else "stock_full_bf16"
    ours, stock_rows = (context.run_job(job(mode, repeats=1), lambda _: None)["rows"] for mode in (name, stock))
    for row, stock_row in zip(ours, stock_rows, strict=True):
        assert row["grad_norm"] == pytest.approx(stock_row["grad_norm"], rel=2e-2)  # bf16


def test_a_length_that_runs_out_of_memory_is_recorded_and_ends_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(context_modes.RowsByLength):
        def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
            if trainer.state.global_step == 3:
                raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
            return super().__call__(prompts, trainer)

    monkeypatch.setattr(context, "RowsByLength", Full)
    rows = context.run_job(job("stock_lora", lengths=[32, 64, 128]), lambda _: None)["rows"]
    assert [row["tokens"] for row in rows] == [32, 64]
    assert rows[1]["error"] == "out of memory" and "2.00 GiB" in rows[1]["message"]


def test_a_trainer_that_does_not_fit_is_its_shortest_length(monkeypatch: pytest.MonkeyPatch) -> None:
    def build_trainer(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room for the weights")

    monkeypatch.setattr(context, "build_trainer", build_trainer)
    rows = context.run_job(job("stock_lora"), lambda _: None)["rows"]
    assert [(row["tokens"], row["error"]) for row in rows] == [(32, "out of memory")]


def test_a_mode_that_takes_too_long_keeps_what_it_has_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "slow.py"
    rows = [{"tokens": 32, "peak_allocated_gib": None}]
    script.write_text(
        "import json, pathlib, sys, time\n"
        f"pathlib.Path(sys.argv[-1]).write_text(json.dumps({{'rows': {rows!r}}}).replace('None', 'null'))\n"
        "time.sleep(60)\n"
    )
    monkeypatch.setattr(context, "__file__", str(script))
    figures = context.run_alone(job("stock_lora"), limit=2.0)
    assert figures["rows"] == rows and figures["error"].startswith("took longer than 2 s")


# Files and command lines


def test_a_file_grows_and_keeps_what_other_settings_gave(tmp_path: Path) -> None:
    args = Namespace(output=tmp_path / "results" / "context.json", shape="tiny", commit="c")
    for changed in ({}, {"budget": "16GiB"}, {"chosen": ["lm_head_chunk_size=8192"]}, {"workload_w": True}):
        key = context.key_of(job("ours_full", **changed))
        context.write(args, key, {"rows": peaks(_8192=1.0), "error": "no such run"})
    context.write(args, context.key_of(job("ours_full"), card=16), {"rows": []})
    assert list(json.loads(args.output.read_text())["modes"]) == [
        *("ours_full", "ours_full/budget=16GiB", "ours_full/lm_head_chunk_size=8192", "w/ours_full"),
        "ours_full/card=16",
    ]


def fit_arguments(tmp_path: Path, **changed: Any) -> Namespace:
    settings = {"output": tmp_path / "context.json", "shape": "tiny", "commit": "c", "modes": ["ours_full"]}
    settings |= {"lengths": [32], "repeats": 1, "set": [], "budget": None, "workload_w": False, "scale": 1.0}
    return Namespace(**{**settings, "limit": 1.0, "fit": [16, 24], **changed})


def test_a_fit_runs_each_card_at_95_percent_of_the_prediction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = fit_arguments(tmp_path, budget="card")
    rows = peaks(_8192=10.0, _16384=12.0)
    context.write(args, "ours_full", {"rows": rows, **context_figures.line_of(rows)})
    started: list[context.Job] = []
    monkeypatch.setattr(context, "run_alone", lambda run, limit: started.append(run) or {"rows": []})
    context.fit(args)
    assert [run.budget for run in started] == ["15.5GiB", "23.0GiB"]
    predicted = (15.5 - 0.75 - 8) * 4096
    assert 0.94 * predicted < started[0].lengths[0] <= 0.95 * predicted
    assert started[0].lengths[0] % 256 == 0
    modes = json.loads(args.output.read_text())["modes"]
    assert modes["ours_full/card=16"]["predicted_tokens"] == pytest.approx(predicted, abs=2)


def test_a_failure_does_not_replace_figures(tmp_path: Path) -> None:
    args = fit_arguments(tmp_path)
    context.write(args, "ours_full", {"rows": peaks(_8192=10.0)})
    context.write(args, "ours_full", {"rows": [], "error": "took longer than 9 s"})
    modes = json.loads(args.output.read_text())["modes"]
    assert modes["ours_full"]["rows"] and modes["ours_full/failed"]["error"]


def test_a_fit_without_a_line_says_what_to_measure(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="Measure the mode first"):
        context.fit(fit_arguments(tmp_path))


def test_a_plot_shows_peaks_caps_and_the_length_that_did_not_fit(tmp_path: Path) -> None:
    failed = {"tokens": 32_768, "peak_allocated_gib": 30.0, "card_gib": 31.0, "error": "out of memory"}
    modes = {
        "stock_full_bf16": {"rows": [*peaks(_8192=25.0, _16384=29.0), failed]},
        "ours_full_all": {"rows": peaks(_8192=9.0, _16384=9.5, _32768=10.5)},
        "ours_full_all/card=16": {"rows": peaks(_65536=12.0)},
        "ours_full_all/card=24": {"rows": []},
    }
    axes = plot_context.draw(modes, ["stock_full_bf16", "ours_full_all"]).axes[0]
    drawn = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
    assert drawn["stock TRL, all weights (bf16 Adam)"] == [25.0, 29.0]
    assert drawn["ours, all weights, all levers"] == [9.0, 9.5, 10.5]
    assert drawn["within a card's budget"] == [14.75]
    assert {text.get_text().strip() for text in axes.texts} >= {"16 GB", "24 GB", "48 GB", "out of memory"}

"""The prediction that sets the automatic token budget, against peaks measured on one H200."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trl_budget.activation_memory import RESERVE_BYTES, ModelShape, tokens_that_fit

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
GIB = 2**30
NUM_PARAMETERS = 4_022_468_096
QWEN3_4B = ModelShape(
    num_layers=36,
    hidden=2560,
    intermediate=9728,
    query_width=4096,
    key_width=1024,
    vocabulary=151936,
    element_bytes=2,
    checkpoints=True,
)


def measured_peak(mode: str) -> tuple[float, float]:
    """Peak in GiB after the first step, and tokens of a pass of workload W."""
    batch = json.loads((RESULTS / "packed_update.json").read_text())["modes"][mode]["w"]
    assert batch["gradient_checkpointing"]
    return max(batch["peak_allocated_gib"][1:]), batch["tokens_run"] / batch["passes"]


@pytest.mark.parametrize(
    ("mode", "copies"),
    [
        pytest.param("packed_device", 4, id="weights, gradients and two moments in bf16"),
        pytest.param("auto", 2, id="weights and gradients in bf16"),
    ],
)
def test_the_predicted_peak_is_at_or_above_the_measured_one_and_not_far_off(mode: str, copies: int) -> None:
    peak, tokens = measured_peak(mode)
    static = copies * 2 * NUM_PARAMETERS
    predicted = (static + tokens * QWEN3_4B.bytes_per_token + QWEN3_4B.head_bytes) / GIB
    assert peak <= predicted
    assert predicted - static / GIB < 2.5 * (peak - static / GIB)


def test_the_prediction_holds_where_gradients_leave_during_backward() -> None:
    ours = json.loads((RESULTS / "update_phase_pool.json").read_text())["ours"]["ours"]
    peak, (_, tokens) = max(ours["peak_allocated_gib"]), measured_peak("auto")
    predicted = (2 * NUM_PARAMETERS + tokens * QWEN3_4B.bytes_per_token + QWEN3_4B.head_bytes) / GIB
    assert peak <= predicted <= 1.1 * peak


def test_what_fits_leaves_room_for_the_head_and_the_reserve() -> None:
    free = RESERVE_BYTES + QWEN3_4B.head_bytes + 1000 * QWEN3_4B.bytes_per_token
    assert tokens_that_fit(free, 0, QWEN3_4B) == 1000
    assert tokens_that_fit(free, QWEN3_4B.bytes_per_token, QWEN3_4B) == 999
    assert tokens_that_fit(0, 0, QWEN3_4B) == 0

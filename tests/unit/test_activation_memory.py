"""The prediction that sets the automatic token budget, against peaks measured on one H200 and tensors counted here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from live_tensors import LiveTensors
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from trl.kernels.chunked_logprob import ChunkedLogProbFunction

from trl_budget.activation_memory import (
    ATTENTION,
    FINISH,
    HEAD,
    LAYER,
    PROJECT,
    RESERVE_BYTES,
    MemoryLevers,
    ModelShape,
    allocatable_bytes,
    memory_rows,
    moments,
    offloaded_bytes_per_token,
    tokens_that_fit,
)

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


# Levers

NONE = MemoryLevers()
ALL = MemoryLevers(offload=True, tile_tokens=2048, num_head_groups=8)


def moment_bytes(levers: MemoryLevers, name: str) -> int:
    return next(moment.bytes_per_token for moment in moments(QWEN3_4B, levers) if moment.moment == name)


def test_a_layer_without_levers_holds_what_it_did_before_there_were_any() -> None:
    assert moments(QWEN3_4B, NONE)[0].moment == LAYER
    assert moment_bytes(NONE, LAYER) == QWEN3_4B.bytes_per_token
    assert all(moment.fixed_bytes == 0 for moment in moments(QWEN3_4B, NONE))


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        # By hand: four of 5,120 for x, the next x, dy and dx; q, k, v 12,288; out and dout 8,192 each; log-sum-exp 32
        # times 4; rotary 512. Attention's backward: dq 16,384 in fp32 and 8,192, dk and dv 16,384 expanded and 4,096.
        (None, 20_480 + 12_288 + 16_384 + 128 + 512 + 45_056),
        (1, 20_480 + 12_288 + 16_384 + 128 + 512 + 45_056),
        (8, 20_480 + 12_288 + 16_384 + 128 + 512 + 5_632),
    ],
)
def test_attentions_backward_holds_one_group_beside_what_all_layers_hold(groups: int | None, expected: int) -> None:
    assert moment_bytes(MemoryLevers(True, 2048, groups), ATTENTION) == expected


def test_tiles_run_beside_what_attention_left_and_then_beside_its_gradients_alone() -> None:
    assert moment_bytes(ALL, FINISH) == 20_480 + 12_288 + 16_384 + 128 + 512
    assert moment_bytes(ALL, PROJECT) == 20_480 + 12_288 + 512


def test_with_all_levers_a_token_of_a_layer_is_below_62_kilobytes() -> None:
    layer = [moment for moment in moments(QWEN3_4B, ALL) if moment.moment != HEAD]
    assert max(moment.bytes_per_token for moment in layer) < 62_000


def test_the_fullest_moment_comes_first() -> None:
    assert [moment.moment for moment in moments(QWEN3_4B, ALL)] == [HEAD, ATTENTION, FINISH, PROJECT]
    assert moments(QWEN3_4B, MemoryLevers(True, 2048))[0].moment == ATTENTION


def test_offload_keeps_two_inputs_instead_of_36() -> None:
    saved = moment_bytes(NONE, LAYER) - moment_bytes(MemoryLevers(offload=True), LAYER)
    assert saved == 34 * 2560 * 2
    assert offloaded_bytes_per_token(QWEN3_4B) == 36 * 2560 * 2


def test_a_tile_grows_with_itself_and_not_with_the_pass() -> None:
    def tile(tokens: int | None) -> tuple[int, int]:
        levers = MemoryLevers(True, tokens, 8)
        found = next(moment for moment in moments(QWEN3_4B, levers) if moment.moment == FINISH)
        return found.bytes_per_token, found.fixed_bytes

    per_token = 2 * (8 * 2560 + 3 * 4096 + 4 * 1024 + 5 * 9728)
    assert tile(4096)[0] == tile(2048)[0] == tile(None)[0] - per_token
    assert tile(4096)[1] - tile(2048)[1] == 2048 * per_token
    assert tile(None)[1] == 0


def test_sums_over_tiles_are_fp32_and_those_after_attention_end_before_the_others_begin() -> None:
    fixed = {moment.moment: moment.fixed_bytes for moment in moments(QWEN3_4B, MemoryLevers(True, 1, None))}
    one_token = 2 * (8 * 2560 + 3 * 4096 + 4 * 1024 + 5 * 9728)
    output_and_mlp, qkv = 2560 * 4096 + 3 * 2560 * 9728, 2560 * (4096 + 2 * 1024)
    assert fixed[FINISH] == one_token + 6 * output_and_mlp
    assert fixed[ATTENTION] == 2 * output_and_mlp
    assert fixed[PROJECT] == one_token + 2 * output_and_mlp + 6 * qkv


def test_the_last_norm_holds_what_is_counted_in_its_backward() -> None:
    """Qwen3's norm and TRL's head in bf16, wide and long enough that the vocabulary's tiles do not count."""
    tokens, hidden = 5000, 128
    norm, weight = Qwen3RMSNorm(hidden).bfloat16(), torch.randn(8, hidden).bfloat16().requires_grad_()
    hidden_states = torch.randn(1, tokens, hidden).bfloat16().requires_grad_()
    labels, chosen = torch.zeros(tokens, dtype=torch.long), torch.ones(1, tokens, dtype=torch.bool)
    with LiveTensors() as live:
        apply = ChunkedLogProbFunction.apply
        loss = apply(norm(hidden_states * 1)[chosen], weight, None, labels, 1.0, 8, None, 1.0, ())[0].sum()
        live.peak_bytes = 0
        loss.backward()
    counted = sum(row.bytes_per_token for row in memory_rows(QWEN3_4B, NONE) if row.moments == (HEAD,)) / 2560
    assert live.peak_bytes / (tokens * hidden) == pytest.approx(counted, rel=0.02)


def test_no_layer_input_is_on_the_device_while_the_last_norm_is_differentiated() -> None:
    offloaded, kept = (moment_bytes(MemoryLevers(offload=value), HEAD) for value in (True, False))
    assert kept - offloaded == 36 * 2560 * 2


def test_an_adapter_alone_has_no_gradients_of_layers_and_head() -> None:
    adapter = replace(QWEN3_4B, trains_base=False)
    assert adapter.head_bytes == 0
    tile = next(moment for moment in moments(adapter, ALL) if moment.moment == FINISH)
    assert tile.fixed_bytes == 2048 * adapter.tile_bytes_per_token


LADDER = [NONE, MemoryLevers(True), MemoryLevers(True, 2048), MemoryLevers(True, 2048, 2), ALL]


@pytest.mark.parametrize(
    ("cap", "allocatable"),
    [(None, 20 * GIB + GIB), (64 * GIB, 20 * GIB + GIB), (45 * GIB, 5 * GIB + GIB)],
)
def test_the_pool_of_an_engine_that_sleeps_is_free_memory(cap: int | None, allocatable: int) -> None:
    """40 GiB reserved, 39 allocated: 30 of each are the pool, which holds none of the card; 20 GiB of it are free."""
    assert allocatable_bytes(20 * GIB, 40 * GIB, 39 * GIB, cap) == allocatable


def test_each_lever_fits_more_tokens_than_the_one_before() -> None:
    fits = [tokens_that_fit(16 * GIB, 0, QWEN3_4B, levers) for levers in LADDER]
    assert fits == sorted(set(fits)) and fits[0] > 0


def test_what_fits_at_the_fullest_moment_is_what_fits() -> None:
    """The moment with the most bytes per token is not the fullest one of a short pass, whose tile counts for more."""
    fixed = {moment.moment: moment.fixed_bytes for moment in moments(QWEN3_4B, MemoryLevers(True, 2048))}
    left = fixed[FINISH] + 1000 * moment_bytes(MemoryLevers(True, 2048), FINISH)
    assert (left - fixed[ATTENTION]) // moment_bytes(MemoryLevers(True, 2048), ATTENTION) > 1000
    free = RESERVE_BYTES + QWEN3_4B.head_bytes + left
    assert tokens_that_fit(free, 0, QWEN3_4B, MemoryLevers(True, 2048)) == 1000


def test_rows_have_names_of_their_own() -> None:
    for levers in LADDER:
        names = [row.name for row in memory_rows(QWEN3_4B, levers)]
        assert len(names) == len(set(names))

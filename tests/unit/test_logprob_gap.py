"""The gate lets every right engine through, noisy or not, and stops at the first batch of a stale policy."""

from __future__ import annotations

import math
import random

import pytest

from trl_budget.errors import SettingsError, StalePolicyError
from trl_budget.logprob_gap import LogProbGapGate


def noisy(low: float, high: float, num_batches: int = 500, seed: int = 0) -> list[float]:
    generator = random.Random(seed)
    return [generator.uniform(low, high) for _ in range(num_batches)]


def linear(first: float, last: float, num_batches: int = 1000) -> list[float]:
    return [first + (last - first) * k / (num_batches - 1) for k in range(num_batches)]


def gate_after(gaps: list[float]) -> LogProbGapGate:
    gate = LogProbGapGate()
    for step, gap in enumerate(gaps):
        gate.check(step, gap)
    return gate


@pytest.mark.parametrize(
    "gaps",
    [
        noisy(0.005, 0.05),
        noisy(0.1, 0.3),
        [*noisy(0.1, 0.3), 0.6, *noisy(0.1, 0.3)],
        linear(0.3, 0.55),
        linear(0.05, 0.0005),
        [*linear(0.05, 0.0005), 0.3, 0.0004],
        [*noisy(0.0005, 0.001), *noisy(0.02, 0.05)],
    ],
    ids=[
        "bf16",
        "fp8 cache or router noise",
        "noise with one odd batch",
        "noise that grows with the completions",
        "a policy that becomes peaked",
        "a peaked policy with one odd batch",
        "a peaked policy that spreads again",
    ],
)
def test_right_weights_never_end_a_run(gaps: list[float]) -> None:
    gate_after(gaps)


@pytest.mark.parametrize("stale", [0.87, 0.9, 1.4, 1.44, math.inf])
@pytest.mark.parametrize(
    "before",
    [[], [0.02], noisy(0.005, 0.05), noisy(0.1, 0.3), linear(0.05, 0.0005)],
    ids=["first batch", "second batch", "bf16", "fp8 cache or router noise", "peaked"],
)
def test_the_first_batch_of_a_stale_policy_ends_the_run(before: list[float], stale: float) -> None:
    gate = gate_after(before)
    with pytest.raises(StalePolicyError):
        gate.check(len(before), stale)


@pytest.mark.parametrize("num_batches", [10, 100, 1000])
def test_a_gap_that_creeps_up_without_any_sync_is_found(num_batches: int) -> None:
    with pytest.raises(StalePolicyError):
        gate_after(linear(0.01, 1.4, num_batches))


def test_an_engine_beyond_the_limit_fails_at_the_first_batch_and_not_later() -> None:
    with pytest.raises(StalePolicyError, match=r"At step 0 .* no batch came before"):
        gate_after([0.7, 0.7])


@pytest.mark.parametrize("usual", [0.3, 0.49])
def test_the_usual_gap_is_allowed_on_top_of_the_limit(usual: float) -> None:
    gate = gate_after([usual] * 9)
    gate.check(9, usual + 0.49)
    with pytest.raises(StalePolicyError):
        gate.check(10, usual + 0.51)


def test_twice_the_limit_fails_whatever_was_usual() -> None:
    gate = gate_after([*linear(0.4, 0.89, 200), *([0.95] * 600)])
    assert gate.usual_gap == 0.95
    with pytest.raises(StalePolicyError):
        gate.check(800, 1.01)


@pytest.mark.parametrize("empty", [math.nan, 0.0])
def test_a_batch_without_tokens_passes_and_leaves_the_usual_gap(empty: float) -> None:
    gate = LogProbGapGate()
    gate.check(0, empty)
    assert gate.usual_gap is None
    for gap in (0.2, 0.2, empty, empty, empty):
        gate.check(1, gap)
    assert gate.usual_gap == 0.2


def test_a_batch_that_failed_does_not_become_usual() -> None:
    gate = gate_after([0.02])
    for _ in range(5):
        with pytest.raises(StalePolicyError):
            gate.check(1, 1.2)
    assert gate.usual_gap == 0.02


def test_the_error_says_what_was_seen_what_was_usual_and_which_fields_to_look_at() -> None:
    gate = gate_after([0.01, 0.03, 0.011])
    with pytest.raises(StalePolicyError) as failure:
        gate.check(7, 1.2)
    message = str(failure.value)
    assert "At step 7 the log-probs of vLLM and of the trainer differ by 1.200 per token" in message
    assert "0.011 was usual in the 3 batches before, and up to 0.511 passes" in message
    assert "with other weights than the trainer's" in message
    assert "verify_weight_sync='always'" in message
    assert "share_vllm_weights='off'" in message


def test_with_adapters_the_error_does_not_advise_to_copy_what_is_copied_already() -> None:
    with pytest.raises(StalePolicyError) as failure:
        LogProbGapGate(has_adapters=True).check(7, 1.2)
    message = str(failure.value)
    assert "share_vllm_weights" not in message
    assert "verify_weight_sync='always'" in message and "peft_config" in message and "use_vllm=False" in message


def test_a_higher_limit_serves_an_engine_that_differs_by_more() -> None:
    gate = LogProbGapGate(limit=1.0)
    gate.check(0, 0.9)
    with pytest.raises(StalePolicyError):
        gate.check(1, 1.95)


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan, math.inf])
def test_a_limit_that_passes_all_or_nothing_is_refused(limit: float) -> None:
    with pytest.raises(SettingsError):
        LogProbGapGate(limit)

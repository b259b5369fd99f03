"""Who holds the card during rollouts: what `auto` resolves to, with its reason, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trl_budget import BudgetGRPOConfig
from trl_budget.errors import SettingsError
from trl_budget.rollout_policy import RolloutFacts, copied_instead, resolve_rollout

COLOCATED = RolloutFacts(is_colocated=True, can_sleep=True)
NO_PARKING = {
    "no vLLM in this process": {"is_colocated": False},
    "vLLM sleeps on CUDA only": {"can_sleep": False},
    "vllm_tensor_parallel_size=2 spans ranks": {"tensor_parallel_size": 2},
    "FSDP holds the weights itself": {"parallelism": "FSDP"},
}
NO_SHARING = {
    "adapters are merged into vLLM's own copy": {"is_adapter": True},
    "the policy computes on float32 weights": {"compute_dtype": "float32"},
    "the policy computes on bfloat16, float32 weights": {"compute_dtype": "bfloat16, float32"},
    "this vLLM always drops its weights when it sleeps": {"has_sleep_backends": False},
}


def test_auto_parks_and_shares_where_both_can_run() -> None:
    plan = resolve_rollout("auto", "auto", COLOCATED)
    assert (plan.parks, plan.shares, plan.sleeps) == (True, True, True)


@pytest.mark.parametrize(("reason", "facts"), NO_PARKING.items(), ids=NO_PARKING)
def test_what_keeps_models_on_the_card_keeps_weights_apart_too(reason: str, facts: dict[str, Any]) -> None:
    plan = resolve_rollout("auto", "auto", replace(COLOCATED, **facts))
    assert (plan.parks, plan.shares, plan.sleeps) == (False, False, False)
    assert reason in plan.park.reason
    with pytest.raises(SettingsError, match="park_policy_during_rollout='on', but"):
        resolve_rollout("on", "auto", replace(COLOCATED, **facts))


@pytest.mark.parametrize(("reason", "facts"), NO_SHARING.items(), ids=NO_SHARING)
def test_what_cannot_be_shared_is_parked(reason: str, facts: dict[str, Any]) -> None:
    plan = resolve_rollout("auto", "auto", replace(COLOCATED, **facts))
    assert (plan.parks, plan.shares, plan.sleeps) == (True, False, True)
    assert reason in plan.share.reason
    with pytest.raises(SettingsError, match="share_vllm_weights='on', but"):
        resolve_rollout("auto", "on", replace(COLOCATED, **facts))


@pytest.mark.parametrize("is_colocated", [True, False])
def test_a_quantized_policy_is_refused_in_every_mode_of_vllm(is_colocated: bool) -> None:
    facts = replace(COLOCATED, is_colocated=is_colocated, is_adapter=True, quantization="bitsandbytes, 4 bits")
    with pytest.raises(SettingsError, match=r"quantized \(bitsandbytes, 4 bits\).*packed storage.*use_vllm=False"):
        resolve_rollout("auto", "auto", facts)


@pytest.mark.parametrize("enables_sleep_mode", [False, True])
def test_without_parking_the_engine_sleeps_as_the_user_says(enables_sleep_mode: bool) -> None:
    plan = resolve_rollout("off", "auto", replace(COLOCATED, enables_sleep_mode=enables_sleep_mode))
    assert (plan.parks, plan.shares, plan.sleeps) == (False, False, enables_sleep_mode)
    assert plan.share.reason == "the engine does not hand the card over: set by you"


def test_tensors_that_do_not_fit_are_copied_unless_sharing_is_required() -> None:
    assert copied_instead("auto", "vLLM's w13 is 3-D").reason == "vLLM's w13 is 3-D"
    with pytest.raises(SettingsError, match="vLLM's w13 is 3-D"):
        copied_instead("on", "vLLM's w13 is 3-D")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("park_policy_during_rollout", "yes"),
        ("share_vllm_weights", "maybe"),
        ("verify_weight_sync", "sometimes"),
        ("device_memory_budget", "16 apples"),
        ("device_memory_budget", "-1GiB"),
    ],
)
def test_bad_values_fail_when_the_config_is_made(field: str, value: str) -> None:
    with pytest.raises(SettingsError, match=value):
        BudgetGRPOConfig(output_dir="out", use_cpu=True, bf16=False, **{field: value})

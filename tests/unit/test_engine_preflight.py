"""An engine that vLLM would refuse is refused first, with what would start."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_budget.device_memory import CardMemory
from trl_budget.engine_preflight import EngineNeed, check_allocator_settings, check_engine_fits
from trl_budget.errors import DeviceMemoryError, SettingsError

GIB = 2**30


def card(total: int, free: int) -> CardMemory:
    return CardMemory(total=total, free=free, reserved=0, unmapped=0)


def request_memory_raises(memory: CardMemory, utilization: float) -> bool:
    """vLLM 0.26, v1/worker/utils.py: the engine's own check."""
    return memory.free < math.ceil(memory.total * utilization)


def proposed(message: str) -> float:
    return float(re.search(r"Set vllm_gpu_memory_utilization=([0-9.]+),", message)[1])


def test_an_engine_that_fits_is_let_through() -> None:
    check_engine_fits(card(16 * GIB, 12 * GIB), 0.75, {}, least_bytes=8 * GIB)


def test_too_much_is_refused_with_owners_and_the_largest_share_that_starts() -> None:
    owners = {"policy": 3 * GIB, "reference": GIB}
    with pytest.raises(SettingsError) as failure:
        check_engine_fits(card(16 * GIB, 10 * GIB), 0.9, owners, least_bytes=8 * GIB)
    message = str(failure.value)
    assert "vllm_gpu_memory_utilization=0.9 asks for 14.40 GiB of a card of 16.00 GiB" in message
    assert "10.00 GiB are free" in message
    assert "policy 3.00 GiB, reference 1.00 GiB, other processes or contexts 2.00 GiB" in message
    assert "Set vllm_gpu_memory_utilization=0.62, the largest" in message  # 10 / 16 = 0.625


def test_too_little_for_the_weights_is_refused_with_the_smallest_share_that_holds_them() -> None:
    with pytest.raises(SettingsError, match=r"=0\.51, the smallest that holds them"):  # 8.1 / 16 = 0.506
        check_engine_fits(card(16 * GIB, 15 * GIB), 0.3, {}, least_bytes=int(8.1 * GIB))


@pytest.mark.parametrize("utilization", [0.3, 0.9])
def test_an_engine_that_no_share_starts_is_the_cards_fault(utilization: float) -> None:
    with pytest.raises(DeviceMemoryError, match="cannot start here with any vllm_gpu_memory_utilization"):
        check_engine_fits(card(16 * GIB, 7 * GIB), utilization, {"policy": 8 * GIB}, least_bytes=8 * GIB)


@given(
    total=st.integers(8 * GIB, 200 * GIB),
    free_share=st.floats(0, 1),
    least_share=st.floats(0, 1),
    utilization=st.floats(0.01, 1),
)
def test_the_verdict_and_the_proposal_agree_with_vllm(
    total: int, free_share: float, least_share: float, utilization: float
) -> None:
    memory, least = card(total, int(free_share * total)), int(least_share * total)
    starts = [
        k / 100
        for k in range(1, 101)
        if not request_memory_raises(memory, k / 100) and math.ceil(total * (k / 100)) >= least
    ]
    try:
        check_engine_fits(memory, utilization, {}, least_bytes=least)
    except SettingsError as error:
        assert proposed(str(error)) == (starts[-1] if request_memory_raises(memory, utilization) else starts[0])
    except DeviceMemoryError:
        assert not starts
    else:
        assert not request_memory_raises(memory, utilization)
        assert math.ceil(total * utilization) >= least


def test_a_budgeted_card_is_judged_as_the_small_one() -> None:
    large = card(139 * GIB, 130 * GIB)  # 9 in use, 4 of them by others
    with pytest.raises(SettingsError, match=r"=0\.68, the largest"):  # 11 / 16 = 0.6875
        check_engine_fits(large.within(16 * GIB, baseline=4 * GIB), 0.9, {}, least_bytes=GIB)


def test_the_least_of_an_engine_is_its_weights_and_a_little() -> None:
    need = EngineNeed(utilization=0.3, weights_bytes=8 * GIB)
    assert 0 < need.least_bytes - 8 * GIB <= GIB / 2


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        ("expandable_segments:True", "Unset {}"),
        (" expandable_segments : True ,", "Unset {}"),
        ("max_split_size_mb:128,expandable_segments:True", "Set {}='max_split_size_mb:128'"),
        ("expandable_segments: True, garbage_collection_threshold:0.8", "Set {}='garbage_collection_threshold:0.8'"),
        (
            "expandable_segments:True,roundup_power2_divisions:[256:1,>:2]",
            "Set {}='roundup_power2_divisions:[256:1,>:2]'",
        ),
        ("expandable_segments:False,expandable_segments:True", "Set {}='expandable_segments:False'"),
        ("expandable_segments:true", "Unset {}"),
    ],
)
def test_expandable_segments_are_refused_with_the_value_that_works(variable: str, value: str, remedy: str) -> None:
    with pytest.raises(SettingsError) as failure:
        check_allocator_settings({variable: value})
    assert f"{variable} is '{value}'" in str(failure.value)
    assert f"{remedy.format(variable)}, or set vllm_enable_sleep_mode=False" in str(failure.value)


@pytest.mark.parametrize(
    "value", ["", "expandable_segments:False", "max_split_size_mb:128", "roundup_power2_divisions:[256:1,>:2]"]
)
def test_other_allocator_settings_pass(value: str) -> None:
    check_allocator_settings({"PYTORCH_CUDA_ALLOC_CONF": value, "PYTORCH_ALLOC_CONF": value, "HOME": "/root"})


def test_the_variable_that_torch_does_not_read_counts_too() -> None:
    environment = {"PYTORCH_ALLOC_CONF": "", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    with pytest.raises(SettingsError, match="PYTORCH_CUDA_ALLOC_CONF is"):
        check_allocator_settings(environment)

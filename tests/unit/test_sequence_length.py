"""Rows that vLLM cannot hold are refused with the numbers and the field, before it cuts them short or fails."""

from __future__ import annotations

import pytest

from trl_budget.errors import DeviceMemoryError, SettingsError
from trl_budget.sequence_length import (
    CacheRefusal,
    SequenceRoom,
    check_cache,
    check_prompts,
    longest_completion,
    notice_of_cut_completions,
    refused_cache,
)
from trl_budget.upstream_vllm import cache_refusal

# vLLM 0.26, v1/core/kv_cache_utils.py, and 0.31
REFUSED = (
    "To serve at least one request with the model's max seq len (131072), (18.0 GiB KV cache is needed, which is "
    "larger than the available KV cache memory (6.13 GiB). Based on the available memory, the estimated maximum model "
    "length is 44624. Try increasing `gpu_memory_utilization` (which also controls CPU memory on the CPU backend) or "
    "decreasing `max_model_len` when initializing the engine."
)
EMPTY = (
    "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine"
)


def test_a_cache_that_is_shorter_than_a_completion_is_the_cards_fault() -> None:
    check_cache(SequenceRoom(2048, 513), 512)
    with pytest.raises(DeviceMemoryError, match=r"holds 512 tokens, and max_completion_length=512"):
        check_cache(SequenceRoom(2048, 512), 512)


def test_a_context_of_completions_alone_is_no_fault_of_the_cache() -> None:
    check_cache(SequenceRoom(512, 512), 512)


def test_prompts_that_leave_room_for_one_token_pass() -> None:
    check_prompts([[0] * 24, [0] * 3, []], SequenceRoom(25))


def test_the_first_prompt_that_is_too_long_is_named_with_its_tokens_and_what_would_hold_the_longest() -> None:
    with pytest.raises(SettingsError) as failure:
        check_prompts([[0] * 24, [0] * 25, [0] * 40], SequenceRoom(25))
    message = str(failure.value)
    assert message.startswith("Prompt 1 of 3 has 25 tokens")
    assert "2 prompts are too long, the longest has 40 tokens" in message
    assert "Set vllm_max_model_length=41 or more, or leave prompts of 25 tokens and more" in message


def test_where_the_cache_is_the_shorter_one_it_is_named() -> None:
    with pytest.raises(SettingsError, match=r"vLLM's KV cache has 128.*vllm_gpu_memory_utilization higher.* 161 tok"):
        check_prompts([[0] * 160], SequenceRoom(1048, 128))


def test_completions_with_room_get_no_notice() -> None:
    assert notice_of_cut_completions(24, SequenceRoom(1048), 1024) is None


def test_the_notice_of_cut_completions_has_the_tokens_left_and_the_context_that_would_do() -> None:
    notice = notice_of_cut_completions(25, SequenceRoom(1048), 1024)
    assert notice is not None and "leaves 1023 after a prompt of 25, and max_completion_length is 1024" in notice
    assert "Set vllm_max_model_length=1049 or more" in notice


def test_max_tokens_of_the_generation_arguments_go_first() -> None:
    assert longest_completion(256, None) == 256
    assert longest_completion(256, {"max_tokens": 64}) == 64


def test_what_vllm_says_of_its_cache_is_read() -> None:
    assert cache_refusal(ValueError(REFUSED)) == CacheRefusal(131_072, 18.0, 6.13, 44_624)
    assert cache_refusal(ValueError(EMPTY)) == CacheRefusal()
    assert cache_refusal(ValueError("another")) is None
    assert cache_refusal(RuntimeError(REFUSED)) is None


def test_a_refused_cache_proposes_the_context_that_fits() -> None:
    message = str(refused_cache(CacheRefusal(131_072, 18.0, 6.13, 44_624), 32_768))
    assert "18.0 GiB for one sequence of 131072 tokens, and 6.13 GiB are left" in message
    assert "Set vllm_max_model_length=44624, which fits and leaves 11856 tokens for a prompt" in message


def test_a_refused_cache_that_fits_no_completion_says_so() -> None:
    message = str(refused_cache(CacheRefusal(131_072, 18.0, 6.13, 44_624), 65_536))
    assert "Set vllm_max_model_length=" not in message
    assert "A row of 44624 tokens would fit, less than max_completion_length=65536" in message


def test_a_cache_without_a_block_asks_for_more_memory() -> None:
    assert "Raise vllm_gpu_memory_utilization" in str(refused_cache(CacheRefusal(), 64))

"""Rows that vLLM cannot hold are refused with the numbers and the field, before it cuts them short or fails."""

from __future__ import annotations

import pytest

from trl_budget.errors import DeviceMemoryError, SettingsError
from trl_budget.sequence_length import (
    CacheRefusal,
    SequenceRoom,
    check_context,
    check_prompts,
    longest_completion,
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


def test_a_completion_and_one_token_of_a_prompt_fit() -> None:
    check_context(SequenceRoom(1025, 1025), 1024)


def test_a_context_of_completions_alone_is_refused_with_both_fields() -> None:
    with pytest.raises(SettingsError) as failure:
        check_context(SequenceRoom(1024), 1024)
    message = str(failure.value)
    assert "max_completion_length=1024" in message and "context of 1024 tokens" in message
    assert "Set vllm_max_model_length to at least 1025" in message


def test_a_cache_that_is_shorter_than_a_completion_is_the_cards_fault() -> None:
    with pytest.raises(DeviceMemoryError, match=r"holds 512 tokens, and max_completion_length=512"):
        check_context(SequenceRoom(2048, 512), 512)


def test_prompts_that_leave_room_pass_to_the_last_token() -> None:
    check_prompts([[0] * 24, [0] * 3, []], SequenceRoom(1048), 1024)


def test_the_first_prompt_that_is_too_long_is_named_with_its_tokens_and_what_would_fit_the_longest() -> None:
    with pytest.raises(SettingsError) as failure:
        check_prompts([[0] * 24, [0] * 25, [0] * 40], SequenceRoom(1048), 1024)
    message = str(failure.value)
    assert message.startswith("Prompt 1 of 3 has 25 tokens, and 24 are left for it")
    assert "2 prompts are too long, the longest has 40 tokens" in message
    assert "Set vllm_max_model_length=1064, max_completion_length=1008, or leave prompts of more than 24" in message


def test_a_prompt_as_long_as_the_context_gets_no_completion_length_proposed() -> None:
    with pytest.raises(SettingsError) as failure:
        check_prompts([[0] * 64], SequenceRoom(64), 8)
    assert "Set vllm_max_model_length=72, or leave" in str(failure.value)


def test_where_the_cache_is_the_shorter_one_it_is_named() -> None:
    with pytest.raises(SettingsError, match=r"vLLM's KV cache has 128 tokens.*Set vllm_gpu_memory_utilization higher"):
        check_prompts([[0] * 100], SequenceRoom(1048, 128), 64)


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

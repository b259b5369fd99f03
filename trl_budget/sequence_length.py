"""Whether vLLM can hold the rows that the run wants: a prompt and its completion, in its context and in its KV cache.

Numbers in, an error or nothing out. vLLM itself cuts a completion short where its context ends, without a word, and
fails in the middle of a batch on a prompt that fills it. Source: vLLM 0.26, `v1/engine/input_processor.py`
(`_validate_prompt_len`) and `v1/core/kv_cache_utils.py` (`_check_enough_kv_cache_memory`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from trl_budget.errors import DeviceMemoryError, SettingsError


@dataclass(frozen=True)
class SequenceRoom:
    """How long one sequence of an engine may become.

    Attributes:
        model_tokens: prompt and completion together, by vLLM's `max_model_len`.
        cache_tokens: what its KV cache holds; None where vLLM does not tell.
    """

    model_tokens: int
    cache_tokens: int | None = None

    @property
    def tokens(self) -> int:
        """The shorter of both."""
        return self.model_tokens if self.cache_tokens is None else min(self.model_tokens, self.cache_tokens)


@dataclass(frozen=True)
class CacheRefusal:
    """What vLLM says where its KV cache would not hold one sequence of `max_model_len`.

    Attributes:
        model_tokens: `max_model_len`; None where not even one block was left.
        needed_gib: cache for one such sequence.
        available_gib: memory left for the cache.
        fitting_tokens: the longest sequence that would fit; None where vLLM does not tell.
    """

    model_tokens: int | None = None
    needed_gib: float | None = None
    available_gib: float | None = None
    fitting_tokens: int | None = None


def longest_completion(max_completion_length: int | None, generation_kwargs: Mapping[str, Any] | str | None) -> int:
    """Tokens that vLLM may generate for a prompt: `generation_kwargs` go before `max_completion_length`, as in TRL."""
    given = generation_kwargs if isinstance(generation_kwargs, Mapping) else {}
    wanted = given.get("max_tokens") or max_completion_length
    assert wanted is not None, "GRPOConfig has a default"
    return int(wanted)


def check_context(room: SequenceRoom, max_completion_length: int) -> None:
    """Refuses completions that an engine cannot hold, not even after a prompt of one token.

    Args:
        room: of the engine, or what is to become it.
        max_completion_length: tokens.

    Raises:
        SettingsError: `vllm_max_model_length` is too short.
        DeviceMemoryError: the KV cache is too small.
    """
    if max_completion_length >= room.model_tokens:
        raise SettingsError(
            f"max_completion_length={max_completion_length} and a prompt of one token do not fit into vLLM's context "
            f"of {room.model_tokens} tokens. vLLM would cut every completion short, and no completion would be as "
            f"long as it may be. Set vllm_max_model_length to at least {max_completion_length + 1} and the tokens of "
            f"the longest prompt, or max_completion_length to less than {room.model_tokens}."
        )
    if max_completion_length >= room.tokens:
        raise DeviceMemoryError(
            f"vLLM's KV cache holds {room.cache_tokens} tokens, and max_completion_length={max_completion_length} and "
            "a prompt of one token need one more than it has. One sequence would not fit, so that no completion could "
            f"end. Raise vllm_gpu_memory_utilization, or set max_completion_length to less than {room.cache_tokens}."
        )


def check_prompts(prompts: Sequence[Sized], room: SequenceRoom, max_completion_length: int) -> None:
    """Refuses prompts after which a completion of full length has no room, before any is generated.

    Args:
        prompts: token ids, one sequence per prompt.
        room: of the engine.
        max_completion_length: tokens; 1 where a conversation goes on and vLLM may cut its last turn.

    Raises:
        SettingsError: names the first such prompt, and how many there are.
    """
    limit = room.tokens - max_completion_length
    too_long = [index for index, prompt in enumerate(prompts) if len(prompt) > limit]
    if not too_long:
        return
    longest = max(len(prompts[index]) for index in too_long)
    holder = "context (vllm_max_model_length)" if room.tokens == room.model_tokens else "KV cache"
    widen = (
        f"vllm_max_model_length={longest + max_completion_length}"
        if room.tokens == room.model_tokens
        else "vllm_gpu_memory_utilization higher"
    )
    shorten = f", max_completion_length={room.tokens - longest}" if room.tokens > longest else ""
    raise SettingsError(
        f"Prompt {too_long[0]} of {len(prompts)} has {len(prompts[too_long[0]])} tokens, and {limit} are left for it: "
        f"vLLM's {holder} has {room.tokens} tokens, of which a completion may take {max_completion_length} "
        f"({len(too_long)} prompts are too long, the longest has {longest} tokens). vLLM would cut their completions "
        f"short, or fail in the middle of the batch. Set {widen}{shorten}, or leave prompts of more than {limit} "
        "tokens out of the data set."
    )


def refused_cache(refusal: CacheRefusal, max_completion_length: int) -> DeviceMemoryError:
    """The error for an engine that did not start because its KV cache would not hold one sequence.

    Args:
        refusal: what vLLM said.
        max_completion_length: tokens.
    """
    if refusal.model_tokens is None:
        happened = "vLLM's weights and workspaces leave no memory for its KV cache."
        remedy = "Raise vllm_gpu_memory_utilization."
    else:
        happened = (
            f"vLLM's KV cache needs {refusal.needed_gib} GiB for one sequence of {refusal.model_tokens} tokens, and "
            f"{refusal.available_gib} GiB are left for it."
        )
        remedy = "Raise vllm_gpu_memory_utilization, or set vllm_max_model_length to what a row needs."
        fitting = refusal.fitting_tokens
        if fitting is not None and fitting > max_completion_length:
            remedy = (
                f"Set vllm_max_model_length={fitting}, which fits and leaves {fitting - max_completion_length} tokens "
                "for a prompt, or raise vllm_gpu_memory_utilization."
            )
        elif fitting is not None:
            remedy = (
                f"A row of {fitting} tokens would fit, less than max_completion_length={max_completion_length} and a "
                "prompt: raise vllm_gpu_memory_utilization, or lower max_completion_length and vllm_max_model_length."
            )
    return DeviceMemoryError(f"{happened} vLLM starts only where one sequence of its longest fits. {remedy}")

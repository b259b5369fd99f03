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


def check_cache(room: SequenceRoom, max_completion_length: int) -> None:
    """Refuses a KV cache in which no completion could end, not even after a prompt of one token.

    Args:
        room: of the engine.
        max_completion_length: tokens.

    Raises:
        DeviceMemoryError: the KV cache is too small.
    """
    if room.tokens < room.model_tokens and max_completion_length >= room.tokens:
        raise DeviceMemoryError(
            f"vLLM's KV cache holds {room.cache_tokens} tokens, and max_completion_length={max_completion_length} and "
            "a prompt of one token need one more than it has. One sequence would not fit, so that no completion could "
            f"end. Raise vllm_gpu_memory_utilization, or set max_completion_length to less than {room.cache_tokens}."
        )


def check_prompts(prompts: Sequence[Sized], room: SequenceRoom) -> None:
    """Refuses prompts after which not one token has room, before any is generated.

    Args:
        prompts: token ids, one sequence per prompt.
        room: of the engine.

    Raises:
        SettingsError: names the first such prompt, and how many there are.
    """
    too_long = [index for index, prompt in enumerate(prompts) if len(prompt) >= room.tokens]
    if not too_long:
        return
    longest = max(len(prompts[index]) for index in too_long)
    raise SettingsError(
        f"Prompt {too_long[0]} of {len(prompts)} has {len(prompts[too_long[0]])} tokens, and vLLM's {_holder(room)} "
        f"has {room.tokens}, of which a completion takes one at least ({len(too_long)} prompts are too long, the "
        f"longest has {longest} tokens). vLLM would fail in the middle of the batch. Set {_wider(room, longest + 1)} "
        f"or more, or leave prompts of {room.tokens} tokens and more out of the data set."
    )


def notice_of_cut_completions(
    longest_prompt_tokens: int, room: SequenceRoom, max_completion_length: int
) -> str | None:
    """What to tell a user whose completions cannot all become as long as asked for; None where they can.

    Not an error: stock TRL trains on what vLLM has cut, and says nothing.

    Args:
        longest_prompt_tokens: of the prompts, 1 before they are known.
        room: of the engine, or what is to become it.
        max_completion_length: tokens.
    """
    left = room.tokens - longest_prompt_tokens
    if left >= max_completion_length:
        return None
    return (
        f"vLLM cuts completions short: its {_holder(room)} has {room.tokens} tokens, which leaves {max(left, 0)} "
        f"after a prompt of {longest_prompt_tokens}, and max_completion_length is {max_completion_length}. Set "
        f"{_wider(room, longest_prompt_tokens + max_completion_length)} or more to let them end by themselves."
    )


def _holder(room: SequenceRoom) -> str:
    return "context (vllm_max_model_length)" if room.tokens == room.model_tokens else "KV cache"


def _wider(room: SequenceRoom, tokens: int) -> str:
    if room.tokens == room.model_tokens:
        return f"vllm_max_model_length={tokens}"
    return f"vllm_gpu_memory_utilization higher, for a cache of {tokens} tokens"


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

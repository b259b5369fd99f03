"""Attention over rows that lie end to end, registered with transformers beside the model's own implementation.

The policy's implementation is replaced once by one that dispatches on its arguments: with `cu_seq_lens_q` it runs
varlen attention, without it the original function with the original mask, bit for bit. A switch per call would not
survive gradient checkpointing, whose recompute runs during backward. A row's result does not depend on other rows.

On CUDA in bf16 or fp16 this is torch's `varlen_attn`, elsewhere `scaled_dot_product_attention` row by row.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trl_budget.errors import UnservedAttentionError

PREFIX = "trl_budget_"
DISPATCHED = ("sdpa",)
_UNSERVED = ("s_aux", "softcap", "position_bias")
_VARLEN_PARAMETERS = inspect.signature(varlen_attn).parameters
_is_packed: ContextVar[bool] = ContextVar("rows_are_packed", default=False)


@dataclass
class AttentionCall:
    """One call of the attention function by a model's layer, seen before it is computed. Legend: B rows, T tokens.

    Attributes:
        attend: computes it, packed or with the mask: `(module, query, key, value, mask, **features) -> [B, T, Hq, D]`.
        module: the model's attention module.
        query: `[B, Hq, T, D]`, after the rotary embedding.
        key: `[B, Hkv, T, D]`.
        value: `[B, Hkv, T, D]`.
        attention_mask: as the model made it, or None.
        features: every other argument.
    """

    attend: Callable[..., Tensor]
    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    attention_mask: Tensor | None
    features: dict[str, Any]


_interceptor: ContextVar[Callable[[AttentionCall], Tensor] | None] = ContextVar("attention_interceptor", default=None)


@contextmanager
def intercepted_attention(interceptor: Callable[[AttentionCall], Tensor]) -> Iterator[None]:
    """While a layer runs in this thread, `interceptor` answers its attention calls, or leaves the layer by raising.

    Set around a single layer's run, in forward and in backward: autograd runs backward in a thread of its own.
    """
    token = _interceptor.set(interceptor)
    try:
        yield
    finally:
        _interceptor.reset(token)


def interceptor_in_use() -> Callable[[AttentionCall], Tensor] | None:
    """What answers attention calls in this thread; None while the model's own attention does."""
    return _interceptor.get()


@contextmanager
def packed_rows() -> Iterator[None]:
    """While the forward of packed rows runs, no mask is made: `[T, T]` booleans of 24,576 tokens are 0.6 GB."""
    token = _is_packed.set(True)
    try:
        yield
    finally:
        _is_packed.reset(token)


def dispatching_implementation(original: str) -> str:
    """Registers, once, the implementation that adds packed rows to `original`, and returns its name."""
    name = PREFIX + original
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name, _dispatching(ALL_ATTENTION_FUNCTIONS[original]))
        AttentionMaskInterface.register(name, _mask_unless_packed(ALL_MASK_ATTENTION_FUNCTIONS[original]))
    return name


def _mask_unless_packed(original: Callable[..., Any]) -> Callable[..., Any]:
    def mask(*args: Any, **kwargs: Any) -> Any:
        return None if _is_packed.get() else original(*args, **kwargs)

    return mask


def _dispatching(original: Callable[..., Any]) -> Callable[..., Any]:
    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        cu_seq_lens_q: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if cu_seq_lens_q is None:
            return cast(Tensor, original(module, query, key, value, attention_mask, **kwargs)[0])
        return packed_attention(query, key, value, cu_seq_lens_q, **kwargs)

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        if (interceptor := _interceptor.get()) is not None:
            return interceptor(AttentionCall(attend, module, query, key, value, attention_mask, kwargs)), None
        return attend(module, query, key, value, attention_mask, **kwargs), None

    return attention


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_lens: Tensor,
    *,
    max_length_q: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **features: Any,
) -> Tensor:
    """Causal attention within each row of a pack.

    Args:
        query: `[1, Hq, T, D]`, on any device, after the rotary embedding.
        key: `[1, Hkv, T, D]`; `Hq` is a multiple of `Hkv`.
        value: `[1, Hkv, T, D]`.
        cu_seq_lens: `[rows + 1]`, int32, on the same device: where each row starts, and `T`.
        max_length_q: tokens of the longest row.
        scaling: factor on the scores, `D ** -0.5` when None.
        sliding_window: how many tokens a token sees, itself included.
        **features: what else the model hands to its attention; what would change the result is refused.

    Returns:
        `[1, T, Hq, D]`.

    Raises:
        UnservedAttentionError: the model asks for attention sinks, soft-capping or a bias on the scores.
    """
    if asked := [name for name in _UNSERVED if features.get(name) is not None]:
        raise UnservedAttentionError(f"its attention uses {', '.join(asked)}, which varlen attention does not have")
    if query.is_cuda and torch.is_autocast_enabled("cuda"):  # varlen_attn is not on autocast's list, sdpa is
        query, key, value = (tensor.to(torch.get_autocast_dtype("cuda")) for tensor in (query, key, value))
    window = sliding_window if sliding_window is not None and sliding_window < max_length_q else None
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _varlen(query, key, value, cu_seq_lens, max_length_q, scaling, window)
    return _row_by_row(query, key, value, cu_seq_lens, scaling, window)


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_lens: Tensor,
    max_length: int,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    settings: dict[str, Any] = {"scale": scaling}
    if "window_size" in _VARLEN_PARAMETERS:
        settings["window_size"] = (-1, 0) if window is None else (window - 1, 0)
    else:  # torch 2.10; `serves_windows` keeps models with windows away
        settings["is_causal"] = True
    if "enable_gqa" in _VARLEN_PARAMETERS:
        settings["enable_gqa"] = query.shape[1] != key.shape[1]
    q, k, v = (tensor.transpose(1, 2).squeeze(0) for tensor in (query, key, value))
    out = varlen_attn(q, k, v, cu_seq_lens, cu_seq_lens, max_length, max_length, **settings)
    return cast(Tensor, out).unsqueeze(0)


def _row_by_row(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_lens: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    bounds = cu_seq_lens.tolist()
    rows = []
    for start, stop in itertools.pairwise(bounds):
        if start == stop:
            continue
        q, k, v = (tensor[:, :, start:stop] for tensor in (query, key, value))
        mask = None
        if window is not None and window < stop - start:
            ones = torch.ones(stop - start, stop - start, dtype=torch.bool, device=query.device)
            mask = ones.tril().triu(1 - window)
        is_grouped = query.shape[1] != key.shape[1]
        rows.append(
            F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=mask is None, scale=scaling, enable_gqa=is_grouped
            ).transpose(1, 2)
        )
    return torch.cat(rows, dim=1)


def serves_windows(device_type: str) -> bool:
    """Whether packed rows may see less than their whole past on this device."""
    return device_type != "cuda" or "window_size" in _VARLEN_PARAMETERS

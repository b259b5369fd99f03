"""A trial of the policy on two packed rows: whether packing would train something else.

It catches a layer that carries one row into the next, an attention feature that would be dropped, and positions that
do not restart. Runs once, when the trainer is built: in fp32, where rounding hides nothing, and as the policy
computes, with the kernel that it will train with.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trl_budget.attention import AttentionCall, intercepted_attention
from trl_budget.fp32_forward import in_fp32
from trl_budget.micro_batch import RowsModel
from trl_budget.trial_forward import (
    COMPLETION,
    EXACT_TOLERANCE,
    LENGTHS,
    TRIAL_ERRORS,
    difference,
    evaluating,
    score,
    tolerance_of,
    trial_rows,
    trial_scores,
)
from trl_budget.upstream_attention import undispatched_attention

logger = logging.getLogger(__name__)

Unpacked = Callable[[], AbstractContextManager[Any]]


def packing_fault(
    model: nn.Module,
    vocabulary: int,
    autocast: AbstractContextManager[Any],
    *,
    is_exact: bool,
    num_windows: int = 0,
    is_quantized: bool = False,
    unpacked: Unpacked = nullcontext,
) -> str | None:
    """What is wrong with packed rows of this model; None if nothing is.

    Args:
        model: the policy with TRL's fused head and its packing attention, on the device it trains on.
        vocabulary: number of token ids that can be used.
        autocast: context of the policy's forward.
        is_exact: whether other rows must not move a row by a bit. Routed experts share matrices between rows, so
            there only the size of the difference counts.
        num_windows: layers that see a sliding window, as the config has it; the trial's rows are shorter.
        is_quantized: whether weights are, whose kernels round as they like: fp32 would tell nothing.
        unpacked: makes a context in which the model has its own attention, which a row alone is scored with.
    """
    has_dispatch = not undispatched_attention(model)
    if has_dispatch and not is_quantized and (fault := _exact_fault(model, vocabulary, unpacked)) is not None:
        return fault
    try:
        with evaluating(model), autocast:
            tolerance = tolerance_of(model)
            leak = 0.0 if is_exact else tolerance
            fault = _fault(model, vocabulary, unpacked, tolerance, leak)
            return fault or (_window_fault(model, vocabulary, num_windows) if has_dispatch else None)
    except torch.OutOfMemoryError:
        raise
    except TRIAL_ERRORS as error:
        return f"a trial run of packed rows failed: {error}"


def _exact_fault(model: nn.Module, vocabulary: int, unpacked: Unpacked) -> str | None:
    """What fp32 shows; None too where the policy cannot compute in it."""
    try:
        with evaluating(model), in_fp32(model):
            return _fault(model, vocabulary, unpacked, EXACT_TOLERANCE, EXACT_TOLERANCE)
    except torch.OutOfMemoryError:
        raise
    except TRIAL_ERRORS as error:
        logger.info("The trial of packed rows runs in the policy's dtype alone, since it fails in fp32: %s", error)
        return None


def _fault(model: nn.Module, vocabulary: int, unpacked: Unpacked, tolerance: float, leak: float) -> str | None:
    packed = RowsModel(model, COMPLETION, is_packed=True)
    ids, mask = trial_rows(model, vocabulary)
    together = score(packed, ids, mask)
    other = ids.clone()
    other[0] = (other[0] + vocabulary // 2) % vocabulary
    beside_another = score(packed, other, mask)
    with unpacked():
        rows = [(ids[i : i + 1, -n:], mask[i : i + 1, -n:]) for i, n in enumerate(LENGTHS)]
        alone = torch.cat([score(model, *row) for row in rows])
    if not (largest := difference(together, alone)) <= tolerance:
        return f"in a trial run a packed row differed from the row alone by {largest:.2g}"
    moved = (together[1] - beside_another[1]).abs().max().item()
    return f"in a trial run one row moved the next by {moved:.2g}" if moved > leak else None


def _window_fault(model: nn.Module, vocabulary: int, num_windows: int) -> str | None:
    """Whether a layer keeps its window to the mask, which a pack does not have."""
    seen = 0

    def count(call: AttentionCall) -> Tensor:
        nonlocal seen
        seen += call.features.get("sliding_window") is not None
        arguments = (call.module, call.query, call.key, call.value, call.attention_mask)
        return call.attend(*arguments, **call.features)

    if num_windows == 0:
        return None
    with intercepted_attention(count):
        trial_scores(model, vocabulary)
    if seen >= num_windows:
        return None
    return f"{num_windows - seen} of {num_windows} layers keep their sliding window to the mask, which a pack has not"

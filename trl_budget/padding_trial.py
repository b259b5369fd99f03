"""A trial of the policy on two rows with and without padding: whether trimming or packing would train something else.

Both move a row to other columns. Where positions count columns, where something changes at a position between the
two, or where a recurrence lets padding in, log-probs move with them, and stock's rows are kept. Runs once, when the
trainer is built, in fp32 whatever the policy's dtype, so that rounding hides nothing. No gradient, no weight written,
no random number drawn.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trl_budget.fp32_forward import in_fp32
from trl_budget.trial_forward import (
    COMPLETION,
    EXACT_TOLERANCE,
    TRIAL_ERRORS,
    difference,
    evaluating,
    score,
    tolerance_of,
    trial_rows,
)

logger = logging.getLogger(__name__)

FAR_TOLERANCE = 5e-3  # sines and cosines of positions in the thousands are rounded to 5e-4
LEFT_COLUMNS = (11, 1_000)  # few first: more would be past the last of learned positions
RIGHT_COLUMNS = 6
PAST = 24  # columns past a boundary: the longer row, and some
MAX_COLUMNS = 8_256  # the mask of two rows of so many columns takes 0.5 GB in fp32


@dataclass(frozen=True)
class PaddingTrial:
    """What a trial has found.

    Attributes:
        fault: how padding moves log-probs, in one clause, or None.
        is_exact: whether the policy could compute in fp32. Where not, small differences are not seen.
    """

    fault: str | None
    is_exact: bool = True


@dataclass(frozen=True)
class PaddedColumns:
    """Where stock may put a row.

    Attributes:
        pad_token_id: what it pads with.
        boundaries: key of the model's config -> position at which something may change.
        max_positions: positions that the model has; None where nothing limits them.
    """

    pad_token_id: int
    boundaries: Mapping[str, int]
    max_positions: int | None = None

    def past_boundaries(self) -> tuple[str, int] | None:
        """The last boundary that a trial can pass, and how many columns that takes; None where there is none."""
        most = min(MAX_COLUMNS, self.max_positions or MAX_COLUMNS)
        needed = {key: position + PAST for key, position in self.boundaries.items()}
        passed = {key: columns for key, columns in needed.items() if columns <= most}
        last = max(passed, key=passed.__getitem__, default=None)
        return None if last is None else (last, passed[last])


def try_padding(
    model: nn.Module,
    vocabulary: int,
    columns: PaddedColumns,
    layers: Sequence[nn.Module],
    autocast: AbstractContextManager[Any],
    *,
    is_quantized: bool = False,
) -> PaddingTrial:
    """Scores two rows as they are, with columns of padding, and past every boundary.

    Args:
        model: the policy with TRL's fused head and its own attention, on the device it trains on.
        vocabulary: number of token ids that can be used.
        columns: where stock may put a row. Boundaries past `MAX_COLUMNS` are for others to judge.
        layers: the model's decoder layers from the first on, as many as show each kind of layer; the far trial ends
            with the last of them. Empty: it runs the whole model.
        autocast: context of the policy's forward, for a policy that cannot compute in fp32.
        is_quantized: whether weights are, whose kernels round as they like.
    """
    if not is_quantized:
        try:
            with evaluating(model), in_fp32(model):
                fault = _near_fault(model, vocabulary, columns, EXACT_TOLERANCE)
                return PaddingTrial(fault or _far_fault(model, vocabulary, columns, layers))
        except torch.OutOfMemoryError:
            raise
        except TRIAL_ERRORS as error:
            logger.info("The trial of padded rows runs in the policy's dtype, since it fails in fp32: %s", error)
    try:
        with evaluating(model), autocast:
            return PaddingTrial(_near_fault(model, vocabulary, columns, tolerance_of(model)), is_exact=False)
    except torch.OutOfMemoryError:
        raise
    except TRIAL_ERRORS as error:
        return PaddingTrial(f"a trial run of padded rows failed: {str(error).rstrip('.')}", is_exact=False)


def _near_fault(model: nn.Module, vocabulary: int, columns: PaddedColumns, tolerance: float) -> str | None:
    ids, mask = trial_rows(model, vocabulary)
    expected = score(model, ids, mask)
    most = (columns.max_positions or MAX_COLUMNS) - ids.shape[1] - RIGHT_COLUMNS
    for left in LEFT_COLUMNS:
        padded = _padded(ids, mask, (max(0, min(left, most)), RIGHT_COLUMNS), columns.pad_token_id)
        moved = difference(score(model, *padded, right=RIGHT_COLUMNS), expected)
        if not moved <= tolerance:
            return f"in a trial run padding moved a row's log-probs by {moved:.2g}, so its columns count"
    return None


def _far_fault(model: nn.Module, vocabulary: int, columns: PaddedColumns, layers: Sequence[nn.Module]) -> str | None:
    """As `_near_fault`, past the last boundary that can be passed."""
    if (target := columns.past_boundaries()) is None:
        return None
    key, num_columns = target
    ids, mask = trial_rows(model, vocabulary)
    padded = _padded(ids, mask, (num_columns - ids.shape[1], 0), columns.pad_token_id)
    try:
        near, far = (_states(model, layers, *rows) for rows in ((ids, mask), padded))
    except torch.OutOfMemoryError:
        logger.warning("Padding past %s=%d was not tried, for want of device memory.", key, columns.boundaries[key])
        return None
    moved = ((near - far).norm(dim=-1) / near.norm(dim=-1)).max().item()
    if not moved <= FAR_TOLERANCE:
        return f"in a trial run padding past {key}={columns.boundaries[key]:,} moved a row by {moved:.2g} of itself"
    return None


class _Reached(Exception):
    """No error: ends a forward that has shown what was asked."""


def _states(model: nn.Module, layers: Sequence[nn.Module], ids: Tensor, mask: Tensor) -> Tensor:
    """What the last of `layers` makes of each row's last tokens, `[B, COMPLETION, H]`; log-probs without layers."""
    if not layers:
        return score(model, ids, mask)[..., None]
    seen: list[Tensor] = []

    def stop(_: nn.Module, __: Any, output: Any) -> None:
        seen.append(output[0] if isinstance(output, tuple) else output)
        raise _Reached

    handle = layers[-1].register_forward_hook(stop)
    try:
        score(model, ids, mask)
    except _Reached:
        pass
    finally:
        handle.remove()
    return seen[0][:, -COMPLETION:].float()


def _padded(ids: Tensor, mask: Tensor, columns: tuple[int, int], pad_token_id: int) -> tuple[Tensor, Tensor]:
    return F.pad(ids, columns, value=pad_token_id), F.pad(mask, columns, value=0)

"""The vLLM importance-sampling ratio and its statistics, from log-probs that the update's forward made.

TRL computes both from a pass of its own, before the update. The formulas are TRL 1.16's
(`GRPOTrainer._generate_and_score_completions`); equal to it to 1.2e-7 at equal log-probs.
Legend: B rows, C completion.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from trl.trainer.utils import nanmax, nanmin

Metrics = dict[str, list[float]]


@dataclass(frozen=True)
class RatioSettings:
    """`vllm_importance_sampling_*` of the training arguments.

    Attributes:
        mode: token_truncate, token_mask, sequence_truncate or sequence_mask.
        clip_min: lower bound, or None.
        clip_max: upper bound, or None.
    """

    mode: str
    clip_min: float | None
    clip_max: float | None

    @property
    def is_per_sequence(self) -> bool:
        """Whether one ratio serves a whole completion."""
        return self.mode.startswith("sequence")


def importance_sampling_ratio(
    old_per_token_logps: Tensor, sampling_per_token_logps: Tensor, mask: Tensor, settings: RatioSettings
) -> Tensor:
    """How much likelier the policy finds a completion than vLLM did, truncated or masked.

    Args:
        old_per_token_logps: `[B, C]`, fp32, the policy's at generation time.
        sampling_per_token_logps: `[B, C]`, fp32, vLLM's; NaN where vLLM gave none, which counts as ratio 1.
        mask: `[B, C]`, 1 on the tokens of the loss.
        settings: mode and bounds.

    Returns:
        `[B, C]` in the token modes, `[B, 1]` in the sequence modes.
    """
    difference = torch.nan_to_num((old_per_token_logps - sampling_per_token_logps) * mask, nan=0.0)
    if settings.is_per_sequence:
        difference = difference.sum(dim=-1, keepdim=True)
    ratio = torch.exp(difference)
    if settings.mode.endswith("truncate"):
        return torch.clamp(ratio, min=settings.clip_min, max=settings.clip_max)
    low = -math.inf if settings.clip_min is None else settings.clip_min
    high = math.inf if settings.clip_max is None else settings.clip_max
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


def sampling_gap(old_per_token_logps: Tensor, sampling_per_token_logps: Tensor, mask: Tensor) -> float:
    """Mean absolute difference between the policy's log-probs and vLLM's on this rank, in nats per token.

    TRL logs the mean of this over ranks. Shapes as for `importance_sampling_ratio`; 0.0 without tokens.
    """
    difference = _known_differences(old_per_token_logps, sampling_per_token_logps, mask)
    return difference.mean().item() if difference.numel() > 0 else 0.0


def _known_differences(old_per_token_logps: Tensor, sampling_per_token_logps: Tensor, mask: Tensor) -> Tensor:
    difference = (old_per_token_logps - sampling_per_token_logps).abs()
    return difference[mask.bool() & ~torch.isnan(difference)]


class SamplingStatistics:
    """Collects a generation batch's log-probs and ratios and logs the `sampling/*` metrics once, as stock does.

    Args:
        settings: mode and bounds of the ratio.
    """

    def __init__(self, settings: RatioSettings) -> None:
        self._settings = settings
        self._differences: list[Tensor] = []
        self._ratios: list[Tensor] = []

    @property
    def has_rows(self) -> bool:
        """Whether rows have been added since the last `log`."""
        return bool(self._ratios)

    @property
    def gap(self) -> float:
        """`sampling_gap` of the rows added since the last `log`."""
        difference = torch.cat(self._differences) if self._differences else torch.zeros(0)
        return difference.mean().item() if difference.numel() > 0 else 0.0

    def add(self, old_per_token_logps: Tensor, sampling_per_token_logps: Tensor, mask: Tensor, ratio: Tensor) -> None:
        """Takes some rows of the generation batch, shapes as for `importance_sampling_ratio`."""
        self._differences.append(_known_differences(old_per_token_logps, sampling_per_token_logps, mask))
        self._ratios.append(ratio.flatten() if self._settings.is_per_sequence else ratio[mask.bool()])

    def log(self, metrics: Metrics, gather: Callable[[Tensor], Tensor]) -> None:
        """Appends the five metrics of the rows added so far and starts anew.

        Args:
            metrics: TRL's lists of one mode.
            gather: Accelerate's `gather`, called five times on every rank.
        """
        difference, ratio = torch.cat(self._differences), torch.cat(self._ratios)
        self._differences, self._ratios = [], []
        zero = difference.new_zeros(())
        any_difference, any_ratio = difference.numel() > 0, ratio.numel() > 0
        prefix = "sampling/sampling_logp_difference"
        metrics[f"{prefix}/mean"].append(gather(difference.mean() if any_difference else zero).mean().item())
        metrics[f"{prefix}/max"].append(gather(difference.max() if any_difference else zero).max().item())
        prefix = "sampling/importance_sampling_ratio"
        metrics[f"{prefix}/min"].append(nanmin(gather(ratio.min() if any_ratio else zero)).item())
        metrics[f"{prefix}/mean"].append(gather(ratio.mean() if any_ratio else zero).nanmean().item())
        metrics[f"{prefix}/max"].append(nanmax(gather(ratio.max() if any_ratio else zero)).item())

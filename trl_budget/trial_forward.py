"""Trial forwards: what a config does not tell, two short rows do.

The rows of every trial (`padding_trial.py`, `packing_trial.py`, `layer_trial.py`), how they are scored and compared,
and the trial that catches forwards that are random in training mode. Trials run once, when the trainer is built, on
fourteen tokens. They compute no gradient and leave the random state as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# A model that cannot be called so may raise anything. Out of memory is no answer about it: let that through first.
TRIAL_ERRORS = (Exception,)
LENGTHS = (5, 9)
COMPLETION = 3
# In fp32: 1,000 columns move SmolLM2-135M by 1e-6, a recurrence that lets it in by 9e-3, learned positions by 0.2.
EXACT_TOLERANCE = 1e-4
_FP32_TOLERANCE, _BF16_TOLERANCE = 1e-3, 5e-2


@torch.no_grad()
def forward_draws(model: nn.Module, vocabulary: int, autocast: AbstractContextManager[Any]) -> bool:
    """Whether a forward in training mode draws random numbers (dropout of any kind, dropped layers, jitter).

    Args:
        model: the policy with TRL's fused head, without layers that keep statistics in training mode.
        vocabulary: number of token ids that can be used.
        autocast: context of the policy's forward.
    """
    was_training = model.training
    model.train()
    device = next(model.parameters()).device
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices), autocast:
            before = _random_state(devices)
            trial_scores(model, vocabulary)
            return _random_state(devices) != before
    finally:
        model.train(was_training)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, without gradient, meanwhile."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def trial_scores(model: nn.Module, vocabulary: int) -> Tensor:
    """Log-probs of the rows' last tokens, fp32, as the model is and in the present autocast."""
    return score(model, *trial_rows(model, vocabulary))


def difference_of_scores(model: nn.Module, scores: Tensor, expected: Tensor) -> tuple[float, float]:
    """The largest relative difference, and the one that rounding may make in the present autocast."""
    return difference(scores, expected), tolerance_of(model)


def difference(scores: Tensor, expected: Tensor) -> float:
    """The largest difference of log-probs, relative to one more than their size."""
    return ((scores - expected).abs() / (1 + expected.abs())).max().item()


def tolerance_of(model: nn.Module) -> float:
    """The largest difference that rounding may make in the present autocast."""
    parameter = next(model.parameters())
    is_fp32 = parameter.dtype == torch.float32 and not torch.is_autocast_enabled(parameter.device.type)
    return _FP32_TOLERANCE if is_fp32 else _BF16_TOLERANCE


def _random_state(devices: list[torch.device]) -> list[list[int]]:
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]
    return [state.tolist() for state in states]


def trial_rows(model: nn.Module, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Ids and mask of the two rows, `[2, 9]`, int64, on the model's device, padded left to the longer one."""
    device, longest = next(model.parameters()).device, max(LENGTHS)
    ids = (torch.arange(len(LENGTHS) * longest, device=device).view(len(LENGTHS), longest) * 7 + 3) % vocabulary
    starts = torch.tensor([longest - n for n in LENGTHS], device=device)
    return ids, (torch.arange(longest, device=device) >= starts[:, None]).long()


def score(model: Any, ids: Tensor, mask: Tensor, *, right: int = 0) -> Tensor:
    """Log-probs of each row's last tokens, `[B, COMPLETION]`, fp32.

    Args:
        model: with TRL's fused head, or a `RowsModel`.
        ids: `[B, L]`, int64.
        mask: `[B, L]`, int64.
        right: columns of padding behind the last tokens.
    """
    last = ids.shape[1] - right
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, : last - COMPLETION] = -100
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    return outputs.log_probs[:, last - COMPLETION - 1 : last - 1].float()

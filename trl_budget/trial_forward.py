"""Trial forwards: what a config does not tell, two short rows do.

They run once, when the trainer is built, on fourteen tokens. One catches what packing would change: a layer that
carries one row into the next, an attention feature that would be dropped, positions that do not restart. The other
catches forwards that are random in training mode. They compute no gradient and leave the random state as it was.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from trl_budget.micro_batch import RowsModel

_LENGTHS = (5, 9)
_COMPLETION = 3
_FP32_TOLERANCE, _BF16_TOLERANCE = 1e-3, 5e-2


@torch.no_grad()
def packing_fault(
    model: nn.Module, vocabulary: int, autocast: AbstractContextManager[Any], *, is_exact: bool
) -> str | None:
    """What is wrong with packed rows of this model; None if nothing is.

    Args:
        model: the policy with TRL's fused head and its packing attention, on the device it trains on.
        vocabulary: number of token ids that can be used.
        autocast: context of the policy's forward.
        is_exact: whether other rows must not move a row by a bit. Routed experts share matrices between rows, so
            there only the size of the difference counts.
    """
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    try:
        with autocast:
            tolerance = _tolerance(model)
            ids, mask = _rows(vocabulary, device)
            together = _score(RowsModel(model, _COMPLETION, is_packed=True), ids, mask)
            other = ids.clone()
            other[0] = (other[0] + vocabulary // 2) % vocabulary
            beside_another = _score(RowsModel(model, _COMPLETION, is_packed=True), other, mask)
            alone = torch.cat(
                [_score(model, ids[i : i + 1, -n:], mask[i : i + 1, -n:]) for i, n in enumerate(_LENGTHS)]
            )
    except (TypeError, ValueError, NotImplementedError) as error:
        return f"a trial run of packed rows failed: {error}"
    finally:
        model.train(was_training)
    difference = _difference(together, alone)
    if not difference <= tolerance:
        return f"in a trial run a packed row differed from the row alone by {difference:.2g}"
    leak = (together[1] - beside_another[1]).abs().max().item()
    if leak > (0.0 if is_exact else tolerance):
        return f"in a trial run one row moved the next by {leak:.2g}"
    return None


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
            _score(model, *_rows(vocabulary, device))
            return _random_state(devices) != before
    finally:
        model.train(was_training)


def trial_scores(model: nn.Module, vocabulary: int) -> Tensor:
    """Log-probs of the rows' last tokens, fp32, as the model is and in the present autocast."""
    return _score(model, *_rows(vocabulary, next(model.parameters()).device))


def difference_of_scores(model: nn.Module, scores: Tensor, expected: Tensor) -> tuple[float, float]:
    """The largest relative difference, and the one that rounding may make in the present autocast."""
    return _difference(scores, expected), _tolerance(model)


def _difference(scores: Tensor, expected: Tensor) -> float:
    return ((scores - expected).abs() / (1 + expected.abs())).max().item()


def _tolerance(model: nn.Module) -> float:
    parameter = next(model.parameters())
    is_fp32 = parameter.dtype == torch.float32 and not torch.is_autocast_enabled(parameter.device.type)
    return _FP32_TOLERANCE if is_fp32 else _BF16_TOLERANCE


def _random_state(devices: list[torch.device]) -> list[list[int]]:
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]
    return [state.tolist() for state in states]


def _rows(vocabulary: int, device: torch.device) -> tuple[Tensor, Tensor]:
    longest = max(_LENGTHS)
    ids = (torch.arange(len(_LENGTHS) * longest, device=device).view(len(_LENGTHS), longest) * 7 + 3) % vocabulary
    starts = torch.tensor([longest - n for n in _LENGTHS], device=device)
    return ids, (torch.arange(longest, device=device) >= starts[:, None]).long()


def _score(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """Log-probs of the last tokens, `[B, _COMPLETION]`."""
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :-_COMPLETION] = -100
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    return outputs.log_probs[:, -_COMPLETION:].float()

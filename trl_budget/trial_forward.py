"""Trial forwards: what a config does not tell, two short rows do.

They run once, when the trainer is built, on fourteen tokens. One catches what packing would change: a layer that
carries one row into the next, an attention feature that would be dropped, positions that do not restart. The other
catches forwards that are random in training mode. They compute no gradient and leave the random state as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trl_budget.micro_batch import RowsModel

# What a model raises that cannot be called so. Out of memory is no answer about the model.
TRIAL_ERRORS = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, NotImplementedError)
_LENGTHS = (5, 9)
COMPLETION = 3
_FP32_TOLERANCE, _BF16_TOLERANCE = 1e-3, 5e-2


@torch.no_grad()
def packing_fault(
    model: nn.Module,
    vocabulary: int,
    autocast: AbstractContextManager[Any],
    *,
    is_exact: bool,
    unpacked: AbstractContextManager[Any] | None = None,
) -> str | None:
    """What is wrong with packed rows of this model; None if nothing is.

    Args:
        model: the policy with TRL's fused head and its packing attention, on the device it trains on.
        vocabulary: number of token ids that can be used.
        autocast: context of the policy's forward.
        is_exact: whether other rows must not move a row by a bit. Routed experts share matrices between rows, so
            there only the size of the difference counts.
        unpacked: context in which the model has its own attention, which a row alone is scored with.
    """
    packed = RowsModel(model, COMPLETION, is_packed=True)
    try:
        with evaluating(model), autocast:
            tolerance = _tolerance(model)
            ids, mask = trial_rows(model, vocabulary)
            together = score(packed, ids, mask)
            other = ids.clone()
            other[0] = (other[0] + vocabulary // 2) % vocabulary
            beside_another = score(packed, other, mask)
            with unpacked or nullcontext():
                alone = torch.cat(
                    [score(model, ids[i : i + 1, -n:], mask[i : i + 1, -n:]) for i, n in enumerate(_LENGTHS)]
                )
    except (TypeError, ValueError, NotImplementedError) as error:
        return f"a trial run of packed rows failed: {error}"
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


def trial_rows(model: nn.Module, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Ids and mask of the two rows, `[2, 9]`, int64, on the model's device, padded left to the longer one."""
    device, longest = next(model.parameters()).device, max(_LENGTHS)
    ids = (torch.arange(len(_LENGTHS) * longest, device=device).view(len(_LENGTHS), longest) * 7 + 3) % vocabulary
    starts = torch.tensor([longest - n for n in _LENGTHS], device=device)
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

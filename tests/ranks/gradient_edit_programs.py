"""What each rank runs in the tests of edited gradients and of weights swapped in for a save."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from adamw_programs import LEARNING_RATE, NOWHERE, backward, bits, num_passes, pass_gradients, start_weights
from torch.nn import Parameter

from trl_budget import HostAdamW, SettingsError

LOCAL, DROPPED, EDITED = 3, 1, 2  # indices of parameters
MAX_NORM = 1.0


def edit_of_all_ranks(parameters: Sequence[Parameter]) -> None:
    parameters[EDITED].grad[5:9] = 0
    parameters[DROPPED].grad = None
    parameters[NOWHERE].grad = torch.full_like(parameters[NOWHERE], 0.5)


def with_sums(sharding: str, dtype: torch.dtype) -> tuple[HostAdamW, list[Parameter]]:
    rank = dist.get_rank()
    parameters = start_weights(rank, dtype)
    optimizer = HostAdamW(parameters, lr=LEARNING_RATE, sharding=sharding)
    for number in range(num_passes(0, rank)):
        backward(parameters, pass_gradients(0, rank, number, dtype))
    return optimizer, parameters


def shown(parameters: Sequence[Parameter]) -> list[Any]:
    return [None if p.grad is None else p.grad.clone() for p in parameters]


def edit(sharding: str, dtype: torch.dtype) -> dict[str, Any]:
    optimizer, parameters = with_sums(sharding, dtype)
    with optimizer.editable_gradients():
        own = shown(parameters)
        if dist.get_rank() == 1:
            parameters[LOCAL].grad.zero_()
    norm = optimizer.clip_grad_norm_(MAX_NORM)
    with optimizer.editable_gradients():
        mean = shown(parameters)
        edit_of_all_ranks(parameters)
    gradients = [optimizer.gradient(p) if p.requires_grad else None for p in parameters]
    gradients = [None if g is None else g.clone() for g in gradients]
    after = optimizer.clip_grad_norm_(torch.inf)
    optimizer.step()
    masters = {i: optimizer.state[p]["master_weights"].clone() for i, p in enumerate(parameters) if p.requires_grad}
    result = {"own": own, "norm": norm, "mean": mean, "gradients": gradients, "after": after, "masters": masters}
    return {**result, "weights": bits(parameters)}


def edit_all(cases: Sequence[tuple[str, torch.dtype]]) -> dict[Any, Any]:
    results = {case: edit(*case) for case in cases}
    results["zeroed"] = zero_after_clipping()
    results["differ"] = differ()
    results |= {("swapped", sharding): swap_for_a_save(sharding) for sharding in ("sharded", "replicated", "rank0")}
    return results


def zero_after_clipping() -> bool:
    """Whether a step after `zero_grad()` leaves everything where it was."""
    optimizer, parameters = with_sums("auto", torch.bfloat16)
    optimizer.clip_grad_norm_(MAX_NORM)
    before = bits(parameters)
    optimizer.zero_grad()
    optimizer.step()
    return all(torch.equal(a, b) for a, b in zip(parameters, before, strict=True))


def differ() -> str:
    """What edits say that are not the same on every rank."""
    optimizer, parameters = with_sums("auto", torch.bfloat16)
    optimizer.clip_grad_norm_(MAX_NORM)
    try:
        with optimizer.editable_gradients():
            parameters[EDITED].grad[dist.get_rank()] = 7.0
    except SettingsError as error:
        return str(error)
    return ""


def swap_for_a_save(sharding: str) -> dict[str, Any]:
    """The masters before, during and after a save of other weights; what is adopted when these have gone again."""
    optimizer, parameters = with_sums(sharding, torch.bfloat16)
    optimizer.step()
    trained = [p for p in parameters if p.requires_grad]
    kept = bits(trained)
    for parameter in trained:
        parameter.data.fill_(0.25)

    def masters() -> list[torch.Tensor]:
        return [optimizer.state[p]["master_weights"].clone() for p in trained]

    result: dict[str, Any] = {"before": masters()}
    with optimizer.masters_of_present_weights():
        result["during"] = masters()
    for parameter, values in zip(trained, kept, strict=True):
        parameter.data.copy_(values)
    return {**result, "adopted": optimizer.adopt_external_writes(), "after": masters()}

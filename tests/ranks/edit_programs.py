"""What each rank runs in the tests of edited state, norms that overflow, zero gradients and steps that end midway."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from adamw_programs import LEARNING_RATE, backward, bits
from failure_programs import error_of, one_step, parameters_of, same_gradients
from torch import Tensor
from torch.nn import Parameter

from trl_budget import HostAdamW
from trl_budget.errors import HalfSteppedError

SHAPES = ((40, 30), (7,), (7,), (5,))


def replace_tensors(optimizer: Any, parameters: list[Parameter]) -> None:
    for parameter in parameters:
        optimizer.state[parameter]["exp_avg"] = torch.full(parameter.shape, 0.125)
        optimizer.state[parameter]["step"] = torch.tensor(11.0)


def exchange_entries(optimizer: Any, parameters: list[Parameter]) -> None:
    first, second = (optimizer.state[parameter] for parameter in parameters[1:3])
    for key in ("step", "exp_avg", "exp_avg_sq"):
        first[key], second[key] = second[key], first[key]


EDITS: dict[str, Callable[[Any, list[Parameter]], object]] = {
    "clear": lambda optimizer, _: optimizer.state.clear(),
    "replace": replace_tensors,
    "exchange": exchange_entries,
}


def state_of(optimizer: HostAdamW) -> dict[int, dict[str, Tensor]]:
    return {i: {k: v.clone() for k, v in e.items()} for i, e in optimizer.state_dict()["state"].items()}


def edits(sharding: str) -> dict[str, Any]:
    """Edits on every rank, looked at by rank 0 alone; masters on every rank; then an edit on one rank."""
    results: dict[str, Any] = {}
    for name, edit in EDITS.items():
        parameters = parameters_of(*SHAPES, dtype=torch.bfloat16)
        optimizer = HostAdamW(parameters, lr=LEARNING_RATE, sharding=sharding)
        one_step(optimizer, parameters)
        edit(optimizer, parameters)
        looked = state_of(optimizer) if dist.get_rank() == 0 else None
        one_step(optimizer, parameters, 1)
        results[name] = {"looked": looked, "state": state_of(optimizer), "weights": bits(parameters)}
    for parameter in parameters:
        optimizer.state[parameter]["master_weights"] = torch.full(parameter.shape, 1.001)
    optimizer.adopt_external_writes()
    results["masters"] = bits([optimizer.state[p]["master_weights"] for p in parameters])
    results["cast"] = bits(parameters)
    if dist.get_rank() == 1:
        optimizer.state.clear()
    results["one"] = error_of(lambda: one_step(optimizer, parameters, 2))
    return results


def overflows(sharding: str, max_norm: float | None) -> dict[str, Any]:
    """Finite gradients whose norm overflows; then one that is infinite on one rank."""
    parameters = parameters_of(*SHAPES)
    optimizer = HostAdamW(parameters, lr=LEARNING_RATE, sharding=sharding)
    one_step(optimizer, parameters)
    optimizer.zero_grad()
    backward(parameters, [gradient * 1e19 for gradient in same_gradients(parameters, 1)])
    norm = None if max_norm is None else optimizer.clip_grad_norm_(max_norm)
    optimizer.step()
    result = {"norm": norm, "skipped": optimizer.num_consecutive_skipped_steps, "state": state_of(optimizer)}
    result["weights"] = bits(parameters)
    gradients = same_gradients(parameters, 2)
    gradients[3][0] = float("inf") if dist.get_rank() == 1 else 1.0
    backward(parameters, gradients)
    optimizer.step()
    return {**result, "skipped after": optimizer.num_consecutive_skipped_steps, "last": bits(parameters)}


def zeros(sharding: str) -> dict[str, Any]:
    """Of four parameters one is always used, one in the first step only, one there on rank 0 only, one never."""
    parameters = parameters_of(*SHAPES)
    optimizer = HostAdamW(parameters, lr=LEARNING_RATE, sharding=sharding)
    for step in range(3):
        gradients: list[Tensor | None] = same_gradients(parameters, step)
        is_here = [True, step == 0, step == 0 and dist.get_rank() == 0, False]
        backward(parameters, [g if here else None for g, here in zip(gradients, is_here, strict=True)])
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return {"state": state_of(optimizer), "weights": bits(parameters)}


def half_stepped(sharding: str) -> dict[str, Any]:
    """Rank 0 fails in the second step; every rank refuses to go on until the state of the first is loaded."""
    parameters = parameters_of(*SHAPES, dtype=torch.bfloat16)
    optimizer = HostAdamW(parameters, lr=LEARNING_RATE, sharding=sharding)
    one_step(optimizer, parameters)
    saved = copy.deepcopy(optimizer.state_dict())
    if dist.get_rank() == 0:
        optimizer._step_block = lambda *_: exec("raise ArithmeticError('on purpose')")
    errors = [name_of(lambda: one_step(optimizer, parameters, 1))]
    vars(optimizer).pop("_step_block", None)
    calls = (optimizer.check_whole, optimizer.state_dict, optimizer.step, lambda: optimizer.clip_grad_norm_(1.0))
    errors += [name_of(call) for call in calls]
    optimizer.zero_grad()
    optimizer.load_state_dict(saved)
    one_step(optimizer, parameters, 1)
    return {"errors": errors, "state": state_of(optimizer), "weights": bits(parameters)}


def name_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except (ArithmeticError, HalfSteppedError, RuntimeError) as error:
        return type(error).__name__
    return "nothing"

"""What each rank runs in the tests of sums that begin while the last backward runs."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from adamw_programs import LEARNING_RATE, backward, bits, max_norm_of, num_passes, pass_gradients, start_weights
from failure_programs import error_of, parameters_of, same_gradients
from streaming_programs import small_ring
from tiny import tiny_model
from torch import Tensor
from torch.nn import Parameter
from trainer_programs import run

from trl_budget import BudgetGRPOConfig, BudgetGRPOTrainer, HostAdamW, gradient_norm, rank_sums
from trl_budget.early_sums import EarlySums

STEPS = 6


def optimizer_of(parameters: list[Parameter], sharding: str = "sharded") -> HostAdamW:
    optimizer = HostAdamW(parameters, lr=LEARNING_RATE, sharding=sharding, gradient_placement="host")
    small_ring(optimizer)
    return optimizer


def steps(sharding: str, *, says_so: bool) -> dict[str, Any]:
    """Steps of several backwards; in the last of each, whether said or not, there is time to sum before it is used."""
    rank = dist.get_rank()
    parameters = start_weights(rank, torch.bfloat16)
    optimizer = optimizer_of(parameters, sharding)
    norms: list[Tensor] = []
    history, early = [], []
    for step in range(STEPS):
        count = num_passes(step, rank)
        for number in range(count):
            if says_so:
                optimizer.begin_backward(is_last=number == count - 1)
            backward(parameters, pass_gradients(step, rank, number, torch.bfloat16))
        dist.barrier()
        time.sleep(0.1)
        sums: EarlySums | None = optimizer._gradients._early
        early.append(sorted(slot.name for slot in sums._done) if sums is not None else [])
        with torch.no_grad():  # a loss that is only looked at is no backward
            optimizer.begin_backward(is_last=True)
        if (max_norm := max_norm_of(step)) is not None:
            norms.append(optimizer.clip_grad_norm_(max_norm))
        optimizer.step()
        history.append(bits(parameters))
    state = {i: {k: v.clone() for k, v in e.items()} for i, e in optimizer.state_dict()["state"].items()}
    return {"norms": norms, "history": history, "state": state, "early": early}


def all_steps(shardings: tuple[str, ...]) -> dict[Any, Any]:
    """Norms in rows, as of GPU parameters; chunks of another size where sums are early."""
    gradient_norm.is_measured_in_rows = rank_sums.is_measured_in_rows = lambda _: True
    rank_sums.CHUNK_ELEMENTS, rank_sums.CHUNK_ELEMENTS_ALONE = (n * gradient_norm.ROW_ELEMENTS for n in (4, 2))
    return {
        (sharding, says_so): steps(sharding, says_so=says_so) for sharding in shardings for says_so in (True, False)
    }


def one_step(optimizer: HostAdamW, parameters: list[Parameter], step: int) -> None:
    optimizer.begin_backward(is_last=True)
    time.sleep(0.05)
    backward(parameters, unequal_gradients(parameters, step))
    time.sleep(0.05)


def unequal_gradients(parameters: list[Parameter], step: int) -> list[Tensor]:
    return [(1 + dist.get_rank()) * gradient for gradient in same_gradients(parameters, step)]


def refusals() -> dict[str, Any]:
    """A second gradient after the last backward, in a hook and by hand; another backward; and the steps after them."""
    parameters = parameters_of(dtype=torch.bfloat16)
    optimizer = optimizer_of(parameters)
    one_step(optimizer, parameters, 0)  # nothing is known of how many gradients a backward makes
    optimizer.step()
    results: dict[str, Any] = {}
    for name, disturb in {
        "backward": lambda: backward(parameters, same_gradients(parameters, 2)),
        "by hand": lambda: assign(parameters),
        "begin": lambda: one_step(optimizer, parameters, 2),
    }.items():
        one_step(optimizer, parameters, 1)
        dist.barrier()
        time.sleep(0.1)  # time to sum early: the last case is none otherwise
        if dist.get_rank() == 1:
            disturb()
        elif name == "begin":
            optimizer.begin_backward(is_last=True)
        results[name] = error_of(optimizer.step)
        for parameter in parameters:
            parameter.grad = None
        time.sleep(0.1 * dist.get_rank())  # the first must not take what the other said of the dropped step
        optimizer.zero_grad(set_to_none=name != "by hand")
    one_step(optimizer, parameters, 3)
    optimizer.step()
    results["weights"] = bits(parameters)

    parameters = parameters_of(dtype=torch.bfloat16)
    optimizer = optimizer_of(parameters)
    for step in (0, 3):
        backward(parameters, unequal_gradients(parameters, step))
        optimizer.step()
    results["expected"] = bits(parameters)
    return results


def assign(parameters: list[Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)


def repeated() -> dict[str, Any]:
    """A parameter that a backward makes two gradients of, as when a checkpointed layer is used twice: never early."""
    parameters = parameters_of(dtype=torch.bfloat16)
    optimizer = optimizer_of(parameters)
    early = []
    for step in range(3):
        optimizer.begin_backward(is_last=True)
        gradients = same_gradients(parameters, step)
        backward(parameters, gradients)
        backward(parameters[:1], gradients[:1])
        time.sleep(0.05)
        early.append([slot.name for slot in optimizer._gradients._early._done])
        optimizer.step()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, early)
    return {"early": everyone, "weights": bits(parameters)}


def threads_that_sum() -> dict[str, Any]:
    """On which threads micro-batches are summed, and the ranks' gradients, early and in the step before."""
    parameters = parameters_of(dtype=torch.bfloat16)
    optimizer = optimizer_of(parameters)
    sums, threads = optimizer._gradients._sums, []
    sum_chunk = sums._sum_chunk

    def note_and_sum(chunk: Any) -> None:
        threads.append(threading.get_ident())
        sum_chunk(chunk)

    sums._sum_chunk = note_and_sum
    for _ in range(2):  # a backward that is not said to be the last
        optimizer.begin_backward(is_last=False)
        backward(parameters, same_gradients(parameters, 0))
        optimizer.step()
    late = set(threads)
    threads.clear()
    one_step(optimizer, parameters, 1)
    deadline = time.monotonic() + 10
    while not optimizer._gradients._early._done and time.monotonic() < deadline:
        time.sleep(0.001)
    dist.barrier()  # nobody ends the other's sums
    early = set(threads)
    optimizer.step()
    background: list[int] = []
    optimizer._background.submit(lambda: background.append(threading.get_ident())).result()
    return {"early": early, "late": late, "background": set(background)}


def trainers(folder: Path) -> dict[Any, Any]:
    """The whole trainer, one backward a micro-batch and in packed passes; there is time for every early sum."""
    counts: list[int] = []
    end = EarlySums.end

    def end_late(self: EarlySums) -> Any:
        time.sleep(0.1)
        done = end(self)
        counts.append(len(done))
        return done

    EarlySums.end = end_late
    results: dict[Any, Any] = {}
    for name, settings in {
        "micro-batches": {"max_tokens_per_microbatch": None, "padding_free": "stock"},
        "passes": {"max_tokens_per_microbatch": 40},
    }.items():
        for placement, is_early in (("host", True), ("host", False), ("device", True)):
            counts.clear()
            results[name, placement, is_early] = run(
                BudgetGRPOTrainer,
                folder,
                model=tiny_model(torch.bfloat16),
                gradient_accumulation_steps=2,
                config_class=BudgetGRPOConfig,
                gradient_placement=placement,
                sum_ranks_during_backward=is_early,
                **settings,
            )
            results[name, placement, is_early]["early"] = list(counts)
    return results

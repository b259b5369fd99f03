"""What each rank runs in the tests of steps that go wrong after their sums have begun early."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from adamw_programs import backward, bits
from early_programs import optimizer_of, unequal_gradients
from failure_programs import error_of, parameters_of
from torch import Tensor
from torch.nn import Parameter

from trl_budget import HostAdamW
from trl_budget.errors import HostThreadError
from trl_budget.shared_state import SharedSlot

Program = Callable[[HostAdamW, list[Parameter]], None]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.001)


def last_backward(optimizer: HostAdamW, parameters: list[Parameter], step: int) -> None:
    optimizer.begin_backward(is_last=True)
    backward(parameters, unequal_gradients(parameters, step))


def wait_for_sums(optimizer: HostAdamW) -> None:
    """Until every rank has summed early all that it reduces. Collective."""
    own = {slot for slot in optimizer._slots.values() if slot.reducer == dist.get_rank()}
    until(lambda: own <= optimizer._gradients._early._done)
    dist.barrier()


def summed(*shapes: tuple[int, ...]) -> tuple[HostAdamW, list[Parameter]]:
    """An optimizer after a step, and after the sums of a second one."""
    parameters = parameters_of(*shapes, dtype=torch.bfloat16)
    optimizer = optimizer_of(parameters)
    last_backward(optimizer, parameters, 0)
    optimizer.step()
    last_backward(optimizer, parameters, 1)
    wait_for_sums(optimizer)
    return optimizer, parameters


def stepped_late(steps: Sequence[int], *shapes: tuple[int, ...]) -> list[Tensor]:
    parameters = parameters_of(*shapes, dtype=torch.bfloat16)
    optimizer = optimizer_of(parameters)
    for step in steps:
        backward(parameters, unequal_gradients(parameters, step))
        optimizer.step()
    return bits(parameters)


def looks_and_goes_on(optimizer: HostAdamW, parameters: list[Parameter]) -> None:
    optimizer.gradient(parameters[0])
    backward(parameters, unequal_gradients(parameters, 2))


def rank_1_begins_another(optimizer: HostAdamW, parameters: list[Parameter]) -> None:
    if dist.get_rank() == 1:
        optimizer.begin_backward(is_last=False)
        backward(parameters, unequal_gradients(parameters, 2))


def rank_1_repeats(optimizer: HostAdamW, parameters: list[Parameter]) -> None:
    if dist.get_rank() == 1:
        optimizer.zero_grad()
        last_backward(optimizer, parameters, 2)


def rank_1_repeats_without_a_word(optimizer: HostAdamW, parameters: list[Parameter]) -> None:
    if dist.get_rank() == 1:
        optimizer.zero_grad()
        backward(parameters, unequal_gradients(parameters, 2))


def rank_0_is_ahead_and_drops_late(optimizer: HostAdamW, parameters: list[Parameter]) -> None:
    """What rank 0 says of a step that both drop has the number of rank 1's next."""
    optimizer.zero_grad()
    dist.barrier()
    is_ahead = dist.get_rank() == 0
    if is_ahead:
        optimizer.begin_backward(is_last=True)
    last_backward(optimizer, parameters, 1)
    until(lambda: optimizer._gradients._early._told == set(optimizer._slots.values()))
    dist.barrier()
    if is_ahead:
        dist.barrier()  # rank 1 has summed
    optimizer.zero_grad()
    last_backward(optimizer, parameters, 2)
    if not is_ahead:
        wait_for_sums(optimizer)


def rank_0_fails_to_sum(optimizer: HostAdamW, parameters: list[Parameter]) -> None:
    """The error is caught, and the step goes on."""
    sum_ranks = optimizer._gradients._sum_ranks

    def fail(slots: Sequence[SharedSlot]) -> None:
        sum_ranks(slots)
        raise HostThreadError("no memory behind it")

    optimizer.zero_grad()
    dist.barrier()
    if dist.get_rank() == 0:
        optimizer._gradients._sum_ranks = fail
    last_backward(optimizer, parameters, 2)
    if dist.get_rank() == 0:
        until(lambda: optimizer._gradients._early._error is not None)
        del optimizer._gradients._sum_ranks
    dist.barrier()
    if dist.get_rank() == 0:
        error_of(lambda: optimizer.gradient(parameters[0]))


def misused(misuse: Program, *shapes: tuple[int, ...]) -> dict[str, Any]:
    """What `misuse` of a summed step leads to, also when that is ignored; and the step that follows."""
    optimizer, parameters = summed(*shapes)
    misuse(optimizer, parameters)
    errors = [error_of(lambda: optimizer.clip_grad_norm_(1.0)), error_of(optimizer.step)]
    optimizer.zero_grad()
    last_backward(optimizer, parameters, 3)
    wait_for_sums(optimizer)
    optimizer.step()
    return {"errors": errors, "weights": bits(parameters), "expected": stepped_late((0, 3), *shapes)}


def ahead() -> dict[str, Any]:
    """Rank 0 begins a backward that does not come about; after the next step, sums begin early again."""
    optimizer, parameters = summed()
    optimizer.step()
    if dist.get_rank() == 0:
        optimizer.begin_backward(is_last=True)
    optimizer.zero_grad()
    for step in (2, 3):
        last_backward(optimizer, parameters, step)
        if step == 3:
            wait_for_sums(optimizer)
        optimizer.step()
    return {"weights": bits(parameters), "expected": stepped_late((0, 1, 2, 3))}


def interrupted() -> dict[str, Any]:
    """An interrupt while rank 0 waits for its early sums; whoever drops the step waits for them again."""
    shape = (40, 30)  # one parameter, which rank 0 sums
    optimizer, parameters = summed(shape)
    optimizer.zero_grad()
    dist.barrier()
    results = interrupted_sums(optimizer, parameters) if dist.get_rank() == 0 else {}
    if dist.get_rank() == 1:
        last_backward(optimizer, parameters, 2)
        dist.barrier()
        optimizer.zero_grad()
    last_backward(optimizer, parameters, 3)
    wait_for_sums(optimizer)
    optimizer.step()
    return {**results, "weights": bits(parameters), "expected": stepped_late((0, 3), shape)}


def interrupted_sums(optimizer: HostAdamW, parameters: list[Parameter]) -> dict[str, Any]:
    sum_chunk, has_begun, may_end = optimizer._gradients._sums._sum_chunk, threading.Event(), threading.Event()

    def wait_and_sum(chunk: Any) -> None:
        has_begun.set()
        may_end.wait(10)
        sum_chunk(chunk)

    optimizer._gradients._sums._sum_chunk = wait_and_sum
    last_backward(optimizer, parameters, 2)
    assert has_begun.wait(10)
    dist.barrier()
    interrupts = [interrupt_of(optimizer.step), interrupt_of(optimizer.zero_grad)]
    threading.Timer(0.1, may_end.set).start()
    optimizer.zero_grad()
    del optimizer._gradients._sums._sum_chunk
    return {"interrupts": interrupts, "has_waited": may_end.is_set()}


def interrupt_of(action: Callable[[], Any]) -> str:
    """What a KeyboardInterrupt in `action` makes of it."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        action()
    except KeyboardInterrupt:
        return "interrupted"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return "done"

"""What each rank runs in the tests of what goes wrong, and of what others write."""

from __future__ import annotations

import copy
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from adamw_programs import LEARNING_RATE, backward, bits
from torch.nn import Parameter

from trl_budget import HostAdamW, node_memory, pinned, shared_state
from trl_budget.errors import HostMemoryError, HostThreadError, RankError, SettingsError
from trl_budget.pinned import host_slab_bytes
from trl_budget.sharding import HostMemoryPlan


def parameters_of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes or ((40, 30), (7,))]


def same_gradients(parameters: list[Parameter], step: int) -> list[Any]:
    """Equal on every rank, so their mean is exact for 1, 2 and 4 ranks."""
    generator = torch.Generator().manual_seed(50 + step)
    return [torch.randn(p.shape, generator=generator) for p in parameters]


def error_of(action: Callable[[], Any]) -> tuple[str, str, float]:
    """Name and text of what `action` raises, and the seconds it took."""
    start = time.monotonic()
    try:
        action()
    except (HostMemoryError, HostThreadError, RankError, SettingsError) as error:
        return type(error).__name__, str(error), time.monotonic() - start
    raise AssertionError("nothing was raised")


def one_step(optimizer: HostAdamW, parameters: list[Parameter], step: int = 0) -> None:
    backward(parameters, same_gradients(parameters, step))
    optimizer.step()


def dies_while_stepping(sharding: str) -> Any:
    parameters = parameters_of()
    optimizer = HostAdamW(parameters, sharding=sharding)
    one_step(optimizer, parameters)
    if dist.get_rank() == 0:
        optimizer._step_block = lambda *_: os._exit(9)
    return error_of(lambda: one_step(optimizer, parameters, 1))


def dies_before_the_reduction() -> Any:
    parameters = parameters_of()
    optimizer = HostAdamW(parameters)
    one_step(optimizer, parameters)
    backward(parameters, same_gradients(parameters, 1))
    if dist.get_rank() == 1:
        os._exit(9)
    return error_of(optimizer.step)


def fails_while_stepping() -> Any:
    """Rank 1 fails in one step and takes its time in the next, once the state before has been loaded."""
    parameters = parameters_of()
    optimizer = HostAdamW(parameters)
    saved = copy.deepcopy(optimizer.state_dict())
    if dist.get_rank() == 1:

        def fail(*_: Any) -> None:
            raise SettingsError("the reason of rank 1.")

        optimizer._step_block = fail
    error = error_of(lambda: one_step(optimizer, parameters))
    if dist.get_rank() == 1:
        del optimizer._step_block
        step_block = optimizer._step_block

        def late(*args: Any) -> None:
            time.sleep(0.3)
            step_block(*args)

        optimizer._step_block = late
    optimizer.zero_grad()
    optimizer.load_state_dict(saved)
    one_step(optimizer, parameters)
    return *error, bits(parameters)


def does_not_come(seconds: float) -> Any:
    parameters = parameters_of()
    optimizer = HostAdamW(parameters)
    if dist.get_rank() == 1:
        time.sleep(seconds)
        return None
    return error_of(lambda: one_step(optimizer, parameters))


def refused_on_rank_1() -> Any:
    if dist.get_rank() == 1:
        pinned.available_host_memory = lambda: 1000
    return error_of(lambda: HostAdamW(parameters_of()))


def differs_on_rank_1() -> dict[str, Any]:
    first = dist.get_rank() == 0
    shapes = parameters_of((4, 3), (5,)) if first else parameters_of((4, 3), (6,))
    number = parameters_of((4, 3), (5,)) if first else parameters_of((4, 3))
    dtype = parameters_of((4, 3), dtype=torch.float32 if first else torch.bfloat16)
    return {
        "shape": error_of(lambda: HostAdamW(shapes)),
        "number": error_of(lambda: HostAdamW(number)),
        "dtype": error_of(lambda: HostAdamW(dtype)),
        "sharding": error_of(lambda: HostAdamW(parameters_of(), sharding="rank0" if first else "sharded")),
    }


def nodes_of_different_size() -> Any:
    return error_of(lambda: HostAdamW(parameters_of()))


def writes(sharding: str) -> dict[str, Any]:
    """Writes by others, on every rank and on one; and a backward that comes too late."""
    parameters = parameters_of(dtype=torch.bfloat16)
    optimizer = HostAdamW(parameters, lr=LEARNING_RATE, sharding=sharding)
    one_step(optimizer, parameters)
    with torch.no_grad():
        parameters[0].fill_(0.5)
    adopted = optimizer.adopt_external_writes()
    result: dict[str, Any] = {"adopted": adopted, "master": optimizer.state[parameters[0]]["master_weights"].clone()}
    optimizer.set_master_weights([(parameters[1], torch.full((7,), 1.001))])
    result["set"] = optimizer.state[parameters[1]]["master_weights"].clone()
    result["cast"] = parameters[1].detach().clone()
    backward(parameters, same_gradients(parameters, 2))
    optimizer.clip_grad_norm_(1.0)
    result["late"] = error_of(lambda: backward(parameters, same_gradients(parameters, 3)))
    optimizer.zero_grad()
    if dist.get_rank() == 1:
        parameters[1].data[0] = 100.0
    result["one"] = error_of(lambda: one_step(optimizer, parameters, 4))
    return result


def skips(sharding: str) -> dict[str, Any]:
    """A gradient that is not finite on one rank; then a clip of one parameter, and a second clip of all."""
    parameters = parameters_of()
    optimizer = HostAdamW(parameters, lr=LEARNING_RATE, sharding=sharding)
    before = bits(parameters)
    gradients = same_gradients(parameters, 0)
    if dist.get_rank() == 1:
        gradients[1][3] = float("inf")
    backward(parameters, gradients)
    norm = optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    result: dict[str, Any] = {
        "norm": norm,
        "moved": [not torch.equal(a, b) for a, b in zip(bits(parameters), before, strict=True)],
        "skipped": optimizer.num_consecutive_skipped_steps,
    }
    backward(parameters, same_gradients(parameters, 1))
    result["norms"] = [optimizer.clip_grad_norm_(0.1, parameters[:1]), optimizer.clip_grad_norm_(1.0)]
    optimizer.step()
    return {**result, "weights": bits(parameters)}


def resume(saved: Path, steps: range, sharding: str) -> dict[str, Any]:
    """Loads what is saved, runs `steps`, saves on rank 0."""
    parameters = parameters_of(dtype=torch.bfloat16)
    with torch.no_grad():
        parameters[0].add_(steps.start)  # the state brings the weights
    optimizer = HostAdamW(parameters, lr=LEARNING_RATE, sharding=sharding)
    if saved.exists():
        optimizer.load_state_dict(torch.load(saved, mmap=True, weights_only=True))
    for step in steps:
        one_step(optimizer, parameters, step)
    if dist.get_rank() == 0:
        torch.save(optimizer.state_dict(), saved)
    dist.barrier()
    return {"weights": bits(parameters), "masters": bits([optimizer.state[p]["master_weights"] for p in parameters])}


def pss_bytes() -> int:
    fields = dict(line.split()[:2] for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    # Not of files: the share of a library's pages grows whenever another process that has loaded it ends.
    return 1024 * (int(fields["Pss_Anon:"]) + int(fields["Pss_Shmem:"]))


def memory(sharding: str, side: int, num_tensors: int) -> dict[str, int]:
    """What a job of this size maps and what the kernel counts for it, after a step; gradients are not counted."""
    small = parameters_of(dtype=torch.bfloat16)
    warm_up = HostAdamW(small, sharding=sharding)  # code, and what the process shared with the one it was forked from
    one_step(warm_up, small)
    gc.collect()
    dist.barrier()
    parameters = parameters_of(*[(side, side)] * num_tensors, dtype=torch.bfloat16)
    num_elements = sum(p.numel() for p in parameters)
    gradients = [torch.ones_like(p) for p in parameters]
    before = pss_bytes()
    dist.barrier()
    optimizer = HostAdamW(parameters, sharding=sharding)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()
    dist.barrier()
    measured = pss_bytes() - before
    dist.barrier()
    plan = HostMemoryPlan(num_elements, dist.get_world_size(), sharding)
    mapped = optimizer.host_bytes
    del optimizer, warm_up
    gc.collect()
    assert host_slab_bytes() == 0, "memory outlives its optimizer"
    return {"pss": measured, "predicted": plan.node_bytes, "mapped": mapped, "elements": num_elements}


def shares_by_name() -> dict[str, Any]:
    """No anonymous file can be had: /dev/shm serves, and keeps no name."""

    def refuse(name: str) -> int:
        raise PermissionError("not permitted")

    class Refusing(node_memory.NodeMemory):
        def __init__(self, ranks: Any) -> None:
            super().__init__(ranks, make_file=refuse)

    from trl_budget import team

    team.NodeMemory = Refusing
    parameters = parameters_of()
    optimizer = HostAdamW(parameters, lr=LEARNING_RATE)
    one_step(optimizer, parameters)
    names = [path.name for path in Path(node_memory.FALLBACK_FOLDER).glob("trl-budget-*")]
    assert isinstance(optimizer._host_state, shared_state.SharedHostState)
    return {"weights": bits(parameters), "names": names}


def waits_to_be_killed(folder: Path) -> None:
    parameters = parameters_of()
    optimizer = HostAdamW(parameters)
    one_step(optimizer, parameters)
    maps = [
        line.split()[-2:] for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:trl-budget" in line
    ]
    (folder / f"maps-{dist.get_rank()}").write_text("\n".join(" ".join(parts) for parts in maps))
    dist.barrier()
    if dist.get_rank() == 0:
        os.kill(os.getpid(), 9)
    error_of(lambda: one_step(optimizer, parameters, 1))

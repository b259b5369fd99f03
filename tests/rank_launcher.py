"""Runs a function in several processes that form a gloo process group, and kills all of them when time is up.

The processes are forked from a server that has imported the library once: an import takes seconds, a fork none.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

multiprocessing.get_context("forkserver").set_forkserver_preload(["trl_budget", "tiny", "rank_launcher"])


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def rank_environment(rank: int, num_ranks: int, num_nodes: int, port: int) -> dict[str, str]:
    """What torchrun sets, for nodes that are emulated on this machine."""
    per_node = num_ranks // num_nodes
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank % per_node),
        "LOCAL_WORLD_SIZE": str(per_node),
        "GROUP_RANK": str(rank // per_node),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
    }


def _run(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    environment: dict[str, str],
    results: Path,
    timeout: float | None,
) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    rank = environment["RANK"]
    try:
        if timeout is not None:
            dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
        torch.save(function(*args), results / f"{rank}.pt")
    except BaseException:
        (results / f"{rank}.err").write_text(traceback.format_exc())
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    results: Path,
    *args: Any,
    num_nodes: int = 1,
    group_timeout: float | None = 30.0,
    seconds: float = 120.0,
    environments: list[dict[str, str]] | None = None,
    may_die: tuple[int, ...] = (),
    start_method: str = "forkserver",
) -> list[Any]:
    """What `function(*args)` returned on each rank.

    Args:
        function: a module-level function.
        num_ranks: processes.
        results: an existing folder.
        args: pickled.
        num_nodes: emulated nodes, told apart by `GROUP_RANK`.
        group_timeout: the process group's; None leaves making the group to `function`.
        seconds: after which all processes are killed and the test fails.
        environments: replaces the environment of each rank.
        may_die: ranks that may end without a result.
        start_method: "spawn" where the ranks use CUDA, which does not survive a fork.
    """
    folder = results / f"ranks-{time.monotonic_ns()}"
    folder.mkdir(parents=True)
    port = free_port()
    environments = environments or [rank_environment(r, num_ranks, num_nodes, port) for r in range(num_ranks)]
    environments = [{**e, "MASTER_PORT": str(port)} for e in environments]
    make = multiprocessing.get_context(start_method).Process
    processes = [make(target=_run, args=(function, args, e, folder, group_timeout)) for e in environments]
    for process in processes:
        process.start()
    end = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    late = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join()
    errors = [f"rank {path.stem}: {path.read_text()}" for path in sorted(folder.glob("*.err"))]
    assert not errors, "\n".join(errors)
    assert not late, f"ranks {late} did not end within {seconds} s"
    missing = [r for r in range(num_ranks) if not (folder / f"{r}.pt").exists() and r not in may_die]
    assert not missing, f"ranks {missing} ended without a result"
    loaded = [folder / f"{rank}.pt" for rank in range(num_ranks)]
    return [torch.load(path, weights_only=False) if path.exists() else None for path in loaded]

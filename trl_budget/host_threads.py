"""Host threads that take blocks of tensor work one by one, and the cores that torch may use in each of them.

Two kinds. `step_threads`: up to four threads that share the cores, while the calling thread waits. Each operation is
cut by torch's OpenMP loop over the cores of its thread, and while one thread is in Python, between two operations, the
others keep the memory busy. Stepping 3.1 B parameters with 16 cores took 1.39 s on one thread, 1.03 on two of eight
cores, 0.92 on four of four, and 1.83 on sixteen of one, which take turns at the interpreter's lock
(benchmarks/results/host_step.json). `background_thread`: one thread, while the caller queues work for the GPU. It
leaves one core free: OpenMP cuts an operation into equal parts, and a part that shares its core holds up all of them.
Neither kind works while the other does: two teams of threads that use all cores at a time add 0.3 to 1.4 G elements a
second on two cores, where one adds 2.7 to 3.2 (benchmarks/results/thread_teams.json).
The bits do not depend on who takes which block: blocks are disjoint, and what is done to each is elementwise.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from trl_budget.cgroups import MEMBERSHIP, MOUNT, cpu_time_cores
from trl_budget.errors import SettingsError

Item = TypeVar("Item")

logger = logging.getLogger(__name__)

THREADS_VARIABLE = "TRL_BUDGET_HOST_THREADS"
SET_BY_ACCELERATE_LAUNCH = "ACCELERATE_DYNAMO_USE_FULLGRAPH"  # accelerate/utils/launch.py@1.15, for every launcher
THREAD_NAME = "trl-budget-host"
MAX_STEP_THREADS = 4
MIN_CORES_PER_STEP_THREAD = 4
POLL_SECONDS = 5e-3
_start_lock = threading.Lock()  # starting threads changes a setting of the whole process for a moment


class HostThreads:
    """A pool of threads that share the cores of this process; its own torch settings stay as they are.

    The threads end when the pool is collected, after the work they were given, and nobody waits for that: the garbage
    collector runs anywhere, also inside the locks that a wait would need. At exit the executor's module joins them.

    Args:
        count: how many threads, at least 1.
        cores: how many cores torch uses in each; an equal share of `num_host_cores()` when None.
    """

    def __init__(self, count: int, cores: int | None = None) -> None:
        self.count = count
        self.cores = max(1, num_host_cores() // count) if cores is None else cores
        self._executor: ThreadPoolExecutor | None = None

    def start(self) -> None:
        """Starts the threads, if they are not running yet.

        A thread takes its number of cores at its first parallel operation, from the number that the process set last.
        That number is theirs while they start and set back before this returns; another thread that runs its
        first operation in between gets as many.
        """
        with _start_lock:
            if self._executor is not None:
                return
            executor = ThreadPoolExecutor(self.count, thread_name_prefix=THREAD_NAME)
            everyone = threading.Barrier(self.count)
            with _cores(self.cores):
                for started in [executor.submit(_take_cores, everyone) for _ in range(self.count)]:
                    started.result()
            self._executor = executor

    def close(self) -> None:
        """Ends the threads and waits until they have done their work."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown()

    def submit(self, work: Callable[..., None], *args: object) -> Future[None]:
        """Queues one call; calls are begun in the order in which they were queued."""
        if self._executor is None:
            self.start()
        assert self._executor is not None
        return self._executor.submit(work, *args)

    def run(
        self,
        work: Callable[[Item], None],
        items: Iterable[Item],
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Calls `work` on every item, on whichever thread is free, and returns when all are done.

        One item, or a pool of one, runs on the calling thread, with `cores`. In a pool of several, `work` must
        not call `run`: threads that wait for each other's queued calls wait for ever.

        Args:
            work: what to do with an item.
            items: begun in this order.
            meanwhile: called by the calling thread again and again while it would wait, or after every item.

        Raises:
            Exception: the first that `work` raised, or `meanwhile`; items not begun by then are left out.
        """
        pending = deque(items)
        if len(pending) <= 1 or self.count == 1:
            with _cores(self.cores):
                for item in pending:
                    work(item)
                    if meanwhile is not None:
                        meanwhile()
            return

        jobs = [work]  # emptied at the end: a thread that still holds the call must not keep alive what `work` holds
        takers = [self.submit(_take, jobs, pending) for _ in range(min(self.count, len(pending)))]
        try:
            while meanwhile is not None and wait(takers, timeout=POLL_SECONDS).not_done:
                meanwhile()
            for taker in takers:
                taker.result()
        finally:
            pending.clear()
            wait(takers)  # after an error or an interrupt no thread may go on writing
            jobs.clear()


def step_threads() -> HostThreads:
    """Threads for work that the caller waits for; the calling thread itself where there are few cores."""
    return HostThreads(max(1, min(MAX_STEP_THREADS, num_host_cores() // MIN_CORES_PER_STEP_THREAD)))


def background_thread() -> HostThreads:
    """A thread for work beside the caller, with all cores but one."""
    return HostThreads(1, cores=max(1, num_host_cores() - 1))


class ThreadScratch(threading.local):
    """An fp32 host buffer for each thread that asks, kept from call to call so that it stays in the core's cache."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.float32)

    def take(self, num_elements: int) -> Tensor:
        """`[num_elements]`, fp32, uninitialised, valid until this thread's next call."""
        if self._buffer.numel() < num_elements:
            self._buffer = torch.empty(num_elements, dtype=torch.float32)
        return self._buffer[:num_elements]


def host_thread_count(environment: Mapping[str, str] = os.environ, num_cores: int | None = None) -> int:
    """How many cores this process may keep busy.

    `TRL_BUDGET_HOST_THREADS` if it is set. Otherwise the cores that the process may run on, or those that its
    container's limit of CPU time is worth, split between the processes on this machine (`LOCAL_WORLD_SIZE`), or
    `OMP_NUM_THREADS` if that is less. The 1 that torchrun sets for every process, and `accelerate launch` for a single
    one too, is not taken for a wish: it is named in a warning.
    Taken for one, the update of 128 rollouts by one H200 took 32 s, where two took 14 s for twice as many
    (benchmarks/results/two_gpus_second.json).

    Args:
        environment: environment variables.
        num_cores: cores of the process; `usable_cores()` when None.

    Raises:
        SettingsError: `TRL_BUDGET_HOST_THREADS` is no such number.
    """
    if own := environment.get(THREADS_VARIABLE):
        if not own.isdecimal() or int(own) == 0:
            raise SettingsError(
                f"{THREADS_VARIABLE} is {own!r}. It says how many cores the host optimizer keeps busy, at least 1. "
                f"Set {THREADS_VARIABLE} to such a number, or unset it."
            )
        return int(own)
    num_cores = usable_cores() if num_cores is None else num_cores
    num_local_ranks = max(1, int(environment.get("LOCAL_WORLD_SIZE", "1")))
    share = max(1, num_cores // num_local_ranks)
    wished = environment.get("OMP_NUM_THREADS", "").split(",")[0]
    if not wished.isdigit() or int(wished) == 0:
        return share
    is_launched = num_local_ranks > 1 or SET_BY_ACCELERATE_LAUNCH in environment
    if is_launched and wished == "1" and share > 1:
        logger.warning(
            "OMP_NUM_THREADS is 1, which launchers set where nothing else is asked for; one core would make the host "
            "step slow. HostAdamW uses %d threads for torch, this process' share of %d cores. Set OMP_NUM_THREADS to "
            "more than 1, or %s, to choose.",
            share,
            num_cores,
            THREADS_VARIABLE,
        )
        return share
    return min(share, int(wished))


def usable_cores(cgroups: Path = MOUNT, membership: Path = MEMBERSHIP) -> int:
    """Cores that this process may run on, or those that a limit on its CPU time is worth if that is less.

    Args:
        cgroups: where cgroups of version 2 are mounted, or the controllers of version 1.
        membership: the file that names this process' groups.
    """
    cores, limit = len(os.sched_getaffinity(0)), cpu_time_cores(cgroups, membership)
    return cores if limit is None else min(cores, limit)


@functools.cache
def num_host_cores() -> int:
    """`host_thread_count` of this process, found once."""
    return host_thread_count()


@contextmanager
def _cores(num_cores: int) -> Iterator[None]:
    """Torch uses `num_cores` on this thread, and on threads that run their first operation meanwhile."""
    before = torch.get_num_threads()
    if before == num_cores:
        yield
        return
    torch.set_num_threads(num_cores)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _take_cores(everyone: threading.Barrier) -> None:
    everyone.wait()  # each of the calls gets a thread of its own
    torch.zeros(2**17).add_(1)  # long enough to be a parallel operation


def _take(jobs: list[Callable[[Item], None]], pending: deque[Item]) -> None:
    try:
        while pending:
            try:
                item = pending.popleft()
            except IndexError:  # another thread was faster
                return
            jobs[0](item)
    except BaseException:
        pending.clear()
        raise

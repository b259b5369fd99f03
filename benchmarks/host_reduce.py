"""What two ranks of a node do with 32 cores at once: sum their gradients, and step AdamW, by threads and chunk size.

Two processes, each with half of the cores, map both accumulators and sum half of the elements each, as `reduction.py`
does (sum, mean, row norms), at the same time; `sum` is the first of the three alone, what memory allows. Then each
steps AdamW over a part of its accumulator. Seconds are scaled to `--model-elements` in all. Nothing of a GPU is used.

    python benchmarks/host_reduce.py --commit $(git rev-parse HEAD)   # 40 s on 32 cores, 13 GB
"""

from __future__ import annotations

import argparse
import functools
import json
import mmap
import os
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from trl_budget.gradient_norm import row_norms
from trl_budget.host_threads import HostThreads

COUNTS = (1, 2, 4, 8, 16)
LOG2_CHUNKS = (17, 19, 20, 21, 23)
LOG2_BLOCKS = (20, 22)
REPEATS = 3
ADAMW: dict[str, Any] = {
    **dict.fromkeys(("foreach", "capturable", "differentiable", "amsgrad", "maximize"), False),
    "fused": True,
    **{"beta1": 0.9, "beta2": 0.999, "lr": 1e-6, "weight_decay": 0.0, "eps": 1e-8},
}


def mapped(descriptor: int, num_elements: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, 4 * num_elements), dtype=torch.float32)


def reduce_half(halves: list[Tensor], chunk: int, threads: HostThreads, *, whole: bool) -> None:
    """The sum over both, in the second; then, if `whole`, its mean and the norms of its rows."""

    def sum_chunk(parts: tuple[Tensor, Tensor]) -> None:
        first, second = parts
        torch.add(first, second, out=second)
        if whole:
            second.div_(2)
            row_norms(second)

    threads.run(sum_chunk, zip(*(half.split(chunk) for half in halves), strict=True))


def step(state: list[Tensor], block: int, threads: HostThreads) -> None:
    def step_block(parts: tuple[Tensor, ...]) -> None:
        master, gradient, exp_avg, exp_avg_sq = ([part] for part in parts)
        adamw(master, gradient, exp_avg, exp_avg_sq, [], [torch.tensor(1.0)], **ADAMW)

    threads.run(step_block, zip(*(part.split(block) for part in state), strict=True))


def run_rank(rank: int, descriptors: list[int], num_elements: int, barrier: Any, results: Any) -> None:
    num_cores = len(os.sched_getaffinity(0)) // 2
    sources = [mapped(descriptor, num_elements) for descriptor in descriptors]
    sources[rank].fill_(1.0)
    halves = [source[: num_elements // 2] if rank == 0 else source[num_elements // 2 :] for source in sources]
    state = list(sources[rank].chunk(4))
    found: dict[str, float] = {}

    def timed(name: str, work: Callable[[], None], share: float) -> None:
        seconds = []
        for _ in range(REPEATS):
            barrier.wait()
            began = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - began)
        found[name] = min(seconds[1:]) / share

    for count in (count for count in COUNTS if count <= num_cores):
        threads = HostThreads(count, cores=num_cores // count)
        where = f"{count} threads of {threads.cores} cores"
        for log2 in LOG2_CHUNKS:
            for name, whole in (("sum, mean, norms", True), ("sum", False)):
                key = f"{name}: {where}, chunks of 2^{log2}"
                timed(key, functools.partial(reduce_half, halves, 2**log2, threads, whole=whole), 1.0)
        for log2 in LOG2_BLOCKS:
            key = f"AdamW: {where}, blocks of 2^{log2}"
            timed(key, functools.partial(step, state, 2**log2, threads), 0.5)  # a quarter of the elements, not a half
        threads.close()
    results.put((rank, found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=800_000_000, help="of each rank's accumulator")
    parser.add_argument("--model-elements", type=int, default=4_022_468_096, help="what seconds are scaled to")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/host_reduce.json"))
    args = parser.parse_args()
    num_elements = args.elements // 8 * 8
    context = get_context("fork")
    descriptors = [os.memfd_create(f"rank{rank}") for rank in range(2)]
    for descriptor in descriptors:
        os.ftruncate(descriptor, 4 * num_elements)
    barrier, results = context.Barrier(2), context.Queue()
    ranks = [
        context.Process(target=run_rank, args=(rank, descriptors, num_elements, barrier, results)) for rank in (0, 1)
    ]
    for process in ranks:
        process.start()
    found = dict(results.get() for _ in ranks)
    for process in ranks:
        process.join()
    scale = args.model_elements / num_elements
    report = {
        "elements": num_elements,
        "cpu_cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "commit": args.commit,
        "seconds_for_all_elements_of_the_model": {
            name: scale * max(found[rank][name] for rank in (0, 1)) for name in found[0]
        },
    }
    args.output.write_text(json.dumps(report, indent=1) + "\n")
    for name, seconds in report["seconds_for_all_elements_of_the_model"].items():
        print(f"{seconds:.3f} s  {name}")


if __name__ == "__main__":
    main()

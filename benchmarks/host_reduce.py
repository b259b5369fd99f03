"""How fast two ranks of a node sum their gradients: chunk sizes, in place or through a buffer, numbers of threads.

Two processes, each with half of the cores, map both accumulators and sum half of the elements each, as
`reduction.py` does (sum, mean, row norms), at the same time. Nothing of a GPU is used.

    python benchmarks/host_reduce.py --elements 1000000000   # 40 s on 32 cores, 8 GB
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trl_budget.gradient_norm import row_norms
from trl_budget.host_threads import HostThreads, ThreadScratch

CHUNKS = (2**17, 2**18, 2**19, 2**20, 2**21, 2**22)
REPEATS = 4


def mapped(descriptor: int, num_elements: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, 4 * num_elements), dtype=torch.float32)


def reduce_half(sources: list[Tensor], half: slice, chunk: int, threads: HostThreads, *, in_place: bool) -> None:
    """Sum over both, mean, row norms of every chunk of one half; the result is in one of the sources."""
    scratch = ThreadScratch()
    parts = [source[half] for source in sources]

    def sum_chunk(start: int) -> None:
        first, second = (part[start : start + chunk] for part in parts)
        total = second if in_place else scratch.take(first.numel())
        torch.add(first, second, out=total)
        total.div_(2)
        row_norms(total)
        if not in_place:
            second.copy_(total)

    threads.run(sum_chunk, range(0, parts[0].numel(), chunk))


def run_rank(rank: int, descriptors: list[int], num_elements: int, barrier: Any, results: Any) -> None:
    num_cores = len(os.sched_getaffinity(0)) // 2
    sources = [mapped(descriptor, num_elements) for descriptor in descriptors]
    sources[rank].fill_(1.0)
    middle = num_elements // 2 // CHUNKS[-1] * CHUNKS[-1]
    half = slice(0, middle) if rank == 0 else slice(middle, None)
    found = {}
    for count in (1, 2, 4, 8, 16):
        if count > num_cores:
            continue
        threads = HostThreads(count, cores=max(1, num_cores // count))
        for chunk in CHUNKS:
            for in_place in (True,):
                seconds = []
                for _ in range(REPEATS):
                    barrier.wait()
                    began = time.perf_counter()
                    reduce_half(sources, half, chunk, threads, in_place=in_place)
                    seconds.append(time.perf_counter() - began)
                name = f"{count} threads of {threads.cores} cores, chunks of 2^{chunk.bit_length() - 1}, "
                found[name + ("in place" if in_place else "through a buffer")] = seconds
        threads.close()
    results.put((rank, found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=1_000_000_000, help="of each rank's gradient")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/host_reduce.json"))
    args = parser.parse_args()
    context = get_context("fork")
    descriptors = [os.memfd_create(f"rank{rank}") for rank in range(2)]
    for descriptor in descriptors:
        os.ftruncate(descriptor, 4 * args.elements)
    barrier, results = context.Barrier(2), context.Queue()
    ranks = [
        context.Process(target=run_rank, args=(rank, descriptors, args.elements, barrier, results)) for rank in (0, 1)
    ]
    for process in ranks:
        process.start()
    found = dict(results.get() for _ in ranks)
    for process in ranks:
        process.join()
    report = {
        "elements": args.elements,
        "cpu_cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "commit": args.commit,
        "seconds_of_the_slower_rank": {
            name: [max(pair) for pair in zip(*(found[rank][name] for rank in (0, 1)), strict=True)]
            for name in found[0]
        },
    }
    args.output.write_text(json.dumps(report, indent=1) + "\n")
    medians = {name: statistics.median(s[1:]) for name, s in report["seconds_of_the_slower_rank"].items()}
    for name, seconds in sorted(medians.items(), key=lambda pair: pair[1]):
        print(f"{seconds:.3f} s  {8 * args.elements / seconds / 1e9:.0f} GB/s read  {name}")


if __name__ == "__main__":
    main()

"""Host kernels of the optimizer step and of the gradient sum: which form and block size is fastest on this CPU.

    python benchmarks/host_kernels.py --elements 1e9 --output benchmarks/results/host_kernels.json

Every candidate gives the same bits as the first of its group; each time is the best of the repeats, in seconds for
`--elements` parameters. "omp" cuts every operation over all cores, "pool" gives whole blocks to threads of one core.
`--groups pool checksum` measures what the choice between the two, and the checksum, depend on.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from trl_budget.compute_weights import checksums
from trl_budget.grad_offload import add_gradient
from trl_budget.host_threads import HostThreads, ThreadScratch, num_host_cores

BLOCKS = (2**18, 2**19, 2**20, 2**21, 2**22, 2**23)
POOL_BLOCKS = (2**18, 2**19, 2**20, 2**21, 2**22)
LAYER_SHAPES = ((2560,), (2560, 4096), (1024, 2560), (1024, 2560), (4096, 2560), (9728, 2560), (9728, 2560), (2560,))
SETTINGS: dict[str, Any] = {
    "foreach": False, "fused": True, "capturable": False, "differentiable": False, "amsgrad": False,
    "maximize": False, "beta1": 0.9, "beta2": 0.999, "lr": 1e-6, "weight_decay": 0.01, "eps": 1e-8,
}  # fmt: skip
FUSED_SETTINGS = ("amsgrad", "maximize", "beta1", "beta2", "lr", "weight_decay", "eps")
GROUPS = ("omp", "pool", "checksum")


def best(run: Callable[[], Any], repeats: int) -> float:
    """Shortest of `repeats` runs, in seconds."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def step_blocks(tensors: list[Tensor], block: int, clip: str, staging: Tensor | None) -> None:
    """AdamW in blocks, with the clip coefficient applied `in_place`, into a `scratch` block, or `not` at all."""
    master, gradient, exp_avg, exp_avg_sq = tensors
    coefficient = torch.tensor(0.5)
    scratch = torch.empty(block)
    for start in range(0, master.numel(), block):
        w, g, m, v = (t[start : start + block] for t in (master, gradient, exp_avg, exp_avg_sq))
        if clip == "in_place":
            g.mul_(coefficient)
        elif clip == "scratch":
            g = torch.mul(g, coefficient, out=scratch[: g.numel()])
        adamw([w], [g], [m], [v], [], [torch.tensor(1.0)], **SETTINGS)
        if staging is not None:
            staging[: w.numel()].copy_(w)


def add_blocks(accumulator: Tensor, gradient: Tensor, block: int) -> None:
    """fp32 += bf16 through an fp32 buffer that stays in cache."""
    scratch = torch.empty(block)
    for start in range(0, accumulator.numel(), block):
        piece = gradient[start : start + block]
        accumulator[start : start + block].add_(scratch[: piece.numel()].copy_(piece))


def measure(elements: int, repeats: int) -> dict[str, dict[str, float]]:
    tensors = [torch.full((elements,), value) for value in (0.5, 1e-3, 1e-4, 1e-6)]
    low = torch.full((elements,), 1e-3, dtype=torch.bfloat16)
    staging = torch.empty(max(BLOCKS), dtype=torch.bfloat16)
    pieces = list(tensors[1].split(elements // 200))
    threads = len(os.sched_getaffinity(0))
    figures: dict[str, dict[str, float]] = {"adamw": {}, "adamw_clip_cast": {}, "add": {}, "norm": {}}
    figures["adamw"]["whole"] = best(lambda: step_blocks(tensors, elements, "not", None), repeats)
    figures["add"]["mixed add_"] = best(lambda: tensors[1].add_(low), 1)
    figures["add"]["fp32 add_"] = best(lambda: tensors[1].add_(tensors[2]), repeats)
    for block in BLOCKS:
        figures["adamw"][str(block)] = best(lambda b=block: step_blocks(tensors, b, "not", None), repeats)
        for clip in ("in_place", "scratch"):
            run = lambda b=block, c=clip: step_blocks(tensors, b, c, staging)  # noqa: E731
            figures["adamw_clip_cast"][f"{clip} {block}"] = best(run, repeats)
        figures["add"][str(block)] = best(lambda b=block: add_blocks(tensors[1], low, b), repeats)
    tensors[1].fill_(1e-3)
    figures["norm"]["torch, one tensor after the other"] = best(lambda: torch._foreach_norm(pieces, 2.0), repeats)
    for count in (2, 4, 8, threads):
        with ThreadPoolExecutor(count) as pool:
            run_pool = lambda p=pool: list(p.map(torch.linalg.vector_norm, pieces))  # noqa: E731
            figures["norm"][f"{count} threads over tensors"] = best(run_pool, repeats)
    return figures


def measure_pool(elements: int, repeats: int) -> dict[str, dict[str, float]]:
    """Clip and AdamW, and the gradient sum, by blocks: OpenMP within each block against blocks over pools."""
    tensors = [torch.full((elements,), value) for value in (0.5, 1e-3, 1e-4, 1e-6)]
    accumulator, low = torch.zeros(elements), torch.full((elements,), 1e-3, dtype=torch.bfloat16)
    coefficient, step, scratch = torch.tensor(0.5), torch.tensor(1.0), ThreadScratch()
    figures: dict[str, dict[str, float]] = {"clip_adamw": {}, "first_gradient": {}, "add": {}}
    pools = {f"{count} threads": HostThreads(count) for count in sorted({2, 4, num_host_cores()})}
    for pool in pools.values():
        pool.start()
    for block in POOL_BLOCKS:

        def step_block(start: int, direct: bool = False, block: int = block) -> None:
            w, g, m, v = (t[start : start + block] for t in tensors)
            g = torch.mul(g, coefficient, out=scratch.take(g.numel()))
            if direct:  # what torch's function calls in the end
                settings = {k: x for k, x in SETTINGS.items() if k in FUSED_SETTINGS}
                torch._fused_adamw_([w], [g], [m], [v], [], [step], **settings)
            else:
                adamw([w], [g], [m], [v], [], [step.clone()], **SETTINGS)

        def add_block(start: int, is_first: bool, block: int = block) -> None:
            piece = slice(start, start + block)
            add_gradient(accumulator[piece], low[piece], scratch, is_first=is_first)

        kernels: dict[str, dict[str, Callable[[int], None]]] = {
            "clip_adamw": {"": step_block, " direct": functools.partial(step_block, direct=True)},
            "first_gradient": {"": functools.partial(add_block, is_first=True)},
            "add": {"": functools.partial(add_block, is_first=False)},
        }
        starts = range(0, elements, block)
        for group, variants in kernels.items():
            for name, kernel in variants.items():
                by_omp = functools.partial(_each, kernel, starts)
                figures[group][f"omp {block}{name}"] = best(by_omp, repeats)
                for label, pool in pools.items():
                    by_pool = functools.partial(pool.run, kernel, starts)
                    figures[group][f"{label} {block}{name}"] = best(by_pool, repeats)
    return figures


def _each(work: Callable[[int], None], starts: range) -> None:
    for start in starts:
        work(start)


def measure_checksums(elements: int, repeats: int) -> dict[str, float]:
    """Checksums of a model's bf16 weights, calls and synchronisation included."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = sum(math.prod(shape) for shape in LAYER_SHAPES)
    shapes = LAYER_SHAPES * max(1, elements // layer)
    if elements < layer:  # a trial on a small machine
        shapes = tuple((shape[0] // 64, *shape[1:]) for shape in LAYER_SHAPES)
    weights = [torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes]

    def timed(run: Callable[[], Tensor]) -> float:
        run().tolist()
        return best(lambda: run().tolist(), repeats)

    return {
        "num_parameters": len(weights),
        "one parameter after the other": timed(lambda: torch.cat([checksums([w]) for w in weights])),
        "about twenty calls a parameter": timed(lambda: torch.stack([checksum_by_many_calls(w) for w in weights])),
        "batched": timed(lambda: checksums(weights)),
    }


def checksum_by_many_calls(parameter: Tensor) -> Tensor:
    """The same three numbers for one parameter whose rows hold an even number of bf16 values."""
    table = parameter.reshape(parameter.shape[0] if parameter.dim() > 1 else 1, -1)
    words = table.view(torch.int32)
    sums = [words.sum(dim=dim, dtype=torch.int32).to(torch.int64) for dim in (0, 1)]
    weighted = [(s * torch.arange(1, s.numel() + 1, device=s.device)).sum() for s in sums]
    return torch.stack([*weighted, table.sum(dtype=torch.float32).view(torch.int32).to(torch.int64)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=float, default=1e9)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--groups", nargs="+", default=list(GROUPS), choices=GROUPS)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/host_kernels.json"))
    args = parser.parse_args()
    elements = int(args.elements) // 2560 * 2560
    report: dict[str, Any] = {
        "elements": elements,
        "cpu_threads": torch.get_num_threads(),
        "host_cores": num_host_cores(),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none",
        "commit": args.commit,
        "command": shlex.join(["python", *sys.argv]),
    }
    if "omp" in args.groups:
        report["seconds"] = measure(elements, args.repeats)
    if "pool" in args.groups:
        report["pool_seconds"] = measure_pool(elements, args.repeats)
    if "checksum" in args.groups:
        report["checksum_seconds"] = measure_checksums(elements, args.repeats)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

"""Host kernels of the optimizer step and of the gradient sum: which form and block size is fastest on this CPU.

    python benchmarks/host_kernels.py --elements 1e9 --output benchmarks/results/host_kernels.json

Every candidate gives the same bits as the first of its group; each time is the best of the repeats, in seconds for
`--elements` parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

BLOCKS = (2**18, 2**19, 2**20, 2**21, 2**22, 2**23)
SETTINGS: dict[str, Any] = {
    "foreach": False, "fused": True, "capturable": False, "differentiable": False, "amsgrad": False,
    "maximize": False, "beta1": 0.9, "beta2": 0.999, "lr": 1e-6, "weight_decay": 0.01, "eps": 1e-8,
}  # fmt: skip


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


def measure_checksums(elements: int, repeats: int) -> dict[str, float]:
    """Checksum candidates on the GPU, for bf16 weights."""
    from trl_budget.compute_weights import checksum

    weights = torch.randn(elements // 2560, 2560, device="cuda", dtype=torch.bfloat16)

    def timed(run: Callable[[], Tensor]) -> float:
        run().item()
        return best(lambda: run().item(), repeats)

    bits = weights.view(torch.int16)
    return {
        "checksum": timed(lambda: checksum(weights)),
        "hash_tensor": timed(lambda: torch.hash_tensor(weights).view(torch.int64)),
        "hash_tensor by rows": timed(lambda: torch.hash_tensor(bits, 1).view(torch.int64).sum()),
        "fp32 norm": timed(lambda: torch.linalg.vector_norm(weights, dtype=torch.float32)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=float, default=1e9)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/host_kernels.json"))
    args = parser.parse_args()
    elements = int(args.elements) // 2560 * 2560
    report: dict[str, Any] = {
        "elements": elements,
        "cpu_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": args.commit,
        "command": f"python benchmarks/host_kernels.py --elements {args.elements:g} --repeats {args.repeats}",
        "seconds": measure(elements, args.repeats),
    }
    if torch.cuda.is_available():
        report["gpu"] = torch.cuda.get_device_name(0)
        report["checksum_seconds"] = measure_checksums(elements, args.repeats)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

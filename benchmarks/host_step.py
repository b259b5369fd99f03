"""How many host threads step fastest, with how long blocks: HostAdamW over a policy of 3.1 B parameters on a card.

    python benchmarks/host_step.py --commit $(git rev-parse HEAD) --output benchmarks/results/host_step.json

Clipping included, norm not. "no upload" leaves out the copy of the new weights to the card, which shows what the rest
is bound by. Each entry holds the seconds of two steps.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from host_kernels import LAYER_SHAPES
from torch.nn import Parameter

from trl_budget import HostAdamW, host_adamw
from trl_budget.compute_weights import ComputeWeights
from trl_budget.host_threads import HostThreads, num_host_cores

VARIANTS = (
    (1, 2**22),
    (2, 2**22),
    (2, 2**21),
    (3, 2**21),
    (4, 2**22),
    (4, 2**21),
    (4, 2**20),
    (8, 2**21),
    (16, 2**20),
)
NUM_LAYERS, VOCABULARY, HIDDEN = 36, 151_936, 2560


def build() -> HostAdamW:
    """An optimizer with gradients; a small one where there is no GPU."""
    on_gpu = torch.cuda.is_available()
    shapes = [(VOCABULARY if on_gpu else VOCABULARY // 64, HIDDEN), *LAYER_SHAPES * (NUM_LAYERS if on_gpu else 1)]
    device = "cuda" if on_gpu else "cpu"
    optimizer = HostAdamW(
        [Parameter(torch.full(s, 0.02, device=device, dtype=torch.bfloat16)) for s in shapes], lr=1e-6
    )
    for slot in optimizer._slots.values():
        slot.accumulator.fill_(1e-4)
    return optimizer


def step_seconds(optimizer: HostAdamW) -> float:
    """One step with the same gradients, which need clipping."""
    for slot in optimizer._slots.values():
        slot.accumulator_is_filled, slot.clip_coefficient = True, torch.tensor(0.5)
    optimizer._gradients._norm = torch.tensor(1.0)
    _synchronize()
    started = time.perf_counter()
    optimizer.step()
    _synchronize()
    return time.perf_counter() - started


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/host_step.json"))
    args = parser.parse_args()
    optimizer = build()
    report: dict[str, Any] = {
        "num_parameters": sum(slot.parameter.numel() for slot in optimizer._slots.values()),
        "host_cores": num_host_cores(),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "commit": args.commit,
        "seconds": {},
    }
    for count, block in VARIANTS:
        if count > num_host_cores():
            continue
        optimizer._threads = threads = HostThreads(count)
        name = f"{count} threads of {threads.cores} cores, blocks of {block}"
        with mock.patch.object(host_adamw, "BLOCK_ELEMENTS", block):
            report["seconds"][name] = [step_seconds(optimizer) for _ in range(2)]
            with mock.patch.object(ComputeWeights, "write"):
                report["seconds"][f"{name}, no upload"] = [step_seconds(optimizer) for _ in range(2)]
        threads.close()
        print(name, report["seconds"][name], report["seconds"][f"{name}, no upload"], flush=True)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

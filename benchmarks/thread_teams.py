"""Two OpenMP teams that use all cores at a time, against one team, and against teams that share the cores.

    python benchmarks/thread_teams.py --commit $(git rev-parse HEAD) --output benchmarks/results/thread_teams.json

A team's operation ends when its slowest thread has done its equal part. With two teams on the same cores a part may
have to wait for the other team's turn to end, while the threads that are done spin and keep their cores: the shorter
the operation, the more it costs. Each team is a process of its own, since within a process libgomp spins less once it
has more threads than cores; two ranks do not know of each other's, nor did the teams of one rank, which together were
fewer than the cores of the machine. Beside a busy process of one thread the same happens; `OMP_WAIT_POLICY=PASSIVE`
lets threads that are done sleep. `fp32 + fp32` in place, in blocks of `--blocks`, in the same five seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from trl_budget import __version__

ELEMENTS = 2**25
SECONDS = 5.0
SECONDS_TO_START = 8.0
BLOCKS = (2**17, 2**20, 2**22)


def elements_per_second(cores: int, block: int, start: float) -> float:
    """Of one team, while others may run; all begin when `time.time()` is `start`."""
    torch.set_num_threads(cores)
    target, addend = torch.ones(ELEMENTS), torch.ones(ELEMENTS)
    blocks = list(zip(target.split(block), addend.split(block), strict=True))
    for ours, other in blocks:
        ours.add_(other)
    if time.time() > start:
        raise RuntimeError("the teams did not begin together: raise SECONDS_TO_START")
    time.sleep(start - time.time())
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < SECONDS:
        for ours, other in blocks:
            ours.add_(other)
            count += block
    return count / (time.perf_counter() - began)


def measure(teams: int, cores: int, block: int, *, is_passive: bool = False) -> list[float]:
    """Elements per second of each of `teams` processes of `cores` threads, which run at the same time."""
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"} if is_passive else None
    command = [sys.executable, __file__, "--team", str(cores), str(block), str(time.time() + SECONDS_TO_START)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(teams)]
    return [float(process.communicate()[0].splitlines()[-1]) for process in started]


@contextmanager
def busy_process() -> Iterator[None]:
    """A process that keeps one core busy."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--blocks", type=int, nargs="+", default=BLOCKS)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/thread_teams.json"))
    parser.add_argument("--team", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.team:
        cores, block, start = args.team
        print(elements_per_second(int(cores), int(block), float(start)))
        return
    rows: list[dict[str, Any]] = []
    for block in args.blocks:
        row = {
            "block_elements": block,
            "one_team_of_all": measure(1, args.cores, block),
            "two_teams_of_all": measure(2, args.cores, block),
            "two_teams_of_half": measure(2, max(1, args.cores // 2), block),
            "one_team_passive": measure(1, args.cores, block, is_passive=True),
        }
        with busy_process():
            row["one_team_beside_a_busy_process"] = measure(1, args.cores, block)
            row["one_team_passive_beside_a_busy_process"] = measure(1, args.cores, block, is_passive=True)
        rows.append(row)
        figures = (f"{name} {sum(row[name]) / 1e9:.3f}" for name in row if name != "block_elements")
        print(f"blocks of {block:,}: " + ", ".join(figures) + " G elements/s in all", flush=True)
    report = {
        "unit": "elements per second, by team",
        "cpu_cores": args.cores,
        "seconds": SECONDS,
        "torch": torch.__version__,
        "trl_budget": __version__,
        "commit": args.commit,
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["python", *sys.argv]),
        "rows": rows,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

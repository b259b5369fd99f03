"""Ranks that end as a script does, at its last line: `exiting_script.py <folder> <rounds> [destroy]`.

Ranks come to it, with `destroy` after `destroy_process_group`, while gloo's threads work for the library's groups.
What these hold they give back under Python's lock, and torch 2.13 ends the process with SIGABRT where that comes after
the interpreter's end. Prints how each rank ended: its exit code, or less than 0 for a signal.
"""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import torch
import torch.distributed as dist

# The package without its `__init__`, which imports TRL: that takes seconds, and so does leaving it.
package = types.ModuleType("trl_budget")
package.__path__ = [str(Path(__file__).parents[2] / "trl_budget")]
sys.modules["trl_budget"] = package

from trl_budget.ranks import Ranks, current_ranks  # noqa: E402

NUM_RANKS = 4


def join(rank: int, folder: Path) -> Ranks:
    os.environ.update(GROUP_RANK=str(rank // 2), GLOO_SOCKET_IFNAME="lo")
    store = dist.FileStore(str(folder / f"store-{os.getppid()}-{len(ended)}"), NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    ranks = current_ranks()
    assert ranks is not None and ranks.num_nodes == 2
    return ranks


torch.set_num_threads(1)
ended: list[int] = []
for _ in range(int(sys.argv[2])):
    children = []
    for rank in range(NUM_RANKS):
        child = os.fork()
        if child == 0:
            ranks = join(rank, Path(sys.argv[1]))
            for _ in range(50):
                dist.all_reduce(torch.ones(100), group=ranks._groups["world"], async_op=True)
                dist.all_reduce(torch.ones(100), group=ranks._groups["shard"], async_op=True)
            if sys.argv[3:] == ["destroy"]:
                dist.destroy_process_group()
            sys.exit()
        children.append(child)
    ended += [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
print(*ended)

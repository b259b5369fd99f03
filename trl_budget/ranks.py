"""The processes of a job: which node each is on, and small messages between them.

Every rank makes the same calls in the same order. A message carries the name of the operation it belongs to and the
error that its sender ran into, so ranks that are at different operations, or of which one has failed, all raise; the
process group's timeout bounds every wait. Messages travel over gloo, whatever backend the job itself uses.

The groups end before the interpreter does, also where the script destroys none: gloo's threads give tensors back under
Python's lock, and torch 2.13 ends the process with SIGABRT, after all is saved, where one comes too late for it.
"""

from __future__ import annotations

import logging
import os
import socket
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trl_budget.errors import RankError, SettingsError

logger = logging.getLogger(__name__)

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class NodeLayout:
    """Where the ranks of a job are.

    Attributes:
        nodes: the global ranks of every node, ascending; nodes in the order of their first rank.
    """

    nodes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, node_names: Sequence[str]) -> NodeLayout:
        """Groups ranks by the name of their node.

        Raises:
            SettingsError: nodes with different numbers of ranks.
        """
        by_node: dict[str, list[int]] = {}
        for rank, name in enumerate(node_names):
            by_node.setdefault(name, []).append(rank)
        nodes = tuple(tuple(ranks) for ranks in by_node.values())
        if len({len(ranks) for ranks in nodes}) > 1:
            counts = ", ".join(str(len(ranks)) for ranks in nodes)
            raise SettingsError(
                f"The nodes of this job run {counts} processes. Shards of the optimizer are exchanged between "
                "processes of the same position on each node, so the numbers must be equal. Launch as many on "
                "every node, or set optimizer_placement='device'."
            )
        return cls(nodes)

    def node_of(self, rank: int) -> int:
        """The node of a global rank."""
        return next(index for index, ranks in enumerate(self.nodes) if rank in ranks)


class Ranks:
    """This process among the others of the default process group. Building it is collective, see `current_ranks`.

    Attributes:
        rank: global rank.
        world_size: number of ranks.
        local_rank: position among the ranks of this node, whatever `LOCAL_RANK` says.
        local_world_size: number of ranks of this node, the same on every node.
        num_nodes: number of nodes.
        timeout: the default process group's, bounds every wait.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.timeout = _default_timeout()
        self._reported: Exception | None = None
        self._groups: dict[str, dist.ProcessGroup] = {}
        weakref.finalize(self, _end, self._groups, os.getpid())
        self._groups["world"] = self._new_group(range(self.world_size))
        self.layout = NodeLayout.of(self.exchange("find the nodes", node_name(self.rank)))
        self.num_nodes = len(self.layout.nodes)
        self.node_ranks = self.layout.nodes[self.layout.node_of(self.rank)]
        self.local_rank = self.node_ranks.index(self.rank)
        self.local_world_size = len(self.node_ranks)
        shards = [[node[k] for node in self.layout.nodes] for k in range(self.local_world_size)]
        groups = [self._new_group(ranks) for ranks in shards if self.num_nodes > 1]  # every rank makes every group
        if groups:
            self._groups["shard"] = groups[self.local_rank]
        self.pids: list[int] = self.exchange("exchange process ids", os.getpid())

    def _new_group(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        return dist.new_group(list(ranks), backend="gloo", timeout=self.timeout)

    def exchange(self, operation: str, message: Any = None, *, error: str | None = None) -> list[Any]:
        """Collects one message of every rank, in rank order.

        Args:
            operation: what all ranks must be at.
            message: small; pickled.
            error: what this rank failed with; all others raise it.

        Raises:
            RankError: another rank failed, is gone, is at another operation, or did not answer in time.
        """
        gathered: list[Any] = [None] * self.world_size
        try:
            dist.all_gather_object(gathered, (operation, error, message), group=self._groups["world"])
        except RuntimeError as lost:
            raise self._lost(operation, lost) from lost
        failed = [(rank, said) for rank, (_, said, _) in enumerate(gathered) if said is not None]
        if failed and error is None:
            raise self.failure_of(failed[0][0], operation, failed[0][1])
        if not failed and len({name for name, _, _ in gathered}) > 1:
            where = ", ".join(f"rank {rank} at '{name}'" for rank, (name, _, _) in enumerate(gathered))
            raise RankError(
                f"The ranks are at different operations: {where}. Each waits for something that the others will not "
                "send. Run the same optimizer calls on every rank, in the same order."
            )
        return [message for _, _, message in gathered]

    def failure_of(self, rank: int, operation: str, error: str) -> RankError:
        """What this rank raises when another has failed."""
        return RankError(
            f"Rank {rank} failed while rank {self.rank} was at '{operation}': {error} The ranks train one policy "
            "together, so all of them stop. Repair what that rank reports and start again."
        )

    def _lost(self, operation: str, reason: object) -> RankError:
        return RankError(
            f"Rank {self.rank} waited for the other {self.world_size - 1} ranks at '{operation}' and lost one of them "
            f"({reason}). A rank that died, or that took longer than {self.timeout.total_seconds():.0f} s, cannot be "
            "replaced while the job runs. Find its error in the logs, or raise ddp_timeout, and resume."
        )

    @contextmanager
    def reporting(self, operation: str) -> Iterator[None]:
        """Tells the other ranks of an error raised inside; they raise it at their next message."""
        try:
            yield
        except RankError:
            raise  # the others know, or are gone
        except Exception as error:
            if error is not self._reported:
                self._reported = error
                self.exchange(operation, error=f"{type(error).__name__}: {error}")
            raise

    @contextmanager
    def together(self, operation: str) -> Iterator[None]:
        """As `reporting`, and no rank leaves before all have come to the end."""
        with self.reporting(operation):
            yield
            self.exchange(operation)

    def sum_over_nodes(self, tensor: Tensor) -> None:
        """Sums an fp32 host tensor in place over the ranks with this position on their node; nothing on one node."""
        if "shard" in self._groups:
            try:
                dist.all_reduce(tensor, group=self._groups["shard"])
            except RuntimeError as lost:
                raise self._lost("sum gradients over nodes", lost) from lost

    def broadcast_over_nodes(self, tensor: Tensor) -> None:
        """Overwrites a host tensor with that of the rank with this position on the first node."""
        if "shard" in self._groups:
            dist.broadcast(tensor, src=self.layout.nodes[0][self.local_rank], group=self._groups["shard"])

    @torch.no_grad()
    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Overwrites tensors of any device and dtype with rank 0's, through host memory."""
        for tensor in tensors:
            staged = tensor.detach().to("cpu", copy=True).contiguous()
            flat = staged.view(-1).view(torch.uint8) if staged.numel() else torch.empty(0, dtype=torch.uint8)
            dist.broadcast(flat, src=0, group=self._groups["world"])
            tensor.detach().copy_(staged)


def _end(groups: dict[str, dist.ProcessGroup], pid: int) -> None:
    """Destroys groups and their threads, which finish their work. Not collective; a fork has no such threads."""
    if os.getpid() != pid:
        return
    while groups:
        with suppress(ValueError):  # destroyed with the default group
            dist.destroy_process_group(groups.popitem()[1])


def node_name(rank: int) -> str:
    """Equal on ranks that share memory: the machine, and the launcher's group of processes on it.

    `GROUP_RANK` is torchrun's; without it, ranks are taken to be numbered node by node (`LOCAL_WORLD_SIZE`).
    """
    machine = f"{socket.gethostname()} {_BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ''}"
    local_world_size = os.environ.get("LOCAL_WORLD_SIZE", "")
    by_position = str(rank // int(local_world_size)) if local_world_size.isdigit() and int(local_world_size) else ""
    return f"{machine} {os.environ.get('GROUP_RANK', by_position)}"


def _default_timeout() -> timedelta:
    group = dist.distributed_c10d._get_default_group()
    return group._get_backend(next(iter(group._device_types))).options._timeout


@dataclass
class _Cached:
    group: dist.ProcessGroup | None = None
    ranks: Ranks | None = None


_cached = _Cached()


def current_ranks() -> Ranks | None:
    """The ranks of the default process group; None where there is one process. Collective when first called."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    group = dist.distributed_c10d._get_default_group()
    if _cached.ranks is None or _cached.group is not group:
        _cached.group, _cached.ranks = group, Ranks()
    return _cached.ranks

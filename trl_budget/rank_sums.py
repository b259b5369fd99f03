"""Sums over the ranks of a node, in host memory that they share: chunk by chunk, on the host threads, norms with them.

Rank order, fp32, divided by the number of ranks. The bits do not depend on the chunks or on which rank sums.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from trl_budget.gradient_norm import ROW_ELEMENTS, is_measured_in_rows, num_rows, row_norms
from trl_budget.host_threads import HostThreads, ThreadScratch
from trl_budget.parameter_slots import ParameterSlot
from trl_budget.ranks import Ranks
from trl_budget.shared_state import SharedSlot

# Whole rows of the norm. What is summed stays in cache until it is measured; shorter chunks wait for Python's lock.
CHUNK_ELEMENTS = 2**20
_Sum = tuple[Tensor, list[Tensor], Tensor | None]  # target, what to add, where the norms of its rows go


class RankSums:
    """Sums accumulators into that of the rank which reduces a slot.

    Args:
        threads: sum.
        ranks: the processes of the job.

    Attributes:
        row_norms: norms of the rows of each gradient that was summed here, as long as it stays as it is; fp32. None
            of parameters that are measured whole, and none where other nodes' sums are still to be added.
    """

    def __init__(self, threads: HostThreads, ranks: Ranks) -> None:
        self._threads = threads
        self._ranks = ranks
        self._scratch = ThreadScratch()
        self.row_norms: dict[ParameterSlot, Tensor] = {}

    def run(self, sums: Iterable[tuple[SharedSlot, Sequence[Tensor]]]) -> None:
        """Sums each slot over the given accumulators, which are those of ranks in their order."""
        self._threads.run(self._sum_chunk, [chunk for slot, peers in sums for chunk in self._sums_of(slot, peers)])

    def _sums_of(self, slot: SharedSlot, peers: Sequence[Tensor]) -> Iterator[_Sum]:
        """What is to be summed for one slot, cut here: a thread that cuts holds up the others at Python's lock."""
        targets = slot.peers[slot.reducer].view(-1).split(CHUNK_ELEMENTS)
        parts = [peer.view(-1).split(CHUNK_ELEMENTS) for peer in peers]
        norms: Iterable[Tensor | None] = itertools.repeat(None)
        if is_measured_in_rows(slot.parameter) and self._ranks.num_nodes == 1:
            self.row_norms[slot] = torch.empty(num_rows(slot.peers[slot.reducer]))
            norms = self.row_norms[slot].split(CHUNK_ELEMENTS // ROW_ELEMENTS)
        for chunk, (target, of_chunk) in enumerate(zip(targets, norms, strict=False)):
            yield target, [part[chunk] for part in parts], of_chunk

    def _sum_chunk(self, chunk: _Sum) -> None:
        """The mean over this node's ranks, in rank order, and its norms; the sum where nodes follow. On any thread."""
        target, parts, norms = chunk
        # Into the target at once, unless it holds an addend that comes later.
        is_later = any(part.data_ptr() == target.data_ptr() for part in parts[2:])
        total = self._scratch.take(target.numel()) if is_later else target
        if len(parts) < 2:
            total.copy_(parts[0]) if parts else total.zero_()
        else:
            torch.add(parts[0], parts[1], out=total)
        for part in parts[2:]:
            total.add_(part)
        if self._ranks.num_nodes == 1:
            total.div_(self._ranks.world_size)
        if norms is not None:
            row_norms(total, out=norms)
        if is_later:
            target.copy_(total)

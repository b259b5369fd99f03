"""A sleep-mode backend for vLLM that can keep the weights mapped, and that may be called on an engine half asleep.

Registered with vLLM's own `SleepModeBackendFactory` and chosen by `sleep_mode_backend`. vLLM's default unmaps every
allocation, weights included, also those that are unmapped already.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from vllm.device_allocator import get_mem_allocator_instance
from vllm.device_allocator.cumem import create_and_map, unmap_and_release
from vllm.device_allocator.sleep_mode_backend import CuMemBackend

from trl_budget.errors import UpstreamMovedError
from trl_budget.upstream_vllm_seams import INSTALL, check_pool_tags


class HandoverBackend(CuMemBackend):
    """Unmaps what the trainer needs and keeps what it shares.

    Attributes:
        kept_tags: allocations that stay mapped, "weights" where the policy's parameters are views of them.
    """

    kept_tags: frozenset[str] = frozenset()

    def suspend(self, level: int = 1) -> None:
        """Discards every allocation that is mapped and not kept; level 1 copies weights to the host first, as vLLM.

        Raises:
            UpstreamMovedError: another level, or memory in the pool of which no wake would take notice.
        """
        if level not in (1, 2):
            raise UpstreamMovedError(
                f"vLLM puts its engine to sleep with level={level!r}. The levels are 1, which keeps the weights, and "
                f"2, which drops them. Install a supported vLLM: {INSTALL}."
            )
        check_pool_tags(allocation.tag for allocation in _allocations())
        if level == 1 and not self.kept_tags:
            super().suspend(level)
            return
        self._state = "SUSPENDED"
        torch.cuda.synchronize()
        for allocation in _allocations():
            if not allocation.is_asleep and allocation.tag not in self.kept_tags:
                unmap_and_release(allocation.handle)
                allocation.is_asleep = True
        gc.collect()
        torch.cuda.empty_cache()

    def resume(self, tags: list[str] | None = None) -> None:
        """Maps what is asleep under `tags`, all of it when None. An allocation that finds no memory stays asleep.

        After a level 1, which only a user asks for, vLLM's own way brings the weights' values back as well.
        """
        if any(allocation.cpu_backup_tensor is not None for allocation in _allocations()):
            super().resume(tags)
            return
        self._state = "RESUMING"
        for allocation in _allocations():
            if allocation.is_asleep and (tags is None or allocation.tag in tags):
                create_and_map(allocation.handle)
                allocation.is_asleep = False
        self._state = "RUNNING"


def sleeping_bytes() -> int:
    """Bytes of vLLM's pool that hold no memory at the moment; torch counts them as allocated."""
    return sum(allocation.handle[1] for allocation in _allocations() if allocation.is_asleep)


def _allocations() -> list[Any]:
    return list(get_mem_allocator_instance().pointer_to_data.values())

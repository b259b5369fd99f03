"""Host memory that all ranks of a node map, in slabs.

A slab is an anonymous file (`memfd_create`), which no limit on /dev/shm bounds and which has no name: the kernel frees
it when the last rank that maps it is gone, however that rank ended. Where the other ranks may not open it, a file in
/dev/shm takes its place and loses its name as soon as all ranks have opened it.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable

from trl_budget.errors import HostMemoryError
from trl_budget.pinned import HostSlab
from trl_budget.ranks import Ranks

logger = logging.getLogger(__name__)

FALLBACK_FOLDER = "/dev/shm"


class NodeMemory:
    """Makes slabs that every rank of this node maps. Every call is collective over the whole job.

    Args:
        ranks: the processes of the job.
        make_file: `(name) -> file descriptor` of an anonymous file; `os.memfd_create` by default.
    """

    def __init__(self, ranks: Ranks, make_file: Callable[[str], int] = os.memfd_create) -> None:
        self._ranks = ranks
        self._make_file = make_file

    def slab(self, nbytes: int, *, pin: bool, purpose: str, creator: int = 0) -> HostSlab:
        """A zeroed slab, the same pages on every rank of the node.

        Args:
            nbytes: size in bytes.
            pin: page-lock it, on every rank.
            purpose: what it is for, named in errors.
            creator: local rank that makes the file.

        Raises:
            HostMemoryError: no shared memory of that size can be had on this node.
        """
        descriptor = self._anonymous(nbytes, purpose, creator)
        if descriptor is None:
            descriptor = self._named(nbytes, purpose, creator)
        try:
            return HostSlab(nbytes, pin=pin, purpose=purpose, descriptor=descriptor)
        finally:
            os.close(descriptor)  # the mapping keeps the memory; data loader workers must not inherit the file

    def _anonymous(self, nbytes: int, purpose: str, creator: int) -> int | None:
        """A descriptor of a memfd, or None on every rank where any rank could not get one."""
        descriptor, reason = None, ""
        is_creator = self._ranks.local_rank == creator
        if is_creator:
            try:
                descriptor = self._make_file(f"trl-budget {purpose}")
                os.ftruncate(descriptor, nbytes)
            except OSError as error:
                reason = str(error)
        made = self._ranks.exchange(f"share {purpose}", descriptor)[self._ranks.node_ranks[creator]]
        if not is_creator and made is not None:
            try:
                descriptor = os.open(f"/proc/{self._ranks.pids[self._ranks.node_ranks[creator]]}/fd/{made}", os.O_RDWR)
            except OSError as error:
                reason = str(error)
        # Also what lets the creator close its descriptor: all have opened theirs.
        reasons = self._ranks.exchange(f"open {purpose}", reason)
        if not any(reasons):
            return descriptor
        if descriptor is not None:
            os.close(descriptor)
        logger.warning(
            "Anonymous shared memory cannot be handed between the ranks (%s); %s is used for %s, whose size limit "
            "applies (Docker: --shm-size).",
            next(filter(None, reasons)),
            FALLBACK_FOLDER,
            purpose,
        )
        return None

    def _named(self, nbytes: int, purpose: str, creator: int) -> int:
        path, descriptor = "", -1
        with self._ranks.together(f"share {purpose} by name"):
            if self._ranks.local_rank == creator:
                path = f"{FALLBACK_FOLDER}/trl-budget-{uuid.uuid4()}"
                descriptor = _allocated_file(path, nbytes, purpose)
            path = self._ranks.exchange(f"name {purpose}", path)[self._ranks.node_ranks[creator]]
            if descriptor < 0:
                descriptor = os.open(path, os.O_RDWR)
        if self._ranks.local_rank == creator:
            os.unlink(path)
        return descriptor


def _allocated_file(path: str, nbytes: int, purpose: str) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)  # a file that is only promised kills the process when it is written
    except OSError as error:
        os.close(descriptor)
        os.unlink(path)
        raise HostMemoryError(
            f"{nbytes / 2**30:.2f} GiB of shared memory for {purpose} do not fit in {FALLBACK_FOLDER} ({error}). The "
            "ranks of a node share one optimizer and each other's gradients. Give the container more shared memory "
            "(Docker: --shm-size or --ipc=host), or set optimizer_placement='device'."
        ) from error
    return descriptor

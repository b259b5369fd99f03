"""A byte ring over one piece of host memory: spaces are taken in order and become free again in that order.

Only bookkeeping: who waits for space, and for what a space is used, is the caller's business. Not thread-safe.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

ALIGNMENT_BYTES = 256


@dataclass(eq=False)
class Space:
    """Bytes `[start, stop)` of the ring, held until `is_free` is set."""

    start: int
    stop: int
    is_free: bool = False


class StagingRing:
    """Hands out aligned spaces of a ring, each in one piece.

    Args:
        capacity_bytes: length of the memory; a multiple of 256.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._taken: deque[Space] = deque()

    def take(self, num_bytes: int) -> Space | None:
        """A space of at least `num_bytes`, or None while what is taken leaves none; `num_bytes` fits an empty ring."""
        length = -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        assert 0 < length <= self.capacity_bytes
        start = self._start(length)
        if start is None:
            return None
        space = Space(start, start + length)
        self._taken.append(space)
        return space

    def give_back(self, space: Space) -> None:
        """Frees a space. It can be taken again once all that were taken before it are free as well."""
        space.is_free = True
        while self._taken and self._taken[0].is_free:
            self._taken.popleft()

    def _start(self, length: int) -> int | None:
        if not self._taken:
            return 0
        oldest, newest = self._taken[0].start, self._taken[-1].stop
        if oldest < newest:  # what is taken lies in one piece: the rest is behind it and before it
            if newest + length <= self.capacity_bytes:
                return newest
            return 0 if length <= oldest else None
        return newest if newest + length <= oldest else None

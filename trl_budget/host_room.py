"""Host memory for the storages of parked weights, in a few slabs.

Page-locking takes 0.4 s per GiB, so the slabs are kept and filled again at every rollout. Only the layout is decided
here; the bytes are copied by `parking.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trl_budget.pinned import SLAB_BYTES, HostSlab, check_host_memory

ALIGNMENT_BYTES = 256


class HostRoom:
    """Host memory for a list of storages, in a few slabs that are kept and filled again the next time.

    Args:
        purpose: what is kept there, named in errors.
        pin: page-lock the slabs.
        slab_bytes: upper size of a slab; a storage larger than that gets a slab of its own.
        allocate: makes a slab; takes `nbytes`, `pin` and `purpose`.
    """

    def __init__(
        self,
        purpose: str,
        *,
        pin: bool,
        slab_bytes: int = SLAB_BYTES,
        allocate: Callable[..., HostSlab] = HostSlab,
    ) -> None:
        self._purpose = purpose
        self._pin = pin
        self._slab_bytes = slab_bytes
        self._allocate = allocate
        self._slabs: list[HostSlab] = []

    @property
    def nbytes(self) -> int:
        """Bytes held by the slabs."""
        return sum(slab.nbytes for slab in self._slabs)

    def take(self, sizes: Sequence[int]) -> list[Tensor]:
        """A flat uint8 view of each size in bytes, host memory, writable; what was taken before is given up.

        The slabs are used again if all sizes fit; otherwise they are freed first and new ones made.

        Raises:
            HostMemoryError: the machine refused the memory; none is held then.
        """
        places = first_fit(sizes, [slab.nbytes for slab in self._slabs])
        if places is None:
            self.release()
            capacities = slab_sizes(sizes, self._slab_bytes)
            check_host_memory(sum(capacities), self._purpose)
            self._slabs = [self._allocate(n, pin=self._pin, purpose=self._purpose) for n in capacities]
            places = first_fit(sizes, capacities)
        assert places is not None
        pairs = zip(places, sizes, strict=True)
        return [self._slabs[slab].view(torch.uint8)[start : start + size] for (slab, start), size in pairs]

    def release(self) -> None:
        """Gives the memory back to the machine, once nobody holds a view of it."""
        self._slabs = []


def slab_sizes(sizes: Sequence[int], limit: int) -> list[int]:
    """Bytes of the slabs that hold storages of `sizes` bytes in order, none above `limit` unless one storage is."""
    slabs: list[int] = []
    for size in map(_padded, sizes):
        if slabs and slabs[-1] + size <= limit:
            slabs[-1] += size
        else:
            slabs.append(size)
    return slabs


def first_fit(sizes: Sequence[int], capacities: Sequence[int]) -> list[tuple[int, int]] | None:
    """Slab number and start in bytes for each of `sizes`, or None if they do not all fit; starts are aligned."""
    used = [0] * len(capacities)
    places: list[tuple[int, int]] = []
    for size in map(_padded, sizes):
        free = (slab for slab, capacity in enumerate(capacities) if used[slab] + size <= capacity)
        if (slab := next(free, None)) is None:
            return None
        places.append((slab, used[slab]))
        used[slab] += size
    return places


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

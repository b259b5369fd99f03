"""The host memory of offloaded activations: one slab, replaced by a larger one between passes.

Only sizes and views are known here; what lies where is `host_store.py`'s. Nothing falls back to pageable memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from trl_budget.errors import HostMemoryError
from trl_budget.pinned import HostSlab, check_host_memory

logger = logging.getLogger(__name__)

ALIGNMENT_BYTES = 256
PURPOSE = "offloaded activations"


class ActivationSlab:
    """At most one slab of host memory.

    Args:
        pin: page-lock it.
        allocate: makes a slab; takes `nbytes`, `pin` and `purpose`.
    """

    def __init__(self, *, pin: bool, allocate: Callable[..., HostSlab] = HostSlab) -> None:
        self._pin = pin
        self._allocate = allocate
        self._slab: HostSlab | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held, used or not."""
        return 0 if self._slab is None else self._slab.nbytes

    def replace(self, num_bytes: int) -> None:
        """Gives the slab up, and then takes one of `num_bytes`.

        Raises:
            HostMemoryError: the machine refused the memory, or to page-lock it. None is held then.
        """
        had = self.nbytes
        self._slab = None
        try:
            check_host_memory(num_bytes, PURPOSE)
            self._slab = self._allocate(num_bytes, pin=self._pin, purpose=PURPOSE)
        except HostMemoryError as error:
            raise HostMemoryError(
                f"{num_bytes / 2**30:.2f} GiB of host memory for {PURPOSE} were refused: {error} They hold what "
                "gradient checkpointing keeps, the input of every layer for every token of a pass. Free host memory, "
                "set max_tokens_per_microbatch to fewer tokens, or set activation_offload='off'."
            ) from error
        kind = "page-locked" if self._pin else "pageable"
        logger.info("%.2f GiB of %s memory for %s, before %.2f", num_bytes / 2**30, kind, PURPOSE, had / 2**30)

    def room(self, start: int, activation: Tensor) -> Tensor:
        """A view from byte `start`, of the activation's shape and dtype, contiguous.

        Raises:
            HostMemoryError: the slab ends before.
        """
        if self._slab is None or start + activation.nbytes > self._slab.nbytes:
            raise HostMemoryError(
                f"An activation of {activation.nbytes / 2**20:.1f} MiB was to be kept above {start / 2**30:.2f} GiB "
                f"of others, and {self.nbytes / 2**30:.2f} GiB of host memory are reserved. Memory is page-locked "
                "before the first layer of a pass and not within it. Call reserve() with the bytes of the whole pass, "
                "or set activation_offload='off'."
            )
        flat = self._slab.view(torch.uint8)[start : start + activation.nbytes]
        return flat.view(activation.dtype).view(activation.shape)


def stack_bytes(num_layers: int, num_bytes: int) -> int:
    """Host memory for a pass of `num_layers` layers, each with an input of `num_bytes`."""
    return num_layers * padded(num_bytes)


def padded(num_bytes: int) -> int:
    """The bytes that an activation of `num_bytes` takes: the next one starts on an aligned byte."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

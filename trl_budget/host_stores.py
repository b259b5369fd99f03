"""Host memory for forwards that begin while the backward of an earlier one is still to come.

One pass at a time is the rule, and then one `HostStore` is all there is. A trainer that runs the model several times
for one loss keeps several stacks, and memory in use cannot be replaced by larger: each forward that finds no room gets
a store of its own, used again by later ones. Bit-exact, and never more stores than forwards waited at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trl_budget.activation_slab import stack_bytes
from trl_budget.host_store import HostActivation, HostStore


class HostStores:
    """An `ActivationStore` of as many `HostStore`s as are needed.

    Args:
        device: where activations live.
        capacity_bytes: host memory of the first store, taken now.
        pin: page-lock it, and that of stores to come; None: on CUDA.

    Raises:
        HostMemoryError: the machine refused the memory, or to page-lock it.
    """

    def __init__(self, device: torch.device, capacity_bytes: int, *, pin: bool | None = None) -> None:
        self._device = device
        self._pin = pin
        self._current = HostStore(device, capacity_bytes, pin=pin)
        self._stores = [self._current]

    @property
    def host_bytes(self) -> int:
        """Host memory held, used or not."""
        return sum(store.host_bytes for store in self._stores)

    @property
    def used_bytes(self) -> int:
        """Of it, bytes up to the highest activation of each store that is still wanted."""
        return sum(store.used_bytes for store in self._stores)

    @property
    def device_bytes(self) -> int:
        """Device memory that the stores refer to."""
        return sum(store.device_bytes for store in self._stores)

    def begin_pass(self, num_layers: int, hidden_states: Tensor) -> None:
        """Finds room for a pass; see `HostStore.begin_pass`."""
        num_bytes = stack_bytes(num_layers, hidden_states.nbytes)
        free = [store for store in self._stores if store.can_reserve(num_bytes)]
        store = max(free, key=lambda store: store.host_bytes, default=None)  # the one that need not grow, if any
        if store is None:
            store = HostStore(self._device, 0, pin=self._pin)
            self._stores.append(store)
        self._current = store
        store.reserve(num_bytes)

    def keep(self, hidden_states: Tensor) -> HostActivation:
        """Keeps it in the store of the pass that has begun last; see `HostStore.keep`."""
        return self._current.keep(hidden_states)

    def leave_device(self) -> None:
        """See `HostStore.leave_device`."""
        for store in self._stores:
            store.leave_device()

    def give_up(self) -> None:
        """See `HostStore.give_up`."""
        for store in self._stores:
            store.give_up()

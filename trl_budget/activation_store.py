"""Where the input of a decoder layer stays from its forward to its backward.

A layer that is recomputed in backward needs its input again and nothing else. `DeviceStore` leaves it where it is,
`host_store.HostStore` moves it to host memory and back. Bit-exact: bytes are moved, or not even that.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class KeptActivation(Protocol):
    """One activation in a store. Dropping it untaken gives its memory back."""

    def take(self) -> Tensor:
        """The activation, on its device, without gradient, once; begins to bring back the one kept before it."""
        ...


class ActivationStore(Protocol):
    """Keeps activations in the order of a forward and gives them back in that of its backward."""

    def keep(self, hidden_states: Tensor) -> KeptActivation:
        """Keeps `hidden_states`, `[B, T, H]`, ready on the current stream; it is read, and must not be written.

        The store holds the tensor until it is taken or has been copied away.
        """
        ...


class DeviceStore:
    """Keeps the tensors themselves."""

    def keep(self, hidden_states: Tensor) -> KeptActivation:
        """Holds `hidden_states`, `[B, T, H]`, where it is."""
        return _DeviceActivation(hidden_states.detach())


class _DeviceActivation:
    def __init__(self, hidden_states: Tensor) -> None:
        self._hidden_states: Tensor | None = hidden_states

    def take(self) -> Tensor:
        """The tensor itself; it is held no longer."""
        hidden_states, self._hidden_states = self._hidden_states, None
        assert hidden_states is not None, "an activation is taken once"
        return hidden_states

"""Where the input of a checkpointed layer waits for that layer's backward.

Bit-exact: a store moves bytes. A store never knows what a layer does with them, and never keeps an autograd graph.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class KeptActivation(Protocol):
    """One activation that a store keeps. Dropped without being taken, it frees what it holds."""

    def take(self) -> Tensor:
        """Gives the activation back, on the device that it came from and without a graph.

        May be called once. The store holds no reference afterwards; it may begin to bring back the activation that was
        kept before this one. The current stream may read the result.
        """


class ActivationStore(Protocol):
    """Keeps layer inputs from forward to backward. Called in the order of the layers, taken in the reverse order."""

    def keep(self, hidden_states: Tensor) -> KeptActivation:
        """Takes `hidden_states` `[B, T, H]`, finished on the current stream and not written to again.

        Called before the layer runs, so that a copy may overlap with it. The caller goes on reading the tensor, then
        drops it: a store that copies holds a reference until the copy is done.
        """

    def begin_pass(self, num_layers: int, hidden_states: Tensor) -> None:
        """Called before the first layer of a forward with gradient.

        Args:
            num_layers: how many inputs will be kept at most.
            hidden_states: the first of them; all have its shape and dtype.
        """

    def leave_device(self) -> None:
        """Lets go of what can be brought back later. Called when the forward has ended, before the head's backward."""

    def give_up(self) -> None:
        """Lets go of all activations: the step that they belong to was aborted, and its backward will not run."""


class DeviceStore:
    """Keeps the tensor itself, where it is: what torch's own checkpointing does."""

    def begin_pass(self, num_layers: int, hidden_states: Tensor) -> None:
        """Nothing to prepare."""

    def leave_device(self) -> None:
        """Everything stays."""

    def give_up(self) -> None:
        """Everything goes with the graph that refers to it."""

    def keep(self, hidden_states: Tensor) -> KeptActivation:
        """Holds a reference."""
        return _KeptTensor(hidden_states.detach())


class _KeptTensor:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor
        self._version = tensor._version

    def take(self) -> Tensor:
        tensor, self._tensor = self._tensor, None
        if tensor is None:
            raise RuntimeError(
                "The input of a layer was asked for a second time. It is freed by the first backward, so a second one "
                "over the same graph has nothing to compute from. Run backward once per forward, without retain_graph."
            )
        if tensor._version != self._version:
            raise RuntimeError(
                f"The input of a layer, {list(tensor.shape)} {_name(tensor.dtype)}, was written to between its "
                "forward and its backward. The layer would be recomputed from other values than it ran on. "
                "Write to a copy of the hidden states instead."
            )
        return tensor


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

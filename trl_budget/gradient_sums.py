"""Gradients of a layer's parameters, summed over tiles of the sequence.

Never in bf16: more than one tile is summed in fp32 (or the parameter's own dtype if that is wider) and cast once. With
one tile there is no buffer. Accurate to the rounding of the sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class GradientSums:
    """Sums gradients of `parameters` tile by tile.

    Args:
        parameters: what to differentiate.
        num_tiles: how many calls of `add` are to come.
    """

    def __init__(self, parameters: Sequence[Tensor], num_tiles: int) -> None:
        self._parameters = parameters
        self._num_tiles = num_tiles
        self._sums: list[Tensor | None] = [None] * len(parameters)

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Adds one tile's gradients, in the order of the parameters; None where a tile has none."""
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            if (total := self._sums[index]) is not None:
                total.add_(gradient)
            elif self._num_tiles == 1:
                self._sums[index] = gradient
            else:
                wide = torch.promote_types(gradient.dtype, torch.float32)
                self._sums[index] = gradient.to(wide, copy=True)

    def take(self, before: Sequence[Tensor | None] | None = None) -> list[Tensor | None]:
        """The sums in the parameters' dtypes; the wide ones are freed one by one.

        Args:
            before: gradients of another part of the layer to add, in the parameters' dtypes.
        """
        taken: list[Tensor | None] = []
        for index, parameter in enumerate(self._parameters):
            total, self._sums[index] = self._sums[index], None
            other = before[index] if before is not None else None
            if total is not None and other is not None:
                total = total.to(torch.promote_types(total.dtype, torch.float32)) + other
            elif total is None:
                total = other
            taken.append(None if total is None else total.to(parameter.dtype))
        return taken

"""Query, key and value of a whole sequence, collected tile by tile and held by groups of heads.

Each group's tensors are contiguous in memory as `[B, T, heads of the group, D]`, which packed attention reads without
a copy, and are seen as `[B, heads of the group, T, D]`. A group is let go of alone. Moves bytes, bit for bit.
Legend: B rows, T tokens, t tokens of a tile, Hq / Hkv heads, D head dimension.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from trl_budget.attention import AttentionCall
from trl_budget.errors import SettingsError

HeadTensors = tuple[Tensor, Tensor, Tensor]


@dataclasses.dataclass
class AttentionGraph:
    """Attention of one group of heads, with its graph.

    Attributes:
        heads: query, key and value, leaves that require grad.
        output: `[B, T, heads of the group, D]`.
    """

    heads: HeadTensors
    output: Tensor

    def gradients(self, output_gradient: Tensor) -> HeadTensors:
        """Gradients of query, key and value, `[B, heads of the group, T, D]`; frees what the graph saved."""
        query, key, value = torch.autograd.grad(self.output, self.heads, output_gradient)
        return query, key, value


class HeadGroups:
    """The heads of one layer, and the attention over them.

    Args:
        num_tokens: T.
        num_groups: a divisor of the key/value heads.
        is_apart: False holds and attends all heads together, which is faster where nothing is differentiated.
    """

    def __init__(self, num_tokens: int, num_groups: int, *, is_apart: bool = True) -> None:
        self._num_tokens = num_tokens
        self._num_groups = num_groups
        self._num_parts = num_groups if is_apart else 1
        self._groups: list[HeadTensors] = []
        self._call: AttentionCall | None = None

    def collect(self, call: AttentionCall, start: int) -> None:
        """Copies a tile's query, key and value, which are `call`'s, to their groups.

        Raises:
            SettingsError: the heads do not divide into that many groups.
        """
        tensors = (call.query, call.key, call.value)
        if self._call is None:
            self._allocate(call)
        for buffers, *parts in zip(
            self._groups, *(_split(tensor, self._num_parts) for tensor in tensors), strict=True
        ):
            for buffer, part in zip(buffers, parts, strict=True):
                buffer[:, :, start : start + part.shape[2]].copy_(part)

    def _allocate(self, call: AttentionCall) -> None:
        tensors = (call.query, call.key, call.value)
        if any(tensor.shape[1] % self._num_groups for tensor in tensors):
            query_heads, key_heads = call.query.shape[1], call.key.shape[1]
            raise SettingsError(
                f"attention_head_groups={self._num_groups}, and the model's attention has {query_heads} query and "
                f"{key_heads} key/value heads. Every group needs the same number of them. "
                f"Set attention_head_groups to a divisor of {key_heads}, or to 'auto'."
            )
        self._groups = [self._buffers(tensors) for _ in range(self._num_parts)]
        none = call.query.new_empty(0)
        self._call = dataclasses.replace(call, query=none, key=none, value=none)

    def _buffers(self, tensors: HeadTensors) -> HeadTensors:
        query, key, value = (
            tensor.new_empty(
                tensor.shape[0], self._num_tokens, tensor.shape[1] // self._num_parts, tensor.shape[3]
            ).transpose(1, 2)
            for tensor in tensors
        )
        return query, key, value

    def attend(self) -> list[Tensor]:
        """Attention output of each group, `[B, T, heads of the group, D]`, without a graph. Lets go of the heads."""
        outputs = []
        while self._groups:
            index = self._num_parts - len(self._groups)
            outputs.append(self._attend(index, self._groups.pop(0)))
        return outputs

    def attend_with_graph(self) -> list[AttentionGraph]:
        """The same, each with its own graph, which holds the heads. Called with grad enabled."""
        graphs = []
        while self._groups:
            index = self._num_parts - len(self._groups)
            query, key, value = (tensor.detach().requires_grad_() for tensor in self._groups.pop(0))
            graphs.append(AttentionGraph((query, key, value), self._attend(index, (query, key, value))))
        return graphs

    def _attend(self, index: int, heads: HeadTensors) -> Tensor:
        assert self._call is not None
        mask = self._call.attention_mask
        if mask is not None and mask.dim() == 4 and mask.shape[1] > 1:
            mask = _split(mask, self._num_parts)[index]
        return self._call.attend(self._call.module, *heads, mask, **self._call.features)


def _split(tensor: Tensor, num_groups: int) -> tuple[Tensor, ...]:
    return tensor.chunk(num_groups, dim=1)

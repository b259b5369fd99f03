"""Forward and backward of a checkpointed decoder layer, whole or in tiles, as one node of the autograd graph.

The node's inputs are the hidden states and every trained parameter of the layer, and its backward returns a gradient
for each: a parameter's gradient is accumulated, and its hooks run, once per backward. Whole, it is equal to torch's
checkpointing to a bit; in tiles, to the rounding of sums over tokens. Both store the layer's input and recompute.

In tiles nothing of the MLP's width outlives its tile, and one group's attention is differentiated at a time. Legend:
B rows, T tokens, t tokens of a tile, H hidden.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trl_budget.activation_store import ActivationStore
from trl_budget.errors import SettingsError
from trl_budget.gradient_sums import GradientSums
from trl_budget.head_groups import AttentionGraph, HeadGroups, HeadTensors
from trl_budget.layer_call import LayerCall

LayerGradients = tuple[Tensor | None, list[Tensor | None]]


@dataclass(frozen=True)
class TileSettings:
    """How a layer is run.

    Attributes:
        tile_tokens: most tokens of a tile, 1 or more; None for all of them in one.
        num_head_groups: groups that attention is computed in, a divisor of the key/value heads; None for one.
    """

    tile_tokens: int | None = None
    num_head_groups: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("tiled_mlp", self.tile_tokens), ("attention_head_groups", self.num_head_groups)):
            if value is not None and value < 1:
                raise SettingsError(
                    f"{name}={value} was asked for. A layer runs in parts of at least one token and one head. "
                    f"Set {name} to 1 or more, or to 'off'."
                )

    @property
    def are_whole(self) -> bool:
        """Whether a sequence of any length runs in one tile and one group."""
        return self.tile_tokens is None and self.num_head_groups in (None, 1)

    def starts(self, num_tokens: int) -> list[int]:
        """Where the tiles of a sequence start, and its end: as few as there can be, of nearly equal length."""
        num_tiles = 1 if self.tile_tokens is None else max(1, -(-num_tokens // self.tile_tokens))
        return [num_tokens * index // num_tiles for index in range(num_tiles + 1)]

    def runs_whole(self, num_tokens: int) -> bool:
        """Whether one tile and one group cover the layer, so that it runs as it is."""
        return len(self.starts(num_tokens)) == 2 and self.num_head_groups in (None, 1)


class TiledLayer(torch.autograd.Function):
    """A layer whose input waits in a store; called as `apply(call, settings, store, hidden_states, *parameters)`."""

    @staticmethod
    def forward(
        ctx: Any,
        call: LayerCall,
        settings: TileSettings,
        store: ActivationStore,
        hidden_states: Tensor,
        *_: Tensor,
    ) -> Tensor:
        """Runs the layer without a graph; everything that backward needs is held by the node."""
        hidden_states = hidden_states.detach()
        ctx.settings = settings
        ctx.call = call
        ctx.kept = store.keep(hidden_states)
        if settings.runs_whole(hidden_states.shape[1]):
            call.record_random_state()
        return run_layer(call, settings, hidden_states)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Any, ...]:
        """Recomputes, and lets go of input, masks and positions even if the graph lives on in a logged loss."""
        if ctx.kept is None:
            raise RuntimeError(
                "Backward ran a second time through a checkpointed layer. Its input is freed by the first one, so "
                "there is nothing to recompute from. Run backward once per forward, without retain_graph."
            )
        call, kept, needs_input = ctx.call, ctx.kept, ctx.needs_input_grad[3]
        ctx.call = ctx.kept = None
        hidden_states = kept.take()
        del kept
        if ctx.settings.runs_whole(hidden_states.shape[1]):
            gradient, parameter_gradients = _differentiate_whole(call, hidden_states, output_gradient, needs_input)
        else:
            backward = _TiledBackward(call, ctx.settings, hidden_states, needs_input)
            gradient, parameter_gradients = backward.run(output_gradient)
        return None, None, None, gradient, *parameter_gradients


@torch.no_grad()
def run_layer(call: LayerCall, settings: TileSettings, hidden_states: Tensor) -> Tensor:
    """The layer's output `[B, T, H]` for `hidden_states` `[B, T, H]`, without a graph."""
    num_tokens = hidden_states.shape[1]
    if settings.runs_whole(num_tokens):
        return call.run(hidden_states)
    call.check_tiles(num_tokens)
    heads = _project(call, settings, hidden_states, is_apart=False)
    with call.autocast():
        attention = heads.attend()
    output = None
    for start, stop in _tiles(settings, num_tokens):
        given = (_tile(hidden_states, start, stop), _given(attention, start, stop), start)
        call.learn_to_finish(*given)
        tile = call.finish(*given)
        if output is None:
            output = tile.new_empty(*hidden_states.shape[:2], *tile.shape[2:])
        output[:, start:stop].copy_(tile)
    assert output is not None
    return output


def _differentiate_whole(
    call: LayerCall, hidden_states: Tensor, output_gradient: Tensor, needs_input: bool
) -> LayerGradients:
    hidden_states = hidden_states.detach().requires_grad_(needs_input)
    with call.recorded_random_state(), torch.enable_grad():
        output = call.run(hidden_states)
    inputs = [*([hidden_states] if needs_input else []), *call.parameters]
    found: list[Tensor | None] = [*torch.autograd.grad(output, inputs, output_gradient, allow_unused=True)]
    return found.pop(0) if needs_input else None, found


class _TiledBackward:
    """One backward of one layer in tiles. Every tensor of T tokens is dropped with its last use.

    Args:
        call: the layer.
        settings: those of its forward.
        hidden_states: its input, `[B, T, H]`.
        needs_input: whether the input's gradient is asked for.
    """

    def __init__(self, call: LayerCall, settings: TileSettings, hidden_states: Tensor, needs_input: bool) -> None:
        self._call = call
        self._settings = settings
        self._hidden_states = hidden_states
        self._input_gradient = torch.empty_like(hidden_states) if needs_input else None
        self._tiles = _tiles(settings, hidden_states.shape[1])

    def run(self, output_gradient: Tensor) -> LayerGradients:
        """Gradients of the input, `[B, T, H]`, and of each parameter; None where there is none."""
        with torch.no_grad():
            heads = _project(self._call, self._settings, self._hidden_states, is_apart=True)
        with torch.enable_grad(), self._call.autocast():
            graphs = heads.attend_with_graph()
        gradients, attention_gradients = self._differentiate_finish(graphs, output_gradient)
        head_gradients = _differentiate_attention(graphs, attention_gradients)
        return self._input_gradient, self._differentiate_project(head_gradients, gradients)

    def _differentiate_finish(
        self, graphs: list[AttentionGraph], output_gradient: Tensor
    ) -> tuple[list[Tensor | None], list[Tensor]]:
        """From the layer's output to its input (the residual), its parameters, and each group's attention output."""
        attention = [graph.output.detach() for graph in graphs]
        attention_gradients = [torch.empty_like(output) for output in attention]
        sums = GradientSums(self._call.parameters, len(self._tiles))
        for start, stop in self._tiles:
            given = _given(attention, start, stop).requires_grad_()
            sums.add(self._differentiate_finish_tile(given, output_gradient[:, start:stop], start, stop))
            _write_groups(attention_gradients, given, start, stop)
        return sums.take(), attention_gradients

    def _differentiate_finish_tile(
        self, given: Tensor, output_gradient: Tensor, start: int, stop: int
    ) -> list[Tensor | None]:
        """Writes the gradient of the tile's attention output to `given.grad`, returns those of the parameters."""
        tile = self._leaf(start, stop)
        with torch.enable_grad():
            output = self._call.finish(tile, given, start)
        given.grad, *found = self._gradients([given], tile, [output], [output_gradient])
        if self._input_gradient is not None:
            tile_gradient, part = found.pop(0), self._input_gradient[:, start:stop]
            part.zero_() if tile_gradient is None else part.copy_(tile_gradient)
        return found

    def _differentiate_project(
        self, head_gradients: list[HeadTensors], before: list[Tensor | None]
    ) -> list[Tensor | None]:
        """From query, key and value to the layer's input, whose gradient is added to, and to its parameters."""
        sums = GradientSums(self._call.parameters, len(self._tiles))
        for start, stop in self._tiles:
            sums.add(self._differentiate_project_tile(head_gradients, start, stop))
        return sums.take(before)

    def _differentiate_project_tile(
        self, head_gradients: list[HeadTensors], start: int, stop: int
    ) -> list[Tensor | None]:
        tile = self._leaf(start, stop)
        with torch.enable_grad():
            attention = self._call.project(tile, start)
        heads = (attention.query, attention.key, attention.value)
        outputs = [head for head in heads if head.requires_grad]  # adapters of the first layer may leave some without
        if not outputs:
            return []
        gradients = [
            torch.cat([group[index][:, :, start:stop] for group in head_gradients], dim=1).to(head.dtype)
            for index, head in enumerate(heads)
            if head.requires_grad
        ]
        found = self._gradients([], tile, outputs, gradients)
        if self._input_gradient is not None and (tile_gradient := found.pop(0)) is not None:
            self._input_gradient[:, start:stop].add_(tile_gradient)
        return found

    def _gradients(
        self, leaves: list[Tensor], tile: Tensor, outputs: list[Tensor], gradients: list[Tensor]
    ) -> list[Tensor | None]:
        """Of `leaves`, of the tile if it is asked for, and of the parameters; None where outputs do not depend."""
        inputs = [*leaves, *([tile] if tile.requires_grad else []), *self._call.parameters]
        return [*torch.autograd.grad(outputs, inputs, gradients, allow_unused=True)]

    def _leaf(self, start: int, stop: int) -> Tensor:
        needs_gradient = self._input_gradient is not None
        return _tile(self._hidden_states, start, stop).detach().requires_grad_(needs_gradient)


def _project(call: LayerCall, settings: TileSettings, hidden_states: Tensor, *, is_apart: bool) -> HeadGroups:
    heads = HeadGroups(hidden_states.shape[1], settings.num_head_groups or 1, is_apart=is_apart)
    for start, stop in _tiles(settings, hidden_states.shape[1]):
        heads.collect(call.project(_tile(hidden_states, start, stop), start), start)
    return heads


def _differentiate_attention(graphs: list[AttentionGraph], output_gradients: list[Tensor]) -> list[HeadTensors]:
    """Empties both lists group by group: the graph of one is gone before the next is differentiated."""
    gradients = []
    while graphs:
        gradients.append(graphs.pop(0).gradients(output_gradients.pop(0)))
    return gradients


def _tiles(settings: TileSettings, num_tokens: int) -> list[tuple[int, int]]:
    starts = settings.starts(num_tokens)
    return list(itertools.pairwise(starts))


def _tile(hidden_states: Tensor, start: int, stop: int) -> Tensor:
    return hidden_states[:, start:stop].contiguous()


def _given(attention: list[Tensor], start: int, stop: int) -> Tensor:
    """A tile's attention output of all heads, `[B, t, Hq, D]`, in memory of its own."""
    return torch.cat([output[:, start:stop] for output in attention], dim=2)


def _write_groups(targets: list[Tensor], given: Tensor, start: int, stop: int) -> None:
    """Cuts the gradient of a tile's attention output, `given.grad`, into its groups."""
    assert given.grad is not None
    for target, part in zip(targets, given.grad.chunk(len(targets), dim=2), strict=True):
        target[:, start:stop].copy_(part)

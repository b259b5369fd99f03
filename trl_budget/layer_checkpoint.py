"""Puts tiled layers in a model for one forward, in the place of its checkpointing function or of its layers' forwards.

transformers and TRL set that function whenever they like, so it is replaced when a forward begins and given back when
it ends. Backward comes later and needs nothing of this: each layer's node holds its call. TRL turns checkpointing off
where no gradient is computed, so there the forwards are replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from trl_budget.activation_store import ActivationStore
from trl_budget.errors import SettingsError
from trl_budget.layer_call import LayerCall
from trl_budget.layer_tiles import TiledLayer, TileSettings, run_layer
from trl_budget.upstream_attention import undispatched_attention
from trl_budget.upstream_model import checkpointing_modules

_FUNCTION = "_gradient_checkpointing_func"


class _LayerRunner:
    """Called by a layer as `_gradient_checkpointing_func`."""

    def __init__(
        self, settings: TileSettings, store: ActivationStore, layers: list[nn.Module], *, needs_leaf_gradients: bool
    ) -> None:
        self._settings = settings
        self._store = store
        self._layers = layers
        self._needs_leaf_gradients = needs_leaf_gradients
        self._first: nn.Module | None = None  # to keep its input: layers before it may be frozen or in eval mode

    def __call__(self, function: Any, *args: Any) -> Tensor:
        call = LayerCall(function, args)
        (hidden_states,) = args
        if hidden_states.is_leaf and not self._needs_leaf_gradients:
            hidden_states = hidden_states.detach()
        if torch.is_grad_enabled() and (hidden_states.requires_grad or call.parameters):
            if self._first in (None, call.layer):
                self._first = call.layer
                self._store.begin_pass(len(self._layers), hidden_states)
            return TiledLayer.apply(call, self._settings, self._store, hidden_states, *call.parameters)
        return run_layer(call, self._settings, hidden_states.detach())


@contextmanager
def tiled_layers(
    model: nn.Module, settings: TileSettings, store: ActivationStore, *, needs_leaf_gradients: bool = True
) -> Iterator[None]:
    """While it lasts, checkpointed layers of `model` keep their inputs in `store` and run as `settings` say.

    Backward may run inside or outside, once per forward.

    Args:
        model: wrapped or not, in training mode, with gradient checkpointing enabled.
        settings: how each layer runs.
        store: where each layer's input waits.
        needs_leaf_gradients: whether hidden states that are a leaf of the graph get a gradient. Frozen embeddings have
            such an output under gradient checkpointing (`enable_input_require_grads`), so that torch's reaches the
            layers; nobody reads its gradient, and until backward ends the graph would hold both on the device.

    Raises:
        SettingsError: no layer checkpoints, or layers are to run in tiles and have dropout or another attention than
            `enable_packed_attention` serves.
    """
    modules = checkpointing_modules(model)
    if not modules:
        raise SettingsError(
            f"{type(model).__name__} has no layer with gradient checkpointing enabled. Tiles and activation offload "
            "replace what checkpointing keeps and recomputes, and would do nothing. "
            "Set gradient_checkpointing=True, or activation_offload='off', tiled_mlp='off' and "
            "attention_head_groups='off'."
        )
    if not settings.are_whole:
        _check_attention(model)
        _check_dropout(modules)
    layers: list[nn.Module] = [module for module in modules if isinstance(module, GradientCheckpointingLayer)]
    runner = _LayerRunner(settings, store, layers, needs_leaf_gradients=needs_leaf_gradients)
    originals = [(module, vars(module)[_FUNCTION]) for module in modules]
    for module in modules:
        vars(module)[_FUNCTION] = runner
    try:
        yield
        store.leave_device()
    finally:
        for module, original in originals:
            if vars(module)[_FUNCTION] is runner:
                vars(module)[_FUNCTION] = original


@contextmanager
def tiled_layers_without_gradient(model: nn.Module, settings: TileSettings) -> Iterator[None]:
    """While it lasts, layers of `model` run as `settings` say, and no gradient is computed.

    Args:
        model: a policy or a reference model, wrapped or not, in either mode, with gradient checkpointing or without.
        settings: how each layer runs; in tiles.

    Raises:
        SettingsError: the model has another attention than `enable_packed_attention` serves.
    """
    _check_attention(model)
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    replaced = ("forward", "gradient_checkpointing")  # transformers 5.24 checkpoints within `forward`
    originals = [{name: vars(layer)[name] for name in replaced if name in vars(layer)} for layer in layers]
    for layer in layers:
        vars(layer).update(forward=_tiled_forward(layer, layer.forward, settings), gradient_checkpointing=False)
    try:
        with torch.no_grad():
            yield
    finally:
        for layer, original in zip(layers, originals, strict=True):
            for name in replaced:
                vars(layer).pop(name, None)
            vars(layer).update(original)


def _tiled_forward(layer: nn.Module, forward: Callable[..., Tensor], settings: TileSettings) -> Callable[..., Tensor]:
    def run_part(_: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        return forward(*args, **kwargs)

    def tiled(*args: Any, **kwargs: Any) -> Tensor:
        return run_layer(LayerCall(partial(run_part, layer, **kwargs), args), settings, args[0])

    return tiled


def _check_attention(model: nn.Module) -> None:
    if names := undispatched_attention(model):
        raise SettingsError(
            f"{type(model).__name__} computes attention with {', '.join(sorted(names))}. A layer in tiles is cut "
            "where it calls attention, which can be seen for 'sdpa' only. "
            "Set attn_implementation='sdpa', or tiled_mlp='off' and attention_head_groups='off'."
        )


def _check_dropout(modules: list[nn.Module]) -> None:
    for layer in modules:
        for name, module in layer.named_modules() if isinstance(layer, GradientCheckpointingLayer) else ():
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 and module.training:
                raise SettingsError(
                    f"{name} in a {type(layer).__name__} drops {module.p} of its inputs. A layer in tiles is "
                    "recomputed in another order than it ran in, so other elements would be dropped. "
                    "Set dropout (lora_dropout for adapters) to 0, or tiled_mlp='off' and attention_head_groups='off'."
                )

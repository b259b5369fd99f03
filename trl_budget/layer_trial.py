"""A trial forward of the policy with its layers cut as the long-context levers would cut them.

Runs once, when the trainer is built and a lever is on, on fourteen tokens. It finds layers whose parts depend on each
other outside attention (a convolution over the sequence, a state), and calls that cannot be cut. Computes no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from trl_budget.activation_store import DeviceStore
from trl_budget.layer_bypass import forget_bypasses
from trl_budget.layer_checkpoint import tiled_layers
from trl_budget.layer_tiles import TileSettings
from trl_budget.trial_forward import TRIAL_ERRORS, difference_of_scores, trial_scores

TILE_TOKENS = 4  # three tiles of the longer row


def layers_fault(
    model: nn.Module,
    vocabulary: int,
    autocast: AbstractContextManager[Any],
    num_head_groups: int | None,
    *,
    is_tiled: bool,
    whole: AbstractContextManager[Any] | None = None,
) -> str | None:
    """What is wrong with layers that run as nodes of their own; None if nothing is.

    Args:
        model: the policy with TRL's fused head, on the device it trains on; without layers that keep statistics in
            training mode, and dispatching its attention where layers are cut.
        vocabulary: number of token ids that can be used.
        autocast: context of the policy's forward.
        num_head_groups: as it would be.
        is_tiled: whether layers are cut at their attention at all.
        whole: context in which the model has its own attention, which whole layers run with.
    """
    settings = TileSettings(TILE_TOKENS, num_head_groups) if is_tiled else TileSettings()
    was_training = model.training
    model.train()
    forget_bypasses(model)
    device = next(model.parameters()).device
    try:
        with _checkpointing(model), autocast:
            with _same_random_numbers(device), whole or nullcontext():
                expected = trial_scores(model, vocabulary).detach()
            with _same_random_numbers(device), torch.enable_grad(), tiled_layers(model, settings, DeviceStore()):
                cut = trial_scores(model, vocabulary).detach()
            difference, tolerance = difference_of_scores(model, cut, expected)
    except torch.OutOfMemoryError:
        raise
    except TRIAL_ERRORS as error:
        return f"a trial run of its layers failed: {str(error).rstrip('.')}"
    finally:
        model.train(was_training)
    if not difference <= tolerance:
        return f"in a trial run layers in tiles differed from whole ones by {difference:.2g}"
    return None


def _same_random_numbers(device: torch.device) -> AbstractContextManager[None]:
    """Each run begins with the generators as they are now, and leaves them so: dropout drops the same in both."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


@contextmanager
def _checkpointing(model: nn.Module) -> Iterator[None]:
    """Layers call their checkpointing function, as they will once training has begun."""
    function = partial(checkpoint, use_reentrant=False)
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    names = ("gradient_checkpointing", "_gradient_checkpointing_func")
    before = [{name: vars(layer)[name] for name in names if name in vars(layer)} for layer in layers]
    for layer in layers:
        vars(layer).update(zip(names, (True, function), strict=True))
    try:
        yield
    finally:
        for layer, state in zip(layers, before, strict=True):
            for name in names:
                vars(layer).pop(name, None)
            vars(layer).update(state)

"""What a model's config tells of its positions, heads and layers. Reads only; a key that a model lacks is no error.

`getattr` on configs lives here, as on other upstream objects in `upstream.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

_BOUNDARY = re.compile("position|window|chunk|floor|extent|compress|block|distance|local|length|ctx")
_MAX_POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_target_positions",
    "n_ctx",
    "max_seq_len",
    "seq_length",
)
_STATE_KINDS = ("conv", "linear_attention", "mamba", "recurrent", "state")


def rope_types(config: Any) -> frozenset[str]:
    """Kinds of rotary embedding; none for learned or other positions."""
    return frozenset(
        parameters.get("rope_type", "default")
        for parameters in _nested(getattr(config, "rope_parameters", None))
        if "rope_type" in parameters or "rope_theta" in parameters
    )


def _nested(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from _nested(inner)


def position_boundaries(config: Any) -> dict[str, int]:
    """Key -> number, for every number in the config that may be a position at which something changes."""
    return {
        key: value
        for parameters in _nested(config.to_dict())
        for key, value in parameters.items()
        if isinstance(value, int) and value > 1 and not isinstance(value, bool) and _BOUNDARY.search(str(key))
    }


def max_positions(config: Any) -> int | None:
    """How many positions the model has; None where the config does not limit them."""
    limits = [getattr(config, key, None) for key in _MAX_POSITIONS]
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)


def scaled_positions(config: Any) -> tuple[str, int] | None:
    """The key of a scaling of queries by absolute position, and the first position that it changes."""
    for parameters in _nested(getattr(config, "rope_parameters", None)):
        if parameters.get("llama_4_scaling_beta"):
            return "llama_4_scaling_beta", int(parameters.get("original_max_position_embeddings") or 0)
    if getattr(config, "attn_temperature_tuning", False):
        return "attn_temperature_tuning", int(getattr(config, "floor_scale", None) or 0)
    if floor := getattr(config, "log_scaling_n_floor", None):
        return "log_scaling_n_floor", int(floor)
    return None


def layer_values(config: Any, name: str) -> list[Any]:
    """What the config says under a key, one value or one of each layer; without None."""
    try:
        values = [getattr(config, name, None)]
    except RuntimeError:  # transformers 5.24 refuses to read for the whole model what differs by layer
        values = [getattr(layer, name, None) for layer in config.per_layer_config]
    return [value for value in values if value is not None]


def largest(config: Any, name: str) -> int:
    """The largest number under a key, over all layers; 0 where there is none."""
    return max((value for value in layer_values(config, name) if isinstance(value, int)), default=0)


def num_heads(config: Any) -> tuple[int, int] | None:
    """Query and key/value heads, the most of a layer; None for a model without attention."""
    heads = largest(config, "num_attention_heads")
    return (heads, largest(config, "num_key_value_heads") or heads) if heads > 0 else None


def head_dims(config: Any) -> frozenset[int]:
    """Sizes of query, key and value heads; empty for a model without attention."""
    if (heads := num_heads(config)) is None:
        return frozenset()
    first = layer_values(config, "head_dim") or [largest(config, "hidden_size") // heads[0]]
    others = (size for name in ("v_head_dim", "qk_head_dim", "global_head_dim") for size in layer_values(config, name))
    return frozenset(size for size in [*first, *others] if isinstance(size, int) and size > 0)


def is_routed(config: Any) -> bool:
    """Whether tokens are routed to experts, which share matrices between rows."""
    keys = (str(key) for values in _nested(config.to_dict()) for key in values)
    return any("expert" in key or "moe" in key for key in keys)


def layer_types(config: Any) -> frozenset[str]:
    """Kinds of layers."""
    return frozenset(getattr(config, "layer_types", None) or ())


def num_windows(config: Any) -> int:
    """Layers that see a sliding window; at least 1 where the config has a window and does not say which layers."""
    if kinds := list(getattr(config, "layer_types", None) or ()):
        return kinds.count("sliding_attention")
    return int(any(layer_values(config, "sliding_window")) and bool(getattr(config, "use_sliding_window", True)))


def state_layers(config: Any, *, is_stateful: bool) -> str | None:
    """Names of the layers that carry something along the sequence outside attention; None if there are none."""
    kinds = sorted(kind for kind in layer_types(config) if any(word in kind for word in _STATE_KINDS))
    return ", ".join(kinds) or ("state space" if is_stateful else None)


def telling_layers(model: nn.Module, config: Any) -> Sequence[nn.Module]:
    """The model's decoder layers from the first on, up to the last whose kind no earlier one has; at least two.

    Empty where the layers are not transformers' own, or not as many as the config says.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    count = getattr(config, "num_hidden_layers", None)
    if count is None or len(layers) != count:
        return []
    lists = [v for v in config.to_dict().values() if isinstance(v, list) and len(v) == count]
    kinds = [(type(layer).__name__, *(str(values[i]) for values in lists)) for i, layer in enumerate(layers)]
    last = max(kinds.index(kind) for kind in kinds)
    return layers[: max(last + 1, 2)]

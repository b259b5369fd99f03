"""One call of a decoder layer, to be run whole, or on tiles of the sequence up to and from its attention.

Everything in a decoder layer but attention works token by token, and attention is called through `attention.py`. So
the layer's own forward runs on a tile twice: `project` leaves it where attention is called, `finish` answers that call
with the tile's part of the output and lets it go on. What the layer is made of never matters; what tiles would change
is refused. Legend: B rows, T tokens, t tokens of a tile, H hidden, Hq / Hkv heads, D head dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from trl_budget.attention import AttentionCall, intercepted_attention
from trl_budget.errors import UnservedLayerError
from trl_budget.layer_bypass import find_bypasses, known_bypasses, left_out
from trl_budget.upstream_model import checkpointed_layer, runs_layer_hooks

# Dimension that counts tokens. Everything else that is a tensor belongs to attention, which sees the whole sequence.
_TOKEN_DIMENSION = {"position_embeddings": -2, "position_ids": -1, "cache_position": -1}
_FOR_ATTENTION = ("attention_mask", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache")
_HINT = "Set tiled_mlp='off' and attention_head_groups='off'."


class _LeaveLayer(BaseException):
    """Raised by the attention call of a `project` run; not an `Exception`, so that no layer swallows it."""


class LayerCall:
    """What transformers hands to a layer's checkpointing function, with the state of autocast and of random numbers.

    Holds no activation of its own: `hidden_states` is an argument of each run.

    Args:
        function: the partial that runs the layer; called with the hidden states.
        args: what it is to be called with.

    Raises:
        UnservedLayerError: the call is not one layer over `hidden_states`, or a gradient would be lost.
    """

    def __init__(self, function: Any, args: tuple[Any, ...]) -> None:
        layer = checkpointed_layer(function)
        if layer is None:
            raise UnservedLayerError(
                f"{_described(function)} was handed to gradient checkpointing, not a layer of transformers. "
                "Its parameters cannot be told, so their gradients would be lost. "
                "Set activation_offload='off', tiled_mlp='off' and attention_head_groups='off'."
            )
        self._function = function
        self.layer: nn.Module = layer
        self.parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        self._check_arguments(args)
        self._device = args[0].device
        self._autocast = {device: _autocast_state(device) for device in {"cpu", self._device.type}}
        self._random_state: list[Tensor] = []

    @property
    def name(self) -> str:
        """The layer's class, for messages."""
        return type(self.layer).__name__

    def _check_arguments(self, args: tuple[Any, ...]) -> None:
        tensors = [*_tensors(self._function.keywords)]
        if len(args) != 1 or not isinstance(args[0], Tensor) or args[0].dim() != 3:
            self._refuse(
                f"is called with {len(args)} positional arguments", "only hidden states can be recomputed from"
            )
        if any(tensor.requires_grad for tensor in tensors):
            self._refuse("is given a keyword tensor that requires grad", "its gradient would be lost")
        if any(parameter._backward_hooks for parameter in self.parameters):
            self._refuse("has a parameter with a tensor hook", "the hook would also run on parts of its gradient")

    def _refuse(self, what: str, why: str, hint: str = _HINT + " Set activation_offload='off' too.") -> NoReturn:
        raise UnservedLayerError(f"A {self.name} {what}. With it {why}. {hint}")

    def autocast(self) -> AbstractContextManager[Any]:
        """Autocast as it was at the call, without its cache.

        A cast that is cached while no gradient is computed has no graph: used again by a recompute within the same
        autocast region, it would cut fp32 weights off from their gradient.
        """
        stack = ExitStack()
        for device, (enabled, dtype) in self._autocast.items():
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False))
        return stack

    def record_random_state(self) -> None:
        """Remembers the generators' states, before the layer runs whole."""
        self._random_state = [torch.get_rng_state()]
        if self._device.type == "cuda":
            self._random_state.append(torch.cuda.get_rng_state(self._device))

    @contextmanager
    def recorded_random_state(self) -> Iterator[None]:
        """The generators as they were at `record_random_state`; afterwards as they are now."""
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.set_rng_state(self._random_state[0])
            if devices:
                torch.cuda.set_rng_state(self._random_state[1], self._device)
            yield

    def run(self, hidden_states: Tensor) -> Tensor:
        """Runs the layer on all tokens, with its own attention. `[B, T, H]` in and out."""
        with self.autocast():
            output = self._function(hidden_states)
        return self._checked(output, hidden_states)

    def check_tiles(self, num_tokens: int) -> None:
        """Refuses a call that tiles of the sequence would change, before anything runs.

        Raises:
            UnservedLayerError: naming what.
        """
        keywords = self._function.keywords
        for name, value in keywords.items():
            if name in _CACHES and value is not None:
                self._refuse(f"is given {name}", "every tile would be added to the cache", _HINT)
            for tensor in _tensors(value):
                if name in _FOR_ATTENTION:
                    continue
                dimension = _TOKEN_DIMENSION.get(name)
                if dimension is None or tensor.dim() < -dimension or tensor.shape[dimension] != num_tokens:
                    shape = list(tensor.shape)
                    self._refuse(f"is given {name} of shape {shape}", "it is not known how to cut that", _HINT)
        if runs_layer_hooks(self._function) and any(_hooks(self.layer)):
            self._refuse("has hooks", "they would see one tile at a time", _HINT)

    def project(self, tile: Tensor, start: int) -> AttentionCall:
        """Runs the layer on `tile` `[B, t, H]`, tokens from `start`, up to its attention.

        Returns:
            The attention call with the tile's query, key and value, and all other arguments for the whole sequence.
        """
        calls: list[AttentionCall] = []

        def leave(call: AttentionCall) -> Tensor:
            calls.append(call)
            raise _LeaveLayer

        with suppress(_LeaveLayer):
            self._run_tile(tile, start, leave)
        if not calls:
            self._refuse("ran without calling attention through this library's dispatch", "it cannot be tiled", _HINT)
        (call,) = calls
        self._make_whole(call)
        return call

    def _make_whole(self, call: AttentionCall) -> None:
        keywords = self._function.keywords
        if call.features.get("dropout"):
            self._refuse(f"drops {call.features['dropout']} of its attention", "a recompute would drop others", _HINT)
        if call.attention_mask is not keywords.get("attention_mask"):
            self._refuse("hands attention another mask than it is given", "it may be one tile's only", _HINT)
        for name, value in call.features.items():
            if name in keywords:
                call.features[name] = keywords[name]
            elif next(_tensors(value), None) is not None:
                self._refuse(f"hands attention the tensor {name}", "it may be one tile's or one head's only", _HINT)

    def finish(self, tile: Tensor, attention_output: Tensor, start: int) -> Tensor:
        """Runs the layer on `tile` `[B, t, H]`, tokens from `start`, with the attention output `[B, t, Hq, D]` given.

        Returns:
            The layer's output `[B, t, H]`.
        """
        num_calls = 0

        def give(_: AttentionCall) -> Tensor:
            nonlocal num_calls
            num_calls += 1
            return attention_output

        with left_out(known_bypasses(self.layer, self._dtypes(tile))):
            output = self._run_tile(tile, start, give)
        if num_calls != 1:
            self._refuse(f"calls attention {num_calls} times", "only one call can be cut out", _HINT)
        return self._checked(output, tile)

    def learn_to_finish(self, tile: Tensor, attention_output: Tensor, start: int) -> None:
        """Finds out, once for each layer, what `finish` can leave out; called as that is."""
        leaf = tile.detach().requires_grad_()
        find_bypasses(
            self.layer,
            self._dtypes(tile),
            project=lambda: self.project(leaf, start).query.shape[-1],
            finish=lambda: self.finish(leaf, attention_output, start),
        )

    def _dtypes(self, tile: Tensor) -> Hashable:
        return tile.dtype, *self._autocast.values(), *dict.fromkeys(p.dtype for p in self.layer.parameters())

    def _run_tile(self, tile: Tensor, start: int, interceptor: Callable[[AttentionCall], Tensor]) -> Any:
        stop = start + tile.shape[1]
        keywords = {name: _cut(name, value, start, stop) for name, value in self._function.keywords.items()}
        function = functools.partial(self._function.func, *self._function.args)
        with intercepted_attention(interceptor), self.autocast():
            return function(tile, **keywords)

    def _checked(self, output: Any, hidden_states: Tensor) -> Tensor:
        if not isinstance(output, Tensor) or output.shape[:2] != hidden_states.shape[:2]:
            self._refuse(f"returns {_described(output)}", "only one tensor with a row per token can be served")
        return output


def _cut(name: str, value: Any, start: int, stop: int) -> Any:
    if name not in _TOKEN_DIMENSION or value is None:
        return value
    if isinstance(value, (tuple, list)):
        return type(value)(_cut(name, item, start, stop) for item in value)
    return value.narrow(_TOKEN_DIMENSION[name], start, stop - start)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _hooks(layer: nn.Module) -> Iterator[Any]:
    yield from (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)


def _autocast_state(device_type: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)


def _described(value: Any) -> str:
    return f"a {type(value).__name__}" + (f" of shape {list(value.shape)}" if isinstance(value, Tensor) else "")

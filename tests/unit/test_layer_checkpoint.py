"""The context that puts tiled layers in place: what it replaces, gives back and refuses."""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import Any

import pytest
import torch
from test_activation_store import RecordingStore
from tiny import tiny_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trl_budget.activation_store import DeviceStore
from trl_budget.attention import _dispatching, dispatching_implementation
from trl_budget.errors import SettingsError, UnservedLayerError
from trl_budget.layer_checkpoint import tiled_layers
from trl_budget.layer_tiles import TileSettings
from trl_budget.upstream_attention import enable_packed_attention
from trl_budget.upstream_model import checkpointed_layer

TILED = TileSettings(3, None)


def checkpointing_model(**overrides: Any) -> Any:
    model = tiny_model(**overrides)
    enable_packed_attention([model])
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def functions(model: nn.Module) -> list[Any]:
    return [layer._gradient_checkpointing_func for layer in model.model.layers]


def run(model: nn.Module, settings: TileSettings = TILED) -> Tensor:
    with tiled_layers(model, settings, DeviceStore()):
        return model(input_ids=torch.arange(2, 12)[None]).logits.sum()


def test_checkpointing_functions_come_back_after_the_forward_and_after_an_error() -> None:
    model = checkpointing_model()
    before = functions(model)
    with tiled_layers(model, TILED, DeviceStore()):
        assert all(during is not original for during, original in zip(functions(model), before, strict=True))
    assert functions(model) == before
    with pytest.raises(KeyError), tiled_layers(model, TILED, DeviceStore()):
        raise KeyError
    assert functions(model) == before


def test_a_function_that_somebody_sets_in_between_stays() -> None:
    model = checkpointing_model()
    with tiled_layers(model, TILED, DeviceStore()):
        model.model.layers[0]._gradient_checkpointing_func = checkpoint
    assert functions(model)[0] is checkpoint


def test_contexts_of_two_stores_nest() -> None:
    model, outer, inner = checkpointing_model(), RecordingStore(), RecordingStore()
    ids = torch.arange(2, 12)[None]
    with tiled_layers(model, TILED, outer):
        with tiled_layers(model, TILED, inner):
            model(input_ids=ids)
        model(input_ids=ids)
    assert (len(outer.events), len(inner.events)) == (2, 2)


def test_layers_keep_in_forward_order_and_take_in_reverse() -> None:
    model, store = checkpointing_model(num_hidden_layers=3), RecordingStore()
    with tiled_layers(model, TILED, store):
        loss = model(input_ids=torch.arange(2, 12)[None]).logits.sum()
    loss.backward()
    assert store.events == ["keep 0", "keep 1", "keep 2", "take 2", "take 1", "take 0"]


def test_a_model_without_checkpointing_is_refused() -> None:
    with (
        pytest.raises(SettingsError, match="gradient_checkpointing=True"),
        tiled_layers(tiny_model().train(), TILED, DeviceStore()),
    ):
        pass


def test_dropout_in_a_layer_is_refused_in_tiles_only() -> None:
    model = checkpointing_model()
    model.model.layers[1].mlp.drop = nn.Dropout(0.1)
    model.train()
    with pytest.raises(SettingsError, match=r"^mlp\.drop in a Qwen3DecoderLayer drops 0\.1"):
        run(model)
    run(model, TileSettings())


def test_attention_dropout_is_refused_in_tiles() -> None:
    with pytest.raises(UnservedLayerError, match=r"drops 0\.25 of its attention"):
        run(checkpointing_model(attention_dropout=0.25))


@pytest.mark.parametrize("settings", [TILED, TileSettings(None, 2)])
def test_attention_that_is_not_dispatched_is_refused_in_tiles(settings: TileSettings) -> None:
    model = checkpointing_model()
    model.config._attn_implementation = "eager"
    with pytest.raises(SettingsError, match="computes attention with eager"):
        run(model, settings)
    run(model, TileSettings()).backward()


def test_a_layer_without_attention_is_refused_in_tiles() -> None:
    model = _Model()
    with (
        pytest.raises(UnservedLayerError, match="without calling attention"),
        tiled_layers(model, TILED, DeviceStore()),
    ):
        model.layer(torch.ones(1, 10, 4))


def test_a_hook_on_a_parameter_is_refused_since_it_would_run_twice() -> None:
    model = checkpointing_model()
    model.model.layers[0].mlp.up_proj.weight.register_hook(lambda gradient: gradient / 2)
    with pytest.raises(UnservedLayerError, match="tensor hook"):
        run(model, TileSettings())


@pytest.mark.parametrize("settings", [TileSettings(), TILED])
def test_hooks_of_a_layer_see_its_whole_output_or_are_refused(settings: TileSettings) -> None:
    model, seen = checkpointing_model(), []
    model.model.layers[0].register_forward_hook(lambda _, __, output: seen.append(output.shape[1]))
    try:
        run(model, settings)
    except UnservedLayerError as error:
        assert "has hooks" in str(error)
    else:
        assert seen == [10]


class _Layer(GradientCheckpointingLayer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden_states: Tensor, *others: Any, **_: Any) -> Any:
        output = self.linear(hidden_states)
        return (output, None) if others == ("tuple",) else output


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = _Layer()
        self.layer.gradient_checkpointing = True
        self.layer._gradient_checkpointing_func = checkpoint


class _AttentionLayer(_Layer):
    """Calls attention `num_calls` times, on two heads of two dimensions, with a mask and a feature of its own."""

    def __init__(self, *, num_calls: int = 1, mask: Tensor | None = None, **features: Any) -> None:
        super().__init__()
        self.attend = ALL_ATTENTION_FUNCTIONS[dispatching_implementation("sdpa")]
        self.num_calls, self.mask, self.features = num_calls, mask, features

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **features: Any) -> Tensor:
        batch, tokens, _ = hidden_states.shape
        mask = attention_mask if self.mask is None else self.mask
        for _ in range(self.num_calls):
            heads = self.linear(hidden_states.view(batch * tokens, 4)).view(batch, tokens, 2, 2).transpose(1, 2)
            output, _ = self.attend(self, heads, heads, heads, mask, **{**self.features, **features})
            hidden_states = hidden_states + output.reshape(batch, tokens, 4)
        return hidden_states


def run_layer(layer: nn.Module, settings: TileSettings = TILED, **keywords: Any) -> Tensor:
    model = _Model()
    model.layer = layer.train()
    layer.gradient_checkpointing = True
    layer._gradient_checkpointing_func = checkpoint
    with tiled_layers(model, settings, DeviceStore()):
        return layer(torch.linspace(-1, 1, 80).view(2, 10, 4), **keywords)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_calls": 2}, "calls attention 2 times"),
        ({"mask": torch.zeros(10, 10)}, "hands attention another mask"),
        ({"s_aux": torch.zeros(2)}, "hands attention the tensor s_aux"),
        ({"bias": [torch.zeros(2)]}, "hands attention the tensor bias"),
        ({"dropout": 0.5}, "drops 0.5"),
    ],
)
def test_attention_that_tiles_would_change_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UnservedLayerError, match=message):
        run_layer(_AttentionLayer(**settings))


def test_a_layer_may_view_its_input_of_several_rows_as_one() -> None:
    layer = _AttentionLayer()
    expected = run_layer(layer, TileSettings())
    assert (run_layer(layer) - expected).abs().max().item() < 1e-6


def test_attention_sees_positions_of_the_whole_sequence() -> None:
    layer, seen = _AttentionLayer(), []
    implementation = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def record(*args: Any, position_ids: Tensor, **kwargs: Any) -> Any:
        seen.append(position_ids)
        return implementation(*args, **kwargs)

    layer.attend = _dispatching(record)
    positions = torch.arange(10)[None]
    run_layer(layer, position_ids=positions)
    assert len(seen) == 1
    assert seen[0] is positions


@pytest.mark.parametrize("settings", [TileSettings(), TILED])
@pytest.mark.parametrize(
    ("args", "keywords", "message"),
    [
        ((torch.ones(2, 3),), {}, "2 positional arguments"),
        (("tuple",), {}, "2 positional arguments"),
        ((), {"bias": torch.ones(1, requires_grad=True)}, "keyword tensor that requires grad"),
        ((), {"bias": [{"a": torch.ones(1, requires_grad=True)}]}, "keyword tensor that requires grad"),
    ],
)
def test_what_would_lose_a_gradient_is_refused(
    settings: TileSettings, args: tuple[Any, ...], keywords: dict[str, Any], message: str
) -> None:
    model = _Model()
    with pytest.raises(UnservedLayerError, match=message), tiled_layers(model, settings, DeviceStore()):
        model.layer(torch.ones(1, 10, 4), *args, **keywords)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"per_layer_input": torch.ones(1, 10, 2)}, r"given per_layer_input of shape \[1, 10, 2\]"),
        ({"position_ids": torch.ones(1, 9)}, r"given position_ids of shape \[1, 9\]"),
        ({"position_embeddings": (torch.ones(1, 1, 4),)}, r"given position_embeddings of shape \[1, 1, 4\]"),
        ({"past_key_value": object()}, "given past_key_value"),
    ],
)
def test_what_cannot_be_cut_is_refused_in_tiles_only(keywords: dict[str, Any], message: str) -> None:
    model = _Model()
    with tiled_layers(model, TileSettings(), DeviceStore()):
        model.layer(torch.ones(1, 10, 4), **keywords)
    with pytest.raises(UnservedLayerError, match=message), tiled_layers(model, TILED, DeviceStore()):
        model.layer(torch.ones(1, 10, 4), **keywords)


def test_a_layer_that_returns_more_than_one_tensor_is_refused() -> None:
    class Pair(_Layer):
        def forward(self, hidden_states: Tensor, **_: Any) -> Any:
            return self.linear(hidden_states), None

    model = _Model()
    model.layer = Pair()
    model.layer.gradient_checkpointing = True
    model.layer._gradient_checkpointing_func = checkpoint
    with (
        pytest.raises(UnservedLayerError, match="returns a tuple"),
        tiled_layers(model, TileSettings(), DeviceStore()),
    ):
        model.layer(torch.ones(1, 10, 4))


def test_a_function_that_is_not_a_layers_is_refused() -> None:
    model = _Model()
    with tiled_layers(model, TileSettings(), DeviceStore()), pytest.raises(UnservedLayerError, match="not a layer"):
        model.layer._gradient_checkpointing_func(model.layer.linear.__call__, torch.ones(1, 10, 4))


def test_both_forms_of_the_partial_name_their_layer() -> None:
    layer = _Layer()
    assert checkpointed_layer(functools.partial(layer.__call__, mask=None)) is layer
    assert checkpointed_layer(functools.partial(_Layer.forward, layer, mask=None)) is layer
    assert checkpointed_layer(functools.partial(layer.linear.__call__)) is None
    assert checkpointed_layer(layer.__call__) is None


@pytest.mark.parametrize(("tokens", "groups", "name"), [(0, None, "tiled_mlp"), (None, 0, "attention_head_groups")])
def test_parts_of_nothing_are_refused(tokens: int | None, groups: int | None, name: str) -> None:
    with pytest.raises(SettingsError, match=f"{name}=0"):
        TileSettings(tokens, groups)


@pytest.mark.parametrize("num_tokens", [1, 5, 57, 1024])
@pytest.mark.parametrize("tile_tokens", [None, 1, 8, 56, 57, 5000])
def test_tiles_cover_a_sequence_once_and_none_is_too_long(num_tokens: int, tile_tokens: int | None) -> None:
    starts = TileSettings(tile_tokens).starts(num_tokens)
    lengths = [b - a for a, b in itertools.pairwise(starts)]
    assert (starts[0], starts[-1]) == (0, num_tokens)
    assert max(lengths) <= (tile_tokens or num_tokens)
    assert min(lengths) >= max(lengths) - 1 > -1
    assert len(lengths) == -(-num_tokens // (tile_tokens or num_tokens))


def test_a_frozen_embeddings_output_is_not_held_by_the_graph() -> None:
    model = checkpointing_model()
    for parameter in model.model.embed_tokens.parameters():
        parameter.requires_grad_(False)
    model.enable_input_require_grads()
    outputs: list[Any] = []
    model.model.embed_tokens.register_forward_hook(lambda *args: outputs.append(weakref.ref(args[-1])))

    def loss_of(*, needs_leaf_gradients: bool) -> Tensor:
        with tiled_layers(model, TILED, NothingKept(), needs_leaf_gradients=needs_leaf_gradients):
            return model(input_ids=torch.arange(2, 12)[None]).logits.sum()

    held, free = loss_of(needs_leaf_gradients=True), loss_of(needs_leaf_gradients=False)
    assert outputs[0]() is not None and outputs[1]() is None
    found = []
    for loss in (held, free):
        model.zero_grad()
        loss.backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


class NothingKept(DeviceStore):
    """Keeps copies, as a store elsewhere does."""

    def keep(self, hidden_states: Tensor) -> Any:
        return super().keep(hidden_states.clone())

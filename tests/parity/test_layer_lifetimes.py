"""What a layer in tiles holds, and until when. Reference counting alone has to free it: the collector is off."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from live_memory import LiveBytes
from tiled_models import checkpointing_model, loss_of, tiles
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from trl_budget import attention
from trl_budget.activation_store import DeviceStore
from trl_budget.layer_tiles import TileSettings

SETTINGS = TileSettings(8, 4)


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class AttentionCalls:
    """Weak references to the heads of every attention call, and who is alive when a call is differentiated."""

    def __init__(self) -> None:
        self.heads: list[list[weakref.ref[Tensor]]] = []
        self.alive_at_backward: list[tuple[int, list[int]]] = []

    def add(self, heads: tuple[Tensor, ...], output: Tensor) -> None:
        index = len(self.heads)
        self.heads.append([weakref.ref(head) for head in heads])
        if output.requires_grad:
            output.register_hook(lambda _: self.alive_at_backward.append((index, self.alive())))

    def alive(self) -> list[int]:
        return [index for index, heads in enumerate(self.heads) if any(head() is not None for head in heads)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> AttentionCalls:
    seen = AttentionCalls()
    original = attention.packed_attention

    def recorded(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output = original(query, key, value, *args, **kwargs)
        seen.add((query, key, value), output)
        return output

    monkeypatch.setattr(attention, "packed_attention", recorded)
    return seen


def test_no_query_key_or_value_survives_its_layer(calls: AttentionCalls) -> None:
    model = checkpointing_model()
    with tiles(model, SETTINGS):
        loss, _ = loss_of(model, is_packed=True)
    assert len(calls.heads) == 2
    assert calls.alive() == []
    loss.backward()
    assert len(calls.heads) == 2 + 2 * 4
    assert calls.alive() == []


def test_one_group_of_heads_is_gone_before_the_next_is_differentiated(calls: AttentionCalls) -> None:
    model = checkpointing_model()
    with tiles(model, SETTINGS):
        loss, _ = loss_of(model, is_packed=True)
    loss.backward()
    last, first = [2, 3, 4, 5], [6, 7, 8, 9]
    assert calls.alive_at_backward == [
        *((index, [other for other in last if other >= index]) for index in last),
        *((index, [other for other in first if other >= index]) for index in first),
    ]


def test_heads_reach_attention_contiguous_as_packed_attention_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = []
    original = attention.packed_attention

    def recorded(*args: Any, **kwargs: Any) -> Tensor:
        layouts.extend(head.transpose(1, 2).is_contiguous() for head in args[:3])
        return original(*args, **kwargs)

    model = checkpointing_model()
    monkeypatch.setattr(attention, "packed_attention", recorded)
    with tiles(model, SETTINGS):
        loss_of(model, is_packed=True)[0].backward()
    assert len(layouts) == 3 * (2 + 2 * 4)
    assert all(layouts)


class WatchedStore(DeviceStore):
    def __init__(self) -> None:
        self.kept: list[weakref.ref[Any]] = []

    def keep(self, hidden_states: Tensor) -> Any:
        assert not hidden_states.requires_grad
        kept = super().keep(hidden_states)
        self.kept.append(weakref.ref(kept))
        return kept

    def alive(self) -> int:
        return sum(kept() is not None for kept in self.kept)


@pytest.mark.parametrize("settings", [TileSettings(), SETTINGS])
def test_layer_inputs_go_with_the_backward_although_the_loss_stays(settings: TileSettings) -> None:
    model, store = checkpointing_model(), WatchedStore()
    with tiles(model, settings, store):
        loss, _ = loss_of(model, is_packed=True)
    assert store.alive() == 2
    loss.backward()
    assert store.alive() == 0
    assert loss.grad_fn is not None


def test_layer_inputs_go_with_a_forward_that_is_dropped_or_fails() -> None:
    model, store = checkpointing_model(), WatchedStore()
    with tiles(model, SETTINGS, store):
        loss, _ = loss_of(model, is_packed=True)
        del loss
        assert store.alive() == 0

    def fail(*_: object) -> None:
        raise ValueError

    model.model.layers[1].mlp.register_forward_hook(fail)
    with pytest.raises(ValueError) as caught, tiles(model, SETTINGS, store):
        loss_of(model, is_packed=True)
    del caught
    assert len(store.kept) == 4
    assert store.alive() == 0


@pytest.mark.parametrize("settings", [TileSettings(), SETTINGS])
def test_a_second_backward_over_the_same_graph_is_refused(settings: TileSettings) -> None:
    model = checkpointing_model()
    with tiles(model, settings):
        loss, _ = loss_of(model, is_packed=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once per forward"):
        loss.backward()


class _LinearAttention(torch.autograd.Function):
    """Stands for a kernel: saves its inputs and its output, needs nothing else of T tokens."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ratio = query.shape[1] // key.shape[1]
        output = torch.empty_like(query.transpose(1, 2))
        for head in range(query.shape[1]):
            part = output[:, :, head].copy_(query[:, head])
            part.mul_(key[:, head // ratio].mean()).add_(value[:, head // ratio])
        ctx.save_for_backward(query, key, value, output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _ = ctx.saved_tensors
        return torch.empty_like(query).zero_(), torch.zeros_like(key), torch.zeros_like(value)


HIDDEN, QUERY, KEY = 64, 8 * 8, 4 * 8


def peak_of_a_layer(settings: TileSettings, num_tokens: int) -> tuple[int, int]:
    """Peak bytes of what one layer makes: in its forward, and in its backward with its output's gradient given."""
    model = checkpointing_model(num_hidden_layers=1, hidden_size=HIDDEN, intermediate_size=256)
    hidden_states = torch.randn(1, num_tokens, HIDDEN, requires_grad=True)
    bounds = torch.tensor([0, num_tokens], dtype=torch.int32)
    positions = torch.arange(num_tokens)[None]
    keywords = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": num_tokens}
    embeddings = model.model.rotary_emb(hidden_states, positions)
    gradient = torch.ones_like(hidden_states)
    with LiveBytes() as live:
        with tiles(model, settings):
            output = model.model.layers[0](
                hidden_states, position_embeddings=embeddings, position_ids=positions, **keywords
            )
        forward = live.peak
        start = live.now
        live.restart_peak()
        output.backward(gradient)
        return forward, live.peak - start


def elements_per_token(settings: TileSettings) -> tuple[float, float]:
    """Slopes of both peaks, in elements of fp32."""
    short, long = peak_of_a_layer(settings, 8192), peak_of_a_layer(settings, 16384)
    forward, backward = ((b - a) / 8192 / 4 for a, b in zip(short, long, strict=True))
    return forward, backward


@pytest.fixture
def linear_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    def linear(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        return _LinearAttention.apply(query, key, value)

    monkeypatch.setattr(attention, "packed_attention", linear)


@pytest.mark.parametrize("num_groups", [1, 4])
def test_a_backward_holds_per_token_what_the_formula_says(linear_attention: None, num_groups: int) -> None:
    _, slope = elements_per_token(TileSettings(64, num_groups))
    # the input's gradient; heads, attention output and its gradient; the gradients of one group's heads
    formula = HIDDEN + (QUERY + 2 * KEY) + 2 * QUERY + (QUERY + 2 * KEY) / num_groups
    assert abs(slope - formula) <= 1


def test_a_forward_holds_per_token_what_the_formula_says(linear_attention: None) -> None:
    slope, _ = elements_per_token(TileSettings(64, 4))
    heads_and_attention = QUERY + 2 * KEY + QUERY
    attention_and_output = QUERY + HIDDEN
    assert abs(slope - max(heads_and_attention, attention_and_output)) <= 1


def test_an_untiled_layer_holds_several_times_as_much(linear_attention: None) -> None:
    forward, backward = elements_per_token(TileSettings())
    assert forward > 3 * (QUERY + 2 * KEY)
    assert backward > 3 * (HIDDEN + 2 * (QUERY + 2 * KEY) + 2 * QUERY)


def test_a_layer_of_a_4b_model_holds_at_most_34_kb_per_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def varlen(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, **features: Any) -> Tensor:
        return attention._varlen(query, key, value, bounds, features["max_length_q"], features["scaling"], None)

    def peak(num_tokens: int) -> int:
        hidden_states = torch.empty(1, num_tokens, 2560, dtype=torch.bfloat16, requires_grad=True)
        positions = torch.arange(num_tokens)[None]
        bounds = torch.tensor([0, num_tokens], dtype=torch.int32)
        embeddings = model.model.rotary_emb(hidden_states, positions)
        gradient = torch.empty_like(hidden_states)
        with LiveBytes() as live:
            with tiles(model, TileSettings(4096, 8)):
                output = model.model.layers[0](
                    hidden_states, position_embeddings=embeddings, cu_seq_lens_q=bounds, max_length_q=num_tokens
                )
            start = live.now
            live.restart_peak()
            output.backward(gradient)
            return live.peak - start

    monkeypatch.setattr(attention, "packed_attention", varlen)
    shape = {"hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32, "num_key_value_heads": 8}
    with FakeTensorMode(allow_non_fake_inputs=True):  # shapes only: nothing is allocated or computed
        model = checkpointing_model(**shape, head_dim=128, num_hidden_layers=1, dtype=torch.bfloat16)
        slope = (peak(65536) - peak(32768)) / 32768
    # the input's gradient, heads, attention output and its gradient, and the fp32 sum of each softmax
    assert slope == 2 * (2560 + (4096 + 2 * 1024) + 2 * 4096) + 4 * 32

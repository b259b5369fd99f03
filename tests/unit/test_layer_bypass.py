"""Which modules of a layer are left out when it is continued from its attention, and that nothing else changes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import max_difference
from torch import Tensor, nn

from trl_budget import layer_bypass
from trl_budget.attention import intercepted_attention
from trl_budget.layer_bypass import find_bypasses, forget_bypasses, known_bypasses, left_out
from trl_budget.layer_tiles import TileSettings

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))
from tiled_models import checkpointing_model, gradients, lora_model

HEADS = {f"self_attn.{name}_proj" for name in "qkv"}
NORMS_OF_HEADS = {f"self_attn.{name}_norm" for name in "qk"}


class Left(BaseException):
    """As `layer_call._LeaveLayer`."""


class Layer(nn.Module):
    """A sequential layer: attention reads q of the norm, the rest reads attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(8)
        self.q = nn.Linear(8, 12)
        self.out = nn.Linear(12, 8)

    def forward(self, hidden: Tensor, attention: Callable[[Tensor], Tensor]) -> Tensor:
        return hidden + self.out(attention(self.q(self.norm(hidden))))


class Gated(Layer):
    def forward(self, hidden: Tensor, attention: Callable[[Tensor], Tensor]) -> Tensor:
        query = self.q(self.norm(hidden))
        return hidden + self.out(attention(query) * query.sigmoid())


class BesideAttention(Layer):
    def forward(self, hidden: Tensor, attention: Callable[[Tensor], Tensor]) -> Tensor:
        normed = self.norm(hidden)
        return hidden + self.out(attention(self.q(normed))) + normed


class WritesInPlace(Layer):
    def forward(self, hidden: Tensor, attention: Callable[[Tensor], Tensor]) -> Tensor:
        return hidden + self.out(attention(self.q(self.norm(hidden)).mul_(2.0)))


class ChecksItself(Layer):
    def forward(self, hidden: Tensor, attention: Callable[[Tensor], Tensor]) -> Tensor:
        query = self.q(self.norm(hidden))
        if not query.isfinite().all():
            raise RuntimeError("not finite")
        return hidden + self.out(attention(query))


class ScalesByWidth(Layer):
    def forward(self, hidden: Tensor, attention: Callable[[Tensor], Tensor]) -> Tensor:
        query = self.q(self.norm(hidden))
        return hidden + self.out(attention(query) / query.shape[-1])


class ReadsThreeHeads(Layer):
    def forward(self, hidden: Tensor, attention: Callable[[Tensor], Tensor]) -> Tensor:
        return hidden + self.out(attention(self.q(self.norm(hidden)).unflatten(-1, (3, 4))))


class UsesANormTwice(Layer):
    def forward(self, hidden: Tensor, attention: Callable[[Tensor], Tensor]) -> Tensor:
        return hidden + self.out(attention(self.q(self.norm(self.norm(hidden)))))


class AddsNothing(torch.autograd.Function):
    """Returns its first input; the second gets a gradient of ones, as that of an auxiliary loss."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, loss: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones(())


class WithAuxiliaryLoss(Layer):
    def forward(self, hidden: Tensor, attention: Callable[[Tensor], Tensor]) -> Tensor:
        query = self.q(self.norm(hidden))
        return hidden + AddsNothing.apply(self.out(attention(query)), query.square().mean())


class Counts(Layer):
    """Its buffer would hold NaN for good."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, hidden: Tensor, attention: Callable[[Tensor], Tensor]) -> Tensor:
        query = self.q(self.norm(hidden))
        self.largest.copy_(query.detach().max())
        return hidden + self.out(attention(query))


class Runs:
    """One layer on one tile, up to its attention and from it."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer.requires_grad_(False)
        self.hidden, self.given = torch.randn(2, 5, 8, requires_grad=True), torch.randn(2, 5, 12)
        self.dtypes: Any = torch.float32

    def project(self) -> int:
        def leave(_: Tensor) -> Tensor:
            raise Left

        with suppress(Left):
            self.layer(self.hidden, leave)
        return 4

    def finish(self) -> Tensor:
        with left_out(known_bypasses(self.layer, self.dtypes)), intercepted_attention(no_attention):
            return self.layer(self.hidden, lambda _: self.given)

    def find(self) -> set[str]:
        find_bypasses(self.layer, self.dtypes, self.project, self.finish)
        return names_of(self.layer, self.dtypes)


def no_attention(_: Any) -> Tensor:
    raise AssertionError("these layers call no attention of transformers")


def names_of(layer: nn.Module, dtypes: Any = None) -> set[str]:
    """Of what was learned; under any dtypes when None."""
    learned = layer_bypass._known.get(layer, (None, []))[0]
    modules = [bypass.module for bypass in known_bypasses(layer, learned if dtypes is None else dtypes)]
    return {name for name, module in layer.named_modules() if module in modules}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Layer, {"norm", "q"}),
        (Gated, set()),
        (BesideAttention, {"q"}),
        (WritesInPlace, {"norm", "q"}),
        (ChecksItself, set()),
        (ScalesByWidth, {"norm", "q"}),
        (ReadsThreeHeads, {"norm", "q"}),
        (UsesANormTwice, {"q"}),
        (WithAuxiliaryLoss, set()),
        (Counts, set()),
    ],
)
def test_only_what_no_bit_of_the_output_depends_on_is_left_out(kind: type[Layer], expected: set[str]) -> None:
    runs = Runs(kind())
    before = runs.finish()
    assert runs.find() == expected
    assert torch.equal(runs.finish(), before)


@pytest.mark.parametrize(("kind", "widths"), [(Layer, [4, 4]), (ScalesByWidth, [8, 12]), (ReadsThreeHeads, [8, 12])])
def test_answers_are_one_head_wide_where_the_layer_runs_with_that(kind: type[Layer], widths: list[int]) -> None:
    runs = Runs(kind())
    runs.find()
    assert [bypass.width for bypass in known_bypasses(runs.layer, runs.dtypes)] == widths


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Olmo2", "Gemma"])
def test_gradients_are_the_same_bits_as_with_every_module_run(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = checkpointing_model(family)
    settings = TileSettings(5, 2)
    gradients(model, settings)
    layers = [module for module in model.modules() if names_of(module)]
    assert len(layers) == model.config.num_hidden_layers
    for layer in layers:
        heads = {name for name, _ in layer.named_modules() if name in NORMS_OF_HEADS}
        norm = {name for name, _ in layer.named_children() if name == "input_layernorm"}
        assert names_of(layer) == HEADS | heads | norm
        assert {bypass.width for bypass in layer_bypass._known[layer][1]} == {model.config.head_dim}
    log_probs, found = gradients(model, settings)
    for layer in layers:
        monkeypatch.setitem(layer_bypass._known, layer, (layer_bypass._known[layer][0], []))
    all_log_probs, expected = gradients(model, settings)
    assert torch.equal(log_probs, all_log_probs)
    assert max_difference(found, expected) == 0.0


def test_an_adapter_is_left_out_with_the_projection_that_it_adapts() -> None:
    model = lora_model()
    settings = TileSettings(5, 2)
    gradients(model, settings)
    (layer, *_) = [module for module in model.modules() if names_of(module)]
    assert names_of(layer) >= HEADS


def counted(module: nn.Module) -> list[int]:
    """Tokens of every call that runs the module."""
    calls: list[int] = []
    original = type(module).forward

    def forward(hidden: Tensor) -> Tensor:
        calls.append(hidden.shape[1])
        return original(module, hidden)

    vars(module)["forward"] = forward
    return calls


def test_a_projection_runs_once_in_forward_and_twice_in_backward_for_each_tile() -> None:
    model = checkpointing_model()
    settings = TileSettings(1000, 2)  # one tile
    gradients(model, settings)
    projection = model.model.layers[0].self_attn.q_proj
    calls = counted(projection)
    gradients(model, settings)
    assert len(calls) == 3
    assert vars(projection)["forward"].__name__ == "forward", "what had been put in its place is back"


def test_a_module_that_gets_a_hook_runs_again() -> None:
    runs = Runs(Layer())
    assert runs.find() == {"norm", "q"}
    seen: list[Tensor] = []
    runs.layer.q.register_forward_hook(lambda _m, _args, output: seen.append(output))
    runs.finish()
    assert names_of(runs.layer) == set(), "the norm feeds what the hook sees"
    assert torch.equal(seen[0], runs.layer.q(runs.layer.norm(runs.hidden)))


def test_modules_are_themselves_again_after_an_error() -> None:
    runs = Runs(Layer())
    runs.find()
    with pytest.raises(ValueError), left_out(known_bypasses(runs.layer, runs.dtypes)):
        raise ValueError
    assert "forward" not in vars(runs.layer.q)
    assert not runs.layer.q._forward_hooks


def test_running_out_of_memory_is_no_reason_to_look_for_less(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(Layer())
    finishes: Iterator[Any] = iter([runs.finish(), runs.finish(), torch.OutOfMemoryError("full")])

    def finish() -> Tensor:
        found = next(finishes)
        if isinstance(found, Exception):
            raise found
        return found

    with pytest.raises(torch.OutOfMemoryError):
        find_bypasses(runs.layer, runs.dtypes, runs.project, finish)


def test_calls_outside_a_cut_layer_run_as_ever() -> None:
    runs = Runs(Layer())
    runs.find()
    expected = runs.layer.q(runs.layer.norm(runs.hidden))
    with left_out(known_bypasses(runs.layer, runs.dtypes)):
        assert torch.equal(runs.layer.q(runs.layer.norm(runs.hidden)), expected)


def test_what_was_learned_under_other_dtypes_does_not_count() -> None:
    runs = Runs(Layer())
    assert runs.find() == {"norm", "q"}
    runs.dtypes = torch.bfloat16
    assert names_of(runs.layer, runs.dtypes) == set()
    assert runs.find() == {"norm", "q"}
    assert names_of(runs.layer, torch.float32) == set()


def test_a_trial_learns_anew() -> None:
    runs = Runs(Layer())
    runs.find()
    runs.layer.forward = lambda hidden, attention: BesideAttention.forward(runs.layer, hidden, attention)
    forget_bypasses(runs.layer)
    assert runs.find() == {"q"}


def test_a_hook_on_all_modules_sees_real_values() -> None:
    runs = Runs(Layer())
    runs.find()
    seen: list[Tensor] = []
    handle = nn.modules.module.register_module_forward_hook(lambda _m, _args, output: seen.append(output))
    try:
        assert names_of(runs.layer) == set()
        runs.finish()
    finally:
        handle.remove()
    assert len(seen) == 4
    assert names_of(runs.layer) == {"norm", "q"}

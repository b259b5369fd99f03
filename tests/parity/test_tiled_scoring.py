"""Layers in tiles where no gradient is computed: log-probs, whole trainers, and what is held. fp32 on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lever_pairs import ALL, OFF, OFFLOAD, PACKED, SHAPE, build, lora, prompts
from live_memory import LiveBytes
from tiled_models import PEAKS_WITHOUT_GRADIENT, checkpointing_model, lora_model, loss_of
from tiny import save_tiny_model, tiny_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.modeling_layers import GradientCheckpointingLayer

from trl_budget import BudgetGRPOTrainer, attention
from trl_budget.activation_store import DeviceStore
from trl_budget.attention import packed_rows
from trl_budget.errors import SettingsError
from trl_budget.layer_checkpoint import tiled_layers, tiled_layers_without_gradient
from trl_budget.layer_tiles import TileSettings

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS = TileSettings(8, 2)
KINDS = ["Llama", "Qwen3", "Olmo2", "Gemma", "Gemma3_text", "Mistral with a window of 5"]


def test_a_4b_model_holds_31_kb_per_token_and_79_in_whole_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass with gradient holds 49,800 bytes at least, so that what fits there fits here.

    On short rows the MLP of one tile holds the most. `tests/gpu/test_layer_tiles_cuda.py` compares the same counts.
    """

    def varlen(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, **features: Any) -> Tensor:
        return attention._varlen(query, key, value, bounds, features["max_length_q"], features["scaling"], None)

    @torch.no_grad()
    def peak(num_tokens: int, settings: TileSettings | None) -> int:
        ids, positions = torch.zeros(1, num_tokens, dtype=torch.int64), torch.arange(num_tokens)[None]
        bounds = torch.tensor([0, num_tokens], dtype=torch.int32)
        with (
            LiveBytes() as live,
            nullcontext() if settings is None else tiled_layers_without_gradient(model, settings),
        ):
            model.model(
                input_ids=ids, position_ids=positions, cu_seq_lens_q=bounds, max_length_q=num_tokens, use_cache=False
            )
        return live.peak

    def slope(settings: TileSettings | None) -> float:
        return (peak(131_072, settings) - peak(65_536, settings)) / 65_536

    monkeypatch.setattr(attention, "packed_attention", varlen)
    shape = {"hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32, "num_key_value_heads": 8}
    with FakeTensorMode(allow_non_fake_inputs=True), packed_rows():  # shapes only: nothing is allocated or computed
        model = checkpointing_model(**shape, head_dim=128, num_hidden_layers=2, dtype=torch.bfloat16).eval()
        peak(8192, TileSettings(4096, 8))  # in its first run a layer learns what it may leave out
        assert slope(None) == pytest.approx(79_360, abs=100)
        # two hidden states, cos and sin, query, key, value, attention's output, in bf16; its softmax sums in fp32
        assert slope(TileSettings(4096, 8)) == 2 * (2 * 2560 + 2 * 128 + (32 + 2 * 8) * 128 + 32 * 128) + 4 * 32
        peaks = {num_tokens: peak(num_tokens, TileSettings(4096, 8)) for num_tokens in PEAKS_WITHOUT_GRADIENT}
        assert peaks == PEAKS_WITHOUT_GRADIENT


class WidestMlp:
    """The most tokens that an MLP saw without gradient, while it was watched."""

    def __init__(self, *models: nn.Module) -> None:
        self.tokens = 0
        self.is_watched = True
        for model in models:
            for name, module in model.named_modules():
                if name.endswith("mlp"):
                    module.forward = self._watching(module.forward)  # with a hook, a layer would leave nothing out

    def _watching(self, forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def watched(hidden_states: Tensor) -> Tensor:
            if self.is_watched and not torch.is_grad_enabled():
                self.tokens = max(self.tokens, hidden_states.shape[1])
            return forward(hidden_states)

        return watched


@torch.no_grad()
def scores(model: Any, settings: TileSettings | None, *, is_packed: bool = True) -> Tensor:
    if settings is None:
        return loss_of(model, is_packed=is_packed)[1]
    with tiled_layers_without_gradient(model, settings):
        return loss_of(model, is_packed=is_packed)[1]


@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_are_those_of_whole_layers_whatever_the_mode(kind: str, is_packed: bool) -> None:
    model = checkpointing_model(kind)
    widest = WidestMlp(model)
    for is_training in (True, False):
        for checkpoints in (True, False):
            model.train(is_training)
            (model.gradient_checkpointing_enable if checkpoints else model.gradient_checkpointing_disable)()
            expected = scores(model, None, is_packed=is_packed)
            assert widest.tokens > 8
            widest.tokens = 0
            got = scores(model, SETTINGS, is_packed=is_packed)
            assert widest.tokens <= 8
            assert (got - expected).abs().max().item() < 1e-5


def test_log_probs_are_the_bits_of_the_passes_with_gradient() -> None:
    model = checkpointing_model()
    with tiled_layers(model, SETTINGS, DeviceStore()):
        _, expected = loss_of(model, is_packed=True)
    assert torch.equal(scores(model, SETTINGS), expected)


def test_adapters_that_are_turned_off_are_left_out() -> None:
    model = lora_model()
    with model.disable_adapter():
        expected = scores(model, None)
    with model.disable_adapter():
        got = scores(model, SETTINGS)
    assert (got - expected).abs().max().item() < 1e-5
    assert (scores(model, SETTINGS) - expected).abs().max().item() > 1e-2


def test_layers_are_themselves_again_afterwards_and_after_an_error() -> None:
    model = checkpointing_model()
    layers = model.model.layers
    layers[1].forward = forward = layers[1].forward  # somebody's own
    before = [dict(vars(layer)) for layer in layers]
    scores(model, SETTINGS)
    assert [dict(vars(layer)) for layer in layers] == before
    handle = layers[0].mlp.register_forward_hook(lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        scores(model, SETTINGS)
    handle.remove()
    assert [dict(vars(layer)) for layer in layers] == before and layers[1].forward is forward


def test_hooks_of_a_layer_see_its_whole_output() -> None:
    model, shapes = checkpointing_model(), []
    model.model.layers[0].register_forward_hook(lambda *args: shapes.append(args[-1].shape))
    scores(model, SETTINGS)
    assert [shape[1] for shape in shapes] == [57]


def test_attention_that_is_not_dispatched_is_refused() -> None:
    model = checkpointing_model()
    model.config._attn_implementation = "eager"
    with pytest.raises(SettingsError, match="computes attention with eager"):
        scores(model, SETTINGS)


def test_no_gradient_is_computed_whatever_the_caller_says() -> None:
    model = checkpointing_model()
    with tiled_layers_without_gradient(model, SETTINGS):
        loss, _ = loss_of(model, is_packed=True)
    assert not loss.requires_grad and torch.is_grad_enabled()


def peak_per_token(settings: TileSettings | None) -> float:
    """Bytes that one more token adds to the peak of a layer without gradient, attention's own work left out."""
    model = checkpointing_model(num_hidden_layers=1, hidden_size=64, intermediate_size=256).eval()
    layer: Any = next(module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))

    @torch.no_grad()
    def peak(num_tokens: int) -> int:
        hidden_states, positions = torch.randn(1, num_tokens, 64), torch.arange(num_tokens)[None]
        bounds = torch.arange(0, num_tokens + 1, 64, dtype=torch.int32)
        keywords = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 64}
        embeddings = model.model.rotary_emb(hidden_states, positions)

        def run() -> None:
            layer(hidden_states, position_embeddings=embeddings, position_ids=positions, **keywords)

        with LiveBytes() as live:
            if settings is None:
                run()
            else:
                with tiled_layers_without_gradient(model, settings):
                    run()
        return live.peak

    return (peak(4096) - peak(2048)) / 2048


def test_nothing_of_the_mlps_width_grows_with_the_row() -> None:
    heads, query, hidden = 8 * 8 + 2 * 4 * 8, 8 * 8, 64
    whole, tiled = peak_per_token(None), peak_per_token(SETTINGS)
    assert whole >= 4 * 3 * 256
    assert tiled <= 4 * (heads + 2 * query + hidden) + 16


def trained(folder: Path, levers: dict[str, Any], *, kwargs: Any = dict, **settings: Any) -> tuple[Any, WidestMlp]:
    model = save_tiny_model(folder / "model", **SHAPE)  # a name, for a reference model
    settings = {"model_init_kwargs": {"dtype": "float32"}, "max_steps": 2, **settings}
    trainer = build(BudgetGRPOTrainer, folder, model, kwargs, **levers, **settings)
    widest = WidestMlp(trainer.model, *([trainer.ref_model] if trainer.ref_model is not None else []))
    widest.is_watched, score = False, trainer._get_per_token_logps_and_entropies

    def watched(*args: Any, **kwargs: Any) -> Any:
        widest.is_watched = True  # not while rows are generated
        try:
            return score(*args, **kwargs)
        finally:
            widest.is_watched = False

    trainer._get_per_token_logps_and_entropies = watched
    trainer.train()
    return trainer, widest


@pytest.mark.parametrize(
    ("settings", "kwargs"),
    [
        ({"beta": 0.1}, dict),
        ({"beta": 0.1}, lambda: {"peft_config": lora()}),
        ({"num_iterations": 2, **PACKED}, dict),
        ({"eval_strategy": "steps", "eval_steps": 2}, lambda: {"eval_dataset": prompts(2)}),
    ],
    ids=["reference", "reference of adapters", "old log-probs", "evaluation"],
)
def test_whatever_scores_rows_runs_in_tiles(settings: Any, kwargs: Any, tmp_path: Path) -> None:
    whole, widest_whole = trained(tmp_path / "whole", OFF, kwargs=kwargs, **settings)
    tiled, widest = trained(tmp_path / "tiled", ALL, kwargs=kwargs, **settings)
    assert widest.tokens <= ALL["tiled_mlp"] < widest_whole.tokens
    logged = [row for row in whole.state.log_history if "loss" in row or "eval_loss" in row]
    mine = [row for row in tiled.state.log_history if "loss" in row or "eval_loss" in row]
    assert len(logged) >= 2
    if tiled.ref_model is not None:
        assert mine[0]["kl"] == 0.0, "the policy's bits are not the reference's"
    for theirs, ours in zip(logged, mine, strict=True):
        for name in {"loss", "kl", "eval_loss", "entropy"} & set(theirs):
            assert ours[name] == pytest.approx(theirs[name], rel=2e-4, abs=2e-6)


def test_a_reference_with_another_attention_is_refused_when_the_trainer_is_built(tmp_path: Path) -> None:
    model = tiny_model(**SHAPE)
    model.config._name_or_path = save_tiny_model(tmp_path / "model", **SHAPE)
    settings = {"beta": 0.1, "model_init_kwargs": {"attn_implementation": "eager"}, "max_steps": 2}
    with pytest.raises(SettingsError, match="the reference model computes attention with eager"):
        build(BudgetGRPOTrainer, tmp_path, model, **ALL, **settings)


def test_offload_alone_leaves_scoring_as_it_is(tmp_path: Path) -> None:
    _, widest = trained(tmp_path, OFFLOAD, beta=0.1)
    assert widest.tokens > ALL["tiled_mlp"]

"""The long-context levers under the settings and models that users bring: fp32 on the CPU, whole trainers.

Offload alone keeps every bit of stock TRL's gradients. Tiles and groups of heads are within 1e-6 of their norm. What
cannot be served is refused when the trainer is built.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from lever_pairs import (
    ALL,
    LEVERS,
    OFF,
    OFFLOAD,
    PACKED,
    SHAPE,
    assert_nothing_kept,
    assert_same_steps,
    assert_trains_as_stock,
    build,
    difference,
    lora,
    run,
)
from peft import get_peft_model
from tiny import save_tiny_model, tiny_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, set_seed
from trl import GRPOTrainer

from trl_budget import BudgetGRPOTrainer, long_context, upstream, upstream_model
from trl_budget.errors import SettingsError

pytestmark = pytest.mark.usefixtures("one_thread")

EITHER = pytest.mark.parametrize("levers", LEVERS.values(), ids=LEVERS.keys())
SIZES = {
    "vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
}  # fmt: skip


def family(name: str, **overrides: Any) -> Any:
    set_seed(0)
    config = AutoConfig.for_model(name, **{**SIZES, **overrides})
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


# Settings


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"])
def test_every_loss_has_stocks_gradient(loss_type: str, tmp_path: Path) -> None:
    assert_trains_as_stock(tmp_path, ALL, loss_type=loss_type)


SETTINGS: list[dict[str, Any]] = [
    {"num_iterations": 2, "max_steps": 3},
    {"gradient_accumulation_steps": 3, "max_steps": 2},
    {"top_entropy_quantile": 0.5},
    {"entropy_coef": 0.01},
    {"importance_sampling_level": "sequence"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("is_lora", [False, True], ids=["full", "lora"])
def test_settings_of_the_update_have_stocks_gradient(is_lora: bool, settings: dict[str, Any], tmp_path: Path) -> None:
    kwargs = {"kwargs": lambda: {"peft_config": lora()}} if is_lora else {}
    assert_trains_as_stock(tmp_path, ALL, **kwargs, **settings)


@EITHER
@pytest.mark.parametrize(
    "placement",
    [
        {"optimizer_placement": "device"},
        {"optimizer_placement": "host", "gradient_placement": "host"},
        {"optimizer_placement": "host", "gradient_placement": "device"},
    ],
    ids=str,
)
def test_wherever_gradients_and_optimizer_are_the_gradient_is_stocks(
    placement: dict[str, Any], levers: dict[str, Any], tmp_path: Path
) -> None:
    settings = {"gradient_accumulation_steps": 2, "max_steps": 2}
    assert_trains_as_stock(tmp_path, levers, ours_only=placement, **settings)


@EITHER
@pytest.mark.parametrize("is_lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("layout", [PACKED, {"padding_free": "off", "max_tokens_per_microbatch": 30}], ids=str)
def test_many_passes_have_the_gradient_of_those_without_levers(
    layout: dict[str, Any], is_lora: bool, levers: dict[str, Any], tmp_path: Path
) -> None:
    settings = {"num_iterations": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_steps": 3}
    settings |= {"kwargs": lambda: {"peft_config": lora()}} if is_lora else {}
    _, expected = run(BudgetGRPOTrainer, tmp_path, **OFF, **layout, **settings)
    ours, found = run(BudgetGRPOTrainer, tmp_path, **levers, **layout, **settings)
    assert_same_steps(found, expected, levers)
    assert_nothing_kept(ours)


@EITHER
@pytest.mark.parametrize("is_lora", [False, True], ids=["a synchronised reference model", "adapters off"])
def test_the_kl_to_either_kind_of_reference_is_stocks(is_lora: bool, levers: dict[str, Any], tmp_path: Path) -> None:
    settings: dict[str, Any] = {"kwargs": lambda: {"peft_config": lora()}} if is_lora else {"sync_ref_model": True}
    settings |= {"model": save_tiny_model(tmp_path / "model", **SHAPE), "model_init_kwargs": {"dtype": "float32"}}
    assert_trains_as_stock(tmp_path, levers, beta=0.1, ref_model_sync_steps=1, max_steps=3, **settings)


# Models


FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"tie_word_embeddings": True}),
    ("qwen2", {"tie_word_embeddings": False}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    ("gemma", {"tie_word_embeddings": True}),
    ("gemma3_text", {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}),
    ("olmo2", {"tie_word_embeddings": False}),
    ("mistral", {"sliding_window": 6, "tie_word_embeddings": True}),
]


@pytest.mark.parametrize("layout", [{}, {"padding_free": "on"}], ids=["padded", "packed"])
@pytest.mark.parametrize(("name", "overrides"), FAMILIES, ids=str)
def test_the_gradient_of_a_family_is_stocks(
    name: str, overrides: dict[str, Any], layout: dict[str, Any], tmp_path: Path
) -> None:
    assert_trains_as_stock(tmp_path, ALL, model=family(name, **overrides), ours_only=layout)


@EITHER
def test_layers_with_positional_arguments_are_refused_at_construction(levers: dict[str, Any], tmp_path: Path) -> None:
    model = family("gpt2", n_embd=32, n_layer=2, n_head=4, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    with pytest.raises(SettingsError, match=r"=\S+ was asked for, but .*A GPT2Block is called with 4 positional"):
        build(BudgetGRPOTrainer, tmp_path, model, **levers)


def test_layers_that_fail_in_tiles_in_their_own_way_are_refused_and_offloaded(tmp_path: Path) -> None:
    """A convolution over the sequence with a mask: cut, it raises a RuntimeError of its own."""
    model = family("lfm2", layer_types=["conv", "full_attention"])
    with pytest.raises(SettingsError, match=r"tiled_mlp=7 was asked for, but layers of kind conv cannot be cut"):
        build(BudgetGRPOTrainer, tmp_path, model, **ALL)
    assert_trains_as_stock(tmp_path, OFFLOAD, model=model)


FROZEN = [("embed", "layers.0"), ("layers.1",), ("layers",), ("layers.2", "norm"), ("q_proj", "k_proj", "embed")]


@EITHER
@pytest.mark.parametrize("names", FROZEN, ids=str)
def test_frozen_layers_leave_stocks_gradient(names: tuple[str, ...], levers: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_model(**SHAPE, num_hidden_layers=3)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in names))
    assert_trains_as_stock(tmp_path, levers, model=model, max_steps=2)


ADAPTERS: list[dict[str, Any]] = [
    {"modules_to_save": ["lm_head", "embed_tokens"]},
    {"modules_to_save": ["mlp"], "target_modules": ["q_proj", "v_proj"]},
    {"target_modules": ["q_proj"], "layers_to_transform": [1]},
    {"use_dora": True},
]


@EITHER
@pytest.mark.parametrize("settings", ADAPTERS, ids=str)
def test_kinds_of_adapters_have_stocks_gradient(
    settings: dict[str, Any], levers: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny_model(**SHAPE, tie_word_embeddings=False)
    assert_trains_as_stock(
        tmp_path, levers, model=model, kwargs=lambda: {"peft_config": lora(**settings)}, max_steps=2
    )


@EITHER
@pytest.mark.parametrize("active", ["default", ["default", "second"]], ids=str)
def test_one_or_several_active_adapters_of_two_have_stocks_gradient(
    active: Any, levers: dict[str, Any], tmp_path: Path
) -> None:
    model = get_peft_model(tiny_model(**SHAPE), lora())
    model.add_adapter("second", lora(r=2, target_modules=["q_proj"]))
    model.base_model.set_adapter(active)
    assert_trains_as_stock(tmp_path, levers, model=model, max_steps=2)


# Dropout, and what auto does


def test_dropout_of_live_adapters_is_offloaded_bit_by_bit(tmp_path: Path) -> None:
    assert_trains_as_stock(tmp_path, OFFLOAD, kwargs=lambda: {"peft_config": lora(lora_dropout=0.2)}, max_steps=3)


@pytest.fixture
def _full_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` decides as on a card on which no row fits, whatever is turned on."""
    collect = upstream_model.long_context_facts

    def facts(trainer: Any, *, copies_to_come: int) -> Any:
        collected = collect(trainer, copies_to_come=copies_to_come)
        return dataclasses.replace(collected, device_type="cuda", bf16=True, longest_pass_tokens=10**6)

    def tokens(free: int, fixed: int, shape: Any, levers: Any) -> int:
        return 1 + levers.offload + (levers.tile_tokens is not None) + (levers.num_head_groups or 0)

    monkeypatch.setattr(upstream_model, "long_context_facts", facts)
    monkeypatch.setattr(long_context, "tokens_that_fit", tokens)
    monkeypatch.setattr(long_context, "AUTO_TILE_TOKENS", (ALL["tiled_mlp"],))


def settings_of(trainer: Any) -> list[str]:
    values = {row.name: row.value for row in trainer.resolved_settings}
    return [values[name] for name in ALL]


def mixing_model() -> Any:
    """Every layer looks at the token before, outside attention."""
    model = tiny_model(**SHAPE)
    layer_class = type(model.model.layers[0])

    class Mixing(layer_class):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
            before = torch.nn.functional.pad(hidden_states, (0, 0, 1, 0))[:, :-1]
            return super().forward(hidden_states + before, **kwargs)

    for layer in model.model.layers:
        layer.__class__ = Mixing
    return model


@pytest.mark.usefixtures("_full_card")
def test_auto_turns_everything_on_where_it_can(tmp_path: Path) -> None:
    _, ours = assert_trains_as_stock(tmp_path, {}, max_steps=2)
    assert settings_of(ours) == ["on", "7", "2"]


@pytest.mark.usefixtures("_full_card")
@pytest.mark.parametrize("asked", [{}, {"activation_offload": "on"}], ids=str)
def test_what_cannot_be_tiled_is_offloaded_all_the_same(asked: dict[str, Any], tmp_path: Path) -> None:
    dropout = {"kwargs": lambda: {"peft_config": lora(lora_dropout=0.2)}}
    for number, settings in enumerate([{"model": mixing_model()}, dropout]):
        _, ours = assert_trains_as_stock(tmp_path / str(number), asked, max_steps=2, **settings)
        assert settings_of(ours) == ["on", "off", "off"]


@EITHER
def test_torch_compile_is_refused_at_construction(levers: dict[str, Any], tmp_path: Path) -> None:
    settings = {"torch_compile": True, "torch_compile_backend": "eager"}
    with pytest.raises(SettingsError, match="activation_offload='on' was asked for, but torch_compile=True"):
        build(BudgetGRPOTrainer, tmp_path, **settings, **levers)


# bf16


@EITHER
@pytest.mark.parametrize("kind", ["bf16 model", "fp32 adapters over bf16", "fp32 model"])
def test_under_bf16_autocast_levers_are_as_accurate_as_stock(
    kind: str, levers: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny_model(torch.float32 if kind == "fp32 model" else torch.bfloat16, **SHAPE)
    settings: dict[str, Any] = {"kwargs": lambda: {"peft_config": lora()}} if "adapters" in kind else {}
    _, (stock, *_) = run(GRPOTrainer, tmp_path, model=model, bf16=True, **settings)
    _, (ours, *_) = run(BudgetGRPOTrainer, tmp_path, model=model, bf16=True, **levers, **settings)
    assert difference(ours, stock) <= (0.0 if levers == OFFLOAD else 2**-8)  # one rounding of bf16


@EITHER
def test_a_bf16_policy_with_fp32_masters_has_the_gradient_of_one_without_levers(
    levers: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    collect = upstream.placement_facts
    is_cuda = {"device_type": "cuda", "bf16": True}
    monkeypatch.setattr(
        upstream, "placement_facts", lambda *args, **kwargs: dataclasses.replace(collect(*args, **kwargs), **is_cuda)
    )
    _, (expected, *_) = run(BudgetGRPOTrainer, tmp_path, **OFF)
    ours, (found, *_) = run(BudgetGRPOTrainer, tmp_path, **levers)
    assert {p.dtype for p in ours.model.parameters()} == {torch.bfloat16}
    assert difference(found, expected) <= (0.0 if levers == OFFLOAD else 2**-8)

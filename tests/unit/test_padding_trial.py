"""The trial of padded rows: what it finds, in which precision, and that it leaves nothing behind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import set_seed
from trl.trainer.utils import add_fused_lm_head

from trl_budget import packing_trial, padding_trial
from trl_budget.fp32_forward import in_fp32
from trl_budget.packing_trial import packing_fault
from trl_budget.padding_trial import MAX_COLUMNS, PaddedColumns, PaddingTrial, try_padding
from trl_budget.upstream_attention import enable_packed_attention
from trl_budget.upstream_config import (
    head_dims,
    max_positions,
    num_heads,
    position_boundaries,
    scaled_positions,
    telling_layers,
)

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "initializer_range": 0.1,
    "attn_implementation": "sdpa",
}
AS_IT_IS = nullcontext()
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}


def model_of(family: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    set_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **settings})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for parameter in model.parameters():  # buffers keep their dtype, as in a model that was loaded
        parameter.data = parameter.data.to(dtype)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model


def trial(model: Any, autocast: AbstractContextManager[Any] = AS_IT_IS, *, is_quantized: bool = False) -> PaddingTrial:
    config = model.config
    columns = PaddedColumns(0, position_boundaries(config), max_positions(config))
    layers = telling_layers(model, config)
    return try_padding(model, config.vocab_size, columns, layers, autocast, is_quantized=is_quantized)


def packed_trial(
    model: Any, autocast: AbstractContextManager[Any] = AS_IT_IS, *, is_quantized: bool = False
) -> str | None:
    enable_packed_attention([model])
    return packing_fault(model, model.config.vocab_size, autocast, is_exact=True, is_quantized=is_quantized)


Trial = Callable[..., Any]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_does_not_move_rows_of_a_rotary_model(dtype: torch.dtype) -> None:
    assert trial(model_of("Qwen3", dtype)) == PaddingTrial(None)
    assert trial(model_of("Llama", dtype, rope_parameters=YARN)) == PaddingTrial(None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_recurrence_that_lets_padding_in_is_found_in_either_dtype(dtype: torch.dtype) -> None:
    recurrent = {"block_types": ["recurrent"] * 4, "lru_width": 64, "attention_window_size": 64}
    found = trial(model_of("RecurrentGemma", dtype, **recurrent))
    assert found.is_exact
    assert "in a trial run padding moved a row's log-probs by" in str(found.fault)


def test_a_scaling_that_begins_at_a_position_is_found_past_it() -> None:
    scaling = {**YARN, "llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 1_200}
    model = model_of("Ministral3", rope_parameters=scaling, max_position_embeddings=4_096)
    assert "padding past original_max_position_embeddings=1,200 moved a row by" in str(trial(model).fault)
    assert scaled_positions(model.config) == ("llama_4_scaling_beta", 1_200)


def test_windows_are_relative() -> None:
    assert trial(model_of("Mistral", sliding_window=16)).fault is None


def test_a_boundary_is_passed_where_the_model_and_the_trial_can() -> None:
    assert PaddedColumns(0, {}).past_boundaries() is None
    assert PaddedColumns(0, {"window": 100, "original": 40}).past_boundaries() == ("window", 124)
    assert PaddedColumns(0, {"window": 100, "original": 40}, max_positions=110).past_boundaries() == ("original", 64)
    assert PaddedColumns(0, {"window": MAX_COLUMNS}).past_boundaries() is None


def test_no_column_is_tried_that_the_model_has_no_position_for() -> None:
    model = model_of("GPTJ", max_position_embeddings=64, rotary_dim=8, attn_implementation="eager")
    assert trial(model) == PaddingTrial(None)


def test_learned_positions_are_found_before_columns_that_they_may_not_reach() -> None:
    model = model_of("GPTBigCode", max_position_embeddings=64)
    found = try_padding(model, model.config.vocab_size, PaddedColumns(0, {}), [], nullcontext())
    assert "in a trial run padding moved a row's log-probs by" in str(found.fault)


def test_layers_that_tell_are_those_up_to_the_last_new_kind() -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    plain = model_of("Qwen3")
    assert len(telling_layers(plain, plain.config)) == 2
    mixed = model_of("Qwen3", layer_types=kinds, sliding_window=16, use_sliding_window=True, max_window_layers=1)
    assert len(telling_layers(mixed, mixed.config)) == 3
    assert telling_layers(nn.Linear(2, 2), mixed.config) == []


def test_a_model_that_cannot_compute_in_fp32_is_tried_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("Qwen3", torch.bfloat16)

    def refuse(module: Any, inputs: Any) -> None:
        if inputs[0].dtype == torch.float32:
            raise AssertionError("this layer computes in bf16")

    model.model.layers[1].mlp.register_forward_pre_hook(refuse)
    assert trial(model) == PaddingTrial(None, is_exact=False)
    model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    assert trial(model) == PaddingTrial("a trial run of padded rows failed: division by zero", is_exact=False)


def test_a_far_trial_without_memory_is_left_out_with_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_memory(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(padding_trial, "_states", no_memory)
    assert trial(model_of("Mistral", sliding_window=16)).fault is None
    assert "Padding past sliding_window=16 was not tried" in caplog.text


@pytest.mark.parametrize("attempt", [trial, packed_trial])
@pytest.mark.parametrize("is_fp32", [True, False])
def test_a_trial_without_memory_says_so(attempt: Trial, is_fp32: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory is not a reason to try another dtype, nor a fault of the model."""
    score = padding_trial.score

    def run(*arguments: Any, **settings: Any) -> Any:
        if torch.is_autocast_enabled("cpu") == is_fp32:
            return score(*arguments, **settings) if is_fp32 else nn.Linear(1, 1)(torch.ones(2))
        raise torch.OutOfMemoryError("CUDA out of memory")

    for module in (padding_trial, packing_trial):
        monkeypatch.setattr(module, "score", run)
    with pytest.raises(torch.OutOfMemoryError):
        attempt(model_of("Qwen3", torch.bfloat16), torch.autocast("cpu", torch.bfloat16))


def test_one_row_that_moves_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = torch.ones(2, 3, 64), torch.ones(2, 3, 64)
    far[1, 2] = 1.5
    states = iter((near, far))
    monkeypatch.setattr(padding_trial, "_states", lambda *_: next(states))
    assert "padding past sliding_window=16 moved a row by 0.5" in str(
        trial(model_of("Mistral", sliding_window=16)).fault
    )


def test_no_number_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = model_of("Qwen3")
    with torch.no_grad():
        broken.model.norm.weight.fill_(float("nan"))
    assert "moved a row's log-probs by nan" in str(trial(broken).fault)
    assert "differed from the row alone by nan" in str(packed_trial(broken))
    monkeypatch.setattr(padding_trial, "_states", lambda *_: torch.full((2, 3, 64), float("nan")))
    assert "padding past sliding_window=16 moved a row by nan" in str(
        trial(model_of("Mistral", sliding_window=16)).fault
    )


@pytest.mark.parametrize("attempt", [trial, packed_trial])
def test_4_bit_layers_compute_in_the_dtype_of_the_policy_after_a_trial(attempt: Trial) -> None:
    """One that was made without `compute_dtype` computes for good in the dtype of its first input."""
    bnb = pytest.importorskip("bitsandbytes")
    model = model_of("Qwen3", torch.bfloat16)
    for layer in model.model.layers:
        quantized = bnb.nn.Linear4bit(64, 96, bias=False)
        quantized.load_state_dict({"weight": layer.mlp.up_proj.weight.data})
        layer.mlp.up_proj = quantized.to("cpu")
    attempt(model, is_quantized=True)
    assert {layer.mlp.up_proj.compute_dtype for layer in model.model.layers} == {torch.bfloat16}


def test_a_trial_leaves_the_model_as_it_was() -> None:
    model = model_of("Mistral", torch.bfloat16, sliding_window=16).train()
    before, objects = copy.deepcopy(model.state_dict()), dict(model.named_parameters())
    versions = {name: parameter._version for name, parameter in objects.items()}
    state = torch.get_rng_state()
    assert trial(model) == PaddingTrial(None)
    assert model.training and torch.equal(torch.get_rng_state(), state)
    assert dict(model.named_parameters()).keys() == objects.keys()
    for name, parameter in model.named_parameters():
        assert parameter is objects[name] and parameter._version == versions[name]
        assert torch.equal(parameter, before[name])
    hooks = [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]
    assert hooks == []


def test_fp32_forwards_have_the_values_of_an_fp32_model() -> None:
    model = model_of("Qwen3", torch.bfloat16)
    wide = model_of("Qwen3")
    wide.load_state_dict(model.state_dict())
    ids = torch.arange(2, 12)[None]
    with torch.no_grad(), in_fp32(model):
        lifted = model(input_ids=ids).logits
    with torch.no_grad():
        expected = wide(input_ids=ids).logits
    assert lifted.dtype == torch.float32
    assert torch.equal(lifted, expected)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_weights_come_back_after_an_error() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(3, 3)).bfloat16()
    weight = model[0].weight
    with pytest.raises(RuntimeError), in_fp32(model):
        model(torch.ones(1, 2))
    assert model[0].weight is weight and model[1].weight.dtype == torch.bfloat16


def test_what_grows_with_the_columns_is_found_though_no_config_names_it() -> None:
    beam = pytest.importorskip("transformers.models.beam", reason="transformers 5.17 has no Beam")
    assert beam is not None
    model = model_of("Beam", max_position_embeddings=4_096)
    assert "in a trial run padding moved a row's log-probs by" in str(trial(model).fault)


def test_what_differs_by_layer_is_read_from_the_layers() -> None:
    layer = {"num_attention_heads": 4, "num_key_value_heads": 2, "v_head_dim": None, "qk_head_dim": None}
    layers = [SimpleNamespace(**layer, head_dim=size, global_head_dim=None) for size in (16, 32)]

    class Config:
        per_layer_config = layers

        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(f"'{name}' is a per-layer attribute")

    assert head_dims(Config()) == {16, 32}
    assert num_heads(Config()) == (4, 2)
    assert head_dims(SimpleNamespace(hidden_size=64)) == frozenset()

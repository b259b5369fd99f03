"""Weights with adapters merged: TRL's names and values, a base that keeps its bits, one layer at a time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_vllm import FusedModel
from peft import (
    GloraConfig,
    IA3Config,
    LNTuningConfig,
    LoHaConfig,
    LoraConfig,
    PromptTuningConfig,
    TrainableTokensConfig,
    VBLoRAConfig,
    VeraConfig,
    get_peft_model,
)
from peft.tuners.tuners_utils import BaseTunerLayer
from tiny import tiny_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from trl.generation.vllm_generation import VLLMGeneration

from trl_budget.adapter_weights import check_adapters, check_stock_sync, merged_weights
from trl_budget.errors import ParkedError, SettingsError, WeightSyncError
from trl_budget.parking import ParkedWeights
from trl_budget.weight_sync import WeightSync
from trl_budget.weight_views import plain_name

ADAPTERS: dict[str, Callable[[], Any]] = {
    "lora": lambda: LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
    "lora with biases": lambda: LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, lora_bias=True),
    "lora of an embedding": lambda: LoraConfig(
        r=4, target_modules=["embed_tokens", "v_proj"], init_lora_weights=False
    ),
    "dora": lambda: LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, use_dora=True),
    "saved modules": lambda: LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, modules_to_save=["norm"]
    ),
    "lora and every bias": lambda: LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, bias="all"),
    "vera": lambda: VeraConfig(r=4, target_modules=["q_proj", "o_proj"], init_weights=False),
    "vblora": lambda: VBLoRAConfig(r=4, target_modules=["q_proj", "o_proj"], num_vectors=8, vector_length=32, topk=2),
    "loha": lambda: LoHaConfig(r=4, target_modules=["q_proj", "down_proj"], init_weights=False),
    "lora of two parameters of a module": lambda: LoraConfig(
        r=4,
        target_modules=[],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        init_lora_weights=False,
    ),
    "tuned norms": lambda: LNTuningConfig(target_modules=["norm", "input_layernorm"]),
    "glora": lambda: GloraConfig(r=4, target_modules=["q_proj", "up_proj"]),
    "ia3": lambda: IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False
    ),
}
SIZES = {
    **{"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False},
}
MADE_AS_NOTHING = ("tuned norms", "glora", "lora and every bias")  # zeros, ones or a copy
KINDS = pytest.mark.parametrize("kind", ADAPTERS)
AWAY = pytest.mark.parametrize("is_away", [False, True], ids=["on the device", "parked"])


def adapted(kind: str = "lora", dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    model = tiny_model(attention_bias="bias" in kind, tie_word_embeddings=False)
    if "two parameters" in kind:
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
        model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**{**SIZES, **experts}))
    model = model.to(dtype)
    policy = get_peft_model(model, ADAPTERS[kind]())
    if kind == "saved modules":
        nn.init.normal_(policy.base_model.model.model.norm.modules_to_save["default"].weight)
    for parameter in policy.parameters():
        if parameter.requires_grad and kind in (
            "tuned norms",
            "glora",
            "lora and every bias",
        ):  # made as zeros, ones or a copy
            nn.init.normal_(parameter, 0.0, 0.3)
    return policy


def parking(policy: nn.Module, *, is_away: bool) -> ParkedWeights | None:
    if not is_away:
        return None
    parked = ParkedWeights(policy, "policy", device_type="cpu", keeps=lambda t: not isinstance(t, nn.Parameter))
    parked.park()
    return parked


def values(policy: Any, parked: ParkedWeights | None = None) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in merged_weights(policy, parked)}


def stock_values(policy: Any) -> dict[str, Tensor]:
    """What TRL 1.16 loads into vLLM. Moves the base."""
    generation: Any = VLLMGeneration.__new__(VLLMGeneration)
    generation.model = policy
    generation._dist = SimpleNamespace(is_fsdp=False, gather_params=lambda parameters: nullcontext())
    return {name: value.clone() for name, value in generation._iter_named_params()}


def state(policy: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in policy.named_parameters()}


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype and torch.equal(got[name], value), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@AWAY
@KINDS
def test_names_and_values_are_trls(kind: str, is_away: bool, dtype: torch.dtype) -> None:
    expected = stock_values(adapted(kind, dtype))
    policy = adapted(kind, dtype)
    got = values(policy, parking(policy, is_away=is_away))
    assert list(got) == list(expected)
    assert_equal(got, expected)
    plain = {plain_name(name): value for name, value in state(adapted(kind, dtype)).items()}
    assert any(not torch.equal(got[name], plain[name]) for name in got)


@AWAY
@KINDS
def test_the_policy_keeps_every_bit_and_its_memory_however_often_it_is_read(kind: str, is_away: bool) -> None:
    policy = adapted(kind)
    before, places = state(policy), {name: p.data_ptr() for name, p in policy.named_parameters()}
    parked = parking(policy, is_away=is_away)
    first = values(policy, parked)
    for _ in range(5):
        assert_equal(values(policy, parked), first)
    if parked is not None:
        assert all(p.untyped_storage().nbytes() == 0 for p in policy.parameters())
        parked.unpark()
    else:
        assert {name: p.data_ptr() for name, p in policy.named_parameters()} == places
    assert_equal(state(policy), before)


def test_trls_way_moves_a_bf16_base() -> None:
    policy = adapted()
    before = state(policy)
    for _ in range(3):
        stock_values(policy)
    moved = [name for name, value in state(policy).items() if not torch.equal(value, before[name])]
    assert moved and all(".base_layer." in name for name in moved)


@AWAY
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_an_iterator_that_is_closed_early_leaves_nothing_merged(kind: str, is_away: bool) -> None:
    policy = adapted(kind)
    before, parked = state(policy), parking(policy, is_away=is_away)
    with closing(merged_weights(policy, parked)) as weights:
        for name, _ in weights:
            if name.endswith("layers.1.mlp.up_proj.weight"):
                break
    if parked is not None:
        assert all(p.untyped_storage().nbytes() == 0 for p in policy.parameters())
        parked.unpark()
    assert_equal(state(policy), before)
    assert not any(getattr(module, "merged", False) for module in policy.modules())


@AWAY
def test_a_merge_that_fails_half_way_is_undone(is_away: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = adapted()
    layer = policy.base_model.model.model.layers[1].self_attn.o_proj
    before, parked = state(policy), parking(policy, is_away=is_away)

    def fail(*_: Any, **__: Any) -> None:
        layer.get_base_layer().weight.data += 1
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(layer, "merge", fail)
    with pytest.raises(torch.OutOfMemoryError):
        values(policy, parked)
    if parked is not None:
        parked.unpark()
    assert_equal(state(policy), before)


def test_one_layer_of_a_parked_policy_is_on_the_device_at_a_time() -> None:
    policy = adapted("dora")
    parked = parking(policy, is_away=True)
    seen = set()
    for _ in merged_weights(policy, parked):
        there = [name for name, p in policy.named_parameters() if p.untyped_storage().nbytes() > 0]
        owners = {name.split(".lora_")[0].split(".base_layer")[0] for name in there}
        assert len(owners) <= 1
        seen |= owners
    assert len(seen) == 2 * 7
    assert not any(p.untyped_storage().nbytes() for p in policy.parameters())


def test_what_stays_on_the_device_for_ddp_is_merged_from_there() -> None:
    expected = values(adapted())
    policy = adapted()
    parked = ParkedWeights(policy, "policy", device_type="cpu", keeps=lambda tensor: tensor.requires_grad)
    parked.park()
    assert_equal(values(policy, parked), expected)
    assert all((p.untyped_storage().nbytes() > 0) == p.requires_grad for p in policy.parameters())


def test_a_bias_that_is_trained_and_stays_on_the_device_keeps_its_bits() -> None:
    model = tiny_model(attention_bias=True, tie_word_embeddings=False).bfloat16()
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, lora_bias=True, bias="lora_only")
    policy = get_peft_model(model, config)
    for name, parameter in policy.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter, 0.0, 0.3)
    before, expected = state(policy), values(policy)
    parked = ParkedWeights(policy, "policy", device_type="cpu", keeps=lambda tensor: tensor.requires_grad)
    parked.park()
    for _ in range(3):
        assert_equal(values(policy, parked), expected)
    parked.unpark()
    assert_equal(state(policy), before)


def test_a_part_that_is_lent_runs_and_the_others_refuse() -> None:
    policy = adapted()
    parked = parking(policy, is_away=True)
    first, second = policy.base_model.model.model.layers
    assert parked is not None
    with parked.lent(first.mlp):
        assert first.mlp(torch.ones(1, 1, 64, dtype=torch.bfloat16)).shape == (1, 1, 64)
        with pytest.raises(ParkedError):
            second.mlp(torch.ones(1, 1, 64, dtype=torch.bfloat16))
    with pytest.raises(ParkedError):
        first.mlp(torch.ones(1, 1, 64, dtype=torch.bfloat16))
    parked.unpark()
    with pytest.raises(ParkedError, match="already"), parked.lent(first.mlp):
        pass


def test_only_the_active_adapter_is_merged() -> None:
    policy = adapted()
    policy.add_adapter("other", ADAPTERS["lora"]())
    assert_equal(values(policy), stock_values(adapted()))


def test_adapters_that_no_weight_can_hold_are_refused() -> None:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    policy = get_peft_model(tiny_model(), config)
    with pytest.raises(SettingsError, match=r"PROMPT_TUNING.*merged"):
        check_adapters(policy)
    with pytest.raises(SettingsError, match="Qwen3ForCausalLM with adapters"):
        check_adapters(tiny_model())


@KINDS
def test_adapters_that_can_be_merged_pass_and_keep_their_bits(kind: str) -> None:
    policy = adapted(kind)
    before = state(policy)
    check_adapters(policy)
    assert_equal(state(policy), before)


def test_adapters_that_are_merged_already_are_refused() -> None:
    policy = adapted()
    policy.merge_adapter()
    with pytest.raises(SettingsError, match="unmerge_adapter"):
        check_adapters(policy)


@pytest.mark.parametrize("is_one_adapter", [False, True])
def test_two_adapters_of_one_tied_weight_are_refused_and_a_tied_adapter_is_not(is_one_adapter: bool) -> None:
    config = LoraConfig(
        r=4, target_modules=["embed_tokens", "lm_head"], ensure_weight_tying=is_one_adapter, init_lora_weights=False
    )
    policy = get_peft_model(tiny_model(tie_word_embeddings=True), config)
    if is_one_adapter:
        check_adapters(policy)
        return
    with pytest.raises(SettingsError, match=r"embed_tokens\.base_layer\.weight, which the model ties"):
        check_adapters(policy)


Q_PROJ = {"r": 4, "target_modules": ["q_proj"], "init_lora_weights": False}
ONE_END_OF_A_TIE: dict[str, dict[str, Any]] = {
    "a saved head": {"modules_to_save": ["lm_head"]},
    "a saved embedding": {"modules_to_save": ["embed_tokens"]},
    "lora of the embedding": {"target_modules": ["embed_tokens"]},
    "lora of the head": {"target_modules": ["lm_head"]},
    "tokens of the head": {"trainable_token_indices": {"lm_head": [3]}},
}
TWO_CHANGES_OF_A_TIE: dict[str, dict[str, Any]] = {
    "a saved head and a saved embedding": {"modules_to_save": ["lm_head", "embed_tokens"]},
    "lora of the embedding, a saved head": {"target_modules": ["embed_tokens"], "modules_to_save": ["lm_head"]},
    "other tokens at each end": {"trainable_token_indices": {"embed_tokens": [1], "lm_head": [3]}},
}
ONE_CHANGE_OF_A_TIE: dict[str, dict[str, Any]] = {
    "a saved head": {"modules_to_save": ["lm_head"], "ensure_weight_tying": True},
    "a saved embedding": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "both saved": {"modules_to_save": ["lm_head", "embed_tokens"], "ensure_weight_tying": True},
    "lora of the embedding": {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
    "lora of the head": {"target_modules": ["lm_head"], "ensure_weight_tying": True},
    "tokens": {"trainable_token_indices": [3, 5]},
}


def tied(settings: dict[str, Any], *, is_tied: bool = True) -> Any:
    return get_peft_model(tiny_model(tie_word_embeddings=is_tied), LoraConfig(**{**Q_PROJ, **settings}))


@pytest.mark.parametrize("kind", [*ONE_END_OF_A_TIE, *TWO_CHANGES_OF_A_TIE])
def test_adapters_that_make_two_weights_of_a_tied_one_are_refused_with_both_ends(kind: str) -> None:
    settings = {**ONE_END_OF_A_TIE, **TWO_CHANGES_OF_A_TIE}[kind]
    with pytest.raises(SettingsError) as refusal:
        check_adapters(tied(settings))
    message = str(refusal.value)
    assert "which the model ties to" in message and "embed_tokens" in message and "lm_head" in message
    assert "ensure_weight_tying=True" in message and "use_vllm=False" in message
    assert ("Two adapters of their own" in message) == (kind in TWO_CHANGES_OF_A_TIE)
    check_adapters(tied(settings, is_tied=False))


@pytest.mark.parametrize("kind", ONE_CHANGE_OF_A_TIE)
def test_adapters_that_change_both_ends_alike_are_merged_once(kind: str) -> None:
    """What the embedding looks up and what the head multiplies by are the one tensor that vLLM is given."""
    policy = tied(ONE_CHANGE_OF_A_TIE[kind])
    for parameter in policy.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, 0.0, 0.3)
    check_adapters(policy)
    before = state(policy)
    got = values(policy)
    assert_equal(state(policy), before)
    assert got.keys() == dict(tiny_model(tie_word_embeddings=True).named_parameters()).keys()
    served, base = got["model.embed_tokens.weight"], policy.base_model.model
    assert not torch.equal(served, tiny_model(tie_word_embeddings=True).model.embed_tokens.weight)
    with torch.no_grad():
        assert torch.allclose(base.model.embed_tokens(torch.arange(258)), served, atol=1e-6)
        assert torch.allclose(base.lm_head(torch.eye(64)), served.T, atol=1e-6)


TOKENS: dict[str, Callable[[], Any]] = {
    "beside lora": lambda: LoraConfig(**Q_PROJ, trainable_token_indices=[3, 5]),
    "of the head": lambda: LoraConfig(**Q_PROJ, trainable_token_indices={"lm_head": [3, 5]}),
    "of both": lambda: LoraConfig(**Q_PROJ, trainable_token_indices={"embed_tokens": [3, 5], "lm_head": [7]}),
    "alone": lambda: TrainableTokensConfig(token_indices=[3, 5], target_modules=["embed_tokens"]),
}


@AWAY
@pytest.mark.parametrize("kind", TOKENS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_trained_tokens_take_the_place_of_their_rows(kind: str, is_away: bool, dtype: torch.dtype) -> None:
    plain = tiny_model(tie_word_embeddings=False).to(dtype)
    expected = {name: value.detach().clone() for name, value in plain.named_parameters()}
    policy = get_peft_model(plain, TOKENS[kind]())
    for name, parameter in policy.named_parameters():
        if "trainable_tokens_delta" in name:
            nn.init.normal_(parameter)
            module = "lm_head" if ".lm_head." in name else "model.embed_tokens"
            expected[f"{module}.weight"][{2: [3, 5], 1: [7]}[len(parameter)]] = parameter.detach().to(dtype)
    check_adapters(policy)
    before, parked = state(policy), parking(policy, is_away=is_away)
    for _ in range(3):
        got = values(policy, parked)
        assert got.keys() == expected.keys()
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            assert torch.equal(got[name], expected[name])
    if parked is not None:
        parked.unpark()
    assert_equal(state(policy), before)


@AWAY
@pytest.mark.parametrize("active", ["mine", "other"])
def test_an_adapter_of_any_name_is_served_and_the_others_are_not(active: str, is_away: bool) -> None:
    config = ADAPTERS["saved modules"]()
    policy = get_peft_model(tiny_model(tie_word_embeddings=False), config, adapter_name="mine")
    policy.add_adapter("other", config)
    policy.add_adapter("plain", LoraConfig(**Q_PROJ))
    norm = policy.base_model.model.model.norm
    for name in ("mine", "other"):
        nn.init.normal_(norm.modules_to_save[name].weight)
    policy.set_adapter(active)
    check_adapters(policy)
    got = values(policy, parking(policy, is_away=is_away))
    assert list(got) == list(dict(tiny_model(tie_word_embeddings=False).named_parameters()))
    assert torch.equal(got["model.norm.weight"], values(policy)["model.norm.weight"])
    assert torch.equal(got["model.norm.weight"], norm.modules_to_save[active].weight)


def test_without_an_active_copy_the_original_is_served() -> None:
    policy = get_peft_model(tiny_model(tie_word_embeddings=False), ADAPTERS["saved modules"]())
    policy.add_adapter("plain", LoraConfig(**Q_PROJ))
    policy.set_adapter("plain")
    wrapper = policy.base_model.model.model.norm
    nn.init.normal_(wrapper.original_module.weight)
    got = values(policy)
    assert list(got) == list(dict(tiny_model(tie_word_embeddings=False).named_parameters()))
    assert torch.equal(got["model.norm.weight"], wrapper.original_module.weight)


@KINDS
def test_what_trl_syncs_rightly_is_left_to_it(kind: str) -> None:
    check_stock_sync(adapted(kind))


UNKNOWN_TO_TRL: dict[str, tuple[Callable[[], Any], str]] = {
    "trained tokens": (TOKENS["beside lora"], r"embed_tokens\.token_adapter\.weight, which is no weight"),
    "an adapter of another name": (ADAPTERS["saved modules"], r"norm\.modules_to_save\.mine\.weight, which is no"),
}


@pytest.mark.parametrize("kind", UNKNOWN_TO_TRL)
def test_what_trl_sends_under_another_name_is_refused_where_trl_syncs(kind: str) -> None:
    config, message = UNKNOWN_TO_TRL[kind]
    policy = get_peft_model(tiny_model(tie_word_embeddings=False), config(), adapter_name="mine")
    with pytest.raises(SettingsError, match=message):
        check_stock_sync(policy)
    assert not set(stock_values(policy)) <= set(values(policy)), "TRL has learned the name"


def test_the_copy_of_another_adapter_and_an_original_that_trl_leaves_out_are_refused_where_trl_syncs() -> None:
    policy = get_peft_model(tiny_model(tie_word_embeddings=False), ADAPTERS["saved modules"]())
    policy.add_adapter("ref", ADAPTERS["saved modules"]())
    with pytest.raises(SettingsError, match=r"modules_to_save\.ref"):
        check_stock_sync(policy)
    policy.delete_adapter("ref")
    policy.add_adapter("plain", LoraConfig(**Q_PROJ))
    policy.set_adapter("plain")
    with pytest.raises(SettingsError, match=r"norm\.original_module\.weight is not sent"):
        check_stock_sync(policy)


def test_adapters_that_peft_cannot_merge_or_take_out_again_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = adapted()
    layer = next(module for module in policy.modules() if isinstance(module, BaseTunerLayer))

    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr(layer, "unmerge", lambda: None)
    with pytest.raises(SettingsError, match="cannot take out again"):
        check_adapters(policy)
    layer.merged_adapters.clear()
    monkeypatch.setattr(layer, "merge", refuse)
    with pytest.raises(SettingsError, match="LORA, which PEFT cannot merge"):
        check_adapters(policy)


# After a sync


def synced(policy: Any) -> tuple[WeightSync, FusedModel]:
    """vLLM's tensors with the policy's merged weights, and a buffer that both sides have."""
    policy.get_base_model().model.register_buffer("scale", torch.arange(3.0))
    engine_model = FusedModel(tiny_model(tie_word_embeddings=False).bfloat16())
    engine_model.model.register_buffer("scale", torch.arange(3.0))
    for name, value in merged_weights(policy, None):
        engine_model.view(name).copy_(value)
    return WeightSync(policy, "always"), engine_model


@AWAY
def test_merged_weights_are_compared_with_vllms(is_away: bool) -> None:
    policy = adapted()
    sync, engine_model = synced(policy)
    parked = parking(policy, is_away=is_away)
    sync.check(engine_model, lambda: merged_weights(policy, parked), 1)
    engine_model.view("model.layers.1.self_attn.k_proj.weight")[3, 4] += 1
    with pytest.raises(WeightSyncError, match=r"step 2, model\.layers\.1\.self_attn\.k_proj.*1 of") as caught:
        sync.check(engine_model, lambda: merged_weights(policy, parked), 2)
    assert caught.tb is not None, "its frames are alive"
    assert not any(getattr(module, "merged", False) for module in policy.modules())


COMPARED: dict[str, Callable[[], Any]] = {
    "trained tokens": lambda: get_peft_model(tiny_model(tie_word_embeddings=False), TOKENS["of both"]()),
    "an adapter of another name": lambda: get_peft_model(
        tiny_model(tie_word_embeddings=False), ADAPTERS["saved modules"](), adapter_name="mine"
    ),
}


@pytest.mark.parametrize("kind", COMPARED)
def test_every_weight_of_these_adapters_is_compared(kind: str) -> None:
    policy = COMPARED[kind]().bfloat16()
    policy.add_adapter("other", policy.peft_config[policy.active_adapter])
    sync, engine_model = synced(policy)
    sync.check(engine_model, lambda: merged_weights(policy, None), 1)
    name = "model.embed_tokens.weight" if kind == "trained tokens" else "model.norm.weight"
    engine_model.view(name)[3] += 1
    with pytest.raises(WeightSyncError, match=rf"step 2, {name} differs"):
        sync.check(engine_model, lambda: merged_weights(policy, None), 2)


def test_the_error_of_a_sync_with_adapters_advises_what_changes_something() -> None:
    policy = adapted()
    sync, engine_model = synced(policy)
    engine_model.view("model.norm.weight")[3] += 1
    with pytest.raises(WeightSyncError, match="use_vllm=False") as caught:
        sync.check(engine_model, lambda: merged_weights(policy, None), 1)
    assert "share_vllm_weights" not in str(caught.value), "which is off with adapters"


def test_a_buffer_of_both_sides_is_compared_too() -> None:
    policy = adapted()
    sync, engine_model = synced(policy)
    engine_model.model.get_buffer("scale")[1] = 7
    with pytest.raises(WeightSyncError, match="scale differs"):
        sync.check(engine_model, lambda: merged_weights(policy, parking(policy, is_away=True)), 1)

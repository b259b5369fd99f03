"""The policy's parameters as views of fused tensors: which rows, what is refused, and that training is the same."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from fused_models import (
    FAMILIES,
    PACKED,
    PADDED_VOCABULARY,
    fused_twin,
    fused_weights,
    module_of,
    tiny_policy,
    with_lora_layers,
)
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from trl_budget import HostAdamW, shared_weights
from trl_budget.shared_weights import (
    WeightView,
    cpu_state_dict,
    first_difference,
    first_unshared,
    named_values,
    plan_views,
    share,
)

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
QKV = "model.layers.1.self_attn.qkv_proj.weight"  # 4 heads of 8 rows, twice 2 heads of 8
K = "model.layers.1.self_attn.k_proj.weight"
K_ROWS = slice(32, 48)


def shared_pair(family: str = "Qwen3, tied", **settings: Any) -> tuple[PreTrainedModel, nn.Module, list[WeightView]]:
    policy = tiny_policy(family, **settings)
    vllm_model = fused_twin(policy)
    views = planned(policy, vllm_model)
    share(policy, vllm_model, views)
    return policy, vllm_model, views


def planned(policy: nn.Module, vllm_model: nn.Module) -> list[WeightView]:
    views = plan_views(policy, vllm_model, PACKED)
    assert not isinstance(views, str), views
    return views


def reason(policy: nn.Module, vllm_model: nn.Module) -> str:
    found = plan_views(policy, vllm_model, PACKED)
    assert isinstance(found, str)
    return found


def loss_of(model: nn.Module) -> Tensor:
    ids = torch.randint(2, 97, (3, 12), generator=torch.Generator().manual_seed(3))
    return model(input_ids=ids, labels=ids).loss


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    loss_of(model).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


# The plan


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_is_found_with_the_values_that_the_loader_put_there(family: str) -> None:
    policy = tiny_policy(family)
    vllm_model = fused_twin(policy)
    tensors = dict(vllm_model.named_parameters(remove_duplicate=False))
    views = planned(policy, vllm_model)
    state = policy.state_dict()
    assert {view.name for view in views} == set(state)
    for view in views:
        assert torch.equal(tensors[view.vllm_name][view.rows], state[view.name]), view


@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_of_vllm_but_vocabulary_padding_is_covered_once(family: str) -> None:
    policy = tiny_policy(family)
    vllm_model = fused_twin(policy)
    marked = {name: torch.zeros(len(p)) for name, p in vllm_model.named_parameters(remove_duplicate=False)}
    for view in planned(policy, vllm_model):
        marked[view.vllm_name][view.rows] = 1
    for name, rows in marked.items():
        is_embedding = name in (EMBEDDING, HEAD)
        assert rows.sum() == (97 if is_embedding else len(rows)), name
        assert len(rows) == PADDED_VOCABULARY or not is_embedding


def test_the_plan_has_the_names_of_peft_ddp_and_vllms_lora_layers() -> None:
    policy = tiny_policy("Llama")
    vllm_model = with_lora_layers(fused_twin(policy))
    peft_model = get_peft_model(policy, LoraConfig(target_modules=["q_proj", "embed_tokens"], task_type="CAUSAL_LM"))
    wrapped = nn.Module()
    wrapped.add_module("module", peft_model)
    views = {view.name: view for view in planned(wrapped, vllm_model)}
    q = views["module.base_model.model.model.layers.1.self_attn.q_proj.base_layer.weight"]
    assert (q.vllm_name, q.rows) == ("model.layers.1.self_attn.qkv_proj.base_layer.weight", slice(0, 32))
    embedding = views["module.base_model.model.model.embed_tokens.base_layer.weight"]
    assert embedding.vllm_name == "model.embed_tokens.base_layer.weight"
    assert not any("lora_" in name for name in views)


def test_projections_that_vllm_does_not_fuse_are_shared_by_name() -> None:
    policy = tiny_policy("Llama")
    state = policy.state_dict()
    fused = fused_weights(policy)
    unfused = {name: tensor for name, tensor in fused.items() if "qkv_proj" not in name}
    unfused.update({name: tensor for name, tensor in state.items() if name[-13:-7] in ("q_proj", "k_proj", "v_proj")})
    views = {view.name: view for view in planned(policy, module_of(unfused))}
    assert (views[K].vllm_name, views[K].rows) == (K, slice(0, 16))


def test_a_head_tied_to_the_embedding_is_planned_where_the_embedding_is() -> None:
    policy = tiny_policy("Gemma2, no head in vLLM")
    views = {view.name: view for view in planned(policy, fused_twin(policy))}
    assert views[HEAD] == WeightView(HEAD, EMBEDDING, slice(0, 97))


def test_a_shared_policy_has_the_same_plan_again() -> None:
    policy, vllm_model, views = shared_pair()
    assert planned(policy, vllm_model) == views


# What is refused


def test_a_dtype_that_differs_is_refused() -> None:
    policy = tiny_policy("Llama", torch.bfloat16)
    vllm_model = fused_twin(policy)
    policy.lm_head.float()  # what cast_lm_head_to_fp32 does
    assert reason(policy, vllm_model) == (
        "lm_head.weight is torch.float32 in the policy and torch.bfloat16 in vLLM's lm_head.weight."
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int8, torch.float8_e4m3fn])
def test_quantized_weights_in_vllm_are_refused(dtype: torch.dtype) -> None:
    policy = tiny_policy()
    quantized = torch.zeros(64, 32).to(dtype)
    vllm_model = fused_twin(policy, model__layers__1__self_attn__qkv_proj__weight=quantized)
    assert reason(policy, vllm_model) == f"vLLM's {QKV} [64, 32] is quantized ({dtype})."


def test_a_packed_attribute_is_refused_whatever_the_dtype() -> None:
    policy = tiny_policy()
    vllm_model = fused_twin(policy)
    vllm_model.model.norm.weight.packed_dim = 0
    assert "model.norm.weight [32] is quantized" in reason(policy, vllm_model)


def test_a_quantized_policy_is_refused() -> None:
    policy = tiny_policy("Llama")
    vllm_model = fused_twin(policy)
    policy.lm_head.weight = nn.Parameter(torch.zeros(97, 32, dtype=torch.uint8), requires_grad=False)
    assert reason(policy, vllm_model) == "The policy's lm_head.weight [97, 32] is torch.uint8."


def test_tensor_parallel_rows_are_refused() -> None:
    policy = tiny_policy()
    vllm_model = fused_twin(policy, model__layers__1__self_attn__qkv_proj__weight=torch.zeros(32, 32))
    assert reason(policy, vllm_model).startswith(f"vLLM's {QKV} [32, 32] has not the 64 rows of the policy's ")


def test_tensor_parallel_columns_are_refused() -> None:
    policy = tiny_policy()
    vllm_model = fused_twin(policy, model__layers__0__mlp__down_proj__weight=torch.zeros(32, 24))
    name = "model.layers.0.mlp.down_proj.weight"
    assert reason(policy, vllm_model) == f"{name} [32, 48] does not fit into vLLM's {name} [32, 24]."


@pytest.mark.parametrize("rows", [96, 98 + 256])
def test_an_embedding_with_rows_that_are_no_padding_is_refused(rows: int) -> None:
    policy = tiny_policy("Llama")
    vllm_model = fused_twin(policy, model__embed_tokens__weight=torch.zeros(rows, 32))
    assert f"{EMBEDDING} [{rows}, 32] has not the 97 rows" in reason(policy, vllm_model)


def test_padding_of_anything_but_the_vocabulary_is_refused() -> None:
    policy = tiny_policy()
    vllm_model = fused_twin(policy, model__layers__1__self_attn__qkv_proj__weight=torch.zeros(65, 32))
    assert f"{QKV} [65, 32] has not the 64 rows" in reason(policy, vllm_model)


def test_fused_rows_without_a_packed_mapping_are_refused() -> None:
    policy = tiny_policy()
    found = plan_views(policy, fused_twin(policy), {})
    assert found == ("vLLM's model.layers.0.self_attn.qkv_proj.weight [64, 32] has no counterpart in the policy.")


def test_names_with_another_prefix_are_refused() -> None:
    policy = tiny_policy("Llama")
    vllm_model = module_of({f"language_model.{name}": t for name, t in fused_weights(policy).items()})
    assert "language_model.model.embed_tokens.weight [128, 32] has no counterpart" in reason(policy, vllm_model)


def test_expert_weights_are_refused() -> None:
    policy = tiny_policy()
    vllm_model = fused_twin(policy, model__layers__0__mlp__experts__w13_weight=torch.zeros(4, 96, 32))
    assert "experts.w13_weight [4, 96, 32] is no vector or matrix (layouts of experts" in reason(policy, vllm_model)


def test_emptied_linear_weights_are_refused() -> None:
    policy = tiny_policy()
    vllm_model = fused_twin(policy, model__layers__1__self_attn__qkv_proj__weight=torch.empty(0))
    assert reason(policy, vllm_model).startswith(f"vLLM's {QKV} [0] holds no weights")


def test_a_parameter_that_only_vllm_has_is_refused() -> None:
    policy = tiny_policy()
    vllm_model = fused_twin(policy, model__layers__0__self_attn__sinks=torch.zeros(4))
    assert reason(policy, vllm_model) == (
        "vLLM's model.layers.0.self_attn.sinks [4] has no counterpart in the policy."
    )


def test_a_parameter_that_only_the_policy_has_is_refused() -> None:
    policy = tiny_policy()
    vllm_model = fused_twin(policy, model__norm__weight=None)
    assert reason(policy, vllm_model) == "The policy's model.norm.weight [32] has no counterpart in vLLM."


def test_a_bias_that_vllm_lacks_for_one_part_is_refused() -> None:
    policy = tiny_policy("Qwen2 with biases")
    vllm_model = fused_twin(policy)
    policy.model.layers[1].self_attn.k_proj.bias = None
    assert "model.layers.1.self_attn.qkv_proj.bias [64] has no counterpart" in reason(policy, vllm_model)


def test_a_head_that_only_the_policy_ties_is_refused() -> None:
    policy = tiny_policy("Gemma2, no head in vLLM")
    vllm_model = fused_twin(policy, lm_head__weight=torch.zeros(128, 32))
    assert reason(policy, vllm_model).startswith(f"The policy ties {EMBEDDING} and {HEAD}, vLLM does not tie ")


def test_a_head_that_only_vllm_ties_is_refused() -> None:
    policy = tiny_policy("Qwen3, tied")
    vllm_model = fused_twin(policy)
    policy.lm_head.weight = nn.Parameter(policy.lm_head.weight.detach().clone())
    assert reason(policy, vllm_model).endswith(f"the policy does not tie {EMBEDDING} and {HEAD}.")


def test_two_parameters_over_one_storage_are_refused() -> None:
    policy = tiny_policy("Llama")
    vllm_model = fused_twin(policy)
    policy.lm_head.weight = nn.Parameter(policy.model.embed_tokens.weight.data)
    assert reason(policy, vllm_model) == (
        f"The policy's {EMBEDDING} and {HEAD} are two parameters over the same storage."
    )


def test_a_tensor_that_is_not_contiguous_is_refused() -> None:
    policy = tiny_policy()
    vllm_model = fused_twin(policy, model__layers__1__self_attn__qkv_proj__weight=torch.zeros(32, 64).t())
    assert reason(policy, vllm_model) == f"vLLM's {QKV} [64, 32] is not contiguous (strides [1, 64])."


def test_weights_on_the_meta_device_are_refused() -> None:
    policy = tiny_policy()
    vllm_model = fused_twin(policy)
    assert reason(policy, copy.deepcopy(vllm_model).to("meta")).endswith("drops the originals).")
    assert reason(policy.to("meta"), vllm_model).endswith("is on the meta device.")


def test_weights_made_in_inference_mode_are_refused() -> None:
    policy = tiny_policy()
    with torch.inference_mode():
        vllm_model = fused_twin(policy)
    assert "inference mode" in reason(policy, vllm_model)


def test_tensors_that_latent_attention_derives_at_load_time_are_refused() -> None:
    policy = tiny_policy()
    vllm_model = fused_twin(policy)
    vllm_model.model.layers._modules["0"].self_attn.W_UV = torch.zeros(4)
    assert reason(policy, vllm_model) == (
        "vLLM's model.layers.0.self_attn keeps W_UV, made from its weights when they were loaded."
    )


def test_a_copy_of_a_module_that_peft_trains_stands_for_the_original() -> None:
    policy = tiny_policy("Llama")
    vllm_model = fused_twin(policy)
    config = LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    views = planned(get_peft_model(policy, config), vllm_model)
    names = [view.name for view in views if view.vllm_name == "lm_head.weight"]
    assert names == ["base_model.model.lm_head.modules_to_save.default.weight"]


# Sharing


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_and_gradients_are_those_of_a_separate_copy(family: str) -> None:
    separate = tiny_policy(family)
    policy, _, _ = shared_pair(family)
    assert torch.equal(loss_of(policy), loss_of(separate))
    assert_equal_bits(gradients(policy), gradients(separate))


@pytest.mark.parametrize("family", FAMILIES)
def test_sharing_writes_the_policys_values_and_leaves_padding_alone(family: str) -> None:
    policy = tiny_policy(family)
    expected = fused_weights(policy)
    vllm_model = fused_twin(policy)
    with torch.no_grad():
        for parameter in vllm_model.parameters():
            parameter.fill_(7.0)
    share(policy, vllm_model, planned(policy, vllm_model))
    for name, parameter in vllm_model.named_parameters():
        rows = 97 if name in (EMBEDDING, HEAD) else len(parameter)
        assert torch.equal(parameter[:rows], expected[name][:rows]), name
        assert torch.all(parameter[rows:] == 7.0)


def test_parameters_ties_hooks_and_gradients_stay() -> None:
    policy = tiny_policy("Qwen3, tied")
    vllm_model = fused_twin(policy)
    gradients(policy)
    policy.model.norm.weight.requires_grad_(False)
    calls: list[str] = []
    policy.model.layers[0].mlp.up_proj.weight.register_post_accumulate_grad_hook(lambda p: calls.append("up_proj"))
    before = {name: (id(p), id(p.grad), p.requires_grad) for name, p in policy.named_parameters()}
    share(policy, vllm_model, planned(policy, vllm_model))
    assert {name: (id(p), id(p.grad), p.requires_grad) for name, p in policy.named_parameters()} == before
    assert policy.lm_head.weight is policy.model.embed_tokens.weight
    gradients(policy)
    assert calls == ["up_proj"]


def test_adapters_train_over_shared_weights_as_over_separate_ones() -> None:
    config = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    torch.manual_seed(0)
    separate = get_peft_model(tiny_policy(), config)
    torch.manual_seed(0)
    policy = get_peft_model(tiny_policy(), config)
    vllm_model = with_lora_layers(fused_twin(tiny_policy()))
    before = {name: id(p) for name, p in policy.named_parameters()}
    share(policy, vllm_model, planned(policy, vllm_model))
    assert {name: id(p) for name, p in policy.named_parameters()} == before
    assert_equal_bits(gradients(policy), gradients(separate))
    assert any("lora_A" in name for name in gradients(policy))


def test_an_in_place_update_of_the_policy_is_in_the_fused_rows() -> None:
    policy, vllm_model, _ = shared_pair()
    with torch.no_grad():
        policy.get_parameter(K).fill_(3.0)
    fused = dict(vllm_model.named_parameters())[QKV]
    assert torch.all(fused[K_ROWS] == 3.0)
    assert not torch.any(fused[:32] == 3.0)
    assert not torch.any(fused[48:] == 3.0)


def test_an_update_of_the_fused_tensor_is_in_the_policy() -> None:
    policy, vllm_model, _ = shared_pair()
    with torch.no_grad():
        dict(vllm_model.named_parameters())[QKV][K_ROWS] = 5.0
    assert torch.all(policy.get_parameter(K) == 5.0)


def test_parameters_are_contiguous_and_hold_no_memory_of_their_own() -> None:
    policy, vllm_model, _ = shared_pair()
    storages = {p.untyped_storage().data_ptr() for p in vllm_model.parameters()}
    for parameter in policy.parameters():
        assert parameter.is_contiguous()
        assert parameter.untyped_storage().data_ptr() in storages


def test_weights_come_from_given_values_where_the_parameters_were_emptied() -> None:
    policy = tiny_policy("Qwen3, tied")
    expected = loss_of(policy)
    vllm_model = fused_twin(tiny_policy("Qwen3, tied"))
    views = planned(policy, vllm_model)
    values = {name: p.detach().clone() for name, p in policy.named_parameters()}
    with torch.no_grad():
        for parameter in vllm_model.parameters():
            parameter.zero_()
    for parameter in policy.parameters():
        parameter.untyped_storage().resize_(0)
    share(policy, vllm_model, views, reversed(values.items()))
    assert torch.equal(loss_of(policy), expected)


def test_emptied_parameters_without_values_are_an_error() -> None:
    policy = tiny_policy()
    vllm_model = fused_twin(policy)
    views = planned(policy, vllm_model)
    policy.model.norm.weight.untyped_storage().resize_(0)
    with pytest.raises(AssertionError, match=r"model\.norm\.weight has no values"):
        share(policy, vllm_model, views)


def test_values_that_lack_a_parameter_are_an_error() -> None:
    policy = tiny_policy()
    vllm_model = fused_twin(policy)
    values = [pair for pair in named_values(policy) if pair[0] != K]
    with pytest.raises(AssertionError, match="no values were given for " + K):
        share(policy, vllm_model, planned(policy, vllm_model), values)


def test_sharing_twice_changes_nothing() -> None:
    policy, vllm_model, views = shared_pair()
    expected = {name: p.detach().clone() for name, p in policy.named_parameters()}
    share(policy, vllm_model, views)
    assert_equal_bits(dict(policy.named_parameters()), expected)
    assert first_unshared(policy, vllm_model, views) is None


def test_a_parameter_that_got_storage_of_its_own_is_named() -> None:
    policy, vllm_model, views = shared_pair()
    policy.get_parameter(K).data = policy.get_parameter(K).data.clone()
    assert first_unshared(policy, vllm_model, views) == K


# Training


def stepped(policy: PreTrainedModel, optimizer: torch.optim.Optimizer, steps: int = 3) -> dict[str, Tensor]:
    for _ in range(steps):
        loss_of(policy).backward()
        optimizer.step()
        policy.zero_grad()
    return {name: p.detach().clone() for name, p in policy.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["Qwen3, tied", "Qwen2 with biases"])
def test_host_adamw_trains_shared_weights_as_separate_ones(family: str, dtype: torch.dtype) -> None:
    separate = tiny_policy(family, dtype)
    expected = stepped(separate, HostAdamW(separate.named_parameters(), lr=1e-2))
    policy = tiny_policy(family, dtype)
    optimizer = HostAdamW(policy.named_parameters(), lr=1e-2)
    vllm_model = fused_twin(policy)
    share(policy, vllm_model, planned(policy, vllm_model))
    assert_equal_bits(stepped(policy, optimizer), expected)
    assert not torch.equal(expected[K], tiny_policy(family, dtype).get_parameter(K))
    assert torch.equal(dict(vllm_model.named_parameters())[QKV][K_ROWS], expected[K])


def test_a_torch_optimizer_built_before_sharing_steps_the_shared_weights() -> None:
    separate = tiny_policy()
    expected = stepped(separate, torch.optim.AdamW(separate.parameters(), lr=1e-2))
    policy = tiny_policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    vllm_model = fused_twin(policy)
    share(policy, vllm_model, planned(policy, vllm_model))
    assert_equal_bits(stepped(policy, optimizer), expected)
    assert torch.equal(dict(vllm_model.named_parameters())[QKV][K_ROWS], expected[K])


def test_sharing_is_no_foreign_write_to_host_adamw() -> None:
    policy = tiny_policy(dtype=torch.bfloat16)
    optimizer = HostAdamW(policy.named_parameters(), lr=1e-2)
    stepped(policy, optimizer, steps=1)
    vllm_model = fused_twin(policy)
    masters = {p: optimizer.state[p]["master_weights"].clone() for p in policy.parameters()}
    share(policy, vllm_model, planned(policy, vllm_model))
    assert optimizer.adopt_external_writes() == []
    assert all(torch.equal(optimizer.state[p]["master_weights"], master) for p, master in masters.items())


# Verification


@pytest.mark.parametrize("family", FAMILIES)
def test_a_copy_that_is_equal_has_no_difference(family: str) -> None:
    policy = tiny_policy(family)
    vllm_model = fused_twin(policy)
    assert first_difference(named_values(policy), vllm_model, planned(policy, vllm_model)) is None


def test_the_first_difference_names_parameter_tensor_rows_count_and_distance() -> None:
    policy = tiny_policy()
    vllm_model = fused_twin(policy)
    views = planned(policy, vllm_model)
    with torch.no_grad():
        dict(vllm_model.named_parameters())[QKV][K_ROWS][3, :2] = policy.get_parameter(K)[3, :2] + torch.tensor(
            [0.5, 0.25]
        )
        vllm_model.model.norm.weight.add_(9.0)  # later
    message = first_difference(named_values(policy), vllm_model, views)
    assert message == f"{K} differs from rows 32:48 of vLLM's {QKV}: 2 of 512 elements, by 0.5 at most"


def test_nan_equals_the_same_nan_and_zero_is_not_minus_zero() -> None:
    policy = tiny_policy()
    with torch.no_grad():
        policy.get_parameter(K)[0, 0] = torch.nan
        policy.model.norm.weight[5] = 0.0
    vllm_model = fused_twin(policy)
    views = planned(policy, vllm_model)
    assert first_difference(named_values(policy), vllm_model, views) is None
    with torch.no_grad():
        vllm_model.model.norm.weight[5] = -0.0
    assert "1 of 32 elements, by 0 at most" in str(first_difference(named_values(policy), vllm_model, views))


def test_a_nan_on_one_side_is_a_difference_of_nan() -> None:
    policy = tiny_policy()
    vllm_model = fused_twin(policy)
    views = planned(policy, vllm_model)
    with torch.no_grad():
        vllm_model.model.norm.weight[5] = torch.nan
    assert "1 of 32 elements, by nan at most" in str(first_difference(named_values(policy), vllm_model, views))


def test_differences_are_counted_over_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_weights, "COMPARED_ELEMENTS", 100)
    policy = tiny_policy()
    vllm_model = fused_twin(policy)
    views = planned(policy, vllm_model)
    with torch.no_grad():
        policy.model.embed_tokens.weight.view(-1)[[0, 250, 3103]] += torch.tensor([1.0, 8.0, 2.0])
    message = str(first_difference(named_values(policy), vllm_model, views))
    assert message.startswith(f"{EMBEDDING} differs from rows 0:97 of vLLM's {EMBEDDING}: 3 of 3104 elements, by ")
    assert float(message.split(" by ")[1].split()[0]) == pytest.approx(8.0, abs=1e-5)


def test_padding_is_not_compared() -> None:
    policy = tiny_policy()
    vllm_model = fused_twin(policy)
    with torch.no_grad():
        vllm_model.model.embed_tokens.weight[97:] = 3.0
    assert first_difference(named_values(policy), vllm_model, planned(policy, vllm_model)) is None


def test_another_dtype_is_a_difference() -> None:
    policy = tiny_policy()
    vllm_model = fused_twin(policy)
    values = [(name, value.bfloat16()) for name, value in named_values(policy)]
    message = str(first_difference(values, vllm_model, planned(policy, vllm_model)))
    assert message.endswith(": torch.bfloat16 [97, 32] against torch.float32 [97, 32]")


def test_a_value_that_never_comes_is_a_difference() -> None:
    policy = tiny_policy()
    vllm_model = fused_twin(policy)
    values = [pair for pair in named_values(policy) if pair[0] != K]
    message = first_difference(values, vllm_model, planned(policy, vllm_model))
    assert message == f"{K} was not compared with rows 32:48 of vLLM's {QKV}: its value was not given"


def test_a_buffer_that_both_sides_have_is_compared_and_one_of_vllms_own_is_not() -> None:
    policy = tiny_policy()
    vllm_model = fused_twin(policy)
    vllm_model.model.add_module("rotary_emb", nn.Module())
    vllm_model.model.rotary_emb.register_buffer("inv_freq", policy.model.rotary_emb.inv_freq.clone())
    vllm_model.model.rotary_emb.register_buffer("cos_sin_cache", torch.zeros(64, 8))
    views = planned(policy, vllm_model)
    assert first_difference(named_values(policy), vllm_model, views) is None
    vllm_model.model.rotary_emb.inv_freq[1] += 1.0
    assert str(first_difference(named_values(policy), vllm_model, views)).startswith(
        "model.rotary_emb.inv_freq differs"
    )
    share(policy, vllm_model, views)
    assert policy.model.rotary_emb.inv_freq.data_ptr() != vllm_model.model.rotary_emb.inv_freq.data_ptr()


def test_a_buffer_of_the_same_name_and_another_shape_is_not_compared() -> None:
    policy = tiny_policy()
    vllm_model = fused_twin(policy)
    vllm_model.model.add_module("rotary_emb", nn.Module())
    vllm_model.model.rotary_emb.register_buffer("inv_freq", torch.zeros(64, 8))
    assert first_difference(named_values(policy), vllm_model, planned(policy, vllm_model)) is None


def test_rows_that_a_loader_has_permuted_are_a_difference_before_sharing() -> None:
    policy = tiny_policy()
    permuted = fused_weights(policy)[QKV].flip(0)
    vllm_model = fused_twin(policy, model__layers__1__self_attn__qkv_proj__weight=permuted)
    assert "layers.1.self_attn.q_proj.weight differs" in str(
        first_difference(named_values(policy), vllm_model, planned(policy, vllm_model))
    )


# Saving and loading


@pytest.mark.parametrize("family", ["Qwen3, tied", "Qwen3", "Gemma2, no head in vLLM"])
def test_a_saved_shared_policy_loads_in_stock_key_by_key(family: str, tmp_path: Path) -> None:
    separate = tiny_policy(family, torch.bfloat16)
    policy, _, _ = shared_pair(family, dtype=torch.bfloat16)
    separate.save_pretrained(tmp_path / "separate")
    policy.save_pretrained(tmp_path / "shared", state_dict=cpu_state_dict(policy))
    files = [(tmp_path / kind / "model.safetensors").read_bytes() for kind in ("separate", "shared")]
    assert files[0] == files[1]
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "shared", dtype="auto", output_loading_info=True)
    assert not any(info.values())
    assert_equal_bits(loaded.state_dict(), separate.state_dict())


def test_the_cpu_state_dict_is_a_copy_with_a_storage_per_tensor_and_ties() -> None:
    policy, _, _ = shared_pair("Qwen3, tied")
    state = cpu_state_dict(policy)
    assert_equal_bits(state, policy.state_dict())
    assert state[HEAD] is state[EMBEDDING]
    storages = {tensor.untyped_storage().data_ptr() for tensor in state.values()}
    assert len(storages) == len(state) - 1
    assert storages.isdisjoint({p.untyped_storage().data_ptr() for p in policy.parameters()})
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in state.values())


def test_a_state_dict_loads_into_the_views() -> None:
    policy, vllm_model, views = shared_pair("Qwen3, tied")
    state = {name: tensor * 2 for name, tensor in cpu_state_dict(policy).items()}
    policy.load_state_dict(state)
    assert first_unshared(policy, vllm_model, views) is None
    assert torch.equal(dict(vllm_model.named_parameters())[QKV][K_ROWS], state[K])

"""Tiny policies of several families, and modules that hold their weights as vLLM holds them: fused rows, padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel, set_seed

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
PADDED_VOCABULARY = 128
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3, tied": ("Qwen3", {"tie_word_embeddings": True}),
    "Qwen3": ("Qwen3", {"tie_word_embeddings": False}),
    "Qwen2 with biases": ("Qwen2", {"tie_word_embeddings": True}),
    "Llama": ("Llama", {"tie_word_embeddings": False}),
    "Llama with biases": ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "Mistral": ("Mistral", {"tie_word_embeddings": False}),
    "Gemma2, no head in vLLM": ("Gemma2", {"tie_word_embeddings": True}),
    "Gemma3": ("Gemma3", {"tie_word_embeddings": True}),
}


def tiny_policy(family: str = "Qwen3, tied", dtype: torch.dtype = torch.float32, **settings: Any) -> PreTrainedModel:
    name, overrides = FAMILIES[family]
    config_class = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")
    set_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config_class(**{**SIZES, **overrides, **settings}))
    for parameter in model.parameters():  # norms and biases start as constants, which would hide a mix-up
        nn.init.normal_(parameter, std=0.1)
    return model.to(dtype).eval()


def fused_weights(policy: PreTrainedModel) -> dict[str, Tensor]:
    """What vLLM's loader makes of a policy's checkpoint, tensor by tensor."""
    state = {name: tensor.detach().clone() for name, tensor in policy.state_dict().items()}
    fused: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if "q_proj" in name:
            stacked = [state[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            fused[name.replace("q_proj", "qkv_proj")] = torch.cat(stacked)
        elif "gate_proj" in name:
            fused[name.replace("gate_proj", "gate_up_proj")] = torch.cat([tensor, state[name.replace("gate", "up")]])
        elif "embed_tokens" in name or "lm_head" in name:
            fused[name] = torch.cat([tensor, tensor.new_zeros(PADDED_VOCABULARY - len(tensor), tensor.shape[1])])
        elif not any(part in name for part in ("k_proj", "v_proj", "up_proj")):
            fused[name] = tensor
    if policy.config.tie_word_embeddings:
        del fused["lm_head.weight"]
    return fused


def module_of(tensors: Mapping[str, Tensor]) -> nn.Module:
    """A module whose parameters have exactly these names."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module._modules[part]
        module.register_parameter(last, nn.Parameter(tensor, requires_grad=False))
    return root


def fused_twin(policy: PreTrainedModel, **changes: Tensor | None) -> nn.Module:
    """vLLM's model of a policy's checkpoint; a tied head is the embedding's own parameter, or absent (Gemma2).

    Args:
        policy: whose weights are copied.
        changes: by name with `__` for `.`: other tensors, or None for one to leave out.
    """
    weights: dict[str, Tensor | None] = dict(fused_weights(policy))
    weights.update({name.replace("__", "."): tensor for name, tensor in changes.items()})
    model = module_of({name: tensor for name, tensor in weights.items() if tensor is not None})
    if policy.config.tie_word_embeddings and policy.config.model_type != "gemma2":
        model.add_module("lm_head", nn.Module())
        model.lm_head.register_parameter("weight", model.model.embed_tokens.weight)
    return model


def with_lora_layers(vllm_model: nn.Module) -> nn.Module:
    """The names that vLLM's LoRA wrappers give: `qkv_proj.base_layer.weight`."""
    names = dict(vllm_model.named_parameters())
    wrapped = {
        ".".join([*name.split(".")[:-1], "base_layer", "weight"]) if "_proj" in name or "embed" in name else name: p
        for name, p in names.items()
    }
    return module_of({name: p.data for name, p in wrapped.items()})

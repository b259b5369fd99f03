"""Every causal language model of transformers at tiny size, with each length that its config names set to 32 or less.

Rows of `family_sweep.py` stay below those lengths alone and go past them beside padding. A new family of transformers
is built from `SIZES` alone; where that fails it needs an entry in `SETTINGS`, or a reason in `UNSCORED`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from trl.trainer.utils import add_fused_lm_head

SUFFIXES = ("ForCausalLM", "LMHeadModel")
VOCABULARY = 97
BOUNDARY = 32
WINDOW = 12
MAX_PARAMETERS = 8_000_000

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "sliding_window": WINDOW,
    "use_sliding_window": True,
    "max_window_layers": 2,
    "attention_dropout": 0.0,
    # routed experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # other names of the sizes above
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 512,
    "d_model": 64,
    "n_layers": 4,
    "n_heads": 4,
    "word_embed_proj_dim": 64,
    "ffn_dim": 96,
    "ffn_hidden_size": 96,
    "hidden_dim": 64,
    "dim": 64,
    "num_layers": 4,
    "d_ff": 96,
    "rotary_dim": 16,
    # recurrences
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_d_ssm": 128,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "chunk_size": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    # lengths past which a config makes something else of a row
    "attention_window_size": WINDOW,
    "window_size": WINDOW,
    "local_attention": 8,
    "block_size": 8,
    "original_max_position_embeddings": BOUNDARY,
    "log_scaling_n_floor": BOUNDARY,
    "rel_extent": BOUNDARY,
    "keep_window_size": BOUNDARY,
    "index_topk": BOUNDARY,
    "indexer_budget": BOUNDARY,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
}
_INDEXED = {**_LATENT, "index_head_dim": 16, "index_n_heads": 2}
_ENCODER_DECODER = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
}
_INKLING = {
    "moe_intermediate_size": 32,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "unpadded_vocab_size": VOCABULARY,
    "sliding_window_size": WINDOW,
    "layer_types": ["hybrid_sliding", "hybrid"] * 2,
}
_BYTE_LAYERS = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
_VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_RECURRENT = ["linear_attention", "full_attention"] * 2
_WINDOWED = ["sliding_attention", "full_attention"] * 2

SETTINGS: dict[str, dict[str, Any]] = {
    "AXK1": _LATENT,
    "AXK2": _INDEXED,
    "BailingHybrid": {**_LATENT, "layer_types": _RECURRENT},
    "BigBirdPegasus": _ENCODER_DECODER,
    "Blenderbot": _ENCODER_DECODER,
    "Blt": {
        "encoder_hash_byte_group_vocab": 50,
        "local_attention_window_len": 8,
        "patcher_config": _BYTE_LAYERS,
        "encoder_config": {**_BYTE_LAYERS, "hidden_size_global": 64},
        "decoder_config": {**_BYTE_LAYERS, "hidden_size_global": 64},
        "global_config": {**_BYTE_LAYERS, "hidden_size": 64},
    },
    "CohereCompass": {
        "layer_types": _WINDOWED,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
            "full_attention": None,
        },
    },
    "CpmAnt": {"dim_head": 16, "dim_ff": 96, "position_bias_num_buckets": 16, "position_bias_max_distance": BOUNDARY},
    "Dbrx": {
        "max_seq_len": 512,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "DeepseekV2": _LATENT,
    "DeepseekV3": _LATENT,
    "DeepseekV32": _INDEXED,
    "DeepseekV4": {
        "num_key_value_heads": 1,
        "q_lora_rank": 24,
        "o_groups": 2,
        "o_lora_rank": 16,
        "index_n_heads": 2,
        "index_head_dim": 16,
    },
    "Dots1": {"n_shared_experts": 1},
    "Dots3Note": {
        **_INDEXED,
        "shared_experts_intermediate_size": 32,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 16,
    },
    "Electra": {"embedding_size": 64},
    "Fuyu": {
        "text_config": {
            "model_type": "persimmon",
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "max_position_embeddings": 512,
            "pad_token_id": 0,
        }
    },
    "Gemma3": {"layer_types": _WINDOWED},
    "Gemma3n": {
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "laurel_rank": 8,
        "layer_types": _WINDOWED,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "Gemma4": {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY},
    "Git": {"vision_config": {**_VISION, "image_size": 32, "patch_size": 16}},
    "Glm4MoeLite": _LATENT,
    "GlmMoeDsa": _INDEXED,
    "GPTNeo": {"attention_types": [[["global", "local"], 2]], "num_heads": 4},
    "HYV4": {**_INDEXED, "head_dim": 16},
    "Inkling": _INKLING,
    "Inkling2": {**_INKLING, "n_layers_per_attn_res_block": 2},
    "Inkling2Loop": {
        **_INKLING,
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
        "loop_num_passes": 2,
        "loop_gate_rank": 8,
    },
    "KimiLinear": {**_LATENT, "linear_head_dim": 16, "linear_num_heads": 4, "layer_types": _RECURRENT},
    "Kolibri1": {"layer_types": _WINDOWED},
    "Lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "Lfm2Moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "Lfm3": {"layer_types": ["conv", "full_attention", "sliding_attention", "full_attention"]},
    "LongcatFlash": {
        **_LATENT,
        "num_layers": 2,
        "expert_ffn_hidden_size": 32,
        "zero_expert_num": 2,
        "moe_topk": 2,
    },
    "Mamba2": {"num_heads": 8, "state_size": 8, "n_groups": 1},
    "MiniCPM3": _LATENT,
    "Phi4Multimodal": {
        "vision_config": {**_VISION, "image_size": 28, "crop_size": 28},
        "audio_config": {"hidden_size": 32, "intermediate_size": 32, "num_blocks": 1, "num_attention_heads": 2},
    },
    "PLBart": _ENCODER_DECODER,
    "Qwen4Exp": {
        "layer_types": _RECURRENT,
        "hc_lowrank": 8,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_compress_ratio": 2,
        "ple_layer_ids": [1],
        "ple_embed_dim": 16,
        "ngram_vocab_size_base": 101,
        "make_ngram_vocab_size_divisible_by": 1,
        "split_ngram_parts": 1,
        "heads_per_ngram": 2,
        "output_gate_type": "silu",
    },
    "RemBert": {"input_embedding_size": 64, "output_embedding_size": 64},
    "RoCBert": {
        "pronunciation_embed_dim": 16,
        "shape_embed_dim": 16,
        "shape_vocab_size": VOCABULARY,
        "pronunciation_vocab_size": VOCABULARY,
    },
    "Whisper": {**_ENCODER_DECODER, "max_target_positions": 512},
    "XLMWith": {"emb_dim": 64},
    "Xmod": {"default_language": "en_XX"},
    "Youtu": _LATENT,
    "Zamba": {
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
    "Zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 8},
    "Zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}

_NO_BACKBONE = "TRL's fused head finds no backbone in a text model that transformers names as part of a larger one"
_CODEBOOKS = "the decoder of audio codes, which takes one row of ids per codebook"
_ASSISTANT = "a drafting head that takes another model's keys and values instead of ids"
UNSCORED: dict[str, tuple[str, str]] = {
    "Gemma4Assistant": (_ASSISTANT, "hidden_size_per_layer_input must be 0"),
    "Gemma4UnifiedAssistant": (_ASSISTANT, "parameters"),
    "Llama4": (_NO_BACKBONE, "has no attribute 'last_hidden_state'"),
    "Mllama": (_NO_BACKBONE, "has no attribute 'last_hidden_state'"),
    "Musicgen": (_CODEBOOKS, "is invalid for input of size"),
    "MusicgenMelody": (_CODEBOOKS, "is invalid for input of size"),
}


def _rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 1e4, **parameters}}


_ORIGINAL = {"factor": 4.0, "original_max_position_embeddings": BOUNDARY}
_YARN = {**_ORIGINAL, "beta_fast": 32.0, "beta_slow": 1.0}
# Positions of a family in other forms: name -> class and settings.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama, linear": ("LlamaForCausalLM", _rope("linear", factor=4.0)),
    "Llama, llama3": ("LlamaForCausalLM", _rope("llama3", **_ORIGINAL, low_freq_factor=1.0, high_freq_factor=4.0)),
    "Llama, yarn": ("LlamaForCausalLM", _rope("yarn", **_YARN)),
    "Llama, dynamic": ("LlamaForCausalLM", {"max_position_embeddings": BOUNDARY, **_rope("dynamic", factor=4.0)}),
    "Phi3, longrope": (
        "Phi3ForCausalLM",
        _rope("longrope", **_ORIGINAL, short_factor=[1.0] * 8, long_factor=[4.0] * 8),
    ),
    "Ministral3, scaled queries": ("Ministral3ForCausalLM", _rope("yarn", **_YARN, llama_4_scaling_beta=0.1)),
}


@dataclass(frozen=True)
class Family:
    """A class of transformers, tiny.

    Attributes:
        name: the class without its suffix, or a key of `VARIANTS`.
        class_name: of the class.
        settings: on top of those of its class.
    """

    name: str
    class_name: str
    settings: dict[str, Any] = field(default_factory=dict, hash=False)


def families() -> list[Family]:
    """Every class that transformers maps a causal language model to, and the variants of positions."""
    classes = {name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() if name.endswith(SUFFIXES)}
    plain = [Family(short_name(class_name), class_name) for class_name in sorted(classes)]
    variants = [Family(name, *variant) for name, variant in VARIANTS.items() if variant[0] in classes]
    return [*plain, *variants]


def short_name(class_name: str) -> str:
    """The name of a class without "ForCausalLM" or the like."""
    suffix = next(suffix for suffix in SUFFIXES if class_name.endswith(suffix))
    return class_name.removesuffix(suffix)


def tiny_model(family: Family, *, seed: int = 0) -> PreTrainedModel:
    """The family's model with random weights and TRL's fused head, fp32, on the CPU, in evaluation mode.

    Raises:
        ValueError: it has more than `MAX_PARAMETERS` parameters, since its sizes have other names than those known.
    """
    model_class = getattr(transformers, family.class_name)
    config = _tiny_config(family, model_class.config_class)
    with torch.device("meta"):
        num_parameters = sum(p.numel() for p in model_class(config).parameters())
    if num_parameters > MAX_PARAMETERS:
        raise ValueError(f"{num_parameters:,} parameters: the sizes of its config have other names than those known")
    torch.manual_seed(seed)
    model = model_class(config).eval()
    _spread(model)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model


def _tiny_config(family: Family, config_class: type) -> Any:
    known = {f.name for f in dataclasses.fields(config_class)}
    settings = {key: value for key, value in SIZES.items() if key in known}
    return config_class(**{**settings, **SETTINGS.get(short_name(family.class_name), {}), **family.settings})


@torch.no_grad()
def _spread(model: nn.Module) -> None:
    """Weights large enough that every term shows in the log-probs, which fresh ones leave near those of chance."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            noise = torch.randn_like(parameter) * 0.1
            if parameter.dim() > 1:
                parameter.copy_(noise)
            else:
                parameter.add_(noise)

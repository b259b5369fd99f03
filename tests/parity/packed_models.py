"""Tiny models of the families that are packed, and rows with every kind of padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel, set_seed
from trl.trainer.utils import add_fused_lm_head

from trl_budget.micro_batch import RowsModel
from trl_budget.upstream_attention import enable_packed_attention

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "Gemma": {},
    "Olmo2": {},
    "Mistral": {"sliding_window": None},
    "Mistral with a window of 5": {"sliding_window": 5},
    "Llama with rope_type llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    },
}
# prompt lengths, completion lengths: long and short, an empty completion, one token, a one-token prompt
PROMPTS, COMPLETIONS = (5, 1, 9, 3, 7), (11, 4, 0, 1, 16)


def family_model(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random model with TRL's fused head."""
    name = family.split()[0]
    config = vars(transformers)[f"{name}Config"] if name in vars(transformers) else None
    config = config or getattr(transformers, f"{name}Config")
    model_class = getattr(transformers, f"{name}ForCausalLM")
    set_seed(0)
    model = model_class(config(**{**SIZES, **FAMILIES[family]}, attn_implementation="sdpa")).to(dtype)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model


def rows(
    prompts: tuple[int, ...] = PROMPTS, completions: tuple[int, ...] = COMPLETIONS, *, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Ids and mask `[B, max(prompts) + max(completions)]`: prompts padded left, completions right."""
    generator = torch.Generator().manual_seed(seed)
    p, c = max(prompts), max(completions)
    ids = torch.zeros(len(prompts), p + c, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        ids[row, p - prompt : p + completion] = torch.randint(2, 97, (prompt + completion,), generator=generator)
        mask[row, p - prompt : p + completion] = 1
    return ids, mask


def labels_of(ids: Tensor, mask: Tensor, completion_columns: int) -> Tensor:
    """What TRL labels: the real completion tokens."""
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, : ids.shape[1] - completion_columns] = -100
    return labels


def score(model: Callable[..., Any], ids: Tensor, mask: Tensor, completion_columns: int) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies `[B, C]`, called as TRL calls the model."""
    labels = labels_of(ids, mask, completion_columns)
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    return outputs.log_probs[:, -completion_columns:], outputs.entropy[:, -completion_columns:]


def score_row_by_row(model: Callable[..., Any], ids: Tensor, mask: Tensor, completion_columns: int) -> Tensor:
    """Log-probs `[B, C]` of each row alone, without padding."""
    prompt_columns = ids.shape[1] - completion_columns
    out = torch.zeros(ids.shape[0], completion_columns)
    for row in range(ids.shape[0]):
        real = mask[row].nonzero().squeeze(1)
        completion = int((real >= prompt_columns).sum())
        if completion and len(real) > completion:
            alone = score(model, ids[row, real][None], mask[row, real][None], completion)[0]
            out[row, real[-completion] - prompt_columns : real[-1] + 1 - prompt_columns] = alone[0]
    return out


def packed(model: PreTrainedModel, completion_columns: int) -> RowsModel:
    enable_packed_attention([model])
    return RowsModel(model, completion_columns, is_packed=True)

"""A tiny policy, tokenizer, data set and reward, made on the spot: what every trainer test runs on."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Olmo2Config,
    Olmo2ForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    set_seed,
)
from trl import GRPOConfig


def byte_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def tiny_config(**overrides: Any) -> Qwen3Config:
    settings = {
        "vocab_size": 258,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    return Qwen3Config(**{**settings, **overrides})


def tiny_model(dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any) -> Qwen3ForCausalLM:
    set_seed(seed)
    return Qwen3ForCausalLM(tiny_config(**overrides)).to(dtype)


def save_tiny_model(folder: Path, dtype: torch.dtype = torch.float32, **overrides: Any) -> str:
    tiny_model(dtype, **overrides).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def save_tiny_olmo2(folder: Path) -> str:
    """An architecture for which vLLM has no class of its own."""
    set_seed(0)
    shared = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    settings = {key: getattr(tiny_config(), key) for key in (*shared, "pad_token_id", "eos_token_id", "bos_token_id")}
    Olmo2ForCausalLM(Olmo2Config(**settings)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def digit_dataset(rows: int = 64) -> Dataset:
    return Dataset.from_list([{"prompt": f"Write the digit {i % 10}: ", "digit": "7"} for i in range(rows)])


def digit_reward(completions: list[str], digit: list[str], **_: Any) -> list[float]:
    """Share of the digit, plus a ramp over the bytes so that groups of a random policy never tie."""
    return [
        text.count(d) / max(len(text), 1) + sum(text.encode()) % 97 / 97
        for text, d in zip(completions, digit, strict=True)
    ]


BASE_SETTINGS: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "learning_rate": 1e-3,
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "max_completion_length": 6,
    "max_steps": 5,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
    "seed": 7,
}


def make_trainer(
    trainer_class: type,
    output_dir: Path,
    model: Any = None,
    config_class: type = GRPOConfig,
    trainer_kwargs: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    args = config_class(output_dir=str(output_dir), **{**BASE_SETTINGS, **settings})
    kwargs = {
        "model": tiny_model() if model is None else copy.deepcopy(model) if not isinstance(model, str) else model,
        "reward_funcs": digit_reward,
        "args": args,
        "train_dataset": digit_dataset(),
        "processing_class": byte_tokenizer(),
    }
    return trainer_class(**{**kwargs, **(trainer_kwargs or {})})


TIMES = ("step_time", "runtime", "per_second", "profiling", "total_flos", "input_tokens_per")


def comparable_log(trainer: Any) -> list[dict[str, float]]:
    """The log history without wall-clock figures."""
    return [
        {key: value for key, value in entry.items() if not any(part in key for part in TIMES)}
        for entry in trainer.state.log_history
    ]


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


def max_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name].float() - b[name].float()).abs().max().item() for name in a)

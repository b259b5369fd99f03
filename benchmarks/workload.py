"""Workload W: supplied rollouts whose lengths are log-normal, so that only the update phase is measured.

32 sequences, prompts of 150 tokens, completions log-normal with mean 964 and maximum 3022: 35,649 real tokens.
"""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-4b": {
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "smollm2-135m": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
    },
}
PROMPT_TOKENS = 150
NUM_ROWS = 32
MEAN_COMPLETION, MAX_COMPLETION = 964, 3022


def completion_lengths(scale: float = 1.0) -> list[int]:
    """The 32 completion lengths: log-normal, sum and maximum fixed, times `scale`."""
    generator = random.Random(0)
    draws = sorted(generator.lognormvariate(0.0, 0.75) for _ in range(NUM_ROWS))
    target, largest = MEAN_COMPLETION * NUM_ROWS, draws[-1]
    exponent = 1.0
    for _ in range(60):  # bend the draws until the largest is 3022 where the mean is 964
        bent = [draw**exponent for draw in draws]
        factor = target / sum(bent)
        exponent *= MAX_COMPLETION / (bent[-1] * factor) if largest > 1 else 1.0
        exponent = max(0.2, min(3.0, exponent))
    lengths = [max(1, round(value * factor)) for value in bent]
    lengths[-1] = MAX_COMPLETION
    generator.shuffle(lengths)
    return [max(1, math.ceil(length * scale)) for length in lengths]


def build_model(shape: str, dtype: torch.dtype, device: str) -> Qwen3ForCausalLM:
    """A random policy of the given shape, made on the fastest device and left on `device`."""
    config = Qwen3Config(**SHAPES[shape], tie_word_embeddings=True, max_position_embeddings=40960, bos_token_id=None)
    torch.manual_seed(0)
    factory = "cuda" if torch.cuda.is_available() else "cpu"
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(factory):
            model = Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(default)
    return model.to(device)


def training_settings(output_dir: str, rows: int, steps: int) -> dict[str, Any]:
    """What every paired run trains with: stock's micro-batches of 2 rows, `rows` of them in an optimizer step."""
    return {
        "output_dir": output_dir,
        "bf16": True,
        "use_cpu": not torch.cuda.is_available(),
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": rows // 2,
        "num_generations": 8,
        "max_completion_length": 4096,
        "max_steps": steps,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer: the ids supplied stay below its 258 tokens."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def lengths_of(kind: str, scale: float = 1.0) -> list[int]:
    """Completion lengths: workload `w`, `equal` ones of the same sum, or `one_long` of 16,384 tokens among 7 short."""
    if kind == "w":
        return completion_lengths(scale)
    lengths = [MEAN_COMPLETION] * NUM_ROWS if kind == "equal" else [300] * 5 + [16_384] + [300] * 2
    return [max(1, math.ceil(length * scale)) for length in lengths]


class SuppliedRollouts:
    """TRL's `rollout_func`: the same fixed token ids at every step.

    Args:
        scale: factor on every length, to try the script on a small machine.
        kind: of the lengths, see `lengths_of`.
    """

    def __init__(self, scale: float = 1.0, kind: str = "w") -> None:
        generator = random.Random(1)
        self.prompt_tokens = max(1, math.ceil(PROMPT_TOKENS * scale))
        self.lengths = lengths_of(kind, scale)
        self.prompts = [[generator.randrange(2, 258) for _ in range(self.prompt_tokens)] for _ in self.lengths]
        self.completions = [[generator.randrange(2, 258) for _ in range(length)] for length in self.lengths]

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """Ignores the prompts' text and returns the stored ids."""
        rows = range(len(prompts))
        return {
            "prompt_ids": [self.prompts[row] for row in rows],
            "completion_ids": [self.completions[row] for row in rows],
            "logprobs": None,
        }

    @property
    def num_tokens(self) -> int:
        """Real tokens, prompts included."""
        return sum(self.lengths) + self.prompt_tokens * len(self.lengths)


def dataset() -> Dataset:
    """Placeholder prompts: the ids come from `SuppliedRollouts`."""
    return Dataset.from_list([{"prompt": f"prompt {row}"} for row in range(NUM_ROWS)])


def reward(completions: list[str], **_: Any) -> list[float]:
    """A fixed, uneven reward, so that advantages and gradients are not zero."""
    return [(index * 7 % 13) / 13 for index in range(len(completions))]

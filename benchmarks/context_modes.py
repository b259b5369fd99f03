"""The modes of `context.py`: stock TRL and ours, with the levers for long rows off, in part, or all on."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from dataclasses import dataclass
from typing import Any

from peft import LoraConfig
from trl import GRPOConfig
from workload import PROMPT_TOKENS, SHAPES, training_settings

from trl_budget import BudgetGRPOConfig
from trl_budget.errors import SettingsError

LEVERS_OFF = {"activation_offload": "off", "tiled_mlp": "off", "attention_head_groups": "off"}
TILE_TOKENS = {"qwen3-4b": 8192, "tiny": 32}
WORKLOAD_W_TOKENS = 24_576


@dataclass(frozen=True)
class Mode:
    """One way to train.

    Attributes:
        description: for the result file.
        is_ours: `BudgetGRPOTrainer`, else `GRPOTrainer`.
        is_lora: rank 16 on every linear layer of a bf16 base, else all weights.
        levers: "off", "offload_tiles" or "all"; without meaning for stock.
    """

    description: str
    is_ours: bool
    is_lora: bool
    levers: str = "off"


MODES = {
    "stock_lora": Mode("stock TRL, LoRA r16 on all linear layers of a bf16 base", False, True),
    "stock_full_bf16": Mode("stock TRL, bf16 parameters and bf16 Adam state on the GPU", False, False),
    "ours_lora": Mode("LoRA as stock's, packed, levers for long rows off", True, True),
    "ours_lora_offload_tiles": Mode(
        "the same, layer inputs on the host, layers in tiles", True, True, "offload_tiles"
    ),
    "ours_lora_all": Mode("the same, attention one key/value head at a time", True, True, "all"),
    "ours_full": Mode("bf16 policy, optimizer on the host, levers for long rows off", True, False),
    "ours_full_offload_tiles": Mode("the same, layer inputs on the host, in tiles", True, False, "offload_tiles"),
    "ours_full_all": Mode("the same, attention one key/value head at a time", True, False, "all"),
}


def levers(mode: Mode, shape: str) -> dict[str, Any]:
    """The fields of the long-row levers, as numbers: "auto" leaves them off on a card that needs none."""
    if not mode.is_ours:
        return {}
    chosen: dict[str, Any] = dict(LEVERS_OFF)
    if mode.levers != "off":
        chosen |= {"activation_offload": "on", "tiled_mlp": TILE_TOKENS[shape]}
    if mode.levers == "all":
        chosen["attention_head_groups"] = SHAPES[shape]["num_key_value_heads"]
    return chosen


def lora_config() -> LoraConfig:
    """The adapters of the LoRA modes."""
    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM")


def config_of(mode: Mode, shape: str, settings: dict[str, Any], chosen: list[str]) -> GRPOConfig:
    """The config of a mode: the workload's settings, the mode's levers, then the command line's.

    Args:
        mode: one of `MODES`.
        shape: key of `workload.SHAPES`.
        settings: of the workload; those of ours are left out for stock.
        chosen: `field=value`, each a field of one of the two config classes.

    Raises:
        SettingsError: a field that the config class does not know.
    """
    given = {name: parsed(value) for name, value in (pair.split("=", 1) for pair in chosen)}
    ours = {field.name for field in dataclasses.fields(BudgetGRPOConfig)}
    if unknown := sorted((given.keys() | levers(mode, shape).keys()) - ours):
        raise SettingsError(
            f"BudgetGRPOConfig has no {', '.join(unknown)}. A mode that is measured without a field that it names "
            "would stand under a wrong name. Use a version that has the field, or leave out --set and the mode."
        )
    config_class = BudgetGRPOConfig if mode.is_ours else GRPOConfig
    known = {field.name for field in dataclasses.fields(config_class)}
    every = settings | levers(mode, shape) | given
    return config_class(**{name: value for name, value in every.items() if name in known})


def parsed(text: str) -> Any:
    """A number, a boolean, None, or the text itself."""
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except json.JSONDecodeError:
        return text


class RowsByLength:
    """TRL's `rollout_func`: at every optimizer step rows of one length, shortest first.

    A row is `tokens` long, prompt included; the rows of a step differ in their tokens. Ids stay below the 258 of the
    byte tokenizer, which has no limit of length and only turns them into the text that the reward ignores.

    Args:
        lengths: tokens of a row.
        repeats: steps of each length.
    """

    def __init__(self, lengths: list[int], repeats: int) -> None:
        self.lengths = sorted(lengths)
        self.repeats = repeats

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """Ignores the prompts' text."""
        tokens = self.lengths[trainer.state.global_step // self.repeats]
        generator = random.Random(tokens)
        rows = [generator.choices(range(2, 258), k=tokens) for _ in prompts]
        cut = min(PROMPT_TOKENS, tokens // 2)
        return {
            "prompt_ids": [rows[0][:cut]] * len(rows),
            "completion_ids": [row[cut:] for row in rows],
            "logprobs": None,
        }


def length_settings(output_dir: str, lengths: list[int], repeats: int) -> dict[str, Any]:
    """Two rows of one length in an optimizer step, the fewest of which GRPO makes advantages; a pass is one row."""
    return training_settings(output_dir, 2, len(lengths) * repeats) | {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "num_generations": 2,
        "max_completion_length": max(lengths),
        "max_tokens_per_microbatch": min(lengths),
    }


def workload_w_settings(output_dir: str, rows: int, repeats: int, scale: float) -> dict[str, Any]:
    """Workload W in packed passes of 24,576 tokens."""
    return training_settings(output_dir, rows, repeats) | {
        "max_tokens_per_microbatch": math.ceil(WORKLOAD_W_TOKENS * scale),
        "padding_free": "on",
    }

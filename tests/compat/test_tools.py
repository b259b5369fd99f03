"""Tool calls and environments: the rollout loop is TRL's, so training equals stock's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from compat_pairs import assert_works, log_of
from datasets import Dataset
from tiny import byte_tokenizer, tiny_model
from trl.chat_template_utils import qwen3_chat_template

CALL = '<tool_call>\n{"name": "%s", "arguments": {"%s": 3}}\n</tool_call><|im_end|>'
ANSWERS = (CALL % ("double", "value"), CALL % ("double", "wrong"), "I know no tool<|im_end|>", "Nor do I<|im_end|>")
SETTINGS = {"max_steps": 2, "max_completion_length": 256, "learning_rate": 1e-2}


def chat_tokenizer() -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    tokenizer.chat_template = qwen3_chat_template
    return tokenizer


def answer_from_script(trainer: Any) -> None:
    """The first turn of each batch calls the tool twice, once wrongly; the second turn ends."""
    tokenizer = trainer.processing_class

    def generate(input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        texts = ANSWERS if len(input_ids) == len(ANSWERS) else ["Done!<|im_end|>"] * len(input_ids)
        tokens = [tokenizer(text)["input_ids"] for text in texts]
        width = max(map(len, tokens))
        padded = [row + [tokenizer.pad_token_id] * (width - len(row)) for row in tokens]
        return torch.cat([input_ids, torch.tensor(padded)], dim=1)

    trainer.model.generate = generate


def run(trainer: Any) -> None:
    answer_from_script(trainer)
    trainer.train()


def length_reward(completions: list[Any], **_: Any) -> list[float]:
    return [len(str(completion)) / 100 for completion in completions]


def double(value: int) -> int:
    """Doubles a number.

    Args:
        value: The number.

    Returns:
        Twice the number.
    """
    return 2 * value


async def double_later(value: int) -> int:
    """Doubles a number.

    Args:
        value: The number.

    Returns:
        Twice the number.
    """
    return 2 * value


double_later.__name__ = "double"


class Doubling:
    """Counts, and rewards what was counted."""

    def reset(self, **_: Any) -> str:
        self._sum = 0
        return "Double three."

    def double(self, value: int) -> int:
        """Doubles a number.

        Args:
            value: The number.

        Returns:
            Twice the number.
        """
        self._sum += 2 * value
        return 2 * value

    def get_reward(self) -> float:
        return float(self._sum)


def common() -> dict[str, Any]:
    rows = [{"prompt": [{"role": "user", "content": f"Double {i}."}]} for i in range(8)]
    return {
        "model": tiny_model(vocab_size=264, max_position_embeddings=4096),
        "processing_class": chat_tokenizer(),
        "train_dataset": Dataset.from_list(rows),
        "reward_funcs": length_reward,
    }


def test_equals_stock_with_a_tool(tmp_path: Path) -> None:
    _, ours = assert_works(tmp_path, trainer_kwargs=lambda: {**common(), "tools": [double]}, run=run, **SETTINGS)
    assert log_of(ours)[0]["tools/call_frequency"] == 0.5
    assert log_of(ours)[0]["tools/failure_frequency"] == 0.5


def test_equals_stock_with_an_asynchronous_tool(tmp_path: Path) -> None:
    _, ours = assert_works(tmp_path, trainer_kwargs=lambda: {**common(), "tools": [double_later]}, run=run, **SETTINGS)
    assert log_of(ours)[0]["tools/call_frequency"] == 0.5


def test_equals_stock_with_an_environment_that_owns_data_and_reward(tmp_path: Path) -> None:
    def kwargs() -> dict[str, Any]:
        return {**common(), "train_dataset": None, "reward_funcs": None, "environment_factory": Doubling}

    _, ours = assert_works(tmp_path, trainer_kwargs=kwargs, run=run, **SETTINGS)
    assert log_of(ours)[0]["rewards/Doubling/mean"] == 1.5

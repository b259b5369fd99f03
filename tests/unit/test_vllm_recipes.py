"""What the command lines of the recipes with colocated vLLM turn into."""

from __future__ import annotations

import dataclasses
import sys
from argparse import Namespace
from pathlib import Path

import pytest

pytest.importorskip("reasoning_gym", reason="the recipes take their problems from reasoning-gym")
sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
import long_context_qwen3_4b as long_context
import qwen3_4b
import reasoning_smollm2_135m as smollm2
from transformers import AutoConfig

from trl_budget import BudgetGRPOConfig
from trl_budget.device_memory import parse_bytes

LEVERS = {"activation_offload", "tiled_mlp", "attention_head_groups"}
needs_levers = pytest.mark.skipif(
    not {field.name for field in dataclasses.fields(BudgetGRPOConfig)} >= LEVERS,
    reason="BudgetGRPOConfig has no levers for long rows",
)


def arguments_4b(*words: str) -> Namespace:
    return qwen3_4b.parse_arguments(words)


@pytest.mark.parametrize("card", [16, 24, 48])
def test_the_card_sets_a_budget_below_it_and_a_context_for_its_completions(card: int, tmp_path: Path) -> None:
    config = qwen3_4b.build_config(arguments_4b("--card", str(card), "--output-dir", str(tmp_path)))
    assert 0.9 * card * 2**30 < parse_bytes(config.device_memory_budget) < card * 2**30
    assert config.vllm_max_model_length > config.max_completion_length
    assert config.per_device_train_batch_size * config.gradient_accumulation_steps == 64
    assert config.use_vllm and config.vllm_mode == "colocate"


def test_adapters_train_on_a_bf16_base_and_all_weights_from_what_trl_loads(tmp_path: Path) -> None:
    config = qwen3_4b.build_config(arguments_4b("--lora", "8", "--output-dir", str(tmp_path)))
    assert config.model_init_kwargs == {"dtype": "bfloat16"} and config.learning_rate == 1e-5
    assert (qwen3_4b.adapters(8).r, qwen3_4b.adapters(8).lora_alpha) == (8, 16)
    config = qwen3_4b.build_config(arguments_4b("--output-dir", str(tmp_path)))
    assert config.model_init_kwargs is None and config.learning_rate == 1e-6
    assert (config.save_strategy, config.save_steps, config.save_total_limit) == ("steps", 50, 1)


def test_the_cache_of_each_card_holds_a_whole_row_beside_the_weights() -> None:
    shape = qwen3_4b.SHAPES["qwen3-4b"]
    weight_bytes = 2 * 4.02e9
    token_bytes = 2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    for card in qwen3_4b.CARDS.values():
        engine_bytes = card["vllm_gpu_memory_utilization"] * parse_bytes(card["device_memory_budget"])
        num_tokens = (engine_bytes - weight_bytes - 2**30) / token_bytes
        assert num_tokens > 4 * (qwen3_4b.MAX_PROMPT_LENGTH + card["max_completion_length"])


def test_transformers_generates_unless_vllm_is_asked_for() -> None:
    assert smollm2.rollout_settings(Namespace(vllm=False, trainer="budget"), "cuda") == {}
    settings = {
        name: smollm2.rollout_settings(Namespace(vllm=True, trainer=name), "cuda") for name in smollm2.TRAINERS
    }
    assert all(chosen["use_vllm"] and chosen["vllm_mode"] == "colocate" for chosen in settings.values())
    assert settings["stock"]["vllm_enable_sleep_mode"] and not settings["budget"]["vllm_enable_sleep_mode"]


# Long rows


def long_arguments(card: int, *words: str) -> Namespace:
    return long_context.parse_arguments(["--card", str(card), *words])


@needs_levers
@pytest.mark.parametrize(("card", "row_length"), [(16, 32_768), (24, 65_536), (48, 131_072)])
def test_a_row_of_a_card_is_one_context_and_one_pass(card: int, row_length: int) -> None:
    config = long_context.build_config(long_arguments(card))
    assert config.vllm_max_model_length == row_length
    assert config.max_completion_length == row_length - 1024
    assert config.max_tokens_per_microbatch == row_length
    assert 0.9 * card * 2**30 < parse_bytes(config.device_memory_budget) < card * 2**30
    assert config.per_device_train_batch_size * config.gradient_accumulation_steps == 16


@needs_levers
def test_the_row_length_is_an_argument() -> None:
    config = long_context.build_config(long_arguments(16, "--row-length", "8192"))
    assert (config.vllm_max_model_length, config.max_completion_length) == (8192, 8192 - 1024)


@pytest.mark.parametrize("card", list(long_context.CARDS))
def test_the_cache_of_each_card_holds_its_longest_row_beside_the_weights(card: int) -> None:
    shape, settings = qwen3_4b.SHAPES["qwen3-4b"], long_context.CARDS[card]
    token_bytes = 2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    engine_bytes = settings["vllm_gpu_memory_utilization"] * parse_bytes(settings["device_memory_budget"])
    assert engine_bytes - 2 * 4.02e9 - 2**30 > token_bytes * settings["row_length"]


@pytest.mark.parametrize("words", [("--row-length", "1024"), ("--row-length", "300000"), ("--completions", "12")])
def test_a_row_without_a_completion_or_without_a_position_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit):
        long_arguments(24, *words)


def test_the_longest_problem_fits_its_part_of_the_row_even_at_a_token_per_byte() -> None:
    options = {**long_context.TASK_OPTIONS, "min_terms": 40, "min_digits": 6}
    problems = long_context.reasoning_gym.create_dataset(long_context.TASK, size=50, seed=0, **options)
    prompts = [qwen3_4b.SYSTEM_PROMPT + problem["question"] + qwen3_4b.CHAT_TEMPLATE for problem in problems]
    assert max(map(len, prompts)) < long_context.MAX_PROMPT_LENGTH


def test_random_weights_of_a_shape_have_a_position_for_every_token(tmp_path: Path) -> None:
    folder = qwen3_4b.random_model(tmp_path, "tiny", long_context.MAX_POSITIONS)
    assert AutoConfig.from_pretrained(folder).max_position_embeddings >= long_context.CARDS[48]["row_length"]
    assert qwen3_4b.random_model(tmp_path, "tiny") != folder

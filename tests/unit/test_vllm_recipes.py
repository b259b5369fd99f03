"""What the command lines of the recipes with colocated vLLM turn into."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

import pytest

pytest.importorskip("reasoning_gym", reason="the recipes take their problems from reasoning-gym")
sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
import qwen3_4b_one_gpu as one_gpu
import reasoning_smollm2_135m as smollm2

from trl_budget.device_memory import parse_bytes


@pytest.mark.parametrize("card", [16, 24])
def test_the_card_sets_a_budget_below_it_and_a_context_for_its_completions(card: int, tmp_path: Path) -> None:
    arguments = Namespace(card=card, max_completion_length=None, output_dir=tmp_path, completions=64, steps=1, seed=0)
    config = one_gpu.build_config(arguments)
    assert 0.9 * card * 2**30 < parse_bytes(config.device_memory_budget) < card * 2**30
    assert config.vllm_max_model_length > config.max_completion_length
    assert config.per_device_train_batch_size * config.gradient_accumulation_steps == 64
    assert config.use_vllm and config.vllm_mode == "colocate"


def test_the_cache_of_each_card_holds_a_whole_row_beside_the_weights() -> None:
    shape = one_gpu.SHAPES["qwen3-4b"]
    weight_bytes = 2 * 4.02e9
    token_bytes = 2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    for card in one_gpu.CARDS.values():
        engine_bytes = card["vllm_gpu_memory_utilization"] * parse_bytes(card["device_memory_budget"])
        num_tokens = (engine_bytes - weight_bytes - 2**30) / token_bytes
        assert num_tokens > 4 * (one_gpu.MAX_PROMPT_LENGTH + card["max_completion_length"])


def test_transformers_generates_unless_vllm_is_asked_for() -> None:
    assert smollm2.rollout_settings(Namespace(vllm=False, trainer="budget"), "cuda") == {}
    settings = {
        name: smollm2.rollout_settings(Namespace(vllm=True, trainer=name), "cuda") for name in smollm2.TRAINERS
    }
    assert all(chosen["use_vllm"] and chosen["vllm_mode"] == "colocate" for chosen in settings.values())
    assert settings["stock"]["vllm_enable_sleep_mode"] and not settings["budget"]["vllm_enable_sleep_mode"]

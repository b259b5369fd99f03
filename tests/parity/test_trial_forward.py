"""The trial forwards that are run when a trainer is built: what they find, and that they leave nothing behind."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packed_models import FAMILIES, SIZES, family_model
from tiny import make_trainer
from transformers import set_seed
from trl.trainer.utils import add_fused_lm_head

from trl_budget import BudgetGRPOConfig, BudgetGRPOTrainer, SettingsError, attention
from trl_budget.packing_trial import packing_fault
from trl_budget.trial_forward import forward_draws
from trl_budget.upstream_attention import enable_packed_attention


def fault(model: torch.nn.Module) -> str | None:
    enable_packed_attention([model])
    return packing_fault(model, SIZES["vocab_size"], nullcontext(), is_exact=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_wrong_with_the_families_that_are_packed(family: str) -> None:
    assert fault(family_model(family)) is None


def test_a_layer_that_carries_one_row_into_the_next_is_found() -> None:
    set_seed(0)
    sizes = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2}
    model = transformers.JambaForCausalLM(transformers.JambaConfig(**sizes))
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    assert "one row moved the next" in str(fault(model))


def attends_to_all_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object
) -> object:
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


def test_an_attention_that_sees_other_rows_keeps_the_trainer_from_packing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "packed_attention", attends_to_all_rows)
    with pytest.raises(
        SettingsError, match=r"padding_free='on' was asked for, but in a trial run a packed row differed"
    ):
        make_trainer(BudgetGRPOTrainer, tmp_path, config_class=BudgetGRPOConfig, padding_free="on")


def test_trials_leave_the_random_state_and_the_mode_as_they_were() -> None:
    model = family_model("Llama").train()
    state = torch.get_rng_state()
    assert fault(model) is None
    assert not forward_draws(model, SIZES["vocab_size"], nullcontext())
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_window_that_only_the_mask_knows_is_found(dtype: torch.dtype) -> None:
    set_seed(0)
    sizes = {**SIZES, "sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 0}
    sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model = transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(**sizes)).to(dtype)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    enable_packed_attention([model])
    found = packing_fault(model, SIZES["vocab_size"], nullcontext(), is_exact=False, num_windows=2)
    assert found == "2 of 2 layers keep their sliding window to the mask, which a pack has not"
    mistral = family_model("Mistral with a window of 5", dtype)
    enable_packed_attention([mistral])
    assert packing_fault(mistral, SIZES["vocab_size"], nullcontext(), is_exact=True, num_windows=1) is None


def test_what_bf16_would_hide_is_found_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    original = attention.packed_attention

    def scaled(query: torch.Tensor, *arguments: Any, **features: Any) -> torch.Tensor:
        return original(query * 8, *arguments, **features)

    monkeypatch.setattr(attention, "packed_attention", scaled)
    model = family_model("Llama", torch.bfloat16)
    assert "a packed row differed from the row alone" in str(fault(model))

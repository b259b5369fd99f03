"""The trial forwards that are run when a trainer is built: what they find, and that they leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packed_models import FAMILIES, SIZES, family_model
from tiny import make_trainer
from transformers import set_seed
from trl.trainer.utils import add_fused_lm_head

from trl_budget import BudgetGRPOConfig, BudgetGRPOTrainer, SettingsError, attention, packing_trial
from trl_budget.packing_trial import packing_fault
from trl_budget.trial_forward import COMPLETION, forward_draws
from trl_budget.upstream_attention import enable_packed_attention


def fault(model: torch.nn.Module) -> str | None:
    enable_packed_attention([model])
    return packing_fault(model, SIZES["vocab_size"], nullcontext(), is_exact=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_wrong_with_the_families_that_are_packed(family: str, dtype: torch.dtype) -> None:
    assert fault(family_model(family, dtype)) is None


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
    of_mistral = partial(packing_fault, mistral, SIZES["vocab_size"], nullcontext(), is_exact=True)
    assert of_mistral(num_windows=2) is None
    assert of_mistral(num_windows=3) == "1 of 3 layers keep their sliding window to the mask, which a pack has not"


def test_what_bf16_would_hide_is_found_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    original = attention.packed_attention

    def scaled(query: torch.Tensor, *arguments: Any, **features: Any) -> torch.Tensor:
        return original(query * 8, *arguments, **features)

    monkeypatch.setattr(attention, "packed_attention", scaled)
    model = family_model("Llama", torch.bfloat16)
    assert "a packed row differed from the row alone" in str(fault(model))
    assert packing_fault(model, SIZES["vocab_size"], nullcontext(), is_exact=True, is_quantized=True) is None


@pytest.mark.parametrize(("is_exact", "found"), [(True, "one row moved the next by 0.01"), (False, "None")])
def test_rows_may_share_the_rounding_of_routed_experts_and_nothing_else(
    is_exact: bool, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = []

    def moved(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        first.append(ids[0, 0])
        return -torch.ones(len(ids), COMPLETION) - 0.01 * (len(ids) == 2 and ids[0, 0] != first[0])

    monkeypatch.setattr(packing_trial, "score", moved)
    model = family_model("Llama", torch.bfloat16)
    enable_packed_attention([model])
    trial = partial(packing_fault, model, SIZES["vocab_size"], nullcontext(), is_quantized=True)
    assert found in str(trial(is_exact=is_exact))


def test_a_row_alone_is_scored_with_the_models_own_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    scored, is_own = packing_trial.score, [False]
    seen: list[tuple[int, bool]] = []

    @contextmanager
    def unpacked() -> Iterator[None]:
        is_own[0] = True
        yield
        is_own[0] = False

    def record(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        seen.append((len(ids), is_own[0]))
        return scored(model, ids, mask)

    monkeypatch.setattr(packing_trial, "score", record)
    model = family_model("Llama")
    enable_packed_attention([model])
    assert packing_fault(model, SIZES["vocab_size"], nullcontext(), is_exact=True, unpacked=unpacked) is None
    assert set(seen) == {(2, False), (1, True)}


def test_attention_that_is_not_looked_up_is_tried_as_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention casts fp32 to bf16 by itself, which the tolerance for fp32 would take for a fault."""

    @contextmanager
    def never(model: torch.nn.Module) -> Iterator[None]:
        raise torch.OutOfMemoryError("fp32 was tried")
        yield

    monkeypatch.setattr(packing_trial, "in_fp32", never)
    model = family_model("Llama", torch.bfloat16)
    with pytest.raises(torch.OutOfMemoryError):
        fault(model)
    monkeypatch.setattr(packing_trial, "undispatched_attention", lambda _: {"flash_attention_2"})
    assert fault(model) is None

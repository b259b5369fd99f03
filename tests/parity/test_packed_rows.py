"""Packed and trimmed rows against each row alone, and rows against each other."""

from __future__ import annotations

import pytest
import torch
from packed_models import COMPLETIONS, FAMILIES, family_model, packed, rows, score, score_row_by_row
from transformers import LlamaConfig, LlamaForCausalLM

from trl_budget import attention
from trl_budget.errors import UnservedAttentionError
from trl_budget.micro_batch import RowsModel, RowSpans

pytestmark = pytest.mark.usefixtures("one_thread")

C = max(COMPLETIONS)


@pytest.fixture
def packed_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every packed attention call: shows that rows really lay end to end."""
    calls: list[int] = []
    original = attention.packed_attention

    def counting(query: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        calls.append(query.shape[2])
        return original(query, *args, **kwargs)

    monkeypatch.setattr(attention, "packed_attention", counting)
    return calls


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_equal_each_row_alone(family: str, packed_calls: list[int]) -> None:
    model = family_model(family)
    ids, mask = rows()
    alone = score_row_by_row(model, ids, mask, C)
    together, _ = score(packed(model, C), ids, mask, C)
    assert (together - alone).abs().max().item() < 1e-5
    assert packed_calls == [int(mask.sum())] * model.config.num_hidden_layers


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_row_moves_no_other_row_by_a_bit(family: str) -> None:
    model = family_model(family)
    ids, mask = rows()
    before, _ = score(packed(model, C), ids, mask, C)
    for changed in (0, 2, 4):
        other = ids.clone()
        other[changed] = torch.where(mask[changed] == 1, 96 - other[changed].clamp(max=94), other[changed])
        after, _ = score(packed(model, C), other, mask, C)
        kept = [row for row in range(len(ids)) if row != changed]
        assert torch.equal(before[kept], after[kept])
        assert changed == 2 or not torch.equal(before[changed], after[changed])


@pytest.mark.parametrize("family", FAMILIES)
def test_trimmed_rows_equal_each_row_alone(family: str) -> None:
    model = family_model(family)
    ids, mask = rows()
    wide = torch.nn.functional.pad(ids, (6, 9)), torch.nn.functional.pad(mask, (6, 9))
    trimmed, _ = score(RowsModel(model, C + 9, is_packed=False), *wide, C + 9)
    assert (trimmed[:, :C] - score_row_by_row(model, ids, mask, C)).abs().max().item() < 1e-5
    assert trimmed[:, C:].abs().max().item() == 0.0


@pytest.mark.parametrize("use_checkpointing", [False, True])
def test_gradients_of_packed_rows_equal_the_sum_of_each_row_alone(use_checkpointing: bool) -> None:
    model = family_model("Qwen3").train()
    ids, mask = rows()
    score_row_by_row(model, ids, mask, C).sum().backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    if use_checkpointing:  # the recompute runs in backward, outside the packed forward
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    score(packed(model, C), ids, mask, C)[0].sum().backward()
    got = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert ((got - expected).norm() / expected.norm()).item() < 1e-6


def test_all_masked_completions_score_zero_with_a_gradient_of_zero() -> None:
    model = family_model("Qwen3")
    ids, mask = rows()
    mask[:, -C:] = 0
    log_probs, entropies = score(packed(model, C), ids, mask, C)
    assert log_probs.abs().max() == 0.0
    assert entropies.abs().max() == 0.0
    log_probs.sum().backward()
    assert all(p.grad is None or p.grad.abs().max() == 0.0 for p in model.parameters())


@pytest.mark.parametrize("completions", [(0, 0, 0, 0, 1), (1, 1, 1, 1, 1)])
def test_one_token_completions_and_empty_ones(completions: tuple[int, ...]) -> None:
    model = family_model("Llama")
    ids, mask = rows(completions=completions)
    together, _ = score(packed(model, 1), ids, mask, 1)
    assert (together - score_row_by_row(model, ids, mask, 1)).abs().max().item() < 1e-5


def test_a_row_with_a_hole_and_a_completion_without_prompt_are_not_packed() -> None:
    ids, mask = rows()
    prompt_columns = ids.shape[1] - C
    assert RowSpans.of(mask).can_be_packed(prompt_columns)
    hole = mask.clone()
    hole[0, prompt_columns + 2] = 0
    assert not RowSpans.of(hole).can_be_packed(prompt_columns)
    without_prompt = mask.clone()
    without_prompt[0, :prompt_columns] = 0
    assert not RowSpans.of(without_prompt).can_be_packed(prompt_columns)
    assert not RowSpans.of(torch.zeros_like(mask)).can_be_packed(prompt_columns)


def test_rows_that_cannot_be_packed_score_as_the_padded_batch_does() -> None:
    model = family_model("Llama")
    ids, mask = rows()
    mask[0, ids.shape[1] - C + 2] = 0
    expected, _ = score(model, ids, mask, C)
    got, _ = score(packed(model, C), ids, mask, C)
    assert (got - expected).abs().max().item() < 1e-5


def test_without_packed_rows_the_dispatching_attention_is_the_original_to_a_bit() -> None:
    ids, mask = rows()
    plain, dispatching = family_model("Llama"), family_model("Llama")
    packed(dispatching, C)
    assert torch.equal(score(plain, ids, mask, C)[0], score(dispatching, ids, mask, C)[0])
    assert torch.equal(plain(ids).logits, dispatching(ids).logits), "no mask given: one causal row"
    generate = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(plain.generate(ids[:, :9], **generate), dispatching.generate(ids[:, :9], **generate))


def test_the_attention_implementation_is_not_saved_with_the_model(tmp_path: object) -> None:
    model = family_model("Llama")
    packed(model, C)
    model.save_pretrained(tmp_path)
    assert "trl_budget" not in LlamaConfig.from_pretrained(tmp_path).to_json_string()
    assert LlamaForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


def test_attention_features_that_packing_would_drop_are_refused() -> None:
    q = torch.zeros(1, 2, 4, 8)
    with pytest.raises(UnservedAttentionError, match="s_aux"):
        attention.packed_attention(q, q, q, torch.tensor([0, 4]), max_length_q=4, s_aux=torch.zeros(2))

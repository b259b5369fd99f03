"""Packed rows on a GPU: torch's varlen attention inside the model, in bf16, and the trainer's defaults."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import byte_tokenizer, comparable_log, make_trainer, tiny_model
from trl import GRPOTrainer

from trl_budget import BudgetGRPOConfig, BudgetGRPOTrainer
from trl_budget.attention import packed_attention
from trl_budget.micro_batch import RowsModel

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))
from packed_models import COMPLETIONS, FAMILIES, family_model, packed, rows, score

pytestmark = pytest.mark.gpu
C = max(COMPLETIONS)
LENGTHS = (70, 1, 0, 513, 128)


def heads(dtype: torch.dtype, kv_heads: int = 2) -> tuple[list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(1, n, sum(LENGTHS), 64) for n in (8, kv_heads, kv_heads)]
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).to("cuda", torch.int32)
    return [torch.randn(shape, device="cuda", dtype=dtype).requires_grad_() for shape in shapes], bounds


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("kv_heads", [2, 8])
def test_varlen_attention_equals_fp32_row_by_row_within_bf16(window: int | None, kv_heads: int) -> None:
    (q, k, v), bounds = heads(torch.bfloat16, kv_heads)
    settings: dict[str, Any] = {"max_length_q": max(LENGTHS), "sliding_window": window}
    got = packed_attention(q, k, v, bounds, **settings)
    got.sum().backward()
    exact_inputs = [t.detach().float().requires_grad_() for t in (q, k, v)]
    exact = packed_attention(*exact_inputs, bounds, **settings)
    exact.sum().backward()
    assert (got.float() - exact).abs().max().item() < 2e-2
    for t, e in zip((q, k, v), exact_inputs, strict=True):
        assert (t.grad.float() - e.grad).norm().item() / e.grad.norm().item() < 1e-2


def test_a_changed_row_moves_no_other_row_by_a_bit() -> None:
    (q, k, v), bounds = heads(torch.bfloat16)
    before = packed_attention(q, k, v, bounds, max_length_q=max(LENGTHS))
    with torch.no_grad():
        for t in (q, k, v):
            t[:, :, :70] += 1
    after = packed_attention(q, k, v, bounds, max_length_q=max(LENGTHS))
    assert torch.equal(before[:, 70:], after[:, 70:])
    assert not torch.equal(before[:, :70], after[:, :70])


def with_gradient(model: Any, runner: Any, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    model.zero_grad()
    log_probs, _ = score(runner, ids, mask, C)
    log_probs.sum().backward()
    return log_probs.detach(), torch.cat([p.grad.flatten().double() for p in model.parameters()])


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_bf16_is_no_further_from_fp32_than_padded_bf16(family: str) -> None:
    ids, mask = (t.cuda() for t in rows())
    exact_model = family_model(family).cuda()
    exact, exact_gradient = with_gradient(exact_model, exact_model, ids, mask)
    model = family_model(family, torch.bfloat16).cuda()
    padded, padded_gradient = with_gradient(model, model, ids, mask)
    trimmed, _ = with_gradient(model, RowsModel(model, C, is_packed=False), ids, mask)
    together, packed_gradient = with_gradient(model, packed(model, C), ids, mask)
    noise = (padded - exact).abs().max().item()
    assert (together - exact).abs().max().item() < 2 * noise
    assert (trimmed - exact).abs().max().item() < 2 * noise
    gradient_noise = (padded_gradient - exact_gradient).norm().item()
    assert (packed_gradient - exact_gradient).norm().item() < 2 * gradient_noise


def uneven_rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
    tokenizer, step = byte_tokenizer(), trainer.state.global_step
    completions = [
        [2 + (row * 31 + step * 7 + i * 13) % 250 for i in range(1 + (row * 5) % 13)] for row in range(len(prompts))
    ]
    return {"prompt_ids": tokenizer(prompts)["input_ids"], "completion_ids": completions, "logprobs": None}


@pytest.mark.parametrize("placement", ["host", "device"])
def test_the_defaults_pack_and_stay_within_bf16_noise_of_stock(tmp_path: Path, placement: str) -> None:
    model = tiny_model().to(torch.bfloat16) if placement == "device" else tiny_model()
    settings: dict[str, Any] = {"use_cpu": False, "bf16": True, "gradient_accumulation_steps": 4, "max_steps": 3}
    settings |= {"gradient_checkpointing": True, "entropy_coef": 0.01, "learning_rate": 1e-4}
    kwargs = {"rollout_func": uneven_rollouts}
    stock_model = copy.deepcopy(model).to(torch.bfloat16)
    stock = make_trainer(GRPOTrainer, tmp_path, model=stock_model, trainer_kwargs=kwargs, **settings)
    stock.train()
    ours = make_trainer(
        BudgetGRPOTrainer,
        tmp_path,
        model=model,
        trainer_kwargs=kwargs,
        config_class=BudgetGRPOConfig,
        optimizer_placement=placement,
        **settings,
    )
    ours.train()
    resolved = {s.name: s.value for s in ours.resolved_settings}
    assert resolved["padding_free"] == "packed"
    assert int(resolved["max_tokens_per_microbatch"]) > 1000
    for a, b in zip(comparable_log(stock), comparable_log(ours), strict=True):
        for key in ("loss", "grad_norm", "entropy"):
            if key in a:
                assert b[key] == pytest.approx(a[key], rel=3e-2, abs=3e-3), key

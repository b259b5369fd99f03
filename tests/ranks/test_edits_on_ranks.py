"""What one process does with edited state, overflowing norms, gradients of zero and a failed step, ranks do as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import edit_programs as programs
import pytest
import torch
from adamw_programs import LEARNING_RATE
from failure_programs import parameters_of, same_gradients
from rank_launcher import run_ranks
from torch.nn import Parameter

every_sharding = pytest.mark.parametrize("sharding", ["sharded", "rank0", "replicated"])


class Stock:
    """`torch.optim.AdamW` over fp32 twins of the programs' parameters."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self.twins = [Parameter(p.detach().float()) for p in parameters_of(*programs.SHAPES, dtype=dtype)]
        self.optimizer = torch.optim.AdamW(self.twins, lr=LEARNING_RATE, fused=True)

    def step(self, step: int, factor: float = 1.0, max_norm: float | None = None) -> None:
        for twin, gradient in zip(self.twins, same_gradients(self.twins, step), strict=True):
            twin.grad = (gradient.to(self.dtype) * factor).float()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.twins, max_norm)
        self.optimizer.step()

    def assert_same(self, result: dict[str, Any]) -> None:
        for index, (weight, twin) in enumerate(zip(result["weights"], self.twins, strict=True)):
            assert torch.equal(weight, twin.detach().to(self.dtype)), f"parameter {index}"
            entry, expected = result["state"][index], self.optimizer.state.get(twin, {})
            assert torch.equal(entry["master_weights"], twin.detach())
            for key in ("step", "exp_avg", "exp_avg_sq"):
                assert torch.equal(entry[key], expected.get(key, torch.zeros_like(entry[key]))), f"{key} of {index}"


@every_sharding
def test_edits_made_on_every_rank_are_followed_and_on_one_rank_refused(tmp_path: Path, sharding: str) -> None:
    results = run_ranks(programs.edits, 2, tmp_path, sharding, group_timeout=10.0)
    for name, edit in programs.EDITS.items():
        stock = Stock(torch.bfloat16)
        stock.step(0)
        edit(stock.optimizer, stock.twins)
        looked = results[0][name]["looked"]
        for index, twin in enumerate(stock.twins):
            for key in ("step", "exp_avg", "exp_avg_sq"):
                expected = stock.optimizer.state[twin].get(key, torch.zeros_like(looked[index][key]))
                assert torch.equal(looked[index][key], expected), f"{key} of {index} after {name}"
            assert torch.equal(looked[index]["master_weights"], twin.detach())
        stock.step(1)
        for result in results:
            stock.assert_same(result[name])
    for result in results:
        assert all(bool((master == torch.tensor(1.001)).all()) for master in result["masters"])
        assert all(bool((cast == torch.tensor(1.001).bfloat16()).all()) for cast in result["cast"])
        assert result["one"][0] == "RankError" and "edits of the state" in result["one"][1]


@every_sharding
@pytest.mark.parametrize("max_norm", [None, 1.0], ids=["unclipped", "clipped"])
def test_finite_gradients_whose_norm_overflows_are_stepped_on_all_ranks(
    tmp_path: Path, max_norm: float | None, sharding: str
) -> None:
    stock = Stock()
    stock.step(0)
    stock.step(1, 1e19, max_norm)
    for result in run_ranks(programs.overflows, 2, tmp_path, sharding, max_norm):
        assert max_norm is None or result["norm"].isinf()
        assert result["skipped"] == 0 and result["skipped after"] == 1
        stock.assert_same(result)
        assert all(torch.equal(a, b) for a, b in zip(result["weights"], result["last"], strict=True))


@every_sharding
def test_gradients_set_to_zero_are_stepped_as_zeros_on_all_ranks(tmp_path: Path, sharding: str) -> None:
    stock = Stock()
    for step in range(3):
        gradients = same_gradients(stock.twins, step)
        stock.twins[0].grad = gradients[0]
        stock.twins[1].grad = gradients[1] if step == 0 else torch.zeros(7)
        stock.twins[2].grad = gradients[2] / 2 if step == 0 else torch.zeros(7)
        stock.optimizer.step()
    for result in run_ranks(programs.zeros, 2, tmp_path, sharding):
        stock.assert_same(result)
        assert [int(result["state"][index]["step"]) for index in range(4)] == [3, 3, 3, 0]


@every_sharding
def test_a_step_that_failed_on_one_rank_is_refused_on_all_until_a_state_is_loaded(
    tmp_path: Path, sharding: str
) -> None:
    stock = Stock(torch.bfloat16)
    stock.step(0)
    stock.step(1)
    first, second = run_ranks(programs.half_stepped, 2, tmp_path, sharding, group_timeout=10.0)
    assert first["errors"] == ["ArithmeticError", *["HalfSteppedError"] * 4]
    assert second["errors"] == ["RankError", *["HalfSteppedError"] * 4]
    stock.assert_same(first)
    stock.assert_same(second)

"""`BudgetGRPOTrainer` on two gloo ranks against stock `GRPOTrainer` under DDP on the same two: 0.0 everywhere.

A sum of two and a division by two round alike in any order, so even the last bit must agree.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_launcher import run_ranks
from tiny import max_difference, tiny_model
from trainer_programs import CASES, pairs, with_facts_of_a_gpu

LEARNING_RATE = 1e-3


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("pairs")
    return run_ranks(pairs, 2, folder, folder, group_timeout=None)


@pytest.fixture(scope="module")
def cast(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("cast")
    return run_ranks(with_facts_of_a_gpu, 2, folder, folder, group_timeout=None)


@pytest.mark.parametrize("case", CASES)
def test_every_logged_metric_is_that_of_stock_under_ddp(ranks: list[dict[Any, Any]], case: str) -> None:
    for result in ranks:
        stock, ours = result["stock", case]["log"], result["ours", case]["log"]
        assert len(ours) == 6 and {"loss", "grad_norm", "entropy", "reward"} <= ours[0].keys()
        assert ours == stock


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_stock_under_ddp(ranks: list[dict[Any, Any]], case: str) -> None:
    for result in ranks:
        stock, ours = result["stock", case], result["ours", case]
        assert (stock["wrapped"], ours["wrapped"]) == ("DistributedDataParallel", "Qwen3ForCausalLM")
        assert max_difference(ours["weights"], stock["weights"]) == 0.0
        assert max_difference(ours["weights"], ranks[0]["ours", case]["before"]) > LEARNING_RATE


@pytest.mark.parametrize("case", [*CASES, "replicated", "rank0"])
def test_ranks_that_start_from_other_weights_equal_rank_0_before_and_after_every_step(
    ranks: list[dict[Any, Any]], case: str
) -> None:
    first, second = (result["ours", case] for result in ranks)
    assert max_difference(first["before"], second["before"]) == 0.0
    assert len(first["history"]) == 5
    for a, b in zip(first["history"], second["history"], strict=True):
        assert max_difference(a, b) == 0.0


@pytest.mark.parametrize("sharding", ["replicated", "rank0"])
def test_the_sharding_changes_no_bit(ranks: list[dict[Any, Any]], sharding: str) -> None:
    for result in ranks:
        assert result["ours", sharding]["settings"]["optimizer_sharding"] == sharding
        assert max_difference(result["ours", sharding]["weights"], result["ours", "the defaults"]["weights"]) == 0.0


def test_adapters_keep_stocks_ddp_and_host_is_refused(ranks: list[dict[Any, Any]]) -> None:
    for result in ranks:
        wrapped, message = result["refusal"]
        assert wrapped == "DistributedDataParallel"
        assert "2 processes" in message and "adapters keep stock's DDP" in message


def test_masters_are_the_fp32_bits_of_rank_0(cast: list[dict[str, Any]]) -> None:
    original = cast[0]["original"]
    assert any(not torch.equal(value, cast[1]["original"][name]) for name, value in original.items())
    for result in cast:
        for name, master in result["masters"].items():
            assert torch.equal(master, original[name]), name
            assert torch.equal(result["start"][name], master.to(torch.bfloat16)), name


def test_resume_on_two_ranks_equals_an_uninterrupted_run(cast: list[dict[str, Any]]) -> None:
    assert {"optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"} <= set(cast[0]["files"])
    for result in cast:
        whole, resumed = result["whole"], result["resumed"]
        assert max_difference(whole["weights"], resumed["weights"]) == 0.0
        assert whole["log"][-2] == resumed["log"][-2]
        for name, entry in whole["state"].items():
            for key, value in entry.items():
                assert torch.equal(value, resumed["state"][name][key]), (name, key)


def test_a_bf16_reference_follows_by_small_shares_alike_on_both_ranks(cast: list[dict[str, Any]]) -> None:
    start = {name: p.detach().to(torch.bfloat16) for name, p in tiny_model().named_parameters()}
    first, second = (result["reference"] for result in cast)
    assert max_difference(first, second) == 0.0
    moved = sum(int((first[name] != value).sum()) for name, value in start.items())
    assert moved > 0, "it has to have moved for equality to mean something"

"""Two ranks share one card and meet over gloo: the whole trainer, 3 steps, every sharding."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from rank_launcher import rank_environment, run_ranks
from tiny import max_difference

sys.path.insert(0, str(Path(__file__).parent))
import two_ranks_program as program

pytestmark = pytest.mark.gpu
SHARDINGS = ("sharded", "rank0", "replicated")
LEARNING_RATE = 1e-3


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("two-ranks")
    # LOCAL_RANK picks the card: both use the first.
    environments = [
        rank_environment(rank, 2, 1, 0) | {"LOCAL_RANK": "0", "ACCELERATE_USE_CPU": "false"} for rank in range(2)
    ]
    return run_ranks(
        program.train_all,
        2,
        folder,
        folder,
        group_timeout=None,
        seconds=400,
        environments=environments,
        start_method="spawn",
    )


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_ranks_are_equal_before_and_after_every_step(ranks: list[dict[str, Any]], sharding: str) -> None:
    first, second = (result[sharding] for result in ranks)
    assert first["devices"] == second["devices"] == ["cuda:0"]
    assert first["backend"] == "gloo" and first["wrapped"] == second["wrapped"] == "Qwen3ForCausalLM"
    assert max_difference(first["before"], second["before"]) == 0.0
    assert len(first["history"]) == 3
    for a, b in zip(first["history"], second["history"], strict=True):
        assert max_difference(a, b) == 0.0
    assert max_difference(first["masters"], second["masters"]) == 0.0
    assert max_difference(first["masters"], first["masters_start"]) > LEARNING_RATE
    assert [e["grad_norm"] for e in first["log"][:-1]] == [e["grad_norm"] for e in second["log"][:-1]]


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_masters_start_as_rank_0s_fp32_weights_and_compute_weights_are_their_cast(
    ranks: list[dict[str, Any]], sharding: str
) -> None:
    original = {name: p.detach() for name, p in program.big_model(0).named_parameters()}
    for result in (result[sharding] for result in ranks):
        assert max_difference(result["masters_start"], original) == 0.0
        assert result["differences"] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("sharding", ["rank0", "replicated"])
def test_the_sharding_changes_no_more_than_a_rerun(ranks: list[dict[str, Any]], sharding: str) -> None:
    """Gradients on a card are not reproducible to the bit, so the bound is one that rounding meets."""
    assert max_difference(ranks[0][sharding]["masters"], ranks[0]["sharded"]["masters"]) <= 5 * LEARNING_RATE


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_each_rank_owns_its_share(ranks: list[dict[str, Any]], sharding: str) -> None:
    largest = max(p.numel() for p in program.big_model(0).parameters())
    for rank, result in enumerate(result[sharding] for result in ranks):
        state = 12 * result["num_elements"]
        expected = {"sharded": state / 2, "rank0": state * (rank == 0), "replicated": state}[sharding]
        assert abs(result["owned_bytes"] - expected) <= 12 * largest * (sharding == "sharded")


def test_resuming_reads_the_state_into_host_memory_and_not_onto_the_card(ranks: list[dict[str, Any]]) -> None:
    for result in (result["resume"] for result in ranks):
        assert result["equal"] and result["num_entries"][0] == result["num_entries"][1] > 0
        assert result["devices"] == ["cpu"]
        assert result["added_bytes"] < 6 * result["num_elements"], "the state is 12 bytes per parameter"

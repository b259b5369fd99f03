"""The long-context levers on two gloo ranks: full parameters with the optimizer's shares on the host, LoRA under DDP.

Ranks stay equal to a bit; the reduced gradient is that of the same ranks without levers to 1e-6 of its norm.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from long_context_programs import CASES, cases, one_rank_differs
from rank_launcher import run_ranks
from tiny import max_difference


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("long")
    return run_ranks(cases, 2, folder, folder, group_timeout=None)


@pytest.mark.parametrize("case", CASES)
def test_ranks_are_equal_after_every_step(ranks: list[dict[Any, Any]], case: str) -> None:
    first, second = (result[case, "on"] for result in ranks)
    assert len(first["history"]) == 3
    for a, b in zip(first["history"], second["history"], strict=True):
        assert max_difference(a, b) == 0.0


@pytest.mark.parametrize("case", CASES)
def test_the_reduced_gradient_is_that_without_levers(ranks: list[dict[Any, Any]], case: str) -> None:
    for result in ranks:
        ours, expected = result[case, "on"]["gradients"], result[case, "off"]["gradients"]
        assert ours.keys() == expected.keys() and ours
        norm = torch.stack([value.double().norm() for value in expected.values()]).norm()
        difference = torch.stack([(ours[name] - value).double().norm() for name, value in expected.items()]).norm()
        assert norm > 0 and difference / norm <= 1e-6


@pytest.mark.parametrize("case", CASES)
def test_what_is_logged_stays_with_the_run_without_levers(ranks: list[dict[Any, Any]], case: str) -> None:
    for result in ranks:
        for ours, expected in zip(result[case, "on"]["log"], result[case, "off"]["log"], strict=True):
            assert ours == pytest.approx(expected, rel=2e-4, abs=2e-6)


@pytest.mark.parametrize("case", CASES)
def test_weights_stay_with_the_run_without_levers_and_nothing_stays_kept(
    ranks: list[dict[Any, Any]], case: str
) -> None:
    wrapped = "DistributedDataParallel" if "lora" in case else "Watched"
    for result in ranks:
        ours, expected = result[case, "on"], result[case, "off"]
        assert max_difference(ours["weights"], expected["weights"]) <= 3 * 1e-5
        assert ours["wrapped"] == expected["wrapped"] and (ours["wrapped"] == wrapped or "lora" not in case)
        assert ours["left"] == 0


def test_a_fault_on_one_rank_is_told_on_all(tmp_path: Any) -> None:
    messages = run_ranks(one_rank_differs, 2, tmp_path, tmp_path, group_timeout=None, seconds=60.0)
    assert messages[0] == messages[1] and "tensor hook" in messages[0]

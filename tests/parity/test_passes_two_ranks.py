"""Token-budget passes on two gloo ranks against stock `GRPOTrainer` under DDP: gradients, metrics, ranks in step.

Both ranks are started once and train every case, since a start costs eight seconds of imports. Rank 1's rows are
shorter, so that the number of passes and of micro-batches that a pass touches differ between the ranks.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from passes_rank_program import CASES

PROGRAM = Path(__file__).with_name("passes_rank_program.py")
TIMEOUT_S = 400
Results = list[dict[str, Any]]


def launch(folder: Path, *cases: str, timeout: float = TIMEOUT_S) -> Results:
    """Runs the program on two ranks; all are killed when one fails or the time is over."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    ranks = []
    for rank in range(2):
        environment = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (folder / f"rank{rank}.txt").open("w") as output:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, str(PROGRAM), str(folder), *cases],
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    end = time.monotonic() + timeout
    try:
        while any(rank.poll() is None for rank in ranks):
            if time.monotonic() > end or any(rank.poll() not in (None, 0) for rank in ranks):
                break
            time.sleep(0.1)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(rank.returncode != 0 for rank in ranks):
        tails = [(folder / f"rank{rank}.txt").read_text()[-2500:] for rank in range(2)]
        pytest.fail(f"the ranks did not finish (hang or crash): {tails[0]}\n--- rank 1\n{tails[1]}")
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch(tmp_path_factory.mktemp("two-ranks"))


every_case = pytest.mark.parametrize("case", CASES)


def of(results: Results, case: str, rank: int = 0) -> dict[str, Any]:
    assert case in results[rank], "an earlier case failed, after which the ranks are not in step"
    assert "error" not in results[rank][case], results[rank][case]["error"]
    return results[rank][case]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def tolerance(run: dict[str, Any]) -> float:
    """1e-6; with random adapters, which amplify rounding, what stock itself moves by when its padding changes."""
    if "repadded" not in run:
        return 1e-6
    return max(1e-6, relative(run["repadded"]["gradients"][0], run["stock"]["gradients"][0]))


@every_case
def test_the_reduced_gradient_equals_stocks_under_ddp(results: Results, case: str) -> None:
    run = of(results, case)
    assert run["stock"]["wrapper"] == run["ours"]["wrapper"] == "DistributedDataParallel"
    assert len(run["ours"]["gradients"]) == len(run["stock"]["gradients"]) == CASES[case][0].get("max_steps", 2)
    assert relative(run["ours"]["gradients"][0], run["stock"]["gradients"][0]) <= tolerance(run)


@every_case
def test_every_logged_metric_equals_stocks(results: Results, case: str) -> None:
    run = of(results, case)
    ours, stock = run["ours"]["log"], run["stock"]["log"]
    assert [entry.keys() for entry in ours] == [entry.keys() for entry in stock]
    bound = tolerance(run)
    for key, value in stock[0].items():
        assert ours[0][key] == pytest.approx(value, rel=bound, abs=bound), key
    for key, value in stock[1].items():  # Adam amplifies the rounding of small gradients
        assert ours[1][key] == pytest.approx(value, rel=100 * bound, abs=100 * bound), key


@every_case
def test_both_ranks_hold_the_same_gradient_and_weights(results: Results, case: str) -> None:
    first, second = of(results, case, 0)["ours"], of(results, case, 1)["ours"]
    assert all(torch.equal(a, b) for a, b in zip(first["gradients"], second["gradients"], strict=True))
    assert all(torch.equal(value, second["weights"][name]) for name, value in first["weights"].items())


@pytest.mark.parametrize(
    "case", [name for name, (settings, _, _) in CASES.items() if "use_adaptive_entropy" in settings]
)
def test_the_adaptive_coefficient_follows_stocks_for_five_steps(results: Results, case: str) -> None:
    run = of(results, case)
    steps = [[entry["entropy_coef"] for entry in run[who]["log"][:-1]] for who in ("ours", "stock")]
    assert len(steps[0]) == 5
    assert steps[0] == steps[1]
    assert len(set(steps[1])) > 1, "the case must move the coefficient"
    assert run["ours"]["world_entropy"] == pytest.approx(run["stock"]["world_entropy"], rel=1e-5)


def test_a_rank_of_tiny_rows_runs_few_tokens_in_passes_of_its_own(results: Results) -> None:
    """The cases are what they claim: the ranks' forwards differ."""
    long, tiny = (of(results, "a rank of tiny rows", rank)["ours"]["forwards"] for rank in range(2))
    assert sum(tiny) < sum(long) / 3
    uneven = [of(results, "grpo, packed", rank)["ours"]["forwards"] for rank in range(2)]
    assert uneven[0] != uneven[1]


@pytest.mark.parametrize("case", ["grpo, packed", "bnpo with an entropy bonus", "adaptive entropy", "all-masked rows"])
def test_no_rank_waits_for_a_backward_of_another(results: Results, case: str) -> None:
    """The ranks meet in every call of the loss. One that called it more often in a pass would wait for the next pass
    of the other before it could start its own backward, and the two would take turns."""
    first, second = (of(results, case, rank)["ours"]["events"] for rank in range(2))
    assert first.count("backward") > 4 * CASES[case][0].get("max_steps", 2)
    assert first == second


@every_case
def test_no_pass_exceeds_the_budget_on_either_rank(results: Results, case: str) -> None:
    budget = CASES[case][1]["max_tokens_per_microbatch"]
    if budget == 1 or CASES[case][0].get("num_iterations", 1) > 1:
        pytest.skip("single rows exceed this budget")
    for rank in range(2):
        run = of(results, case, rank)["ours"]
        assert max(run["forwards"]) <= budget


def test_a_skipped_pass_is_skipped_on_both_ranks_and_its_metrics_are_logged(results: Results) -> None:
    for rank in range(2):
        run = of(results, "reuse of old log-probs", rank)
        assert "sampling/importance_sampling_ratio/mean" in run["ours"]["log"][0]
        assert sum(run["ours"]["forwards"]) < sum(run["stock"]["forwards"])

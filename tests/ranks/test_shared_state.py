"""State that several ranks share: foreign writes, skipped steps, resuming at another world size, memory."""

from __future__ import annotations

from pathlib import Path

import failure_programs as programs
import pytest
import torch
from adamw_programs import LEARNING_RATE
from rank_launcher import run_ranks

from trl_budget.sharding import HostMemoryPlan, assign_owners

SHARDINGS = ("sharded", "rank0", "replicated")
MIB = 2**20


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_what_is_written_on_every_rank_is_adopted_and_on_one_rank_refused(tmp_path: Path, sharding: str) -> None:
    for result in run_ranks(programs.writes, 2, tmp_path, sharding):
        assert result["adopted"] == ["parameter 0 of shape (40, 30)"]
        assert torch.equal(result["master"].bfloat16(), torch.full((40, 30), 0.5).bfloat16())
        assert torch.equal(result["set"], torch.full((7,), 1.001))
        assert torch.equal(result["cast"], torch.full((7,), 1.001).bfloat16())
        assert result["late"][0] == "SettingsError" and "clip_grad_norm_" in result["late"][1]
        kind, message, _ = result["one"]
        assert kind == "SettingsError" and "differs between ranks 0 and 1" in message


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(tmp_path: Path, sharding: str) -> None:
    twins = programs.parameters_of()
    stock = torch.optim.AdamW(twins, lr=LEARNING_RATE, fused=True)
    for twin, gradient in zip(twins, programs.same_gradients(twins, 1), strict=True):
        twin.grad = gradient
    norms = [torch.nn.utils.clip_grad_norm_(twins[:1], 0.1), torch.nn.utils.clip_grad_norm_(twins, 1.0)]
    stock.step()
    for result in run_ranks(programs.skips, 2, tmp_path, sharding):
        assert result["norm"].isinf() and result["skipped"] == 1 and not any(result["moved"])
        assert torch.equal(torch.stack(result["norms"]), torch.stack(norms))
        assert all(torch.equal(a, b.detach()) for a, b in zip(result["weights"], twins, strict=True))


def test_a_state_moves_between_world_sizes_without_losing_a_bit(tmp_path: Path) -> None:
    saved = tmp_path / "optimizer.pt"
    twins = [torch.nn.Parameter(p.detach().float()) for p in programs.parameters_of(dtype=torch.bfloat16)]
    stock = torch.optim.AdamW(twins, lr=LEARNING_RATE, fused=True)
    runs = [(1, range(0, 2), "auto"), (2, range(2, 4), "sharded"), (4, range(4, 5), "rank0"), (1, range(5, 6), "auto")]
    for num_ranks, steps, sharding in [*runs, (2, range(6, 7), "replicated")]:
        for step in steps:
            for twin, gradient in zip(twins, programs.same_gradients(twins, step), strict=True):
                twin.grad = gradient.bfloat16().float()
            stock.step()
        for result in run_ranks(programs.resume, num_ranks, tmp_path, saved, steps, sharding):
            for master, weight, twin in zip(result["masters"], result["weights"], twins, strict=True):
                assert torch.equal(master, twin.detach()), f"{num_ranks} ranks, {steps}"
                assert torch.equal(weight, twin.detach().bfloat16())


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_predicted_host_memory_is_what_is_mapped_and_what_the_kernel_counts(tmp_path: Path, sharding: str) -> None:
    """8.4 M elements on 2 ranks: 168 MB, replicated 268 MB; one fp32 copy too many would be 32 MiB. Each rank has
    3 to 5 MiB of heap beside them, and the heap may keep freed tensors of its own: they are of a quarter MiB at most.
    """
    first, second = run_ranks(programs.memory, 2, tmp_path, sharding, 256, 128, start_method="spawn")
    assert first["predicted"] == first["elements"] * (32 if sharding == "replicated" else 20)
    # Replicated, a rank maps its own state and the accumulators of both.
    assert first["mapped"] == second["mapped"] == pytest.approx(20 * first["elements"], abs=64 * 1024)
    beside = first["pss"] + second["pss"] - first["predicted"]
    assert -MIB <= beside <= 16 * MIB, f"{beside / MIB:.1f} MiB beside the plan"


def test_the_plan_of_a_4b_policy() -> None:
    elements = 4_000_000_000
    one = HostMemoryPlan(elements)
    assert one.node_bytes == 16 * elements <= 18 * elements + 2**30
    for num_ranks in (2, 4, 8):
        for sharding in ("sharded", "rank0"):
            plan = HostMemoryPlan(elements, num_ranks, sharding)
            assert plan.node_bytes == one.node_bytes + 4 * elements * (num_ranks - 1)
            assert sum(map(plan.owned_bytes, range(num_ranks))) == 12 * elements
    assert HostMemoryPlan(elements, num_in_place=elements).node_bytes == 8 * elements
    total, *ranks = HostMemoryPlan(elements, 2).table().splitlines()[-3:]
    assert "sum, 20 bytes per parameter" in total
    assert ["of it masters and moments of rank" in line for line in ranks] == [True, True]
    for num_ranks in (1, 2, 4, 8):
        plan = HostMemoryPlan(elements, num_ranks, staging_bytes=512 * MIB)
        assert plan.node_bytes <= (18 + 4 * (num_ranks - 1)) * elements + 2**30


def test_owners_are_balanced_and_do_not_depend_on_anything_else() -> None:
    generator = torch.Generator().manual_seed(0)
    for num_ranks in (1, 2, 3, 8):
        sizes = torch.randint(1, 10_000, (200,), generator=generator).tolist()
        owners = assign_owners(sizes, num_ranks)
        load = [sum(n for n, o in zip(sizes, owners, strict=True) if o == rank) for rank in range(num_ranks)]
        assert max(load) - min(load) <= max(sizes)
        assert owners == assign_owners(list(sizes), num_ranks)


def test_without_anonymous_files_shared_memory_is_used_and_leaves_no_name(tmp_path: Path) -> None:
    twins = programs.parameters_of()
    stock = torch.optim.AdamW(twins, lr=LEARNING_RATE, fused=True)
    for twin, gradient in zip(twins, programs.same_gradients(twins, 0), strict=True):
        twin.grad = gradient
    stock.step()
    for result in run_ranks(programs.shares_by_name, 2, tmp_path):
        assert result["names"] == []
        assert all(torch.equal(a, b.detach()) for a, b in zip(result["weights"], twins, strict=True))

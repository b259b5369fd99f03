"""A need that the machine cannot meet is refused before anything is built."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trl_budget import HostAdamW, HostMemoryError
from trl_budget.master_weights import capture_master_weights
from trl_budget.pinned import available_host_memory, check_host_memory, container_headroom, host_slab_bytes


def test_more_than_there_is_is_refused_with_the_figures_and_what_to_set() -> None:
    with pytest.raises(HostMemoryError) as error:
        check_host_memory(64 * 2**30, "the optimizer state", available=32 * 2**30)
    for part in ("64.00 GiB", "32.00 GiB can be had", "ulimit -l", "optimizer_placement='device'", "ALLOW_OVERCOMMIT"):
        assert part in str(error.value)


def test_the_override_turns_the_refusal_into_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRL_BUDGET_ALLOW_OVERCOMMIT", "1")
    check_host_memory(64 * 2**30, "the optimizer state", available=32 * 2**30)
    assert "64.00 GiB" in caplog.text


def test_a_model_that_cannot_fit_is_refused_before_it_is_changed() -> None:
    numel = available_host_memory() // 12 + 1
    with torch.device("meta"):
        shape = torch.empty(numel, dtype=torch.float32)
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(shape)
    before = host_slab_bytes()
    with pytest.raises(HostMemoryError):
        capture_master_weights(model, pin=False)
    assert model.weight.dtype == torch.float32
    assert host_slab_bytes() == before


def test_an_optimizer_that_cannot_fit_is_refused_before_any_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl_budget.pinned.available_host_memory", lambda: 1000)
    before = host_slab_bytes()
    with pytest.raises(HostMemoryError, match="the optimizer state"):
        HostAdamW([torch.nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))])
    assert host_slab_bytes() == before


@pytest.mark.parametrize(("placement", "staging"), [("device", 0), ("host", 16 * 2**20)])
def test_staging_is_part_of_the_need_that_is_checked(
    monkeypatch: pytest.MonkeyPatch, placement: str, staging: int
) -> None:
    need, before = 16 * 2**20 + staging, host_slab_bytes()
    parameters = [torch.nn.Parameter(torch.zeros(2**20, dtype=torch.bfloat16))]
    monkeypatch.setattr("trl_budget.pinned.available_host_memory", lambda: need - 1)
    with pytest.raises(HostMemoryError, match="gradient staging"):
        HostAdamW(parameters, gradient_placement=placement)
    monkeypatch.setattr("trl_budget.pinned.available_host_memory", lambda: need)
    optimizer = HostAdamW(parameters, gradient_placement=placement)
    assert host_slab_bytes() - before == need
    assert optimizer.gradient_placement == placement


@pytest.mark.parametrize(
    ("limit", "cached", "expected"),
    [("1000", 0, 400), ("1000", 250, 650), ("500", 0, 0), ("max", 0, None)],
    ids=["nothing cached", "a file was read", "over the limit", "no limit"],
)
def test_a_container_leaves_its_limit_less_what_cannot_be_reclaimed(
    tmp_path: Path, limit: str, cached: int, expected: int | None
) -> None:
    (tmp_path / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.current").write_text("600\n")
    (tmp_path / "memory.stat").write_text(f"anon 300\ninactive_file {cached}\nslab 5\n")
    assert container_headroom(tmp_path, "memory.max", "memory.current", "inactive_file") == expected


def test_no_cgroup_means_no_limit(tmp_path: Path) -> None:
    assert container_headroom(tmp_path, "memory.max", "memory.current", "inactive_file") is None

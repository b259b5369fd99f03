"""A need that the machine cannot meet is refused before anything is built."""

from __future__ import annotations

import pytest
import torch

from trl_budget import HostAdamW, HostMemoryError
from trl_budget.master_weights import capture_master_weights
from trl_budget.pinned import available_host_memory, check_host_memory, host_slab_bytes


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

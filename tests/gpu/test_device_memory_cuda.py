"""The budget on a real card: what torch's allocator, CUDA and the fraction do with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from trl_budget.device_memory import DeviceMemoryBudget, read_card_memory
from trl_budget.errors import DeviceMemoryError

pytestmark = pytest.mark.gpu
GIB = 2**30


@pytest.fixture
def device() -> Iterator[torch.device]:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.zeros(1, device=device)
    torch.cuda.empty_cache()
    yield device
    torch.cuda.set_per_process_memory_fraction(1.0, device)
    torch.cuda.empty_cache()


def allocate(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cuda")


def make_budget(device: torch.device, room: int) -> DeviceMemoryBudget:
    """A budget that leaves `room` bytes beside what is on the card."""
    budget = read_card_memory(device, 0).used + room
    return DeviceMemoryBudget(budget, device, unmapped_bytes=lambda: 0)


def test_torch_allocates_up_to_the_budget_and_not_beyond(device: torch.device) -> None:
    budget = make_budget(device, 2 * GIB)
    budget.begin("update")
    kept = allocate(2 * GIB - 64 * 2**20)
    with pytest.raises(torch.OutOfMemoryError, match="allowed"):
        allocate(128 * 2**20)
    budget.check("update", {"kept": kept.nbytes})
    assert 2 * GIB - 64 * 2**20 <= budget.peaks["update"] <= budget.budget


def test_cached_blocks_are_freed_before_the_budget_refuses(device: torch.device) -> None:
    budget = make_budget(device, 2 * GIB)
    budget.begin("update")
    for nbytes in (GIB + 2**21, GIB + 2**26, GIB + 2**27):
        allocate(nbytes)  # freed at once, and cached by torch
    budget.check("update", {})


def test_memory_that_the_cap_did_not_stop_is_a_breach(device: torch.device) -> None:
    budget = make_budget(device, GIB)
    budget.begin("update")
    budget.lift()
    kept = allocate(GIB + 64 * 2**20)
    with pytest.raises(DeviceMemoryError, match="In phase 'update'"):
        budget.check("update", {"kept": kept.nbytes})


def test_lifting_the_cap_gives_the_card_back(device: torch.device) -> None:
    budget = make_budget(device, GIB)
    budget.begin("update")
    budget.lift()
    assert torch.cuda.get_per_process_memory_fraction(device) == 1.0
    allocate(2 * GIB)


def test_a_device_without_an_index_is_the_current_one(device: torch.device) -> None:
    budget = make_budget(torch.device("cuda"), GIB)
    budget.begin("update")
    assert torch.cuda.get_per_process_memory_fraction(device) < 1.0


def test_cuda_and_torch_agree_on_the_size_of_the_card(device: torch.device) -> None:
    _, total = torch.cuda.mem_get_info(device)
    assert abs(total - torch.cuda.get_device_properties(device).total_memory) < 64 * 2**20

"""Parking on a card: what `mem_get_info` sees, growth over cycles, and training that does not change by a bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from trl_budget import HostAdamW
from trl_budget.errors import ParkedError
from trl_budget.parking import ParkedWeights
from trl_budget.pinned import host_slab_bytes
from trl_budget.residency import Phase, Residency

pytestmark = pytest.mark.gpu
MIB = 2**20
LAYERS, WIDTH = 12, 4096  # 0.2 billion parameters


@pytest.fixture(autouse=True)
def _clean_card() -> Iterator[None]:
    torch.zeros(1, device="cuda")
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


def make_model(layers: int = LAYERS, width: int = WIDTH) -> nn.Sequential:
    """A bf16 stack with a tied pair, norms and a buffer, on the card."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, dtype=torch.bfloat16, device="cuda") for _ in range(layers)))
    model[-1].weight = model[0].weight
    model.append(nn.LayerNorm(width, dtype=torch.bfloat16, device="cuda"))
    model.register_buffer("positions", torch.arange(1000, device="cuda"))
    return model


def used_bytes() -> int:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_a_parked_policy_holds_less_than_64_mib_of_the_card() -> None:
    used, reserved, pinned = used_bytes(), torch.cuda.memory_reserved(), host_slab_bytes(pinned_only=True)
    weights = ParkedWeights(make_model(), "policy")
    weight_bytes = weights.device_bytes
    assert weight_bytes > 350 * MIB
    residency = Residency([weights])
    residency.enter(Phase.ROLLOUT)
    assert used_bytes() - used < 64 * MIB
    assert torch.cuda.memory_reserved() - reserved < 64 * MIB
    assert weights.device_bytes == 0
    assert host_slab_bytes(pinned_only=True) - pinned == weights.host_bytes >= weight_bytes
    residency.enter(Phase.UPDATE)
    assert weights.device_bytes == weight_bytes
    assert residency.rows()[-1].owner_bytes == {"policy": weight_bytes}
    assert residency.rows()[-1].use.used_bytes >= weight_bytes


def test_every_value_comes_back_and_the_host_copy_is_readable_meanwhile() -> None:
    model = make_model()
    expected = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    weights = ParkedWeights(model, "policy")
    weights.park()
    for name, tensor in weights.host_tensors():
        assert tensor.device.type == "cpu" and tensor.is_pinned()
        assert torch.equal(tensor, expected[name]), name
    with pytest.raises(ParkedError):
        model(torch.ones(1, WIDTH, dtype=torch.bfloat16, device="cuda"))
    weights.unpark()
    assert all(torch.equal(tensor.cpu(), expected[name]) for name, tensor in model.state_dict().items())
    assert model[-2].weight is model[0].weight


def test_work_that_another_stream_has_queued_ends_before_the_weights_leave() -> None:
    model = make_model()
    expected = [p.detach().cpu() for p in model.parameters()]
    weights = ParkedWeights(model, "policy")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        torch.cuda._sleep(200_000_000)
        sums = [p.float().sum() for p in model.parameters()]
        for p in model.parameters():
            p.mul_(2)
    weights.park()
    torch.cuda.empty_cache()
    filler = torch.full((128 * MIB,), float("nan"), device="cuda")
    side.synchronize()
    assert all(bool(total.isfinite()) for total in sums)
    del filler
    weights.unpark()
    assert all(torch.equal(p.detach().cpu(), 2 * q) for p, q in zip(model.parameters(), expected, strict=True))


def test_ten_cycles_grow_neither_the_card_nor_the_host() -> None:
    weights = ParkedWeights(make_model(), "policy")
    residency = Residency([weights])
    used: dict[Phase, list[int]] = {Phase.ROLLOUT: [], Phase.UPDATE: []}
    reserved: dict[Phase, list[int]] = {Phase.ROLLOUT: [], Phase.UPDATE: []}
    host = []
    for _ in range(10):
        for phase in used:
            residency.enter(phase)
            used[phase].append(used_bytes())
            reserved[phase].append(torch.cuda.memory_reserved())
        host.append(host_slab_bytes())
    assert len(set(host)) == 1
    for phase in used:
        assert max(reserved[phase]) == reserved[phase][0]
        assert max(used[phase]) - used[phase][0] <= 4 * MIB  # the driver's own bookkeeping


def test_a_card_that_is_full_leaves_the_policy_parked_and_lets_it_come_later() -> None:
    model = make_model()
    expected = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    weights = ParkedWeights(model, "policy")
    weight_bytes = weights.device_bytes
    residency = Residency([weights])
    residency.enter(Phase.ROLLOUT)
    limit = (torch.cuda.memory_reserved() + weight_bytes // 2) / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(limit)
    try:
        with pytest.raises(ParkedError, match=r"policy's .* phase 'update'") as error:
            residency.enter(Phase.UPDATE)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert isinstance(error.value.__cause__, torch.OutOfMemoryError)
    assert weights.is_parked and weights.device_bytes == 0
    residency.enter(Phase.UPDATE)
    assert all(torch.equal(tensor.cpu(), expected[name]) for name, tensor in model.state_dict().items())


def trained(*, is_parked_between: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    model = make_model(layers=4, width=1024)
    optimizer = HostAdamW(model.parameters(), lr=1e-2)
    residency = Residency([ParkedWeights(model, "policy")])
    generator = torch.Generator("cuda").manual_seed(1)
    for _ in range(5):
        if is_parked_between:
            residency.enter(Phase.ROLLOUT)
            residency.enter(Phase.UPDATE)
            assert optimizer.adopt_external_writes() == []
        inputs = torch.randn(16, 1024, device="cuda", generator=generator).bfloat16()
        model(inputs).square().mean().backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    weights = [p.detach().cpu() for p in model.parameters()]
    return weights, [optimizer.state[p]["master_weights"].clone() for p in model.parameters()]


def test_training_with_host_adamw_is_unchanged_by_parking() -> None:
    parked, parked_masters = trained(is_parked_between=True)
    stayed, stayed_masters = trained(is_parked_between=False)
    for ours, expected in zip([*parked, *parked_masters], [*stayed, *stayed_masters], strict=True):
        assert torch.equal(ours, expected)

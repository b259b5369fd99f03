"""HostAdamW over CUDA parameters: copies, streams, page-locking. Exact against torch on the host tensors."""

from __future__ import annotations

import gc
import io

import pytest
import torch

from trl_budget import HostAdamW
from trl_budget.pinned import HostSlab, host_slab_bytes
from trl_budget.streams import DOWNLOAD_CHUNK_BYTES

pytestmark = pytest.mark.gpu
SIZES = (1, 17, 1025, 3 * 2**21 + 5, DOWNLOAD_CHUNK_BYTES // 2 + 3)


def cuda_parameters(dtype: torch.dtype = torch.bfloat16) -> list[torch.nn.Parameter]:
    generator = torch.Generator("cuda").manual_seed(0)
    return [torch.nn.Parameter(torch.randn(n, device="cuda", generator=generator).to(dtype)) for n in SIZES]


def set_gradients(parameters: list[torch.nn.Parameter], seed: int) -> list[torch.Tensor]:
    """Gradients through a real backward; returns them in fp32 on the host."""
    generator = torch.Generator("cuda").manual_seed(seed)
    gradients = [torch.randn(p.shape, device="cuda", generator=generator).to(p.dtype) for p in parameters]
    torch.autograd.backward(parameters, gradients)
    return [g.float().cpu() for g in gradients]


def test_auto_streams_the_gradients_of_cuda_parameters() -> None:
    assert HostAdamW(cuda_parameters()).gradient_placement == "host"


@pytest.mark.parametrize("gradient_placement", ["device", "host"])
@pytest.mark.parametrize("implementation", ["fused", "foreach", "loop"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("max_norm", [1.0, 1e9], ids=["clipping binds", "clipping does not bind"])
def test_host_state_equals_torch_adamw_on_the_same_tensors(
    implementation: str, dtype: torch.dtype, max_norm: float, gradient_placement: str
) -> None:
    parameters = cuda_parameters(dtype)
    reference = [torch.nn.Parameter(p.detach().float().cpu()) for p in parameters]
    kind = {"fused": implementation == "fused", "foreach": implementation == "foreach"}
    torch_adamw = torch.optim.AdamW(reference, lr=1e-2, weight_decay=0.1, **kind)
    settings = {"implementation": implementation, "gradient_placement": gradient_placement}
    ours = HostAdamW(parameters, lr=1e-2, weight_decay=0.1, **settings)
    for step in range(5 if implementation == "fused" else 2):
        for p, g in zip(reference, set_gradients(parameters, step), strict=True):
            p.grad = g
        assert all(p.grad is None for p in parameters)
        norm = ours.clip_grad_norm_(max_norm)
        expected = sum(q.grad.double().square().sum() for q in reference).sqrt()
        assert abs(norm.double() - expected) / expected < 4e-6  # torch's own, on the CPU, is off by 2e-3
        torch.nn.utils.clip_grads_with_norm_(reference, max_norm, norm)
        ours.step()
        torch_adamw.step()
        for p, q in zip(parameters, reference, strict=True):
            assert torch.equal(ours.state[p]["master_weights"], q.detach())
            assert torch.equal(p.detach().cpu(), q.detach().to(dtype))
    for p, q in zip(parameters, reference, strict=True):
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(ours.state[p][key], torch_adamw.state[q][key])


def staging_slabs(optimizer: HostAdamW) -> list[HostSlab]:
    if optimizer.gradient_placement == "host":
        return [optimizer._gradients.collector._slab]
    return [buffer.slab for engine in optimizer._engines.values() for buffer in engine._download_ring]


@pytest.mark.parametrize("gradient_placement", ["device", "host"])
def test_accumulators_are_exact_when_staging_was_poisoned(gradient_placement: str) -> None:
    """Long copies and little arithmetic: a consumer that ran ahead of its copy would read NaN."""
    parameters = cuda_parameters()
    optimizer = HostAdamW(parameters, gradient_placement=gradient_placement)
    set_gradients(parameters, 0)
    expected = [optimizer.gradient(p).clone() for p in parameters]
    for repeat in range(1, 6):
        optimizer._gradients.collector.wait()
        for slab in staging_slabs(optimizer):
            slab.view(torch.float32).fill_(float("nan"))
        for total, gradient in zip(expected, set_gradients(parameters, repeat), strict=True):
            total += gradient
    for p, total in zip(parameters, expected, strict=True):
        assert torch.equal(optimizer.gradient(p), total)


def test_a_forward_right_after_the_step_sees_the_new_weights_100_times() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2**26, device="cuda", dtype=torch.bfloat16))
    optimizer = HostAdamW([parameter], lr=1.0, betas=(0.0, 0.0), eps=0.0, weight_decay=0.0)
    side = torch.cuda.Stream()
    for step in range(1, 101):
        parameter.grad = torch.full_like(parameter, -1.0)
        optimizer.step()
        on_default = parameter.detach()[-4096:].clone()
        with torch.cuda.stream(side):
            on_side = parameter.detach()[:4096].clone()
        expected = torch.full((4096,), float(step)).to(torch.bfloat16)
        assert torch.equal(on_default.cpu(), expected)
        side.synchronize()
        assert torch.equal(on_side.cpu(), expected)


def test_saving_right_after_the_step_saves_the_stepped_state() -> None:
    parameters = cuda_parameters()
    optimizer = HostAdamW(parameters, lr=1e-2)
    set_gradients(parameters, 0)
    optimizer.step()
    file = io.BytesIO()
    torch.save({"weights": [p.detach() for p in parameters], "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, map_location="cpu", weights_only=True)
    for index, weight in enumerate(loaded["weights"]):
        master = loaded["optimizer"]["state"][index]["master_weights"]
        assert torch.equal(weight, master.to(torch.bfloat16))
        assert torch.equal(master, optimizer.state[parameters[index]]["master_weights"])


def test_state_is_page_locked_and_freed_with_the_optimizer() -> None:
    gc.collect()
    before = host_slab_bytes(pinned_only=True)
    parameters = cuda_parameters()
    optimizer = HostAdamW(parameters)
    set_gradients(parameters, 0)
    optimizer.step()
    for key in ("master_weights", "exp_avg", "exp_avg_sq"):
        assert all(optimizer.state[p][key].is_pinned() for p in parameters)
    assert host_slab_bytes(pinned_only=True) > before
    address = optimizer.state[parameters[-1]]["exp_avg"].data_ptr()
    del optimizer
    gc.collect()
    assert host_slab_bytes(pinned_only=True) == before
    with open("/proc/self/maps") as maps:
        ranges = [line.split()[0].split("-") for line in maps]
    assert not any(int(start, 16) <= address < int(end, 16) for start, end in ranges), "the slab is still mapped"


def test_loading_a_state_keeps_page_locking_and_refreshes_the_device() -> None:
    parameters = cuda_parameters()
    optimizer = HostAdamW(parameters, lr=1e-2)
    set_gradients(parameters, 0)
    optimizer.step()
    saved = {k: {n: v.clone() for n, v in e.items()} for k, e in optimizer.state_dict()["state"].items()}
    groups = optimizer.state_dict()["param_groups"]
    set_gradients(parameters, 1)
    optimizer.step()
    optimizer.load_state_dict({"state": saved, "param_groups": groups})
    for index, p in enumerate(parameters):
        assert optimizer.state[p]["exp_avg"].is_pinned()
        assert torch.equal(optimizer.state[p]["master_weights"], saved[index]["master_weights"])
        assert torch.equal(p.detach().cpu(), saved[index]["master_weights"].to(torch.bfloat16))


def test_writes_through_data_are_adopted() -> None:
    parameters = cuda_parameters()
    optimizer = HostAdamW(parameters, lr=0.0, weight_decay=0.0)
    parameters[3].data.mul_(2.0)
    written = parameters[3].detach().cpu()
    set_gradients(parameters, 0)
    optimizer.step()
    assert torch.equal(parameters[3].detach().cpu(), written)
    assert torch.equal(optimizer.state[parameters[3]]["master_weights"].to(torch.bfloat16), written)


def test_a_gradient_that_is_not_contiguous_is_read_right() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4096, 2048, device="cuda", dtype=torch.bfloat16))
    optimizer = HostAdamW([parameter])
    for repeat in range(5):
        generator = torch.Generator("cuda").manual_seed(repeat)
        parameter.grad = torch.randn(2048, 4096, device="cuda", generator=generator).to(torch.bfloat16).t()
        expected = parameter.grad.float().cpu()
        assert torch.equal(optimizer.gradient(parameter), expected)
        optimizer.zero_grad()


def test_page_locked_slabs_are_not_copied_by_fork() -> None:
    parameters = cuda_parameters()
    optimizer = HostAdamW(parameters)
    address = optimizer.state[parameters[-1]]["exp_avg"].data_ptr()
    with open("/proc/self/smaps") as smaps:
        flags: dict[int, str] = {}
        start = stop = 0
        for line in smaps:
            head = line.split()[0]
            if "-" in head and not head.endswith(":"):
                start, stop = (int(part, 16) for part in head.split("-"))
            if head == "VmFlags:" and start <= address < stop:
                flags[start] = line
    assert " dc" in next(iter(flags.values()))

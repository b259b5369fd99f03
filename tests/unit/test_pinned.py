"""Slabs: every parameter gets aligned, zeroed memory of its own, in slabs of a bounded size made when needed."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Parameter

from trl_budget import pinned
from trl_budget.errors import HostMemoryError
from trl_budget.pinned import HostSlab, ParameterSlabs, check_host_memory, host_slab_bytes

ALIGNMENT_BYTES = 256
shapes = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), max_size=12)
slab_sizes = st.sampled_from([256, 1024, 4096, 65536, 2**30])


def make(shapes: list[tuple[int, ...]], slab_bytes: int = 2**30) -> tuple[ParameterSlabs, list[Parameter]]:
    parameters = [Parameter(torch.empty(shape, dtype=torch.bfloat16)) for shape in shapes]
    slabs = ParameterSlabs("test", pin=False, slab_bytes=slab_bytes)
    for _ in slabs.extend(parameters):
        pass
    return slabs, parameters


@settings(max_examples=30, deadline=None, derandomize=True)
@given(shapes=shapes, slab_bytes=slab_sizes)
def test_views_are_zeroed_aligned_and_of_the_parameters_shape(shapes: list[tuple[int, ...]], slab_bytes: int) -> None:
    slabs, parameters = make(shapes, slab_bytes)
    assert len(slabs) == len(parameters)
    for parameter, shape in zip(parameters, shapes, strict=True):
        view = slabs[parameter]
        assert view.shape == shape and view.dtype == torch.float32 and view.is_contiguous()
        assert view.numel() == 0 or view.data_ptr() % ALIGNMENT_BYTES == 0
        assert not bool(view.any())


@settings(max_examples=30, deadline=None, derandomize=True)
@given(shapes=shapes, slab_bytes=slab_sizes)
def test_views_do_not_overlap(shapes: list[tuple[int, ...]], slab_bytes: int) -> None:
    slabs, parameters = make(shapes, slab_bytes)
    for number, parameter in enumerate(parameters):
        slabs[parameter].fill_(number)
    for number, parameter in enumerate(parameters):
        assert bool((slabs[parameter] == number).all())


@settings(max_examples=30, deadline=None, derandomize=True)
@given(shapes=shapes, slab_bytes=slab_sizes)
def test_a_slab_is_no_larger_than_asked_unless_one_parameter_is(
    shapes: list[tuple[int, ...]], slab_bytes: int
) -> None:
    slabs, _ = make(shapes, slab_bytes)
    largest = max((4 * math.prod(shape) for shape in shapes), default=0)
    padded = -(-largest // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    assert all(slab.nbytes <= max(slab_bytes, padded) for slab in slabs.slabs)
    assert slabs.nbytes >= 4 * sum(math.prod(shape) for shape in shapes)


def test_small_parameters_share_a_slab() -> None:
    slabs, _ = make([(64,)] * 10, slab_bytes=5 * ALIGNMENT_BYTES)
    assert [slab.nbytes for slab in slabs.slabs] == [5 * ALIGNMENT_BYTES] * 2


def test_a_slab_is_made_only_when_its_first_view_is_asked_for() -> None:
    parameters = [Parameter(torch.empty(64)) for _ in range(4)]
    slabs = ParameterSlabs("test", pin=False, slab_bytes=2 * ALIGNMENT_BYTES)
    views = slabs.extend(parameters)
    counts = [len(slabs.slabs)]
    for _ in views:
        counts.append(len(slabs.slabs))
    assert counts == [0, 1, 1, 2, 2]


def test_extending_again_keeps_the_views_handed_out() -> None:
    slabs, [first] = make([(17,)])
    address = slabs[first].data_ptr()
    slabs[first].fill_(3)
    second = Parameter(torch.empty(17))
    dict(slabs.extend([second]))
    assert slabs[first].data_ptr() == address
    assert bool((slabs[first] == 3).all()) and not bool(slabs[second].any())


def test_a_view_stays_readable_when_its_slab_is_gone() -> None:
    slabs, [parameter] = make([(1025,)])
    view = slabs[parameter].fill_(7)
    del slabs
    assert bool((view == 7).all())


@pytest.mark.parametrize("pin", [False, True])
def test_live_bytes_count_slabs_until_they_are_collected(pin: bool) -> None:
    every, pinned = host_slab_bytes(), host_slab_bytes(pinned_only=True)
    slab = HostSlab(8192, pin=pin, purpose="test", register=lambda address, nbytes: 0)
    assert host_slab_bytes() == every + 8192
    assert host_slab_bytes(pinned_only=True) == pinned + (8192 if pin else 0)
    del slab
    assert (host_slab_bytes(), host_slab_bytes(pinned_only=True)) == (every, pinned)


def kernel_flags(address: int) -> set[str]:
    """Of the mapping at `address`, from the kernel."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if (bounds := re.match("([0-9a-f]+)-([0-9a-f]+) ", line)) is not None:
            found = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif found and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    raise AssertionError(f"{address:x} is not mapped")


@pytest.mark.parametrize(
    ("pin", "is_cuda", "is_kept"), [(True, False, True), (False, True, True), (False, False, False)]
)
def test_where_cuda_runs_no_worker_gets_the_pages_whether_locked_or_not(
    monkeypatch: pytest.MonkeyPatch, pin: bool, is_cuda: bool, is_kept: bool
) -> None:
    """A worker that did would keep the old page of every weight that is stepped: the state twice."""
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: is_cuda)
    slab = HostSlab(2**20, pin=pin, purpose="test", register=lambda address, nbytes: 0)
    slab.storage.fill_(1)
    assert ("dc" in kernel_flags(slab.storage.data_ptr())) == is_kept


@pytest.mark.parametrize(
    ("release", "has_clause"), [("5.15.167.4-microsoft-standard-WSL2", True), ("6.8.0-45-generic", False)]
)
def test_a_refusal_to_page_lock_names_the_field_and_wsl2_where_it_is(
    monkeypatch: pytest.MonkeyPatch, release: str, has_clause: bool
) -> None:
    monkeypatch.setattr("os.uname", lambda: SimpleNamespace(release=release))
    with pytest.raises(HostMemoryError) as error:
        HostSlab(8192, pin=True, purpose="exp_avg", register=lambda address, nbytes: 2)
    assert "CUDA error 2" in str(error.value)
    assert "set pin_host_memory=False (HostAdamW: pin_memory=False)" in str(error.value)
    assert ("WSL2" in str(error.value)) == has_clause


def test_a_refusal_for_want_of_memory_does_not_speak_of_page_locking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.uname", lambda: SimpleNamespace(release="5.15.167.4-microsoft-standard-WSL2"))
    with pytest.raises(HostMemoryError) as error:
        check_host_memory(2, "test", available=1)
    assert "pin_host_memory" not in str(error.value) and "WSL2" not in str(error.value)


class Runtime:
    """CUDA's runtime, which refuses to page-lock."""

    def __init__(self, code: int) -> None:
        self.code = code

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        return self.code


@pytest.mark.parametrize(("code", "expected"), [(0, []), (2, ["cleared"])])
def test_cudas_last_error_is_taken_back_after_a_refusal_and_only_then(
    monkeypatch: pytest.MonkeyPatch, code: int, expected: list[str]
) -> None:
    events: list[str] = []
    monkeypatch.setattr("torch.cuda.cudart", lambda: Runtime(code))
    monkeypatch.setattr(pinned, "_clear_last_cuda_error", lambda: events.append("cleared"))
    assert pinned._cuda_host_register(0, 4096) == code
    assert events == expected


def test_page_locking_is_asked_for_the_whole_slab_and_only_when_pinned() -> None:
    calls: list[tuple[int, int]] = []
    slab = HostSlab(8192, pin=True, purpose="test", register=lambda *call: calls.append(call) or 0)
    HostSlab(8192, pin=False, purpose="test", register=lambda *call: calls.append(call) or 0)
    assert calls == [(slab.view(torch.float32).data_ptr(), 8192)]

"""Storages are laid out in slabs without overlap, and the same list of sizes never needs more than it had."""

from __future__ import annotations

import gc
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_budget.errors import HostMemoryError
from trl_budget.host_room import ALIGNMENT_BYTES, HostRoom, first_fit, slab_sizes
from trl_budget.pinned import HostSlab, host_slab_bytes

sizes = st.lists(st.integers(1, 5000), max_size=20)
limits = st.sampled_from([256, 1024, 4096, 2**30])


def room(slab_bytes: int = 2**30) -> HostRoom:
    return HostRoom("test", pin=False, slab_bytes=slab_bytes)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(sizes=sizes, limit=limits)
def test_slabs_hold_the_sizes_they_were_made_for(sizes: list[int], limit: int) -> None:
    slabs = slab_sizes(sizes, limit)
    places = first_fit(sizes, slabs)
    assert places is not None
    for number, nbytes in enumerate(slabs):
        spans = sorted((s, s + size) for (slab, s), size in zip(places, sizes, strict=True) if slab == number)
        assert all(start % ALIGNMENT_BYTES == 0 for start, _ in spans)
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))
        assert spans[-1][1] <= nbytes


@settings(max_examples=50, deadline=None, derandomize=True)
@given(sizes=sizes, limit=limits)
def test_a_slab_is_above_the_limit_only_for_one_storage(sizes: list[int], limit: int) -> None:
    places = first_fit(sizes, slab_sizes(sizes, limit)) or []
    for number, nbytes in enumerate(slab_sizes(sizes, limit)):
        assert nbytes <= limit or [slab for slab, _ in places].count(number) == 1


def test_slabs_are_no_larger_than_their_storages_rounded_up() -> None:
    assert slab_sizes([1, 255, 256, 257], 2**30) == [256 + 256 + 256 + 512]


def test_a_storage_that_fits_nowhere_is_told() -> None:
    assert first_fit([256, 256], [256]) is None


def test_the_same_and_smaller_sizes_use_the_same_memory() -> None:
    kept = room(slab_bytes=1024)
    first = [view.data_ptr() for view in kept.take([700, 300, 5000, 10])]
    held = kept.nbytes
    assert [view.data_ptr() for view in kept.take([700, 300, 5000, 10])] == first
    kept.take([600, 100, 4000])
    assert kept.nbytes == held


def test_views_have_the_sizes_asked_for() -> None:
    assert [view.numel() for view in room().take([700, 1, 5000])] == [700, 1, 5000]


def test_nothing_is_taken_for_an_empty_list() -> None:
    empty = room()
    assert (empty.take([]), empty.nbytes) == ([], 0)


def test_larger_sizes_replace_the_memory() -> None:
    before = host_slab_bytes()
    kept = room()
    kept.take([1000])
    kept.take([1000, 1000])
    assert host_slab_bytes() - before == kept.nbytes == 2048


def test_memory_that_is_too_small_goes_before_larger_is_asked_for() -> None:
    before = host_slab_bytes()
    held: list[int] = []

    def allocate(nbytes: int, *, pin: bool, purpose: str) -> HostSlab:
        held.append(host_slab_bytes() - before)
        return HostSlab(nbytes, pin=pin, purpose=purpose)

    replaced = HostRoom("test", pin=False, allocate=allocate)
    replaced.take([1000])
    replaced.take([5000])
    assert held == [0, 0]


def test_a_slab_that_is_refused_after_others_leaves_none_behind() -> None:
    gc.collect()  # what the tracebacks of other tests hold
    before = host_slab_bytes()
    made: list[int] = []

    def allocate(nbytes: int, *, pin: bool, purpose: str) -> HostSlab:
        made.append(nbytes)
        if len(made) == 2:
            raise HostMemoryError("the second")
        return HostSlab(nbytes, pin=pin, purpose=purpose)

    refused = HostRoom("test", pin=False, slab_bytes=512, allocate=allocate)
    with pytest.raises(HostMemoryError):
        refused.take([512, 512])
    gc.collect()
    assert (refused.nbytes, host_slab_bytes()) == (0, before)

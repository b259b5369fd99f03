"""Spaces of the staging ring never overlap, are taken in order, and come back in any order."""

from __future__ import annotations

import random

import pytest

from trl_budget.staging_ring import ALIGNMENT_BYTES, Space, StagingRing


@pytest.mark.parametrize("seed", range(20))
def test_spaces_in_use_never_overlap_and_stay_inside(seed: int) -> None:
    generator = random.Random(seed)
    ring = StagingRing(4096)
    held: list[Space] = []
    for _ in range(500):
        space = ring.take(generator.choice([1, 255, 256, 257, 1000, 1500, 4096]))
        if space is None:
            ring.give_back(held.pop(generator.randrange(len(held))))  # a full ring holds something
            continue
        assert 0 <= space.start < space.stop <= 4096
        assert space.start % ALIGNMENT_BYTES == 0
        assert all(space.stop <= other.start or other.stop <= space.start for other in held)
        held.append(space)


def test_an_empty_ring_serves_all_of_itself() -> None:
    ring = StagingRing(1024)
    for size in (1024, 256, 1024):
        space = ring.take(size)
        assert space is not None
        ring.give_back(space)


def test_a_full_ring_has_none_left_until_the_oldest_comes_back() -> None:
    ring = StagingRing(1024)
    first, second = ring.take(512), ring.take(512)
    assert ring.take(1) is None
    ring.give_back(second)
    assert ring.take(1) is None
    ring.give_back(first)
    assert ring.take(1024) is not None


def test_the_space_before_the_oldest_is_used_when_the_end_is_too_short() -> None:
    ring = StagingRing(1024)
    first, second = ring.take(512), ring.take(256)
    ring.give_back(first)
    wrapped = ring.take(512)
    assert (wrapped.start, wrapped.stop) == (0, 512)
    assert ring.take(1) is None
    ring.give_back(second)
    assert ring.take(256).start == 512

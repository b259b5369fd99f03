"""From phase to phase on a card with a budget: what the sleeping pool lets go is there for whoever comes."""

from __future__ import annotations

import pytest
from test_device_memory import GIB, FakeCard

from trl_budget.card import Card
from trl_budget.errors import DeviceMemoryError
from trl_budget.residency import Phase

WEIGHTS = 8 * GIB
POOL = 20 * GIB  # vLLM's weights and cache
WITH_POLICY = (Phase.SCORE, Phase.UPDATE, Phase.STEP)


class Weights:
    """Takes its memory from torch's allocator, which refuses above its cap."""

    def __init__(self, name: str, nbytes: int, memory: FakeCard) -> None:
        self.name = name
        self._nbytes = nbytes
        self._memory = memory
        self.is_parked = True

    @property
    def device_bytes(self) -> int:
        return 0 if self.is_parked else self._nbytes

    def park(self) -> None:
        self._memory.reserved -= self.device_bytes
        self.is_parked = True

    def unpark(self) -> None:
        assert self._memory.allocate(self._nbytes), "torch: CUDA out of memory"
        self.is_parked = False


class CappedCard(Card):
    """24 GiB, of which contexts hold one; vLLM copies weights and sleeps with all it has."""

    def __init__(self) -> None:
        self.memory = FakeCard(139 * GIB, outside=GIB)
        self.policy = Weights("policy", WEIGHTS, self.memory)
        self.reference = Weights("reference", 3 * GIB, self.memory)
        self.policy.unpark()
        resident = {phase: frozenset({"policy"} if phase in WITH_POLICY else ()) for phase in Phase}
        super().__init__([self.policy, self.reference], resident, self.memory.budget(24 * GIB))

    def roll_out(self) -> None:
        """From the phase before to the one after, as the engine does it."""
        self.enter(Phase.ROLLOUT)
        self.memory.unmapped = 0
        assert self.memory.used == POOL + GIB
        self.memory.unmapped = POOL
        self.enter(Phase.SCORE)


@pytest.fixture
def card() -> CappedCard:
    """After vLLM's start, which makes the pool."""
    card = CappedCard()
    card.enter(Phase.START)
    assert card.memory.allocate(POOL)
    card.memory.unmapped = POOL
    card.enter(Phase.SCORE)
    return card


def test_the_policy_comes_back_beside_a_pool_that_sleeps(card: CappedCard) -> None:
    for _ in range(3):
        assert not card.policy.is_parked
        card.roll_out()
        for phase in (Phase.SCORE, Phase.UPDATE, Phase.STEP):
            card.enter(phase)
            assert card.memory.used == WEIGHTS + GIB


def test_who_was_present_before_a_rollout_comes_back_beside_the_pool(card: CappedCard) -> None:
    with card.present("reference"):
        card.roll_out()
        assert not card.reference.is_parked
    assert card.reference.is_parked


def test_the_update_may_have_what_the_policy_leaves_of_the_budget_and_no_more(card: CappedCard) -> None:
    card.roll_out()
    card.enter(Phase.UPDATE)
    assert not card.memory.allocate(15 * GIB + 2**20)
    assert card.memory.allocate(15 * GIB)


def test_a_rollout_that_is_refused_leaves_a_card_that_can_be_entered_again(
    card: CappedCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside, park = card.memory.outside, card.policy.park

    def park_and_others_come() -> None:
        park()
        card.memory.outside = 30 * GIB

    monkeypatch.setattr(card.policy, "park", park_and_others_come)
    with pytest.raises(DeviceMemoryError):
        card.enter(Phase.ROLLOUT)
    assert card.policy.is_parked
    card.memory.outside = outside
    card.enter(Phase.SCORE)
    assert not card.policy.is_parked

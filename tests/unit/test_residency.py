"""Owners leave before others come, in every phase, after failures too; the rows say what was measured."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trl_budget.errors import HostMemoryError, ParkedError, SettingsError
from trl_budget.parking import ParkedWeights
from trl_budget.residency import DEFAULT_RESIDENT, MemoryUse, Owner, Phase, Residency

GIB = 2**30
NAMES = ("policy", "reference", "reward model 0")
IN_TURN = {
    Phase.START: frozenset(),
    Phase.ROLLOUT: frozenset(),
    Phase.SCORE: frozenset({"reference", "reward model 0"}),
    Phase.UPDATE: frozenset({"policy"}),
    Phase.STEP: frozenset({"policy"}),
}


class FakeOwner:
    """Notes what really moves; refuses to come back as often as `refusals` says, half of it being there then."""

    def __init__(self, name: str, events: list[str], *, gib: float = 1) -> None:
        self.name = name
        self.is_parked = False
        self.refusals = 0
        self.refusal: BaseException = torch.OutOfMemoryError("CUDA out of memory")
        self.park_error: Exception | None = None
        self._whole = int(gib * GIB)
        self._events = events
        self.device_bytes = self._whole

    def park(self) -> None:
        if self.park_error is not None:
            raise self.park_error
        if not self.is_parked or self.device_bytes:
            self._events.append(f"{self.name} leaves")
        self.is_parked, self.device_bytes = True, 0

    def unpark(self) -> None:
        if self.refusals:
            self.refusals -= 1
            self.device_bytes = self._whole // 2
            raise self.refusal
        self._events.append(f"{self.name} comes")
        self.is_parked, self.device_bytes = False, self._whole


class Stage:
    """Three fake owners, all parked, in the phases of `IN_TURN`."""

    def __init__(self, resident: dict[Phase, frozenset[str]] | None = None) -> None:
        self.events: list[str] = []
        self.owners = {name: FakeOwner(name, self.events, gib=n + 1) for n, name in enumerate(NAMES)}
        self.residency = Residency(
            list(self.owners.values()), resident=IN_TURN if resident is None else resident, measure=self.measure
        )
        self.residency.enter(Phase.START)
        self.events.clear()

    def measure(self) -> MemoryUse:
        held = sum(owner.device_bytes for owner in self.owners.values())
        return MemoryUse(used_bytes=10 * GIB + held, allocated_bytes=held)

    @property
    def present(self) -> list[str]:
        return [name for name, owner in self.owners.items() if not owner.is_parked]


def test_by_default_the_policy_is_there_except_at_the_start_and_in_rollouts() -> None:
    assert {phase for phase, names in DEFAULT_RESIDENT.items() if names == {"policy"}} == {
        Phase.SCORE,
        Phase.UPDATE,
        Phase.STEP,
    }
    assert DEFAULT_RESIDENT[Phase.START] == DEFAULT_RESIDENT[Phase.ROLLOUT] == frozenset()


def test_all_leave_before_anybody_comes() -> None:
    stage = Stage()
    for phase in (Phase.SCORE, Phase.UPDATE, Phase.SCORE):
        stage.residency.enter(phase)
    assert stage.events == [
        *("reference comes", "reward model 0 comes"),
        *("reference leaves", "reward model 0 leaves", "policy comes"),
        *("policy leaves", "reference comes", "reward model 0 comes"),
    ]


def test_who_stays_is_not_moved() -> None:
    stage = Stage()
    stage.residency.enter(Phase.UPDATE)
    stage.events.clear()
    stage.residency.enter(Phase.STEP)
    stage.residency.enter(Phase.STEP)
    assert stage.events == []


def test_the_phase_is_the_one_entered_last() -> None:
    stage = Stage()
    stage.residency.enter(Phase.SCORE)
    assert stage.residency.phase is Phase.SCORE


# Presence


def test_present_brings_an_owner_and_sends_it_away_again() -> None:
    stage = Stage()
    with stage.residency.present("reference"):
        assert stage.present == ["reference"]
    assert stage.events == ["reference comes", "reference leaves"]


def test_present_leaves_alone_whom_the_phase_lists() -> None:
    stage = Stage()
    stage.residency.enter(Phase.UPDATE)
    stage.events.clear()
    with stage.residency.present("policy"):
        pass
    assert stage.events == []


def test_presence_of_two_owners_nests() -> None:
    stage = Stage()
    with stage.residency.present("reference"):
        with stage.residency.present("policy"):
            assert stage.present == ["policy", "reference"]
        assert stage.present == ["reference"]
    assert stage.present == []


def test_an_owner_present_twice_leaves_at_the_end_of_the_outermost() -> None:
    stage = Stage()
    with stage.residency.present("reference"):
        with stage.residency.present("reference"):
            pass
        assert stage.present == ["reference"]
    assert stage.present == []


def test_an_owner_leaves_when_the_block_fails() -> None:
    stage = Stage()
    with pytest.raises(ZeroDivisionError), stage.residency.present("reference"):
        raise ZeroDivisionError
    assert stage.present == []


def test_who_left_in_a_phase_inside_a_block_is_brought_back_until_the_block_ends() -> None:
    stage = Stage()
    with stage.residency.present("reference"):
        stage.residency.enter(Phase.ROLLOUT)
        stage.residency.restore_presences()
        assert stage.present == ["reference"]
    stage.residency.restore_presences()
    assert stage.present == []


def test_a_phase_entered_inside_a_block_decides() -> None:
    stage = Stage()
    with stage.residency.present("reference"):
        stage.residency.enter(Phase.ROLLOUT)
        assert stage.present == []
        stage.residency.enter(Phase.SCORE)
    assert stage.present == ["reference", "reward model 0"]


def test_presence_of_a_stranger_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"'critic'.*policy, reference, reward model 0"):
        Stage().residency.present("critic").__enter__()


# Failures


def test_an_owner_that_cannot_come_back_is_named_with_phase_and_bytes() -> None:
    stage = Stage()
    stage.residency.enter(Phase.ROLLOUT)
    stage.owners["reference"].refusals = 1
    with pytest.raises(ParkedError, match=r"reference's 2\.00 GiB .* phase 'score'.* out of memory") as error:
        stage.residency.enter(Phase.SCORE)
    assert isinstance(error.value.__cause__, torch.OutOfMemoryError)
    assert "10.00 GiB in use" in str(error.value)


def test_an_owner_that_came_back_in_part_leaves_again() -> None:
    stage = Stage()
    stage.owners["reward model 0"].refusals = 1
    with pytest.raises(ParkedError):
        stage.residency.enter(Phase.SCORE)
    assert stage.owners["reward model 0"].device_bytes == 0
    assert stage.present == ["reference"]


def test_an_owner_whose_coming_was_interrupted_leaves_with_the_next_phase() -> None:
    stage = Stage()
    stage.owners["policy"].refusals, stage.owners["policy"].refusal = 1, KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        stage.residency.enter(Phase.UPDATE)
    stage.residency.enter(Phase.ROLLOUT)
    assert stage.owners["policy"].device_bytes == 0


def test_all_that_must_leave_has_left_when_another_cannot_come() -> None:
    stage = Stage()
    stage.residency.enter(Phase.UPDATE)
    stage.owners["reference"].refusals = 1
    with pytest.raises(ParkedError):
        stage.residency.enter(Phase.SCORE)
    assert stage.present == []


def test_a_phase_that_failed_can_be_entered_again() -> None:
    stage = Stage()
    stage.owners["policy"].refusals = 1
    with pytest.raises(ParkedError):
        stage.residency.enter(Phase.UPDATE)
    stage.residency.enter(Phase.UPDATE)
    assert stage.present == ["policy"]


def test_a_phase_that_failed_has_no_row() -> None:
    stage = Stage()
    stage.owners["policy"].refusals = 1
    with pytest.raises(ParkedError):
        stage.residency.enter(Phase.UPDATE)
    assert [row.phase for row in stage.residency.rows()] == [Phase.START]


def test_an_owner_that_cannot_leave_keeps_the_others_out() -> None:
    stage = Stage()
    stage.residency.enter(Phase.UPDATE)
    stage.owners["policy"].park_error = HostMemoryError("no host memory")
    with pytest.raises(HostMemoryError):
        stage.residency.enter(Phase.SCORE)
    assert stage.present == ["policy"]
    assert stage.residency.phase is Phase.UPDATE


def test_presence_that_cannot_begin_leaves_the_outer_ones_intact() -> None:
    stage = Stage()
    stage.owners["policy"].refusals = 1
    with stage.residency.present("reference"):
        with pytest.raises(ParkedError), stage.residency.present("policy"):
            raise AssertionError("the block must not run")
        assert stage.present == ["reference"]
    assert stage.present == []


@pytest.mark.parametrize(
    ("resident", "says"),
    [
        ({**IN_TURN, Phase.SCORE: frozenset({"critic"})}, "critic"),
        ({phase: names for phase, names in IN_TURN.items() if phase is not Phase.STEP}, "lacks optimizer step"),
    ],
    ids=["stranger", "missing phase"],
)
def test_a_table_that_does_not_fit_the_owners_is_refused(resident: dict[Phase, frozenset[str]], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        Stage(resident)


def test_two_owners_of_one_name_are_refused() -> None:
    with pytest.raises(SettingsError, match="policy, policy"):
        Residency([FakeOwner("policy", []), FakeOwner("policy", [])])


# Rows


def run_steps(stage: Stage, count: int) -> None:
    for _ in range(count):
        for phase in (Phase.ROLLOUT, Phase.SCORE, Phase.UPDATE, Phase.STEP):
            stage.residency.enter(phase)


def test_a_row_holds_measured_bytes_of_each_owner_and_of_the_card() -> None:
    stage = Stage()
    stage.residency.enter(Phase.SCORE)
    row = stage.residency.rows()[-1]
    assert row.phase is Phase.SCORE
    assert row.owner_bytes == {"policy": 0, "reference": 2 * GIB, "reward model 0": 3 * GIB}
    assert row.use == MemoryUse(used_bytes=15 * GIB, allocated_bytes=5 * GIB)


def test_rows_of_the_last_full_cycle_and_the_running_one_are_kept() -> None:
    stage = Stage()
    run_steps(stage, 20)
    stage.residency.enter(Phase.ROLLOUT)
    stage.residency.enter(Phase.SCORE)
    assert [row.phase for row in stage.residency.rows()] == [
        *(Phase.ROLLOUT, Phase.SCORE, Phase.UPDATE, Phase.STEP),
        *(Phase.ROLLOUT, Phase.SCORE),
    ]


def test_steps_without_a_rollout_do_not_pile_up() -> None:
    stage = Stage()
    for _ in range(50):
        stage.residency.enter(Phase.UPDATE)
        stage.residency.enter(Phase.UPDATE)
        stage.residency.enter(Phase.STEP)
    assert [row.phase for row in stage.residency.rows()] == [Phase.UPDATE, Phase.STEP] * 2


def test_the_table_shows_one_step_in_gib() -> None:
    stage = Stage()
    run_steps(stage, 2)
    assert stage.residency.table().splitlines() == [
        "GiB             policy  reference  reward model 0  allocated by torch  used on the card",
        "rollout           0.00       0.00            0.00                0.00             10.00",
        "score             0.00       2.00            3.00                5.00             15.00",
        "update            1.00       0.00            0.00                1.00             11.00",
        "optimizer step    1.00       0.00            0.00                1.00             11.00",
    ]


def test_the_table_of_a_step_that_has_only_begun_is_the_one_before() -> None:
    stage = Stage()
    run_steps(stage, 1)
    whole = stage.residency.table()
    stage.residency.enter(Phase.ROLLOUT)
    assert stage.residency.table() == whole


def test_the_table_before_the_first_step_shows_what_there_is() -> None:
    assert Stage().residency.table().splitlines()[1].startswith("start")


def test_without_a_card_the_measured_use_is_zero() -> None:
    if torch.cuda.is_initialized():
        pytest.skip("CUDA is in use in this process")
    residency = Residency([FakeOwner("policy", [])])
    residency.enter(Phase.UPDATE)
    assert residency.rows()[-1].use == MemoryUse(used_bytes=0, allocated_bytes=0)


# With weights


def test_parked_weights_are_owners() -> None:
    modules = {"policy": nn.Linear(8, 8), "reference": nn.Linear(8, 8)}
    owners: list[Owner] = [ParkedWeights(module, name, device_type="cpu") for name, module in modules.items()]
    residency = Residency(owners)
    expected = modules["reference"](torch.ones(8))
    residency.enter(Phase.ROLLOUT)
    for module in modules.values():
        with pytest.raises(ParkedError):
            module(torch.ones(8))
    residency.enter(Phase.SCORE)
    with residency.present("reference"):
        assert torch.equal(modules["reference"](torch.ones(8)), expected)
    assert [owner.device_bytes for owner in owners] == [4 * 72, 0]

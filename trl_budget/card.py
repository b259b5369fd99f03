"""Who holds the card in which phase, within the budget of the card.

Joins `residency.py` (who is parked when) and `device_memory.py` (how much all may hold together); has no rule of its
own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from trl_budget.device_memory import DeviceMemoryBudget
from trl_budget.errors import DeviceMemoryError, SettingsError
from trl_budget.rank_checks import RankChecks
from trl_budget.residency import Owner, Phase, Residency, release_cached_memory


class Card:
    """The card's memory, from phase to phase.

    Args:
        owners: what can be parked; what is not in `resident` in a phase holds no memory of the card then.
        resident: by phase, the names of the owners on the card.
        budget: limit on everything this process holds on the card; None for the card itself.
        report: takes a breach of the budget; None raises it.
    """

    def __init__(
        self,
        owners: Sequence[Owner] = (),
        resident: Mapping[Phase, frozenset[str]] | None = None,
        budget: DeviceMemoryBudget | None = None,
        report: Callable[[Exception], None] | None = None,
    ) -> None:
        self._owners = list(owners)
        self._resident = dict(resident) if resident is not None else dict.fromkeys(Phase, frozenset())
        self._residency = Residency(self._owners, resident=self._resident)
        self._budget = budget
        self._report = report or RankChecks().report
        self._phase: Phase | None = None

    def enter(self, phase: Phase) -> None:
        """Ends the phase before, parks what must leave and brings what must be there.

        Raises:
            DeviceMemoryError: the phase before held more than the budget, and `report` raises.
        """
        if phase == self._phase:
            return
        self._check()
        self._phase = None  # where an error ends this in the middle, the next phase is entered anew, whichever it is
        self._residency.enter(phase, lambda: self._begin(phase))
        if phase == Phase.SCORE:
            self._residency.restore_presences()  # a reward may have used the engine while its models were here
        self._phase = phase

    def forget(self, name: str) -> None:
        """An owner that is never parked again."""
        self._owners = [owner for owner in self._owners if owner.name != name]
        self._resident = {phase: names - {name} for phase, names in self._resident.items()}
        self._residency = Residency(self._owners, resident=self._resident)

    @contextmanager
    def present(self, name: str) -> Iterator[None]:
        """An owner on the card for a while, as a reference model while it scores."""
        with self._residency.present(name):
            yield

    def table(self) -> str:
        """Who held how much in each phase of the last step, measured."""
        return self._residency.table()

    def _begin(self, phase: Phase) -> None:
        """Before anyone comes: under the cap of a rollout, what the sleeping pool has let go would be out of reach."""
        if phase in (Phase.START, Phase.ROLLOUT):
            release_cached_memory()  # the engine maps memory without asking torch
        if self._budget is None:
            return
        try:
            self._budget.begin(phase.value, pool_wakes=phase == Phase.ROLLOUT)
        except (DeviceMemoryError, SettingsError) as error:
            self._report(error)
            self._budget.lift()  # under the cap of the phase before, torch would fail before the run ends

    def _check(self) -> None:
        if self._budget is None or self._phase is None:
            return
        try:
            self._budget.check(self._phase.value, {owner.name: owner.device_bytes for owner in self._owners})
        except DeviceMemoryError as error:
            self._report(error)

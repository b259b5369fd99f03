"""What a check finds on one rank ends the run on all of them.

A rank that raises while the others go on leaves them in the next collective of TRL or DDP until its timeout. So what a
check finds is kept until all ranks exchange a message anyway, once a rollout. Knows nothing of what is checked.
"""

from __future__ import annotations

import logging
from typing import Any

from trl_budget.ranks import Ranks

logger = logging.getLogger(__name__)


class RankChecks:
    """Collects what the checks of this rank find, until the ranks meet.

    For checks whose failure does not keep the rank from going on to that point, with results that are then dropped.

    Args:
        ranks: None where there is one process, which raises at once and never waits.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self._ranks = ranks
        self._found: Exception | None = None

    def report(self, error: Exception) -> None:
        """Takes what a check has found; of several, the first is raised when the ranks meet.

        Raises:
            Exception: the error itself, where there is one process.
        """
        if self._ranks is None:
            raise error
        logger.error("Rank %d ends the run when the ranks next meet: %s", self._ranks.rank, error)
        if self._found is None:
            self._found = error

    def meet(self, operation: str, message: Any = None) -> list[Any]:
        """Collects one message of every rank, in rank order. Collective, one small exchange over gloo.

        Args:
            operation: what all ranks must be at.
            message: small; pickled.

        Raises:
            Exception: what this rank has reported.
            RankError: what another rank has reported, or it is gone or elsewhere.
        """
        if self._ranks is None:
            return [message]
        found, self._found = self._found, None
        error = None if found is None else f"{type(found).__name__}: {found}"
        messages = self._ranks.exchange(operation, message, error=error)
        if found is not None:
            raise found
        return messages

    def raise_for(self, rank: int, operation: str, error: Exception) -> None:
        """Raises what all ranks have found alike about one of them: there the error itself, a `RankError` elsewhere.

        Raises:
            Exception: the error, on that rank.
            RankError: on the others.
        """
        if self._ranks is None or self._ranks.rank == rank:
            raise error
        raise self._ranks.failure_of(rank, operation, f"{type(error).__name__}: {error}") from error

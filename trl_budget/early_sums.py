"""The sum over ranks begins while the last backward of a step still runs.

A gradient is final when the backward that was said to be the step's last has made it and the accumulator holds it.
Each rank says so, parameter by parameter, in counters that all ranks of the node see, and the rank that sums a
parameter does so when all have said it. What is not final when the backward ends is summed afterwards, as everything
was before. The sums are the same bits, whoever is early.
"""

from __future__ import annotations

import platform
import threading
import weakref
from collections.abc import Callable, Sequence

from trl_budget.shared_state import SharedSlot

POLL_SECONDS = 4e-3
# Counters, masters and accumulators are plain stores, which other cores see in program order on x86 only.
HAS_ORDERED_STORES = platform.machine() in ("x86_64", "AMD64")


class EarlySums:
    """The sums of one last backward, on a thread of their own. Ends by itself when it is no longer referred to.

    Args:
        number: of the last backward, the same on every rank and never used again; what the counters will show.
        slots: all slots, in the same order on every rank.
        local_rank: this rank's position on its node.
        is_summed: whether a slot's gradients are in its accumulator, nothing of them under way.
        sum_ranks: sums slots over the ranks, on the thread that sums micro-batches, and waits for it; called on the
            thread.
    """

    def __init__(
        self,
        number: int,
        slots: Sequence[SharedSlot],
        local_rank: int,
        is_summed: Callable[[SharedSlot], bool],
        sum_ranks: Callable[[Sequence[SharedSlot]], None],
    ) -> None:
        self._number = number
        self._local_rank = local_rank
        self._is_summed = is_summed
        self._sum_ranks = sum_ranks
        self._waiting = [slot for slot in slots if slot.reducer == local_rank]
        self._expected: list[SharedSlot] = []
        self._told: set[SharedSlot] = set()
        self._done: set[SharedSlot] = set()
        self._error: BaseException | None = None
        self._has_ended = threading.Event()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=_run, args=(weakref.ref(self), self._is_over), name="trl-budget-sums")
        self._starting = threading.Lock()  # hooks run on several threads where a backward has several devices

    def expect(self, slot: SharedSlot) -> None:
        """The last backward has made the slot's gradient, and it is on its way to the accumulator, whole."""
        self._expected.append(slot)
        with self._starting:
            if self._thread.ident is None:
                self._thread.start()

    def poll(self) -> bool:
        """Tells the other ranks what is final here and sums what is final everywhere; whether there was any."""
        for slot in [slot for slot in self._expected if self._is_summed(slot)]:
            slot.finals[self._local_rank].fill_(self._number)
            self._expected.remove(slot)
            self._told.add(slot)
        ready = [
            slot
            for slot in self._waiting
            if slot in self._told and all(int(final) == self._number for final in slot.finals)
        ]
        if ready:
            self._sum_ranks(ready)
            self._done.update(ready)
            self._waiting = [slot for slot in self._waiting if slot not in self._done]
        return bool(ready)

    def run_once(self) -> float | None:
        """Called by the thread. Returns how long it shall wait, None when it shall end."""
        if self._has_ended.is_set() or not threading.main_thread().is_alive():
            return None
        try:
            return 0.0 if self.poll() else POLL_SECONDS
        except BaseException as error:
            self._error = error
            return None

    def end(self) -> set[SharedSlot]:
        """Waits for what is being summed, and begins nothing more. To be called again where the wait is interrupted.

        Returns:
            The slots that have been summed.

        Raises:
            BaseException: what summing raised.
        """
        self._has_ended.set()
        if self.is_running:
            self._is_over.wait()  # a join that is interrupted leaves a thread that says it has ended
        if self._error is not None:
            raise self._error
        return self._done

    @property
    def has_ended(self) -> threading.Event:
        """Set from `end` on."""
        return self._has_ended

    @property
    def is_running(self) -> bool:
        """Whether the thread has been started and still sums, or may begin to."""
        return self._thread.ident is not None and not self._is_over.is_set()

    def clear(self) -> None:
        """Takes back what this rank has told the others. After `end`."""
        for slot in self._told:
            slot.finals[self._local_rank].zero_()


def _run(reference: weakref.ref[EarlySums], is_over: threading.Event) -> None:
    try:
        while (sums := reference()) is not None:
            seconds, ended = sums.run_once(), sums.has_ended
            del sums
            if seconds is None:
                return
            ended.wait(seconds)
    finally:
        is_over.set()

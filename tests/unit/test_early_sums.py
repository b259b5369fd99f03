"""When a parameter is summed over the ranks before backward ends, seen from one rank; the others are counters."""

from __future__ import annotations

import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from trl_budget.early_sums import EarlySums
from trl_budget.shared_state import SharedSlot

NUMBER, ME, OTHER = 7, 0, 1


def slot(name: str, reducer: int = ME) -> SharedSlot:
    empty = torch.empty(0)
    return SharedSlot(
        parameter=Parameter(torch.zeros(3)),
        name=name,
        master_weights=empty,
        exp_avg=empty,
        exp_avg_sq=empty,
        step=torch.zeros(()),
        accumulator=empty,
        reducer=reducer,
        finals=torch.zeros(2, dtype=torch.int64).unbind(),
    )


class Run:
    """Sums of slots a and b, which this rank sums, and c, which the other does."""

    def __init__(self, sum_ranks: Callable[[Sequence[SharedSlot]], None] | None = None) -> None:
        self.slots = [slot("a"), slot("b"), slot("c", OTHER)]
        self.summed: list[str] = []
        self.under_way: set[SharedSlot] = set()
        self.sums = EarlySums(NUMBER, self.slots, ME, self.is_summed, sum_ranks or self.note)

    def is_summed(self, slot: SharedSlot) -> bool:
        return slot not in self.under_way

    def note(self, slots: Sequence[SharedSlot]) -> None:
        self.summed += [slot.name for slot in slots]


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return condition()


def stays(condition: Callable[[], bool]) -> bool:
    for _ in range(20):
        if not condition():
            return False
        time.sleep(0.002)
    return True


def test_a_slot_is_summed_when_all_ranks_have_said_that_it_is_final() -> None:
    run = Run()
    a, b, c = run.slots
    b.finals[OTHER].fill_(NUMBER)  # of the other rank alone
    run.sums.expect(a)
    run.sums.expect(c)
    assert eventually(lambda: [int(s.finals[ME]) for s in run.slots] == [NUMBER, 0, NUMBER])
    assert stays(lambda: not run.summed)
    a.finals[OTHER].fill_(NUMBER)
    assert eventually(lambda: run.summed == ["a"])
    c.finals[OTHER].fill_(NUMBER)  # which the other rank sums
    assert stays(lambda: run.summed == ["a"])
    assert run.sums.end() == {a}


def test_a_gradient_that_is_under_way_is_not_final() -> None:
    run = Run()
    a = run.slots[0]
    a.finals[OTHER].fill_(NUMBER)
    run.under_way.add(a)
    run.sums.expect(a)
    assert stays(lambda: int(a.finals[ME]) == 0 and not run.summed)
    run.under_way.clear()
    assert eventually(lambda: run.summed == ["a"])
    run.sums.end()


def test_what_was_said_in_another_step_does_not_count() -> None:
    run = Run()
    a = run.slots[0]
    for number in (NUMBER - 1, NUMBER + 1):
        a.finals[OTHER].fill_(number)
        run.sums.expect(a)
        assert stays(lambda: not run.summed)
    assert run.sums.end() == set()


def test_nothing_begins_after_the_end_and_what_was_said_is_taken_back() -> None:
    run = Run()
    a, b, _ = run.slots
    run.sums.expect(a)
    assert eventually(lambda: int(a.finals[ME]) == NUMBER)
    assert run.sums.end() == set()
    run.sums.clear()
    a.finals[OTHER].fill_(NUMBER)
    b.finals[OTHER].fill_(NUMBER)
    run.sums.expect(b)
    assert stays(lambda: not run.summed and int(b.finals[ME]) == 0)
    assert int(a.finals[ME]) == 0
    assert int(a.finals[OTHER]) == NUMBER, "the other rank's are its own"


def test_the_end_waits_for_what_is_being_summed() -> None:
    begun, may_end = threading.Event(), threading.Event()

    def sum_ranks(_: Any) -> None:
        begun.set()
        may_end.wait(5)

    run = Run(sum_ranks)
    a = run.slots[0]
    a.finals[OTHER].fill_(NUMBER)
    run.sums.expect(a)
    assert begun.wait(5)
    threading.Timer(0.05, may_end.set).start()
    assert run.sums.end() == {a}
    assert may_end.is_set()


def test_an_end_that_was_interrupted_waits_again() -> None:
    begun, may_end = threading.Event(), threading.Event()

    def sum_ranks(_: Any) -> None:
        begun.set()
        may_end.wait(5)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    run = Run(sum_ranks)
    a = run.slots[0]
    a.finals[OTHER].fill_(NUMBER)
    run.sums.expect(a)
    assert begun.wait(5)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            run.sums.end()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert run.sums.is_running
    threading.Timer(0.05, may_end.set).start()
    assert run.sums.end() == {a}
    assert may_end.is_set()
    assert not run.sums.is_running


def test_two_threads_that_make_gradients_start_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    start, starts = run.sums._thread.start, []

    def start_slowly() -> None:
        starts.append(threading.get_ident())
        time.sleep(0.05)
        start()

    monkeypatch.setattr(run.sums._thread, "start", start_slowly)
    hooks = [threading.Thread(target=run.sums.expect, args=(slot,)) for slot in run.slots]
    for hook in hooks:
        hook.start()
    for hook in hooks:
        hook.join()
    assert len(starts) == 1
    assert run.sums.end() == set()


def test_the_end_does_not_wait_for_a_thread_that_could_not_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("can't start new thread")

    run = Run()
    monkeypatch.setattr(run.sums._thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start"):
        run.sums.expect(run.slots[0])
    assert run.sums.end() == set()
    assert not run.sums.is_running


def test_an_error_is_raised_at_the_end() -> None:
    def fail(_: Any) -> None:
        raise OSError("no memory behind it")

    run = Run(fail)
    a = run.slots[0]
    a.finals[OTHER].fill_(NUMBER)
    run.sums.expect(a)
    assert eventually(lambda: not run.sums._thread.is_alive())
    with pytest.raises(OSError, match="no memory"):
        run.sums.end()


def test_the_thread_ends_with_its_owner() -> None:
    run = Run()
    thread, gone = run.sums._thread, weakref.ref(run.sums)
    del run

    def has_ended() -> bool:
        gc.collect()  # again: while the thread polled, it held what is part of this test's cycle
        return gone() is None and not thread.is_alive()

    assert eventually(has_ended)

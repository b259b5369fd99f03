"""Blocks of host work on threads: all are done, errors arrive, torch's own settings stay."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from accelerate.commands.launch import launch_command_parser
from accelerate.utils.launch import prepare_simple_launcher_cmd_env

from trl_budget import host_threads
from trl_budget.errors import SettingsError
from trl_budget.host_threads import (
    SET_BY_ACCELERATE_LAUNCH,
    THREADS_VARIABLE,
    HostThreads,
    ThreadScratch,
    background_thread,
    host_thread_count,
    step_threads,
    usable_cores,
)


def on_a_fresh_thread(function: object) -> object:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


@pytest.fixture
def two_intra_op_threads() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_items", [0, 1, 2, 3, 1000])
def test_every_item_is_worked_on_once(num_items: int) -> None:
    seen: list[int] = []
    HostThreads(3).run(seen.append, range(num_items))
    assert sorted(seen) == list(range(num_items))


def test_a_slow_item_holds_up_none_of_the_others() -> None:
    gate, seen = threading.Event(), []

    def work(item: int) -> None:
        if item == 0:
            assert gate.wait(30)
        seen.append(item)
        if len(seen) == 99:
            gate.set()

    HostThreads(3).run(work, range(100))
    assert seen[-1] == 0


def test_an_error_is_raised_and_what_had_not_begun_is_left_out() -> None:
    seen: list[int] = []

    def work(item: int) -> None:
        if item == 3:
            raise ArithmeticError("on purpose")
        time.sleep(0.001)
        seen.append(item)

    with pytest.raises(ArithmeticError, match="on purpose"):
        HostThreads(2).run(work, range(1000))
    assert len(seen) < 100


def test_the_pool_works_on_after_an_error() -> None:
    threads, seen = HostThreads(2), []
    with pytest.raises(ZeroDivisionError):
        threads.run(lambda item: 1 // item, range(10))
    threads.run(seen.append, range(10))
    assert sorted(seen) == list(range(10))


def test_the_threads_run_torch_on_one_core_and_all_others_as_before(two_intra_op_threads: None) -> None:
    threads = HostThreads(3, cores=1)
    threads.start()
    barrier = threading.Barrier(3)

    def count() -> int:
        barrier.wait(30)
        torch.zeros(2**20).add_(1)
        return torch.get_num_threads()

    assert [future.result() for future in [threads.submit(count) for _ in range(3)]] == [1, 1, 1]
    assert torch.get_num_threads() == 2
    assert on_a_fresh_thread(lambda: torch.zeros(2**20).add_(1) is None or torch.get_num_threads()) == 2


def test_operations_on_the_threads_start_no_threads_of_their_own(two_intra_op_threads: None) -> None:
    threads = HostThreads(3, cores=1)
    threads.start()
    before = len(list(Path("/proc/self/task").iterdir()))
    threads.run(lambda _: torch.zeros(2**22).add_(1), range(12))
    assert len(list(Path("/proc/self/task").iterdir())) == before


@pytest.mark.parametrize(
    ("num_cores", "step", "background"),
    [(1, (1, 1), (1, 1)), (2, (1, 2), (1, 1)), (7, (1, 7), (1, 6)), (8, (2, 4), (1, 7)), (16, (4, 4), (1, 15)),
     (64, (4, 16), (1, 63))],
)  # fmt: skip
def test_steps_share_all_cores_and_the_background_leaves_one(
    num_cores: int, step: tuple[int, int], background: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_threads, "num_host_cores", lambda: num_cores)
    assert [(t.count, t.cores) for t in (step_threads(), background_thread())] == [step, background]


def test_a_pool_of_one_uses_its_cores_on_the_caller_and_beside_it_and_gives_them_back(
    two_intra_op_threads: None,
) -> None:
    def count(seen: list[int]) -> None:
        torch.zeros(2**20).add_(1)
        seen.append(torch.get_num_threads())

    threads, seen = HostThreads(1, cores=3), []
    threads.run(count, [seen])
    threads.submit(count, seen).result()
    assert seen == [3, 3]
    assert torch.get_num_threads() == 2
    assert on_a_fresh_thread(lambda: torch.zeros(2**20).add_(1) is None or torch.get_num_threads()) == 2


def test_the_cores_are_given_back_after_an_error(two_intra_op_threads: None) -> None:
    with pytest.raises(ZeroDivisionError):
        HostThreads(1, cores=3).run(lambda item: 1 // item, [0])
    assert torch.get_num_threads() == 2


def test_each_thread_has_a_scratch_of_its_own() -> None:
    scratch, barrier, addresses = ThreadScratch(), threading.Barrier(3), []

    def take(_: int) -> None:
        addresses.append(scratch.take(100).data_ptr())
        barrier.wait(30)

    HostThreads(3).run(take, range(3))
    assert len(set(addresses)) == 3


def test_scratch_is_kept_from_call_to_call() -> None:
    scratch = ThreadScratch()
    assert scratch.take(100).data_ptr() == scratch.take(7).data_ptr()
    assert scratch.take(200).shape == (200,)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, 16),
        ({"OMP_NUM_THREADS": "4"}, 4),
        ({"OMP_NUM_THREADS": "4,2"}, 4),
        ({"OMP_NUM_THREADS": "64"}, 16),
        ({"OMP_NUM_THREADS": "1"}, 1),
        ({"OMP_NUM_THREADS": "nonsense"}, 16),
        ({"LOCAL_WORLD_SIZE": "4"}, 4),
        ({"OMP_NUM_THREADS": "1", SET_BY_ACCELERATE_LAUNCH: "False"}, 16),
        ({"OMP_NUM_THREADS": "2", SET_BY_ACCELERATE_LAUNCH: "False"}, 2),
        ({"LOCAL_WORLD_SIZE": "4", "OMP_NUM_THREADS": "2"}, 2),
        ({"LOCAL_WORLD_SIZE": "4", "OMP_NUM_THREADS": "1"}, 4),
        ({"LOCAL_WORLD_SIZE": "32"}, 1),
        ({"LOCAL_WORLD_SIZE": "4", "OMP_NUM_THREADS": "1", THREADS_VARIABLE: "1"}, 1),
        ({THREADS_VARIABLE: "24"}, 24),
    ],
    ids=str,
)
def test_the_number_of_threads_follows_the_environment(environment: dict[str, str], expected: int) -> None:
    assert host_thread_count(environment, num_cores=16) == expected


FILES_OF_CONTAINERS = [
    ("cpu.max", "800000 100000\n", 8),
    ("cpu.max", "10000000 100000\n", 64),
    ("cpu/cpu.cfs_quota_us", "400000\n", 4),
    ("cpu/cpu.cfs_quota_us", "-1\n", 64),
]


def test_a_containers_cpu_time_counts_where_it_is_less_than_its_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    (tmp_path / "cpu").mkdir()
    for name, text, expected in FILES_OF_CONTAINERS:
        (tmp_path / name).write_text(text)
        assert usable_cores(tmp_path) == expected
        (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    monkeypatch.setattr("trl_budget.host_threads.usable_cores", lambda: 8)
    assert host_thread_count({}) == 8
    assert host_thread_count({"LOCAL_WORLD_SIZE": "2"}) == 4


def test_accelerate_launch_of_one_process_is_recognized() -> None:
    args = launch_command_parser().parse_args(
        ["--num_processes=1", "--num_machines=1", "--num_cpu_threads_per_process=1", "train.py"]
    )
    args.mixed_precision, args.dynamo_backend, args.use_cpu = "no", "no", False
    _, environment = prepare_simple_launcher_cmd_env(args)
    assert environment["OMP_NUM_THREADS"] == "1"
    assert host_thread_count(environment, num_cores=16) == 16


@pytest.mark.parametrize("own", ["all", "0", "-2", "1.5"])
def test_what_is_no_number_of_cores_is_refused(own: str) -> None:
    with pytest.raises(SettingsError, match=f"{THREADS_VARIABLE} is '{own}'.*at least 1"):
        host_thread_count({THREADS_VARIABLE: own}, num_cores=16)


def test_a_launchers_single_thread_is_named_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    host_thread_count({"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}, num_cores=16)
    [message] = caplog.messages
    assert "OMP_NUM_THREADS is 1, which launchers set" in message
    assert "8 threads for torch" in message and "16 cores" in message and THREADS_VARIABLE in message


@pytest.mark.parametrize("environment", [{}, {"OMP_NUM_THREADS": "1"}, {"LOCAL_WORLD_SIZE": "2"}], ids=str)
def test_nothing_else_warns(environment: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    host_thread_count(environment, num_cores=16)
    assert caplog.messages == []


@pytest.mark.parametrize("count", [1, 3])
def test_the_caller_does_something_else_while_it_waits(count: int) -> None:
    done: list[int] = []
    seen: list[int] = []

    def work(item: int) -> None:
        time.sleep(0.02)
        done.append(item)

    HostThreads(count).run(work, range(6), meanwhile=lambda: seen.append(len(done)))
    assert sorted(done) == list(range(6))
    assert seen == sorted(seen)
    assert any(0 < number < 6 for number in seen), "called before all was done"


@pytest.mark.parametrize("count", [1, 3])
def test_an_error_of_what_is_done_meanwhile_leaves_out_what_has_not_begun(count: int) -> None:
    done: list[int] = []

    def work(item: int) -> None:
        time.sleep(0.01)
        done.append(item)

    with pytest.raises(ZeroDivisionError):
        HostThreads(count).run(work, range(100), meanwhile=lambda: 1 // 0)
    num_done = len(done)
    assert num_done < 100
    time.sleep(0.05)
    assert len(done) == num_done, "no thread goes on"

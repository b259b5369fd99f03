"""The tightest limit counts, at whichever level above this process it stands."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_budget import host_threads, pinned
from trl_budget.cgroups import container_cores, container_headroom, cpu_time_cores, levels, memory_headroom
from trl_budget.host_threads import usable_cores

GIB = 2**30
FILES_V2 = ("memory.max", "memory.current", "inactive_file")
JOB = "/slurm/uid_1/job_2/step_0"


def write(folder: Path, **texts: object) -> None:
    """Files of one group; `__` in a name stands for its dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def member(folder: Path, *lines: str) -> Path:
    path = folder / "membership"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def memory_v2(folder: Path, limit: object, used: int, cached: int = 0, high: object = "max") -> None:
    write(folder, memory__max=limit, memory__high=high, memory__current=used)
    write(folder, memory__stat=f"anon {used}\ninactive_file {cached}")


def memory_v1(folder: Path, limit: int, used: int) -> None:
    write(folder, memory__limit_in_bytes=limit, memory__usage_in_bytes=used, memory__stat="total_inactive_file 0")


# Memory


def test_a_jobs_limit_below_the_mounts_root_counts(tmp_path: Path) -> None:
    """A limit of 2 GiB of which 1 is used, on a machine whose root knows no limit."""
    mount = tmp_path / "cgroup"
    memory_v2(mount / JOB[1:], 2 * GIB, GIB)
    assert memory_headroom(mount, member(tmp_path, f"0::{JOB}")) == GIB


def test_a_limit_between_the_process_and_the_root_counts_over_its_own_use(tmp_path: Path) -> None:
    mount = tmp_path / "cgroup"
    memory_v2(mount / JOB[1:], 100 * GIB, GIB)
    memory_v2((mount / JOB[1:]).parent, 10 * GIB, 7 * GIB, cached=GIB)  # other steps of the job use 6
    assert memory_headroom(mount, member(tmp_path, f"0::{JOB}")) == 4 * GIB


def test_a_limit_of_another_branch_does_not_count(tmp_path: Path) -> None:
    mount = tmp_path / "cgroup"
    memory_v2(mount / JOB[1:], "max", GIB)
    memory_v2(mount / "system.slice", GIB, GIB)
    assert memory_headroom(mount, member(tmp_path, f"0::{JOB}")) is None


def test_a_level_at_which_the_kernel_makes_the_process_wait_is_a_limit(tmp_path: Path) -> None:
    mount = tmp_path / "cgroup"
    memory_v2(mount / JOB[1:], 8 * GIB, GIB, high=3 * GIB)
    assert memory_headroom(mount, member(tmp_path, f"0::{JOB}")) == 2 * GIB


def test_version_1_is_read_by_its_controller(tmp_path: Path) -> None:
    mount = tmp_path / "cgroup"
    memory_v1(mount / "memory" / JOB[1:], 2 * GIB, GIB)
    memory_v1(mount / "memory", 2**63 - 4096, 5 * GIB)
    memory_v1(mount / "memory/elsewhere", GIB, GIB)
    lines = ("12:pids:/elsewhere", f"5:memory:{JOB}", "4:cpu,cpuacct:/", "1:name=systemd:/elsewhere")
    assert memory_headroom(mount, member(tmp_path, *lines)) == GIB


def test_beside_version_1_both_hierarchies_are_read(tmp_path: Path) -> None:
    mount = tmp_path / "cgroup"
    memory_v1(mount / "memory/job", 4 * GIB, GIB)
    memory_v2(mount / "unified/scope", 2 * GIB, GIB)
    lines = ["5:memory:/job", "0::/scope"]
    assert memory_headroom(mount, member(tmp_path, *lines)) == GIB
    (mount / "unified/scope/memory.max").write_text("max\n")
    assert memory_headroom(mount, member(tmp_path, *lines)) == 3 * GIB


@pytest.mark.parametrize(
    "lines",
    [
        ("0::/../../elsewhere",),
        ("0::/../container",),
        ("0::/docker/0123456789abcdef",),
        ("0::/job (deleted)",),
        ("0::/",),
        ("nonsense",),
        (),
    ],
    ids=["another namespace", "a way back in", "not mounted here", "gone", "the root", "no group", "empty"],
)
def test_a_group_outside_of_what_is_mounted_counts_as_the_root(tmp_path: Path, lines: tuple[str, ...]) -> None:
    mount = tmp_path / "cgroup"
    memory_v2(mount, 4 * GIB, GIB)
    memory_v2(mount / "container", GIB, GIB)
    write(mount, cpu__max="300000 100000")
    path = member(tmp_path, *lines)
    assert (memory_headroom(mount, path), cpu_time_cores(mount, path)) == (3 * GIB, 3)


def test_a_kernel_that_names_no_groups_leaves_the_root(tmp_path: Path) -> None:
    memory_v2(tmp_path, 4 * GIB, GIB)
    assert memory_headroom(tmp_path, tmp_path / "nothing here") == 3 * GIB
    assert memory_headroom(tmp_path / "not mounted", tmp_path / "nothing here") is None


def test_a_level_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    mount = tmp_path / "cgroup"
    memory_v2(mount / "job", GIB, GIB)
    (mount / "job/memory.current").unlink()
    memory_v2(mount, 4 * GIB, GIB)
    assert memory_headroom(mount, member(tmp_path, "0::/job")) == 3 * GIB


limits = st.lists(st.tuples(st.one_of(st.none(), st.integers(0, 50)), st.integers(0, 50)), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(chain=limits, version=st.sampled_from([1, 2]))
def test_what_is_left_is_the_least_of_all_levels(chain: list[tuple[int | None, int]], version: int) -> None:
    """The expected value is taken over the levels as they were drawn, without walking any folder."""
    with tempfile.TemporaryDirectory() as name:
        mount = Path(name) / "cgroup"
        root = folder = mount / "memory" if version == 1 else mount
        for depth, (limit, used) in enumerate(chain):
            folder = folder / f"level{depth}" if depth else folder
            if version == 1:
                memory_v1(folder, 2**63 - 4096 if limit is None else limit, used)
            else:
                memory_v2(folder, "max" if limit is None else limit, used)
        group = f"/{folder.relative_to(root)}" if folder != root else "/"
        left = memory_headroom(mount, member(Path(name), f"5:memory:{group}" if version == 1 else f"0::{group}"))
    bound = [max(0, limit - used) for limit, used in chain if limit is not None]
    if bound or version == 2:
        assert left == (min(bound) if bound else None)
    else:
        assert left is not None and left > 2**62


# CPU time


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    chain=st.lists(st.one_of(st.none(), st.integers(1, 640)), min_size=1, max_size=5), version=st.sampled_from([1, 2])
)
def test_the_cores_are_the_least_of_all_levels(chain: list[int | None], version: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        mount = Path(name) / "cgroup"
        root = folder = mount / "cpu" if version == 1 else mount
        for depth, tenths in enumerate(chain):
            folder = folder / f"level{depth}" if depth else folder
            quota = None if tenths is None else tenths * 10_000
            if version == 1:
                write(folder, cpu__cfs_quota_us=-1 if quota is None else quota, cpu__cfs_period_us=100_000)
            else:
                write(folder, cpu__max=f"{'max' if quota is None else quota} 100000")
        group = f"/{folder.relative_to(root)}" if folder != root else "/"
        line = f"3:cpu,cpuacct:{group}" if version == 1 else f"0::{group}"
        cores = cpu_time_cores(mount, member(Path(name), line))
    assert cores == min((max(1, tenths // 10) for tenths in chain if tenths is not None), default=None)


def test_a_jobs_cpu_time_below_the_mounts_root_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    mount = tmp_path / "cgroup"
    write(mount / JOB[1:], cpu__max="1600000 100000")
    write((mount / JOB[1:]).parent, cpu__max="800000 100000")
    assert usable_cores(mount, member(tmp_path, f"0::{JOB}")) == 8
    assert usable_cores(mount, member(tmp_path, "0::/")) == 64


# Levels, and who asks


def test_levels_go_from_the_group_to_the_root(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    assert levels(tmp_path, "/a/b") == [tmp_path / "a/b", tmp_path / "a", tmp_path]
    assert levels(tmp_path, "/") == levels(tmp_path, "/a/../..") == levels(tmp_path, "/a/c") == [tmp_path]


def test_free_host_memory_asks_for_the_limits_of_every_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "memory_headroom", lambda: 12345)
    assert pinned.available_host_memory() == 12345
    monkeypatch.setattr(pinned, "memory_headroom", lambda: None)
    assert pinned.available_host_memory() > 12345
    monkeypatch.setattr(host_threads, "cpu_time_cores", lambda *paths: 1)
    assert usable_cores() == 1


# One group


@pytest.mark.parametrize(
    ("limit", "cached", "expected"),
    [("1000", 0, 400), ("1000", 250, 650), ("500", 0, 0), ("max", 0, None)],
    ids=["nothing cached", "a file was read", "over the limit", "no limit"],
)
def test_a_container_leaves_its_limit_less_what_cannot_be_reclaimed(
    tmp_path: Path, limit: str, cached: int, expected: int | None
) -> None:
    (tmp_path / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.current").write_text("600\n")
    (tmp_path / "memory.stat").write_text(f"anon 300\ninactive_file {cached}\nslab 5\n")
    assert container_headroom(tmp_path, *FILES_V2) == expected


def test_no_cgroup_means_no_limit(tmp_path: Path) -> None:
    assert container_headroom(tmp_path, *FILES_V2) is None


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "800000 100000\n"}, 8),
        ({"cpu.max": "750000 100000\n"}, 7),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "0 100000\n"}, None),
        ({"cpu.max": "800000 0\n"}, None),
        ({"cpu.max": "max\n"}, None),
        ({"cpu.max": ""}, None),
        ({"cpu.cfs_quota_us": "400000\n", "cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu.cfs_quota_us": "400000\n", "cpu.cfs_period_us": ""}, None),
        ({"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
    ids=str,
)
def test_a_container_allows_the_whole_cores_of_its_cpu_time(
    tmp_path: Path, files: dict[str, str], expected: int | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    names = list(files) or ["cpu.max"]
    assert container_cores(tmp_path, *names) == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [("memory__stat", "\nhierarchical a b\ninactive_file 0"), ("memory__current", ""), ("memory__current", "word")],
)
def test_files_of_an_odd_form_end_nothing(tmp_path: Path, name: str, text: str) -> None:
    write(tmp_path, **{"memory__max": GIB, "memory__current": 0, "memory__stat": "inactive_file 0", name: text})
    expected = GIB if name == "memory__stat" else None
    assert container_headroom(tmp_path, *FILES_V2) == expected


def test_more_cache_than_was_charged_is_no_room_beyond_the_limit(tmp_path: Path) -> None:
    write(tmp_path, memory__max=1000, memory__current=-1, memory__stat="inactive_file 3")
    assert container_headroom(tmp_path, *FILES_V2) == 1000


def test_a_group_whose_name_no_file_can_have_counts_as_the_root(tmp_path: Path) -> None:
    assert levels(tmp_path, "/" + "x" * 300) == [tmp_path]
    path = tmp_path / "membership"
    path.write_bytes(b"0::/\xff\n")
    assert memory_headroom(tmp_path, path) is None

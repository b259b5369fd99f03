"""What the kernel's control groups leave to this process: memory and CPU time, of versions 1, 2 and both at once.

A limit may stand at any level: on the container, on the job or the scope that a scheduler made in it, or between. All
of them bind, each over its own use, so the process' own group is found and every level above it is read, up to the
root of the mount. A group that lies outside of what is mounted here, as a container sees its own, counts as the root.
Files are read, nothing is changed. Source: `Documentation/admin-guide/cgroup-v2.rst` and `cgroup-v1/` in Linux.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
_VERSION_2 = ""  # the controllers that version 2's line names
_UNIFIED = "unified"  # where version 2 is mounted beside version 1
# Above `memory.max` the kernel kills. Above `memory.high` it lets a process that allocates stand still, up to two
# seconds at a time, and so a run whose memory cannot be reclaimed: both are limits. Version 1's soft limit is not, it
# counts only when the machine itself is short of memory.
_MEMORY_V2 = (("memory.max", "memory.current", "inactive_file"), ("memory.high", "memory.current", "inactive_file"))
_MEMORY_V1 = (("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),)
_CPU_V2 = ("cpu.max",)
_CPU_V1 = ("cpu.cfs_quota_us", "cpu.cfs_period_us")


def memory_headroom(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> int | None:
    """Bytes that this process may still be charged before the tightest limit above it; None without a limit.

    Args:
        mount: where version 2 is mounted, or the folders of version 1's controllers.
        membership: the file that names this process' groups.
    """
    groups = _groups(membership)
    found = [
        container_headroom(level, *files)
        for root, controller, kinds in (
            (mount, _VERSION_2, _MEMORY_V2),
            (mount / _UNIFIED, _VERSION_2, _MEMORY_V2),
            (mount / "memory", "memory", _MEMORY_V1),
        )
        for level in levels(root, groups.get(controller, "/"))
        for files in kinds
    ]
    return _least(found)


def cpu_time_cores(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> int | None:
    """Whole cores that the tightest limit of CPU time above this process is worth, at least 1; None without a limit.

    Args:
        mount: where version 2 is mounted, or the folders of version 1's controllers.
        membership: the file that names this process' groups.
    """
    groups = _groups(membership)
    found = [
        container_cores(level, *files)
        for root, controller, files in (
            (mount, _VERSION_2, _CPU_V2),
            (mount / _UNIFIED, _VERSION_2, _CPU_V2),
            (mount / "cpu", "cpu", _CPU_V1),
        )
        for level in levels(root, groups.get(controller, "/"))
    ]
    return _least(found)


def levels(root: Path, group: str) -> list[Path]:
    """The folders of a group and of all groups above it, the mount's root last; the root alone if it is not mounted.

    Args:
        root: where the hierarchy is mounted.
        group: as `/proc/self/cgroup` names it. A process of another namespace sees "/../..", one in a container of
            version 1 the path on the host, which does not exist under the container's mount.
    """
    parts = [part for part in group.split("/") if part]
    try:
        is_mounted = ".." not in parts and root.joinpath(*parts).is_dir()
    except OSError:  # a name that is too long for this file system
        is_mounted = False
    if not is_mounted:
        return [root]
    return [root.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def container_headroom(folder: Path, limit: str, used: str, reclaimable: str) -> int | None:
    """Bytes that the limit of one group leaves; None without a limit, or with one that cannot be read.

    The file cache, a checkpoint just read for one, is charged to the group but given back under pressure.

    Args:
        folder: the cgroup's folder.
        limit: name of the file that holds the limit in bytes, or a word.
        used: name of the file that holds the bytes charged.
        reclaimable: key in `memory.stat` of the inactive file cache, in bytes.
    """
    try:
        texts = [(folder / name).read_text() for name in (limit, used, "memory.stat")]
        if not texts[0].strip().isdigit():
            return None
        statistics = dict(pair for line in texts[2].splitlines() if len(pair := line.split()) == 2)
        charged = int(texts[1]) - int(statistics.get(reclaimable, 0))
    except (OSError, ValueError):
        return None
    return max(0, int(texts[0]) - max(0, charged))


def container_cores(folder: Path, *files: str) -> int | None:
    """Whole cores that the limit of CPU time of one group is worth, at least 1; None without a limit.

    A container of 8 cores on a machine of 64 may run on all 64, until its time of a period is used up; then all of its
    threads stand still, the one that feeds the GPU too. A limit that cannot be read is none.

    Args:
        folder: the cgroup's folder.
        files: names of those that hold the time and the period, in microseconds.
    """
    try:
        quota, period = " ".join((folder / name).read_text() for name in files).split()
    except (OSError, ValueError):
        return None
    if not (quota.isdigit() and period.isdigit()) or "0" in (quota, period):
        return None
    return max(1, int(quota) // int(period))


def _groups(membership: Path) -> dict[str, str]:
    """This process' group by controller, "" for version 2; empty where the kernel tells nothing."""
    try:
        lines = membership.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return {}
    entries = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    return {controller: group for _, controllers, group in entries for controller in controllers.split(",")}


def _least(found: Iterable[int | None]) -> int | None:
    return min((number for number in found if number is not None), default=None)

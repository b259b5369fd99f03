"""`HandoverBackend` over an allocator that stands in for vLLM's: what is mapped after each sleep and wake."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import trl_budget  # noqa: F401  (before vllm is stood in for: it looks for the package)
from trl_budget import UpstreamMovedError


@dataclass
class Allocation:
    """One record of vLLM's pool; `handle[1]` is its size."""

    tag: str
    handle: tuple[int, int]
    is_asleep: bool = False
    cpu_backup_tensor: Any = None


@dataclass
class Pool:
    """vLLM's sleep pool as version 0.26 has it: its own sleep and wake take no notice of what is asleep already."""

    pointer_to_data: dict[int, Allocation]
    log: list[tuple[str, int]] = field(default_factory=list)
    fails_at: int | None = None

    def unmap(self, handle: tuple[int, int]) -> None:
        self.log.append(("unmap", handle[0]))

    def map(self, handle: tuple[int, int]) -> None:
        if handle[0] == self.fails_at:
            raise torch.OutOfMemoryError("no room")
        self.log.append(("map", handle[0]))

    def sleep(self, offload_tags: tuple[str, ...]) -> None:
        for allocation in self.pointer_to_data.values():
            allocation.cpu_backup_tensor = "values" if allocation.tag in offload_tags else None
            self.unmap(allocation.handle)
            allocation.is_asleep = True

    def wake_up(self, tags: list[str] | None) -> None:
        for allocation in self.pointer_to_data.values():
            if tags is None or allocation.tag in tags:
                self.map(allocation.handle)
                allocation.is_asleep = False
                if allocation.cpu_backup_tensor is not None:
                    self.log.append(("restore", allocation.handle[0]))
                    allocation.cpu_backup_tensor = None


@pytest.fixture
def pool() -> Pool:
    tags = ("weights", "weights", "kv_cache", "kv_cache")
    return Pool({100 + index: Allocation(tag, (index, 10 + index)) for index, tag in enumerate(tags)})


@pytest.fixture
def vllm_sleep(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> Any:
    class CuMemBackend:
        def suspend(self, level: int = 1) -> None:
            pool.sleep(("weights",) if level == 1 else ())

        def resume(self, tags: list[str] | None = None) -> None:
            pool.wake_up(tags)

    modules: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.device_allocator": {"get_mem_allocator_instance": lambda: pool},
        "vllm.device_allocator.cumem": {"create_and_map": pool.map, "unmap_and_release": pool.unmap},
        "vllm.device_allocator.sleep_mode_backend": {"CuMemBackend": CuMemBackend},
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(synchronize=lambda: None, empty_cache=lambda: None))
    monkeypatch.delitem(sys.modules, "trl_budget.vllm_sleep", raising=False)
    yield importlib.import_module("trl_budget.vllm_sleep")
    sys.modules.pop("trl_budget.vllm_sleep", None)


def asleep(pool: Pool) -> list[int]:
    return [allocation.handle[0] for allocation in pool.pointer_to_data.values() if allocation.is_asleep]


def test_everything_sleeps_where_nothing_is_shared(vllm_sleep: Any, pool: Pool) -> None:
    vllm_sleep.HandoverBackend().suspend(2)
    assert asleep(pool) == [0, 1, 2, 3]
    assert vllm_sleep.sleeping_bytes() == 10 + 11 + 12 + 13


def test_shared_weights_stay_mapped(vllm_sleep: Any, pool: Pool) -> None:
    backend = vllm_sleep.HandoverBackend()
    backend.kept_tags = frozenset({"weights"})
    backend.suspend(2)
    assert pool.log == [("unmap", 2), ("unmap", 3)]
    backend.resume(["weights"])
    backend.resume(["kv_cache"])
    assert pool.log[2:] == [("map", 2), ("map", 3)]
    assert vllm_sleep.sleeping_bytes() == 0


def test_a_sleep_that_was_half_done_is_finished_without_unmapping_twice(vllm_sleep: Any, pool: Pool) -> None:
    backend = vllm_sleep.HandoverBackend()
    backend.suspend(2)
    backend.resume(["weights"])
    pool.log.clear()
    backend.suspend(2)
    assert pool.log == [("unmap", 0), ("unmap", 1)]


def test_a_wake_that_finds_no_memory_leaves_the_rest_asleep_and_can_be_repeated(vllm_sleep: Any, pool: Pool) -> None:
    backend = vllm_sleep.HandoverBackend()
    backend.suspend(2)
    pool.fails_at = 3
    with pytest.raises(torch.OutOfMemoryError):
        backend.resume(["kv_cache"])
    assert asleep(pool) == [0, 1, 3]
    pool.fails_at = None
    pool.log.clear()
    backend.resume(["kv_cache"])
    assert pool.log == [("map", 3)]


def test_weights_come_back_with_their_values_after_a_level_1(vllm_sleep: Any, pool: Pool) -> None:
    backend = vllm_sleep.HandoverBackend()
    backend.suspend(1)
    backend.resume(["weights"])
    backend.resume(["kv_cache"])
    assert [event for event in pool.log if event[0] == "restore"] == [("restore", 0), ("restore", 1)]
    assert asleep(pool) == []


def test_memory_of_an_unknown_kind_is_named_and_nothing_is_unmapped(vllm_sleep: Any, pool: Pool) -> None:
    pool.pointer_to_data[104] = Allocation("runtime", (4, 14))
    with pytest.raises(UpstreamMovedError, match="its pool holds runtime beside kv_cache, weights"):
        vllm_sleep.HandoverBackend().suspend(2)
    assert pool.log == []


@pytest.mark.parametrize("argument", [set(), {7}, (), 3])
def test_a_level_that_is_none_is_refused_and_nothing_is_unmapped(vllm_sleep: Any, pool: Pool, argument: Any) -> None:
    with pytest.raises(UpstreamMovedError, match="to sleep with level="):
        vllm_sleep.HandoverBackend().suspend(argument)
    assert pool.log == []

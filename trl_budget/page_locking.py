"""Whether host memory that is copied to or from the device is page-locked, and what it costs where it is not.

The choice is one field, `pin_host_memory`, for masters, moments, gradient staging, offloaded activations and parked
weights alike; who allocates them asks here or is told by who does. Values do not depend on it: the same bytes move.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from trl import GRPOConfig

from trl_budget.config import budget_setting
from trl_budget.errors import HostMemoryError, SettingsError
from trl_budget.pinned import HostSlab
from trl_budget.placement import ResolvedSetting

NAME = "pin_host_memory"
TRIAL_BYTES = 64 * 2**20
TRIAL_COPIES = 3
_DEVICES_BEHIND_A_BUS = ("cuda",)


@dataclass(frozen=True)
class CopySpeed:
    """GB (1e9 bytes) per second of blocking copies, of the fastest of a few.

    Attributes:
        to_host: from the device.
        to_device: from the host.
    """

    to_host: float
    to_device: float


def locks_pages(args: GRPOConfig) -> bool:
    """Whether slabs that are copied to or from the device of `args` are page-locked."""
    return args.device.type in _DEVICES_BEHIND_A_BUS and bool(budget_setting(args, NAME))


def check_given_optimizer(args: GRPOConfig, pins: bool) -> None:
    """Refuses a `HostAdamW` of the user's that was page-locked where the field says that nothing may be.

    Args:
        args: the training arguments.
        pins: what the optimizer was built with, its `pin_memory`.

    Raises:
        SettingsError: they differ, on a device to which it matters.
    """
    if pins and not budget_setting(args, NAME) and args.device.type in _DEVICES_BEHIND_A_BUS:
        raise SettingsError(
            f"{NAME}=False, but optimizers= holds a HostAdamW that was built with pin_memory=True. Its state is "
            f"page-locked already, and an optimizer keeps what it was built with. Build it with pin_memory=False, or "
            f"set {NAME}=True."
        )


def page_locking_rows(
    args: GRPOConfig,
    measure: Callable[[torch.device, HostSlab], CopySpeed] | None = None,
    allocate: Callable[..., HostSlab] = HostSlab,
) -> list[ResolvedSetting]:
    """A row that says what pageable memory costs, measured now; none where memory is page-locked or nothing is copied.

    Takes 64 MiB of the device and as much host memory for less than a second, and gives them back.

    Args:
        args: the training arguments.
        measure: times copies between the device and a slab; `copy_speed` when None.
        allocate: makes a slab; takes `nbytes`, `pin` and `purpose`.
    """
    if args.device.type not in _DEVICES_BEHIND_A_BUS or locks_pages(args):
        return []
    measure = measure or copy_speed
    pageable = measure(args.device, allocate(TRIAL_BYTES, pin=False, purpose="a trial of copies"))
    try:
        locked = measure(args.device, allocate(TRIAL_BYTES, pin=True, purpose="a trial of copies"))
        comparison = f"page-locked {_speeds(locked)}"
    except HostMemoryError:
        comparison = f"not even {TRIAL_BYTES >> 20} MiB can be page-locked here"
    torch.cuda.empty_cache()  # the engine that starts next counts what torch keeps
    return [ResolvedSetting(NAME, "False", f"set by you: pageable copies run at {_speeds(pageable)}, {comparison}")]


def copy_speed(
    device: torch.device, slab: HostSlab, synchronize: Callable[[torch.device], None] = torch.cuda.synchronize
) -> CopySpeed:
    """Times copies of the whole slab to and from the device, the fastest of each after one that is not counted.

    Args:
        device: where a tensor of the slab's size is made.
        slab: host memory, overwritten.
        synchronize: waits for the device.
    """
    host = slab.view(torch.uint8)
    there = torch.zeros(slab.nbytes, dtype=torch.uint8, device=device)

    def seconds(target: torch.Tensor, source: torch.Tensor) -> float:
        synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        return time.perf_counter() - start

    to_host, to_device = (
        min([seconds(*pair) for _ in range(TRIAL_COPIES + 1)][1:]) for pair in ((host, there), (there, host))
    )
    return CopySpeed(slab.nbytes / to_host / 1e9, slab.nbytes / to_device / 1e9)


def _speeds(speed: CopySpeed) -> str:
    return f"{speed.to_host:.1f} GB/s to the host and {speed.to_device:.1f} to the device"

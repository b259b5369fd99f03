"""Page-locked host memory in a few large slabs.

A slab is one anonymous mapping, zeroed by the kernel, registered with CUDA when it is to be page-locked. torch's own
pinned allocator is not used: it rounds every request up to a power of two and never returns memory, so a 16 GB slab
could cost 32 GB and outlive the trainer. Nothing here falls back to pageable memory: a refusal is an error, and names
the field that asks for it (`pin_host_memory`, see `page_locking.py`).
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import resource
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping

import psutil
import torch
from torch import Tensor
from torch.nn import Parameter

from trl_budget.cgroups import memory_headroom
from trl_budget.errors import HostMemoryError

logger = logging.getLogger(__name__)

SLAB_BYTES = 2 * 2**30
OVERCOMMIT_VARIABLE = "TRL_BUDGET_ALLOW_OVERCOMMIT"
_PAGEABLE = "set pin_host_memory=False (HostAdamW: pin_memory=False) for pageable memory and slower copies, "
ALIGNMENT_ELEMENTS = 64  # 256 bytes of fp32: every view starts on a cache line and on a vector boundary

_live_slabs: weakref.WeakSet[HostSlab] = weakref.WeakSet()


class HostSlab:
    """One contiguous block of host memory, page-locked when `pin` is set; zeroed unless it maps a file.

    The memory is unregistered when the slab object is collected and unmapped when the last tensor over it is too, so a
    view that a caller kept stays readable.

    Args:
        nbytes: size in bytes.
        pin: page-lock the block with CUDA. Needs a CUDA device.
        purpose: what the block is for, named in errors.
        register: `(address, nbytes) -> error code`, 0 for success. The default is `cudaHostRegister`.
        descriptor: of a file in memory to map, shared with the other processes that map it; private memory when None.

    Raises:
        HostMemoryError: the mapping or the page-locking was refused.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        pin: bool,
        purpose: str,
        register: Callable[[int, int], int] | None = None,
        descriptor: int | None = None,
    ) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if descriptor is None else mmap.MAP_SHARED
        try:
            mapping = mmap.mmap(-1 if descriptor is None else descriptor, nbytes, flags=flags)
        except (OSError, ValueError, OverflowError) as error:
            raise HostMemoryError(_refusal("could not be mapped", nbytes, purpose, str(error))) from error
        with contextlib.suppress(OSError):  # only a hint, which kernels built without huge pages refuse
            mapping.madvise(mmap.MADV_HUGEPAGE)
        # In every data loader worker, fork() copies a page-locked private mapping whole, and a step one that is not,
        # page by page as it writes; a shared one would live as long as the worker.
        if pin or descriptor is not None or torch.cuda.is_initialized():
            mapping.madvise(mmap.MADV_DONTFORK)
        self.nbytes = nbytes
        self.is_pinned = pin
        self.storage = torch.frombuffer(mapping, dtype=torch.uint8)
        if pin:
            code = (register or _cuda_host_register)(self.storage.data_ptr(), nbytes)
            if code != 0:
                raise HostMemoryError(
                    _refusal("could not be page-locked", nbytes, purpose, f"CUDA error {code}", _PAGEABLE)
                )
            if register is None:
                finalizer = weakref.finalize(self, _cuda_host_unregister, self.storage.data_ptr())
                finalizer.atexit = False  # the driver releases registrations with the process
        _live_slabs.add(self)

    def view(self, dtype: torch.dtype) -> Tensor:
        """The whole slab as a flat tensor of `dtype`, host memory, writable."""
        return self.storage.view(dtype)


class ParameterSlabs(Mapping[Parameter, Tensor]):
    """fp32 host views, one per parameter and of the parameter's shape, laid out in a few slabs.

    Args:
        purpose: what the slabs hold, named in errors.
        pin: page-lock the slabs.
        slab_bytes: upper size of a slab; a parameter larger than that gets a slab of its own.
        allocate: makes a slab; takes `nbytes`, `pin` and `purpose`.
    """

    def __init__(
        self,
        purpose: str,
        *,
        pin: bool,
        slab_bytes: int = SLAB_BYTES,
        allocate: Callable[..., HostSlab] = HostSlab,
    ) -> None:
        self.purpose = purpose
        self.pin = pin
        self.slab_bytes = slab_bytes
        self._allocate = allocate
        self.slabs: list[HostSlab] = []
        self._views: dict[Parameter, Tensor] = {}

    def extend(self, parameters: Iterable[Parameter]) -> Iterator[tuple[Parameter, Tensor]]:
        """Allocates zeroed views for `parameters`, slab by slab, and yields each as soon as it exists.

        A caller that releases a parameter's old storage as it goes never holds more than one slab twice.
        """
        for batch in _batches(parameters, self.slab_bytes // 4):
            elements = sum(_padded(parameter.numel()) for parameter in batch)
            slab = self._allocate(max(4 * elements, 4), pin=self.pin, purpose=self.purpose)
            self.slabs.append(slab)
            flat = slab.view(torch.float32)
            start = 0
            for parameter in batch:
                view = flat[start : start + parameter.numel()].view(parameter.shape)
                start += _padded(parameter.numel())
                self._views[parameter] = view
                yield parameter, view

    @property
    def nbytes(self) -> int:
        """Bytes held by the slabs."""
        return sum(slab.nbytes for slab in self.slabs)

    def __getitem__(self, parameter: Parameter) -> Tensor:
        return self._views[parameter]

    def __iter__(self) -> Iterator[Parameter]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)


def check_host_memory(nbytes: int, purpose: str, *, available: int | None = None) -> None:
    """Refuses a need that the machine cannot meet, before the kernel kills the process in the middle of it.

    Args:
        nbytes: bytes needed in all.
        purpose: what for, named in the error.
        available: bytes that can be had; read from the machine and the container's limits when None.

    Raises:
        HostMemoryError: more is needed than there is. `TRL_BUDGET_ALLOW_OVERCOMMIT=1` turns it into a warning, for
            machines whose memory grows when it is used.
    """
    available = available_host_memory() if available is None else available
    if nbytes <= available:
        return
    if os.environ.get(OVERCOMMIT_VARIABLE) == "1":
        logger.warning("%s needs %.2f GiB, %.2f are free", purpose, nbytes / 2**30, available / 2**30)
        return
    detail = f"{available / 2**30:.2f} GiB can be had; {OVERCOMMIT_VARIABLE}=1 tries all the same"
    raise HostMemoryError(_refusal("would not fit", nbytes, purpose, detail))


def available_host_memory() -> int:
    """Bytes that can still be allocated: free memory, or what the limits on this process leave if that is less."""
    free, left = psutil.virtual_memory().available, memory_headroom()
    return free if left is None else min(free, left)


def host_slab_bytes(*, pinned_only: bool = False) -> int:
    """Bytes of all live slabs of this process, or of the page-locked ones only."""
    return sum(slab.nbytes for slab in _live_slabs if slab.is_pinned or not pinned_only)


def _padded(num_elements: int) -> int:
    return -(-num_elements // ALIGNMENT_ELEMENTS) * ALIGNMENT_ELEMENTS


def _batches(parameters: Iterable[Parameter], max_elements: int) -> Iterator[list[Parameter]]:
    batch: list[Parameter] = []
    elements = 0
    for parameter in parameters:
        padded = _padded(parameter.numel())
        if batch and elements + padded > max_elements:
            yield batch
            batch, elements = [], 0
        batch.append(parameter)
        elements += padded
    if batch:
        yield batch


def _cuda_host_register(address: int, nbytes: int) -> int:
    code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
    if code != 0:
        _clear_last_cuda_error()
    return code


def _clear_last_cuda_error() -> None:
    """Takes the error of a refused call back from CUDA, which gives it to the thread's next kernel launch otherwise.

    torch has no binding of `cudaGetLastError`, but calls it, and raises what it gives, behind each of its launches.
    """
    with contextlib.suppress(RuntimeError):
        torch.empty(1, device="cuda").fill_(0.0)


def _cuda_host_unregister(address: int) -> None:
    torch.cuda.synchronize()  # a copy from or to the slab may still be in flight
    torch.cuda.cudart().cudaHostUnregister(address)


def _refusal(what: str, nbytes: int, purpose: str, detail: str, remedy: str = "") -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft // 1024} KiB"
    if remedy and "microsoft" in os.uname().release.lower():
        limit += ", but this is WSL2, which page-locks little all the same (often 0.5 to 1 GiB)"
    memory = psutil.virtual_memory()
    return (
        f"{nbytes / 2**30:.2f} GiB of host memory for {purpose} {what} ({detail}); "
        f"{host_slab_bytes() / 2**30:.2f} GiB are held by this library already. "
        f"`ulimit -l` is {limit}, {memory.available / 2**30:.2f} of {memory.total / 2**30:.2f} GiB of memory "
        "are free, and host-side stepping needs 16 bytes per trainable parameter. "
        f"Raise `ulimit -l` or the container's memory limit, {remedy}train fewer parameters (LoRA), "
        "or set optimizer_placement='device'."
    )

"""Weights leave the device for host memory and come back, bit for bit, in the same Parameter objects.

Storages are emptied and filled again; no `.data` is assigned, which would unhook DDP from a parameter without a word.
So whatever views a storage (ties, `.data`, buffers kept as attributes) loses its bytes and gets them back with it.
Gradients are left where they are. Copies block, and begin once all work on the device has ended. Bit-exact.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trl_budget.errors import HostMemoryError, ParkedError, SettingsError
from trl_budget.host_room import HostRoom
from trl_budget.parking_guard import refuse_use
from trl_budget.pinned import HostSlab


@dataclass(eq=False)
class _ParkedStorage:
    """One storage of the module, `nbytes` long when it is whole, and its copy (flat uint8, host)."""

    storage: torch.UntypedStorage
    nbytes: int
    host_copy: Tensor
    is_whole: bool = True

    def save(self) -> None:
        self.host_copy.copy_(_alias(self.storage))

    def free(self) -> None:
        self.is_whole = False
        self.storage.resize_(0)

    def restore(self) -> None:
        # Also one whose copy was interrupted: its size is right and its bytes are not.
        self.storage.resize_(self.nbytes)
        _alias(self.storage).copy_(self.host_copy)
        self.is_whole = True


class ParkedWeights:
    """The weights of one module, which can leave the device for host memory and come back.

    Parked, every storage behind the parameters and buffers is empty: shapes, strides, `requires_grad`, hooks and
    gradients are as before, but nothing may read or write the values. Running the module or any part of it, loading
    it and taking its state dict raise `ParkedError`; `module.to(...)`, an optimizer step and a backward through a
    graph made before are not caught, and would touch memory that is gone. Tensors that are no parameter or buffer (a
    quantization state kept as an attribute, a gradient) stay, unless they share a storage with one.

    The host memory is taken at the first `park()` and kept for the next until `release_host_copy()`. It goes with this
    object: dropped while parked, it brings the weights back first, if the module is still in use.

    Args:
        module: the outermost module whose forward is called. Parameters that it gets later are parked with the rest.
        name: what errors call it ("policy").
        keeps: `tensor -> bool`, asked here and at every `park()` for each parameter and buffer; True keeps it, and
            whatever shares its storage, on the device. For DDP's trainable parameters and its buffers.
        device_type: what the weights leave: tensors on other devices are left alone. "cpu" exists for tests.
        pin: page-lock the host memory; None is True for "cuda" and False otherwise.
        allocate: makes a host slab; takes `nbytes`, `pin` and `purpose`.

    Raises:
        SettingsError: a tensor of the module cannot be parked.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        *,
        keeps: Callable[[Tensor], bool] | None = None,
        device_type: str = "cuda",
        pin: bool | None = None,
        allocate: Callable[..., HostSlab] = HostSlab,
    ) -> None:
        self.name = name
        self._module = module
        self._keeps = keeps or (lambda tensor: False)
        self._device_type = device_type
        pin = device_type == "cuda" if pin is None else pin
        self._room = HostRoom(f"the parked weights of the {name}", pin=pin, allocate=allocate)
        self._parked: list[_ParkedStorage] | None = None
        self._guards: list[RemovableHandle] = []
        self._lent: set[nn.Module] = set()
        self._when_dropped: weakref.finalize[..., ParkedWeights] | None = None
        self._storages_to_park()

    @property
    def is_parked(self) -> bool:
        """Whether the weights are away, wholly or, after an `unpark()` that failed, in part."""
        return self._parked is not None

    @property
    def device_bytes(self) -> int:
        """Bytes of the module's storages on the device now, each storage once."""
        return sum(storage.nbytes() for storage in {t.untyped_storage(): None for _, t in self._device_tensors()})

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory held, filled or not."""
        return self._room.nbytes

    def park(self) -> None:
        """Copies the weights to the host, then frees their device memory. Does nothing more when they are parked.

        Ends an `unpark()` that failed by freeing what had come back.

        Raises:
            HostMemoryError: the machine refused the host memory. The weights have not moved.
            SettingsError: a tensor of the module cannot be parked. The weights have not moved.
        """
        if self._parked is None:
            self._parked = self._saved()
        try:
            if not self._guards:
                self._guards = refuse_use(self._module, self.name, self._lent)
                away = weakref.ref(self._module), self._parked, self._guards
                self._when_dropped = weakref.finalize(self, _bring_back, *away)
                self._when_dropped.atexit = False
            for entry in self._parked:
                entry.free()
        except BaseException:
            self.unpark()
            raise

    def unpark(self) -> None:
        """Takes device memory again and copies the weights back. Does nothing when they are there.

        If the device runs out of memory, torch's error passes through and the weights stay parked, in part: the host
        copy is kept until all are back. Call it again to go on, or `park()` to go back.
        """
        if self._parked is not None:
            _restore(self._parked, self._guards)
            self._let_go()

    def host_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name and values of every parameter while the weights are parked, tied ones once, as `named_parameters()`.

        A parameter that is parked comes as a view of the host copy with the parameter's shape, strides and dtype, to
        be read and not kept; one that stayed comes as it is, detached.

        Raises:
            ParkedError: the weights are not parked.
        """
        if self._parked is None:
            raise ParkedError(
                f"The host copy of the {self.name}'s weights was asked for while they are on the device. It holds the "
                "values of the last time they were parked, if any. Call `park()` first, or read the parameters."
            )
        return iter(self._host_views(self._parked))

    @contextmanager
    def lent(self, part: nn.Module) -> Iterator[None]:
        """One part's parked weights are on the device meanwhile, and it runs; what is written to them there is lost.

        Args:
            part: a module of the parked one. What stayed of it on the device is left alone.

        Raises:
            ParkedError: the weights are not parked.
        """
        if self._parked is None:
            raise ParkedError(
                f"A part of the {self.name} was to be lent to the device, where all of it is already. What is written "
                "to its weights would stay. Call `park()` first."
            )
        storages = {tensor.untyped_storage() for tensor in itertools.chain(part.parameters(), part.buffers())}
        entries = [entry for entry in self._parked if entry.storage in storages]
        try:
            for entry in entries:
                entry.restore()
            self._lent.update(part.modules())
            yield
        finally:
            self._lent.difference_update(part.modules())
            for entry in entries:
                entry.free()

    def release_host_copy(self) -> None:
        """Gives the host memory back; the next `park()` takes it anew.

        Raises:
            ParkedError: the weights are parked, and this is the only copy.
        """
        if self._parked is not None:
            raise ParkedError(
                f"The host copy of the {self.name}'s weights ({self.host_bytes / 2**30:.2f} GiB) was to be released "
                "while they are parked. It is the only copy there is. Call `unpark()` first."
            )
        self._room.release()

    def abandon(self) -> None:
        """Ends the care for weights that have got other storages: nothing comes back, the module runs again."""
        self._let_go()
        self._room.release()

    def _let_go(self) -> None:
        if self._when_dropped is not None:
            self._when_dropped.detach()
        _restore([], self._guards)
        self._parked, self._guards, self._when_dropped = None, [], None

    def _saved(self) -> list[_ParkedStorage]:
        storages = self._storages_to_park()
        sizes = [storage.nbytes() for storage in storages]
        try:
            host_copies = self._room.take(sizes)
        except HostMemoryError as error:
            raise HostMemoryError(
                f"The {self.name}'s weights could not be parked: {sum(sizes) / 2**30:.2f} GiB of host memory for them "
                f"were refused. They have to lie somewhere while the device is vLLM's. Free host memory, set "
                "pin_host_memory=False where page-locking was refused, or set park_policy_during_rollout='off' to "
                "leave them on the device."
            ) from error
        for device in {storage.device for storage in storages if storage.device.type == "cuda"}:
            torch.cuda.synchronize(device)  # other streams may still read or write what is about to be freed
        entries = [_ParkedStorage(*triple) for triple in zip(storages, sizes, host_copies, strict=True)]
        for entry in entries:
            entry.save()
        return entries

    def _host_views(self, entries: Sequence[_ParkedStorage]) -> list[tuple[str, Tensor]]:
        copies = {entry.storage: entry.host_copy for entry in entries}
        return [(name, _as_placed(p, copies.get(p.untyped_storage()))) for name, p in self._module.named_parameters()]

    def _device_tensors(self) -> Iterator[tuple[str, Tensor]]:
        named = itertools.chain(self._module.named_parameters(), self._module.named_buffers())
        return ((name, tensor) for name, tensor in named if tensor.device.type == self._device_type)

    def _storages_to_park(self) -> list[torch.UntypedStorage]:
        """The distinct storages with bytes in them and no tensor that is kept, in the module's order."""
        found: dict[torch.UntypedStorage, None] = {}
        kept: set[torch.UntypedStorage] = set()
        for name, tensor in self._device_tensors():
            if self._keeps(tensor):
                kept.add(tensor.untyped_storage())
                continue
            _check(tensor, f"{name} of the {self.name}")
            if tensor.untyped_storage().nbytes() > 0:  # one that is shared with a module parked already has none
                found[tensor.untyped_storage()] = None
        return [storage for storage in found if storage not in kept]


def _check(tensor: Tensor, name: str) -> None:
    reason = _reason_to_stay(tensor)
    if reason is not None:
        raise SettingsError(
            f"{name} {reason}. Its memory cannot be given back and taken again behind the same tensor. "
            "Set park_policy_during_rollout='off', or load the model with plain weights."
        )


def _reason_to_stay(tensor: Tensor) -> str | None:
    if tensor.layout != torch.strided:
        return f"has the layout {tensor.layout}"
    storage = tensor.untyped_storage()
    if not storage.resizable():
        return "lies in memory that torch did not allocate"
    if tensor.numel() > 0 and storage.nbytes() > 0 and tensor.data_ptr() == 0:
        return f"is a {type(tensor).__name__}, which holds its values in other tensors"
    return None


def _alias(storage: torch.UntypedStorage) -> Tensor:
    """A flat uint8 tensor over `storage` with a version counter of its own: the parameters' must not move."""
    alias = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return alias.set_(storage, 0, (storage.nbytes(),), (1,))


def _as_placed(tensor: Tensor, host_copy: Tensor | None) -> Tensor:
    """`tensor` as it lies in the copy of its storage, or itself where there is none."""
    if host_copy is None:
        return tensor.detach()
    offset = host_copy.storage_offset() // tensor.element_size() + tensor.storage_offset()
    view = torch.empty(0, dtype=tensor.dtype)
    return view.set_(host_copy.untyped_storage(), offset, tensor.shape, tensor.stride())


@torch.inference_mode(False)
@torch.no_grad()
def _bring_back(module: weakref.ref[nn.Module], parked: list[_ParkedStorage], guards: list[RemovableHandle]) -> None:
    if module() is not None:  # a user's reward model, when the trainer is gone
        _restore(parked, guards)


def _restore(parked: list[_ParkedStorage], guards: list[RemovableHandle]) -> None:
    for entry in parked:
        if not entry.is_whole:
            entry.restore()
    for guard in guards:
        guard.remove()

"""Activations that spend the time from their forward to their backward in host memory.

A stack in one slab, page-locked unless told otherwise: activations are laid on top in forward and taken from the top
in backward, each one begins to come back while the layer above it runs. On the device stay the last one kept and the
next one wanted.
The order of the copies is `activation_streams.py`'s. Bit-exact: bytes are moved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trl_budget.activation_slab import ActivationSlab, padded, stack_bytes
from trl_budget.activation_streams import ActivationCopies, CudaStreams, StreamedCopies, SynchronousCopies
from trl_budget.errors import ActivationGoneError, HostMemoryError, SettingsError
from trl_budget.pinned import HostSlab


@dataclass(eq=False)
class _Entry:
    """One activation on the stack.

    Attributes:
        start: its first byte in the slab.
        stop: the first byte above it.
        staged: the host copy, a view of the slab.
        sent: the end of the copy down.
        source: the activation itself, until the current stream has been told to wait for `sent`.
        version: of `source` when it was kept.
        fetched: the activation on its way back and the end of that copy.
        is_wanted: False once it has been taken or dropped; the bytes go back when it is on top.
    """

    start: int
    stop: int
    staged: Tensor
    sent: Any
    source: Tensor | None
    version: int
    fetched: tuple[Tensor, Any] | None = None
    is_wanted: bool = True


class HostActivation:
    """One activation in a `HostStore`. Dropping it untaken gives its bytes back at the store's next call."""

    def __init__(self, store: HostStore, entry: _Entry) -> None:
        self._store = store
        self._entry = entry

    def take(self) -> Tensor:
        """See `HostStore`."""
        return self._store._take(self._entry)

    def __del__(self) -> None:
        self._entry.is_wanted = False  # no more than this: the collector may run inside any call of the store


class HostStore:
    """Moves activations to host memory and back, in the order of a stack.

    `take()` of one activation begins to fetch the one below it. Taking in another order, as two forwards before their
    backwards do, gives the same values; the bytes of what lies under an activation still wanted come back after it.

    At most two activations are on the device for the store: the last one kept, until the next is kept, and the one
    being fetched. One that is taken while it is still there is not fetched.

    Called by one thread at a time. Activations may be dropped on any thread.

    Args:
        device: where activations live. On the CPU, copies are synchronous.
        capacity_bytes: host memory to take now; see `activation_slab.stack_bytes`. 0: none before `reserve()`.
        pin: page-lock it; None: on CUDA.
        copies: moves the bytes; None: what the device needs.
        allocate: makes a slab; takes `nbytes`, `pin` and `purpose`.

    Raises:
        HostMemoryError: the machine refused the memory, or to page-lock it.
    """

    def __init__(
        self,
        device: torch.device,
        capacity_bytes: int,
        *,
        pin: bool | None = None,
        copies: ActivationCopies | None = None,
        allocate: Callable[..., HostSlab] = HostSlab,
    ) -> None:
        self._stack: list[_Entry] = []
        self._device = _as_tensors_name_it(torch.device(device))
        self._copies = copies or _copies(self._device)
        self._slab = ActivationSlab(pin=self._device.type == "cuda" if pin is None else pin, allocate=allocate)
        self.reserve(capacity_bytes)

    def __del__(self) -> None:
        for entry in self._stack:
            self._clear(entry)

    @property
    def host_bytes(self) -> int:
        """Host memory held, used or not."""
        return self._slab.nbytes

    @property
    def used_bytes(self) -> int:
        """Of it, bytes up to the highest activation that is still wanted and has any."""
        return max((entry.stop for entry in self._stack if entry.is_wanted and entry.stop > entry.start), default=0)

    @property
    def device_bytes(self) -> int:
        """Device memory that the store refers to: what has not left yet or is on its way back."""
        return sum(tensor.nbytes for entry in self._stack for tensor in _on_device(entry))

    def reserve(self, num_bytes: int) -> None:
        """Makes sure that `num_bytes` more can be kept; larger memory takes the place of the old, which goes first.

        To be called before the first layer of a pass: page-locking waits for the device and takes 0.4 s per GiB, and
        inside backward it could wait for a collective that waits for this rank.

        Args:
            num_bytes: see `activation_slab.stack_bytes`.

        Raises:
            HostMemoryError: the machine refused, and the store holds nothing now; or activations lie in the memory
                that would have to be replaced, which keep what they have.
        """
        self._settle()
        if self._top + num_bytes <= self.host_bytes:
            return
        if self._stack:
            raise HostMemoryError(
                f"{num_bytes / 2**30:.2f} GiB of host memory were asked for beside {len(self._stack)} activations "
                f"that fill {self._top / 2**30:.2f} of {self.host_bytes / 2**30:.2f} GiB. They belong to a pass whose "
                "backward has not run, so their memory cannot be replaced by larger. Run its backward or drop its "
                "loss first, or set activation_offload='off'."
            )
        if self.host_bytes > 0:
            self._copies.finish()
        self._slab.replace(num_bytes)

    def can_reserve(self, num_bytes: int) -> bool:
        """Whether `reserve` would not meet activations in the memory that it has to replace."""
        self._settle()
        return not self._stack or self._top + num_bytes <= self.host_bytes

    def begin_pass(self, num_layers: int, hidden_states: Tensor) -> None:
        """Makes room for a pass, see `reserve`.

        Args:
            num_layers: how many inputs will be kept at most.
            hidden_states: the first of them; all have its shape and dtype.
        """
        self.reserve(stack_bytes(num_layers, hidden_states.nbytes))

    def keep(self, hidden_states: Tensor) -> HostActivation:
        """Begins to copy `hidden_states` to the host and lays it on top of the stack.

        Args:
            hidden_states: `[B, T, H]`, any dtype, on the store's device and ready on the current stream. Referred to
                until the next call; must not be written until then, which is checked.

        Raises:
            HostMemoryError: there is no room left for it.
            SettingsError: the activation kept before was written meanwhile.
        """
        assert hidden_states.device == self._device, f"{hidden_states.device} is not {self._device}"
        self._settle()
        self._let_sources_go()
        source = hidden_states.detach().contiguous()
        start = self._top
        staged = self._slab.room(start, source)
        sent = self._copies.send(source, staged)
        entry = _Entry(start, start + padded(source.nbytes), staged, sent, source, source._version)
        self._stack.append(entry)
        return HostActivation(self, entry)

    def leave_device(self) -> None:
        """Lets go of everything on the device; what is still wanted is fetched when it is taken.

        For the time between a forward's last layer and its backward, in which the LM head needs the memory, and for
        the end of a pass that was given up.

        Raises:
            SettingsError: see `keep`.
        """
        self._settle()
        self._let_sources_go()
        for entry in self._stack:
            self._cancel(entry)

    def give_up(self) -> None:
        """Drops everything that is kept, whoever still refers to it: the backward of an aborted step never runs."""
        for entry in self._stack:
            entry.is_wanted = False
        self._settle()

    def _take(self, entry: _Entry) -> Tensor:
        if not entry.is_wanted:
            raise ActivationGoneError(
                f"An activation of {entry.staged.nbytes / 2**20:.1f} MiB is no longer kept. A first backward took it, "
                "or training began anew after its forward, and its host memory was given back. Run backward once per "
                "forward, without retain_graph=True, or set activation_offload='off'."
            )
        self._settle()
        if entry.source is not None:
            _check_unwritten(entry)
            tensor, copy = entry.source, entry.sent
        else:
            tensor, copy = entry.fetched or self._copies.fetch(entry.staged, entry.sent)
        self._copies.wait(copy, tensor)
        entry.source, entry.fetched, entry.is_wanted = None, None, False
        self._settle()
        self._fetch_ahead(below=entry)
        return tensor

    def _fetch_ahead(self, below: _Entry) -> None:
        """Begins to bring back the first one that is still wanted below the one taken."""
        entry = next((e for e in reversed(self._stack) if e.is_wanted and e.stop <= below.start), None)
        for other in self._stack:
            if other is not entry:
                self._cancel(other)
        if entry is not None and entry.source is None and entry.fetched is None:
            entry.fetched = self._copies.fetch(entry.staged, entry.sent)

    def _settle(self) -> None:
        """Takes what was dropped off the device, and off the stack where nothing lies on it."""
        for entry in self._stack:
            if not entry.is_wanted:
                self._clear(entry)
        while self._stack and not self._stack[-1].is_wanted:
            self._clear(self._stack[-1])  # it may have been dropped a moment ago, by a collection in the loop above
            self._stack.pop()

    def _clear(self, entry: _Entry) -> None:
        self._forget_source(entry)
        self._cancel(entry)

    def _let_sources_go(self) -> None:
        for entry in self._stack:
            if entry.source is not None:
                _check_unwritten(entry)
                self._forget_source(entry)

    def _forget_source(self, entry: _Entry) -> None:
        if entry.source is not None:
            self._copies.wait(entry.sent, entry.source)
            entry.source = None

    def _cancel(self, entry: _Entry) -> None:
        if entry.fetched is not None:
            tensor, copy = entry.fetched
            self._copies.wait(copy, tensor)
            entry.fetched = None

    @property
    def _top(self) -> int:
        return self._stack[-1].stop if self._stack else 0


def _on_device(entry: _Entry) -> list[Tensor]:
    fetched = [] if entry.fetched is None else [entry.fetched[0]]
    return fetched if entry.source is None else [entry.source, *fetched]


def _check_unwritten(entry: _Entry) -> None:
    assert entry.source is not None
    if entry.source._version != entry.version:
        raise SettingsError(
            f"The input of a layer, {entry.source.nbytes / 2**20:.1f} MiB, was written in place after it was kept "
            f"(version {entry.version} became {entry.source._version}). Its copy to the host may hold old values, new "
            "ones or both, and backward would compute from them. Set activation_offload='off'."
        )


def _as_tensors_name_it(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "cpu" else device  # ranks on the CPU train on "cpu:0"


def _copies(device: torch.device) -> ActivationCopies:
    return StreamedCopies(CudaStreams(device)) if device.type == "cuda" else SynchronousCopies()

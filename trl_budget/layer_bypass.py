"""Modules of a decoder layer whose results go nowhere but into its attention, and a run of the layer without them.

A layer that is continued from its attention (`LayerCall.finish`) would compute its norm, q, k and v once more for
nothing. Which modules those are is never assumed: on the first tile that a layer runs they are answered with NaN, and
left out from then on if no bit of the layer's output moves. A gate beside q, or an MLP beside attention, keeps what it
reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Bypass:
    """A module that need not run.

    Attributes:
        module: called with a tensor `[..., any]`, returns one `[..., width]`.
        width: last dimension of what it returns.
        dtype: of what it returns.
    """

    module: nn.Module
    width: int
    dtype: torch.dtype


_known: WeakKeyDictionary[nn.Module, list[Bypass]] = WeakKeyDictionary()


def known_bypasses(layer: nn.Module) -> list[Bypass]:
    """What has been found for the layer; nothing while a hook inside it is to see real values."""
    return [] if _has_hooks(layer) else _known.get(layer, [])


def find_bypasses(layer: nn.Module, project: Callable[[], Any], finish: Callable[[], Tensor]) -> None:
    """Looks once for each layer; the layer runs up to nine times.

    Args:
        layer: whose output is judged.
        project: runs it up to its attention.
        finish: runs it with attention's output given; returns its output.
    """
    if layer in _known or _has_hooks(layer):
        return
    _known[layer] = []  # what `finish` leaves out meanwhile
    with _finished_modules(layer) as candidates:
        project()
    expected = finish()

    def are_unneeded(bypasses: Sequence[Bypass]) -> bool:
        try:
            with left_out(bypasses, float("nan")):
                return torch.equal(finish(), expected)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # the layer cannot go on with what it was given
            return False

    if not are_unneeded(candidates):
        candidates = [candidate for candidate in candidates if are_unneeded([candidate])]
    if candidates and are_unneeded(candidates):
        _known[layer] = candidates


@contextmanager
def _finished_modules(layer: nn.Module) -> Iterator[list[Bypass]]:
    """Collects the outermost modules that have returned a tensor shaped like their input, but for its width."""
    found: list[Bypass] = []
    inside: set[nn.Module] = set()

    def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        inside.update(child for child in module.modules() if child is not module)
        is_alone = len(args) == 1 and isinstance(args[0], Tensor) and isinstance(output, Tensor)
        if is_alone and output.shape[:-1] == args[0].shape[:-1] and output.is_floating_point():
            found.append(Bypass(module, output.shape[-1], output.dtype))

    handles = [module.register_forward_hook(note) for module in layer.modules() if module is not layer]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
    found[:] = [bypass for bypass in found if bypass.module not in inside]


@contextmanager
def left_out(bypasses: Sequence[Bypass], value: float = 0.0) -> Iterator[None]:
    """While it lasts, calls of these modules return `value`, without memory of its own, and run nothing."""
    originals = [vars(bypass.module).get("forward") for bypass in bypasses]
    for bypass in bypasses:
        vars(bypass.module)["forward"] = _answer(bypass, value)
    try:
        yield
    finally:
        for bypass, original in zip(bypasses, originals, strict=True):
            if original is None:
                del vars(bypass.module)["forward"]
            else:
                vars(bypass.module)["forward"] = original


def _answer(bypass: Bypass, value: float) -> Callable[[Tensor], Tensor]:
    def answer(given: Tensor) -> Tensor:
        return torch.full((), value, dtype=bypass.dtype, device=given.device).expand(*given.shape[:-1], bypass.width)

    return answer


def _has_hooks(module: nn.Module) -> bool:
    return any(
        hooks
        for part in module.modules()
        for hooks in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
    )

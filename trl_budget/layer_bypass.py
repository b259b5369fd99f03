"""Modules of a decoder layer whose results go nowhere but into its attention, and a run of the layer without them.

A layer that is continued from its attention (`LayerCall.finish`) would compute its norm, q, k and v once more for
nothing. Which modules those are is never assumed: on the first tile that a layer runs they are answered with NaN, and
left out from then on if no bit of the layer's output moves and no gradient of it reaches them. A gate beside q, or an
MLP beside attention, keeps what it reads. A layer with a hook inside, or with a buffer that a run changes, runs whole.

Between those modules and attention the layer still computes on the answers, the rotary embedding for example. So they
are made as narrow as one head if the layer runs with that, to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from trl_budget.attention import interceptor_in_use


@dataclass(frozen=True)
class Bypass:
    """A module that need not run.

    Attributes:
        module: called with a tensor `[..., any]`, returns one `[..., width]`.
        width: last dimension of the answer in its place.
        dtype: of the answer.
    """

    module: nn.Module
    width: int
    dtype: torch.dtype


# By layer: the dtypes under which it was learned, and what was found.
_known: WeakKeyDictionary[nn.Module, tuple[Hashable, list[Bypass]]] = WeakKeyDictionary()


def known_bypasses(layer: nn.Module, dtypes: Hashable) -> list[Bypass]:
    """What has been found for the layer under these dtypes; nothing while a hook is to see real values."""
    learned, bypasses = _known.get(layer, (None, []))
    return bypasses if learned == dtypes and not _has_hooks(layer) else []


def forget_bypasses(model: nn.Module) -> None:
    """Learns anew for every layer of the model, which may have been changed."""
    for module in model.modules():
        _known.pop(module, None)


def find_bypasses(
    layer: nn.Module, dtypes: Hashable, project: Callable[[], int], finish: Callable[[], Tensor]
) -> None:
    """Looks once for each layer and dtypes; the layer runs up to a dozen times.

    Args:
        layer: whose output is judged.
        dtypes: what its results' dtypes depend on.
        project: runs it up to its attention; returns the width of one head.
        finish: runs it with attention's output given; returns its output, with a graph where grad is enabled.
    """
    if _has_hooks(layer) or _known.get(layer, (None,))[0] == dtypes:
        return
    _known[layer] = (dtypes, [])  # what `finish` leaves out meanwhile
    versions = _buffer_versions(layer)
    with _finished_modules(layer) as candidates:
        head_width = project()
    expected = finish()
    candidates = _without_gradient(candidates, finish)
    if _buffer_versions(layer) != versions:
        return

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
    for bypasses in (_narrow(candidates, head_width), candidates):
        if bypasses and are_unneeded(bypasses):
            _known[layer] = (dtypes, bypasses)
            return


def _narrow(bypasses: Sequence[Bypass], width: int) -> list[Bypass]:
    return [replace(bypass, width=min(width, bypass.width)) for bypass in bypasses]


@contextmanager
def _finished_modules(layer: nn.Module) -> Iterator[list[Bypass]]:
    """Collects the outermost modules that return one tensor shaped like their input, but for its width, once."""
    found: dict[nn.Module, Bypass | None] = {}

    def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        found.update((child, None) for child in module.modules() if child is not module)
        is_alone = len(args) == 1 and isinstance(args[0], Tensor) and isinstance(output, Tensor)
        serves = is_alone and output.shape[:-1] == args[0].shape[:-1] and output.is_floating_point()
        is_new = module not in found and serves and output.numel() > 0
        found[module] = Bypass(module, output.shape[-1], output.dtype) if is_new else None

    candidates: list[Bypass] = []
    handles = [module.register_forward_hook(note) for module in layer.modules() if module is not layer]
    try:
        yield candidates
    finally:
        for handle in handles:
            handle.remove()
    candidates += [bypass for bypass in found.values() if bypass is not None]


def _without_gradient(candidates: list[Bypass], finish: Callable[[], Tensor]) -> list[Bypass]:
    """Those that no gradient of the layer's output reaches, whatever their values do."""
    outputs: dict[nn.Module, Tensor] = {}

    def keep(module: nn.Module, _: Any, output: Tensor) -> None:
        outputs[module] = output

    handles = [bypass.module.register_forward_hook(keep) for bypass in candidates]
    try:
        with torch.enable_grad():
            output = finish()
    finally:
        for handle in handles:
            handle.remove()
    differentiable = {module: made for module, made in outputs.items() if made.requires_grad}
    if not output.requires_grad or not differentiable:
        return candidates
    ones = torch.ones_like(output)
    gradients = torch.autograd.grad(output, list(differentiable.values()), ones, allow_unused=True)
    reached = {module for module, gradient in zip(differentiable, gradients, strict=True) if gradient is not None}
    return [bypass for bypass in candidates if bypass.module not in reached]


@contextmanager
def left_out(bypasses: Sequence[Bypass], value: float = 0.0) -> Iterator[None]:
    """While it lasts, calls of these modules in a layer that is cut return `value`, and run nothing.

    Other calls, as another thread's, run as ever.
    """
    originals = [(bypass.module, vars(bypass.module).get("forward")) for bypass in bypasses]
    try:
        for bypass in bypasses:
            vars(bypass.module)["forward"] = _answer(bypass, bypass.module.forward, value)
        yield
    finally:
        for module, original in originals:
            vars(module).pop("forward", None)
            if original is not None:
                vars(module)["forward"] = original


def _answer(bypass: Bypass, original: Callable[..., Any], value: float) -> Callable[..., Any]:
    def answer(*args: Any, **kwargs: Any) -> Any:
        if interceptor_in_use() is None:
            return original(*args, **kwargs)
        (given,) = args
        return torch.full((*given.shape[:-1], bypass.width), value, dtype=bypass.dtype, device=given.device)

    return answer


def _buffer_versions(layer: nn.Module) -> list[int]:
    return [buffer._version for buffer in layer.buffers()]


def _has_hooks(layer: nn.Module) -> bool:
    return torch.nn.modules.module._has_any_global_hook() or any(
        hooks
        for part in layer.modules()
        for hooks in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
    )

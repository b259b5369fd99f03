"""One copy of the weights: the policy's parameters become views of vLLM's tensors, and are compared with them.

What was planned in `weight_views.py` is done here. Nothing on the device is copied twice: one parameter, or one block
of a comparison, at a time. Bit-exact: bytes are moved, nothing is computed. No weight sync is needed while it lasts;
`first_unshared` finds a parameter that something (`.to()`, `.data = ...`) has given storage of its own again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

import torch
from torch import Tensor, nn

from trl_budget.weight_views import (
    WeightView,
    is_same_memory,
    place_of,
    plain_name,
    plan_views,
    rows_of,
    tensors_of,
)

__all__ = [
    "WeightView",
    "cpu_state_dict",
    "first_difference",
    "first_unshared",
    "named_values",
    "plan_views",
    "share",
]

COMPARED_ELEMENTS = 2**24  # compared at once; both sides of fp32 and the mask take 160 MB of the device at most
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def share(
    policy: nn.Module,
    vllm_model: nn.Module,
    views: Iterable[WeightView],
    values: Iterable[tuple[str, Tensor]] | None = None,
) -> None:
    """Copies the policy's present weights into vLLM's tensors and makes its parameters views of them.

    `Parameter` objects stay the same, so ties, `requires_grad`, gradients, hooks and optimizer groups do too. The old
    storage of each parameter is released before the next is copied. Assigning a tensor of another device gives the
    parameter a new gradient accumulator, which DDP's hooks do not follow: share before DDP wraps the policy.

    Args:
        policy: as planned. Its parameters may be on the host; where their storage was given back, pass `values`.
        vllm_model: as planned, with its weights mapped.
        views: what `plan_views` returned.
        values: names and weights to copy instead of the parameters' own, in any order, of any device, cast if their
            dtype is another. Names without a view are skipped.
    """
    parameters = dict(policy.named_parameters(remove_duplicate=False))
    planned = {plain_name(view.name): view for view in views if view.name in parameters}
    targets = tensors_of(vllm_model)
    waiting = {parameters[view.name]: view.name for view in planned.values()}
    for name, value in values if values is not None else parameters.items():
        view = planned.get(plain_name(name))
        if view is None or parameters[view.name] not in waiting:
            continue
        assert value.untyped_storage().nbytes() > 0, f"{name} has no values: its storage was given back"
        target = rows_of(targets[view.vllm_name], view)
        if value.data_ptr() != target.data_ptr():
            target.copy_(value)
        parameters[view.name].data = target
        del waiting[parameters[view.name]]
    assert not waiting, f"no values were given for {next(iter(waiting.values()))}"


def first_unshared(policy: nn.Module, vllm_model: nn.Module, views: Iterable[WeightView]) -> str | None:
    """The first parameter that is no longer a view of vLLM's tensor (`.to()`, `.data = ...`), or None."""
    parameters = dict(policy.named_parameters(remove_duplicate=False))
    targets = tensors_of(vllm_model)
    for view in views:
        if view.name in parameters and not is_same_memory(
            parameters[view.name], rows_of(targets[view.vllm_name], view)
        ):
            return view.name
    return None


def named_values(policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer of the policy, detached, tied ones once: what `first_difference` compares."""
    for name, tensor in chain(policy.named_parameters(), policy.named_buffers()):
        yield name, tensor.detach()


@torch.no_grad()
def first_difference(
    policy_values: Iterable[tuple[str, Tensor]], vllm_model: nn.Module, views: Iterable[WeightView]
) -> str | None:
    """Compares the policy's weights with vLLM's, bit by bit (NaN equals the same NaN, 0.0 is not -0.0).

    Args:
        policy_values: names of the policy and their values, any device; read, one block on vLLM's device at a time.
            Names without a view are skipped; a view whose value never comes is a difference.
        vllm_model: with its weights mapped.
        views: what `plan_views` returned.

    Returns:
        None, or what differs in the first tensor that does: parameter, vLLM tensor, rows, how many elements, how far.
    """
    targets = tensors_of(vllm_model)
    planned = {plain_name(view.name): view for view in views}
    waiting = {place_of(rows_of(targets[view.vllm_name], view)): view for view in reversed(planned.values())}
    for name, value in policy_values:
        view = planned.get(plain_name(name))
        if view is None:
            continue
        target = rows_of(targets[view.vllm_name], view)
        difference = _difference(value.detach(), target)
        if difference is not None:
            return f"{name} differs from {view}: {difference}"
        waiting.pop(place_of(target), None)
    if waiting:
        view = next(reversed(waiting.values()))
        return f"{view.name} was not compared with {view}: its value was not given"
    return None


@torch.no_grad()
def cpu_state_dict(policy: nn.Module) -> dict[str, Tensor]:
    """The policy's state dict in host memory, copied one tensor at a time, for `save_pretrained(state_dict=...)`.

    Each tensor has storage of its own, since `save_pretrained` clones disjoint views of one storage on their device;
    tied weights stay one tensor, which is how it finds them.
    """
    copies: dict[tuple[object, ...], Tensor] = {}
    state: dict[str, Tensor] = {}
    for name, tensor in policy.state_dict().items():
        place = (place_of(tensor), tensor.dtype, tensor.shape) if tensor.numel() > 0 else (name,)
        if place not in copies:
            copies[place] = torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format)
            copies[place].copy_(tensor)
        state[name] = copies[place]
    return state


def _difference(value: Tensor, target: Tensor) -> str | None:
    if value.shape != target.shape or value.dtype != target.dtype:
        return f"{value.dtype} {list(value.shape)} against {target.dtype} {list(target.shape)}"
    if is_same_memory(value, target):
        return None
    num_different, largest = 0, torch.zeros((), dtype=torch.float64)
    pairs = zip(*(t.reshape(-1).split(COMPARED_ELEMENTS) for t in (value, target)), strict=True)
    for ours, theirs in pairs:
        ours = ours.to(theirs.device)
        bits = _BITS[ours.element_size()]
        if torch.equal(ours.view(bits), theirs.view(bits)):
            continue
        differs = ours.view(bits) != theirs.view(bits)
        num_different += int(differs.sum())
        distance = (ours[differs].double() - theirs[differs].double()).abs().max()
        largest = torch.maximum(largest, distance.cpu())
    if num_different == 0:
        return None
    return f"{num_different} of {value.numel()} elements, by {largest.item():g} at most"

"""Follows what user code has put into, or taken out of, `optimizer.state`.

torch's AdamW reads `state[p]` at every step, so code that resets Adam deletes entries or replaces tensors. The step of
`HostAdamW` reads slabs; before it does, values that were put into an entry are copied there, an entry that is gone
starts anew, and the entry holds the slab's views again. Bit-exact: a copy into fp32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from trl_budget.errors import SettingsError
from trl_budget.parameter_slots import ParameterSlot
from trl_budget.team import OneRank

State = MutableMapping[Any, Any]


def slab_entry(slot: ParameterSlot) -> dict[str, Tensor]:
    """What `state[p]` holds of a slot: views of its slabs, fp32, host."""
    return {
        "step": slot.step,
        "exp_avg": slot.exp_avg,
        "exp_avg_sq": slot.exp_avg_sq,
        "master_weights": slot.master_weights,
    }


def publish(state: State, slot: ParameterSlot) -> None:
    """Makes `state[p]` hold the slot's views; keys of the user's own stay in it."""
    state.setdefault(slot.parameter, {}).update(slab_entry(slot))


def follow_storage(state: Mapping[Any, Any], slot: ParameterSlot) -> None:
    """Follows a parameter stepped in place to its new storage; masters that the user has put there stay.

    Raises:
        SettingsError: see `ParameterSlot.follow_parameter`.
    """
    before = slot.master_weights
    entry = state.get(slot.parameter)
    if slot.follow_parameter() and entry and entry.get("master_weights") is before:
        entry["master_weights"] = slot.master_weights


@torch.no_grad()
def follow_edits(state: State, slots: Mapping[Parameter, ParameterSlot], team: OneRank) -> list[ParameterSlot]:
    """Takes edits of the state over into the slabs and publishes the slabs again.

    Where there are several ranks, every rank must have made the same edits. The rank that steps a parameter writes
    its masters and moments, each rank its own step count. Collective if anything was edited.

    Args:
        state: `optimizer.state`, or what the user has put in its place.
        slots: the optimizer's.
        team: the ranks that share the slots.

    Returns:
        The slots whose masters were replaced: their compute weights are to be refreshed.

    Raises:
        SettingsError: an entry lacks a key, or holds something of another shape or dtype; nothing has been written.
    """
    with team.reporting("read edits of the state"):
        edited = [slot for slot in slots.values() if _is_edited(state.get(slot.parameter), slot)]
        for slot in edited:
            check_entry(state.get(slot.parameter), slot)
    if not edited:
        return []
    with team.together("read edits of the state"):
        given = {slot: _replacements(state.get(slot.parameter), slot) for slot in edited}
        _copy_views(given, slots.values())
    with team.together("take over edits of the state"):
        for slot, tensors in given.items():
            _write(slot, tensors)
            publish(state, slot)
    return [slot for slot, tensors in given.items() if tensors is not None and "master_weights" in tensors]


def _is_edited(entry: Mapping[str, Any] | None, slot: ParameterSlot) -> bool:
    return not entry or any(entry.get(key) is not tensor for key, tensor in slab_entry(slot).items())


def _replacements(entry: Mapping[str, Any] | None, slot: ParameterSlot) -> dict[str, Tensor] | None:
    """The tensors that are not the slab's own; None where the parameter starts anew."""
    if not entry:
        return None
    own = slab_entry(slot)
    return {key: entry[key] for key in own if key in entry and entry[key] is not own[key]}


def _copy_views(given: Mapping[ParameterSlot, dict[str, Tensor] | None], slots: Iterable[ParameterSlot]) -> None:
    """Copies tensors that lie in a slab themselves (exchanged entries), before any slab is written."""
    slabs = {tensor.untyped_storage().data_ptr() for slot in slots for tensor in slab_entry(slot).values()}
    for tensors in given.values():
        for key, tensor in (tensors or {}).items():
            if tensors and tensor.untyped_storage().data_ptr() in slabs:
                tensors[key] = tensor.clone()


def _write(slot: ParameterSlot, tensors: Mapping[str, Tensor] | None) -> None:
    own = slab_entry(slot)
    written = own.keys() if slot.is_stepped_here else {"step"}
    if tensors is None:
        for key in written - {"master_weights"}:
            own[key].zero_()
        return
    for key in written & tensors.keys():
        own[key].copy_(tensors[key].reshape(own[key].shape))


def saved_entry(entry: Mapping[str, Any] | None, slot: ParameterSlot) -> dict[str, Any]:
    """What a state dict holds of a slot: the entry as it stands, edits included; the slabs are left alone.

    Args:
        entry: `state[p]`; None or empty where it was deleted: step and moments are zero then.
        slot: the parameter's; masters are left out where the parameter is its own.

    Raises:
        SettingsError: see `follow_edits`.
    """
    check_entry(entry, slot)
    own = slab_entry(slot)
    if not entry:
        entry = {key: tensor if key == "master_weights" else torch.zeros_like(tensor) for key, tensor in own.items()}
    masters = entry.get("master_weights", slot.master_weights)
    others = {key: value for key, value in entry.items() if key != "master_weights"}
    return others if slot.is_in_place and masters is slot.master_weights else {**others, "master_weights": masters}


def check_entry(entry: Mapping[str, Any] | None, slot: ParameterSlot) -> None:
    """Refuses an entry that cannot be copied into the slabs bit for bit.

    Raises:
        SettingsError: names the parameter, the key and what it holds.
    """
    if not entry:
        return
    for key, own in slab_entry(slot).items():
        if key == "master_weights" and key not in entry:
            continue
        value = entry.get(key)
        if isinstance(value, Tensor) and (_is_scalar(value) if key == "step" else _fits(value, own, slot)):
            continue
        if isinstance(value, Tensor):
            found = f"a {value.dtype} tensor of shape {tuple(value.shape)}"
        else:
            found = "nothing" if key not in entry else f"a {type(value).__name__}"
        wanted = "a tensor of one number" if key == "step" else f"a float32 tensor of shape {tuple(own.shape)}"
        raise SettingsError(
            f"optimizer.state holds {found} as {key} of {slot.name}. AdamW steps with {wanted} there. Put such a "
            "tensor into the entry, or delete the whole entry to start that parameter's moments anew."
        )


def _is_scalar(value: Tensor) -> bool:
    return value.numel() == 1 and not value.dtype.is_complex


def _fits(value: Tensor, own: Tensor, slot: ParameterSlot) -> bool:
    """The parameter's dtype fits too: `torch.zeros_like(p)` is how moments are reset, and bf16 widens exactly."""
    return value.shape == own.shape and value.dtype in (torch.float32, slot.parameter.dtype)

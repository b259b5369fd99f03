"""Reading a saved AdamW state, torch's or ours, into host slabs that keep their dtype, device and page-locking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trl_budget.errors import SettingsError
from trl_budget.parameter_slots import ParameterSlot

UNSERVED_FLAGS = ("amsgrad", "maximize", "capturable", "differentiable")


def check_loadable(state_dict: dict[str, Any], slots: Sequence[ParameterSlot | None]) -> None:
    """Refuses a saved state that does not fit, before anything is changed.

    Args:
        state_dict: in the format of `torch.optim.AdamW` or `HostAdamW`.
        slots: the optimizer's slots in the order of its groups; None where a parameter is frozen.

    Raises:
        SettingsError: a variant of AdamW that is not served, or tensors of another shape.
    """
    for group in state_dict["param_groups"]:
        for flag in UNSERVED_FLAGS:
            if group.get(flag):
                raise SettingsError(
                    f"The saved optimizer state was written with {flag}={group[flag]}. HostAdamW does not step that "
                    "variant. Resume with optimizer_placement='device'."
                )
    for index, entry in state_dict["state"].items():
        slot = slots[index] if index < len(slots) else None
        for key in ("exp_avg", "exp_avg_sq", "master_weights"):
            value = entry.get(key)
            if slot is None or (value is None and key == "master_weights"):
                continue
            if value is None or value.shape != slot.exp_avg.shape:
                found = "nothing" if value is None else tuple(value.shape)
                raise SettingsError(
                    f"The saved optimizer state holds {found} as {key} of {slot.name}, whose shape is "
                    f"{tuple(slot.exp_avg.shape)}. It was saved for another model or another optimizer. "
                    "Resume from a checkpoint of this model, or delete its optimizer.pt."
                )


def load_slot(slot: ParameterSlot, entry: Mapping[str, Any] | None) -> None:
    """Copies one parameter's saved state into its slab views; without one, moments and step start from zero."""
    if entry is None:  # the parameter had no gradient yet when a torch optimizer was saved
        for tensor in (slot.step, slot.exp_avg, slot.exp_avg_sq):
            tensor.zero_()
        return
    slot.step.copy_(torch.as_tensor(entry["step"]))
    slot.exp_avg.copy_(entry["exp_avg"])
    slot.exp_avg_sq.copy_(entry["exp_avg_sq"])
    if "master_weights" in entry:
        slot.master_weights.copy_(entry["master_weights"])

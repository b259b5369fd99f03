"""What `HostAdamW` accepts: arguments, parameter groups, and a saved AdamW state, torch's or ours.

States are copied into the existing host slabs, which keep their dtype, device and page-locking.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from trl_budget.errors import SettingsError
from trl_budget.parameter_slots import ParameterSlot

IMPLEMENTATIONS = ("fused", "foreach", "loop")
UNSERVED_FLAGS = ("amsgrad", "maximize", "capturable", "differentiable")


def torch_defaults(implementation: str, **hyperparameters: Any) -> dict[str, Any]:
    """A group's defaults with all the keys of `torch.optim.AdamW`, so that torch can load what we save.

    Args:
        implementation: "fused", "foreach" or "loop".
        hyperparameters: `lr`, `betas`, `eps`, `weight_decay`.
    """
    flags = dict.fromkeys(UNSERVED_FLAGS, False)
    kind = {"foreach": None, "fused": implementation == "fused" or None, "decoupled_weight_decay": True}
    return {**hyperparameters, **flags, **kind}


def check_arguments(implementation: str) -> None:
    """Refuses an unknown implementation.

    Raises:
        SettingsError: names the value and those that are known.
    """
    if implementation not in IMPLEMENTATIONS:
        raise SettingsError(
            f"implementation={implementation!r} is not known. HostAdamW runs one of torch's own AdamW kinds. "
            f"Set implementation to one of {', '.join(IMPLEMENTATIONS)}."
        )


def learning_rate(value: Any, implementation: str) -> float | Tensor:
    """A group's learning rate as torch's functional AdamW takes it: a number, or a tensor of no dimension on the host.

    The tensor is not read here: torch's loop computes with it in its dtype, so a number would have other bits.

    Raises:
        SettingsError: neither a number nor a tensor of one, or a tensor for "foreach", which torch refuses too.
    """
    if isinstance(value, int | float):
        return value
    if not isinstance(value, Tensor) or value.numel() != 1 or value.dtype.is_complex:
        raise _wrong_type("lr", value)
    if implementation == "foreach":
        raise SettingsError(
            f"lr={value!r} is a tensor and implementation is 'foreach'. torch's foreach AdamW takes no such learning "
            "rate. Set implementation to 'fused' or 'loop', or pass lr as a float."
        )
    return value.detach().to("cpu").reshape(())


def _wrong_type(name: str, value: Any) -> SettingsError:
    wanted = {"betas": "a pair of floats", "lr": "a float, or a tensor of one element"}.get(name, "a float")
    return SettingsError(
        f"{name}={value!r} is of type {type(value).__name__}. AdamW on the host computes with {name} as {wanted}. "
        f"Set {name} to {wanted}."
    )


def _values_of(name: str, value: Any, implementation: str) -> tuple[float | Tensor, ...]:
    if name == "lr":
        return (learning_rate(value, implementation),)
    values = (value,) if name != "betas" else tuple(value) if isinstance(value, tuple | list) else ()
    if len(values) != (2 if name == "betas" else 1) or not all(isinstance(v, int | float) for v in values):
        raise _wrong_type(name, value)
    return values


def step_settings(group: Mapping[str, Any], implementation: str) -> dict[str, Any]:
    """The keyword arguments with which torch's functional AdamW steps a group.

    Raises:
        SettingsError: see `learning_rate`.
    """
    return {
        "foreach": implementation == "foreach",
        "fused": implementation == "fused",
        "beta1": group["betas"][0],
        "beta2": group["betas"][1],
        "lr": learning_rate(group["lr"], implementation),
        **{key: group[key] for key in ("eps", "weight_decay")},
        **dict.fromkeys(UNSERVED_FLAGS, False),
    }


def check_group(group: Mapping[str, Any], implementation: str) -> None:
    """Refuses hyperparameters of a wrong type or out of range, and variants of AdamW that are not served.

    Raises:
        SettingsError: names the hyperparameter or the flag.
    """
    for name in ("lr", "eps", "weight_decay", "betas"):
        values = _values_of(name, group[name], implementation)
        upper = 1.0 if name == "betas" else math.inf
        if not all(0 <= value < upper for value in values):
            raise SettingsError(
                f"{name}={group[name]} is out of range. AdamW needs numbers: lr, eps and weight_decay >= 0, betas in "
                f"[0, 1). Set {name} to such a value."
            )
    for flag in UNSERVED_FLAGS:
        if group.get(flag):
            raise SettingsError(
                f"A parameter group has {flag}={group[flag]}. HostAdamW does not step that variant. "
                f"Remove {flag}, or set optimizer_placement='device'."
            )


def check_loadable(state_dict: dict[str, Any], slots: Sequence[ParameterSlot | None], implementation: str) -> None:
    """Refuses a saved state that does not fit, before anything is changed.

    Args:
        state_dict: in the format of `torch.optim.AdamW` or `HostAdamW`.
        slots: the optimizer's slots in the order of its groups; None where a parameter is frozen.
        implementation: the optimizer's.

    Raises:
        SettingsError: a variant of AdamW that is not served, or tensors of another shape.
    """
    for group in state_dict["param_groups"]:
        if "lr" in group:
            learning_rate(group["lr"], implementation)
        for flag in UNSERVED_FLAGS:
            if group.get(flag):
                raise SettingsError(
                    f"The saved optimizer state was written with {flag}={group[flag]}. HostAdamW does not step that "
                    "variant. Resume with optimizer_placement='device'."
                )
    for index, entry in state_dict["state"].items():
        if "step" not in entry:
            raise SettingsError(
                f"The saved optimizer state of parameter {index} holds no step, only {', '.join(entry)}. It is not "
                "the state of an AdamW. Resume from a checkpoint of this model, or delete its optimizer.pt."
            )
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
    """Copies one parameter's saved state into its slab views; without one, moments and step start from zero.

    Where another rank steps the parameter, only the step count is this rank's to write.
    """
    slot.step.fill_(0 if entry is None else float(entry["step"]))
    if not slot.is_stepped_here:
        return
    if entry is None:  # the parameter had no gradient yet when a torch optimizer was saved
        for tensor in (slot.exp_avg, slot.exp_avg_sq):
            tensor.zero_()
        return
    slot.exp_avg.copy_(entry["exp_avg"])
    slot.exp_avg_sq.copy_(entry["exp_avg_sq"])
    if "master_weights" in entry:
        slot.master_weights.copy_(entry["master_weights"])

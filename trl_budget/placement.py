"""Decides where the optimizer lives and when gradients leave: plain facts in, a value and its reason out.

Under `auto`, what host placement cannot serve is trained as stock TRL does, and the reason is printed. An explicit
`host`, or a `HostAdamW` passed as the optimizer, that cannot be served is an error at construction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from trl_budget.errors import SettingsError

OPTIMIZER_PLACEMENTS = ("auto", "device", "host")
GRADIENT_PLACEMENTS = ("auto", "device", "host")
NOTHING_TRAINED = "no weight of the policy requires a gradient"
IMPLEMENTATION_OF_OPTIM = {"adamw_torch_fused": "fused", "adamw_torch": "foreach"}


@dataclass(frozen=True)
class PlacementFacts:
    """What the decision depends on.

    Attributes:
        optim: the training arguments' `optim`.
        device_type: "cpu", "cuda", ...
        world_size: number of processes.
        parallelism: "FSDP", "DeepSpeed" or "tensor, context or sequence parallelism" if the run was launched with it.
        is_adapter: whether only adapters are trained (PEFT).
        bf16: the training arguments' `bf16`.
        fp16: the training arguments' `fp16`.
        full_eval: "bf16_full_eval" or "fp16_full_eval" if either is on.
        has_bf16_units: False on CUDA cards older than Ampere, which emulate bf16.
        is_split_over_devices: whether a device map spreads the model.
        user_optimizer: class name of an optimizer that the user passed, if any.
        is_user_optimizer_on_host: whether that optimizer is a `HostAdamW`.
        overrides_optimizer_class: whether the trainer's class overrides `get_optimizer_cls_and_kwargs`.
        unserved_parameter: what is wrong with the first trainable parameter that cannot be served, if any.
        trains_nothing: whether no weight of the loaded policy requires a gradient.
    """

    optim: str
    device_type: str
    world_size: int = 1
    parallelism: str | None = None
    is_adapter: bool = False
    bf16: bool = False
    fp16: bool = False
    full_eval: str | None = None
    has_bf16_units: bool = True
    is_split_over_devices: bool = False
    user_optimizer: str | None = None
    is_user_optimizer_on_host: bool = False
    overrides_optimizer_class: bool = False
    unserved_parameter: str | None = None
    trains_nothing: bool = False

    @property
    def casts_policy(self) -> bool:
        """Whether host placement makes the policy bf16: on CUDA, in full, with an optimizer of our own making."""
        return self.device_type == "cuda" and self.bf16 and not self.is_adapter and self.user_optimizer is None


@dataclass(frozen=True)
class ResolvedSetting:
    """One row of the table that is printed at construction."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True)
class _Obstacle:
    applies: Callable[[PlacementFacts], bool]
    reason: str  # formatted with the facts
    remedy: str


_OBSTACLES = (
    _Obstacle(
        lambda f: f.parallelism is not None,
        "the run was launched with {parallelism}, which shards or wraps the weights itself",
        "launch one plain process (`python script.py`)",
    ),
    _Obstacle(
        lambda f: f.world_size > 1 and f.is_adapter,
        "{world_size} processes were launched, where adapters keep stock's DDP, which reduces `parameter.grad`",
        "launch one process",
    ),
    _Obstacle(
        lambda f: f.user_optimizer is not None and not f.is_user_optimizer_on_host,
        "optimizers= holds a {user_optimizer}, which steps parameters where they are",
        "pass a HostAdamW, or leave optimizers out",
    ),
    _Obstacle(
        lambda f: f.user_optimizer is None and f.optim not in IMPLEMENTATION_OF_OPTIM,
        "optim='{optim}' has no host-side implementation",
        f"set optim to one of {', '.join(IMPLEMENTATION_OF_OPTIM)}",
    ),
    _Obstacle(
        lambda f: f.user_optimizer is None and f.overrides_optimizer_class,
        "the trainer's class overrides get_optimizer_cls_and_kwargs",
        "leave that method to TRL",
    ),
    _Obstacle(
        lambda f: f.unserved_parameter is not None,
        "{unserved_parameter}",
        "load contiguous weights with dtype='bfloat16' or 'float32'",
    ),
    _Obstacle(
        lambda f: f.fp16, "fp16=True scales gradients in `parameter.grad`, which has left the device", "set bf16=True"
    ),
    _Obstacle(
        lambda f: f.full_eval is not None,
        "{full_eval}=True casts the model away from the weights the masters belong to",
        "set {full_eval}=False; the policy is evaluated in its compute dtype anyway",
    ),
    _Obstacle(
        lambda f: f.device_type not in ("cpu", "cuda"),
        "copies to and from the host are written for CUDA, not for {device_type}",
        "train on CUDA or the CPU",
    ),
    _Obstacle(
        lambda f: f.device_type == "cuda" and f.bf16 and not f.has_bf16_units,
        "this card has no bf16 units (compute capability below 8.0) and bf16=True",
        "set bf16=False: the policy then computes in fp32, its moments and their step still live on the host",
    ),
    _Obstacle(
        lambda f: f.is_split_over_devices,
        "the model's device map spreads it over several devices",
        "load the model with device_map=None",
    ),
)


def check_optimizer_placement(requested: str) -> None:
    """Refuses anything but the three placements.

    Raises:
        SettingsError: names the value and the three.
    """
    if requested not in OPTIMIZER_PLACEMENTS:
        raise SettingsError(
            f"optimizer_placement={requested!r} is not a placement. The optimizer is stepped on the device or on the "
            f"host. Set optimizer_placement to one of {', '.join(OPTIMIZER_PLACEMENTS)}."
        )


def resolve_optimizer_placement(requested: str, facts: PlacementFacts) -> ResolvedSetting:
    """Turns the `optimizer_placement` field into "host" or "device".

    Raises:
        SettingsError: "host" was asked for and cannot be served.
    """
    name = "optimizer_placement"
    check_optimizer_placement(requested)
    if facts.is_user_optimizer_on_host and requested == "device":
        raise SettingsError(
            "optimizers= holds a HostAdamW, but optimizer_placement='device'. Stock clipping reads `parameter.grad`, "
            "which HostAdamW empties, so nothing would be clipped. Set optimizer_placement='auto' or drop optimizers."
        )
    if requested == "device":
        return ResolvedSetting(name, "device", "set by you: stock TRL's optimizer")
    obstacles = [obstacle for obstacle in _OBSTACLES if obstacle.applies(facts)]
    reasons = "; ".join(obstacle.reason.format_map(vars(facts)) for obstacle in obstacles)
    if obstacles and (requested == "host" or facts.is_user_optimizer_on_host):
        asked = "optimizers= holds a HostAdamW" if requested != "host" else "optimizer_placement='host' was asked for"
        remedies = "; ".join(obstacle.remedy.format_map(vars(facts)) for obstacle in obstacles)
        raise SettingsError(
            f"{asked}, but {reasons}. The host step would train something else than "
            f"stock TRL, or not run at all. Either {remedies}; or set optimizer_placement='device'."
        )
    if obstacles:
        return ResolvedSetting(name, "device", reasons)
    if facts.is_user_optimizer_on_host:
        return ResolvedSetting(name, "host", "optimizers= holds a HostAdamW")
    if facts.trains_nothing and requested == "auto":
        return ResolvedSetting(name, "device", NOTHING_TRAINED)
    if facts.is_adapter and requested == "auto":
        return ResolvedSetting(name, "device", "adapters are small: their state fits beside the frozen model")
    if requested == "host":
        return ResolvedSetting(name, "host", "set by you")
    processes = "one process" if facts.world_size == 1 else f"{facts.world_size} processes"
    return ResolvedSetting(name, "host", f"full-parameter training, {processes}, optim='{facts.optim}'")


def check_gradient_placement(requested: str) -> None:
    """Refuses anything but the three placements.

    Raises:
        SettingsError: names the value and the three.
    """
    if requested not in GRADIENT_PLACEMENTS:
        raise SettingsError(
            f"gradient_placement={requested!r} is not a placement. Gradients stay on the device until their backward "
            f"ends, or leave for the host while it runs. Set gradient_placement to one of "
            f"{', '.join(GRADIENT_PLACEMENTS)}."
        )


def resolve_gradient_placement(
    requested: str, optimizer: ResolvedSetting, device_type: str, given: str | None = None
) -> ResolvedSetting:
    """Turns the `gradient_placement` field into "host" or "device".

    Args:
        requested: the field.
        optimizer: the resolved `optimizer_placement`.
        device_type: where the policy computes.
        given: what the `HostAdamW` that the user passed was built with, if there is one.

    Raises:
        SettingsError: "host" was asked for where the optimizer is on the device, or the user's HostAdamW does other
            than the field says.
    """
    name = "gradient_placement"
    check_gradient_placement(requested)
    if optimizer.value == "device":
        if requested == "host":
            raise SettingsError(
                f"gradient_placement='host', but the optimizer is on the device ({optimizer.reason}). Its step reads "
                "`parameter.grad`, which would be gone. Set gradient_placement='auto', or train with "
                "optimizer_placement='host'."
            )
        return ResolvedSetting(name, "device", "the optimizer on the device reads `parameter.grad`")
    if given is not None:
        if requested not in ("auto", given):
            raise SettingsError(
                f"gradient_placement={requested!r}, but optimizers= holds a HostAdamW that was built with {given!r}. "
                f"An optimizer keeps the placement it was built with. Build it with gradient_placement={requested!r}, "
                "or set the field to 'auto'."
            )
        return ResolvedSetting(name, given, "as the HostAdamW in optimizers= was built")
    if requested != "auto":
        return ResolvedSetting(name, requested, "set by you")
    if device_type == "cuda":
        return ResolvedSetting(name, "host", "gradients leave and are summed in fp32 while backward runs")
    return ResolvedSetting(name, "device", f"the {device_type} is where the sums are made, nothing has to leave")


def with_departures(
    setting: ResolvedSetting, optimizer: ResolvedSetting, device_type: str, num_departures: int
) -> ResolvedSetting:
    """`gradient_placement`, with a word on gradients that leave the device once for each of several micro-batches.

    Args:
        setting: the resolved `gradient_placement`.
        optimizer: the resolved `optimizer_placement`.
        device_type: where the policy computes.
        num_departures: stock's micro-batches in an optimizer step, or 1 where they are merged.
    """
    leave = optimizer.value == "host" and (setting.value == "host" or device_type != "cpu")
    if not leave or num_departures == 1:
        return setting
    return replace(setting, reason=f"{setting.reason}; all of them {num_departures} times a step, once a micro-batch")


def format_table(settings: list[ResolvedSetting], title: str) -> str:
    """The table as text: one row per setting, with its reason."""
    name_width = max(len(setting.name) for setting in settings)
    value_width = max(len(setting.value) for setting in settings)
    rows = [f"  {s.name:<{name_width}}  {s.value:<{value_width}}  {s.reason}" for s in settings]
    return "\n".join([title, *rows])

"""What the host keeps for one trainable parameter, and where its flat pieces are.

A parameter that is fp32 and on the CPU is stepped in place: its master weights are the parameter itself and its
gradient stays in `parameter.grad`. Every other parameter has an fp32 copy and an fp32 accumulator on the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from trl_budget.errors import SettingsError
from trl_budget.pinned import ParameterSlabs, check_host_memory

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(eq=False)
class ParameterSlot:
    """Host state of one parameter.

    Attributes:
        parameter: the compute weights, of any shape, fp32 or bf16, on the CPU or a CUDA device.
        name: what errors call it.
        master_weights: fp32, host, the parameter's shape. The parameter itself where it is stepped in place.
        exp_avg: fp32, host, the parameter's shape.
        exp_avg_sq: fp32, host, the parameter's shape.
        step: fp32 scalar, host, as torch keeps it.
        accumulator: fp32, host, the parameter's shape; None where the parameter is stepped in place.
        accumulator_is_filled: whether the accumulator holds a gradient of the running step.
        had_gradient: whether torch would still keep a gradient here: one has come since they were last set to None.
        clip_coefficient: factor that the accumulator is still to be multiplied with, fp32 scalar.
        is_stepped_here: whether this rank runs AdamW on the parameter.
    """

    parameter: Parameter
    name: str
    master_weights: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    accumulator: Tensor | None
    accumulator_is_filled: bool = False
    had_gradient: bool = False
    clip_coefficient: Tensor | None = None
    is_stepped_here: bool = True

    @property
    def is_in_place(self) -> bool:
        """Whether the parameter is its own master."""
        return self.accumulator is None

    @property
    def gradient(self) -> Tensor | None:
        """The fp32 host gradient of the running step, or None where the parameter took no part."""
        if self.accumulator is None:
            return self.parameter.grad
        return self.accumulator if self.accumulator_is_filled else None

    def scale_accumulator(self) -> None:
        """Multiplies the accumulator with the pending clip coefficient."""
        if self.clip_coefficient is not None and self.accumulator is not None:
            self.accumulator.mul_(self.clip_coefficient)
            self.clip_coefficient = None

    def forget_gradient(self) -> None:
        """Marks the accumulator empty; `parameter.grad` is left alone."""
        self.had_gradient = self.had_gradient or self.gradient is not None
        self.accumulator_is_filled = False
        self.clip_coefficient = None

    def follow_parameter(self) -> bool:
        """Follows a parameter whose storage was replaced (`parameter.data = ...`). Returns whether it was.

        Raises:
            SettingsError: the parameter changed its shape or layout, or was its own master and left the CPU or fp32.
        """
        if self.parameter.shape != self.exp_avg.shape or not self.parameter.is_contiguous():
            raise SettingsError(
                f"{self.name} had shape {tuple(self.exp_avg.shape)} when HostAdamW was built and now has shape "
                f"{tuple(self.parameter.shape)} and strides {self.parameter.stride()}. Its masters and moments no "
                "longer fit. Reshape the model first, keep weights contiguous, then build HostAdamW."
            )
        if not self.is_in_place or self.parameter.data_ptr() == self.master_weights.data_ptr():
            return False
        if not steps_in_place(self.parameter):
            raise SettingsError(
                f"{self.name} was fp32 on the CPU when HostAdamW was built and is now {self.parameter.dtype} on "
                f"{self.parameter.device}. Its master weights were the parameter itself, so they are gone. "
                "Move and cast the model first, then build HostAdamW."
            )
        self.master_weights = self.parameter.detach()
        return True


def steps_in_place(parameter: Tensor) -> bool:
    """Whether `parameter` can be its own master: fp32, on the CPU."""
    return parameter.device.type == "cpu" and parameter.dtype == torch.float32


def check_parameter(parameter: Tensor, name: str) -> None:
    """Refuses what cannot be stepped on the host.

    Raises:
        SettingsError: wrong dtype (quantized weights included), device, layout or stride.
    """
    if parameter.is_meta:
        raise SettingsError(
            f"{name} is on the meta device and has no values. There is nothing to make master weights from. "
            "Load the model with real weights (`device_map=None`, no `init_empty_weights`)."
        )
    if parameter.dtype not in SUPPORTED_DTYPES:
        raise SettingsError(
            f"{name} is {parameter.dtype}. Host-side AdamW steps fp32 masters of fp32 or bf16 weights; quantized and "
            "fp16 weights have no exact master. Load the model with dtype='bfloat16' or 'float32', or train adapters "
            "with optimizer_placement='device'."
        )
    if parameter.device.type not in ("cpu", "cuda"):
        raise SettingsError(
            f"{name} is on {parameter.device}. Copies to and from the host are written for CUDA and CPU only. "
            "Set optimizer_placement='device'."
        )
    if not parameter.is_contiguous():
        raise SettingsError(
            f"{name} of shape {tuple(parameter.shape)} has strides {parameter.stride()}. Slabs are copied as flat "
            "ranges, which needs contiguous weights. Set `parameter.data = parameter.data.contiguous()` first."
        )


def check_given_masters(given_masters: Mapping[Parameter, Tensor]) -> None:
    """Refuses masters that are not fp32 host tensors of their parameter's shape.

    Raises:
        SettingsError: names the shape, dtype and device.
    """
    for parameter, given in given_masters.items():
        if given.shape != parameter.shape or given.dtype != torch.float32 or given.device.type != "cpu":
            raise SettingsError(
                f"The master weights given for a parameter of shape {tuple(parameter.shape)} are {given.dtype} of "
                f"shape {tuple(given.shape)} on {given.device}. Masters are fp32, on the CPU and of the "
                "parameter's shape. Pass `parameter.detach().float().cpu()` or leave master_weights out."
            )


class HostState:
    """Allocates the host memory of slots: masters, moments and accumulators, each in a few slabs.

    Args:
        pin_memory: page-lock masters and moments of CUDA parameters. Accumulators are never copied to or from the
            device directly (staging is), so they stay pageable.
    """

    def __init__(self, *, pin_memory: bool) -> None:
        self._pin_memory = pin_memory
        self._slabs: list[ParameterSlabs] = []

    @property
    def nbytes(self) -> int:
        """Bytes of host memory allocated here."""
        return sum(slabs.nbytes for slabs in self._slabs)

    def build(
        self, names: Mapping[Parameter, str], given_masters: Mapping[Parameter, Tensor], staging_bytes: int = 0
    ) -> dict[Parameter, ParameterSlot]:
        """Makes a slot for every key of `names`.

        Args:
            names: parameter -> what errors call it.
            given_masters: fp32 host tensors to keep as masters; missing ones are made from the parameter.
            staging_bytes: what gradient staging is about to take beside the state.
        """
        parameters = list(names)
        separate = [p for p in parameters if not steps_in_place(p)]
        check_given_masters(given_masters)
        new_masters = [p for p in separate if p not in given_masters]
        fp32_tensors = 2 * sum(p.numel() for p in parameters) + sum(p.numel() for p in [*separate, *new_masters])
        check_host_memory(4 * fp32_tensors + staging_bytes, "the optimizer state and gradient staging")
        masters = {p: p.detach() for p in parameters if steps_in_place(p)}
        for parameter in masters.keys() & given_masters.keys():
            masters[parameter].copy_(given_masters[parameter])
        masters.update({p: given_masters[p] for p in separate if p in given_masters})
        for parameter, view in self._allocate("master weights", new_masters):
            masters[parameter] = view.copy_(parameter.detach())
        exp_avgs = dict(self._allocate("exp_avg", parameters))
        exp_avg_sqs = dict(self._allocate("exp_avg_sq", parameters))
        accumulators = dict(self._allocate("gradient accumulators", separate, pin=False))
        return {
            p: ParameterSlot(
                parameter=p,
                name=names[p],
                master_weights=masters[p],
                exp_avg=exp_avgs[p],
                exp_avg_sq=exp_avg_sqs[p],
                step=torch.zeros((), dtype=torch.float32),
                accumulator=accumulators.get(p),
            )
            for p in parameters
        }

    def _allocate(
        self, purpose: str, parameters: Sequence[Parameter], *, pin: bool = True
    ) -> Iterator[tuple[Parameter, Tensor]]:
        for device_type in ("cuda", "cpu"):
            chosen = [p for p in parameters if p.device.type == device_type]
            if chosen:
                slabs = ParameterSlabs(purpose, pin=pin and self._pin_memory and device_type == "cuda")
                self._slabs.append(slabs)
                yield from slabs.extend(chosen)

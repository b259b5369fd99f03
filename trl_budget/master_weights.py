"""Captures fp32 master weights from a freshly loaded policy and leaves bf16 compute weights behind.

Runs before the policy moves to the GPU, so fp32 weights never reach the card, and releases each fp32 tensor as soon as
it has been copied. Bit-exact: masters are the loaded values, compute weights their cast.
"""

from __future__ import annotations

import torch
from torch import nn

from trl_budget.pinned import ParameterSlabs
from trl_budget.upstream import kept_in_fp32


@torch.no_grad()
def capture_master_weights(model: nn.Module, *, pin: bool) -> ParameterSlabs:
    """Moves the trainable weights' fp32 values to the host and casts the model's parameters to bf16 where they are.

    Buffers, and parameters that transformers keeps in fp32 for a bf16 model, keep their dtype. Tied weights are one
    parameter and stay tied.

    Args:
        model: the policy, on any device; its `Parameter` objects stay the same.
        pin: page-lock the masters.

    Returns:
        fp32 host tensors by parameter, for every trainable floating-point parameter.

    Raises:
        HostMemoryError: the machine refused the memory.
    """
    kept = kept_in_fp32(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    masters = ParameterSlabs("master weights", pin=pin)
    trainable = [p for p in names if p.requires_grad and p.is_floating_point()]
    for parameter, view in masters.extend(trainable):
        view.copy_(parameter.data)
        _cast(parameter, names[parameter], kept)
    for parameter, name in names.items():
        if not parameter.requires_grad and parameter.dtype == torch.float32:
            _cast(parameter, name, kept)
    return masters


def _cast(parameter: nn.Parameter, name: str, kept: tuple[str, ...]) -> None:
    if parameter.dtype == torch.float32 and not any(part in name.split(".") for part in kept):
        parameter.data = parameter.data.to(torch.bfloat16)

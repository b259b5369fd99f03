"""A model of any dtype computes in fp32 for a moment, with the fp32 copy of one layer's weights at a time.

For trial forwards, whose differences bf16 would hide: rounding moves log-probs by 1e-2 there, by 1e-6 here. No
parameter is written or moved; modules see other tensors in their place while they run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.modeling_layers import GradientCheckpointingLayer

_LIFTED = (torch.bfloat16, torch.float16)


@contextmanager
def in_fp32(model: nn.Module) -> Iterator[None]:
    """Forwards of `model` compute in fp32 meanwhile, without autocast and without TF32.

    Costs 4 bytes for each weight of the decoder layer that runs, beside the model. What is read of a module that does
    not run, outside the decoder layers, keeps its dtype, as TRL's fused head reads the LM head's weights.

    Args:
        model: on any device; weights that are neither bf16 nor fp16, quantized ones among them, stay as they are.
    """
    device_type = next(model.parameters()).device.type
    precision = torch.get_float32_matmul_precision()
    handles: list[RemovableHandle] = []
    lifted: list[_Lifted] = []
    try:
        for module in model.modules():
            if isinstance(module, nn.Embedding):  # its rows are exact in fp32; a copy of the table would take GBs
                handles.append(module.register_forward_hook(_widened))
        for runner, owners in _runners(model):
            lifted.append(_Lifted(owners))
            handles.append(runner.register_forward_pre_hook(lifted[-1].lift, prepend=True))
            handles.append(runner.register_forward_hook(lifted[-1].lower, always_call=True))
        torch.set_float32_matmul_precision("highest")
        with torch.autocast(device_type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        for handle in handles:
            handle.remove()
        for weights in lifted:
            weights.lower()


def _widened(_: nn.Module, __: Any, output: Any) -> Any:
    return output.float() if isinstance(output, Tensor) and output.dtype in _LIFTED else output


def _runners(model: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """Modules that run, and the modules whose weights are fp32 meanwhile: decoder layers whole, the others alone.

    Not embeddings, whose rows are widened instead.

    Within a layer a module may read another's weights (Mamba's `dt_proj.weight @ x`, or a cast to its dtype).
    """
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) and module not in inside:
            yield module, list(module.modules())
            inside.update(module.modules())
        elif module not in inside and not isinstance(module, nn.Embedding):
            yield module, [module]


class _Lifted:
    """Weights and buffers of some modules that are fp32 while one of them runs."""

    def __init__(self, owners: list[nn.Module]) -> None:
        self._weights = [
            (owner, name, weight)
            for owner in owners
            for name, weight in owner.named_parameters(recurse=False)
            if weight.dtype in _LIFTED
        ]
        self._buffers = [
            (owner, name, buffer)
            for owner in owners
            for name, buffer in owner.named_buffers(recurse=False)
            if buffer.dtype in _LIFTED
        ]

    def lift(self, *_: Any) -> None:
        for owner, name, weight in self._weights:
            owner._parameters[name] = nn.Parameter(weight.detach().float(), requires_grad=False)
        for owner, name, buffer in self._buffers:
            owner._buffers[name] = buffer.float()

    def lower(self, *_: Any) -> None:
        for owner, name, weight in self._weights:
            owner._parameters[name] = weight
        for owner, name, buffer in self._buffers:
            owner._buffers[name] = buffer

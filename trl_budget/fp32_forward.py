"""A model of any dtype computes in fp32 for a moment, with the fp32 copy of one module's weights at a time.

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

_LIFTED = (torch.bfloat16, torch.float16)


@contextmanager
def in_fp32(model: nn.Module) -> Iterator[None]:
    """Forwards of `model` compute in fp32 meanwhile, without autocast and without TF32.

    Costs 4 bytes for each weight of the module that runs, beside the model; what a module reads of another one's
    weights, such as TRL's fused head of the LM head's, keeps its dtype.

    Args:
        model: on any device; weights that are neither bf16 nor fp16, quantized ones among them, stay as they are.
    """
    device_type = next(model.parameters()).device.type
    precision = torch.get_float32_matmul_precision()
    handles: list[RemovableHandle] = []
    lifted: list[_Lifted] = []
    try:
        for module in model.modules():
            weights = {name: p for name, p in module.named_parameters(recurse=False) if p.dtype in _LIFTED}
            buffers = {name: b for name, b in module.named_buffers(recurse=False) if b.dtype in _LIFTED}
            if weights or buffers:
                lifted.append(_Lifted(module, weights, buffers))
                handles += lifted[-1].attach()
        torch.set_float32_matmul_precision("highest")
        with torch.autocast(device_type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        for handle in handles:
            handle.remove()
        for owner in lifted:
            owner.restore()


class _Lifted:
    """One module whose own weights are fp32 while it runs."""

    def __init__(self, module: nn.Module, weights: dict[str, nn.Parameter], buffers: dict[str, Tensor]) -> None:
        self._module = module
        self._weights = weights
        self._buffers = buffers

    def attach(self) -> list[RemovableHandle]:
        return [
            self._module.register_forward_pre_hook(self._lift, prepend=True),
            self._module.register_forward_hook(self._lower, always_call=True),
        ]

    def _lift(self, *_: Any) -> None:
        for name, weight in self._weights.items():
            self._module._parameters[name] = nn.Parameter(weight.detach().float(), requires_grad=False)
        for name, buffer in self._buffers.items():
            self._module._buffers[name] = buffer.float()

    def _lower(self, *_: Any) -> None:
        self.restore()

    def restore(self) -> None:
        self._module._parameters.update(self._weights)
        self._module._buffers.update(self._buffers)

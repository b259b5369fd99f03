"""A policy's weights with its adapters merged, as vLLM takes them: one layer at a time, and the base stays to a bit.

TRL merges every adapter at once, on the card, and subtracts it again. Both sums are rounded, so that a bf16 base moves
with every sync, in a hundred of them by a third of what the adapters add, and a saved adapter belongs to a base that
nobody has (`benchmarks/results/adapter_drift.json`). Here the values are PEFT's own sums, and the old bits come back
after each layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from torch import Tensor, nn

from trl_budget.errors import SettingsError
from trl_budget.parking import ParkedWeights
from trl_budget.weight_views import plain_name

_REPLACED = "original_module"  # what PEFT's `modules_to_save` trains a copy of


def check_adapters(policy: nn.Module) -> None:
    """Refuses adapters that cannot be merged into weights.

    Raises:
        SettingsError: names their kind.
    """
    if not isinstance(policy, PeftModel) or not isinstance(policy.base_model, BaseTuner):
        kind = type(policy).__name__
        if isinstance(policy, PeftModel):
            kind = str(policy.peft_config[policy.active_adapter].peft_type)
        raise SettingsError(
            f"The policy is adapted by {kind}, which adds inputs instead of weights. vLLM holds one set of weights, "
            "into which adapters are merged, so it would generate without them. "
            "Set peft_config to a LoraConfig or another that can be merged, or use_vllm=False."
        )


@torch.no_grad()
def merged_weights(policy: nn.Module, parked: ParkedWeights | None) -> Iterator[tuple[str, Tensor]]:
    """Every weight of the base model with the active adapters merged, under the base model's own names, ties once.

    A value is to be read before the next is asked for; close the iterator to end early. Meanwhile one layer is merged.

    Args:
        policy: of PEFT, see `check_adapters`. A layer is here what PEFT has wrapped.
        parked: its parking; a policy that is parked is read from its host copy, and one layer is on the device.

    Yields:
        Name and value, `[...]` in the base's dtype: on the device for layers with adapters, else where they are.
    """
    assert isinstance(policy, PeftModel) and isinstance(policy.base_model, BaseTuner)
    policy.base_model._check_merge_allowed()
    away = parked if parked is not None and parked.is_parked else None
    values = dict(away.host_tensors()) if away is not None else {}
    layers: dict[Tensor, nn.Module] = {}
    for module in policy.modules():  # the outermost comes first
        if isinstance(module, BaseTunerLayer):
            layers = {**dict.fromkeys(module.parameters(), module), **layers}
    for layer, pairs in itertools.groupby(policy.named_parameters(), key=lambda pair: layers.get(pair[1])):
        with _merged(layer, away) if layer is not None else nullcontext():
            for name, parameter in pairs:
                if _REPLACED in name or policy.base_model.prefix in name:
                    continue
                value = parameter.detach() if layer is not None else values.get(name, parameter.detach())
                yield plain_name(name), value


@contextmanager
def _merged(layer: nn.Module, away: ParkedWeights | None) -> Iterator[None]:
    """While it lasts, `layer` is on the device and merged; afterwards its parameters have their old bits and place."""
    with away.lent(layer.parameters()) if away is not None else nullcontext():
        originals = [(parameter, parameter.data) for parameter in layer.parameters()]
        copies = [original.clone() for _, original in originals] if away is None else []
        tuners = [module for module in layer.modules() if isinstance(module, BaseTunerLayer)]
        try:
            for tuner in tuners:
                tuner.merge()
            yield
        finally:
            try:
                for tuner in reversed(tuners):
                    if tuner.merged:
                        tuner.unmerge()  # for what it notes; its difference is overwritten
            finally:
                for parameter, original in originals:
                    if parameter.data_ptr() != original.data_ptr():
                        parameter.data = original
                for (_, original), copy in zip(originals, copies, strict=False):
                    original.copy_(copy)

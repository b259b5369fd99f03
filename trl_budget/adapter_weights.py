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
from trl_budget.weight_views import is_adapter_name, plain_name, served_copies, unserved_names


def check_adapters(policy: nn.Module) -> None:
    """Refuses adapters that cannot be merged into one set of weights and taken out again. Merges one layer, to see.

    Raises:
        SettingsError: names their kind, or the weights.
    """
    if not isinstance(policy, PeftModel):
        raise _refusal(f"The policy is a {type(policy).__name__} with adapters, not a model of PEFT")
    kind = str(policy.peft_config[policy.active_adapters[0]].peft_type)
    if not isinstance(policy.base_model, BaseTuner):
        raise _refusal(f"The policy is adapted by {kind}, which adds inputs instead of weights")
    layers = [module for module in policy.modules() if isinstance(module, BaseTunerLayer)]
    if any(layer.merged for layer in layers):
        raise SettingsError(
            "The policy's adapters are merged into its base already, so that they would be added twice for vLLM. "
            "Call unmerge_adapter() before the trainer is built."
        )
    check_ties(policy)
    try:
        with _merged(layers[0], None):
            pass
    except NotImplementedError as error:
        raise _refusal(f"The policy is adapted by {kind}, which PEFT cannot merge") from error
    if layers[0].merged:
        raise _refusal(f"The policy is adapted by {kind}, which PEFT cannot take out again")


def _refusal(what: str) -> SettingsError:
    return SettingsError(
        f"{what}. vLLM holds one set of weights, into which adapters are merged, so it would generate with others "
        "than the policy's. Set peft_config to a LoraConfig or another that can be merged, or use_vllm=False."
    )


def check_ties(policy: nn.Module) -> None:
    """Refuses adapters that make two weights of one that the model ties: vLLM holds one tensor for both ends.

    Where PEFT ties the adapters too, both ends change alike and there is nothing to refuse.

    Args:
        policy: with or without adapters, its weights in memory. Only read.

    Raises:
        SettingsError: names both ends of the tie.
    """
    if not isinstance(policy, PeftModel) or not isinstance(policy.base_model, BaseTuner):
        return
    modules = dict(policy.named_modules(remove_duplicate=False))
    copies = served_copies(policy)
    ends: dict[Tensor, tuple[str, frozenset[int]]] = {}
    for name, parameter in policy.named_parameters(remove_duplicate=False):
        if is_adapter_name(policy, name) or ".modules_to_save." in name:
            continue
        change = _change(policy, name, modules, copies)
        first, first_change = ends.setdefault(parameter, (name, change))
        if change != first_change:
            raise _tie_refusal(first, name, changes=(first_change, change))


def check_stock_sync(policy: nn.Module) -> None:
    """Refuses adapters whose weights TRL 1.16 would send under other names, for engines that TRL synchronises.

    TRL knows LoRA's layers and the copies of `modules_to_save` of an adapter named "default".

    Args:
        policy: with or without adapters. Only read.

    Raises:
        SettingsError: names the first weight.
    """
    if not isinstance(policy, PeftModel) or not isinstance(policy.base_model, BaseTuner):
        return
    unserved = unserved_names(policy)
    for name, _ in policy.named_parameters():
        is_skipped = policy.base_model.prefix in name or "original_module" in name
        sent = (
            name.removeprefix("base_model.model.").replace(".base_layer", "").replace("modules_to_save.default.", "")
        )
        if is_skipped and name not in unserved:
            raise _sync_refusal(f"is not sent, though it stands for {plain_name(name)}", name)
        if not is_skipped and (name in unserved or sent != plain_name(name)):
            raise _sync_refusal(f"is sent as {sent}, which is no weight of the policy", name)


def _sync_refusal(what: str, name: str) -> SettingsError:
    return SettingsError(
        f"In TRL's weight sync {name} {what}. A server, and an engine over several ranks, are synchronised by TRL, "
        "which knows one adapter named 'default' and no trained tokens. Leave trainable_token_indices and other "
        "adapters out, or set vllm_mode='colocate' with vllm_tensor_parallel_size=1, or use_vllm=False."
    )


def _change(
    policy: PeftModel, name: str, modules: dict[str, nn.Module], copies: dict[str, str | None]
) -> frozenset[int]:
    """Addresses of the trained memory that stands for a weight of the base, or is added to it; empty for none."""
    parts = name.split(".")
    for depth in range(1, len(parts)):
        path = ".".join(parts[:depth])
        if copies.get(path) is not None:
            copy = modules[f"{path}.modules_to_save.{copies[path]}"]
            return frozenset(parameter.untyped_storage().data_ptr() for parameter in copy.parameters())
        layer = modules[path]
        if isinstance(layer, BaseTunerLayer):
            active = set(layer.active_adapters)
            return frozenset(
                parameter.untyped_storage().data_ptr()
                for own_name, parameter in layer.named_parameters()
                if is_adapter_name(policy, own_name) and active.intersection(own_name.split("."))
            )
    return frozenset()


def _tie_refusal(first: str, second: str, changes: tuple[frozenset[int], frozenset[int]]) -> SettingsError:
    first, second = (
        name.removeprefix("base_model.model.").replace(".original_module", "") for name in (first, second)
    )
    if all(changes):
        what = f"Two adapters of their own change {first}, which the model ties to {second}"
    else:
        changed, kept = (first, second) if changes[0] else (second, first)
        what = f"Adapters change {changed}, which the model ties to {kept}, and leave {kept} as it is"
    return SettingsError(
        f"{what}. vLLM holds one tensor for both ends of the tie, so it would generate with other weights than the "
        "policy's. Set ensure_weight_tying=True in peft_config, by which PEFT gives both ends one adapter; or take "
        "both out of its target_modules, modules_to_save and trainable_token_indices; or set use_vllm=False."
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
            for parameter in module.parameters():
                layers.setdefault(parameter, module)
    unserved = unserved_names(policy)
    named = list(policy.named_parameters())
    for layer, pairs in itertools.groupby(named, key=lambda pair: layers.get(pair[1])):
        with _merged(layer, away) if layer is not None else nullcontext():
            for name, _ in pairs:
                if name in unserved:
                    continue
                parameter = policy.get_parameter(name)  # some kinds of adapters merge by taking the base's place
                value = parameter.detach() if layer is not None else values.get(name, parameter.detach())
                yield plain_name(name), value


@contextmanager
def _merged(layer: nn.Module, away: ParkedWeights | None) -> Iterator[None]:
    """While it lasts, `layer` is on the device and merged; afterwards its parameters have their old bits and place."""
    parameters = list(layer.parameters())
    copies = [(p.data, p.data.clone()) for p in parameters if p.untyped_storage().nbytes() > 0]  # not those away
    with away.lent(layer) if away is not None else nullcontext():
        places = [(parameter, parameter.data) for parameter in parameters]
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
                for parameter, place in places:
                    if parameter.data_ptr() != place.data_ptr():
                        parameter.data = place
                for place, copy in copies:
                    place.copy_(copy)

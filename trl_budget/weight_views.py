"""Which rows of which vLLM tensor each weight of the policy is, or why it cannot be one. Reads only.

vLLM stacks projections by rows (q/k/v, gate/up) and pads the vocabulary at the end; everything else has the policy's
name and shape. Names, shapes, dtypes, devices, layouts and ties are checked tensor by tensor. What shapes cannot show
(a model whose loader permutes the rows of one tensor) only values do: compare a freshly loaded pair before sharing it.

Source: vLLM 0.26, `packed_modules_mapping` of its model classes and `VocabParallelEmbedding`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from peft import PeftModel
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn

SHARED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PADDED_MODULES = ("embed_tokens", "lm_head")
VOCABULARY_PADDING = 256  # vLLM pads to a multiple of 64 rows, older versions with adapters to one of 256
# What multi-head latent attention makes of kv_b_proj when the weights are loaded, and would not follow an update.
_DERIVED_TENSORS = frozenset(("W_UV", "W_UK_T", "W_K", "W_V"))
# What PEFT puts into the name of a weight. `trainable_token_indices` may come with any kind of adapter.
_WRAPPERS = re.compile(r"\.(?:base_layer|token_adapter|original_module|modules_to_save\.[^.]+)(?=\.)")
_COPY = re.compile(r"\.(original_module|modules_to_save)(?:(?<=modules_to_save)\.([^.]+))?(?=\.)")
_ADAPTER_PREFIXES = ("lora_", "trainable_tokens_")
_QUANTIZER_MARKS = frozenset(("packed_dim", "_packed_dim", "pack_factor", "bnb_quant_state", "quant_state"))


@dataclass(frozen=True)
class WeightView:
    """Where vLLM keeps one parameter or buffer of the policy.

    Attributes:
        name: in `policy.named_parameters(remove_duplicate=False)` or `policy.named_buffers()`.
        vllm_name: in the same of vLLM's model.
        rows: of the vLLM tensor's first dimension.
    """

    name: str
    vllm_name: str
    rows: slice

    def __str__(self) -> str:
        return f"rows {self.rows.start}:{self.rows.stop} of vLLM's {self.vllm_name}"


@dataclass(frozen=True)
class _Named:
    name: str
    tensor: Tensor

    def __str__(self) -> str:
        return f"{self.name} {list(self.tensor.shape)}"


def plan_views(
    policy: nn.Module, vllm_model: nn.Module, packed_modules: Mapping[str, Sequence[str]]
) -> list[WeightView] | str:
    """Finds the rows of vLLM's tensors that each of the policy's weights can be a view of.

    Every vLLM parameter is covered to its last row, but for vocabulary padding, and every parameter of the policy is
    found; names, shapes, dtypes, devices and ties are compared tensor by tensor. Adapters (LoRA) are not vLLM's and
    left out. Buffers are never shared, but those that both sides have are in the plan, to be compared.

    Args:
        policy: a transformers model, or PEFT's or DDP's wrapper of one. Only read.
        vllm_model: vLLM's model after its weights were loaded, with or without LoRA layers. Only read.
        packed_modules: its `packed_modules_mapping`: the module names that a fused module stacks, in order.

    Returns:
        A view for each name of the policy, tied names included, or one sentence that says why there cannot be any.
    """
    unserved = unserved_names(policy)
    named = policy.named_parameters(remove_duplicate=False)
    ours = {plain_name(name): _Named(name, p) for name, p in named if name not in unserved}
    theirs = [_Named(*pair) for pair in vllm_model.named_parameters(remove_duplicate=False)]
    reason = (
        _first(map(_vllm_fault, theirs))
        or _first(map(_policy_fault, ours.values()))
        or _device_fault(theirs)
        or _derived_fault(vllm_model)
    )
    if reason is not None:
        return reason
    views: list[WeightView] = []
    matched: set[int] = set()
    for target in theirs:
        parts = _parts(plain_name(target.name), ours, packed_modules)
        rows = _stack(target, parts) if parts else []
        if isinstance(rows, str):
            return rows
        views += rows
        matched.update(id(target.tensor) for _ in rows)
    orphan = next((target for target in theirs if id(target.tensor) not in matched), None)
    if orphan is not None:
        return f"vLLM's {orphan} has no counterpart in the policy."
    views += _aliases(policy, views)
    found = {view.name for view in views}
    missing = next((weight for weight in ours.values() if weight.name not in found), None)
    if missing is not None:
        return f"The policy's {missing} has no counterpart in vLLM."
    return _tie_fault(policy, vllm_model, views) or [*views, *_common_buffers(policy, vllm_model)]


def plain_name(name: str) -> str:
    """The name that transformers' bare model gives a weight: without DDP's, PEFT's and vLLM's LoRA wrappers."""
    name = name.removeprefix("module.").removeprefix("base_model.model.")
    return _WRAPPERS.sub("", name)


def unserved_names(policy: nn.Module) -> frozenset[str]:
    """Names of the parameters that are no weights of the bare model, ties by every name.

    They are adapters, the copies that `modules_to_save` keeps for adapters that are not active, and the original of
    an active copy. Where no copy is active, the original is the weight.
    """
    copies = served_copies(policy)
    unserved = []
    for name, _ in policy.named_parameters(remove_duplicate=False):
        wrapper, mark, rest = _split_at_copy(name)
        is_other_copy = bool(mark) and copies.get(wrapper) != (rest if mark == "modules_to_save" else None)
        if is_other_copy or is_adapter_name(policy, name):
            unserved.append(name)
    return frozenset(unserved)


def served_copies(policy: nn.Module) -> dict[str, str | None]:
    """Whose copy runs, by the path of each of PEFT's wrappers for `modules_to_save`; None where the original does."""
    chosen: dict[str, str | None] = {}
    for path, module in policy.named_modules(remove_duplicate=False):
        if isinstance(module, ModulesToSaveWrapper):
            active = (
                [] if module.disable_adapters else [a for a in module.active_adapters if a in module.modules_to_save]
            )
            chosen[path] = active[0] if active else None
    return chosen


def is_adapter_name(policy: nn.Module, name: str) -> bool:
    """Whether a parameter is an adapter's own: neither the base model's nor a copy of it."""
    prefixes = [str(policy.base_model.prefix)] if isinstance(policy, PeftModel) else []
    return any(part.startswith((*_ADAPTER_PREFIXES, *prefixes)) for part in name.split("."))


def _split_at_copy(name: str) -> tuple[str, str, str]:
    """Path of the wrapper for `modules_to_save` that a name leads through, which side of it, and whose copy."""
    found = _COPY.search(name)
    return (name[: found.start()], found[1], found[2] or "") if found is not None else ("", "", "")


def _parts(plain_name: str, ours: Mapping[str, _Named], packed_modules: Mapping[str, Sequence[str]]) -> list[_Named]:
    """The policy's weights that a vLLM tensor stacks, in order; none where one is missing."""
    if plain_name in ours:
        return [ours[plain_name]]
    *parents, module, kind = ["", *plain_name.split(".")]
    names = [".".join([*parents, part, kind])[1:] for part in packed_modules.get(module, ())]
    return [ours[name] for name in names] if all(name in ours for name in names) else []


def _stack(target: _Named, parts: Sequence[_Named]) -> list[WeightView] | str:
    views, start = [], 0
    for part in parts:
        if part.tensor.dtype != target.tensor.dtype:
            return (
                f"{part.name} is {part.tensor.dtype} in the policy and {target.tensor.dtype} in vLLM's {target.name}."
            )
        if part.tensor.device.type != "cpu" and part.tensor.device != target.tensor.device:
            return f"{part.name} is on {part.tensor.device} and vLLM's {target.name} on {target.tensor.device}."
        if part.tensor.dim() != target.tensor.dim() or part.tensor.shape[1:] != target.tensor.shape[1:]:
            return f"{part} does not fit into vLLM's {target}."
        views.append(WeightView(part.name, target.name, slice(start, start + part.tensor.shape[0])))
        start += part.tensor.shape[0]
    padding = target.tensor.shape[0] - start
    is_padded = plain_name(target.name).split(".")[-2:-1] in [[module] for module in PADDED_MODULES]
    if padding == 0 or (is_padded and 0 < padding < VOCABULARY_PADDING):
        return views
    listed = ", ".join(map(str, parts))
    return f"vLLM's {target} has not the {start} rows of the policy's {listed} (tensor parallelism, other sizes)."


def _aliases(policy: nn.Module, views: Sequence[WeightView]) -> list[WeightView]:
    """Views for names that the policy ties to one that has a view, where vLLM has no tensor of that name."""
    named = list(policy.named_parameters(remove_duplicate=False))
    parameters = dict(named)
    found = {view.name for view in views}
    by_parameter = {parameters[view.name]: view for view in views}
    tied = [(name, by_parameter[p]) for name, p in named if name not in found and p in by_parameter]
    return [WeightView(name, view.vllm_name, view.rows) for name, view in tied]


def _common_buffers(policy: nn.Module, vllm_model: nn.Module) -> list[WeightView]:
    ours = {plain_name(name): _Named(name, tensor) for name, tensor in policy.named_buffers()}
    return [
        WeightView(ours[plain].name, name, slice(0, tensor.shape[0] if tensor.dim() > 0 else 1))
        for name, tensor in vllm_model.named_buffers()
        if (plain := plain_name(name)) in ours and tensor.numel() > 0 and ours[plain].tensor.shape == tensor.shape
    ]


def _vllm_fault(weight: _Named) -> str | None:
    tensor = weight.tensor
    if tensor.is_meta or tensor.numel() == 0:
        return f"vLLM's {weight} holds no weights (on a CPU, vLLM packs linear weights and drops the originals)."
    if tensor.dtype not in SHARED_DTYPES or not _QUANTIZER_MARKS.isdisjoint(vars(tensor)):
        return f"vLLM's {weight} is quantized ({tensor.dtype})."
    if tensor.dim() not in (1, 2):
        return f"vLLM's {weight} is no vector or matrix (layouts of experts and convolutions are not shared)."
    if not tensor.is_contiguous():
        return f"vLLM's {weight} is not contiguous (strides {list(tensor.stride())})."
    return f"vLLM's {weight} was made in inference mode, which forbids training it." if tensor.is_inference() else None


def _policy_fault(weight: _Named) -> str | None:
    if weight.tensor.is_meta:
        return f"The policy's {weight} is on the meta device."
    return None if weight.tensor.dtype in SHARED_DTYPES else f"The policy's {weight} is {weight.tensor.dtype}."


def _device_fault(theirs: Sequence[_Named]) -> str | None:
    devices = sorted({str(weight.tensor.device) for weight in theirs})
    return f"vLLM's weights are on {len(devices)} devices ({', '.join(devices)})." if len(devices) > 1 else None


def _derived_fault(vllm_model: nn.Module) -> str | None:
    for name, module in vllm_model.named_modules():
        if derived := _DERIVED_TENSORS.intersection(vars(module)):
            return f"vLLM's {name} keeps {min(derived)}, made from its weights when they were loaded."
    return None


def _tie_fault(policy: nn.Module, vllm_model: nn.Module, views: Sequence[WeightView]) -> str | None:
    """What one side keeps once and the other twice: each parameter has one place, and no two places overlap."""
    parameters = dict(policy.named_parameters(remove_duplicate=False))
    targets = tensors_of(vllm_model)
    places: dict[nn.Parameter, WeightView] = {}
    for view in views:
        first = places.setdefault(parameters[view.name], view)
        if place_of(rows_of(targets[first.vllm_name], first)) != place_of(rows_of(targets[view.vllm_name], view)):
            return f"The policy ties {first.name} and {view.name}, vLLM does not tie {first} and {view}."
    if (pair := _overlap((view, rows_of(targets[view.vllm_name], view)) for view in places.values())) is not None:
        return f"vLLM ties {pair[0]} and {pair[1]}, the policy does not tie {pair[0].name} and {pair[1].name}."
    if (pair := _overlap((view, parameters[view.name]) for view in places.values())) is not None:
        return f"The policy's {pair[0].name} and {pair[1].name} are two parameters over the same storage."
    return None


def _overlap(places: Iterable[tuple[WeightView, Tensor]]) -> tuple[WeightView, WeightView] | None:
    ranges = [(*place_of(tensor), view) for view, tensor in places if tensor.untyped_storage().nbytes() > 0]
    ranges.sort(key=lambda entry: entry[0])
    last_stop, last_view = 0, None
    for start, stop, view in ranges:
        if last_view is not None and start < last_stop:
            return last_view, view
        if stop > last_stop:
            last_stop, last_view = stop, view
    return None


def place_of(tensor: Tensor) -> tuple[int, int]:
    """First and last address that a tensor reads, the latter exclusive."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def is_same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two contiguous tensors are one: memory, dtype, shape and device."""
    return (place_of(a), a.dtype, a.shape, a.device) == (place_of(b), b.dtype, b.shape, b.device)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by every name they have."""
    return dict(chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)))


def rows_of(tensor: Tensor, view: WeightView) -> Tensor:
    """The planned rows of a vLLM tensor, over its storage and outside autograd."""
    return tensor.data[view.rows] if tensor.dim() > 0 else tensor.data


def _first(reasons: Iterable[str | None]) -> str | None:
    return next((reason for reason in reasons if reason is not None), None)

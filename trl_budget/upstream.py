"""The seams in TRL, transformers, Accelerate and torch that this library overrides or calls, checked at construction.

Nothing is patched. When a signature has moved, training could silently run without a lever, so the error names the
versions that were tested. `getattr` on upstream objects lives here and nowhere else.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch
import trl.trainer.utils as trl_utils
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, Trainer
from trl import GRPOConfig

from trl_budget.errors import SettingsError, UpstreamMovedError
from trl_budget.parameter_slots import SUPPORTED_DTYPES
from trl_budget.placement import PlacementFacts
from trl_budget.upstream_seams import CALLS, OVERRIDES, PRIVATE, moved_seams, reads_global

TESTED_VERSIONS = {"trl": "1.16.0", "transformers": "5.17.0 and 5.24.0", "accelerate": "1.15.0 and 1.16.0"}

# Kinds of layers of transformers 5.25 whose cache, if they have one, holds one entry per token.
_STATELESS_LAYERS = frozenset(
    {"full_attention", "sliding_attention", "chunked_attention", "indexed_attention", "dummy", "mlp", "moe"}
)
GRADIENT_EVENTS = ("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step")
LM_HEAD_CHUNK_SIZE = "_CHUNKED_LOGPROB_CHUNK_SIZE"


@functools.cache
def check_seams() -> None:
    """Checks all of `upstream_seams` that needs no vLLM, once per process; under 0.1 s.

    Raises:
        UpstreamMovedError: a method or attribute is missing, or has lost one of the parameters that are used.
    """
    moved = moved_seams((*OVERRIDES, *CALLS, *PRIVATE))
    if not reads_global(trl_utils.add_fused_lm_head.__code__, LM_HEAD_CHUNK_SIZE):
        moved.append(f"trl.trainer.utils.add_fused_lm_head reads no {LM_HEAD_CHUNK_SIZE}")
    if moved:
        installed = ", ".join(f"{name} {version(name)}" for name in TESTED_VERSIONS)
        tested = ", ".join(f"{name} {tested}" for name, tested in TESTED_VERSIONS.items())
        raise UpstreamMovedError(
            f"{'; '.join(moved)} (installed: {installed}). This library overrides or reads these and would "
            f"train something else without them. Install the tested versions: {tested}."
        )


@contextmanager
def lm_head_chunks(chunk_size: int | None) -> Iterator[None]:
    """TRL's fused LM head takes `chunk_size` vocabulary entries at a time in the forwards inside, and their backwards.

    TRL 1.16 has no argument for it: its forward reads a constant of `trl.trainer.utils` and keeps it for the backward.
    The constant is TRL's own again when the block ends, so other models of the process never see another one.

    Args:
        chunk_size: vocabulary entries; None leaves TRL's.
    """
    if chunk_size is None:
        yield
        return
    original = getattr(trl_utils, LM_HEAD_CHUNK_SIZE)
    setattr(trl_utils, LM_HEAD_CHUNK_SIZE, chunk_size)
    try:
        yield
    finally:
        setattr(trl_utils, LM_HEAD_CHUNK_SIZE, original)


def check_model(model: Any, args: GRPOConfig | None, *, is_adapter: bool, quantization_config: Any) -> None:
    """Refuses models that no placement can train in full.

    Raises:
        SettingsError: weights on the meta device, or quantized weights without an adapter.
    """
    if not isinstance(model, str | nn.Module):
        raise SettingsError(
            f"model is a {type(model).__name__}. The policy is loaded from a name or given as a module. "
            "Pass a hub id, a folder, or a PreTrainedModel."
        )
    if isinstance(model, nn.Module):
        on_meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
        if on_meta:
            raise SettingsError(
                f"{len(on_meta)} parameters are on the meta device, the first is {on_meta[0]}. They have no values to "
                "train. Load the model with real weights (`from_pretrained(..., device_map=None)`)."
            )
    init_kwargs: Any = (args.model_init_kwargs if args is not None and isinstance(model, str) else None) or {}
    quantization_config = quantization_config or init_kwargs.get("quantization_config")
    if (quantization_config is not None or getattr(model, "is_quantized", False)) and not is_adapter:
        raise SettingsError(
            "The policy's weights are quantized and no adapter was given. They have no gradients to step. "
            "Pass peft_config=LoraConfig(...), or load the model without a quantization_config."
        )


def placement_facts(
    trainer_class: type,
    args: GRPOConfig,
    model: Any,
    optimizer: torch.optim.Optimizer | None,
    *,
    is_adapter: bool,
    is_on_host: bool,
) -> PlacementFacts:
    """Collects what `placement.py` decides from."""
    device = args.device
    full_eval = [name for name in ("bf16_full_eval", "fp16_full_eval") if getattr(args, name)]
    return PlacementFacts(
        optim=optim_name(args),
        device_type=device.type,
        world_size=args.world_size,
        parallelism=parallelism(args, model),
        is_adapter=is_adapter,
        bf16=bool(args.bf16),
        fp16=bool(args.fp16),
        full_eval=full_eval[0] if full_eval else None,
        has_bf16_units=device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0),
        user_optimizer=type(optimizer).__name__ if optimizer is not None else None,
        is_user_optimizer_on_host=is_on_host,
        overrides_optimizer_class=overrides_optimizer_class(trainer_class),
    )


def with_loaded_model(facts: PlacementFacts, model: nn.Module) -> PlacementFacts:
    """Adds what only the loaded policy tells: its device map and its parameters."""
    device_map = getattr(model, "hf_device_map", None) or {}
    return dataclasses.replace(
        facts,
        is_split_over_devices=len(set(device_map.values())) > 1,
        unserved_parameter=unserved_parameter(model, allow_fp16=facts.casts_policy),
        trains_nothing=trains_nothing(model),
    )


def optim_name(args: Any) -> str:
    """The training arguments' `optim` as a plain string."""
    return getattr(args.optim, "value", args.optim)


def unwrapped_optimizer(optimizer: Any) -> Any:
    """The optimizer inside Accelerate's wrapper, or the optimizer itself."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def callbacks_at_gradients(callbacks: Iterable[Any]) -> list[str]:
    """The events between backward and the end of the step that callbacks other than the libraries' own listen to.

    Returns:
        "Mask.on_pre_optimizer_step", in the callbacks' order.
    """
    return [
        f"{type(callback).__name__}.{event}"
        for callback in callbacks
        for event in GRADIENT_EVENTS
        if _is_users(next((base for base in type(callback).__mro__ if event in vars(base)), object))
    ]


def _is_users(owner: type) -> bool:
    return owner is not object and owner.__module__.split(".")[0] not in ("transformers", "trl", "trl_budget")


def overrides_optimizer_class(trainer_class: type) -> bool:
    """Whether a subclass chooses the optimizer's class itself."""
    chosen = getattr(trainer_class, "get_optimizer_cls_and_kwargs", None)
    return chosen is not Trainer.get_optimizer_cls_and_kwargs


def trains_nothing(model: nn.Module) -> bool:
    """Whether no weight requires a gradient: a frozen model, or an adapter loaded with `is_trainable=False`."""
    return not any(parameter.requires_grad for parameter in model.parameters())


def unserved_parameter(model: nn.Module, *, allow_fp16: bool) -> str | None:
    """What is wrong with the first trainable parameter that the host step cannot serve; None if all are fine.

    Args:
        model: the loaded policy.
        allow_fp16: fp16 weights will be cast to bf16, with exact masters.
    """
    served = (*SUPPORTED_DTYPES, torch.float16) if allow_fp16 else SUPPORTED_DTYPES
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype not in served:
            return f"{name} is {parameter.dtype}"
        if parameter.requires_grad and not parameter.is_contiguous():
            return f"{name} is not contiguous"
    return None


def parallelism(args: GRPOConfig, model: Any) -> str | None:
    """What shards or wraps the weights, if the run was launched with it."""
    if args.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        return "FSDP"
    if args.deepspeed is not None or os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        return "DeepSpeed"
    is_sharded = getattr(model, "is_distributed_loading_by_transformers", False) or getattr(model, "tp_size", None)
    if is_sharded or getattr(args, "parallelism_config", None) is not None:
        return "tensor, context or sequence parallelism"
    return None


def is_adapter_model(model: Any, peft_config: Any) -> bool:
    """Whether only adapters will be trained."""
    return peft_config is not None or hasattr(model, "peft_config")


def kept_in_fp32(model: nn.Module) -> tuple[str, ...]:
    """Patterns of the parameter names that transformers itself keeps in fp32 when it loads the model as bf16.

    Regular expressions that match whole, dotted parts of a name; transformers' own patterns use `*` for one part.
    """
    patterns = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return tuple(re.escape(pattern).replace(r"\*", r"[^.]*") for pattern in patterns)


def model_id(config: PretrainedConfig) -> str:
    """The name or folder a model was loaded from."""
    return getattr(config, "_name_or_path", "")


def carries_state(model: PreTrainedModel) -> bool:
    """Whether layers of a model carry a state along the sequence, as Mamba's do.

    A class says so up to transformers 5.24. In 5.25 the kinds of layers do, and RWKV and xLSTM, which list none, have
    a cache of their own.
    """
    declared = getattr(model, "_is_stateful", None)
    if declared is not None:
        return bool(declared)
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    has_common_cache = getattr(model, "_supports_default_dynamic_cache", lambda: True)
    return not _STATELESS_LAYERS.issuperset(kinds) or not has_common_cache()


def uses_hub_kernels(model: nn.Module) -> bool:
    """Whether a part of the model runs kernels of the hub, which transformers puts in its modules' `forward`.

    The default from transformers 5.25 on, on an accelerator with `kernels`; of earlier ones where `use_kernels=True`.
    They are chosen anew in each `train()` and `eval()`, which keep others for training than for inference.
    """
    return any(isinstance(module, PreTrainedModel) and module.use_kernels for module in model.modules())

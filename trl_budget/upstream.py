"""The seams in TRL, transformers, Accelerate and torch that this library overrides or calls, checked at construction.

Nothing is patched. When a signature has moved, training could silently run without a lever, so the error names the
versions that were tested. `getattr` on upstream objects lives here and nowhere else.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from types import CodeType
from typing import Any

import torch
import torch.utils.serialization.config as serialization_config
import trl.trainer.utils as trl_utils
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, Trainer
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.callbacks import SyncRefModelCallback

from trl_budget.errors import SettingsError, UpstreamMovedError
from trl_budget.parameter_slots import SUPPORTED_DTYPES
from trl_budget.placement import PlacementFacts

TESTED_VERSIONS = {"trl": "1.16.0", "transformers": "5.17.0 and 5.24.0", "accelerate": "1.15.0"}

_SCORING_PARAMETERS = (
    *("model", "input_ids", "attention_mask", "logits_to_keep"),
    *("batch_size", "compute_entropy", "compute_aux_loss"),
)
SEAMS: tuple[tuple[type, str, tuple[str, ...]], ...] = (
    (GRPOTrainer, "__init__", ("model", "args", "optimizers", "peft_config", "quantization_config")),
    (Trainer, "_move_model_to_device", ("model", "device")),
    (Trainer, "create_optimizer", ("model",)),
    (Trainer, "_prepare_for_training", ("max_steps", "train_dataloader", "resume_from_checkpoint")),
    (Trainer, "_clip_grad_norm", ("model",)),
    (Trainer, "_get_grad_norm", ("model", "grad_norm")),
    (Trainer, "_load_from_checkpoint", ("resume_from_checkpoint", "model")),
    (Trainer, "_load_best_model", ()),
    (Trainer, "_save_optimizer_and_scheduler", ("output_dir",)),
    (Trainer, "_load_optimizer_and_scheduler", ("checkpoint",)),
    (Accelerator, "prepare", ("device_placement",)),
    (Accelerator, "no_sync", ("model",)),
    (GRPOTrainer, "compute_loss", ("model", "inputs", "return_outputs", "num_items_in_batch")),
    (GRPOTrainer, "_compute_loss", ("model", "inputs")),
    (GRPOTrainer, "_generate_and_score_completions", ("inputs",)),
    (GRPOTrainer, "_get_per_token_logps_and_entropies", _SCORING_PARAMETERS),
    (AttentionInterface, "register", ("key", "value")),
    (AttentionMaskInterface, "register", ("key", "value")),
    (Accelerator, "prepare_model", ("evaluation_mode",)),
    (SyncRefModelCallback, "sync_target_model", ("model", "target_model", "alpha")),
)
_TORCH_SEAMS = (
    (torch._C, "_current_graph_task_id"),
    (torch.autograd.Variable, "_execution_engine"),
    (serialization_config, "patch"),
    (torch.distributed.ProcessGroup, "_get_backend"),
    (torch.distributed.ProcessGroup, "_device_types"),
    (torch.distributed.distributed_c10d, "_get_default_group"),
)
GRADIENT_EVENTS = ("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step")
LM_HEAD_CHUNK_SIZE = "_CHUNKED_LOGPROB_CHUNK_SIZE"


@functools.cache
def check_seams() -> None:
    """Checks every seam, once per process.

    Raises:
        UpstreamMovedError: a method is missing or has lost one of the parameters that are used.
    """
    moved = [message for owner, method, needed in SEAMS if (message := _moved(owner, method, needed))]
    moved += [f"torch has no {name}" for owner, name in _TORCH_SEAMS if not hasattr(owner, name)]
    if "optimizer_cls_and_kwargs" not in inspect.signature(Trainer.__init__).parameters:
        moved.append("Trainer.__init__ takes no optimizer_cls_and_kwargs")
    if not _reads_global(trl_utils.add_fused_lm_head.__code__, LM_HEAD_CHUNK_SIZE):
        moved.append(f"trl.trainer.utils.add_fused_lm_head reads no {LM_HEAD_CHUNK_SIZE}")
    if moved:
        installed = ", ".join(f"{name} {version(name)}" for name in TESTED_VERSIONS)
        tested = ", ".join(f"{name} {tested}" for name, tested in TESTED_VERSIONS.items())
        raise UpstreamMovedError(
            f"{'; '.join(moved)} (installed: {installed}). This library overrides these methods and would train "
            f"something else without them. Install the tested versions: {tested}."
        )


def _moved(owner: type, method: str, needed: tuple[str, ...]) -> str | None:
    function = getattr(owner, method, None)
    if function is None:
        return f"{owner.__name__}.{method} does not exist"
    missing = [name for name in needed if name not in inspect.signature(function).parameters]
    return f"{owner.__name__}.{method} takes no {', '.join(missing)}" if missing else None


def _reads_global(code: CodeType, name: str) -> bool:
    """Whether a function, or one that it defines, looks up a global of this name."""
    nested = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return name in code.co_names or any(_reads_global(inner, name) for inner in nested)


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

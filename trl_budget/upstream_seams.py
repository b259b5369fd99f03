"""The table of what this library overrides, calls and reads in its upstreams, and whether each of it is there.

One line for each method that a class of ours overrides and for each private attribute that a module of ours touches,
by its owner. `tests/upstream/test_seam_table.py` builds both lists from the classes and from the syntax trees and
compares. Nothing is patched, and vLLM is not imported: what is its own is looked up when an engine starts.
"""

from __future__ import annotations

import dis
import importlib
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from types import CodeType
from typing import Any

import torch
import trl.trainer.utils as trl_utils
from accelerate import Accelerator
from accelerate.state import GradientState
from packaging.requirements import Requirement
from peft.tuners.tuners_utils import BaseTuner
from torch import nn
from torch._C import TensorBase
from torch._C._distributed_c10d import Backend
from torch.autograd.function import _SingleLevelFunction
from torch.distributed import ProcessGroup, distributed_c10d
from torch.utils._config_module import ConfigModule
from transformers import (
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
    Trainer,
)
from transformers.utils.generic import GeneralInterface
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer.callbacks import SyncRefModelCallback


@dataclass(frozen=True)
class Seam:
    """An attribute of an upstream object that this library counts on.

    Attributes:
        owner: class or module that defines it; of vLLM, "module:class" or "module", imported when an engine starts.
        name: the attribute.
        used_by: our classes that override it, or our modules that touch it.
        parameters: of a method, those that are used.
        set_in: the owner's method that gives instances the attribute, where the class itself has none.
        needs: the versions that have it, "transformers<5.25"; all when None.
    """

    owner: Any
    name: str
    used_by: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    set_in: str | None = None
    needs: str | None = None


_BUDGET, _COLOCATED, _CHECKED, _TOKENS = (
    *("BudgetGRPOTrainer", "ColocatedTrainer"),
    *("CheckedTrainer", "TokenBudgetTrainer"),
)
_SCORING_PARAMETERS = (
    *("model", "input_ids", "attention_mask", "logits_to_keep"),
    *("batch_size", "compute_entropy", "compute_aux_loss"),
)
_OPTIMIZER = torch.optim.Optimizer

OVERRIDES = (
    Seam(
        GRPOTrainer,
        "__init__",
        (_BUDGET,),
        ("model", "args", "optimizers", "peft_config", "quantization_config"),
    ),
    Seam(GRPOTrainer, "_tag_names", (_BUDGET,)),
    Seam(GRPOTrainer, "training_step", (_TOKENS,), ("model", "inputs", "num_items_in_batch")),
    Seam(Trainer, "compute_loss_context_manager", (_TOKENS,)),
    Seam(GRPOTrainer, "_prepare_inputs", (_TOKENS,), ("generation_batch",)),
    Seam(GRPOTrainer, "_generate", (_COLOCATED, _TOKENS), ("prompts",)),
    Seam(GRPOTrainer, "_generate_and_score_completions", (_CHECKED, _TOKENS), ("inputs",)),
    Seam(GRPOTrainer, "_calculate_rewards", (_COLOCATED,)),
    Seam(GRPOTrainer, "_get_per_token_logps_and_entropies", (_COLOCATED, _TOKENS), _SCORING_PARAMETERS),
    Seam(
        GRPOTrainer,
        "compute_loss",
        (_COLOCATED, _TOKENS),
        ("model", "inputs", "return_outputs", "num_items_in_batch"),
    ),
    Seam(GRPOTrainer, "_load_optimizer_and_scheduler", (_BUDGET,), ("checkpoint",)),
    Seam(GRPOConfig, "__post_init__", ("BudgetGRPOConfig",)),
    Seam(Trainer, "_move_model_to_device", (_BUDGET, _COLOCATED), ("model", "device")),
    Seam(Trainer, "create_optimizer", (_BUDGET,), ("model",)),
    Seam(
        Trainer,
        "_prepare_for_training",
        (_BUDGET, _TOKENS),
        ("max_steps", "train_dataloader", "resume_from_checkpoint"),
    ),
    Seam(Trainer, "_clip_grad_norm", (_BUDGET, _COLOCATED), ("model",)),
    Seam(Trainer, "_get_grad_norm", (_BUDGET,), ("model", "grad_norm")),
    Seam(Trainer, "_load_from_checkpoint", (_BUDGET,), ("resume_from_checkpoint", "model")),
    Seam(Trainer, "_load_best_model", (_BUDGET,)),
    Seam(Trainer, "_save", (_BUDGET, _COLOCATED), ("output_dir", "state_dict")),
    Seam(Trainer, "_save_optimizer_and_scheduler", (_BUDGET,), ("output_dir",)),
    Seam(VLLMGeneration, "_init_vllm", ("ColocatedGeneration",)),
    Seam(VLLMGeneration, "sync_weights", ("ColocatedGeneration",)),
    Seam(VLLMGeneration, "generate", ("ColocatedGeneration",), ("prompts",)),
    Seam(
        VLLMGeneration,
        "__init__",
        ("ColocatedGeneration",),
        (
            *("model", "accelerator", "processing_class", "mode", "structured_outputs_regex", "tensor_parallel_size"),
            *("gpu_memory_utilization", "max_model_length", "max_num_seqs", "enable_sleep_mode", "model_impl"),
            *("repetition_penalty", "temperature", "top_p", "top_k", "min_p", "max_completion_length"),
            *("trust_remote_code", "logprobs", "generation_kwargs"),
        ),
    ),
    Seam(
        SyncRefModelCallback,
        "__init__",
        ("SyncFp32Reference", "SyncPresentReference"),
        ("ref_model", "accelerator"),
    ),
    Seam(
        SyncRefModelCallback,
        "sync_target_model",
        ("SyncFp32Reference",),
        ("model", "target_model", "alpha"),
    ),
    Seam(SyncRefModelCallback, "on_step_end", ("SyncPresentReference",), ("args", "state", "control")),
    Seam(_OPTIMIZER, "__init__", ("HostAdamW",), ("params", "defaults")),
    Seam(_OPTIMIZER, "add_param_group", ("HostAdamW",), ("param_group",)),
    Seam(_OPTIMIZER, "zero_grad", ("HostAdamW",), ("set_to_none",)),
    Seam(_OPTIMIZER, "step", ("HostAdamW",), ("closure",)),
    Seam(_OPTIMIZER, "state_dict", ("HostAdamW",)),
    Seam(_OPTIMIZER, "__getstate__", ("HostAdamW",)),
    Seam(_OPTIMIZER, "load_state_dict", ("HostAdamW",), ("state_dict",)),
    Seam(_SingleLevelFunction, "forward", ("TiledLayer", "_Valued")),
    Seam(_SingleLevelFunction, "backward", ("TiledLayer", "_Valued")),
)
# Called, or replaced for a while, and not overridden.
CALLS = (
    Seam(GRPOTrainer, "_compute_loss", ("upstream_model",), ("model", "inputs")),
    Seam(Trainer, "__init__", ("trainer",), ("optimizer_cls_and_kwargs",)),
    Seam(Accelerator, "prepare", ("trainer",), ("device_placement",)),
    Seam(Accelerator, "prepare_model", ("trainer",), ("evaluation_mode",)),
    Seam(Accelerator, "no_sync", ("passes",), ("model",)),
    Seam(GeneralInterface, "register", ("attention",), ("key", "value")),
    Seam(ConfigModule, "patch", ("trainer",)),
)
PRIVATE = (
    Seam(GRPOTrainer, "_metrics", ("checked_rollouts", "token_budget"), set_in="__init__"),
    Seam(GRPOTrainer, "_step", ("token_budget",), set_in="__init__"),
    Seam(GRPOTrainer, "_entropy_window_stats", ("token_budget",), set_in="__init__"),
    Seam(GRPOTrainer, "_last_world_entropy", ("token_budget",), set_in="__init__"),
    Seam(GRPOTrainer, "_last_loaded_step", ("colocated",), set_in="__init__"),
    Seam(GRPOTrainer, "_is_vlm", ("upstream_model",), set_in="__init__"),
    Seam(GRPOTrainer, "_tag_names", ("trainer",)),
    Seam(trl_utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", ("upstream",)),
    Seam(VLLMGeneration, "_fix_param_name_to_vllm", ("rollout",)),
    Seam(VLLMGeneration, "_iter_named_params", ("rollout",)),
    Seam(PretrainedConfig, "_attn_implementation", ("upstream_attention",)),
    Seam(PretrainedConfig, "_name_or_path", ("upstream",), set_in="__post_init__"),
    Seam(PreTrainedModel, "_supports_attention_backend", ("upstream_model",)),
    Seam(PreTrainedModel, "_supports_sdpa", ("upstream_attention",)),
    Seam(PreTrainedModel, "_keep_in_fp32_modules_strict", ("upstream",)),
    Seam(PreTrainedModel, "_is_stateful", ("upstream",), needs="transformers<5.25"),
    Seam(GenerationMixin, "_supports_default_dynamic_cache", ("upstream",), needs="transformers>=5.25"),
    Seam(
        PreTrainedModel,
        "_gradient_checkpointing_func",
        ("layer_checkpoint", "layer_trial"),
        set_in="_set_gradient_checkpointing",
    ),
    Seam(GradientState, "_set_sync_gradients", ("passes",)),
    Seam(BaseTuner, "_check_merge_allowed", ("adapter_weights",)),
    Seam(torch, "_C", ("grad_offload",)),
    Seam(torch._C, "_current_graph_task_id", ("grad_offload",)),
    Seam(torch.autograd.Variable, "_execution_engine", ("grad_offload",)),
    Seam(
        TensorBase,
        "_version",
        ("activation_store", "compute_weights", "host_store", "layer_bypass", "unfinished_steps"),
    ),
    Seam(TensorBase, "_backward_hooks", ("layer_call", "upstream_observers")),
    Seam(TensorBase, "_post_accumulate_grad_hooks", ("upstream_observers",)),
    Seam(nn.modules.module, "_global_forward_pre_hooks", ("upstream_observers",)),
    Seam(nn.modules.module, "_global_forward_hooks", ("upstream_observers",)),
    Seam(nn.modules.module, "_global_backward_pre_hooks", ("upstream_observers",)),
    Seam(nn.modules.module, "_global_backward_hooks", ("upstream_observers",)),
    Seam(nn.Module, "_backward_hooks", ("layer_bypass", "layer_call", "upstream_observers"), set_in="__init__"),
    Seam(nn.Module, "_backward_pre_hooks", ("layer_bypass", "layer_call", "upstream_observers"), set_in="__init__"),
    Seam(nn.Module, "_forward_hooks", ("layer_bypass", "layer_call", "upstream_observers"), set_in="__init__"),
    Seam(nn.Module, "_forward_pre_hooks", ("layer_bypass", "layer_call", "upstream_observers"), set_in="__init__"),
    Seam(nn.Module, "_parameters", ("fp32_forward",), set_in="__init__"),
    Seam(nn.Module, "_buffers", ("fp32_forward",), set_in="__init__"),
    Seam(nn.modules.module, "_has_any_global_hook", ("layer_bypass",)),
    Seam(nn.modules.batchnorm, "_BatchNorm", ("upstream_model",)),
    Seam(nn.modules.instancenorm, "_InstanceNorm", ("upstream_model",)),
    Seam(nn.modules.dropout, "_DropoutNd", ("layer_checkpoint", "upstream_model")),
    Seam(distributed_c10d, "_get_default_group", ("ranks",)),
    Seam(ProcessGroup, "_get_backend", ("ranks",)),
    Seam(ProcessGroup, "_device_types", ("ranks",)),
    Seam(Backend.Options, "_timeout", ("ranks",)),
)
_BACKENDS = "vllm.device_allocator.sleep_mode_backend"
VLLM = (
    Seam(f"{_BACKENDS}:CuMemBackend", "suspend", ("HandoverBackend",), ("level",)),
    Seam(f"{_BACKENDS}:CuMemBackend", "resume", ("HandoverBackend",), ("tags",)),
    Seam(f"{_BACKENDS}:SleepModeBackend", "_state", ("vllm_sleep",), set_in="__init__"),
    Seam(f"{_BACKENDS}:SleepModeBackendFactory", "_registry", ("upstream_vllm",)),
    Seam("vllm.device_allocator", "get_mem_allocator_instance", ("upstream_vllm_seams", "vllm_sleep")),
    Seam("vllm.device_allocator.cumem", "create_and_map", ("vllm_sleep",), ("allocation_handle",)),
    Seam("vllm.device_allocator.cumem", "unmap_and_release", ("vllm_sleep",), ("allocation_handle",)),
    Seam("vllm.model_executor.parameter:PackedvLLMParameter", "_packed_dim", ("weight_views",), set_in="__init__"),
)
# Reached from a `vllm.LLM` that has started.
ENGINE = (
    ("llm_engine", "model_executor", "sleeping_tags"),
    ("llm_engine", "model_executor", "collective_rpc"),
    ("llm_engine", "model_executor", "driver_worker", "model_runner", "model", "load_weights"),
    ("llm_engine", "output_processor", "request_states"),
    ("llm_engine", "abort_request"),
    ("llm_engine", "model_config", "max_model_len"),
    ("llm_engine", "vllm_config", "cache_config", "num_gpu_blocks"),
    ("llm_engine", "vllm_config", "cache_config", "block_size"),
)
SLEEPING_WORKER = ("_get_sleep_mode_backend", "sleep_mode_backend")  # the worker of a vLLM has one of these


def moved_seams(seams: Iterable[Seam]) -> list[str]:
    """What of the table the installed upstreams lack, a phrase each; imports the owners that are named by a string."""
    return [message for seam in seams if _applies(seam) and (message := _moved(seam))]


def reads_global(code: CodeType, name: str) -> bool:
    """Whether a function, or one that it defines, looks up a global of this name."""
    return any(name in inner.co_names for inner in _with_nested(code))


def _applies(seam: Seam) -> bool:
    if seam.needs is None:
        return True
    needed = Requirement(seam.needs)
    return needed.specifier.contains(version(needed.name), prereleases=True)


def _moved(seam: Seam) -> str | None:
    owner = _imported(seam.owner) if isinstance(seam.owner, str) else seam.owner
    if owner is None:
        return f"{seam.owner} does not exist"
    is_path = isinstance(seam.owner, str)
    label = seam.owner.rpartition(":")[2] if is_path else getattr(owner, "__qualname__", None) or owner.__name__
    if seam.set_in is not None:
        if owner is nn.Module:  # torch.compile puts a plain function in its constructor's place; it declares them
            is_there = seam.name in nn.Module.__annotations__
        else:
            is_there = _sets(vars(owner).get(seam.set_in), seam.name)
        return None if is_there else f"{label}.{seam.set_in} sets no {seam.name}"
    if seam.name not in vars(owner):  # what a base has in its place does something else
        return f"{label}.{seam.name} does not exist"
    known = inspect.signature(getattr(owner, seam.name)).parameters if seam.parameters else {}
    missing = [name for name in seam.parameters if name not in known]
    return f"{label}.{seam.name} takes no {', '.join(missing)}" if missing else None


def _imported(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        found = importlib.import_module(module)
    except ImportError:
        return None
    return getattr(found, name, None) if name else found


def _sets(method: Any, name: str) -> bool:
    """Whether a method's code stores an attribute of this name, or names it in a string, as for `setattr`."""
    code = getattr(inspect.unwrap(method), "__code__", None) if method is not None else None
    return code is not None and any(_stores(inner, name) for inner in _with_nested(code))


def _stores(code: CodeType, name: str) -> bool:
    if name in code.co_consts:
        return True
    return name in code.co_names and any(
        instruction.opname == "STORE_ATTR" and instruction.argval == name for instruction in dis.get_instructions(code)
    )


def _with_nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_nested(constant)

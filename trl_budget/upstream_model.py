"""What the loaded policy and TRL's trainer tell about layout, memory and reuse, and the trials that are run on them.

`getattr` on configs and layers lives here, as on other upstream objects in `upstream.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from trl_budget import upstream_config
from trl_budget.activation_memory import MemoryLevers, ModelShape, allocatable_bytes, tokens_that_fit
from trl_budget.attention import serves_windows
from trl_budget.config import budget_setting
from trl_budget.long_context import LongContextFacts, longest_pass
from trl_budget.packing_trial import packing_fault
from trl_budget.padding_trial import PaddedColumns, PaddingTrial, try_padding
from trl_budget.reuse import ReuseFacts
from trl_budget.row_layout import LayoutFacts
from trl_budget.trial_forward import forward_draws
from trl_budget.upstream import carries_state, optim_name, parallelism, trains_nothing, uses_hub_kernels
from trl_budget.upstream_attention import (
    asks_for_attention,
    own_attention,
    with_exact_attention,
    with_own_attention,
)
from trl_budget.upstream_config import largest
from trl_budget.upstream_observers import gradient_hooks, micro_batch_callbacks, row_adapters, user_hooks

_LOSS_METHODS = (
    *("compute_loss", "_compute_loss", "_get_per_token_logps_and_entropies"),
    *("get_off_policy_mask", "get_gamma_weights", "get_high_entropy_mask"),
)
_SCORING_METHODS = (*_LOSS_METHODS, "_generate_and_score_completions")
_TRAINING_MODE_LAYERS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


def layout_facts(trainer: Any, base: type) -> LayoutFacts:
    """Collects what `row_layout.py` decides from.

    Args:
        trainer: constructed as far as `GRPOTrainer.__init__` goes.
        base: the class whose loss methods count as not overridden.
    """
    model, args = trainer.model, trainer.args
    config = model.config.get_text_config()
    layer_types = upstream_config.layer_types(config)
    pretrained = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    return LayoutFacts(
        device_type=args.device.type,
        bf16=bool(args.bf16),
        attention=own_attention(config),
        routes_attention=any(module._supports_attention_backend for module in pretrained),
        asks_for_attention=asks_for_attention(model),
        is_multimodal=trainer._is_vlm or config is not model.config,
        is_stateful=is_stateful(model),
        uses_hub_kernels=uses_hub_kernels(model),
        layer_types=layer_types,
        rope_types=upstream_config.rope_types(config),
        soft_cap=getattr(config, "attn_logit_softcapping", None) is not None,
        attention_dropout=float(max(upstream_config.layer_values(config, "attention_dropout"), default=0.0)),
        has_window=upstream_config.num_windows(config) > 0,
        serves_windows=serves_windows(args.device.type),
        head_dims=upstream_config.head_dims(config),
        learns_prompt=any(c.is_prompt_learning for c in (getattr(model, "peft_config", None) or {}).values()),
        row_adapters=row_adapters(model),
        scales_positions=_reachable(upstream_config.scaled_positions(config), args),
        neftune_noise_alpha=args.neftune_noise_alpha,
        hooks=user_hooks(model),
        num_devices=max(1, args.n_gpu),
        num_processes=args.world_size,
        parallelism=parallelism(args, model),
        torch_compile=bool(args.torch_compile),
        router_loss=bool(trainer.aux_loss_enabled),
        top_entropy_quantile=trainer.top_entropy_quantile,
        overrides=_overridden(trainer, base, _LOSS_METHODS),
        gradient_hooks=gradient_hooks(model),
        steps_in_backward=_steps_in_backward(args),
        training_mode_layers=_training_mode_layers(model),
        observers=(*_overridden(trainer, base, ("training_step",)), *micro_batch_callbacks(trainer)),
    )


def is_stateful(model: nn.Module) -> bool:
    """Whether layers carry a state along the sequence."""
    return any(carries_state(module) for module in model.modules() if isinstance(module, PreTrainedModel))


def state_layers(model: Any) -> str | None:
    """Names of the layers that carry something along the sequence outside attention; None if there are none."""
    return upstream_config.state_layers(model.config.get_text_config(), is_stateful=is_stateful(model))


def _reachable(scaling: tuple[str, int] | None, args: Any) -> tuple[str, int] | None:
    """A scaling by position, unless stock's columns, of the longest prompt and the longest completion, end before."""
    if scaling is None or args.vllm_max_model_length is None:
        return scaling
    most = args.vllm_max_model_length + (args.max_completion_length or args.vllm_max_model_length)
    return scaling if most > scaling[1] else None


def reuse_facts(trainer: Any, base: type) -> ReuseFacts:
    """Collects what `reuse.py` decides from.

    Args:
        trainer: constructed as far as `GRPOTrainer.__init__` goes.
        base: the class whose scoring methods count as not overridden.
    """
    model, args = trainer.model, trainer.args
    named = list(model.named_modules())
    config = model.config.get_text_config()
    dropout = [name for name, m in named if isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0]
    dropout += [f"config.{key}" for key in ("attention_dropout", "router_jitter_noise") if getattr(config, key, 0)]
    corrects_sampling = bool(trainer.use_vllm and trainer.vllm_importance_sampling_correction)
    training_mode_layers = _training_mode_layers(model)
    is_tried = corrects_sampling and not training_mode_layers and parallelism(args, model) is None
    return ReuseFacts(
        corrects_sampling=corrects_sampling,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        steps_per_generation=args.steps_per_generation,
        num_iterations=trainer.num_iterations,
        dropout=tuple(dropout),
        neftune_noise_alpha=args.neftune_noise_alpha,
        training_mode_layers=training_mode_layers,
        draws_random_numbers=is_tried and forward_draws(model, config.vocab_size, trainer.accelerator.autocast()),
        is_quantized=_is_quantized(model),
        merged_adapters=any(getattr(m, "merged_adapters", None) for _, m in named),
        torch_compile=bool(args.torch_compile),
        overrides=_overridden(trainer, base, _SCORING_METHODS),
        parallelism=parallelism(args, model),
    )


def _training_mode_layers(model: nn.Module) -> tuple[str, ...]:
    return tuple(name for name, module in model.named_modules() if isinstance(module, _TRAINING_MODE_LAYERS))


def _steps_in_backward(args: Any) -> str | None:
    optim = optim_name(args)
    return optim if "layerwise" in optim or "lomo" in optim else None


def _overridden(trainer: Any, base: type, methods: Iterable[str]) -> tuple[str, ...]:
    """Methods that a subclass, or an assignment to the trainer, has replaced."""
    replaced = (name for name in methods if getattr(type(trainer), name) is not getattr(base, name))
    return tuple(dict.fromkeys([*replaced, *(name for name in methods if name in vars(trainer))]))


def _is_quantized(model: nn.Module) -> bool:
    has_state = any(getattr(parameter, "quant_state", None) is not None for parameter in model.parameters())
    return has_state or bool(getattr(model, "is_quantized", False))


def packing_trial(trainer: Any) -> str | None:
    """What a trial run of packed rows found wrong, or None."""
    config = trainer.model.config.get_text_config()
    return packing_fault(
        trainer.model,
        config.vocab_size,
        trainer.accelerator.autocast(),
        is_exact=not upstream_config.is_routed(config),
        num_windows=upstream_config.num_windows(config),
        is_quantized=_is_quantized(trainer.model),
        unpacked=lambda: with_own_attention([trainer.model]),
    )


def padding_trial(trainer: Any) -> PaddingTrial:
    """What a trial run of rows with and without padding found. The model has its own attention."""
    model = trainer.model
    config = model.config.get_text_config()
    pad = getattr(config, "pad_token_id", None)
    columns = PaddedColumns(
        pad if isinstance(pad, int) and 0 <= pad < config.vocab_size else 0,
        upstream_config.position_boundaries(config),
        upstream_config.max_positions(config),
    )
    layers = upstream_config.telling_layers(model, config)
    with with_exact_attention(model):
        autocast = trainer.accelerator.autocast()
        return try_padding(model, config.vocab_size, columns, layers, autocast, is_quantized=_is_quantized(model))


def model_shape(trainer: Any) -> ModelShape:
    """What the policy's activations depend on."""
    config = trainer.model.config.get_text_config()
    head_dim = max(upstream_config.head_dims(config), default=1)
    hidden = largest(config, "hidden_size") or trainer.model.get_input_embeddings().weight.shape[-1]
    heads, key_heads = upstream_config.num_heads(config) or (hidden, hidden)
    experts, expert_width = (largest(config, name) for name in ("num_experts_per_tok", "moe_intermediate_size"))
    return ModelShape(
        num_layers=largest(config, "num_hidden_layers") or 1,
        hidden=hidden,
        intermediate=max(largest(config, "intermediate_size") or 4 * hidden, experts * expert_width),
        query_width=heads * head_dim,
        key_width=key_heads * head_dim,
        vocabulary=config.vocab_size,
        element_bytes=2 if trainer.args.bf16 else 4,
        checkpoints=bool(trainer.args.gradient_checkpointing),
        trains_base=_is_trained_in_full(trainer.model),
        head_dim=head_dim,
    )


def _is_trained_in_full(model: nn.Module) -> bool:
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return 2 * sum(size for size, is_trained in sizes if is_trained) > sum(size for size, _ in sizes)


def available_tokens(
    trainer: Any, shape: ModelShape, levers: MemoryLevers | None = None, *, copies_to_come: int
) -> int:
    """How many tokens a pass has device memory for, once the trainer is built.

    Args:
        trainer: its model is on the device, vLLM asleep or what it leaves free.
        shape: the policy.
        levers: what is done about long rows.
        copies_to_come: see `activation_bytes`.
    """
    return tokens_that_fit(activation_bytes(trainer, copies_to_come=copies_to_come), 0, shape, levers)


def activation_bytes(trainer: Any, *, copies_to_come: int) -> int:
    """Device memory for a pass, once the trainer is built.

    Args:
        trainer: its model is on the device, vLLM asleep or what it leaves free.
        copies_to_come: how many tensors of every trained parameter's size the device is still to hold: its gradient,
            its two moments.
    """
    device = trainer.args.device
    free, total = torch.cuda.mem_get_info(device)
    reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    fraction = torch.cuda.get_per_process_memory_fraction(device)
    free = allocatable_bytes(free, reserved, allocated, int(fraction * total) if fraction < 1.0 else None)
    trained = sum(p.nbytes for p in trainer.model.parameters() if p.requires_grad)
    return free - copies_to_come * trained


def long_context_facts(trainer: Any, *, copies_to_come: int) -> LongContextFacts:
    """Collects what `long_context.py` decides from, but for what trial forwards tell.

    Args:
        trainer: constructed as far as `GRPOTrainer.__init__` goes.
        copies_to_come: see `activation_bytes`.
    """
    model, args = trainer.model, trainer.args
    config = model.config.get_text_config()
    is_cuda = args.device.type == "cuda"
    return LongContextFacts(
        device_type=args.device.type,
        bf16=bool(args.bf16),
        gradient_checkpointing=bool(args.gradient_checkpointing),
        longest_pass_tokens=longest_pass(
            args.max_completion_length or 0,
            args.vllm_max_model_length,
            budget_setting(args, "max_tokens_per_microbatch"),
        ),
        uses_hub_kernels=uses_hub_kernels(model),
        free_bytes=activation_bytes(trainer, copies_to_come=copies_to_come) if is_cuda else 0,
        num_key_value_heads=(upstream_config.num_heads(config) or (1, 1))[1],
        attention=own_attention(config),
        asks_for_attention=asks_for_attention(model),
        is_multimodal=trainer._is_vlm or config is not model.config,
        router_loss=bool(trainer.aux_loss_enabled),
        torch_compile=bool(args.torch_compile),
        parallelism=parallelism(args, model),
        num_devices=max(1, args.n_gpu),
        is_split_over_devices=len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1,
        trains_nothing=trains_nothing(model),
    )


def draws(trainer: Any) -> bool:
    """Whether a forward of the policy in training mode draws random numbers; layers that keep statistics count."""
    model = trainer.model
    if any(isinstance(module, _TRAINING_MODE_LAYERS) for module in model.modules()):
        return True
    return forward_draws(model, model.config.get_text_config().vocab_size, trainer.accelerator.autocast())


def checkpointing_modules(model: nn.Module) -> list[nn.Module]:
    """Modules, wrapped or not, that would call their `_gradient_checkpointing_func` in training."""
    return [module for module in model.modules() if getattr(module, "gradient_checkpointing", False) is True]


def checkpointed_layer(function: Any) -> nn.Module | None:
    """The layer whose run transformers hands to `_gradient_checkpointing_func`; None for anything else.

    transformers 5.17 hands over `partial(super().__call__, **kwargs)`, 5.24 `partial(forward, self, **kwargs)`.
    """
    if not isinstance(function, functools.partial):
        return None
    owner = function.args[0] if function.args else getattr(function.func, "__self__", None)
    return owner if isinstance(owner, GradientCheckpointingLayer) else None


def runs_layer_hooks(function: functools.partial[Any]) -> bool:
    """Whether the run that transformers hands over goes through `Module.__call__`, so that hooks of the layer run."""
    return not function.args

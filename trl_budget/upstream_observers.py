"""What of the user's looks at a pass from outside: hooks on modules, callbacks between micro-batches, adapters by row.

Reads only. Code of the packages below is taken to work with any shape of a batch; all other code is the user's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules import module as every_module
from transformers import TrainerCallback

_KNOWN = frozenset(
    (
        *("torch", "transformers", "trl", "trl_budget", "accelerate", "peft", "kernels", "liger_kernel"),
        *("bitsandbytes", "torchao", "compressed_tensors", "hqq", "optimum"),
        *("wandb", "mlflow", "comet_ml"),  # they record
    )
)
_KNOWN_NAMES = ("make_inputs_require_grad", "make_inputs_require_grads")  # a recipe that is copied into scripts
_ROW_ADAPTERS = {"XLORA": "X-LoRA", "POLY": "Poly"}


def user_hooks(model: nn.Module) -> tuple[str, ...]:
    """Functions of the user that torch calls with the activations or gradients of a module of `model`, by name."""
    return tuple(dict.fromkeys(f"a hook of yours ({_name(hook)})" for hook in _hooks(model) if _is_the_users(hook)))


def gradient_hooks(model: nn.Module) -> tuple[str, ...]:
    """Functions of the user that torch calls with the gradient of a parameter in every backward, by name."""
    hooks = (
        hook
        for parameter in model.parameters()
        for registered in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
        for hook in (registered or {}).values()
    )
    return tuple(dict.fromkeys(f"a gradient hook of yours ({_name(hook)})" for hook in hooks if _is_the_users(hook)))


def _hooks(model: nn.Module) -> Iterator[Callable[..., Any]]:
    for registered in (
        *(every_module._global_forward_pre_hooks, every_module._global_forward_hooks),
        *(every_module._global_backward_pre_hooks, every_module._global_backward_hooks),
    ):
        yield from registered.values()
    for module in model.modules():
        for hooks in (
            *(module._forward_pre_hooks, module._forward_hooks),
            *(module._backward_pre_hooks, module._backward_hooks),
        ):
            yield from hooks.values()


def _function(call: Any) -> Any:
    while isinstance(call, functools.partial):
        call = call.func
    return getattr(call, "__func__", call)


def _is_the_users(call: Any) -> bool:
    function = _function(call)
    module = getattr(function, "__module__", None) or type(function).__module__
    return module.split(".")[0] not in _KNOWN and _name(call).split(".")[-1] not in _KNOWN_NAMES


def _name(call: Any) -> str:
    function = _function(call)
    return getattr(function, "__qualname__", type(function).__qualname__).removeprefix("<locals>.")


def micro_batch_callbacks(trainer: Any) -> tuple[str, ...]:
    """Callbacks of the user that are called between two micro-batches of an optimizer step, by name."""
    callbacks = (
        type(callback)
        for callback in trainer.callback_handler.callbacks
        if _looks_between(callback) and _is_the_users(type(callback))
    )
    return tuple(dict.fromkeys(f"{callback.__qualname__}.on_substep_end" for callback in callbacks))


def _looks_between(callback: Any) -> bool:
    own = getattr(type(callback), "on_substep_end", None)
    return own is not TrainerCallback.on_substep_end or "on_substep_end" in vars(callback)


def row_adapters(model: nn.Module) -> str | None:
    """Adapters whose effect depends on where a row begins or which one it is, by name; None if there are none."""
    for config in (getattr(model, "peft_config", None) or {}).values():
        if getattr(config, "alora_invocation_tokens", None):
            return "activated LoRA (alora_invocation_tokens)"
        kind = getattr(config.peft_type, "value", config.peft_type)
        if kind in _ROW_ADAPTERS:
            return _ROW_ADAPTERS[kind]
    return None

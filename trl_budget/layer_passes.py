"""How a model's layers run in a pass: as transformers has them, or with the long-context levers.

Resolved once, when the trainer is built; put in place for the length of a forward.
"""

from __future__ import annotations

import dataclasses
import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import nn

from trl_budget import upstream_attention
from trl_budget import upstream_model as upstream
from trl_budget.activation_memory import MemoryLevers, ModelShape, offloaded_bytes_per_token
from trl_budget.activation_store import ActivationStore, DeviceStore
from trl_budget.config import budget_setting
from trl_budget.host_stores import HostStores
from trl_budget.layer_checkpoint import tiled_layers, tiled_layers_without_gradient
from trl_budget.layer_tiles import TileSettings
from trl_budget.layer_trial import layers_fault
from trl_budget.long_context import LongContextFields, LongContextPlan, resolve_long_context

logger = logging.getLogger(__name__)


def plan_layers(trainer: Any, shape: ModelShape, *, copies_to_come: int) -> LongContextPlan:
    """Resolves the long-context fields; a lever that a trial run refuses is off, or an error where it was asked for.

    Collective where there are several processes: the card with the least memory decides, and a fault on any.

    Args:
        trainer: constructed as far as `GRPOTrainer.__init__` goes; its model is where it trains.
        shape: the policy.
        copies_to_come: see `upstream_model.available_tokens`.

    Raises:
        SettingsError: a lever was asked for and cannot be served.
    """
    fields = LongContextFields(
        *(budget_setting(trainer.args, field.name) for field in dataclasses.fields(LongContextFields))
    )
    facts = upstream.long_context_facts(trainer, copies_to_come=copies_to_come)
    facts = dataclasses.replace(facts, free_bytes=min(gather_object([facts.free_bytes])))
    plan = resolve_long_context(fields, facts, shape)
    if plan.levers == MemoryLevers():
        return plan
    if plan.levers.splits_layers:
        upstream_attention.enable_packed_attention([trainer.model, trainer.ref_model])
        facts = dataclasses.replace(facts, draws_random_numbers=any(gather_object([upstream.draws(trainer)])))
        plan = resolve_long_context(fields, facts, shape)
    if plan.levers.splits_layers:
        fault = _reference_fault(trainer.ref_model) or _fault_on_any_rank(trainer, plan.levers)
        facts = dataclasses.replace(facts, tiling_fault=fault)
        plan = resolve_long_context(fields, facts, shape)
    if plan.levers.offload and not plan.levers.splits_layers:
        facts = dataclasses.replace(facts, trial_fault=_fault_on_any_rank(trainer, plan.levers))
        plan = resolve_long_context(fields, facts, shape)
    return plan


def _reference_fault(reference: nn.Module | None) -> str | None:
    """Why a reference model cannot run in the policy's tiles; the same on every rank."""
    names = upstream_attention.undispatched_attention(reference) if reference is not None else set()
    return f"the reference model computes attention with {', '.join(sorted(names))}" if names else None


def _fault_on_any_rank(trainer: Any, levers: MemoryLevers) -> str | None:
    return next(filter(None, gather_object([_trial(trainer, levers)])), None)


def _trial(trainer: Any, levers: MemoryLevers) -> str | None:
    vocabulary = trainer.model.config.get_text_config().vocab_size
    autocast = trainer.accelerator.autocast()
    model, is_tiled = trainer.model, levers.splits_layers
    whole = upstream_attention.with_own_attention([model])
    fault = layers_fault(model, vocabulary, autocast, levers.num_head_groups, is_tiled=is_tiled, whole=whole)
    kinds = upstream.state_layers(model) if fault is not None and is_tiled else None
    return fault if kinds is None else f"layers of kind {kinds} cannot be cut"


class LayerPasses:
    """The levers in place.

    Args:
        levers: what is on.
        shape: the policy.
        device: where it trains.
        max_tokens: of a pass, for which host memory is taken now; a longer one makes it grow before its first layer.
        pin: page-lock that memory.
    """

    def __init__(
        self,
        levers: MemoryLevers,
        shape: ModelShape,
        device: torch.device,
        max_tokens: int | None,
        *,
        pin: bool,
    ) -> None:
        self._is_on = levers != MemoryLevers()
        self._settings = TileSettings(levers.tile_tokens, levers.num_head_groups)
        self._store: ActivationStore = DeviceStore()
        if levers.offload:
            self._store = HostStores(device, (max_tokens or 0) * offloaded_bytes_per_token(shape), pin=pin)
        self._has_warned = False

    def around(self, model: nn.Module) -> AbstractContextManager[None]:
        """For the length of one forward of `model`, the policy or its reference, as gradients are enabled now.

        Without gradient nothing is kept, so that only tiles count. With it, nothing happens where nothing checkpoints.
        """
        if not self._is_on:
            return nullcontext()
        if not torch.is_grad_enabled():
            is_whole = self._settings.are_whole
            return nullcontext() if is_whole else tiled_layers_without_gradient(model, self._settings)
        if not model.training:
            return nullcontext()
        if not upstream.checkpointing_modules(model):
            self._warn_once(type(model).__name__)
            return nullcontext()
        return tiled_layers(model, self._settings, self._store, needs_leaf_gradients=False)

    def forget(self) -> None:
        """Lets go of what an aborted step left behind, even while its error is still referred to."""
        self._store.give_up()

    def _warn_once(self, name: str) -> None:
        if not self._has_warned:
            logger.warning(
                "%s runs with gradient and without gradient checkpointing, which was on when the trainer was built. "
                "The long-context levers do nothing then: every activation of every layer stays on the device. "
                "Call gradient_checkpointing_enable() again to have them back.",
                name,
            )
        self._has_warned = True

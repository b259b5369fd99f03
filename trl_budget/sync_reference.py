"""TRL's `sync_ref_model` with a reference model in bf16, and with one that is off the card between scorings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers.trainer_callback import CallbackHandler
from trl.trainer.callbacks import SyncRefModelCallback

from trl_budget.card import Card
from trl_budget.fp32_reference import Fp32Reference


class SyncFp32Reference(SyncRefModelCallback):
    """As TRL 1.16's `SyncRefModelCallback`; the reference is mixed in fp32 and cast.

    Args:
        original: TRL's callback.
        mixer: the reference's fp32 values.
        is_on: asked at each sync; TRL's own arithmetic where False.
    """

    def __init__(self, original: SyncRefModelCallback, mixer: Fp32Reference, is_on: Callable[[], bool]) -> None:
        super().__init__(ref_model=original.ref_model, accelerator=original.accelerator)
        self._mixer = mixer
        self._is_on = is_on

    def sync_target_model(self, model: nn.Module, target_model: nn.Module, alpha: float) -> None:  # type: ignore[override]
        """Moves `target_model`, the reference, by `alpha` towards `model`."""
        if self._is_on():
            self._mixer.mix(target_model, model, alpha)
        else:
            super().sync_target_model(model, target_model, alpha)


class SyncPresentReference(SyncRefModelCallback):
    """As the callback that it stands for; the reference is on the card while it is updated."""

    def __init__(self, original: SyncRefModelCallback, card: Card, name: str) -> None:
        super().__init__(ref_model=original.ref_model, accelerator=original.accelerator)
        self._original = original
        self._card = card
        self._name = name

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Updates the reference every `ref_model_sync_steps`."""
        if state.global_step % args.ref_model_sync_steps == 0:
            with self._card.present(self._name):
                self._original.on_step_end(args, state, control, **kwargs)


def mix_reference_in_fp32(handler: CallbackHandler, mixer: Fp32Reference, is_on: Callable[[], bool]) -> None:
    """Replaces TRL's callback where it stands."""
    _replace(handler, lambda original: SyncFp32Reference(original, mixer, is_on))


def keep_reference_present(handler: CallbackHandler, card: Card, name: str) -> None:
    """Replaces TRL's callback, or the one that mixes in fp32, where it stands."""
    _replace(handler, lambda original: SyncPresentReference(original, card, name))


def _replace(handler: CallbackHandler, make: Callable[[SyncRefModelCallback], SyncRefModelCallback]) -> None:
    handler.callbacks[:] = [
        make(callback) if type(callback) in (SyncRefModelCallback, SyncFp32Reference) else callback
        for callback in handler.callbacks
    ]

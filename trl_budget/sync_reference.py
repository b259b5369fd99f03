"""TRL's `sync_ref_model` with a reference model that is off the card between scorings."""

from __future__ import annotations

from typing import Any

from transformers.trainer_callback import CallbackHandler
from trl.trainer.callbacks import SyncRefModelCallback

from trl_budget.card import Card


class SyncPresentReference(SyncRefModelCallback):
    """As TRL 1.16's `SyncRefModelCallback`; the reference is on the card while it is updated."""

    def __init__(self, original: SyncRefModelCallback, card: Card, name: str) -> None:
        super().__init__(ref_model=original.ref_model, accelerator=original.accelerator)
        self._card = card
        self._name = name

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Updates the reference every `ref_model_sync_steps`."""
        if state.global_step % args.ref_model_sync_steps == 0:
            with self._card.present(self._name):
                super().on_step_end(args, state, control, **kwargs)


def keep_reference_present(handler: CallbackHandler, card: Card, name: str) -> None:
    """Replaces TRL's callback where it stands."""
    handler.callbacks[:] = [
        SyncPresentReference(callback, card, name) if type(callback) is SyncRefModelCallback else callback
        for callback in handler.callbacks
    ]

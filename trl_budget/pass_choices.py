"""What is decided about the passes of a trainer: how rows lie, how many tokens a pass holds, how layers run.

Decided when the trainer is built, after the trial runs that a choice needs, and looked at again when training begins:
a hook, a callback or a setting may have come since. Collective where there are several processes: each plans the
passes of all, so every choice must be one. The card with the least memory decides, and a fault on any.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from accelerate.utils import gather_object

from trl_budget import upstream_attention
from trl_budget import upstream_model as upstream
from trl_budget.config import budget_setting
from trl_budget.layer_passes import LayerPasses, plan_layers
from trl_budget.packing import PassCost
from trl_budget.page_locking import locks_pages
from trl_budget.passes import PassSettings
from trl_budget.placement import ResolvedSetting
from trl_budget.row_layout import (
    PACKED,
    SPLIT,
    STOCK,
    TRIMMED,
    WHOLE,
    LayoutFacts,
    regrouping,
    resolve_layout,
    resolve_max_tokens,
)


class PassChoices:
    """The choices for one trainer.

    Args:
        trainer: constructed as far as `GRPOTrainer.__init__` goes; its model is where it trains.
        base: the class whose methods count as not overridden.
        copies_to_come: see `upstream_model.activation_bytes`.

    Attributes:
        layout: "packed", "trimmed" or "stock".
        pass_settings: how a window is cut; None where a pass is a stock micro-batch.
        layer_passes: the long-context levers in place.
        rows: of the settings' table.

    Raises:
        SettingsError: a lever was asked for and cannot be served; the models have their own attention then.
    """

    def __init__(self, trainer: Any, base: type, *, copies_to_come: int) -> None:
        self._trainer = trainer
        self._base = base
        self._room: int | None = None
        self._facts: LayoutFacts
        models = [trainer.model, trainer.ref_model]
        try:
            layout = self._try_layouts()
            self._shape = upstream.model_shape(trainer)
            plan = plan_layers(trainer, self._shape, copies_to_come=copies_to_come)
        except BaseException:
            upstream_attention.restore_attention(models)
            raise
        if layout.value != PACKED and not plan.levers.splits_layers:
            upstream_attention.restore_attention(models)

        def measure_room() -> int:
            tokens = upstream.available_tokens(trainer, self._shape, plan.levers, copies_to_come=copies_to_come)
            return min(gather_object([tokens]))

        self._measure_room = measure_room
        budget = self._choose_budget(layout)
        max_tokens = None if self.pass_settings is None else self.pass_settings.max_tokens
        self.layer_passes = LayerPasses(
            plan.levers, self._shape, trainer.args.device, max_tokens, pin=locks_pages(trainer.args)
        )
        self.rows = [layout, budget, *plan.settings]

    def look_again(self) -> list[ResolvedSetting]:
        """Follows hooks, callbacks and settings that have changed. Returns the rows of layout and budget.

        A layout only moves towards stock's: one that has not been tried is not begun.

        Raises:
            SettingsError: what was asked for can no longer be served.
        """
        tried = ("padding_fault", "is_padding_tried", "packing_fault")
        known = {name: vars(self._facts)[name] for name in tried}
        self._facts = dataclasses.replace(self._common_facts(), **known)
        layout = resolve_layout(self._setting("padding_free"), self._facts)
        order = (PACKED, TRIMMED, STOCK)
        if order.index(layout.value) < order.index(self.layout):
            layout = next(row for row in self.rows if row.name == layout.name)
        changed = [layout, self._choose_budget(layout)]
        self.rows = [*changed, *self.rows[len(changed) :]]
        return changed

    def _setting(self, name: str) -> Any:
        return budget_setting(self._trainer.args, name)

    def _try_layouts(self) -> ResolvedSetting:
        """The layout after trial runs of rows that lie otherwise than stock's; each only where it is needed."""
        requested, trainer = self._setting("padding_free"), self._trainer
        self._facts = self._common_facts()
        layout = resolve_layout(requested, self._facts)
        if layout.value != STOCK:
            trials = gather_object([upstream.padding_trial(trainer)])
            self._facts = dataclasses.replace(
                self._facts,
                padding_fault=next(filter(None, (trial.fault for trial in trials)), None),
                is_padding_tried=all(trial.is_exact for trial in trials),
            )
            layout = resolve_layout(requested, self._facts)
        if layout.value == PACKED:
            upstream_attention.enable_packed_attention([trainer.model, trainer.ref_model])
            faults = gather_object([upstream.packing_trial(trainer)])
            self._facts = dataclasses.replace(self._facts, packing_fault=next(filter(None, faults), None))
            layout = resolve_layout(requested, self._facts)
        return layout

    def _common_facts(self) -> LayoutFacts:
        """What the layout depends on, one for all ranks: a rank may have a callback or a hook of its own."""
        facts = upstream.layout_facts(self._trainer, self._base)
        found = gather_object([(facts.hooks, facts.gradient_hooks, facts.observers)])
        common = [tuple(dict.fromkeys(n for names in ranks for n in names)) for ranks in zip(*found, strict=True)]
        return dataclasses.replace(facts, hooks=common[0], gradient_hooks=common[1], observers=common[2])

    def _choose_budget(self, layout: ResolvedSetting) -> ResolvedSetting:
        def room() -> int:
            self._room = self._measure_room() if self._room is None else self._room
            return self._room

        row, max_tokens = resolve_max_tokens(self._setting("max_tokens_per_microbatch"), self._facts, room)
        self.layout: str = layout.value
        self.pass_settings: PassSettings | None = None
        if max_tokens is not None:
            self.pass_settings = PassSettings(
                max_tokens=max_tokens,
                cost=PassCost(is_packed=layout.value == PACKED, quadratic=self._shape.quadratic_cost),
                keeps_micro_batches_whole=regrouping(self._facts)[0] == WHOLE,
                merges_micro_batches=regrouping(self._facts)[0] != SPLIT,
                padded_columns=layout.value == STOCK,
            )
        return row

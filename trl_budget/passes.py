"""Runs the stock micro-batches of one accumulation window in passes of a token budget.

TRL's loss is called with whole stock micro-batches only: it is served the log-probs and entropies of the pass's rows
with gradient and those of all other rows without. Its normalisers are functions of the masks, its terms of a row's own
values, so the gradients of the passes add up to stock's, and its metrics are stock's own entries. Nothing is scaled
here. Needs a loss whose normalisers do not depend on the log-probs. Legend: M micro-batches, B rows of each, C
completion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor

from trl_budget.packing import PassCost, Passes, plan_passes

MicroBatch = dict[str, Any]
Outputs = tuple[Tensor, Tensor]


class LossOwner(Protocol):
    """What the passes need from the trainer."""

    accelerator: Accelerator

    def score_rows(self, model: Any, rows: MicroBatch) -> Outputs:
        """Runs the model on some rows. Returns log-probs and entropies, `[rows, C]`, with gradient."""
        ...

    def loss_of(self, model: Any, micro_batch: MicroBatch, outputs: Outputs) -> Tensor:
        """TRL's loss of a stock micro-batch whose log-probs and entropies are known. Appends to the metrics."""
        ...

    def without_traces(self) -> Any:
        """A context in which `loss_of` leaves no metric and no state behind."""
        ...


@dataclass
class PassSettings:
    """How a window is cut.

    Attributes:
        max_tokens: budget of a pass.
        cost: how tokens and time of a pass are counted.
        keeps_micro_batches_whole: never cut a stock micro-batch.
        merges_micro_batches: whether a pass may hold rows of several.
        padded_columns: count every row as long as the padded batch, which is how it runs.
    """

    max_tokens: int
    cost: PassCost
    keeps_micro_batches_whole: bool
    padded_columns: bool
    merges_micro_batches: bool = True


class _Valued(torch.autograd.Function):
    """Shows a value and backpropagates into another one."""

    @staticmethod
    def forward(ctx: Any, differentiated: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class WindowPasses:
    """The passes of one window of stock micro-batches.

    Args:
        owner: the trainer.
        settings: how the window is cut.
        micro_batches: stock's inputs, of one generation batch and one accumulation window, in order.
        syncs: whether the optimizer steps after the last micro-batch.
    """

    def __init__(
        self, owner: LossOwner, settings: PassSettings, micro_batches: list[MicroBatch], *, syncs: bool
    ) -> None:
        self._owner = owner
        self._settings = settings
        self._micro_batches = micro_batches
        self._syncs = syncs
        self._micro_batch_size = micro_batches[0]["completion_ids"].shape[0]
        columns = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        self._rows = {name: torch.cat([batch[name] for batch in micro_batches]) for name in columns}
        shape, device = self._rows["completion_ids"].shape, self._rows["completion_ids"].device
        self.log_probs = torch.zeros(shape, dtype=torch.float32, device=device)
        self.entropies = torch.zeros(shape, dtype=torch.float32, device=device)
        self._losses: dict[int, Tensor] = {}

    def run(self, model: Any) -> Tensor:
        """Forward and backward of every pass but the last one's backward.

        Returns:
            fp32 scalar: the sum of stock's losses of the window, whose gradient is the last pass's.
        """
        passes, calls = self._plan()
        is_single = len(passes) == 1
        for index, rows in enumerate(passes):
            is_last = index == len(passes) - 1
            with nullcontext() if is_last else self._owner.accelerator.no_sync(model):
                loss = self._pass(model, rows, calls[index], keeps_metrics=is_single)
                if not is_last:
                    self._owner.accelerator.backward(loss)
        with torch.no_grad():
            for number in range(len(self._micro_batches)):
                if number not in self._losses:
                    self._losses[number] = self._stock_loss(model, number, self.known(number)).detach()
        return _Valued.apply(loss, torch.stack([self._losses[number] for number in sorted(self._losses)]).sum())

    def _plan(self) -> tuple[Passes, list[int]]:
        """This rank's passes, and how often the busiest rank calls the loss in each of them."""
        accelerator = self._owner.accelerator
        lengths = _row_lengths(self._rows["prompt_mask"], self._rows["completion_mask"], self._settings)
        if accelerator.num_processes > 1:
            lengths = accelerator.gather(lengths)
        plans = plan_passes(
            lengths.view(accelerator.num_processes, -1, 2).tolist(),
            self._settings.max_tokens,
            self._settings.cost,
            micro_batch_size=self._micro_batch_size,
            keeps_micro_batches_whole=self._settings.keeps_micro_batches_whole,
        )
        calls = [max(len(self._touched(rows)) for rows in ranks) for ranks in zip(*plans, strict=True)]
        return plans[accelerator.process_index], calls

    def _touched(self, rows: tuple[int, ...]) -> dict[int, list[int]]:
        """By stock micro-batch: its rows in the pass."""
        touched: dict[int, list[int]] = {}
        for row in rows:
            touched.setdefault(row // self._micro_batch_size, []).append(row)
        return touched

    def _pass(self, model: Any, rows: tuple[int, ...], num_calls: int, *, keeps_metrics: bool) -> Tensor:
        """The loss of one pass, with gradient.

        The metrics gather, so the ranks meet in every call of the loss: each calls it `num_calls` times before it goes
        on. A rank that called it more often than others would wait for their next pass before its own backward.
        """
        losses = []
        live = self._live_outputs(model, rows)
        touched = self._touched(rows)
        for number in touched:
            served = self._of(number, live[0]), self._of(number, live[1])
            if keeps_metrics:
                losses.append(self._stock_loss(model, number, served))
                self._losses[number] = losses[-1].detach()
            else:
                with self._without_metrics():
                    losses.append(self._owner.loss_of(model, self._micro_batches[number], served))
        for _ in range(num_calls - len(touched)):
            with torch.no_grad(), self._without_metrics():
                self._owner.loss_of(model, self._micro_batches[0], self.known(0))
        return torch.stack(losses).sum()

    def _live_outputs(self, model: Any, rows: tuple[int, ...]) -> list[Tensor]:
        """Log-probs and entropies of the whole window, those of the pass fresh from the model."""
        chosen = torch.tensor(rows, device=self.log_probs.device)
        outputs = self._owner.score_rows(model, {name: values[chosen] for name, values in self._rows.items()})
        return [self._live(known, chosen, values) for known, values in zip(self._all_known(), outputs, strict=True)]

    def _live(self, known: Tensor, chosen: Tensor, values: Tensor) -> Tensor:
        """All rows of the window, those of the pass with gradient; remembers their values for later passes."""
        values = values.to(known.dtype)
        live = known.clone().index_copy(0, chosen, values)
        known.index_copy_(0, chosen, values.detach())
        return live

    def _all_known(self) -> Outputs:
        return self.log_probs, self.entropies

    def _of(self, number: int, values: Tensor) -> Tensor:
        return values[number * self._micro_batch_size : (number + 1) * self._micro_batch_size]

    def known(self, number: int) -> Outputs:
        """Log-probs and entropies of micro-batch `number`, `[B, C]`, without gradient, from the passes so far."""
        return self._of(number, self.log_probs), self._of(number, self.entropies)

    def _stock_loss(self, model: Any, number: int, outputs: Outputs) -> Tensor:
        """The loss whose metrics count; the last one of an optimizer step sees `sync_gradients`, as in stock."""
        is_last = number == len(self._micro_batches) - 1
        with self._sync_gradients(self._syncs and is_last):
            return self._owner.loss_of(model, self._micro_batches[number], outputs)

    @contextmanager
    def _without_metrics(self) -> Iterator[None]:
        with self._owner.without_traces(), self._sync_gradients(False):
            yield

    @contextmanager
    def _sync_gradients(self, value: bool) -> Iterator[None]:
        state = self._owner.accelerator.gradient_state
        before = state.sync_gradients
        state._set_sync_gradients(value)
        try:
            yield
        finally:
            state._set_sync_gradients(before)


def score_in_passes(
    score: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]],
    input_ids: Tensor,
    attention_mask: Tensor,
    logits_to_keep: int,
    settings: PassSettings,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs and entropies without gradient, in passes of the same budget.

    Args:
        score: runs some rows' ids and mask, `[rows, L]`; returns log-probs and entropies or None, `[rows, C]`.
        input_ids: `[B, L]`.
        attention_mask: `[B, L]`.
        logits_to_keep: `C`, the columns that hold completions.
        settings: as for the update.

    Returns:
        Log-probs and entropies, `[B, C]`.
    """
    prompt_columns = attention_mask.shape[1] - logits_to_keep
    lengths = _row_lengths(attention_mask[:, :prompt_columns], attention_mask[:, prompt_columns:], settings)
    plan = plan_passes([lengths.tolist()], settings.max_tokens, settings.cost, micro_batch_size=1)[0]
    order = torch.tensor([row for rows in plan for row in rows], device=input_ids.device)
    parts = [score(input_ids[rows], attention_mask[rows]) for rows in map(list, plan)]
    back = torch.argsort(order)
    entropies = [entropy for _, entropy in parts if entropy is not None]
    return torch.cat([logps for logps, _ in parts])[back], torch.cat(entropies)[back] if entropies else None


def _row_lengths(prompt_mask: Tensor, completion_mask: Tensor, settings: PassSettings) -> Tensor:
    """`[B, 2]`, int64: the columns that each row takes for its prompt and its completion."""
    masks = (prompt_mask, completion_mask)
    if settings.padded_columns:
        return torch.stack([torch.full_like(mask[:, 0], mask.shape[1], dtype=torch.long) for mask in masks], dim=1)
    return torch.stack([mask.sum(1) for mask in masks], dim=1)

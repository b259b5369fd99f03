"""`TokenBudgetTrainer`: the part of the trainer that scores rows and computes the loss.

Overrides that delegate, over TRL 1.16: rows are packed or trimmed where TRL calls the model, stock's micro-batches run
in passes of a token budget, and the separate old-log-prob pass is skipped where it is exact. TRL's loss stays TRL's.
Gradients and metrics equal stock's up to the rounding of other matrix shapes; with the stock layout and no budget
every bit is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from trl_budget import upstream_attention
from trl_budget import upstream_model as upstream
from trl_budget.config import budget_setting
from trl_budget.errors import SettingsError
from trl_budget.layer_passes import LayerPasses
from trl_budget.micro_batch import RowsModel
from trl_budget.pass_choices import PassChoices
from trl_budget.passes import MicroBatch, Outputs, PassSettings, WindowPasses, score_in_passes
from trl_budget.placement import ResolvedSetting, format_table
from trl_budget.reuse import failed_preconditions, resolve_reuse
from trl_budget.row_layout import PACKED, STOCK, TRIMMED
from trl_budget.scoring import RatioSettings, SamplingStatistics, importance_sampling_ratio
from trl_budget.upstream import lm_head_chunks


class TokenBudgetTrainer(GRPOTrainer):
    """`GRPOTrainer` whose passes are a memory choice and no longer an algorithmic one."""

    args: GRPOConfig
    resolved_settings: list[ResolvedSetting]
    _own_class: type  # overrides of subclasses of it are the user's
    _passes: list[ResolvedSetting]
    _choices: PassChoices
    _served: Outputs | None = None
    _loss_inputs: MicroBatch | None = None
    _looks_again = False
    _is_in_training_step = False
    _awaited_mode: str | None = None  # "train" or "eval": the next loss of this mode is the trainer's own
    _counts_rows = False

    def _resolve_passes(self, *, copies_to_come: int) -> list[ResolvedSetting]:
        """Decides layout, budget, levers and reuse. The model must be where it trains. Collective.

        Args:
            copies_to_come: see `upstream_model.activation_bytes`.
        """
        self._choices = PassChoices(self, self._own_class, copies_to_come=copies_to_come)
        self._ratio_settings = RatioSettings(
            self.vllm_importance_sampling_mode,
            self.vllm_importance_sampling_clip_min,
            self.vllm_importance_sampling_clip_max,
        )
        self._forget_window()
        return [*self._choices.rows, self._resolve_reuse()]

    @property
    def _layout(self) -> str:
        return self._choices.layout

    @property
    def _pass_settings(self) -> PassSettings | None:
        return self._choices.pass_settings

    @property
    def _layer_passes(self) -> LayerPasses:
        return self._choices.layer_passes

    def _resolve_again(self) -> None:
        """Follows what has changed since the trainer was built, and prints the rows that differ. Collective."""
        rows = [*self._choices.look_again(), self._resolve_reuse()]
        changed = [row for row in rows if row not in self.resolved_settings]
        by_name = {row.name: row for row in rows}
        self._passes = [by_name.get(row.name, row) for row in self._passes]
        self.resolved_settings = [by_name.get(row.name, row) for row in self.resolved_settings]
        if changed:
            self.accelerator.print(format_table(changed, "trl-budget: changed since the trainer was built"))

    def _resolve_reuse(self) -> ResolvedSetting:
        """Decides on reuse from the settings and the layers of this moment."""
        self._reuse_facts = upstream.reuse_facts(self, self._own_class)
        reuse = resolve_reuse(budget_setting(self.args, "reuse_old_logprobs"), self._reuse_facts)
        self._reuses_logprobs = reuse.value == "on" and self._reuse_facts.corrects_sampling
        return reuse

    def _forget_window(self) -> None:
        """Drops what an interrupted window left behind."""
        self._pending: list[MicroBatch] = []
        self._window_position = 0
        self._awaited_mode = None
        self._statistics = {mode: SamplingStatistics(self._ratio_settings) for mode in ("train", "eval")}

    @property
    def _mode(self) -> str:
        return "train" if self._policy_trains else "eval"

    @property
    def _sampling_statistics(self) -> SamplingStatistics:
        return self._statistics[self._mode]

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        """As transformers 5.24; what an aborted window left is dropped, the first step looks at today's settings."""
        self._forget_window()
        self._layer_passes.forget()
        self._looks_again = True
        return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)

    # Scoring

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **forward_kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """As TRL 1.16; rows are packed or trimmed, and passes without gradient follow the token budget."""
        if self._served is not None:
            return *self._served, None
        stock = super()._get_per_token_logps_and_entropies
        layout = TRIMMED if self._layout == PACKED and not upstream_attention.packs_rows(model) else self._layout
        rows_model = model if layout == STOCK else RowsModel(model, logits_to_keep, is_packed=layout == PACKED)

        def score(ids: Tensor, mask: Tensor, rows: int | None = None, **images: Any) -> Any:
            with lm_head_chunks(budget_setting(self.args, "lm_head_chunk_size")), self._layer_passes.around(model):
                return stock(rows_model, ids, mask, logits_to_keep, rows, compute_entropy, compute_aux_loss, **images)

        has_images = any(value is not None for value in forward_kwargs.values())
        is_free = not torch.is_grad_enabled() and not has_images and not compute_aux_loss
        if self._pass_settings is not None and is_free:
            passed = score_in_passes(
                lambda *rows: score(*rows)[:2], input_ids, attention_mask, logits_to_keep, self._pass_settings
            )
            result = (*passed, None)
        else:
            result = score(input_ids, attention_mask, batch_size, **forward_kwargs)
        if self._loss_inputs is not None:
            self._add_sampling_ratio(self._loss_inputs, result[0].detach(), is_counted=self._counts_rows)
        return result

    def _generate(self, prompts: list[Any]) -> Any:
        """As TRL 1.16; the policy has the attention that the user chose, by whose name generation takes its way."""
        with upstream_attention.with_own_attention([self.model]):
            return super()._generate(prompts)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """As TRL 1.16; without the separate pass where the update's own forward gives the same log-probs."""
        if not self._skips_separate_pass():
            return super()._generate_and_score_completions(inputs)
        self.vllm_importance_sampling_correction = False
        try:
            outputs = super()._generate_and_score_completions(inputs)
        finally:
            self.vllm_importance_sampling_correction = True
        if "sampling_per_token_logps" not in outputs:
            raise SettingsError(
                "rollout_func returned logprobs=None, but vllm_importance_sampling_correction=True divides by them. "
                "Return vLLM's log-probs, or set vllm_importance_sampling_correction=False."
            )
        return outputs

    def _skips_separate_pass(self) -> bool:
        if not (self._reuse_facts.corrects_sampling and budget_setting(self.args, "reuse_old_logprobs") != "off"):
            return False
        if not self._policy_trains:
            return not failed_preconditions(self._reuse_facts, is_evaluation=True)
        left_in_window = self.current_gradient_accumulation_steps - self._window_position
        return self._reuses_logprobs and left_in_window >= self._steps_per_generation

    @property
    def _steps_per_generation(self) -> int:
        assert self.args.steps_per_generation is not None, "GRPOConfig fills it in"
        return self.args.steps_per_generation

    @property
    def _policy_trains(self) -> bool:
        assert self.model is not None
        return self.model.training

    def _add_sampling_ratio(self, inputs: MicroBatch, live_logps: Tensor, *, is_counted: bool) -> None:
        """Fills in, from the update's own forward, what the skipped pass would have left in stock's inputs."""
        is_missing = "importance_sampling_ratio" not in inputs and "sampling_per_token_logps" in inputs
        if not (self._reuse_facts.corrects_sampling and is_missing):
            return
        old = inputs.get("old_per_token_logps", live_logps)
        sampling, mask = inputs["sampling_per_token_logps"], loss_mask(inputs)
        ratio = importance_sampling_ratio(old, sampling, mask, self._ratio_settings)
        inputs["importance_sampling_ratio"] = ratio
        if is_counted:
            self._sampling_statistics.add(old, sampling, mask, ratio)

    # Loss

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """As TRL 1.16; the loss that is asked for in here, in its own context, is the update's."""
        self._is_in_training_step = True
        try:
            return super().training_step(model, inputs, num_items_in_batch)
        finally:
            self._is_in_training_step, self._awaited_mode = False, None

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """As TRL 1.16; first, what has changed until training began, in callbacks too, is followed."""
        if self._looks_again and self._policy_trains:
            self._looks_again = False
            self._resolve_again()
        return super()._prepare_inputs(generation_batch)

    def compute_loss_context_manager(self) -> Any:
        """As transformers 5.24; a loss of the trainer's own follows."""
        self._awaited_mode = self._mode if self._is_in_training_step or not self._policy_trains else None
        return super().compute_loss_context_manager()

    def _takes_own_loss(self) -> bool:
        """Whether the loss that is being asked for is the trainer's, not one that user code wants to see besides."""
        if self._awaited_mode != self._mode or (self._policy_trains and not torch.is_grad_enabled()):
            return False
        self._awaited_mode = None
        return True

    def compute_loss(
        self, model: Any, inputs: MicroBatch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """As TRL 1.16; with a token budget, the last micro-batch of a window runs the passes of all of them.

        The earlier ones return a zero without parameters behind it, so that the sum over the window is stock's. A loss
        that user code asks for besides is computed at once and leaves the update alone.
        """
        is_own = self._takes_own_loss()
        if not (self._policy_trains and is_own):
            loss = self._whole_loss(model, inputs, return_outputs, num_items_in_batch, is_counted=is_own)
            if is_own:
                self._log_sampling_statistics("eval")
            return loss
        ends_generation = (self._step + 1) % self._steps_per_generation == 0
        ends_window = self.accelerator.sync_gradients
        if self._pass_settings is None or return_outputs:
            loss = self._whole_loss(model, inputs, return_outputs, num_items_in_batch, is_counted=True)
        else:
            self._pending.append(inputs)
            if self._pass_settings.merges_micro_batches and not (ends_generation or ends_window):
                self._window_position += 1
                return torch.zeros((), device=self.accelerator.device, requires_grad=True)
            micro_batches, self._pending = self._pending, []
            window = WindowPasses(self, self._pass_settings, micro_batches, syncs=ends_window)
            loss = window.run(model)
            for number, micro_batch in enumerate(micro_batches):
                self._add_sampling_ratio(dict(micro_batch), window.known(number)[0], is_counted=True)
        if ends_generation:
            self._log_sampling_statistics("train")
        self._window_position = 0 if ends_window else self._window_position + 1
        return loss

    def _whole_loss(
        self, model: Any, inputs: MicroBatch, return_outputs: bool, num_items_in_batch: Any, *, is_counted: bool
    ) -> Tensor:
        """TRL's loss of one micro-batch in one pass.

        Args:
            model: as for `compute_loss`.
            inputs: as for `compute_loss`.
            return_outputs: as for `compute_loss`.
            num_items_in_batch: as for `compute_loss`.
            is_counted: whether the rows belong to the `sampling/*` metrics.
        """
        self._loss_inputs, self._counts_rows = dict(inputs), is_counted
        try:
            return super().compute_loss(model, self._loss_inputs, return_outputs, num_items_in_batch)
        finally:
            self._loss_inputs = None

    def score_rows(self, model: Any, rows: MicroBatch) -> Outputs:
        """See `passes.LossOwner`."""
        input_ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], dim=1)
        attention_mask = torch.cat([rows["prompt_mask"], rows["completion_mask"]], dim=1)
        logits_to_keep = rows["completion_ids"].shape[1]
        log_probs, entropies, _ = self._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, compute_entropy=True
        )
        assert entropies is not None
        return log_probs, entropies

    def loss_of(self, model: Any, micro_batch: MicroBatch, outputs: Outputs) -> Tensor:
        """See `passes.LossOwner`."""
        inputs = dict(micro_batch)
        self._add_sampling_ratio(inputs, outputs[0].detach(), is_counted=False)
        self._served = outputs
        try:
            return super().compute_loss(model, inputs)
        finally:
            self._served = None

    @contextmanager
    def without_traces(self) -> Iterator[None]:
        """See `passes.LossOwner`."""
        metrics = self._metrics[self._mode]
        lengths = {name: len(values) for name, values in metrics.items()}
        controller = self._entropy_window_stats, self.entropy_coef, self._last_world_entropy
        try:
            yield
        finally:
            for name in list(metrics):
                del metrics[name][lengths.get(name, 0) :]
                if name not in lengths:
                    del metrics[name]
            self._entropy_window_stats, self.entropy_coef, self._last_world_entropy = controller

    def _log_sampling_statistics(self, mode: str) -> None:
        if self._sampling_statistics.has_rows:
            self._sampling_statistics.log(self._metrics[mode], self.accelerator.gather)


TokenBudgetTrainer._own_class = TokenBudgetTrainer


def loss_mask(inputs: MicroBatch) -> Tensor:
    """`[B, C]`: 1 on the tokens of the loss."""
    mask = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask

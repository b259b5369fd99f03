"""`CheckedTrainer`: the part of the trainer that ends a run whose rollout was wrong, on all ranks at once.

Overrides that delegate, over TRL 1.16. One small exchange between the ranks per rollout; no number changes.
"""

from __future__ import annotations

import logging
from typing import Any

from trl_budget.errors import StalePolicyError
from trl_budget.logprob_gap import LogProbGapGate
from trl_budget.rank_checks import RankChecks
from trl_budget.scoring import sampling_gap
from trl_budget.token_budget import TokenBudgetTrainer, loss_mask

logger = logging.getLogger(__name__)

GAP_METRIC = "sampling/sampling_logp_difference/mean"


class CheckedTrainer(TokenBudgetTrainer):
    """`GRPOTrainer` whose ranks tell each other, once a rollout, what their checks have found."""

    _checks = RankChecks()
    _gap_gate: LogProbGapGate
    _meets_with_loss = False  # the ranks have still to meet after the newest rollout
    _told_of_gap = False

    def _begin_checks(self, checks: RankChecks, *, has_adapters: bool) -> None:
        self._checks = checks
        self._gap_gate = LogProbGapGate(has_adapters=has_adapters)

    @property
    def _watches_gap(self) -> bool:
        return False

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """As TRL 1.16; the rollout is checked, here or with the loss that brings the old log-probs."""
        before = len(self._gaps)
        outputs = super()._generate_and_score_completions(inputs)
        if len(self._gaps) > before:
            self._check_rollout(
                sampling_gap(outputs["old_per_token_logps"], outputs["sampling_per_token_logps"], loss_mask(outputs))
            )
        elif self._meets_with_loss:  # no loss has come
            self._check_rollout(None)
        else:
            self._meets_with_loss = True
        return outputs

    def _log_sampling_statistics(self, mode: str) -> None:
        before, gap = len(self._gaps), self._sampling_statistics.gap
        super()._log_sampling_statistics(mode)
        has_gap = len(self._gaps) > before
        if has_gap or self._meets_with_loss:
            self._check_rollout(gap if has_gap else None)

    @property
    def _gaps(self) -> list[float]:
        return self._metrics[self._mode].get(GAP_METRIC, [])

    def _check_rollout(self, gap: float | None) -> None:
        """Ends the run on all ranks if a check of one has failed, or the gap of the worst is too large. Collective.

        Args:
            gap: of this rank, see `sampling_gap`; None where no metric has it, which is so on all ranks.
        """
        self._meets_with_loss = False
        gaps = self._checks.meet("check the rollout", gap)
        if gap is None or not self._watches_gap:
            return
        if (reason := self._why_gap_is_wide()) is not None:
            self._tell_of_gap(reason)
            return
        worst = max(range(len(gaps)), key=gaps.__getitem__)
        try:
            self._gap_gate.check(self.state.global_step, gaps[worst])
        except StalePolicyError as error:
            self._checks.raise_for(worst, "check the rollout", error)

    def _why_gap_is_wide(self) -> str | None:
        """Why the log-probs of vLLM and of the trainer may be far apart over the same weights; None if they may not.

        vLLM's are of the tokens that sampling has kept, and the trainer's those of a forward in training mode.
        """
        args = self.args
        is_truncated = self.top_p != 1.0 or bool(self.top_k) or bool(self.min_p) or self.repetition_penalty != 1.0
        if is_truncated or args.generation_kwargs or args.vllm_structured_outputs_regex is not None:
            return "vLLM's log-probs are of the tokens that sampling has kept"
        if self.rollout_func is not None:
            return "rollout_func brings log-probs of its own"
        if not self._policy_trains:
            return None
        if args.neftune_noise_alpha:
            return f"neftune_noise_alpha={args.neftune_noise_alpha:g} adds noise to the trainer's embeddings"
        facts = self._reuse_facts
        if layers := (*facts.dropout, *facts.training_mode_layers):
            return f"{layers[0]} computes something else in training mode, where the trainer takes its log-probs"
        return "a forward in training mode draws random numbers" if facts.draws_random_numbers else None

    def _tell_of_gap(self, reason: str) -> None:
        if not self._told_of_gap:
            self._told_of_gap = True
            logger.info(
                "The gap between vLLM's log-probs and the trainer's is not watched: %s. What still finds weights that "
                "are not the policy's is verify_weight_sync.",
                reason,
            )


CheckedTrainer._own_class = CheckedTrainer

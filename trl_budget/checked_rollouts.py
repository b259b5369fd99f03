"""`CheckedTrainer`: the part of the trainer that ends a run whose rollout was wrong, on all ranks at once.

Overrides that delegate, over TRL 1.16. One small exchange between the ranks per rollout; no number changes.
"""

from __future__ import annotations

from typing import Any

from trl_budget.errors import StalePolicyError
from trl_budget.logprob_gap import LogProbGapGate
from trl_budget.rank_checks import RankChecks
from trl_budget.scoring import sampling_gap
from trl_budget.token_budget import TokenBudgetTrainer, loss_mask

GAP_METRIC = "sampling/sampling_logp_difference/mean"


class CheckedTrainer(TokenBudgetTrainer):
    """`GRPOTrainer` whose ranks tell each other, once a rollout, what their checks have found."""

    _checks = RankChecks()
    _gap_gate: LogProbGapGate
    _meets_with_loss = False  # the ranks have still to meet after the newest rollout

    def _begin_checks(self, checks: RankChecks) -> None:
        self._checks = checks
        self._gap_gate = LogProbGapGate()

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
        if gap is None or not self._watches_gap or self._shifts_logprobs:
            return
        worst = max(range(len(gaps)), key=gaps.__getitem__)
        try:
            self._gap_gate.check(self.state.global_step, gaps[worst])
        except StalePolicyError as error:
            self._checks.raise_for(worst, "check the rollout", error)

    @property
    def _shifts_logprobs(self) -> bool:
        """Whether vLLM's log-probs may be far from the policy's: they are of the tokens that sampling has kept."""
        args = self.args
        is_truncated = self.top_p != 1.0 or bool(self.top_k) or bool(self.min_p) or self.repetition_penalty != 1.0
        is_the_users = bool(args.generation_kwargs) or args.vllm_structured_outputs_regex is not None
        return is_truncated or is_the_users or self.rollout_func is not None


CheckedTrainer._own_class = CheckedTrainer

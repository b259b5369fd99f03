"""Ends a run in which vLLM samples with other weights than the trainer's.

Looks at log-probs alone, so it also holds where the comparison of the weights is off or compares the wrong thing.
Reads one number per generation batch; changes nothing.
"""

from __future__ import annotations

import bisect
import math
import statistics

from trl_budget.errors import SettingsError, StalePolicyError


class LogProbGapGate:
    """Fails when the gap between vLLM's log-probs and the trainer's jumps.

    The rule: a batch fails when its gap is more than `limit` above the usual gap, the median of all batches so far; of
    which at most `limit` counts, and which is 0 before the first batch. Why:

    - Measured, bf16: right weights give 0.005 to 0.05, the weights of one update earlier 0.87 to 1.44. A fixed limit
      of 0.5 parts the two.
    - A quantized engine, an fp8 KV cache or a router's noise may keep the gap at 0.1 to 0.3 for a whole run. The usual
      gap is therefore on top of the limit: such a run fails at 0.8, which a stale policy still exceeds, and a slow
      rise to 0.5 does not end it.
    - Not a multiple of the usual gap: a policy that becomes peaked brings the gap down to 0.001, and ten times that is
      still nothing. A gap far below the limit never fails, whatever came before.
    - An engine whose gap is above the limit by itself (sampling with top_p, whose log-probs vLLM renormalizes) fails
      at the first batch, when nothing is lost yet, and not after a night.
    - The median, and of all batches: one odd batch does not move it, and a gap that creeps up because no sync ever
      happens runs ahead of it. Twice the limit fails in any case.

    What it misses: a stale policy after updates so small that the log-probs hardly move, which `verify_weight_sync`
    finds. One stale rank of many is found if the gap is that of the worst rank: a mean over ranks divides it.

    Args:
        limit: mean absolute difference in nats per token, above 0.
        has_adapters: of the policy, whose weights vLLM never shares, for the error.

    Raises:
        SettingsError: `limit` is not a positive number.
    """

    def __init__(self, limit: float = 0.5, *, has_adapters: bool = False) -> None:
        if not 0 < limit < math.inf:
            raise SettingsError(
                f"The limit of the gap between vLLM's log-probs and the trainer's is {limit}. It is a mean absolute "
                "difference in nats per token, so every batch would pass, or none. Use a number above 0; 0.5 fits "
                "engines in bf16."
            )
        self.limit = limit
        self._has_adapters = has_adapters
        self._gaps: list[float] = []

    @property
    def usual_gap(self) -> float | None:
        """Median of the gaps that passed; None before the first."""
        return statistics.median(self._gaps) if self._gaps else None

    @property
    def threshold(self) -> float:
        """The largest gap that passes now."""
        return self.limit + min(self.usual_gap or 0.0, self.limit)

    def check(self, step: int, gap: float) -> None:
        """Takes the gap of one generation batch.

        Args:
            step: optimizer steps so far, for the error.
            gap: mean absolute difference over the completion tokens of the batch, in nats, of the rank where it is
                largest. NaN and 0.0 stand for a
                batch without tokens, as TRL reports it: they pass and leave the usual gap as it is.

        Raises:
            StalePolicyError: the gap is above `threshold`.
        """
        if math.isnan(gap) or gap == 0.0:
            return
        if gap <= self.threshold:
            bisect.insort(self._gaps, gap)
            return
        before = "no batch came before"
        if self._gaps:
            before = f"{self.usual_gap:.3f} was usual in the {len(self._gaps)} batches before"
        raise StalePolicyError(
            f"At step {step} the log-probs of vLLM and of the trainer differ by {gap:.3f} per token on average; "
            f"{before}, and up to {self.threshold:.3f} passes. Different kernels move log-probs by hundredths, a "
            "quantized engine by tenths, so vLLM sampled these completions with other weights than the trainer's: the "
            "gradient would be that of another policy. Set verify_weight_sync='always' to learn which tensor differs "
            f"{self._remedy}; if the weights prove equal, this engine needs a limit above {self.limit:g}."
        )

    @property
    def _remedy(self) -> str:
        if self._has_adapters:  # they are copied at every sync already
            return "and leave what adapts it out of peft_config, or set use_vllm=False"
        return "and share_vllm_weights='off' to copy the weights at every sync"

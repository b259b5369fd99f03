"""Decides whether the update's own forward can stand in for the separate old-log-prob pass.

Stock TRL scores every generation batch once more with the weights that the update is about to use. Where nothing can
make the two forwards differ, the second one's result is the first one's. Plain facts in, a value and its reasons out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trl_budget.errors import SettingsError
from trl_budget.placement import ResolvedSetting

REUSE_OLD_LOGPROBS = ("auto", "off", "require")


@dataclass(frozen=True)
class ReuseFacts:
    """What the decision depends on.

    Attributes:
        corrects_sampling: vLLM importance sampling correction is on, so stock always runs the separate pass.
        gradient_accumulation_steps: micro-batches of an optimizer step.
        steps_per_generation: micro-batches of a generation batch.
        num_iterations: how often a generation batch is used.
        dropout: names of layers that drop or jitter at random in training mode.
        neftune_noise_alpha: the training arguments' value.
        draws_random_numbers: whether a trial forward in training mode moved the random state.
        training_mode_layers: names of layers that compute something else in training mode (batch norm).
        is_quantized: whether the policy's weights are quantized.
        merged_adapters: whether adapters are merged into the base weights.
        torch_compile: whether the two forwards are compiled apart.
        overrides: methods of a subclass that may read what the separate pass leaves behind.
        parallelism: FSDP, DeepSpeed or the like, or None.
    """

    corrects_sampling: bool
    gradient_accumulation_steps: int
    steps_per_generation: int
    num_iterations: int
    dropout: tuple[str, ...] = ()
    neftune_noise_alpha: float | None = None
    draws_random_numbers: bool = False
    training_mode_layers: tuple[str, ...] = ()
    is_quantized: bool = False
    merged_adapters: bool = False
    torch_compile: bool = False
    overrides: tuple[str, ...] = ()
    parallelism: str | None = None


@dataclass(frozen=True)
class _Precondition:
    fails: Callable[[ReuseFacts], bool]
    reason: Callable[[ReuseFacts], str]
    holds_in_evaluation: bool = False


_PRECONDITIONS = (
    _Precondition(
        lambda f: f.num_iterations > 1,
        lambda f: f"num_iterations={f.num_iterations} uses a rollout again after an optimizer step",
        holds_in_evaluation=True,
    ),
    _Precondition(
        lambda f: f.gradient_accumulation_steps % f.steps_per_generation != 0,
        lambda f: (
            f"gradient_accumulation_steps={f.gradient_accumulation_steps} is no multiple of "
            f"steps_per_generation={f.steps_per_generation}, so weights change between rollout and update"
        ),
        holds_in_evaluation=True,
    ),
    _Precondition(
        lambda f: bool(f.dropout),
        lambda f: f"{f.dropout[0]} and {len(f.dropout) - 1} other layers are random in training mode",
        holds_in_evaluation=True,
    ),
    _Precondition(
        lambda f: f.neftune_noise_alpha is not None,
        lambda f: f"neftune_noise_alpha={f.neftune_noise_alpha} adds noise in training mode",
        holds_in_evaluation=True,
    ),
    _Precondition(
        lambda f: f.draws_random_numbers,
        lambda f: "a forward in training mode draws random numbers",
        holds_in_evaluation=True,
    ),
    _Precondition(
        lambda f: bool(f.training_mode_layers),
        lambda f: f"{f.training_mode_layers[0]} computes something else in training mode",
        holds_in_evaluation=True,
    ),
    _Precondition(
        lambda f: f.is_quantized, lambda f: "quantized layers run other kernels where no gradient is needed"
    ),
    _Precondition(lambda f: f.merged_adapters, lambda f: "adapters are merged into the base weights"),
    _Precondition(
        lambda f: f.torch_compile, lambda f: "torch_compile=True compiles forwards with and without gradient apart"
    ),
    _Precondition(
        lambda f: f.parallelism is not None, lambda f: f"the run was launched with {f.parallelism}, which is untested"
    ),
    _Precondition(
        lambda f: bool(f.overrides),
        lambda f: f"{', '.join(f.overrides)} is overridden and may read the separate pass's result",
    ),
)


def failed_preconditions(facts: ReuseFacts, *, is_evaluation: bool = False) -> list[str]:
    """What keeps the separate pass from being skipped, one line each; empty if nothing does."""
    relevant = [p for p in _PRECONDITIONS if not (is_evaluation and p.holds_in_evaluation)]
    return [precondition.reason(facts) for precondition in relevant if precondition.fails(facts)]


def check_reuse(requested: str) -> None:
    """Refuses anything but the three values.

    Raises:
        SettingsError: names the value and the three.
    """
    if requested not in REUSE_OLD_LOGPROBS:
        raise SettingsError(
            f"reuse_old_logprobs={requested!r} is not a value. The old log-probs are reused where that is exact, "
            f"never, or required to be. Set reuse_old_logprobs to one of {', '.join(REUSE_OLD_LOGPROBS)}."
        )


def resolve_reuse(requested: str, facts: ReuseFacts) -> ResolvedSetting:
    """Turns the `reuse_old_logprobs` field into "on" or "off".

    Raises:
        SettingsError: reuse was required and a precondition fails.
    """
    check_reuse(requested)
    name = "reuse_old_logprobs"
    failed = failed_preconditions(facts)
    if requested == "off":
        return ResolvedSetting(name, "off", "set by you: stock TRL's separate pass")
    if failed and requested == "require":
        raise SettingsError(
            f"reuse_old_logprobs='require' was asked for, but {'; '.join(failed)}. The separate pass would then give "
            "other numbers than the update's forward. Change these settings, or set reuse_old_logprobs='auto'."
        )
    if failed:
        return ResolvedSetting(name, "off", "; ".join(failed))
    if not facts.corrects_sampling:
        return ResolvedSetting(name, "on", "strictly on-policy: stock TRL runs no separate pass either")
    return ResolvedSetting(name, "on", "strictly on-policy: ratios come from the update's own forward")

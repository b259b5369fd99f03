"""Decides how a colocated vLLM shares the card with the trainer: plain facts in, values and their reasons out.

Parking and sharing move bytes only, so `auto` turns them on wherever they can run. Where vLLM's weights turn out to
lie otherwise than the policy's (`weight_views.py`), sharing falls back to a copy when the engine has started.
"""

from __future__ import annotations

from dataclasses import dataclass

from trl_budget.errors import SettingsError
from trl_budget.placement import ResolvedSetting

PARK_POLICY = ("auto", "on", "off")
SHARE_WEIGHTS = ("auto", "on", "off")
VERIFY_SYNC = ("off", "first", "always")
SHARED_DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True)
class RolloutFacts:
    """What the decision depends on.

    Attributes:
        is_colocated: whether vLLM runs in this process.
        can_sleep: whether an engine on this device can give its memory back.
        tensor_parallel_size: of vLLM.
        parallelism: what shards the policy's weights, if anything does.
        is_adapter: whether only adapters are trained.
        compute_dtype: of the policy's weights, "bfloat16".
        enables_sleep_mode: TRL's `vllm_enable_sleep_mode`.
        has_sleep_backends: whether this vLLM lets a backend of ours put the engine to sleep.
        quantization: of a policy that vLLM is to follow, "bitsandbytes, 4 bits"; None if it is not quantized.
    """

    is_colocated: bool
    can_sleep: bool
    tensor_parallel_size: int = 1
    parallelism: str | None = None
    is_adapter: bool = False
    compute_dtype: str = "bfloat16"
    enables_sleep_mode: bool = False
    has_sleep_backends: bool = True
    quantization: str | None = None


@dataclass(frozen=True)
class RolloutPlan:
    """How the engine and the trainer share the card.

    Attributes:
        park: the row of `park_policy_during_rollout`.
        share: the row of `share_vllm_weights`.
        sleeps: whether the engine gives its memory back after each rollout.
    """

    park: ResolvedSetting
    share: ResolvedSetting
    sleeps: bool

    @property
    def parks(self) -> bool:
        """Whether policy, reference and reward models leave the card."""
        return self.park.value == "on"

    @property
    def shares(self) -> bool:
        """Whether the policy is to be views of vLLM's weights."""
        return self.share.value == "on"


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuses a value that is none of the choices.

    Raises:
        SettingsError: names field, value and choices.
    """
    if value not in choices:
        raise SettingsError(
            f"{name} is {value!r}. It decides how vLLM and the trainer share the card, and no such way exists. "
            f"Set {name} to one of {', '.join(choices)}."
        )


def resolve_rollout(park: str, share: str, facts: RolloutFacts) -> RolloutPlan:
    """Resolves `park_policy_during_rollout` and `share_vllm_weights`.

    Raises:
        SettingsError: "on" where it cannot be, or a quantized policy.
    """
    if facts.quantization is not None:
        raise SettingsError(
            f"use_vllm=True, but the policy's base is quantized ({facts.quantization}). Each weight sync, with a "
            "server too, would send vLLM the packed storage instead of weights, which it cannot load. Load the base "
            "without quantization (bf16) and keep peft_config, or set use_vllm=False."
        )
    parked = _resolve("park_policy_during_rollout", park, _why_not_park(facts), "policy and reference leave the card")
    sleeps = parked.value == "on" or (facts.is_colocated and facts.enables_sleep_mode)
    why_not = _why_not_share(facts, parked)
    shared = _resolve("share_vllm_weights", share, why_not, "one copy of the weights, no weight sync")
    return RolloutPlan(parked, shared, sleeps)


def copied_instead(share: str, reason: str) -> ResolvedSetting:
    """The row after vLLM's tensors have been looked at and do not fit.

    Args:
        share: what the user asked for.
        reason: what does not fit.

    Raises:
        SettingsError: sharing was required.
    """
    return _resolve("share_vllm_weights", share, reason, "")


def _resolve(name: str, wanted: str, why_not: str | None, reason: str) -> ResolvedSetting:
    if wanted == "off":
        return ResolvedSetting(name, "off", "set by you")
    if why_not is None:
        return ResolvedSetting(name, "on", reason)
    if wanted == "on":
        raise SettingsError(
            f"{name}='on', but {why_not}. The engine would run without it, on more memory than planned. "
            f"Set {name}='auto', which then leaves it off."
        )
    return ResolvedSetting(name, "off", why_not)


def _why_not_park(facts: RolloutFacts) -> str | None:
    if not facts.is_colocated:
        return "no vLLM in this process"
    if not facts.can_sleep:
        return "vLLM sleeps on CUDA only"
    if facts.tensor_parallel_size > 1:
        return f"vllm_tensor_parallel_size={facts.tensor_parallel_size} spans ranks, whose engines sleep as in TRL"
    if facts.parallelism is not None:
        return f"{facts.parallelism} holds the weights itself"
    return None


def _why_not_share(facts: RolloutFacts, parked: ResolvedSetting) -> str | None:
    if parked.value == "off":
        return f"the engine does not hand the card over: {parked.reason}"
    if facts.is_adapter:
        return "adapters are merged into vLLM's own copy"
    if facts.compute_dtype not in SHARED_DTYPES:
        return f"the policy computes on {facts.compute_dtype} weights, which would slow generation down"
    if not facts.has_sleep_backends:
        return "this vLLM always drops its weights when it sleeps"
    return None

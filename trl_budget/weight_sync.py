"""How vLLM comes to have the policy's weights, and whether it has: shared once, or copied and compared.

Shared weights are loaded through vLLM's own loader first, from the parked policy. What is compared is compared bit by
bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable
from contextlib import closing

from peft import PeftModel
from torch import Tensor, nn

from trl_budget import upstream_vllm
from trl_budget.errors import WeightSyncError
from trl_budget.parking import ParkedWeights
from trl_budget.shared_weights import first_difference, first_unshared, share
from trl_budget.weight_views import WeightView, plan_views

logger = logging.getLogger(__name__)


class WeightSync:
    """The policy's weights and vLLM's.

    Args:
        policy: the trainer's model.
        verify: when all weights and buffers are compared: "off", "first" or "always". What is shared is the same
            memory, which takes no time to compare.
    """

    def __init__(self, policy: nn.Module, verify: str) -> None:
        self._policy = policy
        self._verify = verify
        self._num_checks = 0
        self._num_verified = 0
        self._shared: list[WeightView] | None = None

    @property
    def is_shared(self) -> bool:
        """Whether the policy's parameters are views of vLLM's weights."""
        return self._shared is not None

    def share(self, engine_model: nn.Module, parked: ParkedWeights) -> str | None:
        """Makes the policy's parameters views of vLLM's weights, where they lie alike.

        Args:
            engine_model: vLLM's model, its weights mapped.
            parked: the policy, parked; afterwards there is nothing left to park.

        Returns:
            None, or why weights have to be copied, in one sentence.
        """
        views = plan_views(self._policy, engine_model, upstream_vllm.packed_modules(engine_model))
        if isinstance(views, str):
            return views
        for name, weight in parked.host_tensors():
            upstream_vllm.load_weight(engine_model, name, weight)
        difference = first_difference(self._with_buffers(parked.host_tensors()), engine_model, views)
        if difference is not None:  # some models keep names and shapes and reorder rows when they are loaded
            return f"vLLM lays weights out in another order: {difference}"
        share(self._policy, engine_model, views, parked.host_tensors())
        parked.abandon()
        self._shared = views
        return None

    def check(self, engine_model: nn.Module, values: Callable[[], Iterable[tuple[str, Tensor]]], step: int) -> None:
        """Called after each sync, with vLLM's weights mapped.

        Args:
            engine_model: vLLM's model.
            values: makes names and values of the policy's weights, with its adapters merged.
            step: named in the error.

        Raises:
            WeightSyncError: weights differ, or are no longer shared; names the first.
        """
        if self._shared is not None:
            self._check_shared(engine_model, self._shared)
        if self._verify == "off" or (self._verify == "first" and self._num_checks > 0):
            return
        self._num_checks += 1
        views = plan_views(self._policy, engine_model, upstream_vllm.packed_modules(engine_model))
        if isinstance(views, str):
            logger.info("vLLM's weights are not compared with the policy's: %s", views)
            return
        with closing(self._with_buffers(values())) as named:  # a layer may be merged when the first difference ends it
            difference = first_difference(named, engine_model, views)
        self._num_verified += 1
        if difference is not None:
            raise WeightSyncError(
                f"After the weight sync of step {step}, {difference}. vLLM would generate with other weights than the "
                f"policy's. {self._advice}"
            )

    @property
    def _advice(self) -> str:
        if isinstance(self._policy, PeftModel):  # whose weights are copied already, from wherever the policy is
            return "Leave what adapts this weight out of peft_config, or set use_vllm=False, and report both."
        return "Set share_vllm_weights='off' and park_policy_during_rollout='off', and report the model."

    def _with_buffers(self, values: Iterable[tuple[str, Tensor]]) -> Generator[tuple[str, Tensor]]:
        yield from values
        yield from self._policy.named_buffers()

    def _check_shared(self, engine_model: nn.Module, views: list[WeightView]) -> None:
        name = first_unshared(self._policy, engine_model, views)
        if name is not None:
            raise WeightSyncError(
                f"{name} is no longer a view of vLLM's weights: something has given it other memory since the engine "
                "started (`model.to(...)`, `parameter.data = ...`). vLLM would go on with the old weights. Leave the "
                "policy where it is and write to it in place, or set share_vllm_weights='off'."
            )

"""`ColocatedTrainer`: the part of the trainer that shares the card with vLLM.

Overrides that delegate, over TRL 1.16. The engine is started here instead of in TRL's constructor, with the trainer's
models off the card; it holds the card while it generates and gives it back after the last generation of a step.
Reference and reward models are on the card while they score. Bytes move and no number changes, but for a frozen base
under adapters, which TRL rounds at every sync and which keeps its bits here.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Generator
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from trl import GRPOConfig
from trl.extras.profiling import profiling_context

from trl_budget import upstream_vllm
from trl_budget.adapter_weights import check_adapters, check_stock_sync, check_ties, merged_weights
from trl_budget.card import Card
from trl_budget.checked_rollouts import CheckedTrainer
from trl_budget.config import budget_setting
from trl_budget.device_memory import (
    CardMemory,
    DeviceMemoryBudget,
    engine_utilization,
    parse_bytes,
    read_card_memory,
)
from trl_budget.engine_preflight import EngineNeed, check_allocator_settings, check_engine_fits
from trl_budget.errors import DeviceMemoryError, SettingsError, WeightSyncError
from trl_budget.page_locking import locks_pages
from trl_budget.parking import ParkedWeights
from trl_budget.placement import ResolvedSetting
from trl_budget.rank_checks import RankChecks
from trl_budget.ranks import current_ranks
from trl_budget.residency import Phase
from trl_budget.rollout import ColocatedGeneration, EngineSettings
from trl_budget.rollout_policy import RolloutFacts, RolloutPlan, copied_instead, resolve_rollout
from trl_budget.sequence_length import SequenceRoom, longest_completion, notice_of_cut_completions
from trl_budget.shared_weights import cpu_state_dict, named_values
from trl_budget.sync_reference import keep_reference_present
from trl_budget.weight_sync import WeightSync

logger = logging.getLogger(__name__)

POLICY = "policy"
POLICY_PHASES = (Phase.SCORE, Phase.UPDATE, Phase.STEP)


class ColocatedTrainer(CheckedTrainer):
    """`GRPOTrainer` whose vLLM, in the same process, takes turns with it on the card."""

    _engine_class: Callable[..., Any] | None = None  # `vllm.LLM`
    _card = Card()
    _engine: ColocatedGeneration | None = None
    _parked_policy: ParkedWeights | None = None
    _weight_sync: WeightSync

    # Construction

    def _plan_rollouts(
        self, args: GRPOConfig, parallelism: str | None, *, is_adapter: bool, quantization: str | None
    ) -> None:
        """Resolves who holds the card when, as far as it can be told before the policy is loaded.

        Args:
            args: the trainer's.
            parallelism: what shards the policy's weights, if anything does.
            is_adapter: whether only adapters are trained.
            quantization: of the policy, where arguments or a loaded model tell.

        Raises:
            SettingsError: a setting that cannot work.
        """
        is_colocated = bool(args.use_vllm) and args.vllm_mode == "colocate"
        self._starts_engine = is_colocated and args.vllm_tensor_parallel_size == 1 and parallelism is None
        self._rollout_facts = RolloutFacts(
            is_colocated=is_colocated,
            can_sleep=self._can_engine_sleep(args),
            tensor_parallel_size=args.vllm_tensor_parallel_size,
            parallelism=parallelism,
            is_adapter=is_adapter,
            enables_sleep_mode=args.vllm_enable_sleep_mode,
            has_sleep_backends=self._starts_engine and upstream_vllm.has_sleep_backends(),
            quantization=quantization if args.use_vllm else None,
        )
        self._rollout_plan = self._resolve_rollouts(args)
        self._parked: dict[nn.Module, ParkedWeights] = {}
        self._memory_budget: DeviceMemoryBudget | None = None
        if (budget := budget_setting(args, "device_memory_budget")) is not None and args.device.type == "cuda":
            self._memory_budget = DeviceMemoryBudget(
                parse_bytes(budget), args.device, unmapped_bytes=upstream_vllm.sleeping_bytes
            )
        if self._starts_engine or self._memory_budget is not None:
            self._begin_checks(RankChecks(current_ranks()), has_adapters=is_adapter)
        if self._rollout_plan.sleeps:
            check_allocator_settings(os.environ)
        if self._starts_engine:
            if args.vllm_max_model_length is not None:
                longest = longest_completion(args.max_completion_length, args.generation_kwargs)
                if notice := notice_of_cut_completions(1, SequenceRoom(args.vllm_max_model_length), longest):
                    logger.warning(notice)
            upstream_vllm.check_generation_seam()
            upstream_vllm.check_sampling_mode(args)

    def _can_engine_sleep(self, args: GRPOConfig) -> bool:
        return args.device.type == "cuda"

    def _resolve_rollouts(self, args: GRPOConfig) -> RolloutPlan:
        return resolve_rollout(
            budget_setting(args, "park_policy_during_rollout"),
            budget_setting(args, "share_vllm_weights"),
            self._rollout_facts,
        )

    def _start_engine(self) -> None:
        """Starts vLLM with the trainer's models off the card. The policy and its optimizer exist.

        Raises:
            SettingsError: it cannot fit, or a lever that was required cannot run.
        """
        policy = self.model
        assert policy is not None
        dtypes = {str(p.dtype).removeprefix("torch.") for p in policy.parameters() if p.is_floating_point()}
        self._rollout_facts = dataclasses.replace(
            self._rollout_facts,
            compute_dtype=", ".join(sorted(dtypes)),
            quantization=upstream_vllm.quantization_of(policy) if self.args.use_vllm else None,
        )
        self._rollout_plan = self._resolve_rollouts(self.args)
        if self.args.use_vllm:  # a server, too, holds one tensor for a tie
            check_ties(policy)
            if not self._starts_engine:
                check_stock_sync(policy)
        self._card = self._build_card(policy)
        self._weight_sync = WeightSync(policy, budget_setting(self.args, "verify_weight_sync"))
        if self.ref_model in self._parked:
            keep_reference_present(self.callback_handler, self._card, self._parked[self.ref_model].name)
        if not self._starts_engine:
            self._card.enter(Phase.SCORE)
            return
        if self._rollout_facts.is_adapter:
            check_adapters(policy)
        settings = EngineSettings(
            sleeps=self._rollout_plan.sleeps,
            dtype=self._rollout_facts.compute_dtype if self._rollout_plan.shares else None,
            start=self._begin_engine,
            adopt=self._adopt_engine,
            weights=self._policy_weights if self._rollout_plan.parks or self._rollout_facts.is_adapter else None,
            after_sync=self._verify_sync,
            build=self._engine_class,
        )
        arguments = upstream_vllm.generation_arguments(self)
        arguments["gpu_memory_utilization"] = self._engine_utilization()
        self._engine = self.vllm_generation = ColocatedGeneration(settings, self._card, **arguments)
        self._last_loaded_step = -1

    def _policy_weights(self) -> Generator[tuple[str, Tensor]]:
        """Names and values of the weights that vLLM is to hold, from wherever the policy is."""
        policy, parked = self.model, self._parked_policy
        assert policy is not None
        if self._rollout_facts.is_adapter:
            yield from merged_weights(policy, parked)
        else:
            yield from named_values(policy) if parked is None or not parked.is_parked else parked.host_tensors()

    def _build_card(self, policy: nn.Module) -> Card:
        if not self._rollout_plan.parks:
            return Card(budget=self._memory_budget, report=self._checks.report)
        has_ddp = self.args.world_size > 1 and not self._trains_without_ddp
        self._parked_policy = ParkedWeights(
            policy,
            POLICY,
            keeps=lambda tensor: not isinstance(tensor, nn.Parameter) or (has_ddp and tensor.requires_grad),
            device_type=self.args.device.type,
            pin=locks_pages(self.args),
        )
        scoring: dict[str, Any] = {"reference": self.ref_model}
        scoring |= {f"reward model {index}": reward_func for index, reward_func in enumerate(self.reward_funcs)}
        for name, model in scoring.items():
            if isinstance(model, nn.Module):
                self._parked[model] = ParkedWeights(
                    model, name, device_type=self.args.device.type, pin=locks_pages(self.args)
                )
        resident = {phase: frozenset({POLICY} if phase in POLICY_PHASES else ()) for phase in Phase}
        return Card([self._parked_policy, *self._parked.values()], resident, self._memory_budget, self._checks.report)

    @property
    def _trains_without_ddp(self) -> bool:
        return False

    def _engine_utilization(self) -> float:
        """`vllm_gpu_memory_utilization`, of the budget where there is one, as a share of the card."""
        wanted = self.args.vllm_gpu_memory_utilization
        if self._memory_budget is None:
            return wanted
        return engine_utilization(self._memory_budget.budget, self._read_card().total, wanted)

    def _read_card(self) -> CardMemory:
        return read_card_memory(self.args.device, upstream_vllm.sleeping_bytes())

    def _begin_engine(self) -> None:
        """The ranks start their engines together, or none does."""
        try:
            self._check_engine_fits()
        except (DeviceMemoryError, SettingsError) as error:
            self._checks.report(error)
        self._checks.meet("start vLLM")

    def _check_engine_fits(self) -> None:
        if self.args.device.type != "cuda":
            return
        assert self.model is not None
        owners = {owner.name: owner.device_bytes for owner in self._parked.values()}
        if self._parked_policy is None:
            owners[POLICY] = sum(p.nbytes for p in self.model.parameters())
        memory = self._read_card()
        if self._memory_budget is not None:
            memory = memory.within(self._memory_budget.budget)
        need = EngineNeed(
            self.args.vllm_gpu_memory_utilization,
            sum(min(2, p.element_size()) * p.numel() for p in self.model.parameters()),
        )
        check_engine_fits(memory, need.utilization, owners, least_bytes=need.least_bytes)

    def _adopt_engine(self, llm: Any) -> bool:
        """Returns whether vLLM's weights are the policy's own from now on."""
        for model in (self.model, self.ref_model, *self.reward_funcs):
            if isinstance(model, nn.Module):
                upstream_vllm.detach_from_compilation(model)
        if not self._rollout_plan.shares:
            return False
        assert self._parked_policy is not None
        reason = self._weight_sync.share(upstream_vllm.engine_model(llm), self._parked_policy)
        if reason is not None:
            row = copied_instead(budget_setting(self.args, "share_vllm_weights"), reason)
            self._rollout_plan = dataclasses.replace(self._rollout_plan, share=row)
            return False
        upstream_vllm.sleep_backend(llm).kept_tags = frozenset({"weights"})
        self._card.forget(POLICY)
        self._parked_policy = None
        return True

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """As transformers 5.24; weights shared with vLLM are where they have to be, and moving would unshare them."""
        if model is not self.model or not self._shares_weights:
            super()._move_model_to_device(model, device)

    @property
    def _shares_weights(self) -> bool:
        return self._engine is not None and self._weight_sync.is_shared

    def _rollout_settings(self) -> list[ResolvedSetting]:
        if not self._rollout_facts.is_colocated:
            return []
        return [self._rollout_plan.park, self._rollout_plan.share]

    # Rollouts

    def _generate(self, prompts: list[Any]) -> Any:
        """As TRL 1.16; the engine gives the card back after the last generation, also after an error."""
        if self._engine is None:
            return super()._generate(prompts)
        with self._engine.session():
            if self.rollout_func is not None:
                self._open_for_rollout_func(self._engine)
            return super()._generate(prompts)

    def _open_for_rollout_func(self, engine: ColocatedGeneration) -> None:
        """A rollout function may use the engine without asking: it gets it awake, with the present weights."""
        if self.state.global_step != self._last_loaded_step:
            with profiling_context(self, "sync_weights"):
                engine.sync_weights()
            self._last_loaded_step = self.state.global_step
        engine.open()

    def _verify_sync(self, llm: Any) -> None:
        try:
            self._weight_sync.check(upstream_vllm.engine_model(llm), self._policy_weights, self.state.global_step)
        except WeightSyncError as error:
            self._checks.report(error)

    @property
    def _watches_gap(self) -> bool:
        return self._engine is not None

    # Scoring

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """As TRL 1.16; the reference model is on the card for the length of the call."""
        parked = self._parked.get(model)
        with self._card.present(parked.name) if parked is not None else nullcontext():
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        """As TRL 1.16; reward models are on the card for the length of the call."""
        with ExitStack() as stack:
            for reward_func in self.reward_funcs:
                parked = self._parked.get(reward_func) if isinstance(reward_func, nn.Module) else None
                if parked is not None:
                    stack.enter_context(self._card.present(parked.name))
            return super()._calculate_rewards(*args, **kwargs)

    # Update

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As TRL 1.16; the update has begun."""
        if self._policy_trains:
            self._card.enter(Phase.UPDATE)
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _begin_step(self) -> None:
        """The optimizer step has begun; in the first, prints who held the card in each phase."""
        self._card.enter(Phase.STEP)
        if self._memory_budget is not None:
            self._checks.meet("check the device budget")
        if self._rollout_plan.sleeps and self.state.global_step == 0:
            title = "Memory of the card as each phase of the first step begins:"
            self.accelerator.print(f"{title}\n{self._card.table()}")

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """As transformers 5.24; the optimizer step has begun."""
        self._begin_step()
        return super()._clip_grad_norm(model)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """As transformers 5.24; views of vLLM's weights are copied to the host one by one, not cloned on the card."""
        if state_dict is None and self._shares_weights:
            assert self.model is not None
            state_dict = cpu_state_dict(self.model)
        super()._save(output_dir, state_dict)


ColocatedTrainer._own_class = ColocatedTrainer

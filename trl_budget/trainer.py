"""`BudgetGRPOTrainer`: TRL's `GRPOTrainer` with the optimizer on the host.

Every override delegates; there is no arithmetic here. Tested against TRL 1.16 and transformers 5.17 to 5.24. In
fp32 on the CPU every logged number and every weight equals stock TRL's; on a GPU the reference is bf16 compute over
fp32 masters.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.utils.serialization.config as serialization_config
from torch import nn
from trl import GRPOConfig, GRPOTrainer

from trl_budget import upstream, upstream_vllm
from trl_budget.checkpoints import load_optimizer_and_scheduler, without_optimizer
from trl_budget.colocated import ColocatedTrainer
from trl_budget.config import BudgetGRPOConfig, budget_setting
from trl_budget.errors import SettingsError
from trl_budget.fp32_reference import Fp32Reference, give_back_fp32_values
from trl_budget.heard_zero_grad import hear_zero_grad
from trl_budget.host_adamw import HostAdamW
from trl_budget.host_threads import num_host_cores
from trl_budget.master_weights import capture_master_weights, fp32_checkpoint_weights
from trl_budget.page_locking import check_given_optimizer, locks_pages, page_locking_rows
from trl_budget.pinned import ParameterSlabs, host_slab_bytes
from trl_budget.placement import (
    IMPLEMENTATION_OF_OPTIM,
    NOTHING_TRAINED,
    ResolvedSetting,
    format_table,
    resolve_gradient_placement,
    resolve_optimizer_placement,
    with_departures,
)
from trl_budget.sync_reference import mix_reference_in_fp32
from trl_budget.team import join_team
from trl_budget.version import __version__

logger = logging.getLogger(__name__)


class BudgetGRPOTrainer(ColocatedTrainer):
    """Drop-in for `GRPOTrainer`: the same arguments, the same training, less GPU memory.

    Args:
        args: a `BudgetGRPOConfig`, or a plain `GRPOConfig`, which gets every lever's default.

    All other arguments are `GRPOTrainer`'s. `resolved_settings` holds the table printed at construction.

    Raises:
        SettingsError: a setting that cannot work, before anything is loaded where that is possible.
        HostMemoryError: the machine refused the host memory of the masters and moments.
        UpstreamMovedError: the installed TRL, transformers or Accelerate is not one this library knows.
    """

    _fp32_reference: Fp32Reference | None = None
    _tag_names = [*GRPOTrainer._tag_names, "trl-budget"]

    @functools.wraps(GRPOTrainer.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        upstream.check_seams()
        bound = inspect.signature(GRPOTrainer.__init__).bind(self, *args, **kwargs)
        given = bound.arguments
        model, optimizer = given["model"], given.get("optimizers", (None, None))[0]
        is_adapter = upstream.is_adapter_model(model, given.get("peft_config"))
        quantization_config = given.get("quantization_config")
        upstream.check_model(model, given.get("args"), is_adapter=is_adapter, quantization_config=quantization_config)
        if given.get("args") is None:
            name = model if isinstance(model, str) else upstream.model_id(model.config)
            given["args"] = BudgetGRPOConfig(f"{name.split('/')[-1]}-GRPO")
        training_args: GRPOConfig = given["args"]
        self._facts = upstream.placement_facts(
            type(self),
            training_args,
            model,
            optimizer,
            is_adapter=is_adapter,
            is_on_host=isinstance(optimizer, HostAdamW),
        )
        self._requested_placement = budget_setting(training_args, "optimizer_placement")
        self._placement = resolve_optimizer_placement(self._requested_placement, self._facts)
        self._sharding = budget_setting(training_args, "optimizer_sharding")
        self._given_gradients = optimizer.gradient_placement if isinstance(optimizer, HostAdamW) else None
        if isinstance(optimizer, HostAdamW):
            check_given_optimizer(training_args, optimizer.pin_memory)
        self._requested_gradients = budget_setting(training_args, "gradient_placement")
        self._resolve_gradients()
        self._master_weights: ParameterSlabs | None = None
        self._host_adamw: HostAdamW | None = None
        quantization = upstream_vllm.quantization_asked_for(model, training_args, quantization_config)
        self._plan_rollouts(training_args, self._facts.parallelism, is_adapter=is_adapter, quantization=quantization)
        with _restored_init_kwargs(training_args):
            if isinstance(model, str) and self._is_host_placement:
                # By default TRL loads a model named by a string straight onto the card, in fp32.
                training_args.model_init_kwargs = {**_init_kwargs(training_args), "device_map": None}
            with upstream_vllm.without_engine(training_args, applies=self._starts_engine):
                super().__init__(*bound.args[1:], **bound.kwargs)
            self._build_host_adamw()
        self._page_locking = page_locking_rows(training_args)
        upstream_vllm.restore_generation(self, applies=self._starts_engine)
        self._prepare_reference()
        self._start_engine()
        gradients_on_device = 0 if self._gradient_placement.value == "host" else 1
        self._passes = self._resolve_passes(copies_to_come=gradients_on_device if self._is_host_placement else 3)
        self.resolved_settings = self._all_settings()
        self._print_settings()

    def _resolve_gradients(self) -> None:
        self._gradient_placement = resolve_gradient_placement(
            self._requested_gradients, self._placement, self._facts.device_type, self._given_gradients
        )

    @property
    def _is_host_placement(self) -> bool:
        return self._placement.value == "host"

    @property
    def _trains_without_ddp(self) -> bool:
        return self._host_adamw is not None

    @property
    def _casts_policy(self) -> bool:
        return self._is_host_placement and self._facts.casts_policy

    @property
    def _policy(self) -> nn.Module:
        assert self.model is not None
        return self.model

    # Construction

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """As transformers 5.24, but the policy's fp32 masters stay on the host and its bf16 cast moves."""
        self._capture_masters(model)
        super()._move_model_to_device(model, device)

    def _capture_masters(self, model: nn.Module) -> None:
        """Leaves a bf16 policy behind where the placement asks for it; nothing the second time."""
        if self._host_adamw is not None or self._master_weights is not None:
            return
        loaded = upstream.with_loaded_model(self._facts, model)
        self._placement = resolve_optimizer_placement(self._requested_placement, loaded)
        self._resolve_gradients()
        if self._casts_policy:
            self._master_weights = capture_master_weights(
                model, pin=locks_pages(self.args), team=join_team(self._sharding)
            )
            # The reference is loaded later, with these: a reference of another dtype would make the first KL non-zero.
            vars(self.args)["model_init_kwargs"] = {**_init_kwargs(self.args), "dtype": "bfloat16"}

    def _build_host_adamw(self) -> None:
        if not self._is_host_placement:
            return
        self._host_adamw = self._make_host_adamw()
        self._host_adamw.broadcast_untrained(self._policy)
        hear_zero_grad(self._policy, self._host_adamw.zero_grad)

    def _make_host_adamw(self) -> HostAdamW:
        self._capture_masters(self._policy)  # transformers did not move the model (place_model_on_device=False)
        if isinstance(self.optimizer, HostAdamW):
            self.optimizer.follow_parameters()
            self._check_world_size(self.optimizer)
            return self.optimizer
        # The state is built now, so that a refusal costs nothing; the groups are stock's, made when stock makes them.
        return HostAdamW(
            [{"params": [parameter for parameter in self._policy.parameters() if parameter.requires_grad]}],
            **self._hyperparameters(),
            master_weights=self._master_weights,
            parameter_names={parameter: name for name, parameter in self._policy.named_parameters()},
            pin_memory=budget_setting(self.args, "pin_host_memory"),
            sharding=self._sharding,
            gradient_placement=self._gradient_placement.value,
        )

    def _prepare_reference(self) -> None:
        """Gives a reference that was loaded in bf16 beside fp32 masters the fp32 values that it needs."""
        if self.ref_model is None or self._host_adamw is None:
            return
        if self._casts_policy:
            give_back_fp32_values(self.ref_model, self._policy, self._host_adamw.master_weights)
        if self.args.sync_ref_model and any(p.dtype != torch.float32 for p in self.ref_model.parameters()):
            self._fp32_reference = Fp32Reference(self.ref_model, self._policy, self._master_of)
            mix_reference_in_fp32(self.callback_handler, self._fp32_reference, lambda: self._host_adamw is not None)

    def _master_of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        return None if self._host_adamw is None else self._host_adamw.master_weights(parameter)

    def _check_world_size(self, optimizer: HostAdamW) -> None:
        if optimizer.world_size != self.args.world_size:
            raise SettingsError(
                f"optimizers= holds a HostAdamW that was built for {optimizer.world_size} processes, and this "
                f"job has {self.args.world_size}. Each process would step its own gradients and the weights would "
                "drift apart. Make the training arguments, which join the processes, before the optimizer; or leave "
                "optimizers out."
            )

    def _hyperparameters(self) -> dict[str, Any]:
        return {
            "lr": self.args.learning_rate,
            "betas": (self.args.adam_beta1, self.args.adam_beta2),
            "eps": self.args.adam_epsilon,
            "implementation": IMPLEMENTATION_OF_OPTIM[upstream.optim_name(self.args)],
        }

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """As transformers 5.24: stock's parameter groups, given to the `HostAdamW` in place of torch's AdamW."""
        is_ours = (
            self._host_adamw is not None
            and self.optimizer_cls_and_kwargs is None
            and upstream.optim_name(self.args) in IMPLEMENTATION_OF_OPTIM
        )
        if self.optimizer is not None or not is_ours:
            return super().create_optimizer(model)
        self.optimizer_cls_and_kwargs = (
            _ExistingHostAdamW,
            {"host_adamw": self._host_adamw, **self._hyperparameters()},
        )
        try:
            return super().create_optimizer(model)
        finally:
            self.optimizer_cls_and_kwargs = None

    def _all_settings(self) -> list[ResolvedSetting]:
        num_departures = self.args.gradient_accumulation_steps if self._pass_settings is None else 1
        gradients = with_departures(self._gradient_placement, self._placement, self._facts.device_type, num_departures)
        return [
            self._placement,
            gradients,
            *self._describe(),
            *self._page_locking,
            *self._passes,
            *self._rollout_settings(),
        ]

    def _describe(self) -> list[ResolvedSetting]:
        parameters = [p for p in self._policy.parameters() if p.requires_grad]
        dtypes = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters}))
        where = f"{dtypes} on {self.args.device}"
        if not parameters:
            reason = f"{NOTHING_TRAINED}: every step leaves the model as it is, as in stock TRL"
            hint = "; load the adapter with is_trainable=True to train it" if self._facts.is_adapter else ""
            return [ResolvedSetting("trained weights", "0 trained weights", f"{reason}{hint}")]
        if not self._is_host_placement:
            return [ResolvedSetting("trained weights", where, "as stock TRL")]
        if self._casts_policy:
            reason = "cast from the fp32 masters once per step; the reference is bf16 compute over fp32 masters"
        elif self.args.device.type == "cpu" and dtypes == "float32" and self.args.world_size == 1:
            reason = "stepped in place: every bit as stock TRL"
        else:
            reason = "dtype as loaded; fp32 masters on the host"
        rows = [ResolvedSetting("trained weights", where, reason)]
        if self._host_adamw is not None:
            adamw = self._host_adamw
            host_gib, pinned_gib = (n / 2**30 for n in (adamw.host_bytes, host_slab_bytes(pinned_only=True)))
            implementation = f"HostAdamW, {adamw.implementation}"
            cores = "1 core" if num_host_cores() == 1 else f"{num_host_cores()} cores"
            where = f"torch's own AdamW arithmetic, on {cores} of the CPU"
            rows.append(ResolvedSetting("optimizer", implementation, where))
            if adamw.world_size > 1:
                owned = f"this rank steps {adamw.owned_bytes / 2**30:.2f} GiB of masters and moments"
                rows.append(ResolvedSetting("optimizer_sharding", adamw.sharding, owned))
            if self._fp32_reference is not None:
                gib = self._fp32_reference.nbytes / 2**30
                mixed = "mixed in fp32 on the host with the masters, then cast; computes in its own dtype"
                rows.append(ResolvedSetting("sync_ref_model", f"{gib:.2f} GiB", mixed))
            rows.append(ResolvedSetting("host memory", f"{host_gib:.2f} GiB", f"{pinned_gib:.2f} GiB page-locked"))
        return rows

    def _print_settings(self) -> None:
        table = format_table(self.resolved_settings, f"trl-budget {__version__}")
        self.accelerator.print(table)

    # Training

    def editable_gradients(self) -> AbstractContextManager[None]:
        """For a callback between backward and step: inside, `parameter.grad` is what stock TRL would have there.

        Edits are taken over, see `HostAdamW.editable_gradients`. Nothing happens where the optimizer is stock's.
        """
        return nullcontext() if self._host_adamw is None else self._host_adamw.editable_gradients()

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        """As transformers 5.24; an aborted step's gradients are dropped and foreign writes adopted first."""
        if self._host_adamw is not None:
            if resume_from_checkpoint is None:
                self._host_adamw.check_whole()
            self._prepare_host_adamw()
        if self._host_adamw is not None and self.args.world_size > 1 and self.model_wrapped is self.model:
            # Accelerate never wraps a model it has prepared: DDP's buckets are as large as the gradients.
            self.model_wrapped = self.accelerator.prepare_model(self._policy, evaluation_mode=True)
        return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)

    def _prepare_host_adamw(self) -> None:
        assert self._host_adamw is not None
        if self.optimizer is None:
            self.create_optimizer()
        chosen = upstream.unwrapped_optimizer(self.optimizer)
        if chosen is not self._host_adamw:
            self._give_way_to(type(chosen).__name__)
            return
        self._host_adamw.zero_grad()
        self._host_adamw.adopt_external_writes()
        if self._host_adamw.gradients_leave:
            self._warn_of_callbacks()
        # Left to Accelerate, the wrapper copies the whole state to the device and loads it back. `prepare`, since
        # `prepare_optimizer` does not mark the result as prepared and stock code would wrap it a second time.
        self.optimizer = self.accelerator.prepare(self.optimizer, device_placement=[False])

    def _warn_of_callbacks(self) -> None:
        named = upstream.callbacks_at_gradients(self.callback_handler.callbacks)
        if named:
            logger.warning(
                "%s: `parameter.grad` is None there, since gradients leave for fp32 sums on the host. What reads or "
                "edits it does nothing; model.zero_grad() drops the sums. Do it inside `with "
                "trainer.editable_gradients():` in on_pre_optimizer_step or on_substep_end; after the step gradients "
                "are gone.",
                ", ".join(named),
            )

    def _give_way_to(self, optimizer: str) -> None:
        """Frees the host state for an optimizer chosen after construction, where the weights are still stock's."""
        if self._casts_policy:
            raise SettingsError(
                f"The optimizer chosen for training is a {optimizer}, but the policy was cast to bf16 and its fp32 "
                "masters are on the host. Stepping bf16 weights without them is another training. Keep TRL's own "
                "create_optimizer and optim, or set optimizer_placement='device'."
            )
        reason = f"a {optimizer} was chosen after the trainer was built"
        self._placement = ResolvedSetting(self._placement.name, "device", reason)
        assert self._host_adamw is not None
        self._host_adamw.release_gradients()  # whoever still holds it must not take them from the new optimizer
        self._host_adamw = None
        self._gradient_placement = ResolvedSetting(self._gradient_placement.name, "device", reason)
        self.resolved_settings = self._all_settings()
        logger.warning("optimizer_placement is now 'device': %s", reason)

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """As transformers 5.24: clips to `max_grad_norm` and returns the norm before, on the host."""
        if self._host_adamw is None:
            return super()._clip_grad_norm(model)
        self._begin_step()
        return self._host_adamw.clip_grad_norm_(self.args.max_grad_norm, model.parameters())

    def _get_grad_norm(self, model: nn.Module, grad_norm: torch.Tensor | None = None) -> torch.Tensor:
        """As transformers 5.24: measures the norm where no clipping has."""
        if self._host_adamw is not None and grad_norm is None:
            grad_norm = self._host_adamw.clip_grad_norm_(float("inf"), model.parameters())
        return super()._get_grad_norm(model, grad_norm)

    # Checkpoints

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """As transformers 5.24; the weights read become the masters, also where no optimizer state was saved."""
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._adopt_external_writes()
        self._read_fp32_weights(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        """As transformers 5.24; the best model's weights become the masters."""
        super()._load_best_model()
        self._adopt_external_writes()
        self._read_fp32_weights(self.state.best_model_checkpoint)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """As transformers 5.24; weights of a step that ended midway are not saved."""
        if self._host_adamw is not None:
            self._host_adamw.check_whole()
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """As transformers 5.24; the masters saved are those of the weights saved beside them.

        Weights that a callback has put in for the save, and puts back after it, cost the masters no bit.
        """
        if self._host_adamw is not None:
            self._host_adamw.check_whole()  # on every rank, before they wait for each other
        with nullcontext() if self._host_adamw is None else self._host_adamw.masters_of_present_weights():
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """As TRL 1.16; the host state is mapped from the file and copied into its slabs, not read twice."""
        if self._host_adamw is not None and self.args.world_size > 1 and checkpoint is not None:
            load_optimizer_and_scheduler(self.optimizer, self.lr_scheduler, checkpoint)
            with without_optimizer(checkpoint) as folder:
                super()._load_optimizer_and_scheduler(folder)
            return
        with serialization_config.patch("load.mmap", self._host_adamw is not None):  # type: ignore[attr-defined]
            super()._load_optimizer_and_scheduler(checkpoint)

    def _read_fp32_weights(self, checkpoint: str | None) -> None:
        """Gives the masters the bits that a bf16 policy has rounded away; an fp32 policy is its own master."""
        if self._host_adamw is not None and checkpoint is not None and not self._facts.is_adapter:
            self._host_adamw.set_master_weights(fp32_checkpoint_weights(checkpoint, self._policy))

    def _adopt_external_writes(self) -> None:
        if self._host_adamw is not None:
            self._host_adamw.adopt_external_writes(is_expected=True)


class _ExistingHostAdamW(torch.optim.Optimizer):
    """Stands where stock code instantiates an optimizer class: the groups go to the `HostAdamW` that exists."""

    def __new__(cls, params: Any, *, host_adamw: HostAdamW, **hyperparameters: Any) -> HostAdamW:  # type: ignore[misc]
        """Regroups and returns the existing optimizer; `__init__` does not run, it is of another class."""
        host_adamw.regroup(params, **hyperparameters)
        return host_adamw


def _init_kwargs(args: Any) -> dict[str, Any]:
    return dict(args.model_init_kwargs or {})


@contextmanager
def _restored_init_kwargs(args: GRPOConfig) -> Iterator[None]:
    """Lets `model_init_kwargs` be replaced for the length of the construction."""
    original = args.model_init_kwargs
    try:
        yield
    finally:
        args.model_init_kwargs = original

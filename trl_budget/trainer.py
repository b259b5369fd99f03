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
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.serialization.config as serialization_config
from torch import nn
from trl import GRPOConfig, GRPOTrainer

from trl_budget import upstream
from trl_budget.config import BudgetGRPOConfig, budget_setting
from trl_budget.errors import SettingsError
from trl_budget.host_adamw import HostAdamW
from trl_budget.master_weights import capture_master_weights
from trl_budget.pinned import ParameterSlabs, host_slab_bytes
from trl_budget.placement import (
    IMPLEMENTATION_OF_OPTIM,
    ResolvedSetting,
    format_table,
    resolve_optimizer_placement,
)
from trl_budget.version import __version__

logger = logging.getLogger(__name__)


class BudgetGRPOTrainer(GRPOTrainer):
    """Drop-in for `GRPOTrainer`: the same arguments, the same training, less GPU memory.

    Args:
        args: a `BudgetGRPOConfig`, or a plain `GRPOConfig`, which gets every lever's default.

    All other arguments are `GRPOTrainer`'s. `resolved_settings` holds the table printed at construction.

    Raises:
        SettingsError: a setting that cannot work, before anything is loaded where that is possible.
        HostMemoryError: the machine refused the host memory of the masters and moments.
        UpstreamMovedError: the installed TRL, transformers or Accelerate is not one this library knows.
    """

    _tag_names = [*GRPOTrainer._tag_names, "trl-budget"]

    @functools.wraps(GRPOTrainer.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        upstream.check_seams()
        bound = inspect.signature(GRPOTrainer.__init__).bind(self, *args, **kwargs)
        given = bound.arguments
        model, peft_config = given["model"], given.get("peft_config")
        optimizer, _ = given.get("optimizers", (None, None))
        is_adapter = upstream.is_adapter_model(model, peft_config)
        upstream.check_model(model, is_adapter=is_adapter, quantization_config=given.get("quantization_config"))
        if given.get("args") is None:
            name = model if isinstance(model, str) else upstream.model_id(model.config)
            given["args"] = BudgetGRPOConfig(f"{name.split('/')[-1]}-GRPO")
        training_args: GRPOConfig = given["args"]
        is_on_host = isinstance(optimizer, HostAdamW)
        facts = upstream.placement_facts(training_args, model, optimizer, is_adapter=is_adapter, is_on_host=is_on_host)
        placement = resolve_optimizer_placement(budget_setting(training_args, "optimizer_placement"), facts)
        self._is_host_placement = placement.value == "host"
        self._casts_policy = self._is_host_placement and facts.casts_policy
        self._master_weights: ParameterSlabs | None = None
        self._host_adamw: HostAdamW | None = None
        with _loaded_on_host(training_args, isinstance(model, str) and self._is_host_placement):
            super().__init__(*bound.args[1:], **bound.kwargs)
        self._build_host_adamw()
        self.resolved_settings = [placement, *self._describe()]
        self._print_settings()

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
        if self._casts_policy and self._master_weights is None:
            self._master_weights = capture_master_weights(model, pin=self.args.device.type == "cuda")

    def _build_host_adamw(self) -> None:
        if not self._is_host_placement:
            return
        self._capture_masters(self._policy)  # transformers did not move the model (place_model_on_device=False)
        if self.optimizer is None and type(self).create_optimizer is BudgetGRPOTrainer.create_optimizer:
            self.create_optimizer()
        if isinstance(self.optimizer, HostAdamW):
            self._host_adamw = self.optimizer
            self._host_adamw.follow_parameters()

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """As transformers 5.24, with `HostAdamW` in place of torch's AdamW: the parameter groups are stock's."""
        if self._is_host_placement and self.optimizer is None:
            names = {parameter: name for name, parameter in self._policy.named_parameters()}
            self.optimizer_cls_and_kwargs = (
                HostAdamW,
                {
                    "lr": self.args.learning_rate,
                    "betas": (self.args.adam_beta1, self.args.adam_beta2),
                    "eps": self.args.adam_epsilon,
                    "implementation": IMPLEMENTATION_OF_OPTIM[self.args.optim],
                    "master_weights": self._master_weights,
                    "parameter_names": names,
                },
            )
        return super().create_optimizer(model)

    def _describe(self) -> list[ResolvedSetting]:
        parameters = [p for p in self._policy.parameters() if p.requires_grad]
        dtypes = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters}))
        where = f"{dtypes} on {self.args.device}"
        if not self._is_host_placement:
            return [ResolvedSetting("trained weights", where, "as stock TRL")]
        if self._casts_policy:
            reason = "cast from the fp32 masters once per step; the reference is bf16 compute over fp32 masters"
        elif self.args.device.type == "cpu" and dtypes == "float32":
            reason = "stepped in place: every bit as stock TRL"
        else:
            reason = "dtype as loaded; fp32 masters on the host"
        rows = [ResolvedSetting("trained weights", where, reason)]
        if self._host_adamw is not None:
            adamw = self._host_adamw
            host_gib, pinned_gib = (n / 2**30 for n in (adamw.host_bytes, host_slab_bytes(pinned_only=True)))
            implementation = f"HostAdamW, {adamw.implementation}"
            rows.append(ResolvedSetting("optimizer", implementation, "torch's own AdamW arithmetic, on the CPU"))
            rows.append(ResolvedSetting("host memory", f"{host_gib:.2f} GiB", f"{pinned_gib:.2f} GiB page-locked"))
        return rows

    def _print_settings(self) -> None:
        table = format_table(self.resolved_settings, f"trl-budget {__version__}")
        logger.info(table)
        self.accelerator.print(table)

    # Training

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        """As transformers 5.24; an aborted step's gradients are dropped and foreign writes adopted first."""
        if self._is_host_placement:
            self._prepare_host_adamw()
        return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)

    def _prepare_host_adamw(self) -> None:
        if self._host_adamw is None:  # a subclass overrides create_optimizer, which must not run before its __init__
            optimizer = self.create_optimizer()
            if isinstance(optimizer, HostAdamW):
                self._host_adamw = optimizer
            elif self._casts_policy:
                raise SettingsError(
                    f"create_optimizer returned a {type(optimizer).__name__}, but the policy was cast to bf16 and its "
                    "fp32 masters are on the host. Stepping bf16 weights without them is another training. "
                    "Return super().create_optimizer(), or set optimizer_placement='device'."
                )
            else:
                return
        self._host_adamw.zero_grad()
        self._host_adamw.adopt_external_writes()
        # Left to Accelerate, the wrapper copies the whole state to the device and loads it back.
        self.optimizer = self.accelerator.prepare_optimizer(self.optimizer, device_placement=False)

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """As transformers 5.24: clips to `max_grad_norm` and returns the norm before, on the host."""
        if self._host_adamw is None:
            return super()._clip_grad_norm(model)
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

    def _load_best_model(self) -> None:
        """As transformers 5.24; the best model's weights become the masters."""
        super()._load_best_model()
        self._adopt_external_writes()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """As transformers 5.24; the masters saved are those of the weights saved beside them."""
        self._adopt_external_writes()
        super()._save_optimizer_and_scheduler(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """As TRL 1.16; the host state is mapped from the file and copied into its slabs, not read twice."""
        with serialization_config.patch("load.mmap", self._host_adamw is not None):  # type: ignore[attr-defined]
            super()._load_optimizer_and_scheduler(checkpoint)

    def _adopt_external_writes(self) -> None:
        if self._host_adamw is not None:
            self._host_adamw.adopt_external_writes(is_expected=True)


@contextmanager
def _loaded_on_host(args: GRPOConfig, applies: bool) -> Iterator[None]:
    """Lets TRL load a model named by a string into host memory: by default it goes straight to the card, in fp32."""
    if not applies:
        yield
        return
    original = args.model_init_kwargs
    args.model_init_kwargs = {"device_map": None, **dict(original or {})}  # type: ignore[arg-type]
    try:
        yield
    finally:
        args.model_init_kwargs = original

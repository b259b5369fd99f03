"""`BudgetGRPOConfig`: TRL's `GRPOConfig` plus one field per memory lever.

A plain `GRPOConfig` gives every lever its default. Fields are checked here; what depends on the model and the machine
is resolved once, when the trainer is built (`placement.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from trl import GRPOConfig

from trl_budget.placement import (
    GRADIENT_PLACEMENTS,
    OPTIMIZER_PLACEMENTS,
    check_gradient_placement,
    check_optimizer_placement,
)


@dataclass
class BudgetGRPOConfig(GRPOConfig):
    """Configuration of `BudgetGRPOTrainer`. Every field of `GRPOConfig` keeps its meaning.

    Args:
        optimizer_placement: where AdamW's fp32 master weights and moments live and are stepped. "host": on the CPU,
            16 bytes of host memory per trainable parameter and none on the GPU, where the policy is bf16 only; a step
            costs host memory bandwidth instead of GPU time. "device": stock TRL. "auto": host for full-parameter
            training, device for adapters and for anything host cannot serve, with the reason printed.
        gradient_placement: when gradients leave the GPU, where the optimizer is on the host. "host": each as soon as
            backward has made it; the GPU holds a few at a time, the host sums them in fp32 while backward and the next
            forward run, at the cost of up to 512 MiB of page-locked staging. "device": all when their backward ends,
            so the GPU holds as many bytes of gradients as of trained weights. "auto": host on CUDA. The sums are the
            same.
    """

    optimizer_placement: str = field(
        default="auto",
        metadata={
            "help": "Where AdamW's fp32 master weights and moments live and are stepped: 'host' (CPU memory, bf16 "
            "policy on the GPU), 'device' (stock TRL), or 'auto' (host for full-parameter training, device for "
            "adapters and for what host cannot serve).",
            "choices": list(OPTIMIZER_PLACEMENTS),
        },
    )

    gradient_placement: str = field(
        default="auto",
        metadata={
            "help": "When gradients leave the GPU, where the optimizer is on the host: 'host' (each as soon as "
            "backward has made it), 'device' (all when their backward ends), or 'auto' (host on CUDA).",
            "choices": list(GRADIENT_PLACEMENTS),
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_optimizer_placement(self.optimizer_placement)
        check_gradient_placement(self.gradient_placement)


def budget_setting(args: GRPOConfig, name: str) -> str:
    """The value of one of this library's fields; its default where `args` is a plain `GRPOConfig`."""
    if isinstance(args, BudgetGRPOConfig):
        return vars(args)[name]
    return str(next(f.default for f in fields(BudgetGRPOConfig) if f.name == name))

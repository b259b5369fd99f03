"""`BudgetGRPOConfig`: TRL's `GRPOConfig` plus one field per memory lever.

A plain `GRPOConfig` gives every lever its default. Fields are checked here; what depends on the model and the machine
is resolved once, when the trainer is built (`placement.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from trl import GRPOConfig

from trl_budget.placement import OPTIMIZER_PLACEMENTS, check_optimizer_placement


@dataclass
class BudgetGRPOConfig(GRPOConfig):
    """Configuration of `BudgetGRPOTrainer`. Every field of `GRPOConfig` keeps its meaning.

    Args:
        optimizer_placement: where AdamW's fp32 master weights and moments live and are stepped. "host": on the CPU,
            16 bytes of host memory per trainable parameter and none on the GPU, where the policy is bf16 only; a step
            costs host memory bandwidth instead of GPU time. "device": stock TRL. "auto": host for full-parameter
            training, device for adapters and for anything host cannot serve, with the reason printed.
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

    def __post_init__(self) -> None:
        super().__post_init__()
        check_optimizer_placement(self.optimizer_placement)


def budget_setting(args: GRPOConfig, name: str) -> str:
    """The value of one of this library's fields; its default where `args` is a plain `GRPOConfig`."""
    if isinstance(args, BudgetGRPOConfig):
        return vars(args)[name]
    return str(next(f.default for f in fields(BudgetGRPOConfig) if f.name == name))

"""GRPO training for people whose GPUs are cheap: TRL's `GRPOTrainer` with less GPU memory and the same training."""

from trl_budget.config import BudgetGRPOConfig
from trl_budget.errors import (
    DeviceMemoryError,
    HostMemoryError,
    HostThreadError,
    NonFiniteGradientError,
    RankError,
    SettingsError,
    StalePolicyError,
    UnknownFieldError,
    UpstreamMovedError,
    WeightSyncError,
)
from trl_budget.host_adamw import HostAdamW
from trl_budget.trainer import BudgetGRPOTrainer
from trl_budget.version import __version__

__all__ = [
    "BudgetGRPOConfig",
    "BudgetGRPOTrainer",
    "DeviceMemoryError",
    "HostAdamW",
    "HostMemoryError",
    "HostThreadError",
    "NonFiniteGradientError",
    "RankError",
    "SettingsError",
    "StalePolicyError",
    "UnknownFieldError",
    "UpstreamMovedError",
    "WeightSyncError",
    "__version__",
]

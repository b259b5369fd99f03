"""What `full_step.py` compares: modes of stock TRL and ours, and the two workloads. Settings, nothing runs here."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any

EOS = 1


@dataclass(frozen=True)
class Mode:
    """One way to train.

    Attributes:
        description: for the result file.
        settings: of the config.
        is_ours: which trainer.
        is_pageable: whether host memory is left pageable.
    """

    description: str
    settings: dict[str, Any] = field(default_factory=dict)
    is_ours: bool = True
    is_pageable: bool = False


STOCK_ENGINE = {"vllm_enable_sleep_mode": True, "vllm_gpu_memory_utilization": 0.25}
COPYING = {"share_vllm_weights": "off"}
RESIDENT = {**STOCK_ENGINE, **COPYING, "park_policy_during_rollout": "off"}
STOCK_LAYOUT = {"padding_free": "stock", "max_tokens_per_microbatch": None}
STOCK_PASSES = {**STOCK_LAYOUT, "reuse_old_logprobs": "off"}
ON_DEVICE = {"optimizer_placement": "device"}
CARD_24 = {
    "device_memory_budget": "24GiB",
    "vllm_gpu_memory_utilization": 0.92,
    "max_tokens_per_microbatch": 24_576,
}
CARD_16 = {"device_memory_budget": "16GiB", "vllm_gpu_memory_utilization": 0.88, "max_tokens_per_microbatch": 8192}
MODES = {
    "stock": Mode("stock TRL: fp32 parameters under bf16 autocast, sleep mode, uncapped", STOCK_ENGINE, is_ours=False),
    "ours_24gib": Mode("every lever's default, the card capped at 24 GiB", CARD_24),
    "ours_16gib": Mode("every lever's default, the card capped at 16 GiB", CARD_16),
    "ours_24gib_copying": Mode("24 GiB, weights copied to vLLM at every sync", {**CARD_24, **COPYING}),
    "ours_16gib_copying": Mode("16 GiB, weights copied to vLLM at every sync", {**CARD_16, **COPYING}),
    "all_off": Mode("our trainer with every lever off", {**RESIDENT, **STOCK_PASSES, **ON_DEVICE}),
    "host_step": Mode(
        "and the optimizer on the host, gradients leaving during backward", {**RESIDENT, **STOCK_PASSES}
    ),
    "packing": Mode("and packed rows in passes by tokens", {**RESIDENT, "reuse_old_logprobs": "off"}),
    "reuse": Mode("and old log-probs from the update's own forward", RESIDENT),
    "parking": Mode("and the policy off the card during rollouts", {**STOCK_ENGINE, **COPYING}),
    "ours": Mode("and vLLM's weights shared: every lever's default, uncapped", STOCK_ENGINE),
    "packing_alone": Mode(
        "every lever off but packed rows in passes by tokens", {**RESIDENT, **ON_DEVICE, "reuse_old_logprobs": "off"}
    ),
    "reuse_alone": Mode("every lever off but the reuse of old log-probs", {**RESIDENT, **ON_DEVICE, **STOCK_LAYOUT}),
    "parking_alone": Mode(
        "every lever off but the policy, in fp32, off the card during rollouts",
        {**STOCK_ENGINE, **COPYING, **STOCK_PASSES, **ON_DEVICE},
    ),
    "ours_pageable": Mode("as ours, masters, moments and staging in pageable memory", STOCK_ENGINE, is_pageable=True),
}


@dataclass(frozen=True)
class Workload:
    """What a step generates.

    Attributes:
        rows: completions of a step, 8 per prompt.
        max_completion: tokens.
        generation_kwargs: vLLM's sampling parameters beside TRL's.
    """

    rows: int
    max_completion: int
    generation_kwargs: dict[str, Any]


def workload_of(args: argparse.Namespace) -> Workload:
    """The workload that was asked for, `--scale` times as long."""
    if args.workload == "equal":
        return Workload(args.rows or 64, max(1, round(1024 * args.scale)), {"ignore_eos": True})
    return Workload(args.rows or 128, max(1, round(4096 * args.scale)), {"logit_bias": {EOS: args.eos_bias}})

"""`BudgetGRPOConfig`: TRL's `GRPOConfig` plus one field per memory lever.

A plain `GRPOConfig` gives every lever its default. Fields are checked here; what depends on the model and the machine
is resolved once, when the trainer is built (`placement.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from trl import GRPOConfig

from trl_budget.device_memory import parse_bytes
from trl_budget.errors import SettingsError
from trl_budget.field_names import names_unknown_fields
from trl_budget.long_context import (
    ACTIVATION_OFFLOAD,
    check_activation_offload,
    check_attention_head_groups,
    check_tiled_mlp,
)
from trl_budget.placement import (
    GRADIENT_PLACEMENTS,
    OPTIMIZER_PLACEMENTS,
    check_gradient_placement,
    check_optimizer_placement,
)
from trl_budget.reuse import REUSE_OLD_LOGPROBS, check_reuse
from trl_budget.rollout_policy import PARK_POLICY, SHARE_WEIGHTS, VERIFY_SYNC, check_choice
from trl_budget.row_layout import PADDING_FREE, check_lm_head_chunk_size, check_max_tokens, check_padding_free
from trl_budget.sharding import OPTIMIZER_SHARDINGS, check_optimizer_sharding
from trl_budget.whole_numbers import number_or_word


@names_unknown_fields
@dataclass
class BudgetGRPOConfig(GRPOConfig):
    """Configuration of `BudgetGRPOTrainer`. Every field of `GRPOConfig` keeps its meaning.

    A name that is no field raises `UnknownFieldError`, which says what was meant; a value that cannot work raises
    `SettingsError`. A field that takes a number takes what Python reads as a whole number, as a string too.

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
        max_tokens_per_microbatch: how many tokens one forward and backward pass holds at most; a longer row is a pass
            of its own. A memory setting: `per_device_train_batch_size` and `gradient_accumulation_steps` keep deciding
            what an optimizer step is. "auto": what the free device memory allows, for bf16 on CUDA. None: a pass is a
            stock micro-batch. Fewer passes cost less time, above about 24,000 tokens little less.
        padding_free: how the rows of a pass lie. "on": end to end, with varlen attention; nothing is spent on
            padding. "off": padding is trimmed to the longest row of the pass. "stock": padded to the longest row of
            the generation batch. "auto": on for bf16 on CUDA where the model can be packed, else off, with the
            reason printed; "stock" elsewhere, since other shapes round differently.
        activation_offload: whether the inputs of the layers, which gradient checkpointing keeps, spend the time from
            forward to backward in host memory. "on": two of them are on the GPU instead of one per layer; costs
            page-locked host memory (184 KB per token of a pass for a 4B model) and copies both ways, which run beside
            the layers. Every bit is kept. "auto": where the longest row that the run may make would not fit, for bf16
            on CUDA. "off": they stay.
        tiled_mlp: tokens of a tile of the sequence in which a layer runs, but for its attention: memory of the MLP
            grows with the tile and no longer with the row. 170 KB per token of the tile for a 4B model, and 0.5 GiB in
            which the weight gradients of a layer are summed over the tiles in fp32; small tiles are small matrices.
            "auto": the largest of 8192, 4096 and 2048 that is enough, where the longest row does not fit with offload
            alone, for bf16 on CUDA. "off": a layer runs whole; None is the same.
        attention_head_groups: in how many groups of key/value heads attention's backward runs, one after the other; a
            divisor of their number. It holds a group's fp32 gradients at a time: 8 groups take a 4B model from 95 to
            55 KB per token, with `tiled_mlp` and `activation_offload`. "auto": the fewest with which the longest row
            fits, where it does not without, for bf16 on CUDA. "off": all heads at once; None is the same.
        reuse_old_logprobs: whether the separate old-log-prob pass that TRL runs with vLLM is skipped. "auto": where
            the update's own forward gives the same log-probs, bit for bit. "require": an error where it does not.
            "off": stock TRL.
        optimizer_sharding: with several processes and the optimizer on the host, which of a node's ranks keep and step
            it. "sharded": every rank an equal share of the parameters, 12 bytes per parameter and node and 4 more for
            each rank's gradients. "rank0": the first rank of each node all of them; the others only sum gradients.
            "replicated": every rank all of them, 16 bytes per parameter and rank, nothing to wait for but the
            gradients. "auto": sharded. The weights are the same bits in all of them. No effect with one process.
        park_policy_during_rollout: whether policy, reference and reward models leave the card while vLLM, in the same
            process, holds it, and vLLM leaves it afterwards (its sleep mode, whatever `vllm_enable_sleep_mode` says).
            Costs 2 bytes of page-locked host memory per weight of a bf16 model and the copies, 0.3 s for 8 GB. "auto":
            on CUDA. "off": as `vllm_enable_sleep_mode` says.
        share_vllm_weights: whether the policy's parameters are views of vLLM's own weights: one copy on the card, no
            weight sync, only vLLM's cache sleeps. "auto": where the engine hands the card over, the policy is trained
            in full on bf16 or fp16 weights, and vLLM's tensors fit; else weights are copied, with the reason printed.
        verify_weight_sync: "first" compares vLLM's weights with the policy's, bit for bit, after the first sync,
            "always" after every sync, "off" never. A difference is an error that names the first tensor.
        lm_head_chunk_size: how many vocabulary entries TRL's fused LM head takes at a time. Its logits are made tile
            by tile, in forward and again in backward, and one is held: `min(tokens of the loss in the pass, 4096) *
            lm_head_chunk_size * 2` bytes in bf16, so 256 MiB with TRL's 32,768 and 64 MiB with 8,192, whatever the
            length of the rows; twice that under `cast_lm_head_to_fp32`. The fp32 gradients of its hidden states (4
            bytes per token and hidden unit) and of its weights (4 bytes each, where trained) stay. Log-probs and
            gradients change by the rounding of fp32 sums over the tiles. None: TRL's own.
        pin_host_memory: whether the host memory of masters, moments, gradient staging, offloaded activations and
            parked weights is page-locked. False: it stays pageable, for machines that page-lock little of it (WSL2,
            some containers, `ulimit -l`). Copies are then slower and hold up the host; how much is measured when the
            trainer is built and printed. The numbers are the same. No effect without CUDA.
        device_memory_budget: train as if the card had this much memory, vLLM included: "16GiB", which "16G" means
            too, "16GB" in powers of 1000, or a number of bytes; a small number without a unit is refused.
            `vllm_gpu_memory_utilization` is then a share of it. None: the whole card. No effect without CUDA.
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
    max_tokens_per_microbatch: int | str | None = field(
        default="auto",
        metadata={
            "help": "Tokens that one forward and backward pass holds at most: a number, 'auto' (what the device "
            "memory allows), or None (a pass is one stock micro-batch). The training does not change with it.",
        },
    )
    padding_free: str = field(
        default="auto",
        metadata={
            "help": "How the rows of a pass lie: 'on' (end to end, varlen attention), 'off' (trimmed to the longest "
            "row of the pass), 'stock' (padded as in TRL), or 'auto' (on for bf16 on CUDA, stock elsewhere).",
            "choices": list(PADDING_FREE),
        },
    )
    activation_offload: str = field(
        default="auto",
        metadata={
            "help": "Whether layer inputs spend the time between forward and backward in host memory: 'on', 'off', or "
            "'auto' (where the longest row would not fit on the GPU; bf16 on CUDA).",
            "choices": list(ACTIVATION_OFFLOAD),
        },
    )
    tiled_mlp: int | str | None = field(
        default="auto",
        metadata={
            "help": "Tokens of a tile of the sequence in which a layer, but for its attention, runs: a "
            "number, 'off' (whole), or 'auto' (where the longest row would not fit on the GPU; bf16 on CUDA).",
        },
    )
    attention_head_groups: int | str | None = field(
        default="auto",
        metadata={
            "help": "Groups of key/value heads in which attention's backward runs, one after the other: a divisor of "
            "their number, 'off' (all at once), or 'auto' (where the longest row would not fit; bf16 on CUDA).",
        },
    )
    reuse_old_logprobs: str = field(
        default="auto",
        metadata={
            "help": "Whether the old-log-prob pass that TRL runs with vLLM is served from the update's own forward: "
            "'auto' (where that is exact), 'require' (an error where it is not), or 'off' (stock TRL).",
            "choices": list(REUSE_OLD_LOGPROBS),
        },
    )
    optimizer_sharding: str = field(
        default="auto",
        metadata={
            "help": "Which ranks of a node keep and step the host optimizer: 'sharded' (each an equal share), 'rank0' "
            "(the first one), 'replicated' (each a copy of its own), or 'auto' (sharded).",
            "choices": list(OPTIMIZER_SHARDINGS),
        },
    )

    park_policy_during_rollout: str = field(
        default="auto",
        metadata={
            "help": "Whether policy, reference and reward models leave the card while a colocated vLLM holds it, and "
            "vLLM afterwards: 'on', 'off' (as vllm_enable_sleep_mode says), or 'auto' (on CUDA).",
            "choices": list(PARK_POLICY),
        },
    )
    share_vllm_weights: str = field(
        default="auto",
        metadata={
            "help": "Whether the policy's parameters are views of a colocated vLLM's weights, without a weight sync: "
            "'on', 'off' (weights are copied), or 'auto' (where vLLM's tensors fit).",
            "choices": list(SHARE_WEIGHTS),
        },
    )
    verify_weight_sync: str = field(
        default="first",
        metadata={
            "help": "Whether vLLM's weights are compared with the policy's after a weight sync: 'first' (the first "
            "one), 'always', or 'off'.",
            "choices": list(VERIFY_SYNC),
        },
    )
    lm_head_chunk_size: int | str | None = field(
        default=None,
        metadata={
            "help": "How many vocabulary entries TRL's fused LM head takes at a time: a tile of logits holds 4096 "
            "tokens times this many, 2 bytes each. None: TRL's own 32768, 256 MiB."
        },
    )
    pin_host_memory: bool = field(
        default=True,
        metadata={
            "help": "Whether host memory that is copied to or from the GPU is page-locked. False: it stays pageable, "
            "for machines that page-lock little of it (WSL2, some containers); copies are slower."
        },
    )
    device_memory_budget: str | None = field(
        default=None,
        metadata={
            "help": "Train as if the card had this much memory, vLLM included, such as '16GiB'. None: the whole card."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_optimizer_placement(self.optimizer_placement)
        check_gradient_placement(self.gradient_placement)
        self.max_tokens_per_microbatch = number_or_word(self.max_tokens_per_microbatch)
        check_max_tokens(self.max_tokens_per_microbatch)
        check_activation_offload(self.activation_offload)
        self.tiled_mlp = tile = _number_or_off(self.tiled_mlp)
        check_tiled_mlp(tile)
        self.attention_head_groups = groups = _number_or_off(self.attention_head_groups)
        check_attention_head_groups(groups)
        check_padding_free(self.padding_free)
        check_reuse(self.reuse_old_logprobs)
        check_optimizer_sharding(self.optimizer_sharding)
        check_choice("park_policy_during_rollout", self.park_policy_during_rollout, PARK_POLICY)
        check_choice("share_vllm_weights", self.share_vllm_weights, SHARE_WEIGHTS)
        check_choice("verify_weight_sync", self.verify_weight_sync, VERIFY_SYNC)
        self.lm_head_chunk_size = number_or_word(self.lm_head_chunk_size)
        check_lm_head_chunk_size(self.lm_head_chunk_size)
        _check_pin_host_memory(self.pin_host_memory)
        if self.device_memory_budget is not None:
            parse_bytes(self.device_memory_budget)


def _number_or_off(value: int | str | None) -> int | str:
    """A number or a word; None, without which `HfArgumentParser` would take numbers only, stands for "off"."""
    value = number_or_word(value)
    return "off" if value is None else value


def _check_pin_host_memory(requested: object) -> None:
    if not isinstance(requested, bool):
        raise SettingsError(
            f"pin_host_memory={requested!r} is neither True nor False. Host memory is page-locked or it is not. "
            "Set pin_host_memory to True, or to False where the machine refuses to page-lock it."
        )


def budget_setting(args: GRPOConfig, name: str) -> Any:
    """The value of one of this library's fields; its default where `args` is a plain `GRPOConfig`."""
    if isinstance(args, BudgetGRPOConfig):
        return vars(args)[name]
    return next(f.default for f in fields(BudgetGRPOConfig) if f.name == name)

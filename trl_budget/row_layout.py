"""Decides how the rows of a pass lie on the device, and how many tokens a pass may hold.

Packed end to end where the model can do it, else trimmed to the pass's longest row; as stock pads them where that must
stay bit-exact, and where a row's log-probs depend on how it is padded: packing and trimming both move the columns that
stock's positions count. Plain facts in, values and their reasons out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trl_budget.errors import SettingsError
from trl_budget.placement import ResolvedSetting
from trl_budget.whole_numbers import refuse_other_spellings

PADDING_FREE = ("auto", "on", "off", "stock")
PACKED, TRIMMED, STOCK = "packed", "trimmed", "stock"
MERGED, WHOLE, SPLIT, UNTOUCHED = "merged and split", "merged, never split", "split, never merged", "untouched"
# What depends on the token's distance only, not on the length of the batch or on an absolute position.
_PACKABLE_ROPE = frozenset({"default", "linear", "llama3", "yarn", "proportional"})
_PACKABLE_LAYERS = frozenset({"full_attention", "sliding_attention"})
MAX_AUTO_TOKENS = 32_768
MIN_AUTO_TOKENS = 1_024


@dataclass(frozen=True)
class LayoutFacts:
    """What the decision depends on.

    Attributes:
        device_type: "cpu", "cuda", ...
        bf16: the training arguments' `bf16`.
        attention: the policy's attention implementation.
        routes_attention: whether the model looks its attention up in transformers' `AttentionInterface`.
        asks_for_attention: whether the model's code compares the name of its attention with the one that it has.
        is_multimodal: whether the model takes images.
        is_stateful: whether layers carry a state along the sequence (Mamba and its kin).
        layer_types: kinds of layers, from the model's config.
        rope_types: kinds of rotary embedding, from the model's config; none for learned or other positions.
        soft_cap: whether attention scores are soft-capped.
        attention_dropout: probability.
        has_window: whether a layer sees a sliding window.
        serves_windows: whether the packed attention can.
        head_dims: sizes of query, key and value heads.
        learns_prompt: whether PEFT adds virtual tokens.
        row_adapters: what the adapters look for in each row, if they do.
        scales_positions: the config's key of a scaling by absolute position, and the first position it changes.
        neftune_noise_alpha: the training arguments' value.
        hooks: functions of the user that are called with the activations of a module.
        uses_hub_kernels: whether transformers swaps its modules' forward for kernels of the hub.
        num_devices: devices that one process spreads a batch over.
        num_processes: processes of the job.
        parallelism: FSDP, DeepSpeed or the like, or None.
        torch_compile: the training arguments' `torch_compile`.
        router_loss: whether the router's load-balancing loss is trained.
        top_entropy_quantile: the training arguments' value.
        overrides: loss methods that a subclass overrides.
        gradient_hooks: functions of the user that are called with a parameter's gradient in every backward.
        steps_in_backward: the training arguments' `optim`, where it steps parameters while backward runs.
        training_mode_layers: layers that compute over all rows and columns of a batch in training (batch norm).
        observers: what of the user's looks at the loss or the gradients between two micro-batches.
        padding_fault: what a trial run of rows with and without padding found wrong.
        is_padding_tried: whether that run could compute in fp32, or is still to come.
        packing_fault: what a trial run of packed rows found wrong.
    """

    device_type: str
    bf16: bool
    attention: str = "sdpa"
    routes_attention: bool = True
    asks_for_attention: bool = False
    is_multimodal: bool = False
    is_stateful: bool = False
    layer_types: frozenset[str] = frozenset()
    rope_types: frozenset[str] = frozenset({"default"})
    soft_cap: bool = False
    attention_dropout: float = 0.0
    has_window: bool = False
    serves_windows: bool = True
    head_dims: frozenset[int] = frozenset({64})
    learns_prompt: bool = False
    row_adapters: str | None = None
    scales_positions: tuple[str, int] | None = None
    neftune_noise_alpha: float | None = None
    hooks: tuple[str, ...] = ()
    uses_hub_kernels: bool = False
    num_devices: int = 1
    num_processes: int = 1
    parallelism: str | None = None
    torch_compile: bool = False
    router_loss: bool = False
    top_entropy_quantile: float = 1.0
    overrides: tuple[str, ...] = ()
    gradient_hooks: tuple[str, ...] = ()
    steps_in_backward: str | None = None
    training_mode_layers: tuple[str, ...] = ()
    observers: tuple[str, ...] = ()
    padding_fault: str | None = None
    is_padding_tried: bool = True
    packing_fault: str | None = None

    @property
    def rounds_already(self) -> bool:
        """Whether other shapes may change the rounding: bf16 on CUDA. fp32 and the CPU keep stock's bits."""
        return self.device_type == "cuda" and self.bf16

    @property
    def is_plain(self) -> bool:
        """Whether positions are rotary and all layers attend, which needs no trial to be known to take padding."""
        return bool(self.rope_types) and self.layer_types <= _PACKABLE_LAYERS and not self.is_stateful


@dataclass(frozen=True)
class _Obstacle:
    applies: Callable[[LayoutFacts], bool]
    reason: Callable[[LayoutFacts], str]


# What makes a row's log-probs depend on the columns around it, so that neither packed nor trimmed rows are stock's.
_MOVING_OBSTACLES = (
    _Obstacle(
        lambda f: not f.is_padding_tried and not f.is_plain,
        lambda f: "whether padding moves a row could not be tried in fp32, and positions or layers are of a rare kind",
    ),
    _Obstacle(
        lambda f: not f.rope_types <= _PACKABLE_ROPE,
        lambda f: f"rope_type {', '.join(sorted(f.rope_types - _PACKABLE_ROPE))} depends on the batch's length",
    ),
    _Obstacle(
        lambda f: f.scales_positions is not None,
        lambda f: "{} scales queries by absolute position, from {:,} on".format(*f.scales_positions or ()),
    ),
    _Obstacle(
        lambda f: f.neftune_noise_alpha is not None,
        lambda f: f"neftune_noise_alpha={f.neftune_noise_alpha} draws noise that shrinks with the columns of a pass",
    ),
    _Obstacle(
        lambda f: bool(f.training_mode_layers),
        lambda f: f"{f.training_mode_layers[0]} computes over all columns of a batch in training",
    ),
    _Obstacle(lambda f: f.padding_fault is not None, lambda f: str(f.padding_fault)),
)
_HOOKED = _Obstacle(
    lambda f: bool(f.hooks),
    lambda f: f"{', '.join(f.hooks)} may count on [rows, columns, hidden] (padding_free='on' packs all the same)",
)
_PACKING_OBSTACLES = (
    _Obstacle(lambda f: not f.rope_types, lambda f: "positions are not rotary, so a packed row would not be the same"),
    _Obstacle(lambda f: f.is_multimodal, lambda f: "the model takes images, whose tokens belong to padded rows"),
    _Obstacle(
        lambda f: f.attention != "sdpa" and not f.attention.startswith("flash_attention"),
        lambda f: f"attn_implementation='{f.attention}' has no form for packed rows (load the model with 'sdpa')",
    ),
    _Obstacle(
        lambda f: not f.routes_attention, lambda f: "the model does not use transformers' exchangeable attention"
    ),
    _Obstacle(
        lambda f: f.asks_for_attention and not f.attention.startswith("flash_attention"),
        lambda f: f"the model's code asks whether its attention is '{f.attention}', which one for packed rows is not",
    ),
    _Obstacle(
        lambda f: f.is_stateful or not f.layer_types <= _PACKABLE_LAYERS,
        lambda f: (
            f"layers of kind {', '.join(sorted(f.layer_types - _PACKABLE_LAYERS)) or 'state space'} would carry "
            "one row into the next"
        ),
    ),
    _Obstacle(lambda f: f.soft_cap, lambda f: "attention scores are soft-capped, which varlen attention is not"),
    _Obstacle(
        lambda f: f.attention_dropout > 0,
        lambda f: f"attention_dropout={f.attention_dropout}, and varlen attention has no dropout",
    ),
    _Obstacle(
        lambda f: f.has_window and not f.serves_windows,
        lambda f: "layers see a sliding window, which this torch's varlen attention cannot",
    ),
    _Obstacle(
        lambda f: len(f.head_dims) > 1 or (f.device_type == "cuda" and any(d > 256 or d % 8 for d in f.head_dims)),
        lambda f: f"head sizes {sorted(f.head_dims)}: varlen attention takes one size, a multiple of 8 up to 256",
    ),
    _Obstacle(
        lambda f: f.uses_hub_kernels,
        lambda f: (
            "hub kernels replace modules' forward in train() and eval(), so a trial would not be of what runs "
            "(set USE_HUB_KERNELS=NO, or use_kernels=False where the model is loaded)"
        ),
    ),
    _Obstacle(lambda f: f.learns_prompt, lambda f: "the adapter prepends virtual tokens to every row"),
    _Obstacle(
        lambda f: f.row_adapters is not None, lambda f: f"{f.row_adapters} looks at each row, and a pack is one row"
    ),
    _Obstacle(lambda f: f.packing_fault is not None, lambda f: str(f.packing_fault)),
)


def moving_obstacles(facts: LayoutFacts) -> list[str]:
    """Why rows must lie in stock's columns, one line each; empty if padding may be trimmed."""
    return _reasons(_MOVING_OBSTACLES, facts)


def packing_obstacles(facts: LayoutFacts) -> list[str]:
    """Why rows cannot be packed, one line each; empty if they can."""
    return _reasons((*_MOVING_OBSTACLES, *_PACKING_OBSTACLES), facts)


def _reasons(obstacles: tuple[_Obstacle, ...], facts: LayoutFacts) -> list[str]:
    return [obstacle.reason(facts) for obstacle in obstacles if obstacle.applies(facts)]


def _stock_reason(facts: LayoutFacts) -> str | None:
    if facts.num_devices > 1:
        return f"one process splits its batch over {facts.num_devices} devices"
    if facts.parallelism is not None:
        return f"the run was launched with {facts.parallelism}, whose ranks must run the same shapes"
    return None


def check_padding_free(requested: str) -> None:
    """Refuses unknown values of `padding_free`.

    Raises:
        SettingsError: names the value and the ones there are.
    """
    if requested not in PADDING_FREE:
        raise SettingsError(
            f"padding_free={requested!r} is not a layout. Rows are packed (on), trimmed (off) or padded as in stock "
            f"TRL (stock). Set padding_free to one of {', '.join(PADDING_FREE)}."
        )


def resolve_layout(requested: str, facts: LayoutFacts) -> ResolvedSetting:
    """Turns the `padding_free` field into "packed", "trimmed" or "stock".

    Raises:
        SettingsError: packing was asked for and cannot be served.
    """
    check_padding_free(requested)
    name = "padding_free"
    stock = _stock_reason(facts)
    obstacles = [stock] if stock else packing_obstacles(facts)
    if requested == "on" and obstacles:
        raise SettingsError(
            f"padding_free='on' was asked for, but {'; '.join(obstacles)}. Packed rows would train something else. "
            "Set padding_free='auto', which leaves rows as they must lie where it cannot pack."
        )
    if requested == "on":
        return ResolvedSetting(name, PACKED, "set by you")
    if requested == "stock":
        return ResolvedSetting(name, STOCK, "set by you: rows are padded to the longest of the generation batch")
    if stock:
        return ResolvedSetting(name, STOCK, stock)
    moving = moving_obstacles(facts)
    if requested == "off" and moving:
        raise SettingsError(
            f"padding_free='off' was asked for, but {'; '.join(moving)}. Rows without padding would train something "
            "else. Set padding_free='auto' or 'stock', which keep stock's columns."
        )
    if requested == "off":
        return ResolvedSetting(name, TRIMMED, "set by you: padding is trimmed to the longest row of a pass")
    if not facts.rounds_already:
        why = "on the CPU" if facts.device_type != "cuda" else "without bf16"
        return ResolvedSetting(name, STOCK, f"other shapes round differently, and {why} every bit is kept")
    if facts.torch_compile:
        return ResolvedSetting(name, STOCK, "torch_compile=True would compile anew for every packed length")
    if moving or facts.hooks:
        return ResolvedSetting(name, STOCK, "; ".join([*moving, *_reasons((_HOOKED,), facts)]))
    if obstacles:
        return ResolvedSetting(name, TRIMMED, "; ".join(obstacles))
    return ResolvedSetting(name, PACKED, "rows lie end to end, varlen attention")


def check_max_tokens(requested: int | str | None) -> None:
    """Refuses anything but a positive number of tokens, "auto" and None.

    Raises:
        SettingsError: names the value.
    """
    refuse_other_spellings("max_tokens_per_microbatch", requested)
    is_number = isinstance(requested, int) and not isinstance(requested, bool) and requested > 0
    if requested is not None and requested != "auto" and not is_number:
        raise SettingsError(
            f"max_tokens_per_microbatch={requested!r} is not a budget. A pass holds at least one token. Set "
            "max_tokens_per_microbatch to a positive number of tokens, to 'auto', or to None for stock TRL's passes."
        )


def check_lm_head_chunk_size(requested: int | str | None) -> None:
    """Refuses anything but a positive number of vocabulary entries and None.

    Raises:
        SettingsError: names the value.
    """
    refuse_other_spellings("lm_head_chunk_size", requested)
    is_number = isinstance(requested, int) and not isinstance(requested, bool) and requested > 0
    if requested is not None and not is_number:
        raise SettingsError(
            f"lm_head_chunk_size={requested!r} is no number of vocabulary entries. The LM head takes at least one at "
            "a time. Set lm_head_chunk_size to a positive number such as 8192, or to None for TRL's own 32768."
        )


def regrouping(facts: LayoutFacts) -> tuple[str, str]:
    """What may be done to stock's micro-batches, and why not more."""
    stock = _stock_reason(facts)
    if stock:
        return UNTOUCHED, stock
    if facts.overrides:
        return UNTOUCHED, f"{', '.join(facts.overrides)} is overridden and may need a micro-batch as stock makes it"
    if facts.gradient_hooks:
        return UNTOUCHED, f"{', '.join(facts.gradient_hooks)} is called once for each micro-batch"
    if facts.steps_in_backward is not None:
        return UNTOUCHED, f"optim='{facts.steps_in_backward}' steps in every backward"
    if facts.training_mode_layers:
        return UNTOUCHED, f"{facts.training_mode_layers[0]} computes over all rows of a batch in training"
    if facts.is_multimodal:
        return UNTOUCHED, "the model takes images, which belong to a whole micro-batch"
    if facts.router_loss:
        return UNTOUCHED, "the router's load-balancing loss is a function of one micro-batch"
    quantile = f"top_entropy_quantile={facts.top_entropy_quantile} ranks the tokens of one micro-batch"
    if facts.top_entropy_quantile < 1.0 and facts.num_processes > 1:
        return UNTOUCHED, f"{quantile} over {facts.num_processes} processes"
    observed = f"{', '.join(facts.observers)} may look at each micro-batch's loss and gradients"
    if facts.top_entropy_quantile < 1.0:
        return (UNTOUCHED, f"{quantile}, and {observed}") if facts.observers else (WHOLE, quantile)
    if facts.observers:
        return SPLIT, f"stock's micro-batches are split, never merged: {observed}"
    return MERGED, "stock's micro-batches are merged and split"


def resolve_max_tokens(
    requested: int | str | None, facts: LayoutFacts, available_tokens: Callable[[], int]
) -> tuple[ResolvedSetting, int | None]:
    """Turns the `max_tokens_per_microbatch` field into a number of tokens, or None for stock's passes.

    Args:
        requested: the field.
        facts: the layout's facts.
        available_tokens: how many tokens the device has memory for; called for "auto" only.

    Raises:
        SettingsError: not a budget.
    """
    check_max_tokens(requested)
    name = "max_tokens_per_microbatch"
    allowed, why = regrouping(facts)
    if requested is None:
        return ResolvedSetting(name, "None", "set by you: a pass is a stock micro-batch"), None
    if allowed == UNTOUCHED:
        return ResolvedSetting(name, "None", why), None
    if requested != "auto":
        assert isinstance(requested, int)
        return ResolvedSetting(name, str(requested), f"set by you: {why}"), requested
    if not facts.rounds_already or facts.torch_compile:
        return ResolvedSetting(name, "None", "other shapes round differently: a pass is a stock micro-batch"), None
    room = available_tokens()
    tokens = max(MIN_AUTO_TOKENS, min(MAX_AUTO_TOKENS, room // 1024 * 1024))
    return ResolvedSetting(name, str(tokens), f"memory for {room:,} tokens is free; {why}"), tokens

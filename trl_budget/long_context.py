"""Decides what is done about activations that grow with the length of a row: plain facts in, values and reasons out.

Three levers, each with its cost: layer inputs leave for host memory (copies), a layer runs in tiles of the sequence
(smaller matrices), attention's backward runs in groups of heads (more kernels). `auto` turns them on in this order,
and only as far as the longest pass that a run may make needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from trl_budget.activation_memory import MemoryLevers, ModelShape, tokens_that_fit
from trl_budget.errors import SettingsError
from trl_budget.placement import NOTHING_TRAINED, ResolvedSetting
from trl_budget.whole_numbers import refuse_other_spellings

ACTIVATION_OFFLOAD = ("auto", "on", "off")
AUTO_TILE_TOKENS = (8192, 4096, 2048)  # 1.3 to 0.3 GiB for a 4B layer; the host launches each tile's kernels anew
SPLIT_ATTENTION = ("sdpa",)  # implementations that `attention.py` can run apart from the rest of a layer
OFFLOAD, TILES, GROUPS = "activation_offload", "tiled_mlp", "attention_head_groups"


@dataclass(frozen=True)
class LongContextFields:
    """What the user set.

    Attributes:
        activation_offload: "auto", "on" or "off".
        tiled_mlp: "auto", "off" or tokens of a tile.
        attention_head_groups: "auto", "off" or a number of groups.
    """

    activation_offload: str = "auto"
    tiled_mlp: int | str = "auto"
    attention_head_groups: int | str = "auto"


@dataclass(frozen=True)
class LongContextFacts:
    """What the decision depends on.

    Attributes:
        device_type: "cpu", "cuda", ...
        bf16: the training arguments' `bf16`.
        gradient_checkpointing: whether layers keep their inputs only.
        longest_pass_tokens: see `longest_pass`.
        free_bytes: of the device, for activations: without gradients and optimizer state that are still to come; the
            least of all ranks.
        num_key_value_heads: of the policy's attention.
        attention: the policy's attention implementation, as the user chose it.
        asks_for_attention: whether the model's code compares the name of its attention with the one that it has.
        is_multimodal: whether the model takes images.
        draws_random_numbers: whether a trial forward in training mode moved the random state.
        router_loss: whether the router's load-balancing loss is trained.
        torch_compile: the training arguments' `torch_compile`.
        parallelism: FSDP, DeepSpeed or the like, or None.
        num_devices: devices that one process spreads a batch over.
        is_split_over_devices: whether a device map spreads the model.
        trains_nothing: whether no weight of the policy requires a gradient.
        trial_fault: what a trial run of layers as nodes of their own found wrong.
        tiling_fault: what a trial run of layers in tiles found wrong.
    """

    device_type: str
    bf16: bool
    gradient_checkpointing: bool
    longest_pass_tokens: int
    free_bytes: int
    num_key_value_heads: int
    attention: str = "sdpa"
    asks_for_attention: bool = False
    is_multimodal: bool = False
    draws_random_numbers: bool = False
    router_loss: bool = False
    torch_compile: bool = False
    parallelism: str | None = None
    num_devices: int = 1
    is_split_over_devices: bool = False
    trains_nothing: bool = False
    trial_fault: str | None = None
    tiling_fault: str | None = None


@dataclass(frozen=True)
class LongContextPlan:
    """What is done.

    Attributes:
        settings: the rows of the three fields.
        levers: their values.
    """

    settings: tuple[ResolvedSetting, ResolvedSetting, ResolvedSetting]
    levers: MemoryLevers


@dataclass(frozen=True)
class _Obstacle:
    applies: Callable[[LongContextFacts], bool]
    reason: Callable[[LongContextFacts], str]
    stops_offload: bool = True


_OBSTACLES = (
    _Obstacle(lambda f: f.trains_nothing, lambda f: f"{NOTHING_TRAINED}, so there is no backward to keep inputs for"),
    _Obstacle(
        lambda f: not f.gradient_checkpointing,
        lambda f: "gradient_checkpointing=False keeps every activation of every layer, not its input alone",
    ),
    _Obstacle(
        lambda f: f.parallelism is not None,
        lambda f: f"the run was launched with {f.parallelism}, which wraps the layers itself",
    ),
    _Obstacle(lambda f: f.num_devices > 1, lambda f: f"one process splits its batch over {f.num_devices} devices"),
    _Obstacle(lambda f: f.is_split_over_devices, lambda f: "a device map spreads the layers over several devices"),
    _Obstacle(
        lambda f: f.is_multimodal, lambda f: "the model takes images, whose layers have other inputs than tokens"
    ),
    _Obstacle(
        lambda f: f.router_loss, lambda f: "the router's load-balancing loss needs a second output of every layer"
    ),
    _Obstacle(
        lambda f: f.draws_random_numbers,
        lambda f: "a forward in training mode draws random numbers, of which a tile would draw others",
        stops_offload=False,
    ),
    _Obstacle(lambda f: f.torch_compile, lambda f: "torch_compile=True compiles the layers whole"),
    _Obstacle(lambda f: f.trial_fault is not None, lambda f: str(f.trial_fault)),
    _Obstacle(lambda f: f.tiling_fault is not None, lambda f: str(f.tiling_fault), stops_offload=False),
    _Obstacle(
        lambda f: f.attention not in SPLIT_ATTENTION,
        lambda f: f"attn_implementation='{f.attention}' cannot run apart from its layer (load the model with 'sdpa')",
        stops_offload=False,
    ),
    _Obstacle(
        lambda f: f.asks_for_attention,
        lambda f: (
            f"the model's code asks whether its attention is '{f.attention}', which one cut from its layer is not"
        ),
        stops_offload=False,
    ),
)


def check_activation_offload(requested: str) -> None:
    """Refuses unknown values of `activation_offload`.

    Raises:
        SettingsError: names the value and the ones there are.
    """
    if requested not in ACTIVATION_OFFLOAD:
        raise SettingsError(
            f"activation_offload={requested!r} is not a value. Layer inputs go to host memory (on), stay on the "
            f"device (off), or go where the longest row would not fit (auto). Set {OFFLOAD} to one of "
            f"{', '.join(ACTIVATION_OFFLOAD)}."
        )


def check_tiled_mlp(requested: int | str) -> None:
    """Refuses anything but a positive number of tokens, "auto" and "off".

    Raises:
        SettingsError: names the value.
    """
    refuse_other_spellings(TILES, requested)
    if not _is_choice_or_number(requested):
        raise SettingsError(
            f"tiled_mlp={requested!r} is not a tile. A tile of the sequence holds at least one token. Set tiled_mlp "
            "to a positive number of tokens, to 'auto', or to 'off'."
        )


def check_attention_head_groups(requested: int | str) -> None:
    """Refuses anything but a positive number of groups, "auto" and "off".

    Raises:
        SettingsError: names the value.
    """
    refuse_other_spellings(GROUPS, requested)
    if not _is_choice_or_number(requested):
        raise SettingsError(
            f"attention_head_groups={requested!r} is not a number of groups. Key/value heads are split into at least "
            "one group. Set attention_head_groups to a positive divisor of their number, to 'auto', or to 'off'."
        )


def longest_pass(
    max_completion_length: int, vllm_max_model_length: int | None, max_tokens_per_microbatch: int | str | None
) -> int:
    """Tokens that a pass has to hold: the longest row's, or the budget that is set, as far as arguments tell."""
    budget = max_tokens_per_microbatch if isinstance(max_tokens_per_microbatch, int) else 0
    return max(max_completion_length, vllm_max_model_length or 0, budget)


def resolve_long_context(requested: LongContextFields, facts: LongContextFacts, shape: ModelShape) -> LongContextPlan:
    """Turns the three fields into levers, and says why.

    Args:
        requested: the fields.
        facts: what the decision depends on.
        shape: the policy.

    Raises:
        SettingsError: a lever was asked for and cannot be served.
    """
    check_activation_offload(requested.activation_offload)
    check_tiled_mlp(requested.tiled_mlp)
    check_attention_head_groups(requested.attention_head_groups)
    levers = _levers_asked_for(requested, facts)
    candidates = [replace(levers, offload=True)]
    offload, levers = _resolve(OFFLOAD, requested.activation_offload, levers, candidates, facts, shape)
    candidates = [replace(levers, tile_tokens=tokens) for tokens in AUTO_TILE_TOKENS]
    is_auto = requested.attention_head_groups == "auto"
    with_groups = [replace(tile, num_head_groups=facts.num_key_value_heads) for tile in candidates if is_auto]
    tiles, levers = _resolve(TILES, requested.tiled_mlp, levers, candidates, facts, shape, with_groups)
    candidates = [replace(levers, num_head_groups=n) for n in _divisors(facts.num_key_value_heads)]
    groups, levers = _resolve(GROUPS, requested.attention_head_groups, levers, candidates, facts, shape)
    return LongContextPlan((offload, tiles, groups), levers)


def _is_choice_or_number(requested: int | str) -> bool:
    if isinstance(requested, str):
        return requested in ("auto", "off")
    return isinstance(requested, int) and not isinstance(requested, bool) and requested > 0


def _levers_asked_for(requested: LongContextFields, facts: LongContextFacts) -> MemoryLevers:
    """What the user turned on; refuses what cannot be served."""
    tiles, groups = requested.tiled_mlp, requested.attention_head_groups
    if requested.activation_offload == "on":
        _refuse_if_any(f"{OFFLOAD}='on'", OFFLOAD, _obstacles(facts, is_offload=True))
    if isinstance(tiles, int):
        _refuse_if_any(f"{TILES}={tiles}", TILES, _obstacles(facts))
    if isinstance(groups, int):
        _refuse_if_any(f"{GROUPS}={groups}", GROUPS, _obstacles(facts))
        if facts.num_key_value_heads % groups:
            choices = ", ".join(map(str, _divisors(facts.num_key_value_heads)))
            raise SettingsError(
                f"{GROUPS}={groups} does not divide the policy's {facts.num_key_value_heads} key/value heads. Groups "
                f"of unequal size would not be the memory that was asked for. Set {GROUPS} to one of {choices}, or "
                "to 'auto'."
            )
    return MemoryLevers(
        requested.activation_offload == "on",
        tiles if isinstance(tiles, int) else None,
        groups if isinstance(groups, int) else None,
    )


def _obstacles(facts: LongContextFacts, *, is_offload: bool = False) -> list[str]:
    """Why a lever cannot be served, one line each; empty if it can."""
    relevant = [obstacle for obstacle in _OBSTACLES if obstacle.stops_offload or not is_offload]
    return [obstacle.reason(facts) for obstacle in relevant if obstacle.applies(facts)]


def _refuse_if_any(setting: str, name: str, obstacles: list[str]) -> None:
    if obstacles:
        raise SettingsError(
            f"{setting} was asked for, but {'; '.join(obstacles)}. The layers could not be run again as they ran in "
            f"forward. Change these settings, or set {name}='auto', which leaves the lever off where it cannot run."
        )


def _resolve(
    name: str,
    requested: int | str,
    levers: MemoryLevers,
    candidates: Sequence[MemoryLevers],
    facts: LongContextFacts,
    shape: ModelShape,
    with_later_levers: Sequence[MemoryLevers] = (),
) -> tuple[ResolvedSetting, MemoryLevers]:
    """One field's row, and `levers` with the first candidate that lets the longest pass fit, if need be.

    Alone, or with the levers that are resolved later; else the last.

    Args:
        name: the field.
        requested: its value.
        levers: what is on already, this field's lever if the user turned it on.
        candidates: what "auto" may choose from, the cheapest first.
        facts: what the decision depends on.
        shape: the policy.
        with_later_levers: the candidates with the most that later fields can add.
    """
    if requested != "auto":
        return ResolvedSetting(name, str(requested), "set by you"), levers
    if facts.device_type != "cuda" or not facts.bf16:
        where = "on the CPU" if facts.device_type != "cuda" else "without bf16"
        return ResolvedSetting(name, "off", f"turned on for bf16 on CUDA only, and this runs {where}"), levers
    if obstacles := _obstacles(facts, is_offload=name == OFFLOAD):
        return ResolvedSetting(name, "off", "; ".join(obstacles)), levers
    without, longest = tokens_that_fit(facts.free_bytes, 0, shape, levers), facts.longest_pass_tokens
    if without >= longest:
        reason = f"memory for {without:,} tokens is free, and {longest:,} have to fit"
        return ResolvedSetting(name, "off", reason), levers
    rooms = [(tokens_that_fit(facts.free_bytes, 0, shape, candidate), candidate) for candidate in candidates]
    later = [tokens_that_fit(facts.free_bytes, 0, shape, candidate) for candidate in with_later_levers]
    rescued = [pair for pair, room in zip(rooms, later, strict=False) if room >= longest]
    room, chosen = next((pair for pair in rooms if pair[0] >= longest), (*rescued, rooms[-1])[0])
    if room <= without:
        reason = f"{longest:,} tokens have to fit, memory for {without:,} is free, and this would not add any"
        return ResolvedSetting(name, "off", reason), levers
    reason = f"{longest:,} tokens have to fit; memory is free for {without:,} without it, for {room:,} with it"
    return ResolvedSetting(name, _value(name, chosen), reason if room >= longest else f"{reason}: too few"), chosen


def _value(name: str, levers: MemoryLevers) -> str:
    values = {OFFLOAD: "on", TILES: str(levers.tile_tokens), GROUPS: str(levers.num_head_groups)}
    return values[name]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]

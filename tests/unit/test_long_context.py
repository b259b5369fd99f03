"""Which levers long rows turn on, in which order, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import HfArgumentParser

from trl_budget import BudgetGRPOConfig, SettingsError
from trl_budget.activation_memory import MemoryLevers, ModelShape, tokens_that_fit
from trl_budget.long_context import (
    LongContextFacts,
    LongContextFields,
    LongContextPlan,
    longest_pass,
    resolve_long_context,
)

SHAPE = ModelShape(
    num_layers=36,
    hidden=2560,
    intermediate=9728,
    query_width=4096,
    key_width=1024,
    vocabulary=151_936,
    element_bytes=2,
    checkpoints=True,
)
GIB = 2**30
CARD = 16 * GIB
NONE, OFFLOAD, TILES = MemoryLevers(), MemoryLevers(True), MemoryLevers(True, 8192)
NUMBERS = ("tiled_mlp", "attention_head_groups")


def facts_of(**changes: Any) -> LongContextFacts:
    defaults: dict[str, Any] = {
        "device_type": "cuda",
        "bf16": True,
        "gradient_checkpointing": True,
        "longest_pass_tokens": 10**9,
        "free_bytes": CARD,
        "num_key_value_heads": 8,
    }
    return LongContextFacts(**{**defaults, **changes})


def plan(requested: dict[str, Any] | None = None, **facts: Any) -> LongContextPlan:
    return resolve_long_context(LongContextFields(**requested or {}), facts_of(**facts), SHAPE)


def fits(levers: MemoryLevers) -> int:
    return tokens_that_fit(CARD, 0, SHAPE, levers)


def groups(number: int) -> MemoryLevers:
    return MemoryLevers(True, 8192, number)


@pytest.mark.parametrize(
    ("longest", "levers"),
    [
        (1, NONE),
        (fits(NONE), NONE),
        (fits(NONE) + 1, OFFLOAD),
        (fits(OFFLOAD), OFFLOAD),
        (fits(OFFLOAD) + 1, TILES),
        (fits(TILES), TILES),
        (fits(TILES) + 1, groups(2)),
        (fits(groups(2)), groups(2)),
        (fits(groups(2)) + 1, groups(4)),
        (fits(groups(4)), groups(4)),
        (10**9, MemoryLevers(True, 2048, 8)),
    ],
)
def test_levers_come_one_by_one_as_the_longest_row_needs_them(longest: int, levers: MemoryLevers) -> None:
    assert plan(longest_pass_tokens=longest).levers == levers


def test_the_rows_say_what_is_on_and_why() -> None:
    rows = plan(longest_pass_tokens=fits(OFFLOAD) + 1).settings
    assert [(row.name, row.value) for row in rows] == [
        ("activation_offload", "on"),
        ("tiled_mlp", "8192"),
        ("attention_head_groups", "off"),
    ]
    assert f"{fits(OFFLOAD) + 1:,} tokens" in rows[1].reason
    assert f"for {fits(OFFLOAD):,} without it, for {fits(TILES):,} with it" in rows[1].reason
    assert f"memory for {fits(TILES):,} tokens is free" in rows[2].reason


@pytest.mark.parametrize("tokens", [4096, 2048])
def test_a_tile_is_smaller_where_a_larger_one_would_fill_the_card(tokens: int) -> None:
    """At 30,000 tokens a card for which the tile, and not attention, decides."""
    free = 4 * GIB
    while tokens_that_fit(free, 0, SHAPE, MemoryLevers(True, tokens, 8)) < 30_000:
        free += 2**20
    assert tokens_that_fit(free, 0, SHAPE, MemoryLevers(True, 2 * tokens, 8)) < 30_000
    assert plan(free_bytes=free, longest_pass_tokens=30_000).levers.tile_tokens == tokens


def test_a_row_that_fits_with_no_lever_is_told() -> None:
    assert all(row.reason.endswith("too few") for row in plan().settings)
    assert not any("too few" in row.reason for row in plan(longest_pass_tokens=fits(TILES)).settings[1:])


@pytest.mark.parametrize("facts", [{"device_type": "cpu"}, {"bf16": False}])
def test_auto_leaves_every_bit_where_rounding_is_not_given_up_already(facts: dict[str, Any]) -> None:
    resolved = plan(**facts)
    assert resolved.levers == NONE
    assert all("bf16 on CUDA only" in row.reason for row in resolved.settings)


OBSTACLES = [
    ({"trains_nothing": True}, "no weight of the policy requires a gradient"),
    ({"gradient_checkpointing": False}, "gradient_checkpointing=False"),
    ({"parallelism": "FSDP"}, "FSDP"),
    ({"num_devices": 2}, "2 devices"),
    ({"is_split_over_devices": True}, "device map"),
    ({"is_multimodal": True}, "images"),
    ({"router_loss": True}, "router"),
    ({"torch_compile": True}, "torch_compile"),
    ({"trial_fault": "a layer differs by 0.5"}, "a layer differs by 0.5"),
]
SPLIT_ONLY = [
    ({"draws_random_numbers": True}, "random numbers"),
    ({"tiling_fault": "a tile differs by 0.5"}, "a tile differs by 0.5"),
    ({"attention": "eager"}, "attn_implementation='eager'"),
    ({"attention": "flash_attention_2"}, "attn_implementation='flash_attention_2'"),
    ({"asks_for_attention": True}, "asks whether its attention is 'sdpa'"),
]
ASKED = [("activation_offload", "on"), ("tiled_mlp", 4096), ("attention_head_groups", 4)]


@pytest.mark.parametrize(("facts", "reason"), OBSTACLES)
def test_what_cannot_run_again_keeps_auto_off_and_says_why(facts: dict[str, Any], reason: str) -> None:
    resolved = plan(**facts)
    assert resolved.levers == NONE
    assert all(reason in row.reason for row in resolved.settings)


@pytest.mark.parametrize(("facts", "reason"), OBSTACLES)
@pytest.mark.parametrize(("field", "value"), ASKED)
def test_what_cannot_run_again_is_refused_where_it_was_asked_for(
    field: str, value: Any, facts: dict[str, Any], reason: str
) -> None:
    with pytest.raises(SettingsError) as error:
        plan({field: value}, **facts)
    assert reason in str(error.value) and field in str(error.value).split(". ")[-1]


@pytest.mark.parametrize(("facts", "reason"), SPLIT_ONLY)
def test_what_cannot_run_in_parts_stops_what_splits_layers_and_not_the_offload(
    facts: dict[str, Any], reason: str
) -> None:
    resolved = plan(**facts)
    assert resolved.levers == OFFLOAD
    assert all(reason in row.reason for row in resolved.settings[1:])
    assert plan({"activation_offload": "on"}, **facts).levers == OFFLOAD
    for field, value in ASKED[1:]:
        with pytest.raises(SettingsError, match=reason):
            plan({field: value}, **facts)


def test_what_was_asked_for_is_served_on_the_cpu_too() -> None:
    resolved = plan(dict(ASKED), device_type="cpu", bf16=False)
    assert resolved.levers == MemoryLevers(True, 4096, 4)
    assert [row.value for row in resolved.settings] == ["on", "4096", "4"]
    assert {row.reason for row in resolved.settings} == {"set by you"}


def test_what_was_turned_off_stays_off_and_the_others_make_up_for_it() -> None:
    resolved = plan({"activation_offload": "off", "attention_head_groups": "off"})
    assert resolved.levers == MemoryLevers(False, 2048)
    assert [row.value for row in resolved.settings] == ["off", "2048", "off"]


def test_what_was_asked_for_counts_before_auto_turns_on_more() -> None:
    longest = fits(OFFLOAD) + 1
    assert plan({"tiled_mlp": 512}, longest_pass_tokens=fits(NONE)).levers == MemoryLevers(False, 512)
    assert plan({"attention_head_groups": 8}, longest_pass_tokens=longest).levers.num_head_groups == 8


def test_a_lever_that_would_add_no_tokens_is_left_off() -> None:
    """Groups alone: the MLP of a whole row holds more than attention's backward."""
    resolved = plan({"tiled_mlp": "off"})
    assert resolved.levers == OFFLOAD
    assert "would not add any" in resolved.settings[2].reason


def test_a_full_card_turns_nothing_on() -> None:
    assert plan(free_bytes=0).levers == NONE


def test_one_key_value_head_is_not_split() -> None:
    assert plan(num_key_value_heads=1).levers == MemoryLevers(True, 2048)


@pytest.mark.parametrize("number", [3, 5, 16])
def test_groups_that_do_not_divide_the_heads_are_refused_with_those_that_do(number: int) -> None:
    with pytest.raises(SettingsError, match=rf"attention_head_groups={number} .*one of 1, 2, 4, 8"):
        plan({"attention_head_groups": number})


@pytest.mark.parametrize("number", [1, 2, 4, 8])
def test_groups_that_divide_the_heads_are_served(number: int) -> None:
    assert plan({"attention_head_groups": number}).levers.num_head_groups == number


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("value", [0, -1, 1.5, True, False, None, "on", "many", "-8", "", "2048.0", [8]])
def test_anything_but_a_positive_number_auto_and_off_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=field):
        plan({field: value})


@pytest.mark.parametrize("value", ["maybe", "", True, 1, None])
def test_unknown_values_of_the_offload_are_refused_by_name(value: Any) -> None:
    with pytest.raises(SettingsError, match="auto, on, off"):
        plan({"activation_offload": value})


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((256, None, "auto"), 256),
        ((256, 4096, "auto"), 4096),
        ((8192, 4096, None), 8192),
        ((256, 4096, 24_576), 24_576),
    ],
)
def test_the_longest_pass_is_the_longest_that_an_argument_allows(arguments: tuple[Any, ...], expected: int) -> None:
    assert longest_pass(*arguments) == expected


@settings(max_examples=100, deadline=None, derandomize=True)
@given(free=st.integers(0, 80 * GIB), longest=st.integers(1, 300_000), heads=st.integers(1, 16))
def test_auto_never_leaves_a_row_out_that_some_choice_of_its_would_fit(free: int, longest: int, heads: int) -> None:
    chosen = plan(free_bytes=free, longest_pass_tokens=longest, num_key_value_heads=heads).levers
    divisors = [None, *(n for n in range(2, heads + 1) if heads % n == 0)]
    ladder = [NONE, OFFLOAD, *(MemoryLevers(True, 2048, n) for n in divisors)]
    room = [tokens_that_fit(free, 0, SHAPE, levers) for levers in ladder]
    if max(room) >= longest:
        assert tokens_that_fit(free, 0, SHAPE, chosen) >= longest


# Config


def parse(folder: Any, *words: str) -> BudgetGRPOConfig:
    arguments = ["--output_dir", str(folder), "--use_cpu", "--bf16", "False", "--report_to", "none"]
    return HfArgumentParser(BudgetGRPOConfig).parse_args_into_dataclasses([*arguments, *words])[0]


def test_the_command_line_sets_the_levers(tmp_path: Any) -> None:
    config = parse(tmp_path, "--activation_offload", "on", "--tiled_mlp", "2048", "--attention_head_groups", "8")
    assert (config.activation_offload, config.tiled_mlp, config.attention_head_groups) == ("on", 2048, 8)
    assert type(config.tiled_mlp) is type(config.attention_head_groups) is int


def test_the_command_line_takes_the_words_too(tmp_path: Any) -> None:
    default, off = parse(tmp_path), parse(tmp_path, "--tiled_mlp", "off", "--attention_head_groups", "auto")
    assert (default.activation_offload, default.tiled_mlp, default.attention_head_groups) == ("auto", "auto", "auto")
    assert (off.tiled_mlp, off.attention_head_groups) == ("off", "auto")


def test_none_is_off(tmp_path: Any) -> None:
    settings = {"use_cpu": True, "bf16": False, "report_to": "none", "tiled_mlp": None, "attention_head_groups": None}
    config = BudgetGRPOConfig(str(tmp_path), **settings)
    assert (config.tiled_mlp, config.attention_head_groups) == ("off", "off")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("activation_offload", "maybe"),
        ("tiled_mlp", "0"),
        ("tiled_mlp", "on"),
        ("attention_head_groups", 0),
        ("attention_head_groups", "-2"),
    ],
)
def test_bad_values_fail_when_the_config_is_made(tmp_path: Any, field: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=field):
        BudgetGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", **{field: value})


def test_every_fact_that_stops_a_lever_is_in_a_test() -> None:
    tested = {name for facts, _ in (*OBSTACLES, *SPLIT_ONLY) for name in facts}
    optional = {f.name for f in dataclasses.fields(LongContextFacts) if f.default is not dataclasses.MISSING}
    assert optional <= tested

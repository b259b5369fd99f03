"""The plan of passes under random rows, the layout and budget settings, and the memory prediction behind `auto`."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import HfArgumentParser

from trl_budget import BudgetGRPOConfig, SettingsError
from trl_budget.activation_memory import RESERVE_BYTES, ModelShape, tokens_that_fit
from trl_budget.packing import PassCost, Passes, RowLength, plan_passes
from trl_budget.row_layout import (
    MAX_AUTO_TOKENS,
    MERGED,
    MIN_AUTO_TOKENS,
    SPLIT,
    UNTOUCHED,
    WHOLE,
    LayoutFacts,
    packing_obstacles,
    regrouping,
    resolve_layout,
    resolve_max_tokens,
)

# Plans


@dataclasses.dataclass(frozen=True)
class Case:
    """What `plan_passes` is asked, by hypothesis."""

    lengths: list[list[RowLength]]
    budget: int
    cost: PassCost
    size: int
    whole: bool

    def plan(self) -> list[Passes]:
        options: dict[str, Any] = {"micro_batch_size": self.size, "keeps_micro_batches_whole": self.whole}
        return plan_passes(self.lengths, self.budget, self.cost, **options)

    def micro_batches(self, rows: tuple[int, ...]) -> set[int]:
        return {row // self.size for row in rows}


@st.composite
def cases(draw: Any, *, longest: float = 4.0, whole: bool | None = None, packed: bool | None = None) -> Case:
    """Ranks of equally many rows: tiny, equal, spread, and up to `longest` budgets long; some are empty."""
    size, micro_batches = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    budget = draw(st.integers(1, 200))
    top = max(1, int(budget * longest))
    tokens = st.one_of(st.integers(0, top), st.integers(0, min(3, top)), st.just(top // 4))
    row = st.builds(lambda total, share: (int(total * share), total - int(total * share)), tokens, st.floats(0, 1))
    rank = st.lists(row, min_size=size * micro_batches, max_size=size * micro_batches)
    return Case(
        draw(st.lists(rank, min_size=1, max_size=4)),
        budget,
        PassCost(draw(st.booleans()) if packed is None else packed, draw(st.sampled_from([0.0, 1e-4, 1e-2]))),
        size,
        draw(st.booleans()) if whole is None else whole,
    )


@given(cases())
def test_every_row_is_in_exactly_one_pass_of_its_rank(case: Case) -> None:
    for rows, passes in zip(case.lengths, case.plan(), strict=True):
        assert sorted(row for rows_of_pass in passes for row in rows_of_pass) == list(range(len(rows)))


@given(cases())
def test_no_pass_exceeds_the_budget_unless_it_is_one_row_or_one_uncut_micro_batch(case: Case) -> None:
    for lengths, passes in zip(case.lengths, case.plan(), strict=True):
        for rows in passes:
            widest = [lengths[row] for row in rows]
            packed = sum(max(1, p + c) for p, c in widest)
            padded = len(rows) * (max(p for p, _ in widest) + max(c for _, c in widest)) if rows else 0
            is_unit = len(rows) == 1 or (case.whole and len(case.micro_batches(rows)) == 1)
            assert is_unit or (packed if case.cost.is_packed else padded) <= case.budget


def test_a_rank_that_is_given_one_pass_more_cuts_the_micro_batch_that_exceeds_the_budget() -> None:
    empty, full = (0, 0), (0, 5)
    ranks = [[empty, empty, empty, empty, full, full], [empty, empty, empty, full, empty, empty]]
    case = Case(ranks, budget=5, cost=PassCost(is_packed=True), size=2, whole=False)
    tokens = [case.cost.tokens([ranks[1][row] for row in rows]) for rows in case.plan()[1]]
    assert len(tokens) == 3 and max(tokens) <= 5


@given(cases())
def test_every_rank_has_as_many_passes_and_rows_in_each(case: Case) -> None:
    plans = case.plan()
    assert len({len(passes) for passes in plans}) == 1
    assert all(rows for passes in plans for rows in passes)


@given(cases())
def test_several_ranks_run_their_long_passes_at_the_same_time(case: Case) -> None:
    """The ranks meet in each pass: no order of a rank's passes makes the sum of the longest ones shorter."""
    if len(case.lengths) == 1:
        return
    for lengths, passes in zip(case.lengths, case.plan(), strict=True):
        times = [sum(case.cost.of_row(lengths[row]) for row in rows) for rows in passes]
        assert times == sorted(times, reverse=True)


@given(cases())
def test_rows_of_a_pass_ascend_and_the_plan_is_the_same_each_time(case: Case) -> None:
    plans = case.plan()
    assert all(list(rows) == sorted(rows) for passes in plans for rows in passes)
    assert case.plan() == plans


@given(cases(whole=True))
def test_a_micro_batch_that_must_stay_whole_is_never_cut(case: Case) -> None:
    for passes in case.plan():
        found = [case.micro_batches(rows) for rows in passes]
        assert sum(map(len, found)) == len(set().union(*found))


@given(cases())
def test_a_rank_runs_no_more_passes_than_the_busiest_rank_alone(case: Case) -> None:
    alone = [len(dataclasses.replace(case, lengths=[rows]).plan()[0]) for rows in case.lengths]
    assert len(case.plan()[0]) == max(alone)


def first_fit_decreasing(lengths: list[RowLength], budget: int, cost: PassCost) -> int:
    """Passes that the textbook heuristic needs, with its own arithmetic of tokens."""

    def held(rows: list[RowLength]) -> int:
        if cost.is_packed:
            return sum(max(1, p + c) for p, c in rows)
        return len(rows) * (max(p for p, _ in rows) + max(c for _, c in rows))

    passes: list[list[RowLength]] = []
    for row in sorted(lengths, key=sum, reverse=True):
        for rows in passes:
            if held([*rows, row]) <= budget:
                rows.append(row)
                break
        else:
            passes.append([row])
    return len(passes)


@settings(max_examples=300)
@given(cases(longest=4.0, whole=False, packed=True))
def test_packed_rows_that_fit_need_at_most_one_pass_more_than_first_fit_decreasing(case: Case) -> None:
    """One more, since passes of equal cost leave smaller gaps than full ones."""
    for lengths in case.lengths:
        passes = dataclasses.replace(case, lengths=[lengths]).plan()[0]
        assert len(passes) <= first_fit_decreasing(lengths, case.budget, case.cost) + 1


@settings(max_examples=300)
@given(cases(longest=1.0, whole=False, packed=False))
def test_padded_rows_that_fit_need_at_most_half_more_passes_than_first_fit_decreasing(case: Case) -> None:
    """Half more and one, since only the last pass is looked at: rows of one length stay together."""
    for lengths in case.lengths:
        passes = dataclasses.replace(case, lengths=[lengths]).plan()[0]
        assert len(passes) <= 1.5 * first_fit_decreasing(lengths, case.budget, case.cost) + 1


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), min_size=64, max_size=160),
    st.sampled_from([0.0, 1e-3, 1e-2]),
)
def test_passes_of_many_small_rows_cost_nearly_the_same(lengths: list[RowLength], quadratic: float) -> None:
    """Largest first leaves the dearest pass at most one row above the cheapest."""
    cost = PassCost(is_packed=True, quadratic=quadratic)
    passes = plan_passes([lengths], 400, cost, micro_batch_size=1)[0]
    tokens = [[sum(lengths[row]) for row in rows] for rows in passes]
    spent = [sum(n + quadratic * n * n for n in rows) for rows in tokens]
    dearest_row = max(n + quadratic * n * n for rows in tokens for n in rows)
    # A pass without room passes its row on: one more row of slack.
    assert max(spent) - min(spent) <= 2 * dearest_row


def test_a_packed_pass_one_token_above_the_budget_is_not_made() -> None:
    """19 tokens would fit two passes of 10, but 7, 7 and 4 do not."""
    lengths = [(0, 7), (7, 0), (2, 2), (0, 1)]
    passes = plan_passes([lengths], 10, PassCost(is_packed=True), micro_batch_size=1)[0]
    assert sorted(sum(sum(lengths[row]) for row in rows) for rows in passes) in ([4, 7, 8], [5, 7, 7])


def test_micro_batches_stay_together_where_that_costs_no_pass() -> None:
    passes = plan_passes([[(1, 4)] * 8], 20, PassCost(is_packed=True), micro_batch_size=4)[0]
    assert passes == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_a_pass_of_padded_rows_is_as_wide_as_its_longest_prompt_and_longest_completion() -> None:
    lengths = [(1, 9), (9, 1)]
    assert PassCost(is_packed=False).tokens(lengths) == 2 * (9 + 9)
    assert PassCost(is_packed=True).tokens(lengths) == 20
    assert plan_passes([lengths], 35, PassCost(is_packed=False), micro_batch_size=1)[0] == [(0,), (1,)]


def test_a_rank_of_tiny_rows_gets_as_many_passes_as_the_long_one() -> None:
    plans = plan_passes([[(5, 5)] * 4, [(1, 1)] * 4], 10, PassCost(is_packed=True), micro_batch_size=2)
    assert [len(passes) for passes in plans] == [4, 4]
    assert all(rows for rows in plans[1])
    whole = PassCost(is_packed=True)
    plans = plan_passes([[(5, 5)] * 4, [(1, 1)] * 4], 20, whole, micro_batch_size=4, keeps_micro_batches_whole=True)
    assert plans == [[(0, 1, 2, 3)], [(0, 1, 2, 3)]]


def test_spreading_over_more_passes_cuts_no_micro_batch_that_must_stay_whole() -> None:
    plans = plan_passes(
        [[(5, 5)] * 4, [(1, 1)] * 4],
        20,
        PassCost(is_packed=True),
        micro_batch_size=2,
        keeps_micro_batches_whole=True,
    )
    assert plans == [[(0, 1), (2, 3)], [(0, 1), (2, 3)]]


def test_passes_are_balanced_by_the_cost_of_attention_not_by_tokens() -> None:
    """At 0.1 n^2 a row of 100 tokens costs more than fifteen of 10: it gets a pass of its own."""
    lengths = [(0, 100)] + [(0, 10)] * 15
    passes = plan_passes([lengths], 200, PassCost(is_packed=True, quadratic=0.1), micro_batch_size=1)[0]
    assert passes == [(0,), tuple(range(1, 16))]


def test_no_rows_need_no_pass() -> None:
    assert plan_passes([], 10, PassCost(is_packed=True), micro_batch_size=1) == []


# Layout

OBSTACLES: dict[str, tuple[dict[str, Any], str]] = {
    "images": ({"is_multimodal": True}, "takes images"),
    "eager": ({"attention": "eager"}, "attn_implementation='eager'"),
    "flex": ({"attention": "flex_attention"}, "attn_implementation='flex_attention'"),
    "own attention": ({"routes_attention": False}, "exchangeable attention"),
    "state space": ({"is_stateful": True}, "state space would carry"),
    "linear layers": ({"layer_types": frozenset({"linear_attention"})}, "linear_attention would carry"),
    "chunked layers": ({"layer_types": frozenset({"chunked_attention"})}, "chunked_attention would carry"),
    "positions that are not rotary": ({"rope_types": frozenset()}, "positions are not rotary"),
    "attention asked for by name": ({"asks_for_attention": True}, "asks whether its attention is 'sdpa'"),
    "adapters by row": ({"row_adapters": "X-LoRA"}, "X-LoRA looks at each row"),
    "soft cap": ({"soft_cap": True}, "soft-capped"),
    "dropout": ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
    "window": ({"has_window": True, "serves_windows": False}, "sliding window"),
    "two head sizes": ({"head_dims": frozenset({64, 128})}, "[64, 128]"),
    "large heads": ({"head_dims": frozenset({512})}, "[512]"),
    "odd heads": ({"head_dims": frozenset({60})}, "[60]"),
    "virtual tokens": ({"learns_prompt": True}, "virtual tokens"),
    "hub kernels": ({"uses_hub_kernels": True}, "set USE_HUB_KERNELS=NO"),
    "trial": ({"packing_fault": "in a trial run it broke"}, "in a trial run it broke"),
}
# What moves a row's log-probs with the columns around it.
MOVING: dict[str, tuple[dict[str, Any], str]] = {
    "dynamic": ({"rope_types": frozenset({"dynamic"})}, "rope_type dynamic depends"),
    "longrope": ({"rope_types": frozenset({"default", "longrope"})}, "rope_type longrope depends"),
    "scaled positions": (
        {"scales_positions": ("floor_scale", 8192)},
        "floor_scale scales queries by absolute position",
    ),
    "noise": ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0"),
    "batch norm": ({"training_mode_layers": ("model.norm",)}, "model.norm computes over all columns"),
    "a trial": ({"padding_fault": "in a trial run padding moved a row"}, "in a trial run padding moved a row"),
    "no trial, layers that convolve": (
        {"is_padding_tried": False, "layer_types": frozenset({"conv"})},
        "could not be tried in fp32",
    ),
    "no trial, other positions": (
        {"is_padding_tried": False, "rope_types": frozenset()},
        "could not be tried in fp32",
    ),
    "no trial, a state": ({"is_padding_tried": False, "is_stateful": True}, "could not be tried in fp32"),
}
STOCK_ONLY: dict[str, tuple[dict[str, Any], str]] = {
    "DataParallel": ({"num_devices": 2}, "over 2 devices"),
    "FSDP": ({"parallelism": "FSDP"}, "launched with FSDP"),
}
every_obstacle = pytest.mark.parametrize(("facts", "reason"), OBSTACLES.values(), ids=OBSTACLES)
every_moving = pytest.mark.parametrize(("facts", "reason"), MOVING.values(), ids=MOVING)
every_stock = pytest.mark.parametrize(("facts", "reason"), STOCK_ONLY.values(), ids=STOCK_ONLY)


def facts_of(**differences: Any) -> LayoutFacts:
    return LayoutFacts(**{"device_type": "cuda", "bf16": True, **differences})


@every_obstacle
def test_auto_trims_with_the_reason(facts: dict[str, Any], reason: str) -> None:
    row = resolve_layout("auto", facts_of(**facts))
    assert (row.name, row.value) == ("padding_free", "trimmed")
    assert reason in row.reason


@every_moving
def test_auto_keeps_the_rows_of_stock_where_their_columns_count(facts: dict[str, Any], reason: str) -> None:
    row = resolve_layout("auto", facts_of(**facts))
    assert (row.name, row.value) == ("padding_free", "stock")
    assert reason in row.reason


@every_moving
@pytest.mark.parametrize("requested", ["on", "off"])
def test_moving_rows_whose_columns_count_is_refused(requested: str, facts: dict[str, Any], reason: str) -> None:
    with pytest.raises(SettingsError, match=f"padding_free='{requested}'") as error:
        resolve_layout(requested, facts_of(**facts))
    assert reason in str(error.value) and "padding_free='auto'" in str(error.value)


@pytest.mark.parametrize("facts", [{}, {"layer_types": frozenset({"sliding_attention"})}])
def test_a_plain_model_needs_no_trial_in_fp32(facts: dict[str, Any]) -> None:
    assert resolve_layout("auto", facts_of(is_padding_tried=False, **facts)).value == "packed"


def test_hooks_of_the_user_keep_the_rows_of_stock_but_for_one_who_says_on() -> None:
    facts = facts_of(hooks=("a hook of yours (steer)",))
    row = resolve_layout("auto", facts)
    assert row.value == "stock"
    assert "a hook of yours (steer)" in row.reason and "padding_free='on'" in row.reason
    assert resolve_layout("on", facts).value == "packed"
    assert resolve_layout("off", facts).value == "trimmed"


@every_obstacle
def test_on_is_refused_with_the_reason(facts: dict[str, Any], reason: str) -> None:
    with pytest.raises(SettingsError, match="padding_free='on'") as error:
        resolve_layout("on", facts_of(**facts))
    assert reason in str(error.value) and "padding_free='auto'" in str(error.value)


@every_obstacle
def test_each_obstacle_stands_alone(facts: dict[str, Any], reason: str) -> None:
    assert len(packing_obstacles(facts_of(**facts))) == 1


@every_stock
@pytest.mark.parametrize("requested", ["auto", "off", "stock"])
def test_ranks_that_share_a_batch_keep_stocks_rows(requested: str, facts: dict[str, Any], reason: str) -> None:
    assert resolve_layout(requested, facts_of(**facts)).value == "stock"
    with pytest.raises(SettingsError, match=reason):
        resolve_layout("on", facts_of(**facts))


def test_all_failed_obstacles_are_named() -> None:
    with pytest.raises(SettingsError) as error:
        resolve_layout("on", facts_of(soft_cap=True, learns_prompt=True))
    assert "soft-capped" in str(error.value) and "virtual tokens" in str(error.value)


@pytest.mark.parametrize(
    ("requested", "facts", "value"),
    [
        ("auto", {}, "packed"),
        ("auto", {"bf16": False}, "stock"),
        ("auto", {"device_type": "cpu"}, "stock"),
        ("auto", {"torch_compile": True}, "stock"),
        ("auto", {"attention": "flash_attention_2"}, "packed"),
        ("auto", {"attention": "flash_attention_2", "asks_for_attention": True}, "packed"),
        ("auto", {"serves_windows": False}, "packed"),
        ("auto", {"has_window": True}, "packed"),
        ("on", {"device_type": "cpu", "bf16": False}, "packed"),
        ("on", {"torch_compile": True}, "packed"),
        ("off", {}, "trimmed"),
        ("off", {"soft_cap": True}, "trimmed"),
        ("stock", {}, "stock"),
    ],
)
def test_what_the_layout_becomes(requested: str, facts: dict[str, Any], value: str) -> None:
    assert resolve_layout(requested, facts_of(**facts)).value == value


@pytest.mark.parametrize("value", ["packed", "On", "", True, None])
def test_unknown_layouts_are_refused_by_name(value: Any) -> None:
    with pytest.raises(SettingsError, match="auto, on, off, stock"):
        resolve_layout(value, facts_of())


# Budget


def never() -> int:
    raise AssertionError("memory is looked at for 'auto' only")


@pytest.mark.parametrize("budget", [1, 24_576, 10**9])
def test_a_number_is_the_budget(budget: int) -> None:
    row, tokens = resolve_max_tokens(budget, facts_of(), never)
    assert tokens == budget and row.value == str(budget)


@pytest.mark.parametrize("budget", [0, -1, 1.5, True, False, "many", "1e4", "-8", "", [8]])
def test_anything_else_is_refused_by_name(budget: Any) -> None:
    with pytest.raises(SettingsError, match="max_tokens_per_microbatch"):
        resolve_max_tokens(budget, facts_of(), never)


@pytest.mark.parametrize(
    ("facts", "allowed", "reason"),
    [
        ({}, MERGED, "merged and split"),
        ({"top_entropy_quantile": 0.2}, WHOLE, "top_entropy_quantile=0.2"),
        ({"top_entropy_quantile": 0.2, "num_processes": 2}, UNTOUCHED, "one micro-batch over 2 processes"),
        ({"gradient_hooks": ("a gradient hook of yours (clamp)",)}, UNTOUCHED, "clamp) is called once for each"),
        ({"steps_in_backward": "galore_adamw_layerwise"}, UNTOUCHED, "optim='galore_adamw_layerwise' steps"),
        ({"training_mode_layers": ("model.norm",)}, UNTOUCHED, "model.norm computes over all rows"),
        ({"observers": ("training_step",)}, SPLIT, "training_step may look at each micro-batch's loss"),
        ({"observers": ("Skip.on_substep_end",), "top_entropy_quantile": 0.2}, UNTOUCHED, "Skip.on_substep_end"),
        ({"router_loss": True}, UNTOUCHED, "router"),
        ({"is_multimodal": True}, UNTOUCHED, "images"),
        ({"overrides": ("_compute_loss",)}, UNTOUCHED, "_compute_loss"),
        ({"parallelism": "DeepSpeed"}, UNTOUCHED, "DeepSpeed"),
        ({"num_devices": 2}, UNTOUCHED, "2 devices"),
        ({"router_loss": True, "top_entropy_quantile": 0.2}, UNTOUCHED, "router"),
    ],
)
def test_what_may_be_regrouped(facts: dict[str, Any], allowed: str, reason: str) -> None:
    assert regrouping(facts_of(**facts))[0] == allowed
    row, tokens = resolve_max_tokens(100, facts_of(**facts), never)
    assert (tokens is None) == (allowed == UNTOUCHED)
    assert reason in row.reason


@pytest.mark.parametrize("facts", [{"bf16": False}, {"device_type": "cpu"}, {"torch_compile": True}])
def test_auto_keeps_stocks_passes_where_rounding_would_change(facts: dict[str, Any]) -> None:
    assert resolve_max_tokens("auto", facts_of(**facts), never)[1] is None


@given(st.integers(0, 10**7))
def test_auto_never_exceeds_the_room_beyond_its_floor(room: int) -> None:
    tokens = resolve_max_tokens("auto", facts_of(), lambda: room)[1]
    assert tokens is not None and tokens % 1024 == 0
    assert MIN_AUTO_TOKENS <= tokens <= MAX_AUTO_TOKENS
    assert tokens <= max(room, MIN_AUTO_TOKENS)


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--max_tokens_per_microbatch", "24576"], 24_576),
        (["--max_tokens_per_microbatch", "none"], None),
        (["--max_tokens_per_microbatch", "None"], None),
        (["--max_tokens_per_microbatch", "auto"], "auto"),
        ([], "auto"),
    ],
)
def test_the_command_line_sets_the_budget(tmp_path: Any, words: list[str], value: Any) -> None:
    arguments = ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "False", "--report_to", "none"]
    (config,) = HfArgumentParser(BudgetGRPOConfig).parse_args_into_dataclasses([*arguments, *words])
    assert config.max_tokens_per_microbatch == value
    assert type(config.max_tokens_per_microbatch) is type(value)


def test_the_command_line_sets_layout_and_reuse(tmp_path: Any) -> None:
    arguments = ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "False", "--report_to", "none"]
    words = ["--padding_free", "off", "--reuse_old_logprobs", "require"]
    (config,) = HfArgumentParser(BudgetGRPOConfig).parse_args_into_dataclasses([*arguments, *words])
    assert (config.padding_free, config.reuse_old_logprobs) == ("off", "require")


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_tokens_per_microbatch", "0"), ("padding_free", "maybe"), ("reuse_old_logprobs", "on")],
)
def test_bad_values_fail_when_the_config_is_made(tmp_path: Any, field: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=field):
        BudgetGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", **{field: value})


# Memory

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
SIZES = [f.name for f in dataclasses.fields(ModelShape) if f.name != "checkpoints"]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("checkpoints", [True, False])
@given(factor=st.integers(2, 9))
def test_a_larger_model_fits_fewer_tokens(size: str, checkpoints: bool, factor: int) -> None:
    small = dataclasses.replace(SHAPE, checkpoints=checkpoints)
    large = dataclasses.replace(small, **{size: vars(small)[size] * factor})
    free = 10**12
    assert 0 < tokens_that_fit(free, 0, large) < tokens_that_fit(free, 0, small)


@given(free=st.integers(0, 10**11), more=st.integers(0, 10**10), coming=st.integers(0, 10**10))
def test_more_memory_fits_more_tokens_and_gradients_take_from_it(free: int, more: int, coming: int) -> None:
    fits = tokens_that_fit(free, coming, SHAPE)
    assert 0 <= fits <= tokens_that_fit(free + more, coming, SHAPE)
    assert tokens_that_fit(free, coming + more, SHAPE) <= fits
    assert tokens_that_fit(free + more, coming + more, SHAPE) == fits


def test_checkpointing_keeps_one_input_a_layer() -> None:
    assert SHAPE.kept_bytes_per_token == 36 * 2560 * 2
    assert dataclasses.replace(SHAPE, checkpoints=False).kept_bytes_per_token > 10 * SHAPE.kept_bytes_per_token


def test_a_full_card_has_room_for_nothing() -> None:
    assert tokens_that_fit(RESERVE_BYTES, 0, SHAPE) == 0


def test_attention_costs_as_much_as_a_layers_matrices_at_the_length_that_flops_say() -> None:
    """Qwen3-4B: 2 * 4096 multiply-adds per earlier position, half of them masked, against 100.9 M per token."""
    matrices = 2560 * 4096 * 2 + 2560 * 1024 * 2 + 3 * 2560 * 9728
    length = 1 / SHAPE.quadratic_cost
    assert length * 4096 == pytest.approx(matrices)


def test_a_row_above_the_budget_does_not_give_every_short_row_a_pass() -> None:
    passes = plan_passes([[(0, 16_384)] + [(0, 50)] * 8], 1024, PassCost(is_packed=True), micro_batch_size=1)[0]
    assert len(passes) == 2


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("lengths", [[[(20, 0), (0, 0), (0, 0)]], [[(5, 0)] * 3, [(0, 0)] * 3]])
def test_rows_without_a_token_leave_no_pass_empty(lengths: list[list[tuple[int, int]]], is_packed: bool) -> None:
    plans = plan_passes(lengths, 5, PassCost(is_packed), micro_batch_size=1)
    assert all(rows for passes in plans for rows in passes)


def test_a_pass_without_a_token_can_be_cut() -> None:
    lengths = [[(0, 1), (0, 1), (0, 0)], [(0, 0), (0, 0), (0, 1)]]
    plans = plan_passes(lengths, 1, PassCost(is_packed=False), micro_batch_size=1)
    assert all(rows for passes in plans for rows in passes)

"""A number of tokens that is not written as a number is refused with the number to write, in every field alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import HfArgumentParser

from trl_budget import BudgetGRPOConfig, SettingsError
from trl_budget.long_context import check_attention_head_groups, check_tiled_mlp
from trl_budget.row_layout import check_lm_head_chunk_size, check_max_tokens
from trl_budget.whole_numbers import meant_number, number_or_word

CHECKS = {
    "max_tokens_per_microbatch": check_max_tokens,
    "tiled_mlp": check_tiled_mlp,
    "attention_head_groups": check_attention_head_groups,
    "lm_head_chunk_size": check_lm_head_chunk_size,
}
FIELDS = pytest.mark.parametrize("field", CHECKS)
MEANT = [
    ("8k", 8192),
    ("8K", 8192),
    ("2k", 2048),
    ("8 k", 8192),
    ("8Ki", 8192),
    ("1.5k", 1536),
    ("1m", 1048576),
    ("8,192", 8192),
    ("1,048,576", 1048576),
    ("8'192", 8192),
    ("8 192", 8192),
    ("8192.0", 8192),
    ("1e4", 10000),
    (8192.0, 8192),
]


def config(folder: Path, **settings: Any) -> BudgetGRPOConfig:
    return BudgetGRPOConfig(str(folder), use_cpu=True, bf16=False, report_to="none", **settings)


def parsed(folder: Path, *words: str) -> BudgetGRPOConfig:
    arguments = ["--output_dir", str(folder), "--use_cpu", "--bf16", "False", "--report_to", "none"]
    return HfArgumentParser(BudgetGRPOConfig).parse_args_into_dataclasses([*arguments, *words])[0]


@FIELDS
@pytest.mark.parametrize(("value", "number"), MEANT, ids=repr)
def test_another_spelling_is_refused_with_the_number_to_write(
    tmp_path: Path, field: str, value: Any, number: int
) -> None:
    with pytest.raises(SettingsError) as error:
        config(tmp_path, **{field: value})
    assert str(error.value).startswith(f"{field}={value!r} is no whole number")
    assert f"Set {field}={number} if that is what you meant." in str(error.value)


@FIELDS
@pytest.mark.parametrize("value", ["8k", "8192", 8192.0], ids=repr)
def test_what_is_set_after_the_config_was_made_is_refused_alike(field: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=f"Set {field}=8192"):
        CHECKS[field](value)


@FIELDS
@pytest.mark.parametrize("value", ["8192", "8_192", " 8192 ", 8192], ids=repr)
def test_what_python_reads_as_a_number_is_one(tmp_path: Path, field: str, value: Any) -> None:
    setting = vars(config(tmp_path, **{field: value}))[field]
    assert (setting, type(setting)) == (8192, int)


@FIELDS
@pytest.mark.parametrize(("word", "number"), [("8192", 8192), ("8_192", 8192)])
def test_the_command_line_takes_the_same_numbers(tmp_path: Path, field: str, word: str, number: int) -> None:
    setting = vars(parsed(tmp_path, f"--{field}", word))[field]
    assert (setting, type(setting)) == (number, int)


@FIELDS
def test_the_command_line_says_what_to_write(tmp_path: Path, field: str) -> None:
    with pytest.raises(SettingsError, match=f"Set {field}=8192"):
        parsed(tmp_path, f"--{field}", "8k")


@FIELDS
@pytest.mark.parametrize("value", ["none", "None"])
def test_the_word_none_is_none(tmp_path: Path, field: str, value: str) -> None:
    off = {"tiled_mlp": "off", "attention_head_groups": "off"}
    assert vars(config(tmp_path, **{field: value}))[field] == off.get(field)


@FIELDS
@pytest.mark.parametrize("value", ["much", "", "-8k", "0k", "8.192", "k", "1,5", "8,19", 1.5, 0, -1, True], ids=repr)
def test_what_says_no_number_is_refused_as_such(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=field) as error:
        config(tmp_path, **{field: value})
    assert "that is what you meant" not in str(error.value)


@given(st.integers(1, 10**9))
def test_every_spelling_of_a_number_means_it(number: int) -> None:
    assert meant_number(f"{number:,}") == meant_number(f"{number}.0") == meant_number(str(number)) == number
    assert meant_number(f"{number}k") == 1024 * number
    assert number_or_word(str(number)) == number_or_word(f"{number:_}") == number


@pytest.mark.parametrize("value", [None, True, 8192, float("nan"), float("inf"), ["8k"], "8k8", "k8", "8kk"], ids=repr)
def test_what_is_no_other_spelling_means_nothing(value: object) -> None:
    assert meant_number(value) is None

"""A misspelt or removed field says what to write, and the configuration is a dataclass as before."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from tiny import BASE_SETTINGS
from transformers import HfArgumentParser
from trl import GRPOConfig, TrlParser

from trl_budget import BudgetGRPOConfig, SettingsError, UnknownFieldError
from trl_budget.field_names import REMOVED, refuse_unknown

FIELDS = {field.name for field in dataclasses.fields(BudgetGRPOConfig)}


def config(folder: Path, **settings: Any) -> BudgetGRPOConfig:
    return BudgetGRPOConfig(str(folder), **{**BASE_SETTINGS, **settings})


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("max_token_per_microbatch", "max_tokens_per_microbatch"),
        ("max_tokens_per_micro_batch", "max_tokens_per_microbatch"),
        ("optimiser_placement", "optimizer_placement"),
        ("activation_offloading", "activation_offload"),
        ("num_generation", "num_generations"),
        ("max_completion_len", "max_completion_length"),
    ],
)
def test_a_misspelt_field_names_the_nearest(tmp_path: Path, name: str, nearest: str) -> None:
    with pytest.raises(UnknownFieldError) as error:
        config(tmp_path, **{name: 1})
    assert f"BudgetGRPOConfig has no field '{name}'. " in str(error.value)
    assert f"For {name}, did you mean {nearest}?" in str(error.value)


def test_the_error_is_what_python_raises_and_what_this_library_raises(tmp_path: Path) -> None:
    for kind in (TypeError, SettingsError):
        with pytest.raises(kind, match="no_such_thing_at_all"):
            config(tmp_path, no_such_thing_at_all=1)


def test_every_unknown_field_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(UnknownFieldError) as error:
        config(tmp_path, tiled_mlps=1, warmup_ratio=0.1, zzzzzz=2)
    for words in ("'tiled_mlps', 'warmup_ratio', 'zzzzzz'", "mean tiled_mlp?", "set warmup_steps", "Leave zzzzzz out"):
        assert words in str(error.value)


@pytest.mark.parametrize("name", sorted(REMOVED))
def test_a_removed_field_says_what_to_do_and_names_fields_that_exist(tmp_path: Path, name: str) -> None:
    assert name not in FIELDS
    with pytest.raises(UnknownFieldError) as error:
        config(tmp_path, **{name: 1})
    assert REMOVED[name] in str(error.value)
    replacements = re.findall(r"\bset ([a-z_]+)|\b(vllm_[a-z_]+)", REMOVED[name])
    for replacement in {"".join(found) for found in replacements} - {"the"}:
        assert replacement in FIELDS


def test_what_is_known_passes() -> None:
    refuse_unknown("C", ["a", "b"], ("a", "b", "c"))
    refuse_unknown("C", [], ())


# The dataclass


def test_the_signature_and_the_fields_are_the_generated_ones() -> None:
    parameters = inspect.signature(BudgetGRPOConfig).parameters
    assert list(parameters) == [field.name for field in dataclasses.fields(BudgetGRPOConfig) if field.init]
    assert parameters["tiled_mlp"].default == "auto"
    assert set(inspect.signature(GRPOConfig).parameters) < set(parameters)
    assert BudgetGRPOConfig.__init__.__name__ == "__init__" and BudgetGRPOConfig.__init__.__doc__ is None


def test_copies_pickles_and_replacements_keep_every_value(tmp_path: Path) -> None:
    args = config(tmp_path, tiled_mlp="4096", max_tokens_per_microbatch=None)
    twins = [copy.copy(args), copy.deepcopy(args), pickle.loads(pickle.dumps(args))]
    for twin in twins:
        assert type(twin) is BudgetGRPOConfig and twin.to_dict() == args.to_dict()
    assert dataclasses.asdict(args)["tiled_mlp"] == 4096
    assert dataclasses.replace(args, generation_batch_size=None, tiled_mlp=2048).tiled_mlp == 2048
    with pytest.raises(UnknownFieldError, match="did you mean tiled_mlp"):
        dataclasses.replace(args, generation_batch_size=None, tiled_mpl=2048)


def test_positional_arguments_and_wrong_ones_are_as_before(tmp_path: Path) -> None:
    assert BudgetGRPOConfig(str(tmp_path), use_cpu=True, bf16=False).output_dir == str(tmp_path)
    with pytest.raises(TypeError, match="multiple values"):
        BudgetGRPOConfig(str(tmp_path), output_dir=str(tmp_path))


def test_subclasses_with_fields_and_with_an_init_of_their_own_work(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class WithField(BudgetGRPOConfig):
        extra: int = 3

    class WithInit(BudgetGRPOConfig):
        def __init__(self, extra: int, **settings: Any) -> None:
            super().__init__(**settings)
            self.extra = extra

    settings = {"output_dir": str(tmp_path), **BASE_SETTINGS}
    assert WithField(**settings, extra=4).extra == 4 and WithInit(5, **settings).extra == 5
    with pytest.raises(TypeError, match="extras"):
        WithField(**settings, extras=4)
    with pytest.raises(UnknownFieldError, match="did you mean tiled_mlp"):
        WithInit(5, **settings, tiled_mpl=4)


@pytest.mark.parametrize("parser", [HfArgumentParser, TrlParser])
def test_the_command_line_sets_fields_and_names_those_that_it_does_not_know(tmp_path: Path, parser: Any) -> None:
    arguments = ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "False", "--tiled_mlp", "4096"]
    [args] = parser(BudgetGRPOConfig).parse_args_into_dataclasses(arguments)
    assert args.tiled_mlp == 4096
    with pytest.raises(ValueError, match="max_token_per_microbatch"):
        parser(BudgetGRPOConfig).parse_args_into_dataclasses([*arguments, "--max_token_per_microbatch", "8192"])


def test_a_dictionary_of_settings_names_the_nearest_field(tmp_path: Path) -> None:
    settings = {"output_dir": str(tmp_path), **BASE_SETTINGS, "lm_head_chunks": 4096}
    with pytest.raises(UnknownFieldError, match="did you mean lm_head_chunk_size"):
        BudgetGRPOConfig(**settings)

"""Kernels of the hub, which transformers 5.25 turns on by itself, keep rows unpacked and layers whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from tiny import make_trainer, tiny_model

from trl_budget import BudgetGRPOConfig, BudgetGRPOTrainer, SettingsError
from trl_budget.upstream import uses_hub_kernels


def test_they_are_found_in_any_part_of_a_wrapped_model() -> None:
    model = tiny_model()
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    assert not uses_hub_kernels(wrapped)
    model.model._use_kernels = True  # what kernelizing leaves; the kernels themselves need an accelerator
    assert uses_hub_kernels(wrapped)


@pytest.mark.parametrize("setting", [{"padding_free": "on"}, {"tiled_mlp": 8}, {"attention_head_groups": 1}], ids=str)
def test_what_was_asked_for_is_refused_with_the_way_out(setting: dict[str, object], tmp_path: Path) -> None:
    model = tiny_model()
    model._use_kernels = True
    with pytest.raises(SettingsError, match=r"hub kernels replace .*\(set USE_HUB_KERNELS=NO, or use_kernels=False"):
        make_trainer(BudgetGRPOTrainer, tmp_path, model=model, config_class=BudgetGRPOConfig, **setting)

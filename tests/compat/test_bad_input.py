"""Settings that cannot work are refused before `train()`, with what happened, why, and which field to set."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from compat_pairs import budget_trainer
from peft import LoraConfig
from tiny import BASE_SETTINGS, make_trainer, save_tiny_model, tiny_model
from transformers import BitsAndBytesConfig, HfArgumentParser
from trl import GRPOTrainer

from trl_budget import BudgetGRPOConfig, BudgetGRPOTrainer, SettingsError


def assert_says(error: pytest.ExceptionInfo[BaseException], *words: str) -> None:
    """Three sentences at least, and each of the words."""
    message = str(error.value)
    assert len(re.findall(r"[.)](?: |$)", message)) >= 3, message
    for word in words:
        assert word in message, f"{word!r} is missing in: {message}"


@pytest.mark.parametrize(
    "value", ["gpu", "Host", "HOST", "", " host", None, True, 1, ["host"], {"auto": 1}, b"host"], ids=repr
)
def test_a_wrong_optimizer_placement_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(SettingsError) as error:
        BudgetGRPOConfig(str(tmp_path), **BASE_SETTINGS, optimizer_placement=value)
    assert_says(error, f"optimizer_placement={value!r}", "Set optimizer_placement to one of auto, device, host")


@pytest.mark.parametrize("value", ["gpu", None], ids=repr)
def test_a_wrong_optimizer_placement_set_later_is_refused_by_the_trainer(tmp_path: Path, value: Any) -> None:
    args = BudgetGRPOConfig(str(tmp_path), **BASE_SETTINGS)
    args.optimizer_placement = value
    with pytest.raises(SettingsError) as error:
        make_trainer(BudgetGRPOTrainer, tmp_path, trainer_kwargs={"args": args})
    assert_says(error, "optimizer_placement")


def test_a_wrong_optimizer_placement_on_the_command_line_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = HfArgumentParser(BudgetGRPOConfig)
    given = ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false", "--optimizer_placement"]
    with pytest.raises(SystemExit):
        parser.parse_args_into_dataclasses([*given, "gpu"])
    assert "optimizer_placement" in capsys.readouterr().err
    [args] = parser.parse_args_into_dataclasses([*given, "device"])
    assert args.optimizer_placement == "device"


# The model


@pytest.mark.parametrize("placement", ["auto", "host", "device"])
def test_a_model_on_the_meta_device_is_refused(tmp_path: Path, placement: str) -> None:
    with torch.device("meta"):
        model = tiny_model()
    with pytest.raises(SettingsError) as error:
        budget_trainer(tmp_path, placement, trainer_kwargs={"model": model})
    assert_says(error, "meta device", "model.embed_tokens.weight", "device_map=None")


def test_a_single_parameter_on_the_meta_device_is_refused(tmp_path: Path) -> None:
    model = tiny_model()
    model.model.norm.weight = torch.nn.Parameter(torch.empty(64, device="meta"))
    with pytest.raises(SettingsError) as error:
        budget_trainer(tmp_path, "auto", trainer_kwargs={"model": model})
    assert_says(error, "1 parameters", "model.norm.weight")


@pytest.mark.parametrize("model", [None, 3, ["gpt2"], Path("/nowhere"), {}, type], ids=repr)
def test_a_model_of_a_wrong_type_is_refused(tmp_path: Path, model: Any) -> None:
    with pytest.raises(SettingsError) as error:
        budget_trainer(tmp_path, "auto", trainer_kwargs={"model": model})
    assert_says(error, type(model).__name__, "PreTrainedModel")


@pytest.mark.parametrize("flag", ["is_quantized", "is_loaded_in_8bit", "is_loaded_in_4bit"])
def test_a_quantized_model_without_an_adapter_is_refused(tmp_path: Path, flag: str) -> None:
    model = tiny_model()
    model.is_quantized = True
    setattr(model, flag, True)
    with pytest.raises(SettingsError) as error:
        budget_trainer(tmp_path, "auto", trainer_kwargs={"model": model})
    assert_says(error, "quantized", "peft_config=LoraConfig", "quantization_config")


@pytest.mark.parametrize("placement", ["auto", "host", "device"])
def test_a_quantization_config_without_an_adapter_is_refused_before_loading(tmp_path: Path, placement: str) -> None:
    kwargs = {"model": str(tmp_path / "nothing here"), "quantization_config": BitsAndBytesConfig(load_in_4bit=True)}
    with pytest.raises(SettingsError) as error:
        budget_trainer(tmp_path, placement, trainer_kwargs=kwargs)
    assert_says(error, "quantized", "peft_config=LoraConfig")


def test_a_quantization_config_in_model_init_kwargs_is_refused_before_loading(tmp_path: Path) -> None:
    kwargs = {"model": str(tmp_path / "nothing here")}
    config = BitsAndBytesConfig(load_in_8bit=True)
    with pytest.raises(SettingsError) as error:
        budget_trainer(tmp_path, "auto", trainer_kwargs=kwargs, model_init_kwargs={"quantization_config": config})
    assert_says(error, "quantized", "peft_config=LoraConfig")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_host_with_weights_of_an_unserved_dtype_is_refused_at_construction(tmp_path: Path, dtype: torch.dtype) -> None:
    with pytest.raises(SettingsError) as error:
        budget_trainer(tmp_path, model=tiny_model(dtype))
    assert_says(error, str(dtype), "dtype='bfloat16' or 'float32'", "optimizer_placement='device'")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_auto_with_weights_of_an_unserved_dtype_trains_as_stock(tmp_path: Path, dtype: torch.dtype) -> None:
    """`auto` never refuses (placement.py): stock steps these weights where they are."""
    make_trainer(GRPOTrainer, tmp_path, model=tiny_model(dtype), max_steps=1).train()
    trainer = budget_trainer(tmp_path, "auto", model=tiny_model(dtype), max_steps=1)
    trainer.train()
    assert trainer.resolved_settings[0].value == "device"


def test_auto_with_weights_that_are_not_contiguous_trains(tmp_path: Path) -> None:
    """`auto` never refuses (placement.py)."""
    model = tiny_model()
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data.t().contiguous().t()
    budget_trainer(tmp_path, "auto", trainer_kwargs={"model": model}, max_steps=1).train()


def test_a_model_without_trainable_weights_fails_as_stock(tmp_path: Path) -> None:
    messages = []
    for base in (GRPOTrainer, BudgetGRPOTrainer):
        model = tiny_model()
        model.requires_grad_(False)
        with pytest.raises(Exception) as error:
            make_trainer(base, tmp_path, model=model, max_steps=1).train()
        messages.append((error.type, str(error.value)))
    assert messages[0] == messages[1]


# The optimizer


@pytest.mark.parametrize("optim", ["adafactor", "sgd", "adamw_8bit", "paged_adamw_32bit", "schedule_free_adamw"])
def test_host_with_an_optim_that_it_does_not_serve_is_refused(tmp_path: Path, optim: str) -> None:
    with pytest.raises(SettingsError) as error:
        budget_trainer(tmp_path, optim=optim)
    assert_says(error, f"optim='{optim}'", "set optim to one of adamw_torch_fused, adamw_torch")


def test_every_obstacle_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as error:
        budget_trainer(tmp_path, optim="adafactor", bf16_full_eval=True, fp16=True)
    assert_says(error, "optim='adafactor'", "bf16_full_eval=True", "fp16=True", "set bf16_full_eval=False")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"adam_beta1": 1.0}, ("betas",)),
        ({"adam_beta2": -0.1}, ("betas",)),
        ({"adam_epsilon": -1e-8}, ("eps",)),
        ({"weight_decay": -0.1}, ("weight_decay",)),
        ({"learning_rate": -1.0}, ("lr",)),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_adamw_hyperparameters_out_of_range_are_refused(
    tmp_path: Path, settings: dict[str, float], words: tuple[str, ...]
) -> None:
    with pytest.raises(SettingsError) as error:
        budget_trainer(tmp_path, max_steps=1, **settings).train()
    assert_says(error, *words)


def test_an_adapter_with_host_is_served_and_a_wrong_peft_config_fails_as_stock(tmp_path: Path) -> None:
    kwargs = {"peft_config": LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")}
    trainer = budget_trainer(tmp_path, trainer_kwargs=kwargs, max_steps=1)
    trainer.train()
    assert all("lora" in n for n, p in trainer.model.named_parameters() if p in trainer._host_adamw.state)
    with pytest.raises(TypeError, match="peft_config"):
        budget_trainer(tmp_path, trainer_kwargs={"peft_config": {"r": 8}})


def test_arguments_that_stock_does_not_know_fail_as_in_stock(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="optimizer_placement"):
        make_trainer(BudgetGRPOTrainer, tmp_path, trainer_kwargs={"optimizer_placement": "host"})
    with pytest.raises(TypeError, match="model"):
        BudgetGRPOTrainer()


def test_model_init_kwargs_are_restored_when_loading_fails(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    args = BudgetGRPOConfig(str(tmp_path), **BASE_SETTINGS, model_init_kwargs={"attn_implementation": "no such"})
    with pytest.raises(Exception):  # noqa: B017
        make_trainer(BudgetGRPOTrainer, tmp_path, model=folder, trainer_kwargs={"args": args})
    assert args.model_init_kwargs == {"attn_implementation": "no such"}

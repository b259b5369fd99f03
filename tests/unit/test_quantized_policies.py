"""A quantized policy is told by its method and bits, from the arguments where they say so, and refused with vLLM."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from tiny import make_trainer, save_tiny_model, tiny_model
from torch import nn
from transformers import (
    AwqConfig,
    BitsAndBytesConfig,
    FineGrainedFP8Config,
    GPTQConfig,
    Mxfp4Config,
)
from transformers.utils import is_bitsandbytes_available
from trl import GRPOConfig

from trl_budget import BudgetGRPOConfig, BudgetGRPOTrainer
from trl_budget.errors import SettingsError
from trl_budget.upstream_vllm import quantization_asked_for, quantization_of

FOUR_BITS = BitsAndBytesConfig(load_in_4bit=True)
CONFIGS: dict[str, Any] = {
    "bitsandbytes, 4 bits": FOUR_BITS,
    "bitsandbytes, 8 bits": BitsAndBytesConfig(load_in_8bit=True),
    "gptq, 4 bits": GPTQConfig(bits=4),
    "awq, 4 bits": AwqConfig(bits=4),
    "fp8": FineGrainedFP8Config(),
    "mxfp4": Mxfp4Config(),
}
ROLLOUTS: dict[str, dict[str, Any]] = {
    "colocated": {"use_vllm": True, "vllm_mode": "colocate"},
    "colocated over ranks": {"use_vllm": True, "vllm_mode": "colocate", "vllm_tensor_parallel_size": 2},
    "a server": {"use_vllm": True, "vllm_mode": "server"},
}


def arguments(tmp_path: Path, **settings: Any) -> GRPOConfig:
    return GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **settings)


@pytest.mark.parametrize("expected", CONFIGS)
@pytest.mark.parametrize("as_dict", [False, True])
def test_the_arguments_tell_method_and_bits(expected: str, as_dict: bool, tmp_path: Path) -> None:
    config = CONFIGS[expected].to_dict() if as_dict else CONFIGS[expected]
    assert quantization_asked_for("a model", arguments(tmp_path), config) == expected
    given = arguments(tmp_path, model_init_kwargs={"quantization_config": config})
    assert quantization_asked_for("a model", given, None) == expected


@pytest.mark.parametrize("bits", [4, 8])
def test_the_flags_of_before_quantization_configs_tell_too(bits: int, tmp_path: Path) -> None:
    given = arguments(tmp_path, model_init_kwargs={f"load_in_{bits}bit": True})
    assert quantization_asked_for("a model", given, None) == f"bitsandbytes, {bits} bits"


def test_what_is_dequantized_while_it_is_loaded_is_not_quantized(tmp_path: Path) -> None:
    assert quantization_asked_for("a model", arguments(tmp_path), Mxfp4Config(dequantize=True)) is None
    assert quantization_asked_for("a model", arguments(tmp_path), None) is None


@pytest.mark.parametrize("expected", CONFIGS)
@pytest.mark.parametrize("has_adapters", [False, True])
def test_a_loaded_model_tells_method_and_bits(expected: str, has_adapters: bool, tmp_path: Path) -> None:
    model: Any = tiny_model()
    if has_adapters:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    assert quantization_of(model) is None
    model.config.quantization_config = CONFIGS[expected]
    assert quantization_of(model) is None, "a model that was dequantized keeps its config in some versions"
    (model.get_base_model() if has_adapters else model).is_quantized = True
    assert quantization_of(model) == expected
    assert quantization_asked_for(model, arguments(tmp_path), None) == expected


@pytest.mark.skipif(not is_bitsandbytes_available(), reason="bitsandbytes is not installed")
@pytest.mark.parametrize(("layer", "bits"), [("Linear4bit", 4), ("Linear8bitLt", 8)])
def test_layers_of_bitsandbytes_that_the_user_put_in_tell(layer: str, bits: int) -> None:
    import bitsandbytes as bnb

    assert quantization_of(nn.Sequential(getattr(bnb.nn, layer)(8, 8))) == f"bitsandbytes, {bits} bits"


@pytest.mark.parametrize("mode", ROLLOUTS)
@pytest.mark.parametrize("given", ["argument", "model_init_kwargs", "model"])
def test_a_quantized_base_with_vllm_is_refused_before_anything_is_loaded(
    mode: str, given: str, tmp_path: Path
) -> None:
    model: Any = str(tmp_path / "nothing here")
    kwargs: dict[str, Any] = {"peft_config": LoraConfig(r=2)}
    settings = dict(ROLLOUTS[mode])
    if given == "argument":
        kwargs["quantization_config"] = FOUR_BITS
    elif given == "model_init_kwargs":
        settings["model_init_kwargs"] = {"quantization_config": FOUR_BITS}
    else:
        model = tiny_model()
        model.is_quantized, model.config.quantization_config = True, FOUR_BITS
    with pytest.raises(SettingsError, match=r"quantized \(bitsandbytes, 4 bits\).*use_vllm=False"):
        make_trainer(
            BudgetGRPOTrainer, tmp_path, model, config_class=BudgetGRPOConfig, trainer_kwargs=kwargs, **settings
        )


def test_a_checkpoint_that_is_quantized_is_refused_before_the_engine_starts(tmp_path: Path) -> None:
    """Only the file tells: its config is read with the weights."""

    class Trainer(BudgetGRPOTrainer):
        def _engine_class(self, **arguments: Any) -> Any:
            raise AssertionError("the engine was started")

        def _capture_masters(self, model: nn.Module) -> None:
            base = model.get_base_model()
            base.is_quantized, base.config.quantization_config = True, FOUR_BITS
            super()._capture_masters(model)

    with pytest.raises(SettingsError, match=r"quantized \(bitsandbytes, 4 bits\)"):
        make_trainer(
            Trainer,
            tmp_path / "out",
            save_tiny_model(tmp_path / "model"),
            config_class=BudgetGRPOConfig,
            trainer_kwargs={"peft_config": LoraConfig(r=2, target_modules=["q_proj"])},
            **ROLLOUTS["colocated"],
        )


def test_a_quantized_base_without_vllm_is_not_refused_for_it(tmp_path: Path) -> None:
    model: Any = tiny_model()
    model.is_quantized, model.config.quantization_config = True, FOUR_BITS
    model.hf_quantizer = SimpleNamespace(is_trainable=True, is_qat_trainable=False, quantization_config=FOUR_BITS)
    make_trainer(
        BudgetGRPOTrainer,
        tmp_path,
        get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])),
        config_class=BudgetGRPOConfig,
    )

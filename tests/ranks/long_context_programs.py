"""What each rank runs in the tests of the long-context levers over several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peft import LoraConfig
from tiny import comparable_log, make_trainer, tiny_model, weights
from torch import Tensor
from trainer_programs import KeepWeights, rank

from trl_budget import BudgetGRPOConfig, BudgetGRPOTrainer, SettingsError

SHAPE = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
OFF = {"activation_offload": "off", "tiled_mlp": "off", "attention_head_groups": "off"}
LEVERS = {"activation_offload": "on", "tiled_mlp": 7, "attention_head_groups": 2}
PASSES = {"padding_free": "on", "max_tokens_per_microbatch": 50, "gradient_accumulation_steps": 2}
CASES: dict[str, tuple[bool, dict[str, Any]]] = {
    "full": (False, {"optimizer_sharding": "sharded", "gradient_placement": "host"}),
    "full in passes": (False, {"optimizer_sharding": "sharded", **PASSES}),
    "lora": (True, {}),
    "lora in passes": (True, PASSES),
}


def run(folder: Path, is_lora: bool, settings: dict[str, Any]) -> dict[str, Any]:
    """The log, the weights after every step and the first step's gradients, before they are clipped."""
    keep, gradients = KeepWeights(), {}

    class Watched(BudgetGRPOTrainer):
        def _clip_grad_norm(self, model: Any) -> Any:
            norm = super()._clip_grad_norm(model)
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad and not self.state.global_step:
                    gradients[name] = self.gradient_of(parameter)
            return norm

        def gradient_of(self, parameter: Any) -> Tensor:
            host = self._host_adamw
            gradient = parameter.grad if host is None else host.gradient(parameter)
            return gradient.detach().clone()

    kwargs: dict[str, Any] = {"callbacks": [keep]}
    if is_lora:
        kwargs["peft_config"] = LoraConfig(r=4, target_modules="all-linear")
    trainer = make_trainer(
        Watched,
        folder,
        tiny_model(seed=0 if is_lora else rank(), **SHAPE),
        BudgetGRPOConfig,
        kwargs,
        **{"gradient_checkpointing": True, "max_completion_length": 10, "max_steps": 3, "learning_rate": 1e-5},
        **settings,
    )
    trainer.train()
    store = trainer._layer_passes._store
    return {
        "log": comparable_log(trainer),
        "history": keep.history,
        "weights": weights(trainer),
        "gradients": gradients,
        "wrapped": type(trainer.model_wrapped).__name__,
        "left": 0 if settings["activation_offload"] == "off" else store.used_bytes + store.device_bytes,
    }


def cases(folder: Path) -> dict[Any, Any]:
    """Every case with the levers and without."""
    results: dict[Any, Any] = {}
    for name, (is_lora, settings) in CASES.items():
        for levers in (OFF, LEVERS):
            results[name, levers["activation_offload"]] = run(folder, is_lora, {**settings, **levers})
    return results


def one_rank_differs(folder: Path) -> str:
    """What each rank is told where the layers of rank 1 alone cannot be cut."""
    model = tiny_model(**SHAPE)
    if rank() == 1:
        for parameter in model.model.layers[0].parameters():
            parameter.register_hook(lambda gradient: gradient)
    settings = {"gradient_checkpointing": True, **LEVERS}
    try:
        make_trainer(BudgetGRPOTrainer, folder, None, BudgetGRPOConfig, {"model": model}, **settings)
    except SettingsError as error:
        return str(error)
    raise AssertionError("the levers were served")

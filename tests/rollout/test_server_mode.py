"""vLLM on a server: TRL's own generation and sync, under this trainer as under stock's. A client fakes the server.

The client holds an engine that generates with the weights it was sent, so that a sync that is lost shows in tokens.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl.generation.vllm_generation as vllm_generation
from fake_vllm import FakeLLM
from peft import LoraConfig
from tiny import comparable_log, make_trainer, max_difference, save_tiny_model, weights
from trl import GRPOTrainer
from trl.generation.vllm_generation import extract_logprobs

from trl_budget import BudgetGRPOConfig, BudgetGRPOTrainer

LORA = {"peft_config": LoraConfig(r=4, target_modules="all-linear")}


class FakeClient:
    """`VLLMClient` as far as TRL 1.16 uses it, with the server in this process."""

    folder = ""

    def __init__(self, **_: Any) -> None:
        self.engine = FakeLLM({"model": self.folder, "max_model_len": 64})
        self.num_updates = 0

    def init_communicator(self, device: torch.device) -> None:
        pass

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(self, metadata: list[Any], named_params: Any) -> None:
        pairs = list(named_params)
        assert [(n, str(p.dtype).removeprefix("torch."), list(p.shape)) for n, p in pairs] == metadata
        self.engine.model.load_weights(pairs)
        self.num_updates += 1

    def reset_prefix_cache(self) -> None:
        self.engine.reset_prefix_cache()

    def generate(self, prompts: list[list[int]], n: int, max_tokens: int, **_: Any) -> dict[str, Any]:
        rows = [{"prompt_token_ids": prompt} for prompt in prompts for _ in range(n)]
        outputs = self.engine.generate(rows, SimpleNamespace(max_tokens=max_tokens), use_tqdm=False)
        log_probs, token_ids = extract_logprobs(outputs)
        completions = [list(output.outputs[0].token_ids) for output in outputs]
        found = {"completion_ids": completions, "logprobs": log_probs, "logprob_token_ids": token_ids}
        return {"prompt_ids": prompts, **found}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = save_tiny_model(tmp_path / "model")
    monkeypatch.setattr(FakeClient, "folder", path)
    monkeypatch.setattr(vllm_generation, "VLLMClient", FakeClient)
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda: True)
    return path


def trained(trainer_class: type, folder: str, out: Path, **settings: Any) -> Any:
    if trainer_class is BudgetGRPOTrainer:
        settings["config_class"] = BudgetGRPOConfig
    server = {"use_vllm": True, "vllm_mode": "server", "max_steps": 3, "model_init_kwargs": {"dtype": "float32"}}
    trainer = make_trainer(trainer_class, out, **{"model": folder, **server, **settings})
    trainer.train()
    assert trainer.vllm_generation.vllm_client.num_updates >= 3
    return trainer


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"optimizer_placement": "host"},
        {"gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 12},
        {"trainer_kwargs": LORA, "learning_rate": 1e-2},
        {"beta": 0.1, "vllm_importance_sampling_correction": False},
    ],
    ids=["default", "host", "accumulation", "adapters", "reference"],
)
def test_training_equals_stocks_beside_the_same_server(settings: dict[str, Any], folder: str, tmp_path: Path) -> None:
    stock_settings = {name: value for name, value in settings.items() if name != "optimizer_placement"}
    stock = trained(GRPOTrainer, folder, tmp_path / "stock", **stock_settings)
    ours = trained(BudgetGRPOTrainer, folder, tmp_path / "ours", **settings)
    for logged, expected in zip(comparable_log(ours), comparable_log(stock), strict=True):
        # Taken of the update's log-probs where they are reused; with adapters its last bit has differed on one CPU.
        mean, rounding = "sampling/importance_sampling_ratio/mean", 1e-6 if "trainer_kwargs" in settings else 0.0
        assert logged.pop(mean, 1.0) == pytest.approx(expected.pop(mean, 1.0), rel=rounding, abs=0.0)
        assert logged == expected
    assert max_difference(weights(ours), weights(stock)) == 0.0


def test_the_generation_is_trls_own_and_nothing_leaves_the_card(folder: str, tmp_path: Path) -> None:
    ours = trained(BudgetGRPOTrainer, folder, tmp_path)
    rows = {row.name: row for row in ours.resolved_settings}
    assert "park_policy_during_rollout" not in rows and "share_vllm_weights" not in rows
    assert type(ours.vllm_generation) is vllm_generation.VLLMGeneration

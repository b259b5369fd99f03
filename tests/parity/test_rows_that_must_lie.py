"""Rows whose log-probs depend on where they lie: what `auto` picks for a GPU trains as stock does, in fp32 here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gpu_choices import choose_as_on_cuda, row
from packed_models import rows, score
from peft import LoraConfig, PeftConfig, XLoraConfig
from test_token_budget import OursRecording, StockRecording, relative, uneven_rollouts
from tiny import byte_tokenizer, make_trainer, max_difference, save_tiny_model, tiny_model, weights
from transformers import set_seed
from trl import GRPOTrainer

from trl_budget import BudgetGRPOConfig, BudgetGRPOTrainer, SettingsError
from trl_budget.micro_batch import RowsModel

SIZES: dict[str, Any] = {
    "vocab_size": 258,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
    "initializer_range": 0.1,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 14, "factor": 4.0}


@pytest.fixture(autouse=True)
def _on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_as_on_cuda(monkeypatch)


def gpt2() -> Any:
    set_seed(0)
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    sizes = {"vocab_size": 258, "n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ids, **no_dropout))


def built(family: str, **settings: Any) -> Any:
    set_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **settings}, attn_implementation="sdpa")
    return getattr(transformers, f"{family}ForCausalLM")(config)


def longrope() -> Any:
    return built(
        "Phi3",
        max_position_embeddings=64,
        original_max_position_embeddings=14,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **LONG},
    )


MODELS: dict[str, tuple[Any, str]] = {
    "learned positions": (gpt2, "in a trial run padding moved a row's log-probs"),
    "longrope": (longrope, "rope_type longrope depends on the batch's length"),
    "dynamic": (
        lambda: built(
            "Llama",
            head_dim=16,
            max_position_embeddings=16,
            rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        ),
        "rope_type dynamic depends on the batch's length",
    ),
    "queries scaled by position": (
        lambda: built("Ministral3", head_dim=16, rope_parameters={**YARN, "llama_4_scaling_beta": 0.1}),
        "llama_4_scaling_beta scales queries by absolute position, from 16 on",
    ),
    "a recurrence that lets padding in": (
        lambda: built(
            "RecurrentGemma",
            head_dim=16,
            lru_width=64,
            attention_window_size=64,
            block_types=["recurrent", "attention"],
        ),
        "in a trial run padding moved a row's log-probs",
    ),
}


def pair(tmp_path: Path, model: Any, kwargs: dict[str, Any] | None = None, **settings: Any) -> tuple[Any, Any]:
    """Stock and ours after two steps on rows of many lengths."""
    kwargs = {"rollout_func": uneven_rollouts, **(kwargs or {})}
    settings = {"max_steps": 2, "gradient_accumulation_steps": 4, "max_completion_length": 16, **settings}
    trainers = []
    for kind, trainer_class in (("stock", StockRecording), ("ours", OursRecording)):
        given = {**kwargs, **({"peft_config": kwargs["peft_config"]()} if "peft_config" in kwargs else {})}
        config = {} if kind == "stock" else {"config_class": BudgetGRPOConfig}
        set_seed(0)
        trainer = make_trainer(trainer_class, tmp_path / kind, model, trainer_kwargs=given, **config, **settings)
        trainer.train()
        trainers.append(trainer)
    return trainers[0], trainers[1]


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_whose_columns_count_trains_on_the_rows_of_stock(tmp_path: Path, kind: str) -> None:
    make, reason = MODELS[kind]
    stock, ours = pair(tmp_path, make())
    assert row(ours, "padding_free").value == "stock"
    assert reason in row(ours, "padding_free").reason
    assert relative(ours.gradients[0], stock.gradients[0]) < 1e-6


def test_old_log_probs_and_the_update_have_the_same_frequencies(tmp_path: Path) -> None:
    settings = {"num_iterations": 2, "epsilon": 0.01, "learning_rate": 1e-9}
    stock, ours = pair(tmp_path, longrope(), **settings)
    assert [entry["clip_ratio/region_mean"] for entry in ours.state.log_history[:2]] == [0.0, 0.0]
    assert relative(ours.gradients[1], stock.gradients[1]) < 1e-6


def lora(**settings: Any) -> PeftConfig:
    return LoraConfig(r=4, task_type="CAUSAL_LM", target_modules="all-linear", init_lora_weights=False, **settings)


def test_activated_lora_is_trimmed_and_never_packed(tmp_path: Path) -> None:
    invocation = byte_tokenizer()(" ")["input_ids"]
    stock, ours = pair(
        tmp_path, tiny_model(), {"peft_config": lambda: lora(alora_invocation_tokens=invocation), "rollout_func": None}
    )
    assert row(ours, "padding_free").value == "trimmed"
    assert "activated LoRA (alora_invocation_tokens) looks at each row" in row(ours, "padding_free").reason
    assert relative(ours.gradients[0], stock.gradients[0]) < 1e-6


def test_plain_lora_is_packed(tmp_path: Path) -> None:
    stock, ours = pair(tmp_path, tiny_model(), {"peft_config": lora})
    assert row(ours, "padding_free").value == "packed"
    assert relative(ours.gradients[0], stock.gradients[0]) < 1e-5


def test_x_lora_is_named() -> None:
    from trl_budget.upstream_observers import row_adapters

    model = tiny_model()
    model.peft_config = {"default": XLoraConfig(hidden_size=64, adapters={})}
    assert row_adapters(model) == "X-LoRA"
    model.peft_config = {"default": lora()}
    assert row_adapters(model) is None


def test_rows_with_adapters_of_their_own_keep_their_places() -> None:
    calls: list[Any] = []

    def model(**inputs: Any) -> Any:
        calls.append(inputs)
        raise LookupError

    ids = torch.ones(2, 8, dtype=torch.long)
    batch = {"input_ids": ids, "attention_mask": ids, "labels": ids}
    for more in ({}, {"adapter_names": ["a", "b"]}):
        with pytest.raises(LookupError):
            RowsModel(model, 4, is_packed=True)(**batch, **more)
    assert [call["input_ids"].shape for call in calls] == [(1, 16), (2, 8)]


def noise(trainer: Any) -> list[tuple[int, float]]:
    """Columns and largest value of NEFTune's noise in every forward of the update."""
    seen: list[tuple[int, float]] = []
    embedding = trainer.model.get_input_embeddings()

    def look(module: Any, inputs: Any, output: torch.Tensor) -> None:
        if module.training and torch.is_grad_enabled():
            clean = torch.nn.functional.embedding(inputs[0], module.weight)
            seen.append((output.shape[1], (output - clean).detach().abs().max().item()))

    class Hook(transformers.TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:  # after NEFTune's own hook
            embedding.register_forward_hook(look)

    trainer.add_callback(Hook())
    trainer.train()
    return seen


def test_neftune_draws_the_noise_of_stock(tmp_path: Path) -> None:
    settings = {"neftune_noise_alpha": 5.0, "max_steps": 1, "gradient_accumulation_steps": 2}
    stock = noise(make_trainer(GRPOTrainer, tmp_path / "stock", **settings))
    trainer = make_trainer(BudgetGRPOTrainer, tmp_path / "ours", config_class=BudgetGRPOConfig, **settings)
    assert "neftune_noise_alpha=5.0" in row(trainer, "padding_free").reason
    ours = noise(trainer)
    bound = 5.0 / (stock[0][0] * 64) ** 0.5
    for columns, largest in (*stock, *ours):
        assert columns == stock[0][0]
        assert 0.99 * bound < largest <= bound


def steering(column: int) -> Any:
    vector = torch.linspace(-1, 1, 64)

    def steer(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return output
        output = output.clone()
        output[:, column] = output[:, column] + vector
        return output

    return steer


class Steer(transformers.TrainerCallback):
    def on_train_begin(self, *_: Any, model: Any, **__: Any) -> None:
        model.model.layers[0].register_forward_hook(steering(-17))


@pytest.mark.parametrize("when", ["before the trainer is built", "after it", "when training begins"])
def test_a_hook_that_counts_on_columns_sees_those_of_stock(tmp_path: Path, when: str) -> None:
    trainers = []
    for kind, trainer_class in (("stock", StockRecording), ("ours", OursRecording)):
        model = tiny_model()
        if when == "before the trainer is built":
            model.model.layers[0].register_forward_hook(steering(-17))
        config = {} if kind == "stock" else {"config_class": BudgetGRPOConfig}
        kwargs = {"rollout_func": uneven_rollouts, "model": model}
        settings = {"max_steps": 1, "gradient_accumulation_steps": 2, "max_completion_length": 16}
        trainer = make_trainer(trainer_class, tmp_path / kind, trainer_kwargs=kwargs, **config, **settings)
        if when == "when training begins":
            trainer.add_callback(Steer())
        if when == "after it":
            model.model.layers[0].register_forward_hook(steering(-17))
        trainer.train()
        trainers.append(trainer)
    stock, ours = trainers
    assert row(ours, "padding_free").value == "stock"
    assert "a hook of yours (steering.<locals>.steer)" in row(ours, "padding_free").reason
    assert relative(ours.gradients[0], stock.gradients[0]) < 1e-6


def test_a_change_before_training_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(BudgetGRPOTrainer, tmp_path, config_class=BudgetGRPOConfig, max_steps=1)
    assert row(trainer, "padding_free").value == "packed"
    trainer.model.model.layers[0].register_forward_hook(steering(-1))
    capsys.readouterr()
    trainer.train()
    printed = capsys.readouterr().out
    assert "trl-budget: changed since the trainer was built\n  padding_free" in printed
    trainer.train()
    assert "changed since" not in capsys.readouterr().out


def test_a_user_who_says_on_packs_in_spite_of_a_hook(tmp_path: Path) -> None:
    model = tiny_model()
    model.model.layers[0].register_forward_hook(steering(-1))
    settings = {"max_steps": 1, "padding_free": "on", "config_class": BudgetGRPOConfig}
    trainer = make_trainer(BudgetGRPOTrainer, tmp_path, trainer_kwargs={"model": model}, **settings)
    assert row(trainer, "padding_free").value == "packed"


@pytest.mark.parametrize("padding_free", ["on", "off"])
def test_rows_that_would_move_are_refused_where_they_are_asked_for(tmp_path: Path, padding_free: str) -> None:
    with pytest.raises(SettingsError, match=f"padding_free='{padding_free}' was asked for, but .*"):
        make_trainer(
            BudgetGRPOTrainer, tmp_path, gpt2(), config_class=BudgetGRPOConfig, padding_free=padding_free, max_steps=1
        )


def test_a_refused_trainer_leaves_the_model_its_own_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl_budget.upstream_model.packing_fault", lambda *_, **__: "in a trial run it broke")
    model = tiny_model()
    settings = {"config_class": BudgetGRPOConfig, "max_steps": 1}
    with pytest.raises(SettingsError, match="in a trial run it broke"):
        make_trainer(BudgetGRPOTrainer, tmp_path, trainer_kwargs={"model": model}, padding_free="on", **settings)
    assert model.config._attn_implementation == "sdpa"
    trainer = make_trainer(BudgetGRPOTrainer, tmp_path, trainer_kwargs={"model": model}, **settings)
    assert row(trainer, "padding_free").value == "trimmed"
    assert model.config._attn_implementation == "sdpa"


def test_generation_and_files_have_the_attention_of_the_user(tmp_path: Path) -> None:
    names: list[str] = []

    def rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
        names.append(trainer.model.config._attn_implementation)
        return uneven_rollouts(prompts, trainer)

    stock, ours = pair(tmp_path, tiny_model(), {"rollout_func": rollouts})
    assert set(names) == {"sdpa"}
    assert row(ours, "padding_free").value == "packed"
    assert relative(ours.gradients[1], stock.gradients[1]) < 1e-4
    ours.save_model(str(tmp_path / "saved"))
    assert "trl_budget" not in (tmp_path / "saved" / "config.json").read_text()


def test_a_model_that_asks_for_its_attention_keeps_it(tmp_path: Path) -> None:
    sizes = {**SIZES, "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 4}
    sizes |= {"num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 2, "kv_lora_rank": 16}
    sizes |= {"q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "n_group": 1}
    sizes |= {"topk_group": 1, "index_topk": 10, "index_n_heads": 2, "index_head_dim": 16}
    config = transformers.GlmMoeDsaConfig(**sizes, attn_implementation="sdpa")
    set_seed(0)
    stock, ours = pair(tmp_path, transformers.GlmMoeDsaForCausalLM(config), max_steps=1)
    assert "asks whether its attention is 'sdpa'" in row(ours, "padding_free").reason
    assert ours.model.config._attn_implementation == "sdpa"
    assert relative(ours.gradients[0], stock.gradients[0]) < 1e-5


def test_a_model_without_attention_heads_builds_and_trains(tmp_path: Path) -> None:
    set_seed(0)
    sizes = {"vocab_size": 258, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2}
    config = transformers.MambaConfig(**sizes, pad_token_id=0, eos_token_id=1, bos_token_id=None)
    stock, ours = pair(tmp_path, transformers.MambaForCausalLM(config), max_steps=1)
    assert "linear_attention would carry one row into the next" in row(ours, "padding_free").reason
    assert relative(ours.gradients[0], stock.gradients[0]) < 1e-5
    assert max_difference(weights(ours), weights(stock)) < 1e-4


def test_adapters_on_a_4_bit_base_are_packed(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    folder = save_tiny_model(tmp_path / "model")
    ids, mask = rows((9, 1, 2, 3), (6, 10, 9, 4))
    found = []
    for kind, trainer_class in (("stock", GRPOTrainer), ("ours", BudgetGRPOTrainer)):
        four_bits = transformers.BitsAndBytesConfig(load_in_4bit=True)
        kwargs = {"peft_config": lora(), "quantization_config": four_bits}
        config = {} if kind == "stock" else {"config_class": BudgetGRPOConfig}
        set_seed(0)
        trainer = make_trainer(trainer_class, tmp_path / kind, folder, trainer_kwargs=kwargs, **config, max_steps=1)
        model = trainer.model.eval()
        with torch.no_grad():
            scored = score(RowsModel(model, 10, is_packed=True) if config else model, ids, mask, 10)[0]
        found.append(scored)
    assert row(trainer, "padding_free").value == "packed"
    expected, packed = found
    assert (packed - expected)[mask[:, -10:].bool()].abs().max() < 5e-2

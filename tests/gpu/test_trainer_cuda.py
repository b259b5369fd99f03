"""The trainer on a GPU: what is on the card, and that compute weights are the masters' cast."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tiny import byte_tokenizer, digit_dataset, make_trainer, save_tiny_model, tiny_model
from transformers import TrainerCallback
from trl import GRPOTrainer

from trl_budget import BudgetGRPOConfig, BudgetGRPOTrainer, HostAdamW, upstream_model
from trl_budget.pinned import host_slab_bytes
from trl_budget.streams import UPLOAD_CHUNK_BYTES

pytestmark = pytest.mark.gpu
ON_GPU = {"use_cpu": False, "bf16": True, "gradient_accumulation_steps": 2}


def supplied_rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """The same completions for every trainer: sampling on a GPU is not reproducible bit for bit."""
    tokenizer = byte_tokenizer()
    step = trainer.state.global_step
    completions = [
        [2 + (row * 31 + step * 7 + i * 13) % 250 for i in range(3 + row % 4)] for row in range(len(prompts))
    ]
    return {"prompt_ids": tokenizer(prompts)["input_ids"], "completion_ids": completions, "logprobs": None}


def train(trainer_class: type, path: Path, model: Any = None, **settings: Any) -> Any:
    kwargs = {"rollout_func": supplied_rollouts, **settings.pop("trainer_kwargs", {})}
    trainer = make_trainer(trainer_class, path, model=model, trainer_kwargs=kwargs, **{**ON_GPU, **settings})
    trainer.train()
    return trainer


class CompareWithMasters(TrainerCallback):
    """max|compute - master.to(dtype)| after each of the first steps."""

    def __init__(self) -> None:
        self.differences: list[float] = []

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        optimizer = kwargs["optimizer"].optimizer
        pairs = [(p.detach().cpu(), entry["master_weights"]) for p, entry in optimizer.state.items()]
        self.differences.append(max((p.float() - m.to(p.dtype).float()).abs().max().item() for p, m in pairs))


def test_compute_weights_are_the_cast_of_the_masters_after_step_1_and_step_2(tmp_path: Path) -> None:
    compare = CompareWithMasters()
    trainer = train(BudgetGRPOTrainer, tmp_path, max_steps=2, trainer_kwargs={"callbacks": [compare]})
    assert compare.differences == [0.0, 0.0]
    assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}
    assert all(p.is_cuda for p in trainer.model.parameters())
    assert all(p.grad is None for p in trainer.model.parameters())


def test_masters_start_from_the_fp32_weights_and_tied_weights_are_one(tmp_path: Path) -> None:
    model = tiny_model()
    original = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = make_trainer(BudgetGRPOTrainer, tmp_path, model=model, **ON_GPU)
    for name, p in trainer.model.named_parameters():
        assert torch.equal(trainer._host_adamw.state[p]["master_weights"], original[name])
    assert trainer.model.lm_head.weight is trainer.model.model.embed_tokens.weight


def test_a_model_named_by_a_string_reaches_the_card_as_bf16_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks: list[int] = []
    padding_trial = upstream_model.padding_trial

    def note_peak(trainer: Any) -> Any:  # trial forwards compute a layer at a time in fp32
        peaks.append(torch.cuda.max_memory_allocated())
        return padding_trial(trainer)

    monkeypatch.setattr(upstream_model, "padding_trial", note_peak)
    folder = save_tiny_model(tmp_path / "model", hidden_size=512, intermediate_size=2048, num_hidden_layers=4)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    trainer = make_trainer(BudgetGRPOTrainer, tmp_path, model=folder, **ON_GPU)
    bf16_bytes = sum(2 * p.numel() for p in trainer.model.parameters())
    assert peaks[0] - start < 1.5 * bf16_bytes + UPLOAD_CHUNK_BYTES, "fp32 weights would be twice"
    assert trainer.args.model_init_kwargs is None


@pytest.mark.filterwarnings("ignore:.*use_liger_kernel:FutureWarning")
@pytest.mark.parametrize("use_liger_kernel", [False, True])
def test_fp32_compute_stays_within_rounding_of_stock(tmp_path: Path, use_liger_kernel: bool) -> None:
    if use_liger_kernel:
        pytest.importorskip("liger_kernel")
    model = tiny_model()
    settings = {"bf16": False, "use_liger_kernel": use_liger_kernel}
    stock = train(GRPOTrainer, tmp_path / "stock", model=model, **settings)
    ours = train(BudgetGRPOTrainer, tmp_path / "ours", model=model, **settings)
    learning_rate = stock.args.learning_rate
    for (name, p), q in zip(stock.model.named_parameters(), ours.model.parameters(), strict=True):
        assert (p - q).abs().max().item() <= 5 * learning_rate, name
    for a, b in zip(stock.state.log_history, ours.state.log_history, strict=True):
        for key in ("loss", "grad_norm", "entropy"):
            if key in a:
                assert b[key] == pytest.approx(a[key], rel=1e-4, abs=1e-6)


def test_cast_lm_head_to_fp32_gets_the_fp32_values_back(tmp_path: Path) -> None:
    model = tiny_model(tie_word_embeddings=False)
    original = model.lm_head.weight.detach().clone()
    settings = {**ON_GPU, "cast_lm_head_to_fp32": True}
    trainer = make_trainer(BudgetGRPOTrainer, tmp_path / "a", model=model, **settings)
    assert torch.equal(trainer.model.lm_head.weight.detach().cpu(), original)
    trainer.train()
    p = trainer.model.lm_head.weight
    assert p.dtype == torch.float32
    assert torch.equal(p.detach().cpu(), trainer._host_adamw.state[p]["master_weights"])


def test_resume_equals_an_uninterrupted_run(tmp_path: Path) -> None:
    model = tiny_model()
    settings = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4, "lr_scheduler_type": "cosine"}
    whole = train(BudgetGRPOTrainer, tmp_path / "run", model=model, **settings)
    resumed = make_trainer(
        BudgetGRPOTrainer, tmp_path / "run", model=model,
        trainer_kwargs={"rollout_func": supplied_rollouts}, **{**ON_GPU, **settings},
    )  # fmt: skip
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    for (name, p), q in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(p, q), name
        for key in ("master_weights", "exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(whole._host_adamw.state[p][key], resumed._host_adamw.state[q][key]), (name, key)
            assert key == "step" or resumed._host_adamw.state[q][key].is_pinned()


def test_deleting_the_trainer_frees_page_locked_memory(tmp_path: Path) -> None:
    trainer = train(BudgetGRPOTrainer, tmp_path, model=tiny_model(hidden_size=512), max_steps=1)
    assert host_slab_bytes(pinned_only=True) > 0
    del trainer
    gc.collect()
    assert host_slab_bytes(pinned_only=True) == 0


def test_adapters_stay_on_the_device(tmp_path: Path) -> None:
    kwargs = {"peft_config": LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")}
    trainer = train(BudgetGRPOTrainer, tmp_path, max_steps=2, trainer_kwargs=kwargs)
    assert trainer.resolved_settings[0].value == "device"
    assert trainer._host_adamw is None


def test_adapters_on_the_host_when_asked(tmp_path: Path) -> None:
    kwargs = {"peft_config": LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")}
    trainer = train(
        BudgetGRPOTrainer, tmp_path, max_steps=2, trainer_kwargs=kwargs,
        config_class=BudgetGRPOConfig, optimizer_placement="host",
    )  # fmt: skip
    assert isinstance(trainer._host_adamw, HostAdamW)
    assert all("lora" in n for n, p in trainer.model.named_parameters() if p in trainer._host_adamw.state)


def test_a_bf16_card_trains_gradient_checkpointing_generation_and_saving(tmp_path: Path) -> None:
    model = copy.deepcopy(tiny_model())
    trainer = make_trainer(BudgetGRPOTrainer, tmp_path, model=model, **{**ON_GPU, "gradient_checkpointing": True})
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    loaded = type(trainer.model).from_pretrained(tmp_path / "saved", dtype="auto")
    for (name, p), q in zip(trainer.model.named_parameters(), loaded.parameters(), strict=True):
        assert q.dtype == torch.bfloat16
        assert torch.equal(p.detach().cpu(), q), name


def test_training_never_puts_optimizer_state_on_the_card(tmp_path: Path) -> None:
    model = tiny_model(hidden_size=1024, intermediate_size=4096, num_hidden_layers=4)
    num_parameters = sum(p.numel() for p in model.parameters())
    trainer = make_trainer(BudgetGRPOTrainer, tmp_path, model=model, **{**ON_GPU, "max_steps": 2})
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    trainer.train()
    growth = torch.cuda.max_memory_allocated() - start
    assert growth < 5 * num_parameters, "bf16 gradients are 2 bytes a parameter; masters and moments would be 12 more"


def test_the_reference_model_starts_as_the_policy_so_the_first_kl_is_zero(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    settings = {"beta": 0.1, "model_init_kwargs": {"dtype": "float32"}, "max_steps": 2}
    trainer = train(BudgetGRPOTrainer, tmp_path, model=folder, **settings)
    assert trainer.state.log_history[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert trainer.state.log_history[1]["kl"] > 1e-6


def test_a_model_that_is_on_the_card_already_gives_the_same_masters(tmp_path: Path) -> None:
    original = {name: p.detach().clone() for name, p in tiny_model().named_parameters()}
    trainer = make_trainer(BudgetGRPOTrainer, tmp_path, model=tiny_model().cuda(), **ON_GPU)
    for name, p in trainer.model.named_parameters():
        assert torch.equal(trainer._host_adamw.state[p]["master_weights"], original[name])
    trainer.train()


def test_evaluating_first_saving_weights_only_and_resuming(tmp_path: Path) -> None:
    settings = {**ON_GPU, "max_steps": 2, "save_strategy": "steps", "save_steps": 2, "save_only_model": True}
    kwargs = {"eval_dataset": digit_dataset(4)}
    first = make_trainer(BudgetGRPOTrainer, tmp_path, trainer_kwargs=kwargs, **settings)
    first.evaluate()
    first.train()
    resumed = make_trainer(BudgetGRPOTrainer, tmp_path, model=tiny_model(seed=1), **{**settings, "max_steps": 3})
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for (name, p), q in zip(first.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert (p - q).abs().max().item() <= 10 * first.args.learning_rate, name

"""A trainer's life beyond one `train()`: again, saved, pushed, interrupted, deleted, followed by another."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compat_pairs import assert_equal, assert_works, log_of
from safetensors.torch import load_file
from tiny import byte_tokenizer, digit_dataset, digit_reward, make_trainer, max_difference, tiny_model, weights
from transformers import TrainerCallback
from trl import GRPOTrainer

from trl_budget import BudgetGRPOConfig, BudgetGRPOTrainer, SettingsError
from trl_budget.pinned import host_slab_bytes

BF16 = torch.bfloat16


@pytest.mark.parametrize("settings", [{}, {"gradient_accumulation_steps": 2, "lr_scheduler_type": "cosine"}])
def test_a_second_train_equals_stocks_second_train(tmp_path: Path, settings: dict[str, Any]) -> None:
    def run(trainer: Any) -> None:
        trainer.train()
        trainer.train()

    assert_works(tmp_path, run=run, max_steps=2, **settings)


def test_a_second_train_with_another_length_and_rate_equals_stock(tmp_path: Path) -> None:
    def run(trainer: Any) -> None:
        trainer.train()
        trainer.args.max_steps, trainer.args.learning_rate = 3, 5e-3
        trainer.train()

    assert_works(tmp_path, run=run, max_steps=1)


def test_evaluate_and_train_in_turn_equal_stock(tmp_path: Path) -> None:
    def run(trainer: Any) -> None:
        trainer.train()
        trainer.evaluate()
        trainer.train()

    assert_works(tmp_path, run=run, trainer_kwargs=lambda: {"eval_dataset": digit_dataset(2)}, max_steps=1)


class Generate(TrainerCallback):
    """Generates from the model inside training, as sample-logging callbacks do."""

    def __init__(self) -> None:
        self.tokens: list[list[int]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        inputs = byte_tokenizer()(["Write the digit 3: "], return_tensors="pt")
        output = kwargs["model"].generate(**inputs, max_new_tokens=5, do_sample=False)
        self.tokens.append(output[0].tolist())


def test_generation_in_a_callback_equals_stock(tmp_path: Path) -> None:
    callbacks = [Generate(), Generate()]
    given = iter(callbacks)
    assert_works(tmp_path, trainer_kwargs=lambda: {"callbacks": [next(given)]}, max_steps=3, learning_rate=1e-2)
    assert callbacks[0].tokens == callbacks[1].tokens and len(callbacks[0].tokens) == 3


# Saving


def saved_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_save_model_writes_what_stock_writes_and_stock_loads_it(tmp_path: Path) -> None:
    stock, ours = assert_works(tmp_path, max_steps=2)
    for trainer, name in ((stock, "a"), (ours, "b")):
        trainer.save_model(str(tmp_path / name))
    a, b = saved_tensors(tmp_path / "a"), saved_tensors(tmp_path / "b")
    assert {n: t.dtype for n, t in a.items()} == {n: t.dtype for n, t in b.items()}
    assert max_difference(a, b) == 0.0
    files = [sorted(p.name for p in (tmp_path / name).iterdir()) for name in ("a", "b")]
    assert files[0] == files[1]
    loaded = type(ours.model).from_pretrained(tmp_path / "b")
    assert max_difference(loaded.state_dict(), weights(ours)) == 0.0


def test_save_model_of_a_bf16_policy_is_bf16_and_stock_trains_from_it(tmp_path: Path) -> None:
    ours = make_trainer(BudgetGRPOTrainer, tmp_path / "ours", model=tiny_model(BF16), max_steps=2)
    ours.train()
    ours.save_model(str(tmp_path / "saved"))
    saved = saved_tensors(tmp_path / "saved")
    assert {t.dtype for t in saved.values()} == {BF16}
    assert all(torch.equal(t, weights(ours)[name]) for name, t in saved.items())
    settings = {"model": str(tmp_path / "saved"), "model_init_kwargs": {"dtype": "bfloat16"}, "max_steps": 1}
    stock = make_trainer(GRPOTrainer, tmp_path / "stock", **settings)
    stock.train()
    assert {p.dtype for p in stock.model.parameters()} == {BF16}


class FakeHub:
    """Stands for huggingface_hub: remembers what it was asked to create and upload."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def create_repo(self, name: str, **kwargs: Any) -> Any:
        self.calls.append(("create", name))
        return SimpleNamespace(repo_id=f"someone/{name}")

    def upload_folder(self, *, repo_id: str, folder_path: str, **kwargs: Any) -> str:
        tensors = load_file(Path(folder_path) / "model.safetensors")
        self.calls.append(("upload", repo_id, sorted(p.name for p in Path(folder_path).iterdir()), tensors))
        return "commit"


def test_push_to_hub_uploads_what_stock_uploads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hubs = []
    for base in (GRPOTrainer, BudgetGRPOTrainer):
        hub = FakeHub()
        monkeypatch.setattr("transformers.trainer.hf_api", lambda hub=hub: hub)
        path = tmp_path / base.__name__ / "run"
        trainer = make_trainer(base, path, max_steps=1)
        trainer.train()
        trainer.push_to_hub()
        hubs.append(hub)
    stock, ours = (hub.calls for hub in hubs)
    assert [call[:3] for call in stock] == [call[:3] for call in ours]
    assert [call[0] for call in ours] == ["create", "upload"]
    assert max_difference(stock[1][3], ours[1][3]) == 0.0


# Interrupted


def interrupt_loss(trainer: Any, at_call: int, error: Exception) -> None:
    """The `at_call`-th loss from now raises once."""
    original, calls = trainer._compute_loss, []

    def compute_loss(model: Any, inputs: Any) -> torch.Tensor:
        calls.append(None)
        if len(calls) == at_call:
            raise error
        return original(model, inputs)

    trainer._compute_loss = compute_loss


def train_interrupted(trainer: Any) -> None:
    interrupt_loss(trainer, at_call=5, error=KeyError("in the middle of the second window"))
    with pytest.raises(KeyError, match="second window"):
        trainer.train()
    trainer.train()


def test_train_after_an_error_inside_an_accumulation_window_equals_stock(tmp_path: Path) -> None:
    assert_works(tmp_path, run=train_interrupted, max_steps=3, gradient_accumulation_steps=3)


def test_an_aborted_window_of_a_bf16_policy_leaves_no_gradient_behind(tmp_path: Path) -> None:
    """The aborted window is the first, so a trainer that runs the same batches uninterrupted is the reference."""
    results = []
    for is_interrupted in (False, True):
        settings = {"gradient_accumulation_steps": 3, "max_steps": 2, "lr_scheduler_type": "constant"}
        trainer = make_trainer(BudgetGRPOTrainer, tmp_path, model=tiny_model(BF16), **settings)
        if is_interrupted:
            interrupt_loss(trainer, at_call=3, error=KeyError("third micro-batch"))
            with pytest.raises(KeyError):
                trainer.train()
            trainer._step, trainer._buffered_inputs = 0, None
        torch.manual_seed(5)
        trainer.train()
        results.append(trainer)
    assert max_difference(*(weights(trainer) for trainer in results)) == 0.0
    norms = [[entry.get("grad_norm") for entry in log_of(trainer)] for trainer in results]
    assert norms[0] == norms[1]


# TRL refuses auto_find_batch_size in the config; set afterwards, transformers still retries with 3 rows for 4.
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
def test_a_retry_after_out_of_memory_starts_without_the_aborted_gradients(tmp_path: Path, dtype: torch.dtype) -> None:
    norms = []
    for base in (GRPOTrainer, BudgetGRPOTrainer):
        trainer = make_trainer(
            base, tmp_path / base.__name__, model=tiny_model(dtype), max_steps=1, gradient_accumulation_steps=4
        )
        trainer.args.auto_find_batch_size = True
        interrupt_loss(trainer, at_call=2, error=RuntimeError("CUDA out of memory."))
        trainer.train()
        assert trainer._train_batch_size == 3
        norms.append((log_of(trainer)[0]["grad_norm"], log_of(trainer)[0]["loss"], weights(trainer)))
    if dtype == torch.float32:
        assert norms[0][:2] == norms[1][:2]
        assert max_difference(norms[0][2], norms[1][2]) == 0.0
    else:  # stock sums the micro-batches in bf16; a leaked micro-batch would change the norm by tens of percent
        assert norms[1][0] == pytest.approx(norms[0][0], rel=2e-2)


# The end


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
def test_deleting_the_trainer_frees_host_memory_while_the_model_lives_on(tmp_path: Path, dtype: torch.dtype) -> None:
    gc.collect()
    start = host_slab_bytes()
    model = tiny_model(dtype)
    trainer = trainer_on(model, tmp_path)
    trainer.train()
    expected = sum(p.numel() for p in model.parameters()) * (8 if dtype == torch.float32 else 16)
    assert expected <= host_slab_bytes() - start < 1.2 * expected
    del trainer
    gc.collect()
    assert host_slab_bytes() == start
    assert all(p.isfinite().all() for p in model.parameters())
    model(input_ids=torch.tensor([[5, 6, 7]])).logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def trainer_on(model: Any, path: Path) -> Any:
    args = BudgetGRPOConfig(
        str(path), use_cpu=True, bf16=False, per_device_train_batch_size=4, num_generations=4, max_steps=1,
        max_completion_length=4, save_strategy="no", report_to="none", disable_tqdm=True, logging_steps=1,
        learning_rate=1e-3,
    )  # fmt: skip
    kwargs = {"train_dataset": digit_dataset(), "processing_class": byte_tokenizer()}
    return BudgetGRPOTrainer(model, digit_reward, args, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
def test_a_second_trainer_on_the_same_model_is_refused_while_the_first_lives(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    model = tiny_model(dtype)
    first = trainer_on(model, tmp_path)
    first.train()
    with pytest.raises(SettingsError, match="another HostAdamW") as error:
        trainer_on(model, tmp_path).train()
    assert "del trainer" in str(error.value)
    before = weights(first)
    first.train()
    assert max_difference(before, weights(first)) > 0.0, "the refused trainer must leave the first one working"
    del first
    second = trainer_on(model, tmp_path)
    before = weights(second)
    second.train()
    assert max_difference(before, weights(second)) > 0.0


def test_trainers_on_copies_of_a_model_live_side_by_side(tmp_path: Path) -> None:
    model = tiny_model()
    first = make_trainer(BudgetGRPOTrainer, tmp_path / "a", model=model, max_steps=2)
    first.train()
    second = make_trainer(BudgetGRPOTrainer, tmp_path / "b", model=model, max_steps=2)
    second.train()
    assert_equal(first, second)

"""What a script changes between the trainer's construction and `train()` has the effect that it has in stock TRL."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from compat_pairs import assert_compute_is_cast_of_masters, assert_equal, assert_works, masters_of
from tiny import make_trainer, max_difference, tiny_model, weights
from transformers import TrainerCallback
from trl import GRPOTrainer

from trl_budget import BudgetGRPOConfig, BudgetGRPOTrainer, SettingsError


def change_the_learning_rate(trainer: Any) -> None:
    trainer.args.learning_rate = 5e-3


def change_the_weight_decay(trainer: Any) -> None:
    trainer.args.weight_decay = 0.9


def change_the_betas(trainer: Any) -> None:
    trainer.args.adam_beta1, trainer.args.adam_beta2 = 0.5, 0.6


def freeze_the_embedding(trainer: Any) -> None:
    trainer.model.get_input_embeddings().weight.requires_grad_(False)


def unfreeze_everything(trainer: Any) -> None:
    trainer.model.requires_grad_(True)


def resize_the_embedding(trainer: Any) -> None:
    trainer.model.resize_token_embeddings(272, mean_resizing=False)


def double_the_norms_in_place(trainer: Any) -> None:
    with torch.no_grad():
        trainer.model.model.norm.weight.mul_(2.0)


def load_other_weights(trainer: Any) -> None:
    trainer.model.load_state_dict(tiny_model(seed=1).state_dict())


def replace_the_storage(trainer: Any) -> None:
    for parameter in trainer.model.parameters():
        parameter.data = parameter.data * 0.5


CHANGES = (
    change_the_learning_rate,
    change_the_weight_decay,
    change_the_betas,
    freeze_the_embedding,
    unfreeze_everything,
    resize_the_embedding,
    double_the_norms_in_place,
    load_other_weights,
    replace_the_storage,
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_equals_stock_after(tmp_path: Path, change: Callable[[Any], None]) -> None:
    model = tiny_model(tie_word_embeddings=change is not freeze_the_embedding)
    if change is unfreeze_everything:
        model.model.layers[0].requires_grad_(False)

    def run(trainer: Any) -> None:
        change(trainer)
        trainer.train()

    stock = make_trainer(GRPOTrainer, tmp_path / "stock", model=model, max_steps=2)
    run(stock)
    ours = make_trainer(BudgetGRPOTrainer, tmp_path / "ours", model=model, max_steps=2)
    run(ours)
    assert_equal(stock, ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_an_optimizer_assigned_after_construction_trains_as_in_stock_or_is_refused(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    trainers = []
    for base in (GRPOTrainer, BudgetGRPOTrainer):
        trainer = make_trainer(base, tmp_path / base.__name__, model=tiny_model(dtype), max_steps=2)
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0)
        try:
            trainer.train()
        except SettingsError as error:
            assert "SGD" in str(error)
            return
        trainers.append(trainer)
    assert max_difference(*(weights(trainer) for trainer in trainers)) == 0.0


def test_optimizer_cls_and_kwargs_set_after_construction_are_used(tmp_path: Path) -> None:
    trainers = []
    for base in (GRPOTrainer, BudgetGRPOTrainer):
        trainer = make_trainer(base, tmp_path / base.__name__, max_steps=2)
        trainer.optimizer_cls_and_kwargs = (torch.optim.SGD, {"lr": 1.0})
        trainer.train()
        trainers.append(trainer)
    assert_equal(*trainers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_get_decay_parameter_names_may_use_an_attribute_set_after_init(tmp_path: Path, dtype: torch.dtype) -> None:
    class Mine(BudgetGRPOTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.decayed = "mlp"

        def get_decay_parameter_names(self, model: Any) -> list[str]:
            return [name for name, _ in model.named_parameters() if self.decayed in name]

    trainer = make_trainer(Mine, tmp_path, model=tiny_model(dtype), max_steps=1, weight_decay=0.5)
    trainer.train()
    assert {len(g["params"]) for g in trainer._host_adamw.param_groups if g["weight_decay"] == 0.5} == {6}


def test_overridden_get_optimizer_cls_and_kwargs(tmp_path: Path) -> None:
    def make(base: type) -> type:
        class Mine(base):
            @staticmethod
            def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, dict[str, Any]]:
                return torch.optim.SGD, {"lr": 100 * args.learning_rate}

        return Mine

    trainers = []
    for base in (GRPOTrainer, BudgetGRPOTrainer):
        trainer = make_trainer(make(base), tmp_path / base.__name__, max_steps=2)
        trainer.train()
        trainers.append(trainer)
    assert_equal(*trainers)


def test_weights_loaded_into_a_bf16_model_become_the_masters(tmp_path: Path) -> None:
    model = tiny_model(torch.bfloat16)
    trainer = make_trainer(BudgetGRPOTrainer, tmp_path, model=model, max_steps=1, learning_rate=0.0)
    other = tiny_model(torch.bfloat16, seed=1)
    trainer.model.load_state_dict(other.state_dict())
    trainer.train()
    expected = {name: p.detach().float() for name, p in other.named_parameters()}
    assert max_difference(masters_of(trainer), expected) == 0.0


@pytest.mark.parametrize("unfrozen_at", ["construction", "after construction"])
def test_an_unfrozen_layer_of_a_bf16_model_is_trained(tmp_path: Path, unfrozen_at: str) -> None:
    model = tiny_model(torch.bfloat16)
    model.model.layers[0].requires_grad_(unfrozen_at == "construction")
    trainer = make_trainer(BudgetGRPOTrainer, tmp_path, model=model, max_steps=1)
    before = weights(trainer)
    trainer.model.requires_grad_(True)
    trainer.train()
    after = weights(trainer)
    assert not torch.equal(after["model.layers.0.mlp.up_proj.weight"], before["model.layers.0.mlp.up_proj.weight"])
    assert_compute_is_cast_of_masters(trainer)


def test_gradient_checkpointing_switched_on_after_construction(tmp_path: Path) -> None:
    def run(trainer: Any) -> None:
        trainer.args.gradient_checkpointing = True
        trainer.train()

    assert_works(tmp_path, run=run, max_steps=2)


class Mask(TrainerCallback):
    """Trains half of a matrix, and skips the second step."""

    trainer: Any = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        with trainer.editable_gradients() if isinstance(trainer, BudgetGRPOTrainer) else nullcontext():
            kwargs["model"].model.layers[0].mlp.up_proj.weight.grad[:64] = 0
        if state.global_step == 1:
            kwargs["model"].zero_grad()


@pytest.mark.parametrize("placement", ["host", "device"])
def test_gradients_edited_by_a_callback_are_stocks(tmp_path: Path, placement: str) -> None:
    trainers = []
    for base, settings in (
        (GRPOTrainer, {}),
        (BudgetGRPOTrainer, {"config_class": BudgetGRPOConfig, "optimizer_placement": placement}),
    ):
        mask = Mask()
        kwargs = {"callbacks": [mask]}
        path = tmp_path / base.__name__
        mask.trainer = make_trainer(base, path, max_steps=3, weight_decay=0.0, trainer_kwargs=kwargs, **settings)
        mask.trainer.train()
        trainers.append(mask.trainer)
    assert_equal(*trainers)


def test_an_optimizer_chosen_later_gets_the_gradients_while_the_old_one_lives(tmp_path: Path) -> None:
    moved = []
    for trainer_class in (GRPOTrainer, BudgetGRPOTrainer):
        trainer = make_trainer(
            trainer_class, tmp_path, trainer_kwargs={"model": tiny_model(torch.bfloat16)}, max_steps=2
        )
        before = weights(trainer)
        trainer.create_optimizer_and_scheduler(2)  # the scheduler keeps the first optimizer alive
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
        trainer.train()
        moved.append(max_difference(weights(trainer), before))
    assert moved[1] == moved[0] > 0

"""Training with the long-context levers, against stock TRL's: fp32 on the CPU, whole trainers.

Offload alone moves bytes and keeps every bit. Tiles and groups of heads sum in another order: the gradient of the
first step is within 1e-6 of stock's norm, and what is logged stays with it.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tiny import (
    comparable_log,
    digit_dataset,
    make_trainer,
    max_difference,
    save_tiny_model,
    tiny_model,
    weights,
)
from torch import Tensor
from trl import GRPOTrainer

from trl_budget import BudgetGRPOConfig, BudgetGRPOTrainer
from trl_budget.errors import SettingsError
from trl_budget.host_stores import HostStores

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
LEVERS: dict[str, Any] = {"activation_offload": "on", "tiled_mlp": 5, "attention_head_groups": 2}
LORA = {"peft_config": LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)}
OFF = {"activation_offload": "off", "tiled_mlp": "off", "attention_head_groups": "off"}
CHECKPOINTING = {"gradient_checkpointing": True, "max_completion_length": 12}


def trained(trainer_class: type, folder: Path, *, kwargs: Any = None, **settings: Any) -> Any:
    if trainer_class is not GRPOTrainer:
        settings["config_class"] = BudgetGRPOConfig
    model = save_tiny_model(folder / "model", **SHAPE)  # a name, for a reference model
    settings["model_init_kwargs"] = {"dtype": "float32"}
    trainer = make_trainer(trainer_class, folder, model=model, trainer_kwargs=kwargs, **{**CHECKPOINTING, **settings})
    trainer.train()
    return trainer


def gradients(trainer_class: type, folder: Path, *, kwargs: Any = None, **settings: Any) -> dict[str, Tensor]:
    """Of the first step, before it is clipped."""
    found: dict[str, Tensor] = {}

    class Watched(trainer_class):  # type: ignore[misc]
        def _clip_grad_norm(self, model: Any) -> Any:
            for name, parameter in self.model.named_parameters():
                if not parameter.requires_grad:
                    continue
                host = getattr(self, "_host_adamw", None)
                gradient = parameter.grad if host is None else host.gradient(parameter)
                found[name] = gradient.detach().clone()
            return super()._clip_grad_norm(model)

    trained(Watched, folder, kwargs=kwargs, max_steps=1, **settings)
    assert found
    return found


def relative_difference(ours: dict[str, Tensor], stock: dict[str, Tensor]) -> float:
    assert ours.keys() == stock.keys()
    difference = torch.stack([(ours[name].double() - stock[name].double()).norm() for name in stock]).norm()
    return float(difference / torch.stack([gradient.double().norm() for gradient in stock.values()]).norm())


def test_offload_alone_keeps_every_bit_of_stocks_training(tmp_path: Path) -> None:
    stock = trained(GRPOTrainer, tmp_path / "stock")
    ours = trained(BudgetGRPOTrainer, tmp_path / "ours", **{**OFF, "activation_offload": "on"})
    assert comparable_log(ours) == comparable_log(stock)
    assert max_difference(weights(ours), weights(stock)) == 0.0


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_offload_keeps_every_bit_with_either_kind_of_stocks_checkpointing(use_reentrant: bool, tmp_path: Path) -> None:
    settings = {"gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant}, "max_steps": 2}
    stock = trained(GRPOTrainer, tmp_path / "stock", **settings)
    ours = trained(BudgetGRPOTrainer, tmp_path / "ours", **{**OFF, "activation_offload": "on"}, **settings)
    assert comparable_log(ours) == comparable_log(stock)
    assert max_difference(weights(ours), weights(stock)) == 0.0


@pytest.mark.parametrize(
    "layout", [{}, {"padding_free": "on"}, {"padding_free": "on", "max_tokens_per_microbatch": 60}], ids=str
)
@pytest.mark.parametrize("kwargs", [None, LORA], ids=["full", "lora"])
def test_the_gradient_of_tiled_layers_is_stocks(kwargs: Any, layout: dict[str, Any], tmp_path: Path) -> None:
    stock = gradients(GRPOTrainer, tmp_path / "stock", kwargs=kwargs)
    ours = gradients(BudgetGRPOTrainer, tmp_path / "ours", kwargs=kwargs, **LEVERS, **layout)
    assert relative_difference(ours, stock) <= 1e-6


@pytest.mark.parametrize(
    "settings",
    [
        {"beta": 0.1},
        {"num_iterations": 2},
        {"gradient_accumulation_steps": 2},
        {"loss_type": "bnpo", "entropy_coef": 0.01},
        {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4},
    ],
    ids=str,
)
def test_what_is_logged_stays_with_stock_for_four_steps(settings: dict[str, Any], tmp_path: Path) -> None:
    kwargs = {"eval_dataset": digit_dataset(4)} if "eval_strategy" in settings else None
    settings = {"learning_rate": 1e-5, "max_steps": 4, **settings}
    stock = trained(GRPOTrainer, tmp_path / "stock", kwargs=kwargs, **settings)
    ours = trained(BudgetGRPOTrainer, tmp_path / "ours", kwargs=kwargs, **LEVERS, **settings)
    for mine, its in zip(comparable_log(ours), comparable_log(stock), strict=True):
        assert mine == pytest.approx(its, rel=2e-4, abs=2e-6)


@pytest.mark.parametrize("kwargs", [None, LORA], ids=["full", "lora"])
def test_between_forward_and_backward_no_layer_input_is_on_the_device(kwargs: Any, tmp_path: Path) -> None:
    held: list[int] = []

    class Watched(BudgetGRPOTrainer):
        def score_rows(self, *args: Any, **kwargs: Any) -> Any:
            outputs = super().score_rows(*args, **kwargs)
            store = self._layer_passes._store
            held.append(store.device_bytes)
            assert store.used_bytes > 0
            assert all(output() is None for output in embedded)
            return outputs

    embedded: list[weakref.ref[Tensor]] = []
    settings = {**LEVERS, "padding_free": "on", "max_tokens_per_microbatch": 60, "max_steps": 1}
    model = tiny_model(**SHAPE)
    trainer = make_trainer(Watched, tmp_path, model, BudgetGRPOConfig, kwargs, **{**CHECKPOINTING, **settings})
    embeddings = trainer.model.get_input_embeddings()
    embeddings.register_forward_hook(lambda *args: embedded.append(weakref.ref(args[-1])))
    trainer.train()
    assert len(held) > 1 and set(held) == {0}


def test_no_mlp_sees_more_tokens_than_a_tile_where_a_backward_follows(tmp_path: Path) -> None:
    model = tiny_model(**SHAPE)
    trainer = make_trainer(
        BudgetGRPOTrainer, tmp_path, model, BudgetGRPOConfig, **{**CHECKPOINTING, **LEVERS, "max_steps": 1}
    )
    seen: dict[bool, list[int]] = {True: [], False: []}
    is_updating = False

    def watch(_: Any, args: tuple[Tensor, ...], __: Tensor) -> None:
        seen[is_updating].append(args[0].shape[1])

    for layer in trainer.model.model.layers:
        layer.mlp.register_forward_hook(watch)
    compute_loss = trainer.compute_loss

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal is_updating
        is_updating = True
        return compute_loss(*args, **kwargs)

    trainer.compute_loss = watched
    trainer.train()
    assert max(seen[True]) <= LEVERS["tiled_mlp"] < max(seen[False])


def test_stocks_checkpointing_function_is_back_after_training(tmp_path: Path) -> None:
    ours = trained(BudgetGRPOTrainer, tmp_path, max_steps=1, **LEVERS)
    functions = {vars(layer)["_gradient_checkpointing_func"].func for layer in ours.model.model.layers}
    assert functions == {torch.utils.checkpoint.checkpoint}


def test_host_memory_is_taken_for_the_budget_and_grows_for_a_longer_row(tmp_path: Path) -> None:
    settings = {**LEVERS, "padding_free": "on", "max_tokens_per_microbatch": 2, "max_steps": 1}
    trainer = make_trainer(
        BudgetGRPOTrainer, tmp_path, tiny_model(**SHAPE), BudgetGRPOConfig, **{**CHECKPOINTING, **settings}
    )
    store = trainer._layer_passes._store
    assert isinstance(store, HostStores)
    assert store.host_bytes == 2 * 2 * 64 * 4  # tokens, layers, hidden, fp32
    trainer.train()
    assert store.host_bytes > 2 * 2 * 64 * 4
    assert store.used_bytes == store.device_bytes == 0


def test_the_table_names_the_levers_and_their_reasons(tmp_path: Path) -> None:
    rows = {}
    for name, settings in {"auto": {}, "on": LEVERS}.items():
        trainer = make_trainer(
            BudgetGRPOTrainer, tmp_path, tiny_model(**SHAPE), BudgetGRPOConfig, **{**CHECKPOINTING, **settings}
        )
        rows[name] = {row.name: (row.value, row.reason) for row in trainer.resolved_settings}
    assert rows["auto"]["tiled_mlp"] == ("off", "turned on for bf16 on CUDA only, and this runs on the CPU")
    assert [rows["on"][name] for name in LEVERS] == [(str(value), "set by you") for value in LEVERS.values()]


@pytest.mark.parametrize("name", list(LEVERS))
def test_without_gradient_checkpointing_a_lever_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=f"{name}=.*gradient_checkpointing=False keeps every activation"):
        make_trainer(BudgetGRPOTrainer, tmp_path, tiny_model(**SHAPE), BudgetGRPOConfig, **{**OFF, name: LEVERS[name]})


def test_the_trial_warns_of_nothing(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """A torch to come may refuse a checkpoint that is not told which kind it is."""
    make_trainer(BudgetGRPOTrainer, tmp_path, tiny_model(**SHAPE), BudgetGRPOConfig, **{**CHECKPOINTING, **LEVERS})
    assert not [str(w.message) for w in recwarn if "use_reentrant" in str(w.message)]


def test_a_policy_that_mixes_tokens_outside_attention_is_found_by_the_trial(tmp_path: Path) -> None:
    model = tiny_model(**SHAPE)
    layer_class = type(model.model.layers[0])

    class Shifting(layer_class):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
            mixed = hidden_states + torch.nn.functional.pad(hidden_states, (0, 0, 1, 0))[:, :-1]
            return super().forward(mixed, **kwargs)

    for layer in model.model.layers:
        layer.__class__ = Shifting
    with pytest.raises(SettingsError, match="in a trial run layers in tiles differed from whole ones"):
        make_trainer(BudgetGRPOTrainer, tmp_path, model, BudgetGRPOConfig, **{**CHECKPOINTING, **LEVERS})


def test_a_model_with_dropout_is_offloaded_but_not_tiled(tmp_path: Path) -> None:
    kwargs = {"peft_config": LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1)}
    with pytest.raises(SettingsError, match="a forward in training mode draws random numbers"):
        make_trainer(
            BudgetGRPOTrainer, tmp_path, tiny_model(**SHAPE), BudgetGRPOConfig, kwargs, **{**CHECKPOINTING, **LEVERS}
        )
    trained(BudgetGRPOTrainer, tmp_path, kwargs=kwargs, max_steps=1, **{**OFF, "activation_offload": "on"})

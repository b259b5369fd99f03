"""Stock and ours trained on the same thing, and what must be equal afterwards."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tiny import comparable_log, make_trainer, max_difference, weights
from trl import GRPOTrainer

from trl_budget import BudgetGRPOConfig, BudgetGRPOTrainer, HostAdamW
from trl_budget.placement import PlacementFacts
from trl_budget.upstream import placement_facts

KWARGS = dict[str, Any]


def placement(trainer: Any) -> str:
    return trainer.resolved_settings[0].value


def reason(trainer: Any) -> str:
    return trainer.resolved_settings[0].reason


def facts_of(args: Any, model: torch.nn.Module) -> PlacementFacts:
    """The facts that the trainer would collect, whichever arguments the collector takes today."""
    given = {"trainer_class": BudgetGRPOTrainer, "args": args, "model": model, "optimizer": None}
    given |= {"is_adapter": False, "is_on_host": False}
    names = inspect.signature(placement_facts).parameters
    return placement_facts(**{name: value for name, value in given.items() if name in names})


def without_times(metrics: dict[str, float]) -> dict[str, float]:
    return {k: v for k, v in metrics.items() if not any(part in k for part in ("runtime", "per_second", "_time"))}


def log_of(trainer: Any) -> list[dict[str, float]]:
    """The log history without wall-clock figures, those of `evaluate` included."""
    return [without_times(entry) for entry in comparable_log(trainer)]


def assert_equal(stock: Any, ours: Any) -> None:
    """The same weights, dtypes and log."""
    a, b = weights(stock), weights(ours)
    assert {name: value.dtype for name, value in a.items()} == {name: value.dtype for name, value in b.items()}
    assert max_difference(a, b) == 0.0
    assert log_of(ours) == log_of(stock)


def assert_works(
    tmp_path: Path,
    *,
    on: str = "host",
    stock_class: type = GRPOTrainer,
    ours_class: type = BudgetGRPOTrainer,
    trainer_kwargs: Callable[[], KWARGS] = dict,
    run: Callable[[Any], object] = lambda trainer: trainer.train(),
    **settings: Any,
) -> tuple[Any, Any]:
    """Runs stock, then ours, and asserts that ours sits where expected and that nothing differs.

    Args:
        on: the placement that ours must have resolved to.
        trainer_kwargs: called once per trainer: stateful arguments must not be shared.
        run: what is done with each trainer.
    """
    stock = make_trainer(stock_class, tmp_path / "stock", trainer_kwargs=trainer_kwargs(), **settings)
    before = weights(stock)
    run(stock)
    ours = make_trainer(ours_class, tmp_path / "ours", trainer_kwargs=trainer_kwargs(), **settings)
    run(ours)
    assert placement(ours) == on
    assert isinstance(ours._host_adamw, HostAdamW) == (on == "host")
    assert max_difference(weights(ours), before) > 0.0, "the weights must have moved for equality to mean something"
    assert_equal(stock, ours)
    return stock, ours


def budget_trainer(path: Path, placement: str = "host", **settings: Any) -> Any:
    return make_trainer(
        BudgetGRPOTrainer, path, config_class=BudgetGRPOConfig, optimizer_placement=placement, **settings
    )


def state_of(trainer: Any) -> dict[str, torch.Tensor]:
    """Weights, masters, moments and steps of a trainer of ours, by name."""
    named = {f"weights/{name}": p.detach().clone() for name, p in trainer.model.named_parameters()}
    for name, p in trainer.model.named_parameters():
        entry = trainer._host_adamw.state[p]
        named |= {f"{key}/{name}": value.detach().clone() for key, value in entry.items()}
    return named


def masters_of(trainer: Any) -> dict[str, torch.Tensor]:
    return {
        name: trainer._host_adamw.state[p]["master_weights"].detach().clone()
        for name, p in trainer.model.named_parameters()
    }


def assert_compute_is_cast_of_masters(trainer: Any) -> None:
    for name, p in trainer.model.named_parameters():
        master = trainer._host_adamw.state[p]["master_weights"]
        assert (p.detach().float() - master.to(p.dtype).float()).abs().max().item() == 0.0, name

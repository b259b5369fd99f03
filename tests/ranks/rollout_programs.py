"""What each rank runs in the tests of rollouts that go wrong on one rank; the engine is `fake_vllm`'s."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_vllm import stand_in_for_vllm
from tiny import comparable_log, digit_dataset, make_trainer, max_difference, weights
from transformers import TrainerCallback
from trl import GRPOConfig

from trl_budget import BudgetGRPOConfig
from trl_budget.device_memory import CardMemory, DeviceMemoryBudget
from trl_budget.errors import DeviceMemoryError, RankError, StalePolicyError, WeightSyncError
from trl_budget.ranks import Ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))

from test_handover import COPYING, SETTINGS, HandoverTrainer

GAP_METRIC = "sampling/sampling_logp_difference/mean"
FAILING = 1
GIB = 2**30


def rank() -> int:
    return int(os.environ["RANK"])


def stand_in() -> None:
    """As in the tests of one process, but this process stays a rank."""
    environment = dict(os.environ)
    patch = pytest.MonkeyPatch()
    stand_in_for_vllm(patch)
    patch.setattr("trl_budget.rollout_policy.SHARED_DTYPES", ("bfloat16", "float16", "float32"))
    os.environ.update(environment)


def build(folder: str, out: Path, trainer_class: type = HandoverTrainer, **settings: Any) -> Any:
    """A trainer that copies weights: a rank's device is called "cpu:0" here, where moving a model unshares it."""
    stand_in()
    settings = {
        "config_class": BudgetGRPOConfig,
        "model_init_kwargs": {"dtype": "float32"},
        **SETTINGS,
        **COPYING,
        **settings,
    }
    return make_trainer(trainer_class, out / f"out-{rank()}", **{"model": folder, **settings})


def error_of(action: Callable[[], Any], trainer: Any = None) -> dict[str, Any]:
    start = time.monotonic()
    try:
        action()
    except (DeviceMemoryError, RankError, StalePolicyError, WeightSyncError) as error:
        made = {"kind": type(error).__name__, "message": str(error), "seconds": time.monotonic() - start}
        if trainer is not None:
            made["step"] = trainer.state.global_step
            made["metric"] = trainer._metrics["train"].get(GAP_METRIC, [])
        return made
    raise AssertionError("nothing was raised")


def one_engine_is_off(folder: str, out: Path, reuse: str) -> dict[str, Any]:
    """The log-probs of one rank's engine are 0.8 off: 0.4 in the mean over two ranks."""
    trainer = build(folder, out, reuse_old_logprobs=reuse)
    engine = trainer.vllm_generation.llm
    complete = engine._complete

    def off(*args: Any) -> Any:
        made = complete(*args)
        for logprobs in made.outputs[0].logprobs:
            for entry in logprobs.values():
                entry.logprob -= 0.8 if rank() == FAILING else 0.0
        return made

    engine._complete = off
    return error_of(trainer.train, trainer)


def one_sync_loses_a_weight(folder: str, out: Path, reuse: str) -> dict[str, Any]:
    settings = {"verify_weight_sync": "always", "learning_rate": 1e-6, "reuse_old_logprobs": reuse}
    trainer = build(folder, out, **settings)
    engine = trainer.vllm_generation.llm
    load_weights = engine.model.load_weights

    def losing(pairs: Any) -> None:
        load_weights(pairs)
        if rank() == FAILING and trainer.state.global_step == 1 and "k_proj" in pairs[0][0]:
            engine.model.view(pairs[0][0]).mul_(1.001)

    engine.model.load_weights = losing
    return error_of(trainer.train, trainer)


class Budgeted(HandoverTrainer):
    """Under a budget of a card that is not there; one rank holds too much in the phase `too_much_in`."""

    too_much_in = ""
    caps: tuple[int, ...] = ()

    def _plan_rollouts(self, args: GRPOConfig, *rest: Any, **kwargs: Any) -> None:
        self._memory_budget = None
        super()._plan_rollouts(args, *rest, **kwargs)
        self._memory_budget = DeviceMemoryBudget(
            16 * GIB, args.device, unmapped_bytes=lambda: 0, read=self._read_card, set_cap=self._note_cap
        )

    def _read_card(self) -> CardMemory:
        is_over = rank() == FAILING and self._card._residency.phase.value == self.too_much_in
        used = (20 if is_over else 10) * GIB
        return CardMemory(total=80 * GIB, free=80 * GIB - used, reserved=used, unmapped=0)

    def _note_cap(self, nbytes: int) -> None:
        self.caps = (*self.caps, nbytes // GIB)

    def _engine_utilization(self) -> float:
        return 0.3


def one_rank_holds_too_much(folder: str, out: Path, phase: str) -> dict[str, Any]:
    trainer = build(folder, out, Budgeted)
    trainer.too_much_in = phase
    return {**error_of(trainer.train, trainer), "caps": trainer.caps}


class NoRoom(HandoverTrainer):
    """One rank has no room for an engine."""

    def _check_engine_fits(self) -> None:
        if rank() == FAILING:
            raise DeviceMemoryError("no room.")


def one_engine_has_no_room(folder: str, out: Path) -> dict[str, Any]:
    return error_of(lambda: build(folder, out, NoRoom))


class AsksOnRankZero(TrainerCallback):
    """One rank alone calls its engine, as users do under `is_world_process_zero`."""

    trainer: Any = None

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if rank() == 0:
            prompts = [{"prompt_token_ids": [5, 6, 7]}]
            self.trainer.vllm_generation.llm.generate(prompts, SimpleNamespace(max_tokens=2), use_tqdm=False)


def trains(folder: str, out: Path, reuse: str) -> dict[str, Any]:
    """Nothing goes wrong: what was exchanged for the checks, and whether a call on one rank changes the training."""
    counted: Counter[str] = Counter()
    exchange = Ranks.exchange

    def counting(self: Ranks, operation: str, *args: Any, **kwargs: Any) -> Any:
        counted[operation] += 1
        return exchange(self, operation, *args, **kwargs)

    Ranks.exchange = counting
    callback = AsksOnRankZero()
    settings = {"reuse_old_logprobs": reuse, "eval_strategy": "steps", "eval_steps": 2, "verify_weight_sync": "always"}
    runs = []
    for callbacks in ([], [callback]):
        counted.clear()
        kwargs = {"callbacks": callbacks, "eval_dataset": digit_dataset(8)}
        trainer = build(folder, out, trainer_kwargs=kwargs, **settings)
        callback.trainer = trainer
        trainer.train()
        rollouts = [name for name, _ in trainer.vllm_generation.llm.events].count("generate")
        runs.append((comparable_log(trainer), weights(trainer), counted["check the rollout"], rollouts))
    (log, before, num_checks, num_rollouts), (other_log, after, *_) = runs
    return {
        "same": (log == other_log, max_difference(before, after)),
        "num_checks": num_checks,
        "num_rollouts": num_rollouts,
    }

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

from trl_budget import BudgetGRPOConfig
from trl_budget.errors import RankError, StalePolicyError
from trl_budget.ranks import Ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))

from test_handover import COPYING, SETTINGS, HandoverTrainer

GAP_METRIC = "sampling/sampling_logp_difference/mean"
FAILING = 1


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
    except (RankError, StalePolicyError) as error:
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

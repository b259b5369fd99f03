"""The long-context levers beside an engine that sleeps: weights are parked or shared between steps. Fake engine, CPU.

Against the same run without levers: weights that moved between a forward and its backward would show in the gradient.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import stand_in_for_vllm
from lever_pairs import LEVERS, OFF, SHAPE, Gradients, assert_nothing_kept, assert_same_steps, build, lora, watched
from test_handover import COPYING, NEITHER, SETTINGS, HandoverTrainer
from tiny import save_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _engine(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_vllm(monkeypatch)
    monkeypatch.setattr("trl_budget.rollout_policy.SHARED_DTYPES", ("bfloat16", "float16", "float32"))


def trained(folder: Path, **settings: Any) -> tuple[Any, list[Gradients]]:
    steps: list[Gradients] = []
    trainer = build(watched(HandoverTrainer, steps), folder, model_init_kwargs={"dtype": "float32"}, **settings)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    trainer.train()
    trainer.train()
    return trainer, steps


@pytest.mark.parametrize("levers", LEVERS.values(), ids=LEVERS.keys())
@pytest.mark.parametrize("way", [{}, COPYING, NEITHER, "lora"], ids=["sharing", "parking", "neither", "adapters"])
def test_two_runs_with_rollouts_have_the_gradients_of_those_without_levers(
    way: Any, levers: dict[str, Any], tmp_path: Path
) -> None:
    settings = {**SETTINGS, "beta": 0.1, "model": save_tiny_model(tmp_path / "model", **SHAPE)}
    settings |= {"kwargs": lambda: {"peft_config": lora()}} if way == "lora" else way
    _, expected = trained(tmp_path / "off", **OFF, **settings)
    ours, found = trained(tmp_path / "on", **levers, **settings)
    assert len(found) == 2 * SETTINGS["max_steps"]
    assert_same_steps(found, expected, levers)
    assert_nothing_kept(ours)

"""Users call the engine themselves, where no rollout is: in callbacks, in rewards, before training. Fake engine, CPU.

The fake refuses to generate while any part of it sleeps, and generates with what it holds.
"""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_vllm import FakeLLM
from test_handover import COPYING, EVERY_WAY, _engine, build, events, folder  # noqa: F401
from tiny import byte_tokenizer, comparable_log, digit_dataset, max_difference, tiny_model, weights
from transformers import Qwen3Config, Qwen3ForSequenceClassification, TrainerCallback

from trl_budget.errors import WeightSyncError
from trl_budget.upstream_engine import EngineProxy

PROMPT = [5, 6, 7]
ROLLOUT = ["wake weights", "load", "reset", "wake kv_cache", "generate", "sleep"]


def complete(llm: Any, prompt: list[int] = PROMPT) -> tuple[list[int], list[float]]:
    made = llm.generate([{"prompt_token_ids": prompt}], SimpleNamespace(max_tokens=4), use_tqdm=False)
    output = made[0].outputs[0]
    return output.token_ids, [next(iter(entry.values())).logprob for entry in output.logprobs]


def distance_to_policy(model: Any, token_ids: list[int], logprobs: list[float]) -> float:
    with torch.no_grad():
        scores = model(torch.tensor([PROMPT + token_ids])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    own = scores.gather(1, torch.tensor(token_ids)[:, None])[:, 0]
    return (own - torch.tensor(logprobs)).abs().max().item()


class CompletesAfterEachStep(TrainerCallback):
    """Asks the engine for a completion after every update, and the policy what it thinks of it."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.distances: list[float] = []
        self.residents: list[str] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        made = complete(self.trainer.vllm_generation.llm)
        self.residents.append(self.trainer.residents())
        self.distances.append(distance_to_policy(self.trainer.model, *made))


@EVERY_WAY
def test_a_callback_may_generate_with_the_present_weights_and_changes_nothing(
    way: dict[str, str],
    folder: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    settings = {"vllm_enable_sleep_mode": True, "learning_rate": 0.01, **way}
    alone = build(folder, tmp_path, **settings)
    alone.train()
    callback = CompletesAfterEachStep()
    trainer = build(folder, tmp_path, trainer_kwargs={"callbacks": [callback]}, **settings)
    callback.trainer = trainer
    trainer.train()
    assert len(callback.distances) == 3
    assert max(callback.distances) < 1e-4
    assert set(callback.residents) == {trainer.residents()}
    assert trainer.vllm_generation.llm.sleeping_tags == {"weights", "kv_cache"}
    assert comparable_log(trainer) == comparable_log(alone)
    assert max_difference(weights(trainer), weights(alone)) == 0.0


def test_a_direct_call_is_a_rollout_of_its_own_without_the_policy(folder: str, tmp_path: Path) -> None:  # noqa: F811
    trainer = build(folder, tmp_path, **COPYING)
    complete(trainer.vllm_generation.llm)
    complete(trainer.vllm_generation.llm)
    assert events(trainer) == [(event, "") for event in ["start", "sleep", *ROLLOUT, *ROLLOUT]]
    assert trainer.residents() == "policy"


@pytest.mark.parametrize("call", ["chat", "beam_search", "wait_for_completion", "collective_rpc", "apply_model"])
def test_other_calls_that_run_the_engine_find_it_awake_as_well(
    call: str,
    folder: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    trainer = build(folder, tmp_path, **COPYING)
    llm = trainer.vllm_generation.llm
    asleep: list[set[str]] = []
    setattr(llm, call, lambda: asleep.append(set(llm.sleeping_tags)))
    getattr(llm, call)()
    assert asleep == [set()]
    assert llm.sleeping_tags == {"weights", "kv_cache"}


def test_inside_a_session_the_engine_stays_awake_between_direct_calls(folder: str, tmp_path: Path) -> None:  # noqa: F811
    trainer = build(folder, tmp_path, **COPYING)
    with trainer.vllm_generation.session():
        first = complete(trainer.vllm_generation.llm)
        assert complete(trainer.vllm_generation.llm) == first
    once = ["wake weights", "load", "reset", "wake kv_cache", "generate", "generate", "sleep"]
    assert events(trainer, with_residents=False) == ["start", "sleep", *once]


def test_a_sync_before_a_direct_call_is_not_made_twice(folder: str, tmp_path: Path) -> None:  # noqa: F811
    trainer = build(folder, tmp_path, **COPYING)
    trainer.vllm_generation.sync_weights()
    complete(trainer.vllm_generation.llm)
    assert events(trainer, with_residents=False) == ["start", "sleep", *ROLLOUT]


def test_a_direct_call_that_fails_gives_the_card_back(folder: str, tmp_path: Path) -> None:  # noqa: F811
    trainer = build(folder, tmp_path, **COPYING)
    llm = trainer.vllm_generation.llm
    llm.fails["generate"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        complete(llm)
    assert trainer.residents() == "policy"
    assert not llm.llm_engine.output_processor.request_states
    complete(llm)


def test_a_direct_call_verifies_the_weights_it_generates_with(folder: str, tmp_path: Path) -> None:  # noqa: F811
    trainer = build(folder, tmp_path)
    weight = trainer.model.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data.clone()
    with pytest.raises(WeightSyncError, match="up_proj"):
        trainer.vllm_generation.sync_weights()
        complete(trainer.vllm_generation.llm)


@pytest.mark.parametrize("way", [{}, COPYING], ids=["sharing", "parking"])
def test_a_reward_may_ask_the_engine_while_a_reward_model_is_on_the_card(
    way: dict[str, str],
    folder: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    torch.manual_seed(5)
    model = Qwen3ForSequenceClassification(Qwen3Config(**{**tiny_model().config.to_dict(), "num_labels": 1}))
    residents = []

    def judge(completions: list[str], **_: Any) -> list[float]:
        token_ids, _ = complete(trainer.vllm_generation.llm)
        residents.append(trainer.residents())
        return [float(token_ids[0] + len(text)) for text in completions]

    rewards = {"reward_funcs": [judge, model], "reward_processing_classes": [None, byte_tokenizer()]}
    trainer = build(folder, tmp_path, trainer_kwargs=rewards, max_steps=2, **way)
    trainer.train()
    assert residents == (["policy, reward model 1"] if way else ["reward model 1"]) * 2
    assert trainer.residents() == ("policy" if way else "")


def test_evaluation_after_a_direct_call_uses_the_same_weights(folder: str, tmp_path: Path) -> None:  # noqa: F811
    trainer = build(folder, tmp_path, trainer_kwargs={"eval_dataset": digit_dataset(4)}, **COPYING)
    before = trainer.evaluate()["eval_reward"]
    complete(trainer.vllm_generation.llm)
    assert trainer.evaluate()["eval_reward"] == before


# The proxy itself


class Engine:
    """Stands for `vllm.LLM`."""

    def __init__(self) -> None:
        self.llm_engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=7))
        self.calls: list[str] = []

    def generate(self, prompts: list[str], *, use_tqdm: bool = True) -> list[str]:
        """Generates."""
        self.calls.append("generate")
        return [prompt.upper() for prompt in prompts]

    def sleep(self, level: int = 1) -> None:
        self.calls.append("sleep")


class Opened:
    """Counts how often the engine was opened; a context manager."""

    def __init__(self) -> None:
        self.num_opened = 0

    def __call__(self) -> Opened:
        return self

    def __enter__(self) -> None:
        self.num_opened += 1

    def __exit__(self, *_: Any) -> None:
        pass


@pytest.fixture
def opened() -> Opened:
    return Opened()


def test_the_proxy_is_an_instance_of_the_engines_class(opened: Opened) -> None:
    assert isinstance(EngineProxy(Engine(), opened), Engine)
    assert not isinstance(EngineProxy(Engine(), opened), FakeLLM)


def test_attributes_are_read_written_and_deleted_on_the_engine(opened: Opened) -> None:
    engine = Engine()
    proxy = EngineProxy(engine, opened)
    assert proxy.llm_engine.model_config.max_model_len == 7
    proxy.note = "mine"
    assert engine.note == "mine"
    assert vars(proxy) is vars(engine)
    assert dir(proxy) == dir(engine)
    del proxy.note
    assert not hasattr(engine, "note")
    with pytest.raises(AttributeError, match="'Engine' object has no attribute 'absent'"):
        _ = proxy.absent


def test_only_calls_that_run_the_engine_open_it(opened: Opened) -> None:
    proxy = EngineProxy(Engine(), opened)
    proxy.sleep(level=2)
    assert opened.num_opened == 0
    assert proxy.generate(["a"], use_tqdm=False) == ["A"]
    assert opened.num_opened == 1
    assert proxy.calls == ["sleep", "generate"]


def test_a_wrapped_call_keeps_signature_and_documentation(opened: Opened) -> None:
    generate = EngineProxy(Engine(), opened).generate
    assert list(inspect.signature(generate).parameters) == ["prompts", "use_tqdm"]
    assert generate.__doc__ == "Generates."


def test_a_user_may_wrap_a_call_of_the_proxy_and_put_it_back(opened: Opened) -> None:
    proxy = EngineProxy(Engine(), opened)
    original = proxy.generate
    proxy.generate = lambda prompts: [*original(prompts), "wrapped"]
    assert proxy.generate(["a"]) == ["A", "wrapped"]


@pytest.mark.parametrize(
    "copied", [copy.copy, lambda proxy: pickle.loads(pickle.dumps(proxy))], ids=["copy", "pickle"]
)
def test_a_copy_or_a_pickle_is_one_of_the_engine(copied: Any, opened: Opened) -> None:
    proxy = EngineProxy(Engine(), opened)
    proxy.calls.append("before")
    made = copied(proxy)
    assert type(made) is Engine
    assert made.calls == ["before"]
    assert made.generate(["a"]) == ["A"]
    assert opened.num_opened == 0

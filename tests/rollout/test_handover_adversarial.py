"""What users do around a rollout, against stock TRL over the same fake engine: evaluation, callbacks, resume, errors.

The fake fills its weights with NaN when it sleeps and generates with what it holds, so a wrong order shows in tokens.
"""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl.generation.vllm_generation as vllm_generation
from fake_vllm import FakeLLM
from frozen_base import with_frozen_base
from peft import LoraConfig
from test_handover import (
    COPYING,
    EVERY_WAY,
    SETTINGS,
    HandoverTrainer,
    _engine,  # noqa: F401
    build,
    events,
    train,
)
from tiny import (
    byte_tokenizer,
    comparable_log,
    digit_dataset,
    digit_reward,
    make_trainer,
    max_difference,
    save_tiny_model,
    tiny_model,
    weights,
)
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForSequenceClassification, TrainerCallback
from trl import GRPOTrainer

sys.path.insert(0, str(Path(__file__).parents[1] / "compat"))

from test_tools import ANSWERS, chat_tokenizer, common, double

from trl_budget.errors import ParkedError, SettingsError
from trl_budget.pinned import host_slab_bytes

BOTH_WAYS = pytest.mark.parametrize("way", [{}, COPYING], ids=["sharing", "parking"])
ASLEEP = {"weights", "kv_cache"}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return save_tiny_model(tmp_path / "model")


@pytest.fixture
def stock(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Builds a stock `GRPOTrainer` over the fake engine."""
    monkeypatch.setattr(vllm_generation, "LLM", lambda **arguments: FakeLLM(arguments), raising=False)
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda: True)

    def build_stock(folder: str, tmp_path: Path, **settings: Any) -> Any:
        config = {"model_init_kwargs": {"dtype": "float32"}}
        trainer = make_trainer(GRPOTrainer, tmp_path / "stock", **{"model": folder, **config, **SETTINGS, **settings})
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
        return trainer

    return build_stock


def assert_same_training(ours: Any, stock: Any) -> None:
    assert comparable_log(ours) == comparable_log(stock)
    assert max_difference(weights(ours), weights(stock)) == 0.0


def assert_at_rest(trainer: Any) -> None:
    assert trainer.vllm_generation.llm.sleeping_tags == ASLEEP
    assert trainer.residents() == ("policy" if trainer._parked_policy is not None else "")
    assert not any(p.isnan().any() for p in trainer.model.parameters())


def gaps(trainer: Any) -> list[float]:
    return [e[key] for e in trainer.state.log_history for key in e if "sampling_logp_difference/max" in key]


# Parity with stock TRL over the same engine

WORKLOADS: dict[str, dict[str, Any]] = {
    "accumulation over two generations": {"gradient_accumulation_steps": 4, "steps_per_generation": 2},
    "a generation for two steps": {"gradient_accumulation_steps": 1, "steps_per_generation": 2, "max_steps": 5},
    "two iterations": {"num_iterations": 2, "max_steps": 5},
    "a reference that follows": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2},
    "evaluation between steps": {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True},
    "extra sampling parameters": {"generation_kwargs": {"seed": 3, "ignore_eos": True}},
    "no sampling correction": {"vllm_importance_sampling_correction": False},
    "vLLM's sleep mode": {"vllm_enable_sleep_mode": True},
}


@BOTH_WAYS
@pytest.mark.parametrize("workload", WORKLOADS)
def test_training_equals_stocks_over_the_same_engine(
    workload: str, way: dict[str, str], folder: str, tmp_path: Path, stock: Any
) -> None:
    settings = {**WORKLOADS[workload], "trainer_kwargs": {"eval_dataset": digit_dataset(8)}}
    reference = stock(folder, tmp_path, **settings)
    reference.train()
    ours = train(folder, tmp_path, **settings, **way)
    assert_same_training(ours, reference)


def test_the_attributes_are_those_of_stock(folder: str, tmp_path: Path, stock: Any) -> None:
    theirs = vars(stock(folder, tmp_path)).keys()
    ours = vars(build(folder, tmp_path))
    assert theirs - ours.keys() == set()
    assert not hasattr(build(folder, tmp_path), "generation_config")
    assert ours["use_vllm"] and ours["args"].use_vllm


def test_the_engine_gets_the_sampling_parameters_of_stock(folder: str, tmp_path: Path, stock: Any) -> None:
    seen: list[dict[str, Any]] = []

    def recording(engine: FakeLLM) -> None:
        generate = engine.generate
        engine.generate = lambda prompts, sampling_params, use_tqdm: (
            seen.append(vars(sampling_params)) or generate(prompts, sampling_params, use_tqdm)
        )

    settings = {"generation_kwargs": {"seed": 3, "stop": ["x"]}, "temperature": 0.9, "max_steps": 1}
    for trainer in (stock(folder, tmp_path, **settings), build(folder, tmp_path, **settings)):
        recording(trainer.vllm_generation.llm)
        trainer.train()
    assert seen[0] == seen[1]
    assert seen[0]["stop"] == ["x"]


@BOTH_WAYS
def test_predict_and_evaluate_outside_of_training_see_the_present_weights(
    way: dict[str, str], folder: str, tmp_path: Path
) -> None:
    trainer = build(folder, tmp_path, trainer_kwargs={"eval_dataset": digit_dataset(4)}, **way)
    trainer.evaluate()
    trainer.train()
    trainer.predict(digit_dataset(4))
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.data.copy_(parameter + 0.05)
    trainer.model.load_state_dict({name: value * 1.1 for name, value in weights(trainer).items()})
    trainer.evaluate()
    trainer.train()
    assert max(gaps(trainer)) < 1e-4
    assert_at_rest(trainer)


@BOTH_WAYS
def test_a_second_training_starts_from_the_first_ones_weights(
    way: dict[str, str], folder: str, tmp_path: Path, stock: Any
) -> None:
    reference = stock(folder, tmp_path, vllm_enable_sleep_mode=True)
    reference.train()
    reference.train()
    ours = train(folder, tmp_path, **way)
    ours.train()
    assert_same_training(ours, reference)


@BOTH_WAYS
@pytest.mark.parametrize("placement", ["host", "device"])
def test_resume_continues_as_if_uninterrupted(
    placement: str, way: dict[str, str], folder: str, tmp_path: Path
) -> None:
    settings = {"optimizer_placement": placement, "save_strategy": "steps", "save_steps": 2, "max_steps": 4, **way}
    whole = train(folder, tmp_path, **settings)
    resumed = build(folder, tmp_path, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert max_difference(weights(resumed), weights(whole)) == 0.0
    assert max(gaps(resumed)) < 1e-4
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "checkpoint-4", dtype="float32").state_dict()
    assert max_difference(saved, weights(whole)) == 0.0


def test_resume_of_a_shared_bf16_policy_with_fp32_masters_continues_as_if_uninterrupted(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", torch.bfloat16)
    settings = {
        "model_init_kwargs": {"dtype": "bfloat16"},
        "optimizer_placement": "host",
        **{"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "share_vllm_weights": "on"},
    }
    whole = train(folder, tmp_path, **settings)
    resumed = build(folder, tmp_path, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert max_difference(weights(resumed), weights(whole)) == 0.0
    engine = resumed.vllm_generation.llm
    assert all(torch.equal(p, engine.model.view(name)) for name, p in resumed.model.named_parameters())


@BOTH_WAYS
def test_the_best_model_is_loaded_and_seen_by_the_engine(way: dict[str, str], folder: str, tmp_path: Path) -> None:
    trainer = build(
        folder,
        tmp_path,
        **{"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 3},
        **{"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "save_only_model": True},
        trainer_kwargs={"eval_dataset": digit_dataset(4)},
        **way,
    )
    trainer.train()
    best = AutoModelForCausalLM.from_pretrained(trainer.state.best_model_checkpoint, dtype="float32").state_dict()
    assert max_difference(best, weights(trainer)) == 0.0
    trainer.evaluate()
    assert max(gaps(trainer)) < 1e-4


def test_a_shared_policy_that_the_user_saves_loads_again(folder: str, tmp_path: Path) -> None:
    trainer = train(folder, tmp_path)
    trainer.model.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="float32").state_dict()
    assert max_difference(loaded, weights(trainer)) == 0.0


# Callbacks


class Nosy(TrainerCallback):
    """Reads the policy, runs it and writes it back at every event."""

    def __init__(self) -> None:
        self.events: set[str] = set()
        self.trainer: Any = None

    def _look(self, event: str) -> None:
        self.events.add(event)
        model = self.trainer.model
        state = {name: value.clone() for name, value in model.state_dict().items()}
        assert not any(value.isnan().any() for value in state.values())
        was_training = model.training
        with torch.no_grad():
            model.generate(input_ids=torch.tensor([[5, 6]]), max_new_tokens=2, do_sample=False)
        model.train(was_training)
        model.load_state_dict(state)


for _event in ("train_begin", "step_begin", "substep_end", "pre_optimizer_step", "optimizer_step", "step_end"):
    setattr(Nosy, f"on_{_event}", lambda self, *_, event=_event, **__: self._look(event))
for _event in ("evaluate", "save", "log", "train_end", "epoch_begin", "prediction_step"):
    setattr(Nosy, f"on_{_event}", lambda self, *_, event=_event, **__: self._look(event))


@EVERY_WAY
def test_callbacks_read_run_and_write_the_policy_at_every_event(
    way: dict[str, str], folder: str, tmp_path: Path
) -> None:
    settings = {
        **{"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1},
        "gradient_accumulation_steps": 2,
        "trainer_kwargs": {"eval_dataset": digit_dataset(4)},
    }
    plain = train(folder, tmp_path, **settings, **way)
    trainer = build(folder, tmp_path, **settings, **way)
    nosy = Nosy()
    nosy.trainer = trainer
    trainer.add_callback(nosy)
    trainer.train()
    assert {"pre_optimizer_step", "substep_end", "evaluate", "save", "log", "prediction_step"} < nosy.events
    assert_same_training(trainer, plain)


@BOTH_WAYS
@pytest.mark.parametrize("event", ["on_step_begin", "on_pre_optimizer_step", "on_step_end", "on_evaluate"])
def test_a_callback_may_generate_with_the_engine(event: str, way: dict[str, str], folder: str, tmp_path: Path) -> None:
    made: list[Any] = []

    class Sampling(TrainerCallback):
        pass

    def sample(*_: Any, **__: Any) -> None:
        trainer.vllm_generation.sync_weights()
        made.append(trainer.vllm_generation.generate(prompts=[[5, 6]], images=None, num_generations=1))
        assert_at_rest(trainer)

    setattr(Sampling, event, sample)
    settings = {"eval_strategy": "steps", "eval_steps": 1, "num_iterations": 2}
    settings["trainer_kwargs"] = {"eval_dataset": digit_dataset(4)}
    plain = train(folder, tmp_path, **settings, **way)
    trainer = build(folder, tmp_path, **settings, **way)
    trainer.add_callback(Sampling())
    trainer.train()
    assert len(made) >= 3
    assert_same_training(trainer, plain)


@BOTH_WAYS
def test_a_callback_that_only_syncs_leaves_the_policy_where_it_trains(
    way: dict[str, str], folder: str, tmp_path: Path
) -> None:
    class Syncing(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            trainer.vllm_generation.sync_weights()

    trainer = build(folder, tmp_path, num_iterations=2, **way)
    trainer.add_callback(Syncing())
    trainer.train()
    assert_at_rest(trainer)


# Subclasses and rollout functions


@BOTH_WAYS
def test_a_subclass_may_generate_in_its_own_way(way: dict[str, str], folder: str, tmp_path: Path) -> None:
    class Own(HandoverTrainer):
        """Stock's single turn without its bookkeeping, as a user writes it who does not call super()."""

        def _generate(self, prompts: list[Any]) -> Any:
            ids, images, fields = self._tokenize_prompts(prompts)
            completion_ids, logprobs = self._generate_single_turn(ids, images, fields, self.num_generations)
            completions = self.processing_class.batch_decode(completion_ids, skip_special_tokens=True)
            return ids, completion_ids, None, completions, logprobs, {}, None, []

    trainer = build(folder, tmp_path, Own, **way)
    trainer.train()
    assert max(gaps(trainer)) < 1e-4
    assert_at_rest(trainer)


def sampled(trainer: Any, prompts: list[str], generate: Callable[..., Any]) -> dict[str, Any]:
    ids = [byte_tokenizer()(p)["input_ids"] for p in prompts]
    made = generate([{"prompt_token_ids": row} for row in ids], SimpleNamespace(max_tokens=4), use_tqdm=False)
    outputs = [completion.outputs[0] for completion in made]
    return {
        "prompt_ids": ids,
        "completion_ids": [output.token_ids for output in outputs],
        "logprobs": [[next(iter(lp.values())).logprob for lp in output.logprobs] for output in outputs],
    }


@BOTH_WAYS
def test_a_rollout_function_may_put_the_engine_to_sleep_itself(
    way: dict[str, str], folder: str, tmp_path: Path
) -> None:
    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        generation = trainer.vllm_generation
        first = sampled(trainer, prompts, generation.llm.generate)
        generation.llm.sleep(level=2)
        ids = first["prompt_ids"]
        _, completion_ids, logprobs, _ = generation.generate(prompts=ids, images=None, num_generations=4)
        generation.llm.sleep(level=2)
        return {**first, "completion_ids": completion_ids, "logprobs": [[lp[0] for lp in row] for row in logprobs]}

    trainer = train(folder, tmp_path, trainer_kwargs={"rollout_func": rollout}, **way)
    assert len(gaps(trainer)) == 3
    assert max(gaps(trainer)) < 1e-4
    assert_at_rest(trainer)


def test_sampling_that_moves_vllms_log_probs_does_not_end_the_run(folder: str, tmp_path: Path, stock: Any) -> None:
    def shifted(engine: FakeLLM) -> None:
        complete = engine._complete

        def renormalized(*args: Any) -> Any:
            made = complete(*args)
            for logprobs in made.outputs[0].logprobs:
                for entry in logprobs.values():
                    entry.logprob = -0.1  # what top_k=1 leaves of any distribution
            return made

        engine._complete = renormalized

    reference = stock(folder, tmp_path, generation_kwargs={"top_k": 1})
    shifted(reference.vllm_generation.llm)
    reference.train()
    assert min(gaps(reference)) > 1
    ours = build(folder, tmp_path, generation_kwargs={"top_k": 1}, reuse_old_logprobs="off")
    shifted(ours.vllm_generation.llm)
    ours.train()
    assert_same_training(ours, reference)


# Reward and reference models


@BOTH_WAYS
def test_reward_models_beside_functions_score_as_in_stock(
    way: dict[str, str], folder: str, tmp_path: Path, stock: Any
) -> None:
    def rewards() -> dict[str, Any]:
        torch.manual_seed(5)
        model = Qwen3ForSequenceClassification(Qwen3Config(**{**tiny_model().config.to_dict(), "num_labels": 1}))
        return {
            "reward_funcs": [model, digit_reward],
            "reward_processing_classes": [byte_tokenizer(), None],
        }

    reference = stock(folder, tmp_path, beta=0.1, trainer_kwargs=rewards())
    reference.train()
    assert_same_training(train(folder, tmp_path, beta=0.1, trainer_kwargs=rewards(), **way), reference)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_with_saved_modules_and_a_reference_train_as_in_stock_but_for_the_base(
    folder: str, tmp_path: Path, stock: Any, dtype: str
) -> None:
    lora = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["norm"])}
    settings = {"beta": 0.1, "trainer_kwargs": lora, "model_init_kwargs": {"dtype": dtype}, "learning_rate": 1e-2}
    reference = with_frozen_base(stock(folder, tmp_path, **settings))
    reference.train()
    ours = train(folder, tmp_path, **settings)
    assert max_difference(weights(ours), weights(reference)) == 0.0
    for mine, its in zip(comparable_log(ours), comparable_log(reference), strict=True):
        assert mine == pytest.approx(its, rel=1e-6, abs=1e-9)  # a mean of bf16 ratios is rounded elsewhere


def test_the_base_moves_in_stock(folder: str, tmp_path: Path, stock: Any) -> None:
    """If this fails, TRL or PEFT keeps the base: `adapter_weights.py` and its README line can go."""
    lora = {"peft_config": LoraConfig(r=4, target_modules="all-linear")}
    trainer = stock(folder, tmp_path, trainer_kwargs=lora, model_init_kwargs={"dtype": "bfloat16"}, learning_rate=1e-2)
    base = {name: p.clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}
    trainer.train()
    assert any(not torch.equal(trainer.model.get_parameter(name), value) for name, value in base.items())


def test_sharing_with_adapters_is_refused_where_it_was_asked_for(folder: str, tmp_path: Path) -> None:
    lora = {"peft_config": LoraConfig(r=4, target_modules="all-linear")}
    with pytest.raises(SettingsError, match="adapters are merged"):
        build(folder, tmp_path, trainer_kwargs=lora, share_vllm_weights="on")


def test_an_fp32_head_is_copied_not_shared(tmp_path: Path, stock: Any) -> None:
    folder = save_tiny_model(tmp_path / "model", torch.bfloat16, tie_word_embeddings=False)
    settings = {"model_init_kwargs": {"dtype": "bfloat16"}, "cast_lm_head_to_fp32": True}
    reference = stock(folder, tmp_path, **settings)
    reference.train()
    ours = train(folder, tmp_path, optimizer_placement="device", reuse_old_logprobs="off", **settings)
    assert_same_training(ours, reference)
    assert {s.name: s.value for s in ours.resolved_settings}["share_vllm_weights"] == "off"


# Failures


class Boom(Exception):
    """A user's own error."""


@BOTH_WAYS
@pytest.mark.parametrize(
    ("place", "kind"),
    [(place, Boom) for place in ("reward", "evaluation", "tokenizing", "generate")]
    + [("generate", KeyboardInterrupt)],
)
def test_after_an_error_of_the_user_the_next_training_is_as_the_first(
    place: str, kind: type[BaseException], way: dict[str, str], folder: str, tmp_path: Path
) -> None:
    armed = [True]

    def fail(name: str) -> None:
        if armed[0] and name == place:
            armed[0] = False
            raise kind("stop")

    class Failing(HandoverTrainer):
        def _tokenize_prompts(self, prompts: list[Any]) -> Any:
            fail("tokenizing")
            return super()._tokenize_prompts(prompts)

        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            fail("evaluation")
            return super().prediction_step(*args, **kwargs)

    def reward(completions: list[str], digit: list[str], **_: Any) -> list[float]:
        fail("reward")
        return digit_reward(completions, digit)

    settings = {"eval_strategy": "steps", "eval_steps": 1}
    settings["trainer_kwargs"] = {"eval_dataset": digit_dataset(4), "reward_funcs": reward}
    trainer = build(folder, tmp_path, Failing, **settings, **way)
    if place == "generate":
        trainer.vllm_generation.llm.fails["generate"] = kind("stop")
    with pytest.raises(kind):
        trainer.train()
    assert_at_rest(trainer)
    trainer.train()
    assert trainer.state.global_step == 3
    assert max(gaps(trainer)) < 1e-4
    assert_at_rest(trainer)


@BOTH_WAYS
def test_requests_that_a_failure_left_behind_are_dropped(way: dict[str, str], folder: str, tmp_path: Path) -> None:
    trainer = build(folder, tmp_path, **way)
    trainer.vllm_generation.llm.fails["generate"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train()  # the fake refuses to generate while it has requests of before
    assert not trainer.vllm_generation.llm.llm_engine.output_processor.request_states


@BOTH_WAYS
@pytest.mark.parametrize("tag", ["weights", "kv_cache"])
def test_what_a_failed_wake_had_mapped_is_given_back(
    tag: str, way: dict[str, str], folder: str, tmp_path: Path
) -> None:
    trainer = build(folder, tmp_path, **way)
    engine = trainer.vllm_generation.llm
    engine.fails[f"wake {tag}"] = torch.OutOfMemoryError("no room")
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    assert engine.mapped == (set() if way else {"weights"})
    assert_at_rest(trainer)


@pytest.mark.parametrize("share", ["auto", "off"])
def test_a_model_survives_an_engine_that_does_not_start(share: str, folder: str, tmp_path: Path) -> None:
    class Broken(HandoverTrainer):
        def _engine_class(self, **arguments: Any) -> FakeLLM:
            raise torch.OutOfMemoryError("no room")

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(torch.OutOfMemoryError) as failure:  # which keeps the trainer, as a notebook does
        build(folder, tmp_path, Broken, trainer_kwargs={"model": model}, share_vllm_weights=share)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # see `build`
        os.environ.pop(name, None)
    assert max_difference({k: v.clone() for k, v in model.state_dict().items()}, before) == 0.0
    del failure
    gc.collect()
    train(folder, tmp_path, trainer_kwargs={"model": model})


def test_a_failing_sleep_still_gives_the_policy_back(folder: str, tmp_path: Path) -> None:
    trainer = build(folder, tmp_path, **COPYING)
    engine = trainer.vllm_generation.llm
    engine.fails["slept"] = AssertionError("Memory usage increased after sleeping.")
    trainer.train()
    assert trainer.state.global_step == 3
    assert_at_rest(trainer)


def test_cached_memory_is_released_before_the_engine_wakes(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = build(
        folder, tmp_path, trainer_kwargs={"peft_config": LoraConfig(r=4, target_modules="all-linear")}, max_steps=1
    )
    engine = trainer.vllm_generation.llm
    monkeypatch.setattr("trl_budget.rollout.release_cached_memory", lambda: engine.events.append(("release", "")))
    trainer.train()
    names = events(trainer, with_residents=False)
    assert all(names[place - 1] == "release" for place, name in enumerate(names) if name.startswith("wake"))


# The end


@EVERY_WAY
def test_a_deleted_trainer_leaves_nothing_behind(way: dict[str, str], folder: str, tmp_path: Path) -> None:
    gc.collect()
    before = host_slab_bytes()
    trainer = build(folder, tmp_path, optimizer_placement="host", beta=0.1, max_steps=1, **way)
    trainer.train()
    model, engine = weakref.ref(trainer.model), weakref.ref(trainer.vllm_generation.llm.model)
    del trainer
    gc.collect()
    assert model() is None
    assert engine() is None
    assert host_slab_bytes() == before


def test_two_trainers_one_after_the_other_train_alike(folder: str, tmp_path: Path) -> None:
    first = train(folder, tmp_path)
    log = comparable_log(first)
    del first
    assert comparable_log(train(folder, tmp_path)) == log


def test_a_users_models_can_be_used_after_the_trainer_is_gone(folder: str, tmp_path: Path) -> None:
    reward_model = Qwen3ForSequenceClassification(Qwen3Config(**{**tiny_model().config.to_dict(), "num_labels": 1}))
    before = {name: value.clone() for name, value in reward_model.state_dict().items()}
    rewards = {"reward_funcs": [reward_model], "reward_processing_classes": [byte_tokenizer()]}
    trainer = train(folder, tmp_path, trainer_kwargs=rewards)
    del trainer
    gc.collect()
    assert max_difference({k: v.clone() for k, v in reward_model.state_dict().items()}, before) == 0.0
    train(folder, tmp_path, trainer_kwargs=rewards)


# Tools


def scripted(engine: FakeLLM) -> None:
    """The first turn of each batch calls the tool twice, once wrongly; the second turn ends."""
    tokenizer = chat_tokenizer()

    def answer(row: int, prompt_ids: list[int], _: Any) -> Any:
        text = ANSWERS[row] if len(engine.requests) == len(ANSWERS) else "Done!<|im_end|>"
        ids = tokenizer(text)["input_ids"]
        scores = engine.reference(torch.tensor([prompt_ids + ids])).logits[0].float().log_softmax(-1)
        logprobs = [
            {token: SimpleNamespace(rank=1, logprob=float(scores[len(prompt_ids) + i - 1, token]))}
            for i, token in enumerate(ids)
        ]
        output = SimpleNamespace(token_ids=ids, logprobs=logprobs)
        return SimpleNamespace(prompt_token_ids=prompt_ids, outputs=[output])

    engine._complete = answer


@BOTH_WAYS
def test_tools_are_called_and_answered_as_in_stock(way: dict[str, str], tmp_path: Path, stock: Any) -> None:
    tool_model = tmp_path / "model"
    tiny_model(vocab_size=264, max_position_embeddings=4096).save_pretrained(tool_model)
    settings = {"max_completion_length": 256, "vllm_max_model_length": 4096, "reuse_old_logprobs": "off"}
    settings["trainer_kwargs"] = {**common(), "model": str(tool_model), "tools": [double]}
    ours = build(str(tool_model), tmp_path, **settings, **way)
    scripted(ours.vllm_generation.llm)
    ours.train()
    del settings["reuse_old_logprobs"]
    reference = stock(str(tool_model), tmp_path, **settings)
    scripted(reference.vllm_generation.llm)
    reference.train()
    assert ours.state.log_history[0]["tools/call_frequency"] == 0.5
    assert_same_training(ours, reference)
    assert max(gaps(ours)) < 1e-4
    assert events(ours, with_residents=False).count("generate") == 2 * 3
    assert events(ours, with_residents=False).count("sleep") == 1 + 3


# Other backends


def test_without_vllm_nothing_is_parked(folder: str, tmp_path: Path) -> None:
    trainer = build(folder, tmp_path, use_vllm=False)
    trainer.train()
    assert trainer.state.global_step == 3
    assert trainer.generation_config.max_new_tokens == 6
    assert trainer._engine is None
    assert "share_vllm_weights" not in {s.name for s in trainer.resolved_settings}


def test_a_tool_that_runs_the_policy_during_a_rollout_is_told_why_not(folder: str, tmp_path: Path) -> None:
    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        return {"logits": trainer.model(torch.tensor([[1]]))}

    trainer = build(folder, tmp_path, trainer_kwargs={"rollout_func": rollout}, **COPYING)
    with pytest.raises(ParkedError, match="policy"):
        trainer.train()
    assert_at_rest(trainer)

"""The card changes hands between the trainer and an engine that sleeps: order, weights, failures. A fake engine, CPU.

The fake fills its weights with NaN when it sleeps and generates with what it holds, so a wrong order shows in tokens.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_vllm import FakeLLM, stand_in_for_vllm
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tiny import byte_tokenizer, comparable_log, make_trainer, max_difference, save_tiny_model, tiny_model, weights
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForSequenceClassification
from trl import GRPOConfig

from trl_budget import BudgetGRPOConfig, BudgetGRPOTrainer
from trl_budget.card import Card
from trl_budget.errors import DeviceMemoryError, ParkedError, SettingsError, StalePolicyError, WeightSyncError
from trl_budget.page_locking import CopySpeed
from trl_budget.residency import Phase
from trl_budget.rollout import ColocatedGeneration

SETTINGS = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 64, "max_steps": 3}
COPYING = {"share_vllm_weights": "off"}
NEITHER = {"share_vllm_weights": "off", "park_policy_during_rollout": "off"}
EVERY_WAY = pytest.mark.parametrize("way", [{}, COPYING, NEITHER], ids=["sharing", "parking", "neither"])


class HandoverTrainer(BudgetGRPOTrainer):
    """Ours, over the fake engine, which can sleep on a CPU."""

    def _can_engine_sleep(self, args: GRPOConfig) -> bool:
        return True

    def _engine_class(self, **arguments: Any) -> FakeLLM:
        engine = FakeLLM(arguments, watch=lambda: self.residents())
        engine._event("start")
        return engine

    def _build_card(self, policy: nn.Module) -> Any:
        for model in [policy, self.ref_model, *self.reward_funcs]:
            if isinstance(model, nn.Module):  # loaded weights are mapped from their file, which cannot be parked
                for parameter in model.parameters():
                    parameter.data = parameter.data.clone()
        return super()._build_card(policy)

    def residents(self) -> str:
        """Who of the trainer's models holds memory now."""
        owners = [self._parked_policy, *self._parked.values()]
        return ", ".join(owner.name for owner in owners if owner is not None and not owner.is_parked)


@pytest.fixture(autouse=True)
def _engine(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_vllm(monkeypatch)
    monkeypatch.setattr("trl_budget.rollout_policy.SHARED_DTYPES", ("bfloat16", "float16", "float32"))


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return save_tiny_model(tmp_path / "model")


def build(folder: str, tmp_path: Path, trainer_class: type = HandoverTrainer, **settings: Any) -> Any:
    config = {"config_class": BudgetGRPOConfig, "model_init_kwargs": {"dtype": "float32"}}
    trainer = make_trainer(trainer_class, tmp_path / "out", **{"model": folder, **config, **SETTINGS, **settings})
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # set for vLLM; the next trainer would train on "cpu:0"
        os.environ.pop(name, None)
    return trainer


def train(*args: Any, **settings: Any) -> Any:
    """A trainer that has trained; built only now, since a build draws random numbers."""
    trainer = build(*args, **settings)
    trainer.train()
    return trainer


def events(trainer: Any, *, with_residents: bool = True) -> list[Any]:
    """The engine's events, repeated loads once."""
    found: list[tuple[str, Any]] = []
    for event in trainer.vllm_generation.llm.events:
        if event[0] != "load" or found[-1][0] != "load":
            found.append(event)
    return found if with_residents else [name for name, _ in found]


# Order


def test_in_copy_mode_nothing_of_the_trainer_is_on_the_card_while_the_engine_is_awake(
    folder: str, tmp_path: Path
) -> None:
    trainer = build(folder, tmp_path, max_steps=2, **COPYING)
    trainer.train()
    rollout = ["wake weights", "load", "reset", "wake kv_cache", "generate", "sleep"]
    assert events(trainer) == [(event, "") for event in ["start", "sleep", *rollout, *rollout]]
    assert trainer.residents() == "policy"


@pytest.mark.parametrize("pins", [True, False])
def test_parked_weights_are_page_locked_as_the_field_says(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pins: bool
) -> None:
    monkeypatch.setattr("trl_budget.page_locking._DEVICES_BEHIND_A_BUS", ("cpu",))
    monkeypatch.setattr("trl_budget.page_locking.copy_speed", lambda device, slab: CopySpeed(1.0, 1.0))
    asked: list[int] = []
    monkeypatch.setattr("trl_budget.pinned._cuda_host_register", lambda address, nbytes: asked.append(nbytes) or 0)
    monkeypatch.setattr("trl_budget.pinned._cuda_host_unregister", lambda address: None)
    trainer = build(folder, tmp_path, beta=0.1, pin_host_memory=pins, **COPYING)
    parked = [trainer._parked_policy, *trainer._parked.values()]
    asked.clear()
    for owner in parked:
        owner.unpark()
        owner.release_host_copy()
        owner.park()
    assert [owner.name for owner in parked] == ["policy", "reference"]
    assert asked == ([owner.host_bytes for owner in parked] if pins else [])


def test_in_share_mode_nothing_is_loaded_and_the_weights_never_leave(folder: str, tmp_path: Path) -> None:
    trainer = build(folder, tmp_path, max_steps=2)
    trainer.train()
    rollout = ["wake weights", "reset", "wake kv_cache", "generate", "sleep"]
    assert events(trainer, with_residents=False) == ["start", "load", "sleep", *rollout, *rollout]
    assert events(trainer)[:2] == [("start", ""), ("load", "")]
    engine = trainer.vllm_generation.llm
    for name, parameter in trainer.model.named_parameters():
        assert parameter.data_ptr() == engine.model.view(name).data_ptr()


def test_reference_and_reward_models_are_there_only_while_they_score(folder: str, tmp_path: Path) -> None:
    config = Qwen3Config(**{**tiny_model().config.to_dict(), "num_labels": 1})
    reward_model = Qwen3ForSequenceClassification(config)
    seen: dict[str, list[str]] = {"reference": [], "reward": []}
    trainer = build(
        folder,
        tmp_path,
        beta=0.1,
        sync_ref_model=True,
        ref_model_sync_steps=1,
        trainer_kwargs={"reward_funcs": [reward_model], "reward_processing_classes": [byte_tokenizer()]},
        **COPYING,
    )
    trainer.ref_model.register_forward_pre_hook(lambda *_: seen["reference"].append(trainer.residents()))
    reward_model.register_forward_pre_hook(lambda *_: seen["reward"].append(trainer.residents()))
    trainer.train()
    assert set(seen["reference"]) == {"policy, reference"}
    assert set(seen["reward"]) == {"policy, reward model 0"}
    assert {residents for _, residents in events(trainer)} == {""}


def test_a_parked_bf16_reference_follows_the_policy_by_small_shares(folder: str, tmp_path: Path) -> None:
    settings = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.01}
    ends = {}
    for name, way in {"parked": COPYING, "present": NEITHER}.items():
        trainer = train(folder, tmp_path, model_init_kwargs={"dtype": "bfloat16"}, **settings, **way)
        parked = trainer._parked.get(trainer.ref_model)
        assert (parked is not None and parked.is_parked) == (name == "parked")
        values = dict(trainer.ref_model.named_parameters() if parked is None else parked.host_tensors())
        assert {value.dtype for value in values.values()} == {torch.bfloat16}
        ends[name] = {key: value.detach().clone() for key, value in values.items()}
        assert trainer._fp32_reference.nbytes == 4 * sum(value.numel() for value in values.values())
    start = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).named_parameters())
    assert any(not torch.equal(value, start[key]) for key, value in ends["parked"].items())
    assert max_difference(ends["parked"], ends["present"]) == 0.0


@pytest.mark.parametrize("placement", ["host", "device"])
def test_the_first_step_is_printed_phase_by_phase(
    placement: str, folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(folder, tmp_path, optimizer_placement=placement, **COPYING)
    printed = capsys.readouterr().out.splitlines()
    starts = [index for index, line in enumerate(printed) if line.startswith("Memory of the card")]
    assert len(starts) == 1
    assert [line.split("  ")[0] for line in printed[starts[0] + 2 : starts[0] + 6]] == [
        "rollout",
        "score",
        "update",
        "optimizer step",
    ]


def test_an_engine_that_tools_call_many_times_sleeps_once(folder: str, tmp_path: Path) -> None:
    class ManyTurns(HandoverTrainer):
        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            for _ in range(3):
                made = super()._generate_single_turn(*args, **kwargs)
            return made

    trainer = build(folder, tmp_path, ManyTurns, max_steps=1, **COPYING)
    trainer.train()
    names = events(trainer, with_residents=False)
    assert names == ["start", "sleep", "wake weights", "load", "reset", "wake kv_cache", *["generate"] * 3, "sleep"]


def test_a_rollout_function_gets_the_engine_awake_with_the_present_weights(folder: str, tmp_path: Path) -> None:
    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = [byte_tokenizer()(p)["input_ids"] for p in prompts]
        made = trainer.vllm_generation.llm.generate(
            [{"prompt_token_ids": row} for row in ids], SimpleNamespace(max_tokens=4), use_tqdm=False
        )
        outputs = [completion.outputs[0] for completion in made]
        return {
            "prompt_ids": ids,
            "completion_ids": [output.token_ids for output in outputs],
            "logprobs": [[next(iter(lp.values())).logprob for lp in output.logprobs] for output in outputs],
        }

    trainer = build(folder, tmp_path, trainer_kwargs={"rollout_func": rollout}, **COPYING)
    trainer.train()
    gaps = [entry["sampling/sampling_logp_difference/max"] for entry in trainer.state.log_history[:-1]]
    assert len(gaps) == 3
    assert max(gaps) < 1e-4


def test_evaluation_between_steps_syncs_again(folder: str, tmp_path: Path) -> None:
    from tiny import digit_dataset

    trainer = build(folder, tmp_path, trainer_kwargs={"eval_dataset": digit_dataset(4)}, **COPYING)
    trainer.evaluate()
    trainer.evaluate()
    names = events(trainer, with_residents=False)
    assert names.count("load") == names.count("generate") == names.count("sleep") - 1 == 4
    assert trainer.residents() == "policy"


# Training


@EVERY_WAY
def test_every_way_trains_the_same_bits_and_samples_from_the_policy(
    way: dict[str, str], folder: str, tmp_path: Path
) -> None:
    plain = train(folder, tmp_path / "plain", vllm_enable_sleep_mode=False, **NEITHER)
    other = train(folder, tmp_path / "other", vllm_enable_sleep_mode=True, **way)
    assert comparable_log(other) == comparable_log(plain)
    assert max_difference(weights(other), weights(plain)) == 0.0
    assert max(e["sampling/sampling_logp_difference/max"] for e in other.state.log_history[:-1]) < 1e-4
    assert "sleep" not in events(plain, with_residents=False)


def test_sharing_with_the_host_optimizer_over_bf16_weights_trains_as_copying(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", torch.bfloat16)
    settings = {"model_init_kwargs": {"dtype": "bfloat16"}}
    runs = {
        name: train(folder, tmp_path / name, **settings, **way)
        for name, way in {"sharing": {}, "copying": COPYING}.items()
    }
    assert runs["sharing"]._host_adamw is not None
    assert comparable_log(runs["sharing"]) == comparable_log(runs["copying"])
    assert max_difference(weights(runs["sharing"]), weights(runs["copying"])) == 0.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_are_merged_layer_by_layer_while_the_policy_is_away(folder: str, tmp_path: Path, dtype: str) -> None:
    settings = {
        "trainer_kwargs": {"peft_config": LoraConfig(r=4, target_modules="all-linear")},
        "model_init_kwargs": {"dtype": dtype},
        "verify_weight_sync": "always",
        "learning_rate": 1e-2,
    }
    plain = train(folder, tmp_path / "plain", vllm_enable_sleep_mode=False, **NEITHER, **settings)
    built = build(folder, tmp_path / "parked", **settings)
    base = {name: p.clone() for name, p in built.model.named_parameters() if not p.requires_grad}
    parked = train(folder, tmp_path / "parked", **settings)
    assert comparable_log(parked) == comparable_log(plain)
    assert max_difference(weights(parked), weights(plain)) == 0.0
    assert base and all(torch.equal(parked.model.get_parameter(name), value) for name, value in base.items())
    assert {residents for name, residents in events(parked) if name != "start"} == {""}
    row = {s.name: s for s in parked.resolved_settings}["share_vllm_weights"]
    assert (row.value, row.reason) == ("off", "adapters are merged into vLLM's own copy")


def test_a_load_that_fails_leaves_no_adapter_merged_while_its_error_is_on_its_way(folder: str, tmp_path: Path) -> None:
    lora = {"peft_config": LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)}
    trainer = build(folder, tmp_path, trainer_kwargs=lora)
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    model = trainer.vllm_generation.llm.model
    load_weights = model.load_weights

    def fails(pairs: list[tuple[str, torch.Tensor]]) -> None:
        if "layers.1.self_attn.k_proj" in pairs[0][0]:
            raise torch.OutOfMemoryError("no room")
        load_weights(pairs)

    model.load_weights = fails
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.train()
    assert caught.tb is not None, "its frames are alive"
    assert not any(getattr(module, "merged", False) for module in trainer.model.modules())
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())


def test_adapters_that_add_inputs_are_refused_before_the_engine_starts(folder: str, tmp_path: Path) -> None:
    prompt = {"peft_config": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)}
    with pytest.raises(SettingsError, match="PROMPT_TUNING"):
        build(folder, tmp_path, trainer_kwargs=prompt)


def test_a_shared_policy_is_saved_as_a_copied_one(folder: str, tmp_path: Path) -> None:
    trainer = build(folder, tmp_path)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="float32").state_dict()
    assert max_difference(loaded, weights(trainer)) == 0.0


# Failures


@pytest.mark.parametrize("way", [{}, COPYING], ids=["sharing", "parking"])
@pytest.mark.parametrize("event", ["wake weights", "load", "reset", "wake kv_cache", "generate"])
def test_after_a_failure_the_engine_sleeps_and_the_policy_is_back(
    event: str, way: dict[str, str], folder: str, tmp_path: Path
) -> None:
    if event == "load" and not way:
        pytest.skip("nothing is loaded where weights are shared")
    trainer = build(folder, tmp_path, **way)
    engine = trainer.vllm_generation.llm
    engine.fails[event] = torch.OutOfMemoryError("no room")
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        trainer.train()
    assert engine.sleeping_tags == {"weights", "kv_cache"}
    assert trainer.residents() == ("policy" if way else "")
    assert not any(p.isnan().any() for p in trainer.model.parameters())
    trainer.train()  # and goes on
    assert trainer.state.global_step == 3


def test_where_the_start_itself_is_refused_the_user_s_model_is_back(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = Card._begin

    def refuse_start(self: Card, phase: Phase) -> None:
        begin(self, phase)
        if phase == Phase.START:
            raise DeviceMemoryError("more than the budget")

    monkeypatch.setattr(Card, "_begin", refuse_start)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(DeviceMemoryError, match="more than the budget") as raised:
        build("unused", tmp_path, trainer_kwargs={"model": model}, **COPYING)  # not a copy of it
    assert max_difference(dict(model.state_dict()), before) == 0.0
    del raised  # until now it kept the trainer, which gives the model back when it goes


def test_a_policy_that_is_moved_away_from_the_shared_weights_is_named(folder: str, tmp_path: Path) -> None:
    trainer = build(folder, tmp_path)
    weight = trainer.model.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data.clone()
    with pytest.raises(WeightSyncError, match=r"model.layers.1.mlp.up_proj.weight is no longer a view"):
        trainer.train()


def test_a_forward_while_the_engine_has_the_card_is_refused(folder: str, tmp_path: Path) -> None:
    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        return trainer.model(torch.tensor([[1]]))

    trainer = build(folder, tmp_path, trainer_kwargs={"rollout_func": rollout}, **COPYING)
    with pytest.raises(ParkedError, match="policy was run while its weights are parked"):
        trainer.train()
    assert trainer.residents() == "policy"


def test_a_stale_engine_is_found_within_one_step(folder: str, tmp_path: Path) -> None:
    class Forgetful(HandoverTrainer):
        def _start_engine(self) -> None:
            super()._start_engine()
            self.vllm_generation.sync_weights = lambda: None

    settings = {"park_policy_during_rollout": "off", "share_vllm_weights": "off", "learning_rate": 0.5}
    trainer = build(folder, tmp_path, Forgetful, **settings)
    with pytest.raises(StalePolicyError):
        trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.parametrize(("how", "num_found"), [("always", 1), ("first", 0), ("off", 0)])
def test_verification_names_the_first_weight_that_differs(
    how: str, num_found: int, folder: str, tmp_path: Path
) -> None:
    trainer = build(folder, tmp_path, verify_weight_sync=how, learning_rate=1e-6, **COPYING)
    engine = trainer.vllm_generation.llm
    load_weights = engine.model.load_weights

    def losing(weights: list[tuple[str, torch.Tensor]]) -> None:
        if not (weights[0][0] == "model.layers.1.self_attn.k_proj.weight" and trainer.state.global_step == 1):
            load_weights(weights)
        else:
            engine.model.view(weights[0][0]).zero_()

    engine.model.load_weights = losing
    if num_found:
        with pytest.raises(WeightSyncError, match=r"step 1, .*model.layers.1.self_attn.k_proj.weight"):
            trainer.train()
    else:
        trainer.train()


# Settings


def test_the_engine_is_built_as_stock_builds_it(folder: str, tmp_path: Path) -> None:
    arguments = build(folder, tmp_path, vllm_gpu_memory_utilization=0.85, **COPYING).vllm_generation.llm.arguments
    assert arguments == {
        "model": folder,
        "tensor_parallel_size": 1,
        "gpu_memory_utilization": 0.85,
        "max_model_len": 64,
        "max_num_seqs": 4,
        "enable_sleep_mode": True,
        "model_impl": "vllm",
        "distributed_executor_backend": "external_launcher",
        "max_num_batched_tokens": 4096,
        "seed": 0,
        "logprobs_mode": "processed_logprobs",
        "quantization": None,
        "trust_remote_code": False,
    }


def test_runs_that_start_at_the_same_time_meet_at_ports_of_their_own(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL takes 29500 where it is free, also when another run has chosen it and does not listen yet."""
    chosen = []
    for given in ("", "auto", "0", "none", "29876"):
        monkeypatch.setenv("MASTER_PORT", given)
        build(folder, tmp_path)
        chosen.append(os.environ["MASTER_PORT"])
    *ours, users = chosen
    assert "29500" not in ours and len(set(ours)) > 1
    assert all(int(port) > 1023 for port in ours)
    assert users == "29876"


@pytest.mark.parametrize("num_processes", [1, 2])
def test_several_ranks_meet_at_one_port(monkeypatch: pytest.MonkeyPatch, num_processes: int) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
    given = []
    monkeypatch.setattr(
        "trl_budget.rollout.ensure_master_addr_port", lambda: given.append(os.environ["MASTER_PORT"] != "")
    )
    generation = ColocatedGeneration.__new__(ColocatedGeneration)
    generation.accelerator = SimpleNamespace(process_index=0, local_process_index=0, num_processes=num_processes)
    generation._set_environment()
    assert given == [num_processes == 1], "TRL's choice is the same on every rank, one of ours is not"


def test_what_cannot_be_shared_is_copied_with_the_reason(folder: str, tmp_path: Path) -> None:
    class TensorParallel(HandoverTrainer):
        def _engine_class(self, **arguments: Any) -> FakeLLM:
            engine = super()._engine_class(**arguments)
            engine.model.get_submodule("model.norm").weight = nn.Parameter(torch.zeros(32), requires_grad=False)
            return engine

    trainer = build(folder, tmp_path, TensorParallel)
    row = {s.name: s for s in trainer.resolved_settings}["share_vllm_weights"]
    assert row.value == "off"
    assert "model.norm.weight" in row.reason
    assert trainer.residents() == "policy"
    with pytest.raises(SettingsError, match=r"share_vllm_weights='on', but .*model.norm.weight"):
        build(folder, tmp_path, TensorParallel, share_vllm_weights="on")


def test_rows_that_vllm_reorders_when_it_loads_them_are_copied(folder: str, tmp_path: Path) -> None:
    class Reordering(HandoverTrainer):
        def _engine_class(self, **arguments: Any) -> FakeLLM:
            engine = super()._engine_class(**arguments)
            load_weights = engine.model.load_weights
            engine.model.load_weights = lambda pairs: load_weights(
                [(name, weight.flip(0) if "o_proj" in name else weight) for name, weight in pairs]
            )
            return engine

    trainer = build(folder, tmp_path, Reordering)
    row = {s.name: s for s in trainer.resolved_settings}["share_vllm_weights"]
    assert (row.value, "lays weights out in another order" in row.reason, "o_proj" in row.reason) == (
        "off",
        True,
        True,
    )


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_refused_before_the_model_is_loaded(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "expandable_segments:True")
    with pytest.raises(SettingsError, match=variable):
        build("no such model", tmp_path)


def test_vespo_is_checked_as_in_stock(folder: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="VESPO loss requires"):
        build(folder, tmp_path, loss_type="vespo")
    trainer = build(folder, tmp_path, loss_type="vespo", vllm_importance_sampling_mode="token_mask")
    assert trainer.use_vllm
    assert not hasattr(trainer, "generation_config")


# Adapters


ONE_END = {
    "a saved head": {"modules_to_save": ["lm_head"]},
    "lora of the embedding": {"target_modules": ["embed_tokens"]},
}


@pytest.mark.parametrize("kind", ONE_END)
def test_adapters_at_one_end_of_a_tie_are_refused_before_the_engine_starts(
    kind: str, folder: str, tmp_path: Path
) -> None:
    class Trainer(HandoverTrainer):
        def _engine_class(self, **_: Any) -> FakeLLM:
            raise AssertionError("the engine was started")

    lora = {"peft_config": LoraConfig(**{"r": 4, "target_modules": ["q_proj"], **ONE_END[kind]})}
    with pytest.raises(SettingsError, match=r"(lm_head|embed_tokens).*which the model ties to.*use_vllm=False"):
        build(folder, tmp_path, Trainer, trainer_kwargs=lora)


@EVERY_WAY
def test_trained_tokens_reach_the_engine(way: dict[str, str], tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", tie_word_embeddings=False)
    config = LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=list(range(2, 200)))
    trainer = build(
        folder,
        tmp_path,
        trainer_kwargs={"peft_config": config},
        learning_rate=3e-2,
        verify_weight_sync="always",
        **{**way, "share_vllm_weights": "auto"},
    )
    base = {name: p.clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}
    trainer.train()
    assert trainer._weight_sync._num_verified >= 3
    assert max(largest_gaps(trainer)) < 1e-4
    assert all(torch.equal(trainer.model.get_parameter(name), value) for name, value in base.items())


def largest_gaps(trainer: Any) -> list[float]:
    return [e[key] for e in trainer.state.log_history for key in e if "sampling_logp_difference/max" in key]


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_model_with_adapters_of_any_name_is_served(beta: float, tmp_path: Path) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["norm"])
    name = "mine" if beta == 0 else "default"  # TRL makes "ref" of it
    policy = get_peft_model(tiny_model(), config, adapter_name=name)
    policy.get_base_model().config._name_or_path = policy.name_or_path = save_tiny_model(tmp_path / "model")
    trainer = build(
        policy, tmp_path, beta=beta, learning_rate=3e-2, verify_weight_sync="always", model_init_kwargs=None
    )
    assert ("ref" in trainer.model.peft_config) == (beta > 0)
    trainer.train()
    assert max(largest_gaps(trainer)) < 1e-4


# Log-probs of a forward that is random


RANDOM_FORWARDS: dict[str, dict[str, Any]] = {
    "neftune_noise_alpha=5": {"neftune_noise_alpha": 5.0},
    "lora_dropout": {
        "trainer_kwargs": {"peft_config": LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5)},
        "learning_rate": 0.3,
    },
}


@pytest.mark.parametrize("reason", RANDOM_FORWARDS)
def test_where_the_trainers_log_probs_are_random_the_gap_ends_no_run(
    reason: str, folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "trl_budget.checked_rollouts"):
        trainer = train(folder, tmp_path, verify_weight_sync="always", **RANDOM_FORWARDS[reason])
    assert trainer.state.global_step == 3
    assert max(largest_gaps(trainer)) > 0.5
    told = [record.getMessage() for record in caplog.records if "is not watched" in record.getMessage()]
    assert len(told) == 1 and reason in told[0] and "verify_weight_sync" in told[0]


def test_with_a_random_forward_the_weights_are_still_compared(folder: str, tmp_path: Path) -> None:
    trainer = build(folder, tmp_path, neftune_noise_alpha=5.0, verify_weight_sync="always", share_vllm_weights="off")
    model = trainer.vllm_generation.llm.model
    load_weights = model.load_weights

    def stale(named: Any) -> None:
        load_weights([(name, weight + (0.5 if "v_proj" in name else 0)) for name, weight in named])

    model.load_weights = stale
    with pytest.raises(WeightSyncError, match="v_proj"):
        trainer.train()


def test_in_evaluation_the_gap_is_watched_whatever_is_random_in_training(folder: str, tmp_path: Path) -> None:
    trainer = build(folder, tmp_path, neftune_noise_alpha=5.0, reuse_old_logprobs="off")
    trainer.model.eval()
    assert trainer._why_gap_is_wide() is None
    trainer.model.train()
    assert "neftune" in trainer._why_gap_is_wide()

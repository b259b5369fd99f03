"""Reuse of old log-probs: the skipped pass against the pass stock `GRPOTrainer` runs, without a vLLM engine.

`use_vllm` is set after TRL's constructor, which would start an engine, and a rollout function returns log-probs.
What a separate pass would have given is measured: a hook runs every update forward a second time, without gradient and
with the weights of generation time, and compares bits.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from test_token_budget import RecordsGradients, make_eval, relative, uneven_rollouts
from tiny import comparable_log, make_trainer, save_tiny_model, tiny_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, set_seed
from trl import GRPOTrainer

from trl_budget import BudgetGRPOConfig, BudgetGRPOTrainer, SettingsError

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
SETTINGS: dict[str, Any] = {
    "gradient_accumulation_steps": 4,
    "per_device_train_batch_size": 4,
    "max_completion_length": 16,
    "max_steps": 2,
    "vllm_importance_sampling_clip_max": 1.02,
    "vllm_importance_sampling_clip_min": 0.97,
}


class NoEngine:
    """Stands where `VLLMGeneration` is: rollouts come from a function, so there are no weights to sync."""

    def sync_weights(self) -> None:
        pass


class WithoutEngine:
    """Mixin: TRL's `use_vllm=True` without its engine."""

    def _use_vllm(self) -> None:
        self.use_vllm = True
        self.vllm_generation = NoEngine()
        self._last_loaded_step = -1


class StockVllm(WithoutEngine, RecordsGradients, GRPOTrainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._use_vllm()


class OursVllm(WithoutEngine, RecordsGradients, BudgetGRPOTrainer):
    def _resolve_passes(self, **kwargs: Any) -> Any:
        self._use_vllm()
        return super()._resolve_passes(**kwargs)


def sampled_rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
    return with_log_probs(uneven_rollouts(prompts, trainer), trainer)


@torch.no_grad()
def with_log_probs(rollouts: dict[str, Any], trainer: Any) -> dict[str, Any]:
    """The policy's own log-probs, off by up to 4 %: ratios within and beyond both bounds, another set each time."""
    step = 0.018 + 0.002 * (trainer._step % 3)
    was_training = trainer.model.training
    trainer.model.eval()
    logprobs = []
    for row, (prompt, ids) in enumerate(zip(rollouts["prompt_ids"], rollouts["completion_ids"], strict=True)):
        logits = trainer.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        exact = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()
        logprobs.append([value + step * ((row * 7 + i * 3) % 5 - 2) for i, value in enumerate(exact)])
    trainer.model.train(was_training)
    return {**rollouts, "logprobs": logprobs}


def build(trainer_class: type, path: Path, model: Any = None, kwargs: Any = None, **more: Any) -> Any:
    is_ours = issubclass(trainer_class, BudgetGRPOTrainer)
    config = {"config_class": BudgetGRPOConfig} if is_ours else {}
    trainer_kwargs = {"rollout_func": sampled_rollouts, **(kwargs or {})}
    return make_trainer(trainer_class, path, model, trainer_kwargs=trainer_kwargs, **config, **{**SETTINGS, **more})


class Separate:
    """Watches the policy: which generations had a separate pass, and by how many bits' worth it would have differed.

    Every update forward is repeated without gradient, with the weights that the policy had when it generated.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.passes = 0
        self.is_skipped: list[bool] = []
        self.updates = 0
        self.differences: list[list[float]] = []
        self._snapshot: dict[str, torch.Tensor] = {}
        self._repeats = False
        rollout = trainer.rollout_func

        def rollout_func(prompts: list[str], trainer: Any) -> dict[str, Any]:
            self._snapshot = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
            self.is_skipped.append(True)
            self.differences.append([])
            return rollout(prompts, trainer)

        trainer.rollout_func = rollout_func
        trainer.model.register_forward_hook(self._after, with_kwargs=True)

    def _after(self, model: Any, args: Any, kwargs: dict[str, Any], outputs: Any) -> None:
        if not self.is_skipped:  # a trial forward, before any rollout
            return
        if self._repeats or not kwargs.get("fused_lm_head"):
            return
        if not torch.is_grad_enabled() and model.training:
            self.passes += 1
            self.is_skipped[-1] = False
            return
        self.updates += torch.is_grad_enabled()
        state, now = torch.get_rng_state(), {name: p.detach().clone() for name, p in model.named_parameters()}
        self._repeats = True
        try:
            self._write(self._snapshot)
            torch.manual_seed(1)  # a random layer draws something else in another pass
            with torch.no_grad():
                again = model(*args, **kwargs)
        finally:
            self._write(now)
            torch.set_rng_state(state)
            self._repeats = False
        self.differences[-1].append((again.log_probs - outputs.log_probs).abs().max().item())

    def _write(self, values: dict[str, torch.Tensor]) -> None:
        for name, parameter in self.trainer.model.named_parameters():
            parameter.data.copy_(values[name])  # leaves the version counters that autograd checks alone


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """By call of TRL's loss: its inputs as they are afterwards, and the log-probs that it used."""
    calls: list[dict[str, Any]] = []
    loss, score = GRPOTrainer._compute_loss, GRPOTrainer._get_per_token_logps_and_entropies

    def compute_loss(self: Any, model: Any, inputs: Any) -> Any:
        calls.append({"inputs": inputs})
        return loss(self, model, inputs)

    def logps(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = score(self, *args, **kwargs)
        if torch.is_grad_enabled() and calls:
            calls[-1]["log_probs"] = result[0].detach().clone()
        return result

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", compute_loss)
    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", logps)
    return calls


def train(trainer: Any) -> Any:
    """Each trainer trains before the next is built: the constructor seeds the generator that shuffles the rows."""
    trainer.train()
    return trainer


def assert_same_log(ours: Any, stock: Any, *, exact: float = 1e-6, drifted: float = 1e-4) -> None:
    """The first step at equal weights; later ones drift with Adam."""
    ours_log, stock_log = comparable_log(ours), comparable_log(stock)
    assert [entry.keys() for entry in ours_log] == [entry.keys() for entry in stock_log]
    for number, (mine, theirs) in enumerate(zip(ours_log, stock_log, strict=True)):
        bound = exact if number == 0 else drifted
        for key, value in theirs.items():
            assert mine[key] == pytest.approx(value, rel=bound, abs=bound, nan_ok=True), (number, key)


def assert_equal_training(ours: Any, stock: Any, noise: float = 0.0) -> None:
    assert len(ours.gradients) == len(stock.gradients)
    assert relative(ours.gradients[0], stock.gradients[0]) <= max(1e-6, noise)
    assert_same_log(ours, stock)


def reuse_row(trainer: Any) -> Any:
    return next(setting for setting in trainer.resolved_settings if setting.name == "reuse_old_logprobs")


# Where it fires


def any_case() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "gradient_accumulation_steps": st.integers(1, 4),
            "steps_per_generation": st.integers(1, 4),
            "num_iterations": st.sampled_from([1, 1, 1, 2]),
            "dropout": st.sampled_from([0.0, 0.0, 0.0, 0.3]),
            "beta": st.sampled_from([0.0, 0.05]),
            "vllm_importance_sampling_correction": st.sampled_from([True, True, True, False]),
            "vllm_importance_sampling_mode": st.sampled_from(MODES),
            "padding_free": st.sampled_from(["auto", "off", "on"]),
            "max_tokens_per_microbatch": st.sampled_from([None, 40, 1000]),
            "evaluates": st.booleans(),
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # one training a case is not worth minutes of shrinking
    suppress_health_check=list(HealthCheck),
)
@given(case=any_case())
def test_reuse_never_fires_where_the_separate_pass_would_differ_by_a_bit(
    folder: str, tmp_path_factory: pytest.TempPathFactory, case: dict[str, Any]
) -> None:
    more = {key: value for key, value in case.items() if key not in ("dropout", "evaluates")}
    if case["dropout"]:  # attention dropout keeps rows from being packed
        more["padding_free"] = "off"
    more |= {"per_device_train_batch_size": 2, "num_generations": 2, "per_device_eval_batch_size": 4, "max_steps": 3}
    more |= {"model_init_kwargs": {"attention_dropout": case["dropout"], "dtype": "float32"}}
    kwargs = {"eval_dataset": make_eval()}
    trainer = build(OursVllm, tmp_path_factory.mktemp("run"), folder, kwargs, **more)
    watch = Separate(trainer)
    trainer.train()
    if case["evaluates"]:
        trainer.evaluate()
    if not case["vllm_importance_sampling_correction"]:
        return  # stock decides alone
    assert watch.is_skipped
    for is_skipped, differences in zip(watch.is_skipped, watch.differences, strict=True):
        assert not is_skipped or max(differences, default=0.0) == 0.0
    on_policy = case["num_iterations"] == 1 and not case["dropout"]
    if on_policy and case["gradient_accumulation_steps"] % case["steps_per_generation"] == 0:
        assert all(watch.is_skipped)


FIRES = {
    "plain": {},
    "no accumulation": {"gradient_accumulation_steps": 1},
    "two generations per step": {"steps_per_generation": 2},
    "a generation per micro-batch": {"steps_per_generation": 1},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "packed": {"padding_free": "on"},
    "trimmed, budget": {"padding_free": "off", "max_tokens_per_microbatch": 60},
    "packed, budget": {"padding_free": "on", "max_tokens_per_microbatch": 60},
    "one pass": {"padding_free": "on", "max_tokens_per_microbatch": 100_000},
}


@pytest.mark.parametrize(
    ("more", "mode"),
    [
        pytest.param(more, mode, id=f"{name}-{mode}")
        for number, (name, more) in enumerate(FIRES.items())
        for mode in (MODES if name in ("plain", "packed, budget") else MODES[number % 4 :][:1])
    ],
)
def test_reuse_fires_on_policy_and_trains_as_stock_does(tmp_path: Path, more: dict[str, Any], mode: str) -> None:
    shared = {key: value for key, value in more.items() if key not in ("padding_free", "max_tokens_per_microbatch")}
    stock = train(build(StockVllm, tmp_path, vllm_importance_sampling_mode=mode, **shared))
    ours = build(OursVllm, tmp_path, vllm_importance_sampling_mode=mode, reuse_old_logprobs="require", **more)
    watch = Separate(ours)
    train(ours)
    assert reuse_row(ours).value == "on"
    assert watch.passes == 0 and all(watch.is_skipped)
    assert max(max(differences) for differences in watch.differences) == 0.0
    assert_equal_training(ours, stock)
    assert "sampling/importance_sampling_ratio/mean" in comparable_log(ours)[0]


def test_a_forward_counter_shows_the_skipped_pass(tmp_path: Path) -> None:
    counts = {}
    for reuse in ("require", "off"):
        watch = Separate(build(OursVllm, tmp_path, reuse_old_logprobs=reuse))
        watch.trainer.train()
        counts[reuse] = watch.passes, watch.updates
    micro_batches = SETTINGS["gradient_accumulation_steps"] * SETTINGS["max_steps"]
    assert counts == {"require": (0, micro_batches), "off": (micro_batches, micro_batches)}


@pytest.mark.parametrize("mode", MODES)
def test_old_log_probs_and_ratios_are_the_separate_passs(
    tmp_path: Path, losses: list[dict[str, Any]], mode: str
) -> None:
    build(StockVllm, tmp_path, vllm_importance_sampling_mode=mode, max_steps=1).train()
    stock = list(losses)
    losses.clear()
    build(OursVllm, tmp_path, vllm_importance_sampling_mode=mode, max_steps=1, reuse_old_logprobs="require").train()
    assert len(losses) == len(stock) == SETTINGS["gradient_accumulation_steps"]
    for mine, theirs in zip(losses, stock, strict=True):
        assert "old_per_token_logps" not in mine["inputs"]
        mask = theirs["inputs"]["completion_mask"].bool()
        old = theirs["inputs"]["old_per_token_logps"]
        assert (mine["log_probs"] - old)[mask].abs().max().item() == 0.0
        ratio, expected = (call["inputs"]["importance_sampling_ratio"] for call in (mine, theirs))
        assert ratio.shape == expected.shape
        assert torch.allclose(ratio, expected, rtol=1.2e-7, atol=0.0)
    ratios = torch.cat([call["inputs"]["importance_sampling_ratio"].flatten() for call in stock])
    assert ratios.unique().numel() > 2, "the rollouts must reach the bounds and the middle"


def test_off_is_stock_to_the_last_bit(tmp_path: Path) -> None:
    stock, ours = train(build(StockVllm, tmp_path)), train(build(OursVllm, tmp_path, reuse_old_logprobs="off"))
    assert comparable_log(ours) == comparable_log(stock)
    assert all(torch.equal(a, b) for a, b in zip(ours.gradients, stock.gradients, strict=True))


def test_without_the_correction_stock_runs_no_pass_and_neither_do_we(tmp_path: Path) -> None:
    more = {"vllm_importance_sampling_correction": False}
    stock = train(build(StockVllm, tmp_path, **more))
    watch = Separate(build(OursVllm, tmp_path, **more))
    ours = train(watch.trainer)
    assert watch.passes == 0
    assert comparable_log(ours) == comparable_log(stock)


# Where it must not


def test_require_lists_every_failed_precondition(tmp_path: Path) -> None:
    more = {"gradient_accumulation_steps": 3, "steps_per_generation": 2, "num_iterations": 2}
    model = tiny_model(attention_dropout=0.25)
    with pytest.raises(SettingsError, match="reuse_old_logprobs='require'") as error:
        build(OursVllm, tmp_path, model, reuse_old_logprobs="require", **more)
    for word in ("num_iterations=2", "gradient_accumulation_steps=3", "steps_per_generation=2", "attention_dropout"):
        assert word in str(error.value)


class OwnLoss:
    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        return super()._compute_loss(model, inputs)


class OwnScores:
    def _generate_and_score_completions(self, inputs: Any) -> Any:
        outputs = super()._generate_and_score_completions(inputs)
        assert len(outputs["old_per_token_logps"]) == len(outputs["importance_sampling_ratio"])
        return outputs


@pytest.mark.parametrize("mixin", [OwnLoss, OwnScores])
def test_a_subclass_that_may_read_the_pass_gets_it(tmp_path: Path, mixin: type) -> None:
    stock = train(build(type("Theirs", (mixin, StockVllm), {}), tmp_path))
    ours = build(type("Mine", (mixin, OursVllm), {}), tmp_path)
    watch = Separate(ours)
    train(ours)
    assert reuse_row(ours).value == "off" and "overridden" in reuse_row(ours).reason
    assert not any(watch.is_skipped)
    assert comparable_log(ours) == comparable_log(stock)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"num_iterations": 2}, id="two iterations"),
        pytest.param({"steps_per_generation": 8}, id="two steps per generation"),
        pytest.param({"gradient_accumulation_steps": 3, "steps_per_generation": 2}, id="misaligned"),
    ],
)
def test_off_policy_batches_keep_stocks_pass(tmp_path: Path, more: dict[str, Any]) -> None:
    stock = train(build(StockVllm, tmp_path, **more))
    watch = Separate(build(OursVllm, tmp_path, **more))
    ours = train(watch.trainer)
    assert reuse_row(ours).value == "off"
    assert not any(watch.is_skipped)
    assert comparable_log(ours) == comparable_log(stock)


def test_a_random_layer_keeps_stocks_pass(tmp_path: Path) -> None:
    peft = {"peft_config": LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.2, init_lora_weights=False)}
    ours = build(OursVllm, tmp_path, kwargs=peft, max_steps=1)
    watch = Separate(ours)
    ours.train()
    assert reuse_row(ours).value == "off" and "lora_dropout" in reuse_row(ours).reason
    assert not any(watch.is_skipped)
    assert max(watch.differences[0]) > 0.0, "the hook sees the difference that forbids the reuse"


class SixteenBatches:
    """Mixin: an epoch of 16 micro-batches, which the windows and generations of the test do not divide."""

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()

        class Short:
            batch_sampler, dataset = loader.batch_sampler, loader.dataset

            def __len__(self) -> int:
                return 16

            def __iter__(self) -> Iterator[Any]:
                return itertools.islice(iter(loader), 16)

        return Short()


def test_a_window_cut_short_by_the_end_of_the_epoch_falls_back_for_its_batch(tmp_path: Path) -> None:
    """Windows of 6, 6 and 4 over generations of 3: one generation begins in the last window and ends in the next."""
    more = {"gradient_accumulation_steps": 6, "steps_per_generation": 3, "max_steps": 5}
    stock = train(build(type("Stock", (SixteenBatches, StockVllm), {}), tmp_path, **more))
    watch = Separate(build(type("Ours", (SixteenBatches, OursVllm), {}), tmp_path, **more))
    ours = train(watch.trainer)
    assert any(watch.is_skipped) and not all(watch.is_skipped)
    for is_skipped, differences in zip(watch.is_skipped, watch.differences, strict=True):
        assert not is_skipped or max(differences) == 0.0
    assert any(max(d) > 0.0 for d, s in zip(watch.differences, watch.is_skipped, strict=True) if not s)
    assert_equal_training(ours, stock)


# What the rollout returns


def with_nan(prompts: list[str], trainer: Any) -> dict[str, Any]:
    rollouts = sampled_rollouts(prompts, trainer)
    for row, logprobs in enumerate(rollouts["logprobs"]):
        if row % 3 == 0:
            logprobs[len(logprobs) // 2] = None  # what TRL makes of vLLM's NaN
    return rollouts


def with_env_mask(prompts: list[str], trainer: Any) -> dict[str, Any]:
    rollouts = sampled_rollouts(prompts, trainer)
    masks = [[int((row + i) % 3 != 0) for i in range(len(ids))] for row, ids in enumerate(rollouts["completion_ids"])]
    return {**rollouts, "env_mask": masks}


@pytest.mark.parametrize(("mode", "budget"), zip(MODES, [60, None, None, 60], strict=True))
@pytest.mark.parametrize("rollout", [with_nan, with_env_mask], ids=["NaN", "env_mask"])
def test_reuse_equals_stock_where_the_rollout_has(tmp_path: Path, mode: str, rollout: Any, budget: int | None) -> None:
    kwargs, more = {"rollout_func": rollout}, {"vllm_importance_sampling_mode": mode}
    stock = train(build(StockVllm, tmp_path, kwargs=kwargs, **more))
    ours = build(
        OursVllm,
        tmp_path,
        kwargs=kwargs,
        **more,
        reuse_old_logprobs="require",
        padding_free="off" if budget else "auto",
        max_tokens_per_microbatch=budget,
    )
    train(ours)
    # Few tokens are left in the loss: stock itself may move by more than 1e-6 when its padding changes.
    repadded = train(build(StockVllm, tmp_path, kwargs=kwargs, pad_to_multiple_of=8, **more)) if budget else stock
    assert_equal_training(ours, stock, 2 * relative(repadded.gradients[0], stock.gradients[0]))


def test_a_rollout_without_log_probs_is_refused_by_name_under_the_correction(tmp_path: Path) -> None:
    ours = build(OursVllm, tmp_path, kwargs={"rollout_func": uneven_rollouts})
    with pytest.raises(SettingsError, match="logprobs=None") as error:
        ours.train()
    assert "vllm_importance_sampling_correction=False" in str(error.value)
    assert ours.vllm_importance_sampling_correction is True


# Losses that read the ratio or vLLM's log-probs


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate"}, id="vespo"),
        pytest.param({"loss_type": "vespo", "vllm_importance_sampling_mode": "token_mask"}, id="vespo, masked"),
        pytest.param({"off_policy_mask_threshold": 0.02}, id="off-policy mask"),
        pytest.param({"importance_sampling_level": "sequence"}, id="sequence level"),
        pytest.param({"mask_truncated_completions": True}, id="all-masked rows"),
        pytest.param({"loss_type": "bnpo", "entropy_coef": 0.02}, id="bnpo and an entropy bonus"),
        pytest.param({"vllm_importance_sampling_clip_min": None}, id="no lower bound"),
        pytest.param({"top_entropy_quantile": 0.5}, id="top entropy quantile"),
    ],
)
@pytest.mark.parametrize("budget", [None, 60])
def test_reuse_equals_stock_with(tmp_path: Path, more: dict[str, Any], budget: int | None) -> None:
    stock = train(build(StockVllm, tmp_path, **more))
    layout = {"padding_free": "on", "max_tokens_per_microbatch": 60} if budget else {}
    ours = build(OursVllm, tmp_path, **more, **layout, reuse_old_logprobs="require")
    train(ours)
    # Packed rows round at 1e-6 where masks leave few tokens, about as stock does when its padding changes.
    repadded = train(build(StockVllm, tmp_path, pad_to_multiple_of=8, **more)) if budget else stock
    assert_equal_training(ours, stock, 2 * relative(repadded.gradients[0], stock.gradients[0]))


@pytest.mark.parametrize(("mode", "budget"), zip(MODES, [None, 30, None, 30], strict=True))
def test_evaluation_reuses_and_equals_stock(tmp_path: Path, mode: str, budget: int | None) -> None:
    more = {"per_device_eval_batch_size": 4, "num_generations_eval": 4, "vllm_importance_sampling_mode": mode}
    kwargs = {"eval_dataset": make_eval()}
    evaluated = [build(StockVllm, tmp_path, kwargs=kwargs, **more).evaluate()]
    more |= {"max_tokens_per_microbatch": budget, "padding_free": "off"}
    evaluated.append(build(OursVllm, tmp_path, kwargs=kwargs, **more).evaluate())
    assert evaluated[0].keys() == evaluated[1].keys()
    assert "eval_sampling/importance_sampling_ratio/mean" in evaluated[0]
    for key, value in evaluated[0].items():
        if not any(part in key for part in ("runtime", "per_second", "time")):
            assert evaluated[1][key] == pytest.approx(value, rel=1e-6, abs=1e-6), key


def test_evaluation_reuses_where_training_may_not(tmp_path: Path) -> None:
    """Dropout and iterations matter in training only."""
    kwargs = {"eval_dataset": make_eval()}
    more = {"per_device_eval_batch_size": 4, "num_generations_eval": 4}
    calls = {}
    for reuse in ("auto", "off"):
        model = tiny_model(attention_dropout=0.3)
        ours = build(OursVllm, tmp_path, model, kwargs=copy.copy(kwargs), reuse_old_logprobs=reuse, **more)
        seen: list[bool] = []
        ours.model.register_forward_pre_hook(
            lambda _m, _a, kwargs, seen=seen: seen.append(True) if "fused_lm_head" in kwargs else None,
            with_kwargs=True,
        )
        ours.evaluate()
        calls[reuse] = len(seen)
    assert calls == {"auto": 8, "off": 16}


# Mixture of experts, reference model


def moe_model(**overrides: Any) -> Qwen3MoeForCausalLM:
    set_seed(0)
    sizes = {"vocab_size": 258, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 32}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **experts, **overrides))


@pytest.mark.parametrize("coefficient", [0.0, 0.05], ids=["without router loss", "with router loss"])
@pytest.mark.parametrize("layout", ["stock", "off", "on"])
def test_routed_experts_train_as_stock_does(tmp_path: Path, coefficient: float, layout: str) -> None:
    more = {"router_aux_loss_coef": coefficient}
    stock = train(build(StockVllm, tmp_path, moe_model(), **more))
    budget = {"padding_free": layout, "max_tokens_per_microbatch": 60, "reuse_old_logprobs": "require"}
    ours = build(OursVllm, tmp_path, moe_model(), **more, **budget)
    watch = Separate(ours)
    train(ours)
    assert all(watch.is_skipped) and max(max(d) for d in watch.differences) == 0.0
    assert_equal_training(ours, stock)
    assert ("aux_loss" in comparable_log(ours)[0]) == (coefficient > 0)


@pytest.mark.parametrize("budget", [None, 60])
def test_the_first_kl_is_exactly_zero_with_packed_rows(tmp_path: Path, folder: str, budget: int | None) -> None:
    more = {"beta": 0.05, "padding_free": "on", "max_tokens_per_microbatch": budget, "steps_per_generation": 1}
    ours = build(OursVllm, tmp_path, folder, **more, gradient_accumulation_steps=1, reuse_old_logprobs="require")
    ours.train()
    assert comparable_log(ours)[0]["kl"] == 0.0


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    """Bits of a matrix product may depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_settings_changed_before_training_are_those_that_reuse_is_decided_on(tmp_path: Path) -> None:
    trainer = build(OursVllm, tmp_path, max_steps=1)
    assert trainer._reuses_logprobs
    trainer.model.config.attention_dropout = 0.5
    for module in trainer.model.modules():
        if "attention_dropout" in vars(module):
            module.attention_dropout = 0.5
    watch = Separate(trainer)
    trainer.train()
    assert not trainer._reuses_logprobs
    assert watch.is_skipped == [False]

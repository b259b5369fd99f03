"""Every option either trains with stock TRL's weights and log, or is refused with its name and the reason."""

from __future__ import annotations

import importlib.util
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from compat_pairs import (
    assert_compute_is_cast_of_masters,
    assert_equal,
    assert_works,
    budget_trainer,
    facts_of,
    placement,
    reason,
    without_times,
)
from tiny import (
    BASE_SETTINGS,
    byte_tokenizer,
    comparable_log,
    digit_dataset,
    digit_reward,
    make_trainer,
    save_tiny_model,
    tiny_model,
)
from transformers import get_cosine_schedule_with_warmup
from trl import GRPOConfig, GRPOTrainer

from trl_budget import BudgetGRPOConfig, BudgetGRPOTrainer, HostAdamW, SettingsError
from trl_budget.placement import PlacementFacts, resolve_optimizer_placement

# Launches and arguments that only placement sees: stock itself refuses to build most of them in one CPU process.

LAUNCHES: dict[str, tuple[dict[str, str], dict[str, Any], str]] = {
    "DeepSpeed by launcher": ({"ACCELERATE_USE_DEEPSPEED": "true"}, {}, "DeepSpeed"),
    "DeepSpeed by argument": ({}, {"deepspeed": {"zero_optimization": {"stage": 2}}}, "DeepSpeed"),
    "FSDP by launcher": ({"ACCELERATE_USE_FSDP": "true"}, {}, "FSDP"),
    "FSDP by argument": ({}, {"fsdp": True}, "FSDP"),
    "parallelism_config": ({}, {"parallelism_config": object()}, "tensor, context or sequence parallelism"),
}


@pytest.fixture(params=LAUNCHES.values(), ids=LAUNCHES)
def launch(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[BudgetGRPOConfig, str]:
    """Arguments as that launch leaves them, set after construction, which needs the packages; and its name."""
    environment, fields, name = request.param
    args = BudgetGRPOConfig(str(tmp_path), **BASE_SETTINGS)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    for key, value in fields.items():
        setattr(args, key, value)
    return args, name


def test_host_is_refused_when_launched_with(launch: tuple[BudgetGRPOConfig, str]) -> None:
    args, name = launch
    args.optimizer_placement = "host"
    kwargs = {"reward_funcs": digit_reward, "train_dataset": digit_dataset(), "processing_class": byte_tokenizer()}
    with pytest.raises(SettingsError, match="optimizer_placement='host'") as error:
        BudgetGRPOTrainer(tiny_model(), args=args, **kwargs)
    assert name in str(error.value) and "python script.py" in str(error.value)


def test_auto_is_stock_when_launched_with(launch: tuple[BudgetGRPOConfig, str]) -> None:
    args, name = launch
    facts = facts_of(args, tiny_model())
    resolved = resolve_optimizer_placement("auto", facts)
    assert resolved.value == "device" and name in resolved.reason


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        pytest.param({"has_bf16_units": False, "bf16": True}, ("bf16", "8.0"), id="a card without bf16"),
        pytest.param(
            {"world_size": 2, "is_adapter": True}, ("2 processes", "adapters"), id="adapters on two processes"
        ),
        pytest.param({"device_type": "mps"}, ("mps",), id="another accelerator"),
        pytest.param({"is_split_over_devices": True}, ("device map",), id="a split model"),
    ],
)
def test_auto_is_stock_and_host_is_refused_for(facts: dict[str, Any], words: tuple[str, ...]) -> None:
    given = PlacementFacts(**{"optim": "adamw_torch_fused", "device_type": "cuda", **facts})
    resolved = resolve_optimizer_placement("auto", given)
    assert resolved.value == "device" and all(word in resolved.reason for word in words)
    with pytest.raises(SettingsError, match="optimizer_placement='device'") as error:
        resolve_optimizer_placement("host", given)
    assert all(word in str(error.value) for word in words)


def test_a_model_sharded_at_load_time_is_left_to_stock(tmp_path: Path) -> None:
    class Sharded(torch.nn.Linear):
        is_distributed_loading_by_transformers = True

    args = BudgetGRPOConfig(str(tmp_path), **BASE_SETTINGS)
    facts = facts_of(args, Sharded(2, 2))
    assert resolve_optimizer_placement("auto", facts).value == "device"


# Precision

ON_THE_DEVICE = [
    pytest.param({"fp16": True}, "fp16=True", id="fp16"),
    pytest.param({"bf16_full_eval": True}, "bf16_full_eval=True", id="bf16_full_eval"),
    pytest.param({"fp16_full_eval": True}, "fp16_full_eval=True", id="fp16_full_eval"),
]


@pytest.mark.parametrize(("settings", "name"), ON_THE_DEVICE)
def test_auto_trains_and_evaluates_as_stock_with(tmp_path: Path, settings: dict[str, Any], name: str) -> None:
    metrics: list[dict[str, float]] = []

    def run(trainer: Any) -> None:
        trainer.train()
        metrics.append(without_times(trainer.evaluate()))

    kwargs = {"eval_dataset": digit_dataset(4)}
    _, ours = assert_works(tmp_path, on="device", run=run, trainer_kwargs=lambda: kwargs, max_steps=2, **settings)
    assert name in reason(ours)
    assert metrics[0] == metrics[1]


@pytest.mark.parametrize(("settings", "name"), ON_THE_DEVICE)
def test_host_is_refused_with(tmp_path: Path, settings: dict[str, Any], name: str) -> None:
    with pytest.raises(SettingsError, match="optimizer_placement='host'") as error:
        budget_trainer(tmp_path, **settings)
    assert name in str(error.value)


def test_cast_lm_head_to_fp32_equals_stock_on_an_fp32_model(tmp_path: Path) -> None:
    model = tiny_model(tie_word_embeddings=False)
    assert_works(tmp_path, model=model, max_steps=2, cast_lm_head_to_fp32=True)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_cast_lm_head_to_fp32_on_a_bf16_model(tmp_path: Path, tied: bool) -> None:
    model = tiny_model(torch.bfloat16, tie_word_embeddings=tied)
    settings = {"max_steps": 2, "cast_lm_head_to_fp32": True}
    stock = make_trainer(GRPOTrainer, tmp_path / "stock", model=model, **settings)
    stock.train()
    ours = make_trainer(BudgetGRPOTrainer, tmp_path / "ours", model=model, **settings)
    ours.train()
    dtypes = [{n: p.dtype for n, p in t.model.named_parameters()} for t in (stock, ours)]
    assert dtypes[0] == dtypes[1] and set(dtypes[0].values()) == {torch.float32, torch.bfloat16}
    assert placement(ours) == "host"
    assert_compute_is_cast_of_masters(ours)
    first = [comparable_log(t)[0] for t in (stock, ours)]
    for key in ("loss", "entropy", "reward"):
        assert first[0][key] == first[1][key], key


# Ways to compute


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="the defaults"),
        pytest.param({"config_class": BudgetGRPOConfig}, id="a BudgetGRPOConfig"),
        pytest.param({"gradient_checkpointing": False}, id="gradient_checkpointing=False"),
        pytest.param({"gradient_checkpointing": True}, id="gradient_checkpointing=True"),
        pytest.param({"optim": "adamw_torch"}, id="adamw_torch"),
        pytest.param({"neftune_noise_alpha": 5.0}, id="NEFTune"),
        pytest.param({"torch_empty_cache_steps": 1}, id="torch_empty_cache_steps"),
        pytest.param({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"}, id="plateau schedule"),
        pytest.param({"use_adaptive_entropy": True}, id="adaptive entropy"),
        pytest.param({"mask_truncated_completions": True}, id="mask_truncated_completions"),
        pytest.param({"disable_dropout": True, "model": tiny_model(attention_dropout=0.5)}, id="disable_dropout"),
        pytest.param({"model": tiny_model(attention_dropout=0.5)}, id="dropout"),
    ],
)
def test_equals_stock_with_option(tmp_path: Path, settings: dict[str, Any]) -> None:
    settings = {"max_steps": 2, "eval_steps": 1, "per_device_eval_batch_size": 4, **settings}
    assert_works(tmp_path, trainer_kwargs=lambda: {"eval_dataset": digit_dataset(1)}, **settings)


@pytest.fixture
def _dynamo_environment(monkeypatch: pytest.MonkeyPatch) -> object:
    """transformers leaves `torch_compile` in the environment, for every later trainer of the process."""
    for name in ("ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_DYNAMO_MODE"):
        monkeypatch.setenv(name, "no")
        monkeypatch.delenv(name)
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_dynamo_environment")
def test_equals_stock_with_torch_compile(tmp_path: Path) -> None:
    assert_works(tmp_path, max_steps=2, torch_compile=True, torch_compile_backend="eager")


@pytest.mark.skipif(
    importlib.util.find_spec("liger_kernel") is None, reason="needs liger-kernel, which is not installed"
)
def test_equals_stock_with_liger_kernels(tmp_path: Path) -> None:
    assert_works(tmp_path, max_steps=2, use_liger_kernel=True)


def test_auto_find_batch_size_is_refused_by_trl_itself(tmp_path: Path) -> None:
    for config_class in (GRPOConfig, BudgetGRPOConfig):
        with pytest.raises(ValueError, match="auto_find_batch_size is not supported by GRPO"):
            config_class(str(tmp_path), auto_find_batch_size=True, **BASE_SETTINGS)


def test_equals_stock_with_a_synchronised_reference_model(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    settings = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
    stock, ours = assert_works(tmp_path, model=folder, max_steps=3, **settings)
    for a, b in zip(stock.ref_model.parameters(), ours.ref_model.parameters(), strict=True):
        assert torch.equal(a, b)


# Optimizers


def has_bitsandbytes() -> bool:
    return importlib.util.find_spec("bitsandbytes") is not None


@pytest.mark.parametrize(
    "optim",
    [
        "adafactor", "sgd", "adagrad", "rmsprop", "adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit",
        "paged_adamw_32bit", "lion_32bit", "lion_8bit", "ademamix", "rmsprop_bnb",
    ],
)  # fmt: skip
def test_auto_leaves_to_stock_optim(tmp_path: Path, optim: str) -> None:
    if optim not in ("adafactor", "sgd", "adagrad", "rmsprop") and not has_bitsandbytes():
        pytest.skip("needs bitsandbytes, which is not installed")
    _, ours = assert_works(tmp_path, on="device", max_steps=2, optim=optim)
    assert f"optim='{optim}'" in reason(ours)


@pytest.mark.parametrize(
    "optim", ["adamw_torch_8bit", "schedule_free_adamw", "galore_adamw", "lomo", "apollo_adamw", "stable_adamw"]
)
def test_a_missing_optimizer_package_is_named_as_by_stock(tmp_path: Path, optim: str) -> None:
    messages = []
    for trainer_class in (GRPOTrainer, BudgetGRPOTrainer):
        trainer = make_trainer(trainer_class, tmp_path, max_steps=1, optim=optim)
        try:
            trainer.train()
        except ImportError as error:
            messages.append(str(error))
        else:
            pytest.skip(f"the package of {optim} is installed, or stock no longer checks for it")
    assert messages[0] == messages[1]


def test_optim_args_reach_the_optimizer_as_in_stock(tmp_path: Path) -> None:
    assert_works(tmp_path, on="device", max_steps=2, optim="rmsprop", optim_args="alpha=0.5")


def test_equals_stock_with_an_optimizer_and_a_schedule_of_the_user(tmp_path: Path) -> None:
    def kwargs() -> dict[str, Any]:
        model = tiny_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, amsgrad=True)
        return {"model": model, "optimizers": (optimizer, get_cosine_schedule_with_warmup(optimizer, 1, 3))}

    _, ours = assert_works(tmp_path, on="device", trainer_kwargs=kwargs, max_steps=3)
    assert "optimizers= holds a AdamW" in reason(ours)


def test_host_is_refused_with_a_torch_optimizer_of_the_user(tmp_path: Path) -> None:
    model = tiny_model()
    kwargs = {"model": model, "optimizers": (torch.optim.AdamW(model.parameters()), None)}
    with pytest.raises(SettingsError, match=r"optimizers= holds a AdamW.*pass a HostAdamW"):
        budget_trainer(tmp_path, trainer_kwargs=kwargs)


def with_user_optimizer(optimizer_class: type, **settings: Any) -> dict[str, Any]:
    model = tiny_model()
    groups = [{"params": [p for p in model.parameters() if (p.dim() > 1) == is_matrix]} for is_matrix in (True, False)]
    groups[1]["weight_decay"] = 0.3
    return {"model": model, "optimizers": (optimizer_class(groups, lr=2e-3, betas=(0.8, 0.9), **settings), None)}


@pytest.mark.parametrize("trainer_class", [BudgetGRPOTrainer, GRPOTrainer], ids=["in ours", "in stock's trainer"])
def test_a_host_adamw_of_the_user_equals_torch_adamw_in_stock(tmp_path: Path, trainer_class: type) -> None:
    kwargs = with_user_optimizer(torch.optim.AdamW, fused=True)
    stock = make_trainer(GRPOTrainer, tmp_path / "stock", trainer_kwargs=kwargs, max_steps=3)
    stock.train()
    kwargs = with_user_optimizer(HostAdamW)
    ours = make_trainer(trainer_class, tmp_path / "ours", trainer_kwargs=kwargs, max_steps=3)
    ours.train()
    assert_equal(stock, ours)
    if trainer_class is BudgetGRPOTrainer:
        assert ours._host_adamw is kwargs["optimizers"][0]
        assert reason(ours) == "optimizers= holds a HostAdamW"


def test_a_host_adamw_of_some_parameters_equals_torch_adamw(tmp_path: Path) -> None:
    """The others keep their gradients, which stock's clipping counts."""
    trainers = []
    for base, settings in ((GRPOTrainer, {"fused": True}), (BudgetGRPOTrainer, {})):
        model = tiny_model()
        optimizer_class = HostAdamW if base is BudgetGRPOTrainer else torch.optim.AdamW
        optimizer = optimizer_class(model.model.layers[1].parameters(), lr=1e-3, **settings)
        kwargs = {"model": model, "optimizers": (optimizer, None)}
        trainer = make_trainer(base, tmp_path / base.__name__, trainer_kwargs=kwargs, max_steps=2)
        trainer.train()
        trainers.append(trainer)
    assert_equal(*trainers)


# Data


def test_equals_stock_on_an_iterable_dataset(tmp_path: Path) -> None:
    kwargs = {"train_dataset": digit_dataset(16).to_iterable_dataset()}
    assert_works(tmp_path, trainer_kwargs=lambda: kwargs, max_steps=3, gradient_accumulation_steps=2)


def test_equals_stock_when_epochs_end_in_the_middle_of_an_accumulation(tmp_path: Path) -> None:
    kwargs = {"train_dataset": digit_dataset(5)}
    settings = {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 1}
    assert_works(tmp_path, trainer_kwargs=lambda: kwargs, **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_evaluate_before_train_equals_stock(tmp_path: Path, dtype: torch.dtype) -> None:
    kwargs = {"eval_dataset": digit_dataset(3)}
    metrics = []
    for trainer_class in (GRPOTrainer, BudgetGRPOTrainer):
        path = tmp_path / trainer_class.__name__
        trainer = make_trainer(trainer_class, path, model=tiny_model(dtype), trainer_kwargs=kwargs)
        metrics.append(without_times(trainer.evaluate()))
    assert "eval_loss" in metrics[0] and metrics[0] == metrics[1]


def test_evaluate_before_during_and_after_train_equals_stock(tmp_path: Path) -> None:
    kwargs = {"eval_dataset": {"a": digit_dataset(2), "b": digit_dataset(1)}}
    metrics: list[list[dict[str, float]]] = []

    def run(trainer: Any) -> None:
        before = trainer.evaluate()
        trainer.train()
        metrics.append([without_times(m) for m in (before, trainer.evaluate())])

    settings = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}
    _, ours = assert_works(tmp_path, trainer_kwargs=lambda: kwargs, run=run, **settings)
    assert sum("eval_a_loss" in entry for entry in comparable_log(ours)) == 5
    assert metrics[0] == metrics[1]


def test_args_none_without_a_card_fails_as_stock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU, on which args=None works")
    monkeypatch.chdir(tmp_path)
    for trainer_class in (GRPOTrainer, BudgetGRPOTrainer):
        with pytest.raises(ValueError, match="Your setup doesn't support bf16/gpu"):
            make_trainer(trainer_class, tmp_path, trainer_kwargs={"args": None})


def test_args_none_equals_stock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("args=None trains on the GPU that this machine has, where sampling is not reproducible")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)

    def run(trainer: Any) -> None:
        trainer.generation_config.max_new_tokens = 4
        trainer.args.max_steps = 3
        trainer.args.logging_steps = 1
        trainer.train()

    kwargs = {"args": None, "train_dataset": digit_dataset(1)}
    stock, ours = assert_works(tmp_path, model=save_tiny_model(tmp_path / "m"), trainer_kwargs=lambda: kwargs, run=run)
    assert isinstance(ours.args, BudgetGRPOConfig) and ours.args.optimizer_placement == "auto"
    ours_only = {f.name for f in fields(BudgetGRPOConfig)} - {f.name for f in fields(GRPOConfig)}
    given = {key: value for key, value in ours.args.to_dict().items() if key not in ours_only}
    assert given == stock.args.to_dict()

"""Where optimizer and gradients live: obstacles under `auto` (stock, with the reason) and under `host` (an error)."""

from __future__ import annotations

from typing import Any

import pytest

from trl_budget.errors import SettingsError
from trl_budget.placement import (
    PlacementFacts,
    ResolvedSetting,
    format_table,
    resolve_gradient_placement,
    resolve_optimizer_placement,
    with_departures,
)

# facts that differ from a servable run, words of the reason, words of the remedy
OBSTACLES: dict[str, tuple[dict[str, Any], str, str]] = {
    "FSDP": ({"parallelism": "FSDP"}, "launched with FSDP", "launch one plain process"),
    "DeepSpeed": ({"parallelism": "DeepSpeed"}, "launched with DeepSpeed", "launch one plain process"),
    "adapters on two processes": (
        {"world_size": 2, "is_adapter": True},
        "2 processes were launched, where adapters keep",
        "launch one process",
    ),
    "user's SGD": ({"user_optimizer": "SGD"}, "optimizers= holds a SGD", "pass a HostAdamW, or leave optimizers out"),
    "adafactor": ({"optim": "adafactor"}, "optim='adafactor'", "set optim to one of adamw_torch_fused, adamw_torch"),
    "8 bit": ({"optim": "adamw_8bit"}, "optim='adamw_8bit'", "set optim to one of adamw_torch_fused, adamw_torch"),
    "fp16": ({"fp16": True, "bf16": False}, "fp16=True", "set bf16=True"),
    "bf16 eval": ({"full_eval": "bf16_full_eval"}, "bf16_full_eval=True", "set bf16_full_eval=False"),
    "fp16 eval": ({"full_eval": "fp16_full_eval"}, "fp16_full_eval=True", "set fp16_full_eval=False"),
    "xpu": ({"device_type": "xpu"}, "not for xpu", "train on CUDA or the CPU"),
    "mps": ({"device_type": "mps"}, "not for mps", "train on CUDA or the CPU"),
    "old card": ({"has_bf16_units": False}, "no bf16 units", "set bf16=False"),
    "device map": ({"is_split_over_devices": True}, "spreads it over several devices", "device_map=None"),
}
every_obstacle = pytest.mark.parametrize(("facts", "reason", "remedy"), OBSTACLES.values(), ids=OBSTACLES.keys())


def facts_of(**differences: Any) -> PlacementFacts:
    return PlacementFacts(**{"optim": "adamw_torch_fused", "device_type": "cuda", "bf16": True, **differences})


@every_obstacle
def test_auto_gives_way_with_the_reason(facts: dict[str, Any], reason: str, remedy: str) -> None:
    setting = resolve_optimizer_placement("auto", facts_of(**facts))
    assert (setting.name, setting.value) == ("optimizer_placement", "device")
    assert reason in setting.reason


@every_obstacle
def test_host_is_refused_with_the_reason_and_the_field_to_set(facts: dict[str, Any], reason: str, remedy: str) -> None:
    with pytest.raises(SettingsError) as error:
        resolve_optimizer_placement("host", facts_of(**facts))
    message = str(error.value)
    assert message.startswith("optimizer_placement='host' was asked for, but ")
    assert reason in message and remedy in message
    assert message.endswith("or set optimizer_placement='device'.")
    assert "{" not in message


@every_obstacle
def test_device_is_always_served(facts: dict[str, Any], reason: str, remedy: str) -> None:
    assert resolve_optimizer_placement("device", facts_of(**facts)).value == "device"


@pytest.mark.parametrize("requested", ["auto", "host"])
@pytest.mark.parametrize(
    "facts",
    [
        pytest.param({}, id="bf16 on CUDA"),
        pytest.param({"bf16": False}, id="fp32 on CUDA"),
        pytest.param({"bf16": False, "has_bf16_units": False}, id="fp32 on an old card"),
        pytest.param({"device_type": "cpu"}, id="bf16 on the CPU"),
        pytest.param({"device_type": "cpu", "bf16": False}, id="fp32 on the CPU"),
        pytest.param({"device_type": "cpu", "has_bf16_units": False}, id="no card"),
        pytest.param({"world_size": 2}, id="two processes"),
        pytest.param({"optim": "adamw_torch"}, id="adamw_torch"),
        pytest.param({"user_optimizer": "HostAdamW", "is_user_optimizer_on_host": True}, id="the user's HostAdamW"),
        pytest.param(
            {"user_optimizer": "HostAdamW", "is_user_optimizer_on_host": True, "optim": "sgd"},
            id="the user's HostAdamW whatever optim says",
        ),
    ],
)
def test_what_can_be_served_goes_to_the_host(requested: str, facts: dict[str, Any]) -> None:
    assert resolve_optimizer_placement(requested, facts_of(**facts)).value == "host"


@pytest.mark.parametrize(
    ("requested", "facts", "expected"),
    [
        ("auto", {}, "device"),
        ("host", {}, "host"),
        ("device", {}, "device"),
        ("auto", {"user_optimizer": "HostAdamW", "is_user_optimizer_on_host": True}, "host"),
    ],
    ids=["auto", "host", "device", "the user's HostAdamW"],
)
def test_adapters_go_to_the_host_only_when_asked(requested: str, facts: dict[str, Any], expected: str) -> None:
    assert resolve_optimizer_placement(requested, facts_of(is_adapter=True, **facts)).value == expected


def test_every_obstacle_is_named_when_there_are_several() -> None:
    with pytest.raises(SettingsError) as error:
        resolve_optimizer_placement(
            "host", facts_of(world_size=4, is_adapter=True, fp16=True, is_split_over_devices=True)
        )
    for words in ("4 processes", "fp16=True", "device map", "launch one process", "bf16=True", "device_map=None"):
        assert words in str(error.value)


def test_the_choice_of_the_user_is_given_as_the_reason() -> None:
    assert "set by you" in resolve_optimizer_placement("host", facts_of()).reason
    assert "set by you" in resolve_optimizer_placement("device", facts_of()).reason


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, True),
        ({"device_type": "cpu"}, False),
        ({"bf16": False}, False),
        ({"is_adapter": True}, False),
        ({"user_optimizer": "HostAdamW"}, False),
    ],
    ids=["bf16 on CUDA", "CPU", "fp32", "adapters", "the user's optimizer"],
)
def test_the_policy_is_cast_only_for_full_bf16_training_on_cuda(facts: dict[str, Any], expected: bool) -> None:
    assert facts_of(**facts).casts_policy is expected


def test_the_table_aligns_names_values_and_reasons() -> None:
    rows = [ResolvedSetting("a", "host", "because"), ResolvedSetting("longer", "x", "why")]
    assert format_table(rows, "Settings") == "Settings\n  a       host  because\n  longer  x     why"


ON_HOST = ResolvedSetting("optimizer_placement", "host", "full-parameter training")
ON_DEVICE = ResolvedSetting("optimizer_placement", "device", "adapters are small")


@pytest.mark.parametrize(
    ("requested", "optimizer", "device_type", "given", "expected", "reason"),
    [
        ("auto", ON_HOST, "cuda", None, "host", "while backward runs"),
        ("auto", ON_HOST, "cpu", None, "device", "nothing has to leave"),
        ("auto", ON_DEVICE, "cuda", None, "device", "reads `parameter.grad`"),
        ("device", ON_DEVICE, "cuda", None, "device", "reads `parameter.grad`"),
        ("device", ON_HOST, "cuda", None, "device", "set by you"),
        ("host", ON_HOST, "cuda", None, "host", "set by you"),
        ("host", ON_HOST, "cpu", None, "host", "set by you"),
        ("auto", ON_HOST, "cuda", "device", "device", "as the HostAdamW in optimizers= was built"),
        ("device", ON_HOST, "cuda", "device", "device", "as the HostAdamW in optimizers= was built"),
    ],
)
def test_gradients_go_where_the_optimizer_reads_them(
    requested: str, optimizer: ResolvedSetting, device_type: str, given: str | None, expected: str, reason: str
) -> None:
    setting = resolve_gradient_placement(requested, optimizer, device_type, given)
    assert (setting.name, setting.value) == ("gradient_placement", expected)
    assert reason in setting.reason


@pytest.mark.parametrize(
    ("value", "optimizer", "device_type", "count", "leave_often"),
    [
        ("host", ON_HOST, "cuda", 16, True),
        ("device", ON_HOST, "cuda", 16, True),  # when their backward ends
        ("host", ON_HOST, "cpu", 16, True),
        ("host", ON_HOST, "cuda", 1, False),
        ("device", ON_HOST, "cpu", 16, False),
        ("device", ON_DEVICE, "cuda", 16, False),
    ],
)
def test_gradients_that_leave_once_a_micro_batch_are_counted(
    value: str, optimizer: ResolvedSetting, device_type: str, count: int, leave_often: bool
) -> None:
    setting = with_departures(ResolvedSetting("gradient_placement", value, "because"), optimizer, device_type, count)
    assert setting.reason == "because" + "; all of them 16 times a step, once a micro-batch" * leave_often


def test_gradients_on_the_host_are_refused_where_the_optimizer_is_on_the_device() -> None:
    with pytest.raises(SettingsError) as error:
        resolve_gradient_placement("host", ON_DEVICE, "cuda")
    message = str(error.value)
    assert message.startswith("gradient_placement='host', but the optimizer is on the device (adapters are small).")
    assert "Set gradient_placement='auto'" in message and "optimizer_placement='host'" in message


def test_a_field_that_contradicts_the_users_optimizer_is_refused() -> None:
    with pytest.raises(
        SettingsError, match=r"='host', but optimizers= holds a HostAdamW that was built with 'device'"
    ):
        resolve_gradient_placement("host", ON_HOST, "cuda", "device")


def test_an_unknown_gradient_placement_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"gradient_placement='gpu' .*Set gradient_placement to one of auto"):
        resolve_gradient_placement("gpu", ON_HOST, "cuda")

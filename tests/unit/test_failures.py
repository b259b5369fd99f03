"""Gradients that are not finite, arguments out of range, parameters that cannot be served, memory that is refused."""

from __future__ import annotations

import gc
import math
import subprocess
import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from torch_reference import (
    assert_same_bits,
    backward,
    fp32_twins,
    random_gradients,
    random_parameters,
    stock_adamw,
    train_pair,
)

import trl_budget
from trl_budget import host_gradients
from trl_budget.errors import HostMemoryError, NonFiniteGradientError, SettingsError
from trl_budget.host_adamw import HostAdamW
from trl_budget.pinned import HostSlab, host_slab_bytes

BAD = pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=["nan", "inf", "-inf"])
in_place_and_separate = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
SHAPES = ((17,), (33, 7))


def trained(dtype: torch.dtype) -> tuple[HostAdamW, list[Parameter], Any, list[Parameter]]:
    parameters = random_parameters(SHAPES, dtype)
    twins = fp32_twins(parameters)
    optimizer, stock = HostAdamW(zip(("first", "second"), parameters, strict=True)), stock_adamw(twins, "fused")
    train_pair(optimizer, parameters, stock, twins, steps=range(2))
    return optimizer, parameters, stock, twins


def bad_gradients(parameters: list[Parameter], bad: float) -> list[Tensor | None]:
    """Finite ones, but for one element of the second parameter."""
    gradients = random_gradients(parameters, seed=5)
    gradients[1].view(-1)[-1] = bad
    return gradients


def bad_step(optimizer: HostAdamW, parameters: list[Parameter], bad: float = math.nan, clip: bool = False) -> None:
    backward(parameters, bad_gradients(parameters, bad))
    if clip:
        optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()


@BAD
@in_place_and_separate
@pytest.mark.parametrize("clip", [False, True], ids=["unclipped", "clipped"])
def test_a_bad_step_changes_no_weight_and_no_moment(bad: float, dtype: torch.dtype, clip: bool) -> None:
    optimizer, parameters, stock, twins = trained(dtype)
    bad_step(optimizer, parameters, bad, clip)
    assert_same_bits(optimizer, parameters, stock, twins)
    train_pair(optimizer, parameters, stock, twins, steps=[2], max_norm=1.0)
    assert_same_bits(optimizer, parameters, stock, twins)


@in_place_and_separate
@pytest.mark.parametrize("by_hand", [True, False], ids=["by hand", "by backward"])
def test_a_nan_that_appears_after_clipping_is_not_stepped(by_hand: bool, dtype: torch.dtype) -> None:
    optimizer, parameters, *_ = trained(dtype)
    before = [p.detach().clone() for p in parameters]
    backward(parameters, random_gradients(parameters, seed=5))
    optimizer.clip_grad_norm_(1.0)
    if by_hand:
        parameters[1].grad = torch.full_like(parameters[1], math.nan)
    else:
        backward(parameters, bad_gradients(parameters, math.nan))
    optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(parameters, before, strict=True))


@in_place_and_separate
def test_a_nan_set_by_hand_after_a_good_step_is_not_stepped(dtype: torch.dtype) -> None:
    [parameter] = random_parameters([(17,)], dtype)
    optimizer = HostAdamW([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before = parameter.detach().clone()
    parameter.grad = torch.full_like(parameter, math.nan)
    optimizer.step()
    assert torch.equal(parameter.detach(), before)


@BAD
def test_the_warning_names_the_parameter_and_counts(bad: float, caplog: pytest.LogCaptureFixture) -> None:
    optimizer, parameters, *_ = trained(torch.bfloat16)
    bad_step(optimizer, parameters, bad)
    [message] = caplog.messages
    assert "second" in message and "first is second" in message
    assert "1 of 2 gradients" in message
    assert "1 steps in a row" in message


@in_place_and_separate
@pytest.mark.parametrize("max_norm", [None, 1.0], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("size", [1e19, 1e20, 3e38])
def test_finite_gradients_whose_norm_overflows_are_stepped_as_torch_steps_them(
    size: float, max_norm: float | None, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer, parameters, stock, twins = trained(dtype)
    gradients = [torch.full_like(p, value) for p, value in zip(parameters, (1.0, size), strict=True)]
    for weights, stepper in ((parameters, optimizer), (twins, stock)):
        backward(weights, gradients)
        if max_norm is not None:
            clip = optimizer.clip_grad_norm_ if stepper is optimizer else partial(clip_grad_norm_, twins)
            assert clip(max_norm).isinf()
        stepper.step()
        stepper.zero_grad()
    assert_same_bits(optimizer, parameters, stock, twins)
    assert optimizer.num_consecutive_skipped_steps == 0
    assert [("2 gradients are finite" in m and "with 0" in m) for m in caplog.messages] == [True] * (max_norm == 1.0)


@in_place_and_separate
def test_measuring_a_norm_that_overflows_scales_nothing(dtype: torch.dtype) -> None:
    optimizer, parameters, stock, twins = trained(dtype)
    for weights, stepper in ((parameters, optimizer), (twins, stock)):
        backward(weights, [torch.full_like(p, 2.0**65) for p in weights])
        if stepper is optimizer:
            assert optimizer.clip_grad_norm_(math.inf).isinf()
        stepper.step()
    assert_same_bits(optimizer, parameters, stock, twins)


@pytest.mark.parametrize("clip", [False, True], ids=["unclipped", "clipped"])
def test_finite_gradients_are_read_once_for_their_norm_and_not_again(
    clip: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer, parameters, *_ = trained(torch.bfloat16)
    monkeypatch.setattr(host_gradients, "is_finite", lambda _: pytest.fail("another sweep over the gradients"))
    backward(parameters, random_gradients(parameters, seed=5))
    if clip:
        optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    assert optimizer.state[parameters[0]]["step"] == 3


@in_place_and_separate
def test_the_tenth_bad_step_in_a_row_raises(dtype: torch.dtype) -> None:
    optimizer, parameters, *_ = trained(dtype)
    for _ in range(9):
        bad_step(optimizer, parameters)
    assert optimizer.num_consecutive_skipped_steps == 9
    with pytest.raises(NonFiniteGradientError, match=r"10 optimizer steps in a row.*nan.*learning_rate"):
        bad_step(optimizer, parameters)


def test_a_good_step_resets_the_count() -> None:
    optimizer, parameters, stock, twins = trained(torch.bfloat16)
    for _ in range(2):
        for _ in range(9):
            bad_step(optimizer, parameters)
        train_pair(optimizer, parameters, stock, twins, steps=[0])
        assert optimizer.num_consecutive_skipped_steps == 0


def test_a_skipped_step_does_not_disturb_the_schedule(recwarn: pytest.WarningsRecorder) -> None:
    [parameter] = random_parameters([(17,)], torch.bfloat16)
    optimizer = HostAdamW([parameter], lr=1.0)
    schedule = LambdaLR(optimizer, lambda step: 0.5**step)
    for expected in (0.5, 0.25):
        parameter.grad = torch.full_like(parameter, math.nan)
        optimizer.step()
        schedule.step()
        assert schedule.get_last_lr() == [expected]
    assert [str(w.message) for w in recwarn if "lr_scheduler" in str(w.message)] == []


@pytest.mark.parametrize(
    ("settings", "name", "value"),
    [
        ({"lr": -1e-3}, "lr", "-0.001"),
        ({"lr": math.nan}, "lr", "nan"),
        ({"betas": (1.0, 0.9)}, "betas", r"\(1.0, 0.9\)"),
        ({"betas": (0.9, 1.5)}, "betas", r"\(0.9, 1.5\)"),
        ({"betas": (-0.1, 0.9)}, "betas", r"\(-0.1, 0.9\)"),
        ({"eps": -1.0}, "eps", "-1.0"),
        ({"weight_decay": -0.1}, "weight_decay", "-0.1"),
        ({"implementation": "vectorised"}, "implementation", "'vectorised'"),
        ({"lr": torch.tensor(-1e-3)}, "lr", "-0.001.*"),
    ],
    ids=str,
)
def test_a_bad_argument_is_refused_with_value_reason_and_remedy(
    settings: dict[str, Any], name: str, value: str
) -> None:
    with pytest.raises(SettingsError, match=rf"{name}={value} .*(needs|runs) .*Set {name} to"):
        HostAdamW(random_parameters([(3,)], torch.bfloat16), **settings)


@pytest.mark.parametrize(
    ("settings", "name", "complaint"),
    [
        ({"lr": "1e-3"}, "lr", "'1e-3' is of type str"),
        ({"lr": None}, "lr", "None is of type NoneType"),
        ({"lr": torch.tensor([1e-3, 1e-4])}, "lr", r"tensor\(\[.*\) is of type Tensor"),
        ({"lr": torch.tensor(1e-3), "implementation": "foreach"}, "lr", r"tensor\(0.0010\) is a tensor"),
        ({"eps": torch.tensor(1e-8)}, "eps", "tensor.*is of type Tensor"),
        ({"weight_decay": "0"}, "weight_decay", "'0' is of type str"),
        ({"betas": 0.9}, "betas", "0.9 is of type float"),
        ({"betas": (0.9,)}, "betas", r"\(0.9,\) is of type tuple"),
        ({"betas": (torch.tensor(0.9), torch.tensor(0.99))}, "betas", r"\(tensor.*is of type tuple"),
    ],
    ids=str,
)
def test_an_argument_of_a_wrong_type_is_refused_by_its_type(
    settings: dict[str, Any], name: str, complaint: str
) -> None:
    with pytest.raises(SettingsError, match=rf"{name}={complaint}.*Set (implementation|{name}) to") as refused:
        HostAdamW(random_parameters([(3,)], torch.bfloat16), **settings)
    assert "out of range" not in str(refused.value)


@pytest.mark.parametrize("flag", ["amsgrad", "maximize", "capturable", "differentiable"])
def test_a_group_that_asks_for_a_variant_is_refused(flag: str) -> None:
    with pytest.raises(SettingsError, match=flag):
        HostAdamW([{"params": random_parameters([(3,)], torch.bfloat16), flag: True}])


@pytest.mark.parametrize(
    ("make", "what", "remedy"),
    [
        (lambda: torch.zeros(4, device="meta"), "meta device", "real weights"),
        (lambda: torch.zeros(4, dtype=torch.float16), "torch.float16", "dtype='bfloat16'"),
        (lambda: torch.zeros(4, dtype=torch.float64), "torch.float64", "dtype='bfloat16'"),
        (lambda: torch.zeros(3, 4).t(), r"strides \(1, 4\)", "contiguous"),
        (lambda: torch.zeros(3, 4, dtype=torch.bfloat16).t(), r"strides \(1, 4\)", "contiguous"),
    ],
    ids=["meta", "fp16", "fp64", "fp32 strided", "bf16 strided"],
)
def test_a_parameter_that_cannot_be_served_is_refused_by_name(
    make: Callable[[], Tensor], what: str, remedy: str
) -> None:
    with pytest.raises(SettingsError, match=rf"lm_head.*{what}.*{remedy}"):
        HostAdamW([("lm_head", Parameter(make()))])


def test_a_quantized_weight_that_trains_is_refused() -> None:
    class Quantized(Parameter):  # torch lets no integer tensor require gradients; bitsandbytes subclasses
        requires_grad = True

    weight = torch.Tensor._make_subclass(Quantized, torch.zeros(4, dtype=torch.uint8), False)
    with pytest.raises(SettingsError, match=r"torch.uint8.*quantized.*optimizer_placement='device'"):
        HostAdamW([weight])


def test_a_frozen_parameter_of_any_kind_is_left_alone() -> None:
    frozen = Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    optimizer = HostAdamW([frozen, *random_parameters([(3,)], torch.bfloat16)])
    optimizer.step()
    assert frozen not in optimizer.state


def test_a_second_optimizer_of_the_same_parameters_is_refused_while_the_first_lives() -> None:
    parameters = random_parameters(SHAPES, torch.bfloat16)
    first = HostAdamW(zip(("first", "second"), parameters, strict=True))
    for _ in range(2):  # a refused one takes nothing over
        with pytest.raises(SettingsError, match=r"second.*another HostAdamW.*del trainer"):
            HostAdamW([("second", parameters[1])])
    assert parameters[1] in first.state


@pytest.mark.parametrize("is_cyclic", [False, True], ids=["plain", "in a reference cycle"])
def test_a_second_optimizer_is_accepted_after_the_first_is_deleted(is_cyclic: bool) -> None:
    parameters = random_parameters(SHAPES, torch.bfloat16)
    first = HostAdamW(parameters)
    if is_cyclic:
        first.itself = first
    del first
    second = HostAdamW(parameters)
    assert parameters[0] in second.state


def test_deleting_frees_the_slabs_while_the_model_lives_on() -> None:
    gc.collect()
    before = host_slab_bytes()
    parameters = random_parameters(SHAPES, torch.bfloat16)
    optimizer = HostAdamW(parameters)
    backward(parameters, random_gradients(parameters, seed=0))
    optimizer.step()
    assert host_slab_bytes() >= before + 16 * sum(p.numel() for p in parameters)
    dead = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert dead() is None
    assert host_slab_bytes() == before
    backward(parameters, random_gradients(parameters, seed=0))
    assert parameters[0].grad is not None, "the model trains on with stock gradients"


def test_deleting_leaves_no_hooks_on_the_parameters() -> None:
    [parameter] = random_parameters([(17,)], torch.bfloat16)
    for _ in range(3):
        optimizer = HostAdamW([parameter])
        del optimizer
        gc.collect()
    assert len(parameter._post_accumulate_grad_hooks or {}) == 0


REFUSED = """
import resource, sys, types
package = types.ModuleType("trl_budget")
package.__path__ = [sys.argv[1]]  # without the package's own imports, which take seconds
sys.modules["trl_budget"] = package
import torch
from trl_budget.errors import HostMemoryError
from trl_budget.host_adamw import HostAdamW

parameter = torch.nn.Parameter(torch.empty(2**26, dtype=torch.bfloat16))
in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (in_use + 128 * 2**20, resource.RLIM_INFINITY))
try:
    HostAdamW([parameter])
except HostMemoryError as error:
    print(error)
"""


def test_memory_that_the_kernel_refuses_is_reported_with_the_figures() -> None:
    folder = str(Path(trl_budget.__file__).parent)
    command = [sys.executable, "-c", REFUSED, folder]
    message = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert "0.25 GiB of host memory for master weights could not be mapped" in message  # 2**26 elements of 4 bytes
    assert "0.00 GiB are held by this library already" in message
    assert "`ulimit -l` is" in message and "GiB of memory are free" in message
    assert "set optimizer_placement='device'" in message


def test_page_locking_that_cuda_refuses_is_an_error_with_the_code() -> None:
    before, calls = host_slab_bytes(), []

    def register(address: int, nbytes: int) -> int:
        calls.append(nbytes)
        return 2

    with pytest.raises(HostMemoryError, match=r"for exp_avg could not be page-locked .CUDA error 2.*ulimit -l"):
        HostSlab(4096, pin=True, purpose="exp_avg", register=register)
    assert calls == [4096]
    assert host_slab_bytes() == before

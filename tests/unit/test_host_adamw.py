"""HostAdamW against `torch.optim.AdamW` of the same implementation on fp32 tensors: equal to the last bit."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from torch_reference import (
    MIXED_SHAPES,
    assert_same_bits,
    backward,
    fp32_twins,
    random_gradients,
    random_parameters,
    stock_adamw,
    train_pair,
)

from trl_budget.errors import SettingsError
from trl_budget.host_adamw import BLOCK_ELEMENTS, HostAdamW
from trl_budget.host_threads import HostThreads

IMPLEMENTATIONS = ("fused", "foreach", "loop")
OVER_ONE_BLOCK, OVER_THREE_BLOCKS = BLOCK_ELEMENTS + 5, 3 * BLOCK_ELEMENTS + 5
in_place_and_separate = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


@pytest.fixture
def two_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def groups_of(parameters: list[Parameter]) -> list[dict[str, Any]]:
    """Three groups whose every setting differs; the second uses the defaults."""
    return [
        {"params": parameters[:2], "lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1},
        {"params": parameters[2:4]},
        {"params": parameters[4:], "lr": 1e-4, "betas": (0.0, 0.5), "eps": 0.1, "weight_decay": 0.0},
    ]


@every_implementation
@in_place_and_separate
@pytest.mark.parametrize("shape", [*MIXED_SHAPES, (0,), (3, 0)], ids=str)
def test_five_steps_have_the_bits_of_torch(shape: tuple[int, ...], dtype: torch.dtype, implementation: str) -> None:
    parameters = random_parameters([shape], dtype)
    twins = fp32_twins(parameters)
    stock = stock_adamw(twins, implementation, lr=1e-2)
    optimizer = HostAdamW(parameters, lr=1e-2, implementation=implementation)
    train_pair(optimizer, parameters, stock, twins)
    assert stock.state[twins[0]]["step"] == 5
    assert_same_bits(optimizer, parameters, stock, twins)


def train_large_pair(
    dtype: torch.dtype, implementation: str, max_norm: float | None = None, num_elements: int = OVER_THREE_BLOCKS
) -> None:
    assert num_elements > BLOCK_ELEMENTS
    parameters = random_parameters([(num_elements,)], dtype)
    twins = fp32_twins(parameters)
    stock = stock_adamw(twins, implementation, lr=1e-2)
    optimizer = HostAdamW(parameters, lr=1e-2, implementation=implementation)
    [gradient] = random_gradients(parameters, seed=0)
    for step in range(5):
        for weights, stepper in ((parameters, optimizer), (twins, stock)):
            weights[0].grad = gradient.roll(step).to(weights[0].dtype)
            if max_norm is not None:
                clip = optimizer.clip_grad_norm_ if stepper is optimizer else lambda m: clip_grad_norm_(twins, m)
                clip(max_norm)
            stepper.step()
    assert_same_bits(optimizer, parameters, stock, twins)


@every_implementation
@in_place_and_separate
def test_a_parameter_longer_than_a_block_has_the_bits_of_torch(dtype: torch.dtype, implementation: str) -> None:
    train_large_pair(dtype, implementation)


def test_two_threads_do_not_change_the_bits(two_threads: None) -> None:
    train_large_pair(torch.bfloat16, "fused", num_elements=OVER_ONE_BLOCK)


def test_clipping_reaches_every_block_of_a_long_parameter() -> None:
    train_large_pair(torch.bfloat16, "fused", max_norm=0.5, num_elements=OVER_ONE_BLOCK)


@every_implementation
@in_place_and_separate
@pytest.mark.parametrize("max_norm", [None, 0.5, 1e6, float("inf")], ids=["unclipped", "binding", "loose", "inf"])
def test_groups_frozen_and_gradless_parameters_have_the_bits_of_torch(
    max_norm: float | None, dtype: torch.dtype, implementation: str
) -> None:
    parameters = random_parameters([*MIXED_SHAPES, (9,), (5, 5)], dtype)
    parameters[3].requires_grad_(False)
    twins = fp32_twins(parameters)
    stock = stock_adamw(groups_of(twins), implementation)
    optimizer = HostAdamW(groups_of(parameters), implementation=implementation)
    for step in range(5):
        gradients = random_gradients(parameters, step)
        gradients[1] = None  # never takes part
        gradients[4] = gradients[4] if step % 2 else None  # takes part in every second step
        for weights, stepper in ((parameters, optimizer), (twins, stock)):
            backward(weights, gradients)
            if max_norm is not None:
                clip = optimizer.clip_grad_norm_ if stepper is optimizer else lambda m: clip_grad_norm_(twins, m)
                clip(max_norm)
            stepper.step()
            stepper.zero_grad()
    assert_same_bits(optimizer, parameters, stock, twins)


@in_place_and_separate
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda o: LambdaLR(o, lambda step: 1 / (1 + step)), id="LambdaLR"),
        pytest.param(lambda o: CosineAnnealingLR(o, T_max=5), id="cosine"),
    ],
)
def test_follows_a_learning_rate_schedule(make: Callable[[Any], Any], dtype: torch.dtype) -> None:
    parameters = random_parameters(MIXED_SHAPES, dtype)
    twins = fp32_twins(parameters)
    stock, optimizer = stock_adamw(twins, "fused", lr=0.1), HostAdamW(parameters, lr=0.1)
    schedules = make(stock), make(optimizer)
    for step in range(5):
        train_pair(optimizer, parameters, stock, twins, steps=[step])
        for schedule in schedules:
            schedule.step()
    assert schedules[0].get_last_lr() == schedules[1].get_last_lr()
    assert_same_bits(optimizer, parameters, stock, twins)


@in_place_and_separate
@pytest.mark.parametrize("implementation", ["fused", "loop"])
@pytest.mark.parametrize("lr", [torch.tensor(0.1), torch.tensor([0.1])], ids=["scalar", "one element"])
def test_a_learning_rate_tensor_that_a_schedule_writes_has_the_bits_of_torch(
    lr: Tensor, implementation: str, dtype: torch.dtype
) -> None:
    parameters = random_parameters(MIXED_SHAPES, dtype)
    twins = fp32_twins(parameters)
    stock = stock_adamw(twins, implementation, lr=lr.clone())
    optimizer = HostAdamW(parameters, lr=lr.clone(), implementation=implementation)
    schedules = [LambdaLR(o, lambda step: 1 / (1 + step)) for o in (stock, optimizer)]
    for step in range(4):
        train_pair(optimizer, parameters, stock, twins, steps=[step])
        for schedule in schedules:
            schedule.step()
    assert isinstance(optimizer.param_groups[0]["lr"], Tensor)
    assert_same_bits(optimizer, parameters, stock, twins)
    resumed = HostAdamW([Parameter(p.detach().clone()) for p in parameters], implementation=implementation)
    resumed.load_state_dict(optimizer.state_dict())
    assert torch.equal(resumed.param_groups[0]["lr"], stock.param_groups[0]["lr"])


def test_a_learning_rate_tensor_put_into_a_group_of_foreach_is_refused_before_the_step() -> None:
    [parameter] = random_parameters([(17,)], torch.bfloat16)
    optimizer = HostAdamW([parameter], implementation="foreach")
    saved = optimizer.state_dict()
    optimizer.param_groups[0]["lr"] = saved["param_groups"][0]["lr"] = torch.tensor(0.1)
    backward([parameter], [torch.ones(17)])
    for action in (optimizer.step, lambda: optimizer.load_state_dict(saved)):
        with pytest.raises(SettingsError, match=r"'foreach'.*'fused' or 'loop'"):
            action()
    assert optimizer.state[parameter]["step"] == 0
    optimizer.check_whole()


@in_place_and_separate
def test_a_closure_is_run_with_gradients_enabled_and_its_loss_returned(dtype: torch.dtype) -> None:
    parameters = random_parameters(MIXED_SHAPES, dtype)
    twins = fp32_twins(parameters)
    stock, optimizer = stock_adamw(twins, "fused"), HostAdamW(parameters)
    gradients = random_gradients(parameters, seed=0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        return backward(parameters, gradients)

    expected_loss = torch.stack([(p * g).sum().float() for p, g in zip(parameters, gradients, strict=True)]).sum()
    loss = optimizer.step(closure)
    backward(twins, gradients)
    stock.step()
    assert torch.equal(loss, expected_loss)
    assert_same_bits(optimizer, parameters, stock, twins)


@in_place_and_separate
def test_a_group_added_later_starts_at_step_zero(dtype: torch.dtype) -> None:
    parameters = random_parameters(MIXED_SHAPES, dtype)
    twins = fp32_twins(parameters)
    stock, optimizer = stock_adamw(twins[:4], "fused"), HostAdamW(parameters[:4])
    train_pair(optimizer, parameters[:4], stock, twins[:4], steps=range(2))
    stock.add_param_group({"params": twins[4:], "lr": 0.1})
    optimizer.add_param_group({"params": parameters[4:], "lr": 0.1})
    train_pair(optimizer, parameters, stock, twins, steps=range(2, 5))
    assert_same_bits(optimizer, parameters, stock, twins)


@in_place_and_separate
@pytest.mark.parametrize("max_norm", [None, 0.5], ids=["unclipped", "clipping binds"])
def test_a_layer_unfrozen_later_has_the_bits_of_torch(max_norm: float | None, dtype: torch.dtype) -> None:
    parameters = random_parameters(MIXED_SHAPES, dtype)
    parameters[2].requires_grad_(False)
    twins = fp32_twins(parameters)
    stock, optimizer = stock_adamw(twins, "fused"), HostAdamW(parameters)
    train_pair(optimizer, parameters, stock, twins, range(2), max_norm)
    parameters[2].requires_grad_(True)
    twins[2].requires_grad_(True)
    train_pair(optimizer, parameters, stock, twins, range(2, 5), max_norm)
    assert stock.state[twins[2]]["step"] == 3
    assert_same_bits(optimizer, parameters, stock, twins)


@in_place_and_separate
def test_named_parameters_give_the_bits_of_plain_ones(dtype: torch.dtype) -> None:
    parameters = random_parameters(MIXED_SHAPES, dtype)
    twins = fp32_twins(parameters)
    stock = stock_adamw(twins, "fused")
    optimizer = HostAdamW((f"layer.{i}", p) for i, p in enumerate(parameters))
    train_pair(optimizer, parameters, stock, twins)
    assert_same_bits(optimizer, parameters, stock, twins)


def test_tied_weights_given_once_are_stepped_once() -> None:
    def tied_model() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False))
        model[2].weight = model[0].weight
        return model

    model, twin = tied_model(), tied_model()
    optimizer, stock = HostAdamW(model.parameters(), lr=0.1), stock_adamw(twin.parameters(), "fused", lr=0.1)
    for step in range(5):
        for network, stepper in ((model, optimizer), (twin, stock)):
            network(torch.arange(11).roll(step)).square().sum().backward()
            stepper.step()
            stepper.zero_grad()
    assert model[2].weight is model[0].weight
    assert_same_bits(optimizer, list(model.parameters()), stock, list(twin.parameters()))


@in_place_and_separate
@pytest.mark.parametrize("order", ["of the groups", "given"])
def test_clip_grad_norm_returns_the_norm_of_torch_for_that_order(order: str, dtype: torch.dtype) -> None:
    parameters = random_parameters([(3,)] * 64, dtype)
    twins = fp32_twins(parameters)
    gradients = random_gradients(parameters, seed=0)
    optimizer = HostAdamW(parameters)
    backward(parameters, gradients)
    backward(twins, gradients)
    forward, backwards = clip_grad_norm_(twins, torch.inf), clip_grad_norm_(reversed(twins), torch.inf)
    assert forward != backwards, "the order has to matter for this test to mean something"
    if order == "given":
        assert torch.equal(optimizer.clip_grad_norm_(1.0, reversed(parameters)), backwards)
    else:
        assert torch.equal(optimizer.clip_grad_norm_(1.0), forward)


@in_place_and_separate
def test_clipping_twice_with_a_backward_between_has_the_bits_of_torch(dtype: torch.dtype) -> None:
    parameters = random_parameters(MIXED_SHAPES, dtype)
    twins = fp32_twins(parameters)
    stock, optimizer = stock_adamw(twins, "fused"), HostAdamW(parameters)
    for seed in range(2):
        gradients = random_gradients(parameters, seed)
        backward(parameters, gradients)
        backward(twins, gradients)
        assert torch.equal(optimizer.clip_grad_norm_(0.7), clip_grad_norm_(twins, 0.7))
    assert torch.equal(optimizer.clip_grad_norm_(0.3), clip_grad_norm_(twins, 0.3))
    for parameter, twin in zip(parameters, twins, strict=True):
        assert torch.equal(optimizer.gradient(parameter), twin.grad)
    optimizer.step()
    stock.step()
    assert_same_bits(optimizer, parameters, stock, twins)


def test_bf16_compute_weights_are_the_cast_of_the_masters_after_every_step() -> None:
    parameters = random_parameters(MIXED_SHAPES, torch.bfloat16)
    optimizer = HostAdamW(parameters, lr=1e-3)
    for step in range(2):
        backward(parameters, random_gradients(parameters, step))
        optimizer.step()
        for parameter in parameters:
            master = optimizer.state[parameter]["master_weights"]
            assert torch.equal(parameter.detach(), master.to(torch.bfloat16))
            assert parameter.numel() == 1 or not torch.equal(master, parameter.detach().float())


def test_gradients_made_finite_after_clipping_are_stepped() -> None:
    [parameter] = random_parameters([(17,)], torch.float32)
    [twin] = fp32_twins([parameter])
    stock, optimizer = stock_adamw([twin], "fused"), HostAdamW([parameter])
    [gradient] = random_gradients([parameter], seed=0)
    gradient[3] = torch.nan
    backward([parameter], [gradient])
    optimizer.clip_grad_norm_(torch.inf)
    parameter.grad = gradient.nan_to_num()
    optimizer.step()
    twin.grad = gradient.nan_to_num()
    stock.step()
    assert_same_bits(optimizer, [parameter], stock, [twin])


@in_place_and_separate
def test_a_gradient_that_is_not_contiguous_has_the_bits_of_torch(dtype: torch.dtype) -> None:
    parameters = random_parameters([(33, 7)], dtype)
    twins = fp32_twins(parameters)
    stock, optimizer = stock_adamw(twins, "fused"), HostAdamW(parameters)
    [gradient] = random_gradients(parameters, seed=0)
    parameters[0].grad = gradient.t().contiguous().t()
    twins[0].grad = gradient.float()
    optimizer.step()
    stock.step()
    assert_same_bits(optimizer, parameters, stock, twins)


def test_a_parameter_is_published_in_its_place_when_all_of_its_blocks_have_been_stepped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trl_budget.host_adamw.BLOCK_ELEMENTS", 16)
    parameters = random_parameters([(50,), (16,), (3,), (40, 4), (0,)], torch.bfloat16)
    optimizer = HostAdamW(parameters, lr=1e-2)
    optimizer._threads = HostThreads(4, cores=1)
    events: list[tuple[str, int, float]] = []
    step_block, number = optimizer._step_block, {slot: i for i, slot in enumerate(optimizer._slots.values())}

    def slow_first_blocks(slot: Any, flat: Tensor, start: int, settings: Any) -> None:
        time.sleep(0.03 if start == 0 else 0.002)
        step_block(slot, flat, start, settings)
        events.append(("stepped", number[slot], float(slot.step)))

    monkeypatch.setattr(optimizer, "_step_block", slow_first_blocks)
    monkeypatch.setattr(
        optimizer._team, "publish", lambda slot: events.append(("published", number[slot], float(slot.step)))
    )
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    published = [index for what, index, _ in events if what == "published"]
    assert published == list(range(5))
    for index in range(5):
        of_slot = [(what, step) for what, i, step in events if i == index]
        blocks = -(-parameters[index].numel() // 16)
        assert of_slot == [("stepped", 0.0)] * blocks + [("published", 1.0)]
    first_published = [what for what, _, _ in events].index("published")
    assert any(what == "stepped" for what, _, _ in events[first_published:]), "not only at the end"

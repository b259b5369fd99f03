"""Parked weights leave no bytes behind and come back bit for bit; a failure midway loses nothing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch_reference import STOCK_FLAGS

from trl_budget import HostAdamW, host_room, parking
from trl_budget.errors import HostMemoryError, ParkedError, SettingsError
from trl_budget.parking import ParkedWeights
from trl_budget.pinned import HostSlab, host_slab_bytes


class Zoo(nn.Module):
    """Ties, two views of one storage, a transposed weight, buffers, three dtypes, a frozen and an empty tensor."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        flat = torch.randn(40, generator=generator)
        self.embedding = nn.Embedding(7, 5, dtype=torch.bfloat16)
        self.head = nn.Linear(5, 7, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embedding.weight
        self.first, self.second = Parameter(flat[:16].view(4, 4)), Parameter(flat[17:32].view(3, 5))
        self.transposed = Parameter(torch.randn(6, 3, generator=generator).t())
        self.codes = Parameter(torch.arange(-5, 6, dtype=torch.int8), requires_grad=False)
        self.frozen = Parameter(torch.randn(9, generator=generator).bfloat16(), requires_grad=False)
        self.empty = Parameter(torch.empty(0, 3))
        self.scalar = Parameter(torch.randn((), generator=generator))
        self.register_buffer("mean", torch.randn(11, generator=generator, dtype=torch.float64))
        self.register_buffer("cosines", torch.randn(2, 3, generator=generator), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return (
            self.head(self.embedding(ids)).float().sum() * self.scalar
            + (self.first @ self.transposed.new_ones(4)).sum()
        )


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def copies_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors_of(module).items()}


def storage_bytes(module: nn.Module) -> int:
    return sum({t.untyped_storage(): t.untyped_storage().nbytes() for t in tensors_of(module).values()}.values())


def parked_zoo(**settings: object) -> tuple[Zoo, ParkedWeights]:
    zoo = Zoo()
    weights = ParkedWeights(zoo, "policy", device_type="cpu", **settings)
    weights.park()
    return zoo, weights


def assert_equal(module: nn.Module, expected: dict[str, Tensor]) -> None:
    present = tensors_of(module)
    assert present.keys() == expected.keys()
    for name, tensor in present.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor.detach(), expected[name]), name


# What leaves and what comes back


def test_a_parked_module_holds_no_bytes() -> None:
    zoo, weights = parked_zoo()
    assert weights.is_parked
    assert (weights.device_bytes, storage_bytes(zoo)) == (0, 0)


def test_bytes_on_the_device_count_each_storage_once() -> None:
    weights = ParkedWeights(Zoo(), "policy", device_type="cpu")
    tied, flat, transposed, codes, frozen, scalar, buffers = 2 * 35, 4 * 40, 4 * 18, 11, 2 * 9, 4, 8 * 11 + 4 * 6
    assert weights.device_bytes == tied + flat + transposed + codes + frozen + scalar + buffers
    assert weights.host_bytes == 0


def test_every_value_comes_back() -> None:
    zoo = Zoo()
    expected = copies_of(zoo)
    weights = ParkedWeights(zoo, "policy", device_type="cpu")
    weights.park()
    weights.unpark()
    assert not weights.is_parked
    assert_equal(zoo, expected)


def test_bytes_between_two_views_of_a_storage_come_back() -> None:
    zoo = Zoo()
    whole = zoo.first.detach().as_strided((40,), (1,), 0)
    expected = whole.clone()
    weights = ParkedWeights(zoo, "policy", device_type="cpu")
    weights.park()
    weights.unpark()
    assert torch.equal(whole, expected)


def test_parameters_stay_the_same_objects_with_their_shapes_and_strides() -> None:
    zoo = Zoo()
    before = [(name, id(t), t.shape, t.stride(), t.requires_grad) for name, t in tensors_of(zoo).items()]
    weights = ParkedWeights(zoo, "policy", device_type="cpu")
    weights.park()
    parked = [(name, id(t), t.shape, t.stride(), t.requires_grad) for name, t in tensors_of(zoo).items()]
    weights.unpark()
    after = [(name, id(t), t.shape, t.stride(), t.requires_grad) for name, t in tensors_of(zoo).items()]
    assert before == parked == after


def test_ties_stay_tied() -> None:
    zoo, weights = parked_zoo()
    weights.unpark()
    with torch.no_grad():
        zoo.embedding.weight.fill_(3)
        zoo.first.fill_(4)
    assert bool((zoo.head.weight == 3).all())
    assert zoo.first.untyped_storage() is zoo.second.untyped_storage()


def test_detached_aliases_made_before_see_the_values_that_came_back() -> None:
    zoo = Zoo()
    alias, expected = zoo.frozen.data, zoo.frozen.detach().clone()
    weights = ParkedWeights(zoo, "policy", device_type="cpu")
    weights.park()
    weights.unpark()
    assert torch.equal(alias, expected)


def test_gradients_are_left_alone() -> None:
    zoo = Zoo()
    zoo(torch.arange(7)).backward()
    gradient, expected = zoo.scalar.grad, zoo.scalar.grad.clone()
    weights = ParkedWeights(zoo, "policy", device_type="cpu")
    weights.park()
    assert zoo.scalar.grad is gradient and torch.equal(gradient, expected)
    weights.unpark()
    assert zoo.scalar.grad is gradient and torch.equal(gradient, expected)


def test_hooks_on_the_nodes_that_ddp_uses_still_fire() -> None:
    zoo, fired = Zoo(), []
    node = zoo.scalar.expand_as(zoo.scalar).grad_fn.next_functions[0][0]
    node.register_hook(lambda *_: fired.append("hook"))
    weights = ParkedWeights(zoo, "policy", device_type="cpu")
    weights.park()
    weights.unpark()
    zoo(torch.arange(7)).backward()
    assert fired == ["hook"]


def test_version_counters_do_not_move() -> None:
    zoo = Zoo()
    before = [tensor._version for tensor in tensors_of(zoo).values()]
    weights = ParkedWeights(zoo, "policy", device_type="cpu")
    weights.park()
    weights.unpark()
    assert [tensor._version for tensor in tensors_of(zoo).values()] == before


def test_a_graph_made_before_parking_can_be_walked_after_it() -> None:
    zoo, untouched = Zoo(), Zoo()
    untouched.load_state_dict(zoo.state_dict())
    loss = zoo(torch.arange(7))
    weights = ParkedWeights(zoo, "policy", device_type="cpu")
    weights.park()
    weights.unpark()
    loss.backward()
    untouched(torch.arange(7)).backward()
    assert torch.equal(zoo.embedding.weight.grad, untouched.embedding.weight.grad)


def test_parking_and_unparking_twice_change_nothing() -> None:
    zoo = Zoo()
    expected = copies_of(zoo)
    weights = ParkedWeights(zoo, "policy", device_type="cpu")
    weights.unpark()
    weights.park()
    weights.park()
    assert storage_bytes(zoo) == 0
    weights.unpark()
    weights.unpark()
    assert_equal(zoo, expected)


def test_values_written_between_two_parkings_are_the_ones_that_come_back() -> None:
    zoo, weights = parked_zoo()
    weights.unpark()
    with torch.no_grad():
        zoo.transposed.fill_(8)
    weights.park()
    weights.unpark()
    assert bool((zoo.transposed == 8).all())


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_module_parked_without_gradients_trains_afterwards(context: Callable[[], object]) -> None:
    zoo, expected = Zoo(), Zoo()
    expected.load_state_dict(zoo.state_dict())
    weights = ParkedWeights(zoo, "policy", device_type="cpu")
    with context():
        weights.park()
    weights.unpark()
    weights.park()
    with context():
        weights.unpark()
    for module in (zoo, expected):
        module(torch.arange(7)).backward()
        torch.optim.SGD(module.parameters(), lr=1.0).step()
    assert_equal(zoo, copies_of(expected))


def test_a_module_made_in_inference_mode_is_parked() -> None:
    with torch.inference_mode():
        reward_model = Zoo()
    expected = copies_of(reward_model)
    weights = ParkedWeights(reward_model, "reward model 0", device_type="cpu")
    weights.park()
    weights.unpark()
    assert_equal(reward_model, expected)


def test_two_modules_park_on_their_own() -> None:
    policy, reference = Zoo(), Zoo()
    expected = copies_of(reference)
    parked = [ParkedWeights(module, "either", device_type="cpu") for module in (policy, reference)]
    for weights in parked:
        weights.park()
    parked[1].unpark()
    assert parked[0].device_bytes == 0
    assert_equal(reference, expected)


def test_a_weight_that_two_modules_share_comes_back_with_the_one_that_parked_it() -> None:
    policy, reference = Zoo(), Zoo()
    reference.frozen = policy.frozen
    expected = copies_of(reference)
    first, second = (ParkedWeights(module, "either", device_type="cpu") for module in (policy, reference))
    first.park()
    second.park()
    second.unpark()
    first.unpark()
    assert_equal(reference, expected)


def test_state_dict_after_unparking_is_the_one_before() -> None:
    zoo = Zoo()
    expected = {name: tensor.clone() for name, tensor in zoo.state_dict().items()}
    weights = ParkedWeights(zoo, "policy", device_type="cpu")
    weights.park()
    weights.unpark()
    state = zoo.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


# What stays


def test_kept_tensors_stay_with_all_that_shares_their_storage() -> None:
    zoo = Zoo()
    expected = {"first": zoo.first.detach().clone(), "second": zoo.second.detach().clone()}
    weights = ParkedWeights(zoo, "policy", device_type="cpu", keeps=lambda tensor: tensor is zoo.second)
    weights.park()
    assert weights.device_bytes == 4 * 40
    assert torch.equal(zoo.first, expected["first"]) and torch.equal(zoo.second, expected["second"])


def test_what_is_kept_is_asked_anew_at_every_parking() -> None:
    zoo = Zoo()
    weights = ParkedWeights(zoo, "policy", device_type="cpu", keeps=lambda tensor: tensor.requires_grad)
    zoo.requires_grad_(False)
    weights.park()
    assert weights.device_bytes == 0


def test_tensors_on_another_device_are_left_alone() -> None:
    module = nn.Linear(3, 2)
    module.extra = Parameter(torch.empty(1000, device="meta"))
    weights = ParkedWeights(module, "policy", device_type="cpu")
    weights.park()
    assert weights.host_bytes < 1000
    weights.unpark()
    assert module.extra.is_meta


def test_parameters_added_later_are_parked_with_the_rest() -> None:
    zoo, weights = parked_zoo()
    weights.unpark()
    zoo.adapter = nn.Linear(30, 20)
    expected = copies_of(zoo)
    weights.park()
    assert storage_bytes(zoo) == 0
    weights.unpark()
    assert_equal(zoo, expected)


class Wrapper(Tensor):
    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    __torch_dispatch__ = None


@pytest.mark.parametrize(
    ("buffer", "reason"),
    [
        (torch.frombuffer(bytearray(40), dtype=torch.float32), "torch did not allocate"),
        (torch.eye(3).to_sparse(), "sparse_coo"),
        (Wrapper(torch.ones(3)), "Wrapper"),
    ],
    ids=["memory of others", "sparse", "wrapper"],
)
def test_a_tensor_whose_memory_cannot_be_taken_away_is_refused_by_name(buffer: Tensor, reason: str) -> None:
    module = nn.Module()
    module.register_buffer("odd", buffer)
    with pytest.raises(SettingsError, match=f"odd of the reference .*{reason}"):
        ParkedWeights(module, "reference", device_type="cpu")


def test_such_a_tensor_may_be_kept() -> None:
    module = nn.Linear(3, 2)
    module.register_buffer("odd", torch.frombuffer(bytearray(40), dtype=torch.float32))
    weights = ParkedWeights(module, "reference", device_type="cpu", keeps=lambda tensor: tensor is module.odd)
    weights.park()
    assert weights.device_bytes == 40


# Host memory


def test_twenty_cycles_take_host_memory_once() -> None:
    before = host_slab_bytes()
    _, weights = parked_zoo()
    held = []
    for _ in range(20):
        weights.unpark()
        weights.park()
        held.append(host_slab_bytes() - before)
    assert held == [weights.host_bytes] * 20


def test_a_larger_module_gets_larger_host_memory_instead_of_more() -> None:
    before = host_slab_bytes()
    zoo, weights = parked_zoo()
    weights.unpark()
    zoo.adapter = nn.Linear(64, 64)
    weights.park()
    assert host_slab_bytes() - before == weights.host_bytes >= storage_bytes_of_copy(zoo)
    assert weights.host_bytes < storage_bytes_of_copy(zoo) + 256 * 12


def storage_bytes_of_copy(zoo: Zoo) -> int:
    return 2 * 35 + 4 * 40 + 4 * 18 + 11 + 2 * 9 + 4 + 8 * 11 + 4 * 6 + zoo.adapter.weight.nbytes + 4 * 64


def test_released_host_memory_is_taken_anew() -> None:
    zoo, weights = parked_zoo()
    weights.unpark()
    before, held, expected = host_slab_bytes(), weights.host_bytes, copies_of(zoo)
    weights.release_host_copy()
    assert (weights.host_bytes, host_slab_bytes()) == (0, before - held)
    weights.park()
    weights.unpark()
    assert_equal(zoo, expected)


def test_the_only_copy_is_not_released() -> None:
    _, weights = parked_zoo()
    with pytest.raises(ParkedError, match="only copy"):
        weights.release_host_copy()


def test_host_memory_goes_with_its_owner() -> None:
    gc.collect()  # what earlier tests have left in reference cycles
    before = host_slab_bytes()
    _, weights = parked_zoo()
    weights.unpark()
    assert host_slab_bytes() > before
    del weights
    gc.collect()
    assert host_slab_bytes() == before


@pytest.mark.parametrize(("device_type", "pin", "expected"), [("cpu", None, False), ("cpu", True, True)])
def test_host_memory_is_page_locked_as_asked(device_type: str, pin: bool | None, expected: bool) -> None:
    pins: list[bool] = []

    def allocate(nbytes: int, *, pin: bool, purpose: str) -> HostSlab:
        pins.append(pin)
        return HostSlab(nbytes, pin=False, purpose=purpose)

    ParkedWeights(Zoo(), "policy", device_type=device_type, pin=pin, allocate=allocate).park()
    assert pins == [expected]


# The host copy as a source for others


def test_host_tensors_are_the_parameters_with_their_layout() -> None:
    zoo = Zoo()
    expected = {name: parameter.detach().clone() for name, parameter in zoo.named_parameters()}
    weights = ParkedWeights(zoo, "policy", device_type="cpu")
    weights.park()
    tensors = dict(weights.host_tensors())
    assert list(tensors) == list(expected)
    for name, parameter in zoo.named_parameters():
        assert (tensors[name].dtype, tensors[name].shape, tensors[name].stride()) == (
            parameter.dtype,
            parameter.shape,
            parameter.stride(),
        )
        assert torch.equal(tensors[name], expected[name]), name


def test_host_tensors_hold_kept_parameters_as_they_are() -> None:
    zoo = Zoo()
    weights = ParkedWeights(zoo, "policy", device_type="cpu", keeps=lambda tensor: tensor is zoo.scalar)
    weights.park()
    scalar = dict(weights.host_tensors())["scalar"]
    assert scalar.data_ptr() == zoo.scalar.data_ptr() and not scalar.requires_grad


def test_host_tensors_need_parked_weights() -> None:
    with pytest.raises(ParkedError, match="reference"):
        ParkedWeights(Zoo(), "reference", device_type="cpu").host_tensors()


# Use while parked


@pytest.mark.parametrize(
    "use",
    [
        lambda zoo: zoo(torch.arange(7)),
        lambda zoo: zoo.head(torch.ones(5)),
        lambda zoo: zoo.state_dict(),
        lambda zoo: zoo.load_state_dict({}),
    ],
    ids=["forward", "forward of a part", "state dict", "loading"],
)
def test_using_a_parked_module_is_refused_until_it_is_back(use: Callable[[nn.Module], object]) -> None:
    zoo, weights = parked_zoo()
    with pytest.raises(ParkedError, match=r"policy.*parked in host memory") as refusal:
        use(zoo)
    assert str(refusal.value).count(". ") == 2
    weights.unpark()
    zoo(torch.arange(7))
    zoo.load_state_dict(zoo.state_dict())


def test_a_module_parked_again_refuses_again() -> None:
    zoo, weights = parked_zoo()
    weights.unpark()
    weights.park()
    with pytest.raises(ParkedError):
        zoo(torch.arange(7))


def test_the_refusal_comes_before_the_modules_own_hooks() -> None:
    zoo, seen = Zoo(), []
    zoo.register_forward_pre_hook(lambda *_: seen.append("own hook"))
    weights = ParkedWeights(zoo, "policy", device_type="cpu")
    weights.park()
    with pytest.raises(ParkedError):
        zoo(torch.arange(7))
    assert seen == []


def test_no_hook_is_left_on_a_module_that_is_back() -> None:
    zoo, weights = parked_zoo()
    weights.unpark()
    for part in zoo.modules():
        assert not (part._forward_pre_hooks or part._state_dict_pre_hooks or part._load_state_dict_pre_hooks)


def test_weights_dropped_while_parked_come_back_to_a_module_in_use() -> None:
    zoo = Zoo()
    before = {name: value.clone() for name, value in zoo.state_dict().items()}
    weights = ParkedWeights(zoo, "policy", device_type="cpu")
    weights.park()
    collected = weakref.ref(weights)
    del weights
    assert collected() is None
    assert all(torch.equal(value, before[name]) for name, value in zoo.state_dict().items())
    zoo(torch.arange(7))


def test_a_module_dropped_with_its_parked_weights_takes_no_memory_again() -> None:
    zoo, weights = parked_zoo()
    storage = next(zoo.parameters()).untyped_storage()
    zoo.weights = weights  # one cycle, so that both go at once
    weights.owner = zoo
    del zoo, weights
    gc.collect()
    assert storage.nbytes() == 0


# Failures midway


def fail_at(monkeypatch: pytest.MonkeyPatch, method: str, call: int, error: BaseException) -> None:
    """Makes the `call`-th call of a step of the move raise after it has done half of its work."""
    stock = getattr(parking._ParkedStorage, method)
    calls: list[object] = []

    def failing(entry: parking._ParkedStorage) -> None:
        calls.append(entry)
        if len(calls) == call:
            if method == "restore":
                entry.storage.resize_(entry.nbytes)
            raise error
        stock(entry)

    monkeypatch.setattr(parking._ParkedStorage, method, failing)


@pytest.mark.parametrize("method", ["save", "free"])
@pytest.mark.parametrize("call", [1, 4, 8])
def test_a_parking_that_fails_midway_leaves_everything_in_place(
    monkeypatch: pytest.MonkeyPatch, method: str, call: int
) -> None:
    zoo = Zoo()
    expected = copies_of(zoo)
    weights = ParkedWeights(zoo, "policy", device_type="cpu")
    fail_at(monkeypatch, method, call, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        weights.park()
    assert not weights.is_parked
    assert_equal(zoo, expected)
    zoo(torch.arange(7))
    weights.park()
    assert storage_bytes(zoo) == 0


def test_host_memory_that_the_machine_lacks_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    zoo = Zoo()
    expected = copies_of(zoo)
    weights = ParkedWeights(zoo, "policy", device_type="cpu")

    def refuse(nbytes: int, purpose: str) -> None:
        raise HostMemoryError(f"{nbytes} bytes for {purpose}")

    monkeypatch.setattr(host_room, "check_host_memory", refuse)
    with pytest.raises(HostMemoryError, match="The policy's weights could not be parked") as refusal:
        weights.park()
    assert "parked weights of the policy" in str(refusal.value.__cause__)
    assert_equal(zoo, expected)
    zoo(torch.arange(7))


@pytest.mark.parametrize("call", [1, 4, 8])
def test_an_unparking_that_failed_midway_can_be_finished(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    zoo = Zoo()
    expected = copies_of(zoo)
    weights = ParkedWeights(zoo, "policy", device_type="cpu")
    weights.park()
    fail_at(monkeypatch, "restore", call, torch.OutOfMemoryError("no device memory"))
    with pytest.raises(torch.OutOfMemoryError):
        weights.unpark()
    assert weights.is_parked
    with pytest.raises(ParkedError):
        zoo(torch.arange(7))
    weights.unpark()
    assert_equal(zoo, expected)


@pytest.mark.parametrize("call", [1, 4, 8])
def test_an_unparking_that_failed_midway_can_be_undone(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    zoo = Zoo()
    expected = copies_of(zoo)
    weights = ParkedWeights(zoo, "policy", device_type="cpu")
    weights.park()
    fail_at(monkeypatch, "restore", call, torch.OutOfMemoryError("no device memory"))
    with pytest.raises(torch.OutOfMemoryError):
        weights.unpark()
    assert (weights.device_bytes > 0) and weights.is_parked
    weights.park()
    assert weights.device_bytes == 0
    weights.unpark()
    assert_equal(zoo, expected)


# Training


def small_model(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8)).to(dtype)


def trained(
    dtype: torch.dtype, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer], *, is_parked_between: bool
) -> tuple[list[Tensor], torch.optim.Optimizer]:
    model = small_model(dtype)
    optimizer = make_optimizer(model)
    weights = ParkedWeights(model, "policy", device_type="cpu")
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        if is_parked_between:
            weights.park()
            weights.unpark()
        model(torch.randn(4, 8, generator=generator).to(dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()], optimizer


@pytest.mark.parametrize("implementation", ["fused", "foreach", "loop"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_with_torch_adamw_is_unchanged_by_parking(dtype: torch.dtype, implementation: str) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2, **STOCK_FLAGS[implementation])

    parked, _ = trained(dtype, make, is_parked_between=True)
    stayed, _ = trained(dtype, make, is_parked_between=False)
    assert all(torch.equal(ours, expected) for ours, expected in zip(parked, stayed, strict=True))


@pytest.mark.parametrize("gradient_placement", ["device", "host"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_with_host_adamw_is_unchanged_by_parking(dtype: torch.dtype, gradient_placement: str) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return HostAdamW(model.parameters(), lr=1e-2, gradient_placement=gradient_placement)

    parked, ours = trained(dtype, make, is_parked_between=True)
    stayed, expected = trained(dtype, make, is_parked_between=False)
    assert all(torch.equal(p, q) for p, q in zip(parked, stayed, strict=True))
    for state, expected_state in zip(ours.state.values(), expected.state.values(), strict=True):
        assert torch.equal(state["master_weights"], expected_state["master_weights"])


def test_host_adamw_takes_parking_for_no_write() -> None:
    model = small_model(torch.bfloat16)
    optimizer = HostAdamW(model.parameters(), lr=1e-2)
    model(torch.ones(4, 8).bfloat16()).sum().backward()
    optimizer.step()
    weights = ParkedWeights(model, "policy", device_type="cpu")
    weights.park()
    weights.unpark()
    assert optimizer.adopt_external_writes() == []

"""Gradients that leave while backward runs give the sums of gradients that leave at its end, bit for bit."""

from __future__ import annotations

import gc
import multiprocessing
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch_reference import (
    assert_same_bits,
    backward,
    fp32_twins,
    random_gradients,
    random_parameters,
    stock_adamw,
    train_pair,
)

from trl_budget import gradient_stream, host_adamw, pinned
from trl_budget.errors import HostThreadError, SettingsError
from trl_budget.gradient_stream import GradientStream
from trl_budget.host_adamw import HostAdamW
from trl_budget.host_threads import THREAD_NAME
from trl_budget.streams import CopyEngines

CHUNK_BYTES, RING_BYTES, BLOCK_ELEMENTS = 512, 2048, 64


class LateSender:
    """Copies only when somebody waits for the landing, some time later; staging holds NaN until then."""

    def __init__(self, max_delay_seconds: float = 0.0, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.max_delay_seconds = max_delay_seconds
        self.may_land = threading.Event()
        self.may_land.set()
        self.events: list[str] = []
        self.staged_bytes: list[tuple[int, int]] = []

    def send(self, source: Tensor, staged: Tensor) -> LateLanding:
        staged.view(torch.uint8).fill_(0xFF)
        self.staged_bytes.append((staged.data_ptr(), staged.nbytes))
        self.events.append("send")
        return LateLanding(self, source.clone(), staged, self.random.uniform(0, self.max_delay_seconds))

    def free_when_sent(self, gradient: Tensor) -> None:
        self.events.append("free")

    def free_all(self) -> None:
        self.events.append("free all")


class LateLanding:
    def __init__(self, sender: LateSender, source: Tensor, staged: Tensor, delay_seconds: float) -> None:
        self.sender, self.source, self.staged, self.delay_seconds = sender, source, staged, delay_seconds
        self.lock = threading.Lock()
        self.has_landed = False

    def synchronize(self) -> None:
        self.sender.may_land.wait()
        with self.lock:
            if not self.has_landed:
                time.sleep(self.delay_seconds)
                self.staged.copy_(self.source)
                self.has_landed = True


class FailingSender(LateSender):
    """The landing of one copy raises."""

    def __init__(self, failing: int) -> None:
        super().__init__()
        self.failing = failing

    def send(self, source: Tensor, staged: Tensor) -> LateLanding:
        landing = super().send(source, staged)
        if self.events.count("send") == self.failing:
            landing.synchronize = self.fail
        return landing

    def fail(self) -> None:
        self.may_land.wait()
        raise OSError("the bus is gone")


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_stream, "ADD_BLOCK_ELEMENTS", BLOCK_ELEMENTS)
    monkeypatch.setattr(host_adamw, "BLOCK_ELEMENTS", BLOCK_ELEMENTS)


def streaming(parameters: list[Parameter], sender: LateSender | None = None, **settings: object) -> HostAdamW:
    """A HostAdamW with three threads, small chunks and a small ring."""
    optimizer = HostAdamW(parameters, gradient_placement="host", **settings)
    optimizer._background.close()
    optimizer._background.count = 3
    sizes = {"ring_bytes": RING_BYTES, "chunk_bytes": CHUNK_BYTES}
    stream = GradientStream(CopyEngines(pin=False), optimizer._background, sender=sender or LateSender(), **sizes)
    stream.prepare(optimizer._slots.values())
    optimizer._gradients.collector = stream
    return optimizer


def uneven_passes(parameters: list[Parameter], seed: int, count: int = 4) -> list[list[Tensor | None]]:
    """Several passes of gradients; a third of the parameters take no part in each."""
    generator = random.Random(seed)
    passes = [random_gradients(parameters, 100 * seed + index) for index in range(count)]
    return [
        [None if generator.random() < 1 / 3 else g for g in gradients[:-1]] + gradients[-1:] for gradients in passes
    ]


def sums(optimizer: HostAdamW, parameters: list[Parameter]) -> list[Tensor | None]:
    return [None if (g := optimizer.gradient(p)) is None else g.clone() for p in parameters]


def assert_same_sums(ours: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for index, (a, b) in enumerate(zip(ours, expected, strict=True)):
        assert (a is None) == (b is None), f"parameter {index}"
        assert a is None or torch.equal(a, b), f"parameter {index}"


def random_sizes(seed: int) -> list[tuple[int]]:
    """Sizes at, just below and just above the borders of blocks, chunks and the ring, in random order."""
    generator = random.Random(seed)
    borders = (1, BLOCK_ELEMENTS, CHUNK_BYTES // 4, CHUNK_BYTES // 2, RING_BYTES // 2, 3 * RING_BYTES)
    sizes = [max(1, border + generator.randint(-2, 2)) for border in borders for _ in range(2)]
    generator.shuffle(sizes)
    return [(size,) for size in sizes]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32 gradients"])
@pytest.mark.parametrize("seed", range(6))
def test_several_passes_have_the_sums_of_gradients_that_left_at_the_end(seed: int, dtype: torch.dtype) -> None:
    parameters = random_parameters(random_sizes(seed), torch.bfloat16)
    passes = uneven_passes(parameters, seed)

    def collected(optimizer: HostAdamW) -> list[Tensor | None]:
        for gradients in passes:
            if dtype == torch.float32:  # torch lets hand-made gradients differ in dtype only through grad_dtype
                for p, g in zip(parameters, gradients, strict=True):
                    p.grad_dtype = torch.float32
                    p.grad = None if g is None else g.float() * 1.001
                optimizer.gradient(parameters[-1])
            else:
                backward(parameters, gradients)
        return sums(optimizer, parameters)

    ours = collected(streaming(parameters, LateSender(0.0005, seed)))
    gc.collect()
    assert_same_sums(ours, collected(HostAdamW(parameters, gradient_placement="device")))


def test_the_sum_is_as_near_to_fp64_as_fp32_can_be() -> None:
    [parameter] = random_parameters([(5000,)], torch.bfloat16)
    optimizer = streaming([parameter])
    passes = [random_gradients([parameter], seed)[0] for seed in range(16)]
    for gradient in passes:
        backward([parameter], [gradient])
    exact = torch.stack(passes).double().sum(0)
    assert (optimizer.gradient(parameter).double() - exact).norm() <= 1e-6 * exact.norm()


def test_steps_have_the_bits_of_torch_adamw() -> None:
    parameters = random_parameters(random_sizes(0), torch.bfloat16)
    twins = fp32_twins(parameters)
    optimizer, stock = streaming(parameters, LateSender(0.0005)), stock_adamw(twins, "fused")
    train_pair(optimizer, parameters, stock, twins, max_norm=0.5)
    assert_same_bits(optimizer, parameters, stock, twins)


def test_backward_returns_while_copies_and_sums_are_still_under_way() -> None:
    [parameter] = random_parameters([(BLOCK_ELEMENTS,)], torch.bfloat16)
    sender = LateSender()
    optimizer = streaming([parameter], sender)
    sender.may_land.clear()
    backward([parameter], [torch.ones(BLOCK_ELEMENTS)])
    assert parameter.grad is None
    threading.Timer(0.05, sender.may_land.set).start()
    assert torch.equal(optimizer.gradient(parameter), torch.ones(BLOCK_ELEMENTS))


class Calls(torch.autograd.Function):
    """The identity; its backward calls a function."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, value: Tensor, function: Callable[[], None]) -> Tensor:
        ctx.function = function
        return value.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.function()
        return gradient, None


def test_a_gradient_has_left_before_the_next_layers_backward_begins() -> None:
    early, late = random_parameters([(17,), (17,)], torch.bfloat16)
    sender = LateSender()
    optimizer = streaming([early, late], sender)
    hidden = Calls.apply(early * 2, lambda: sender.events.append(f"late has no gradient: {late.grad is None}"))
    (hidden * late).sum().backward()
    assert sender.events == ["send", "free", "late has no gradient: True", "send", "free", "free all"]
    assert optimizer.gradient(late) is not None


def test_gradients_wait_on_the_device_while_the_ring_is_full() -> None:
    parameters = random_parameters([(CHUNK_BYTES // 2,)] * 10, torch.bfloat16)
    sender = LateSender()
    optimizer = streaming(parameters, sender)
    sender.may_land.clear()
    running = threading.Thread(target=backward, args=(parameters, [torch.ones(CHUNK_BYTES // 2)] * 10))
    running.start()
    running.join(0.3)
    assert running.is_alive()
    assert sender.events.count("send") == RING_BYTES // CHUNK_BYTES
    sender.may_land.set()
    running.join(30)
    assert all(torch.equal(optimizer.gradient(p), torch.ones_like(p).float()) for p in parameters)


def test_staging_never_exceeds_the_ring() -> None:
    parameters = random_parameters(random_sizes(1), torch.bfloat16)
    sender = LateSender()
    backward_of = streaming(parameters, sender)
    backward(parameters, random_gradients(parameters, 0))
    backward_of.step()
    begin = min(address for address, _ in sender.staged_bytes)
    assert max(address + nbytes for address, nbytes in sender.staged_bytes) - begin <= RING_BYTES


def make_regrouped(optimizer: HostAdamW, parameters: list[Parameter]) -> None:
    optimizer.regroup(parameters, implementation="fused", lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)


READERS: dict[str, Callable[[HostAdamW, list[Parameter]], object]] = {
    "gradient": lambda optimizer, parameters: None,
    "clip": lambda optimizer, parameters: optimizer.clip_grad_norm_(0.1),
    "norm": lambda optimizer, parameters: optimizer.clip_grad_norm_(float("inf")),
    "step": lambda optimizer, parameters: optimizer.step(),
    "zero_grad": lambda optimizer, parameters: optimizer.zero_grad(),
    "zero_grad to zero": lambda optimizer, parameters: optimizer.zero_grad(set_to_none=False),
    "load_state_dict": lambda optimizer, parameters: optimizer.load_state_dict(optimizer.state_dict()),
    "regroup": make_regrouped,
    "adopt": lambda optimizer, parameters: optimizer.adopt_external_writes(),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS.keys())
def test_a_late_gradient_is_where_it_belongs_after(read: Callable[[HostAdamW, list[Parameter]], object]) -> None:
    def run(make: Callable[[list[Parameter]], HostAdamW]) -> list[Tensor | None]:
        parameters = random_parameters(random_sizes(2), torch.bfloat16)
        optimizer = make(parameters)
        for index in range(2):
            backward(parameters, random_gradients(parameters, index))
            read(optimizer, parameters)
        backward(parameters, random_gradients(parameters, 2))
        return [*sums(optimizer, parameters), *(p.detach().float() for p in parameters)]

    ours = run(lambda parameters: streaming(parameters, LateSender(0.002)))
    assert_same_sums(ours, run(lambda parameters: HostAdamW(parameters, gradient_placement="device")))


def test_clipping_is_applied_once_to_what_had_been_summed_before_it() -> None:
    [parameter] = random_parameters([(300,)], torch.bfloat16)
    optimizer = streaming([parameter], LateSender(0.001))
    backward([parameter], [torch.full((300,), 4.0)])
    norm = optimizer.clip_grad_norm_(1.0)
    backward([parameter], [torch.full((300,), 0.5)])
    clipped = torch.full((300,), 4.0) * (1.0 / (norm + 1e-6))
    assert torch.equal(optimizer.gradient(parameter), clipped + 0.5)


def test_a_gradient_whose_copy_is_slow_is_still_summed_before_the_next_one() -> None:
    [parameter] = random_parameters([(BLOCK_ELEMENTS,)], torch.bfloat16)
    sender = LateSender()
    optimizer = streaming([parameter], sender)
    sender.random.uniform = lambda *_: 0.2 if sender.events == ["send"] else 0.0
    for _ in range(2):
        backward([parameter], [torch.ones(BLOCK_ELEMENTS)])
    assert torch.equal(optimizer.gradient(parameter), torch.full((BLOCK_ELEMENTS,), 2.0))


def test_two_backwards_through_one_graph_are_both_counted() -> None:
    [parameter] = random_parameters([(300,)], torch.bfloat16)
    optimizer = streaming([parameter], LateSender(0.001))
    loss = (parameter * 2).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert torch.equal(optimizer.gradient(parameter), torch.full((300,), 4.0))


def test_backwards_of_several_threads_over_their_own_parameters_are_all_counted() -> None:
    """Over shared ones torch's own hooks lose gradients: it does not lock them against another thread's sum."""
    parameters = random_parameters([(300,), (1025,), (17,), (600,)], torch.bfloat16)
    optimizer = streaming(parameters, LateSender(0.0005))

    def run(parameter: Parameter) -> None:
        for _ in range(8):
            backward([parameter], [torch.ones_like(parameter)])

    running = [threading.Thread(target=run, args=(parameter,)) for parameter in parameters]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert all(torch.equal(optimizer.gradient(p), torch.full_like(p, 8.0).float()) for p in parameters)


def train_until_told(optimizer: HostAdamW, parameters: list[Parameter]) -> None:
    for seed in range(3):
        backward(parameters, random_gradients(parameters, seed))
    optimizer.step()


def test_an_error_of_a_host_thread_reaches_the_next_call_with_its_cause() -> None:
    parameters = random_parameters([(300,), (17,)], torch.bfloat16)
    optimizer = streaming(parameters, FailingSender(failing=2))
    with pytest.raises(HostThreadError, match=r"could not add a gradient.*zero_grad") as error:
        train_until_told(optimizer, parameters)
    assert isinstance(error.value.__cause__, OSError)


def test_a_step_after_an_error_in_backward_is_refused_too() -> None:
    parameters = random_parameters([(300,), (17,)], torch.bfloat16)
    before = [p.detach().clone() for p in parameters]
    sender = FailingSender(failing=2)
    optimizer = streaming(parameters, sender)
    sender.may_land.clear()
    backward(parameters, random_gradients(parameters, 0))
    sender.may_land.set()
    for call in (lambda: backward(parameters, random_gradients(parameters, 1)), optimizer.step):
        with pytest.raises(HostThreadError):
            call()
    assert all(torch.equal(p, b) for p, b in zip(parameters, before, strict=True))


def test_training_goes_on_after_an_error_and_zero_grad() -> None:
    parameters = random_parameters([(300,), (17,)], torch.bfloat16)
    optimizer = streaming(parameters, FailingSender(failing=2))
    with pytest.raises(HostThreadError):
        train_until_told(optimizer, parameters)
    optimizer.zero_grad()
    gradients = random_gradients(parameters, 7)
    backward(parameters, gradients)
    assert_same_sums(sums(optimizer, parameters), [g.float() for g in gradients])


@pytest.mark.parametrize("call", ["zero_grad to zero", "regroup"])
def test_incomplete_sums_are_dropped_by_the_call_that_tells_of_them(call: str) -> None:
    parameters = random_parameters([(300,), (17,)], torch.bfloat16)
    sender = FailingSender(failing=2)
    optimizer = streaming(parameters, sender)
    sender.may_land.clear()
    backward(parameters, random_gradients(parameters, 0))
    sender.may_land.set()
    with pytest.raises(HostThreadError):
        READERS[call](optimizer, parameters)
    assert sums(optimizer, parameters) == [None, None]
    optimizer.step()
    assert optimizer.state[parameters[0]]["step"] == 0


def test_gradients_set_to_zero_after_one_that_is_not_finite_are_stepped() -> None:
    [parameter] = random_parameters([(17,)], torch.bfloat16)
    optimizer = HostAdamW([parameter])
    backward([parameter], [torch.full((17,), float("inf"))])
    optimizer.clip_grad_norm_(1.0)
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    assert optimizer.state[parameter]["step"] == 1


def host_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(THREAD_NAME)]


@pytest.mark.parametrize("is_cyclic", [False, True], ids=["plain", "in a reference cycle"])
def test_deleting_the_optimizer_ends_its_threads_and_frees_its_memory(is_cyclic: bool) -> None:
    # By identity: threads of earlier tests end when nobody looks.
    threads_before, slabs_before = set(host_threads()), weakref.WeakSet(pinned._live_slabs)
    parameters = random_parameters(random_sizes(3), torch.bfloat16)
    optimizer = streaming(parameters, LateSender(0.01))
    backward(parameters, random_gradients(parameters, 0))
    threads, slabs = set(host_threads()) - threads_before, pinned._live_slabs - slabs_before
    assert len(threads) == 3 and len(slabs) > 0
    if is_cyclic:
        optimizer.itself = optimizer
    del optimizer  # while gradients are still on their way
    gc.collect()
    deadline = time.monotonic() + 30
    while len(slabs) > 0 or any(thread.is_alive() for thread in threads):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_memory_is_free_as_soon_as_an_optimizer_that_has_stepped_is_deleted() -> None:
    for seed in range(20):
        before = weakref.WeakSet(pinned._live_slabs)
        parameters = random_parameters(random_sizes(seed), torch.bfloat16)
        optimizer = streaming(parameters)
        backward(parameters, random_gradients(parameters, 0))
        optimizer.step()
        slabs = pinned._live_slabs - before
        assert len(slabs) > 0
        del optimizer
        assert len(slabs) == 0


def exit_child() -> None:
    torch.ones(10).sum()
    sys.exit(0)


def test_a_process_forked_while_gradients_are_under_way_ends_by_itself() -> None:
    parameters = random_parameters(random_sizes(4), torch.bfloat16)
    optimizer = streaming(parameters, LateSender(0.005))
    backward(parameters, random_gradients(parameters, 0))
    child = multiprocessing.get_context("fork").Process(target=exit_child)
    child.start()
    child.join(30)
    assert child.exitcode == 0
    optimizer.step()


LEFT_RUNNING = """
import torch
from trl_budget import HostAdamW

parameter = torch.nn.Parameter(torch.zeros(3_000_000, dtype=torch.bfloat16))
optimizer = HostAdamW([parameter], gradient_placement="host")
for _ in range(5):
    (parameter * 2).sum().backward()
print("end of the script")
"""


def test_the_interpreter_ends_while_gradients_are_under_way() -> None:
    run = subprocess.run([sys.executable, "-c", LEFT_RUNNING], capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout) == (0, "end of the script\n")
    assert "Traceback" not in run.stderr


def test_auto_leaves_gradients_of_cpu_parameters_to_the_end_of_backward() -> None:
    assert HostAdamW(random_parameters([(3,)], torch.bfloat16)).gradient_placement == "device"


def test_an_unknown_placement_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"gradient_placement='card' .*one of auto, device, host"):
        HostAdamW(random_parameters([(3,)], torch.bfloat16), gradient_placement="card")


def test_fp32_parameters_on_the_cpu_keep_their_gradients() -> None:
    parameters = random_parameters([(17,), (33, 7)], torch.float32)
    twins = fp32_twins(parameters)
    optimizer = HostAdamW(parameters, gradient_placement="host")
    stock = stock_adamw(twins, "fused")
    train_pair(optimizer, parameters, stock, twins)
    assert_same_bits(optimizer, parameters, stock, twins)


def test_an_interrupt_between_the_copy_and_the_sum_leaves_nothing_to_wait_for_ever() -> None:
    [parameter] = random_parameters([(BLOCK_ELEMENTS,)], torch.bfloat16)
    optimizer = HostAdamW([parameter], gradient_placement="host")
    progress = optimizer._gradients.collector._progress
    begin = progress.begin

    def interrupted(piece: object) -> None:
        begin(piece)
        raise KeyboardInterrupt

    progress.begin = interrupted
    with pytest.raises(KeyboardInterrupt):
        backward([parameter], [torch.ones(BLOCK_ELEMENTS)])
    progress.begin = begin
    parameter.grad = None
    with pytest.raises(HostThreadError):
        optimizer.zero_grad()
    backward([parameter], [torch.ones(BLOCK_ELEMENTS)])
    assert torch.equal(optimizer.gradient(parameter), torch.ones(BLOCK_ELEMENTS))

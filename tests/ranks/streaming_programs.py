"""What each rank runs in the tests of streamed gradients and of token budgets over several ranks."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from adamw_programs import LEARNING_RATE, backward, bits, train
from failure_programs import error_of, one_step, parameters_of, same_gradients
from tiny import byte_tokenizer, comparable_log, digit_dataset, make_trainer, max_difference, tiny_model, weights
from torch import Tensor
from torch.nn import Parameter
from trainer_programs import rank, run
from trl import GRPOTrainer

from trl_budget import BudgetGRPOConfig, BudgetGRPOTrainer, HostAdamW, upstream_model
from trl_budget.gradient_stream import GradientStream
from trl_budget.streams import CopyEngines, HostSender

SHARDINGS = ("sharded", "rank0", "replicated")
PLACEMENTS = ("device", "host")


class FailingSender(HostSender):
    """Every landing raises on the host thread, once backward has ended."""

    def __init__(self) -> None:
        self.has_ended = threading.Event()

    def send(self, source: Tensor, staged: Tensor) -> Any:
        landing = super().send(source, staged)
        landing.synchronize = self.fail
        return landing

    def fail(self) -> None:
        self.has_ended.wait()
        raise OSError("the bus is gone")


def small_ring(optimizer: HostAdamW) -> None:
    """Every gradient is cut, and backward waits for the host thread."""
    sizes = {"ring_bytes": 4096, "chunk_bytes": 1024}
    stream = GradientStream(CopyEngines(pin=False), optimizer._background, **sizes)
    stream.prepare(optimizer._slots.values())
    optimizer._gradients.collector = stream


def steps() -> dict[Any, Any]:
    """Five steps of every sharding, gradients leaving at the end of backward and during it."""
    return {
        (sharding, placement): train(
            sharding,
            torch.bfloat16,
            gradient_placement=placement,
            prepare=small_ring if placement == "host" else None,
        )
        for sharding in SHARDINGS
        for placement in PLACEMENTS
    }


def interrupted(sharding: str) -> dict[str, Any]:
    """A late gradient; a host thread that fails on rank 1, seen by `step` and by `zero_grad`; then a step."""
    parameters = parameters_of(dtype=torch.bfloat16)
    optimizer = HostAdamW(parameters, lr=LEARNING_RATE, sharding=sharding, gradient_placement="host")
    small_ring(optimizer)
    backward(parameters, same_gradients(parameters, 0))
    optimizer.clip_grad_norm_(1.0)
    result: dict[str, Any] = {"late": error_of(lambda: backward(parameters, same_gradients(parameters, 1)))}
    optimizer.zero_grad()
    result["step"] = error_of(lambda: with_failing_thread(optimizer, parameters, optimizer.step))
    optimizer.zero_grad()

    def dropped() -> None:
        optimizer.zero_grad()
        optimizer.step()

    result["zero_grad"] = error_of(lambda: with_failing_thread(optimizer, parameters, dropped))
    small_ring(optimizer)
    one_step(optimizer, parameters, 5)
    return {**result, "weights": bits(parameters), "steps": optimizer.state[parameters[0]]["step"].item()}


def with_and_without_drop(placement: str, set_to_none: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    return dropped(placement, set_to_none), undropped(placement)


def dropped(placement: str, set_to_none: bool) -> dict[str, Any]:
    """A look at the gradient between two backwards; a step dropped after its clip and a late gradient; the next."""
    optimizer, parameters = optimizer_of(placement)
    unequal_backward(parameters, 0)
    looked = bits([optimizer.gradient(p) for p in parameters])
    unequal_backward(parameters, 1)
    optimizer.step()
    unequal_backward(parameters, 2)
    optimizer.clip_grad_norm_(1.0)
    if dist.get_rank() == 1:
        parameters[0].grad = torch.ones_like(parameters[0])  # by hand: no hook sees it
    late = error_of(optimizer.step)
    parameters[0].grad = None
    optimizer.zero_grad(set_to_none=set_to_none)
    left = [None if (gradient := optimizer.gradient(p)) is None else gradient.clone() for p in parameters]
    unequal_backward(parameters, 3)
    optimizer.step()
    return {"looked": looked, "late": late, "left": left, "weights": bits(parameters)}


def undropped(placement: str) -> dict[str, Any]:
    """The steps that `dropped` makes and does not drop, and what this rank's first gradient is."""
    optimizer, parameters = optimizer_of(placement)
    own = [gradient.bfloat16().float() for gradient in unequal_gradients(parameters, 0)]
    for numbers in ((0, 1), (3,)):
        for number in numbers:
            unequal_backward(parameters, number)
        optimizer.step()
    return {"own": own, "weights": bits(parameters)}


def optimizer_of(placement: str) -> tuple[HostAdamW, list[Parameter]]:
    parameters = parameters_of(dtype=torch.bfloat16)
    optimizer = HostAdamW(parameters, lr=LEARNING_RATE, gradient_placement=placement)
    if placement == "host":
        small_ring(optimizer)
    return optimizer, parameters


def unequal_gradients(parameters: list[Parameter], number: int) -> list[Tensor]:
    return [(1 + dist.get_rank()) * gradient for gradient in same_gradients(parameters, number)]


def unequal_backward(parameters: list[Parameter], number: int) -> None:
    backward(parameters, unequal_gradients(parameters, number))


def with_failing_thread(optimizer: HostAdamW, parameters: list[Parameter], call: Callable[[], Any]) -> None:
    """A backward whose sums fail on rank 1, then `call`."""
    sender = FailingSender() if dist.get_rank() == 1 else HostSender()
    optimizer._gradients.collector = stream = GradientStream(
        CopyEngines(pin=False), optimizer._background, sender=sender
    )
    stream.prepare(optimizer._slots.values())
    backward(parameters, same_gradients(parameters, 2))
    if isinstance(sender, FailingSender):
        sender.has_ended.set()
    call()


def trained(folder: Path) -> dict[Any, Any]:
    """The whole trainer on a bf16 policy: accumulation, and all that a script does around it."""
    results: dict[Any, Any] = {}
    for placement in PLACEMENTS:
        settings = {"config_class": BudgetGRPOConfig, "gradient_placement": placement}
        results["accumulation", placement] = run(
            BudgetGRPOTrainer,
            folder,
            model=tiny_model(torch.bfloat16),
            gradient_accumulation_steps=2,
            max_grad_norm=0.01,
            **settings,
        )
        results["whole script", placement] = whole_script(folder / placement, **settings)
    return results


def whole_script(folder: Path, **settings: Any) -> dict[str, Any]:
    """Trains with evaluations, saves and the best model; then trains again, resumed and anew."""
    trainer = make_trainer(
        BudgetGRPOTrainer,
        folder,
        model=tiny_model(torch.bfloat16),
        trainer_kwargs={"eval_dataset": digit_dataset(8)},
        max_steps=3,
        save_strategy="steps",
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=4,
        load_best_model_at_end=True,
        metric_for_best_model="eval_reward",
        **settings,
    )
    trainer.train()
    best = weights(trainer)
    masters = [trainer._host_adamw.state[p]["master_weights"].bfloat16() for p in trainer.model.parameters()]
    are_casts = all(torch.equal(m, p.detach()) for m, p in zip(masters, trainer.model.parameters(), strict=True))
    trainer.save_model(str(folder / "saved"))
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    resumed = weights(trainer)
    backward_once(trainer)  # left behind by a script that was interrupted
    trainer.train()
    again = weights(trainer)
    return {
        "best": best,
        "are_casts": are_casts,
        "resumed": resumed,
        "again": again,
        "log": comparable_log(trainer),
        "moved": max_difference(best, again),
        "files": sorted(path.name for path in (folder / "saved").iterdir()),
    }


def backward_once(trainer: Any) -> None:
    ids = torch.arange(12).view(2, 6)
    trainer.model(input_ids=ids, labels=ids).loss.backward()


class Records:
    """Mixin: the flat mean gradient of every optimizer step, before clipping."""

    def _clip_grad_norm(self, model: Any) -> Any:
        parameters = list(self.model.parameters())
        if (ours := vars(self).get("_host_adamw")) is not None:
            ours.clip_grad_norm_(float("inf"), parameters)
            gradients = [ours.gradient(p) for p in parameters]
        else:
            gradients = [p.grad for p in parameters]
        flat = torch.cat([g.flatten().float().clone() for g in gradients if g is not None])
        self.gradients = [*vars(self).get("gradients", []), flat]
        return super()._clip_grad_norm(model)


class Stock(Records, GRPOTrainer):
    pass


class Ours(Records, BudgetGRPOTrainer):
    pass


def uneven_rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Rank 0's completions are long, rank 1's half as long: the ranks' passes differ in number and in rows."""
    step = trainer.state.global_step
    lengths = [1 + (row * 5 + step * 3 + rank() * 2) % (19 - 9 * rank()) for row in range(len(prompts))]
    ids = [[2 + (r * 31 + step * 7 + i * 13 + rank() * 5) % 250 for i in range(n)] for r, n in enumerate(lengths)]
    prompt_ids = [byte_tokenizer()(p)["input_ids"][:7] for p in prompts]
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": [row + [1] * (r % 3 == 0) for r, row in enumerate(ids)],
        "logprobs": None,
    }


BUDGETS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dapo, packed": ({"loss_type": "dapo"}, {"padding_free": "on", "max_tokens_per_microbatch": 60}),
    "grpo, trimmed": ({"loss_type": "grpo"}, {"padding_free": "off", "max_tokens_per_microbatch": 90}),
    "bnpo, a pass for every row": (
        {"loss_type": "bnpo", "entropy_coef": 0.02},
        {"padding_free": "on", "max_tokens_per_microbatch": 1},
    ),
    "two iterations": ({"num_iterations": 2}, {"padding_free": "on", "max_tokens_per_microbatch": 60}),
}


def budgets(folder: Path) -> dict[Any, Any]:
    """Token-budget passes: stock under DDP, ours with the host optimizer; ours in bf16 with either placement."""
    results: dict[Any, Any] = {}
    for name, (shared, own) in BUDGETS.items():
        results["stock", name] = with_budget(Stock, folder, tiny_model(), **shared)
        for placement in PLACEMENTS:
            ours = {"config_class": BudgetGRPOConfig, "gradient_placement": placement, **own, **shared}
            results["ours", name, placement] = with_budget(Ours, folder, tiny_model(), **ours)
            results["bf16", name, placement] = with_budget(Ours, folder, tiny_model(torch.bfloat16), **ours)
    return results


def with_budget(trainer_class: type, folder: Path, model: Any, **settings: Any) -> dict[str, Any]:
    trainer = make_trainer(
        trainer_class,
        folder,
        model=model,
        trainer_kwargs={"rollout_func": uneven_rollouts},
        gradient_accumulation_steps=4,
        max_completion_length=24,
        max_steps=2,
        ddp_backend="gloo",
        **settings,
    )
    trainer.train()
    return {"gradients": trainer.gradients, "log": comparable_log(trainer), "weights": weights(trainer)}


def unequal_cards(folder: Path) -> dict[str, Any]:
    """Rank 1's card has less free memory, and finds a fault in packed rows that rank 0 does not."""
    collect = upstream_model.layout_facts
    upstream_model.layout_facts = lambda *args: dataclasses.replace(collect(*args), device_type="cuda", bf16=True)
    upstream_model.available_tokens = lambda *_, **__: 9000 - 4000 * rank()
    settings = {"config_class": BudgetGRPOConfig, "model": tiny_model(), "ddp_backend": "gloo"}
    result = {}
    for name, fault in {"memory": None, "fault": "a fault of rank 1" if rank() else None}.items():
        upstream_model.packing_trial = lambda _, fault=fault: fault
        trainer = make_trainer(BudgetGRPOTrainer, folder, **settings)
        result[name] = (trainer._pass_settings.max_tokens, trainer._layout)
    return result

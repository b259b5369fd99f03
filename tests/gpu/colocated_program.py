"""What one process of `test_colocated_cuda.py` runs: python FILE PROGRAM MODEL OUT, one colocated engine each.

The engine is eager, which starts in a third of the time. A program returns figures and judges nothing.
"""

from __future__ import annotations

import copy
import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import trl.generation.vllm_generation as vllm_generation
from peft import LoraConfig
from safetensors import safe_open
from tiny import byte_tokenizer, make_trainer, max_difference, tiny_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, TrainerCallback

from trl_budget import BudgetGRPOConfig, BudgetGRPOTrainer, upstream_vllm
from trl_budget.errors import DeviceMemoryError, SettingsError, StalePolicyError
from trl_budget.residency import Phase

GIB = 2**30
COPYING = {"share_vllm_weights": "off"}
NEITHER = {"share_vllm_weights": "off", "park_policy_during_rollout": "off"}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128, "vocab_size": 1000},
    # 0.75 billion parameters, LM head of its own, a vocabulary that vLLM pads
    "large": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_900,
        "tie_word_embeddings": False,
    },
}
SETTINGS: dict[str, Any] = {
    "use_cpu": False,
    "bf16": True,
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_gpu_memory_utilization": 0.1,
    "vllm_max_model_length": 256,
    "max_completion_length": 32,
    "per_device_train_batch_size": 8,
}
NUM_NEW_TOKENS = 24
NUM_CYCLES = 10
TWO_RANKS = {"ddp_backend": "gloo", "ddp_timeout": 180}
LORA = LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)


def save_model(folder: Path, shape: str, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A random model whose greedy choices are no ties: an LM head of its own spreads logits by a factor of 8."""
    model = tiny_model(dtype, **SHAPES[shape])
    if not model.config.tie_word_embeddings:
        model.lm_head.weight.data.mul_(8)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def reward_of_ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Uneven within a group; most of a large vocabulary decodes to no text."""
    return [sum(ids) % 97 / 97 for ids in completion_ids]


class ProgramTrainer(BudgetGRPOTrainer):
    """Ours over an eager engine; counts the engines that were built, and reads the card when one has started."""

    num_engines = 0
    used_when_adopted = 0

    def _engine_class(self, **arguments: Any) -> Any:
        type(self).num_engines += 1
        return build_engine(arguments)

    def _adopt_engine(self, llm: Any) -> bool:
        self.used_when_adopted = used_bytes()
        return super()._adopt_engine(llm)


def build_engine(arguments: dict[str, Any]) -> Any:
    from vllm import LLM

    return LLM(**arguments, enforce_eager=True)


def build(
    model: Path | nn.Module, out: Path, trainer_class: type = ProgramTrainer, kwargs: Any = None, **settings: Any
) -> Any:
    kwargs = {"reward_funcs": reward_of_ids, **(kwargs or {})}
    settings = {**SETTINGS, **settings}
    if isinstance(model, nn.Module):
        kwargs["model"] = model  # not a copy of it
        model = Path("unused")
    return make_trainer(
        trainer_class, out, model=str(model), config_class=BudgetGRPOConfig, trainer_kwargs=kwargs, **settings
    )


def used_bytes() -> int:
    """Of the card, by everyone."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def settings_of(trainer: Any) -> dict[str, str]:
    return {setting.name: setting.value for setting in trainer.resolved_settings}


# Greedy completions


def greedy(llm: Any, prompt_ids: list[int]) -> list[int]:
    params = vllm_generation.SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS, logprobs=0, ignore_eos=True)
    output = llm.generate([{"prompt_token_ids": prompt_ids}], sampling_params=params, use_tqdm=False)[0]
    return list(output.outputs[0].token_ids)


@torch.no_grad()
def completion_logits(model: nn.Module, prompt_ids: list[int], completion_ids: list[int]) -> Tensor:
    """Transformers' logits of each completion token, fp32, given the completion's own prefix.

    vLLM's prefix, so that one tie does not make all later tokens differ.
    """
    ids = torch.tensor([prompt_ids + completion_ids], device=next(model.parameters()).device)
    return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, len(prompt_ids) - 1 : -1].float()


def behind_the_best(model: nn.Module, prompt_ids: list[int], completion_ids: list[int]) -> list[float]:
    """How far each token's logit lies behind the largest, on the present weights; 0.0 is greedy."""
    rows = completion_logits(model, prompt_ids, completion_ids)
    chosen = rows.gather(1, torch.tensor(completion_ids, device=rows.device)[:, None])[:, 0]
    return (rows.max(-1).values - chosen).tolist()


def rounding(model: nn.Module, prompts: list[list[int]], completions: list[list[int]]) -> tuple[float, int]:
    """What the dtype of the model does, against the same weights in fp32.

    Returns:
        The largest error of a logit, and how many tokens have another largest logit.
    """
    with torch.device(next(model.parameters()).device):  # a copy would keep Accelerate's autocast, over the original
        wide = AutoModelForCausalLM.from_config(copy.deepcopy(model.config), dtype=torch.float32).eval()
    wide.load_state_dict(model.state_dict())
    error, num_changed = 0.0, 0
    for pair in zip(prompts, completions, strict=True):
        rows, exact = completion_logits(model, *pair), completion_logits(wide, *pair)
        error = max(error, (rows - exact).abs().max().item())
        num_changed += int((rows.argmax(-1) != exact.argmax(-1)).sum())
    return error, num_changed


class GreedyAfterEachStep(TrainerCallback):
    """After each update: vLLM's greedy completions, judged on the present weights, and those of the step before."""

    PROMPTS = [[10 + (7 * row + i) % 200 for i in range(12 + row)] for row in range(4)]

    def __init__(self) -> None:
        self.trainer: Any = None
        self.present: list[list[float]] = []
        self.stale: list[list[float]] = []
        self.rounding: list[float] = []
        self.num_changed_by_rounding: list[int] = []
        self.awake: list[dict[str, int]] = []
        self._before: list[list[int]] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        engine, model = self.trainer.vllm_generation, self.trainer.model
        with engine.session():
            engine.sync_weights()
            engine.open()
            completions = [greedy(engine.llm, prompt) for prompt in self.PROMPTS]
            self.awake.append(card_while_awake(self.trainer))
        for judged, of in ((self.present, completions), (self.stale, self._before)):
            pairs = zip(self.PROMPTS, of, strict=False)
            judged.append([gap for prompt, ids in pairs for gap in behind_the_best(model, prompt, ids)])
        error, num_changed = rounding(model, self.PROMPTS, completions)
        self.rounding.append(error)
        self.num_changed_by_rounding.append(num_changed)
        self._before = completions


def card_while_awake(trainer: Any) -> dict[str, int]:
    """The card while vLLM has it, with the policy away, back for a moment, and away again."""
    parked = trainer._parked_policy
    figures = {"policy_bytes": parked.device_bytes if parked is not None else 0, "used": used_bytes()}
    if parked is not None:
        parked.unpark()
        figures |= {"used_with_policy": used_bytes(), "weight_bytes": parked.device_bytes}
        parked.park()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        figures["used_again"] = used_bytes()
    return figures


# Programs


def train(model: Path, out: Path, **settings: Any) -> dict[str, Any]:
    """Five updates, then rollouts alone, then a saved model."""
    watch = GreedyAfterEachStep()
    trainer = build(
        model, out, kwargs={"callbacks": [watch]}, learning_rate=1e-3, verify_weight_sync="always", **settings
    )
    watch.trainer = trainer
    trainer.train()
    return {
        "settings": settings_of(trainer),
        "present": watch.present,
        "stale": watch.stale,
        "rounding": watch.rounding,
        "num_changed_by_rounding": watch.num_changed_by_rounding,
        "awake": watch.awake,
        "used_when_adopted": trainer.used_when_adopted,
        "weight_bytes": sum(p.nbytes for p in trainer.model.parameters()),
        "num_verified": trainer._weight_sync._num_verified,
        "gap": [e["sampling/sampling_logp_difference/mean"] for e in trainer.state.log_history[:-1]],
        "cycles": rollout_cycles(trainer),
        **save(trainer, model, out / "saved"),
    }


def rollout_cycles(trainer: Any) -> dict[str, list[int]]:
    """Bytes of the card in use after each of ten rollouts, awake and asleep."""
    engine = trainer.vllm_generation
    awake, asleep = [], []
    for _ in range(NUM_CYCLES):
        with engine.session():
            engine.sync_weights()
            engine.open()
            greedy(engine.llm, GreedyAfterEachStep.PROMPTS[0])
            awake.append(used_bytes())
        asleep.append(used_bytes())
    return {"awake": awake, "asleep": asleep}


def save(trainer: Any, model: Path, folder: Path) -> dict[str, Any]:
    """What saving adds on the card, and whether stock finds every weight in the folder."""
    added = 0
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        trainer.save_model(str(folder))
        added = torch.cuda.max_memory_allocated() - before
    else:
        trainer.save_model(str(folder))
    dtype = next(trainer.model.parameters()).dtype
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).state_dict()
    present = {name: value.cpu() for name, value in trainer.model.state_dict().items()}
    keys = [stored_keys(path) for path in (folder, model)]
    return {"save_added_bytes": added, "loaded": max_difference(loaded, present), "keys": keys}


def stored_keys(folder: Path) -> list[str]:
    names: list[str] = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            names += file.keys()
    return sorted(names)


def stale(model: Path, out: Path) -> dict[str, Any]:
    """Training whose engine keeps the weights that it started with."""

    class Forgetful(ProgramTrainer):
        def _start_engine(self) -> None:
            super()._start_engine()
            self.vllm_generation.sync_weights = lambda: None

    trainer = build(model, out, Forgetful, learning_rate=0.5, **NEITHER)
    error = ""
    try:
        trainer.train()
    except StalePolicyError as raised:
        error = str(raised)
    return {"error": error, "step": trainer.state.global_step}


def reference(model: Path, out: Path) -> dict[str, Any]:
    """A reference model that becomes the policy after every step."""
    settings = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 1.0}
    trainer = build(model, out, learning_rate=1e-3, **settings)
    trainer.train()
    parked = trainer._parked[trainer.ref_model]
    policy = {name: value.detach().cpu() for name, value in trainer.model.named_parameters()}
    values = {name: value.clone() for name, value in parked.host_tensors() if name in policy}
    return {
        "settings": settings_of(trainer),
        "difference": max_difference(values, {name: policy[name] for name in values}),
        "num_values": len(values),
        "is_parked": parked.is_parked,
        "kl": [entry["kl"] for entry in trainer.state.log_history[:-1]],
    }


def supplied_rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
    step = trainer.state.global_step
    completions = [
        [2 + (row * 31 + step * 7 + i * 13) % 250 for i in range(3 + row % 4)] for row in range(len(prompts))
    ]
    return {"prompt_ids": byte_tokenizer()(prompts)["input_ids"], "completion_ids": completions, "logprobs": None}


def gradients(model: Path, out: Path, **settings: Any) -> dict[str, Any]:
    """Gradients of three steps on completions that are the same in every run, with the kernels that torch knows to be
    deterministic; flash attention's backward is for rows within one block, as these are."""
    settings = {"vllm_importance_sampling_correction": False, "max_steps": 3, "learning_rate": 1e-3, **settings}
    trainer = build(model, out, kwargs={"rollout_func": supplied_rollouts}, **settings)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    steps: list[dict[str, Tensor]] = []

    def collect(name: str) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            while len(steps) <= trainer.state.global_step:
                steps.append({})
            summed = steps[trainer.state.global_step]
            value = gradient.detach().float().cpu()
            summed[name] = summed[name] + value if name in summed else value

        return hook

    for name, parameter in trainer.model.named_parameters():
        parameter.register_hook(collect(name))
    trainer.train()
    return {"settings": settings_of(trainer), "steps": steps}


class AllocatesInTheUpdate(ProgramTrainer):
    """Fills the card to just below the budget inside an update, then asks for more than is left."""

    figures: dict[str, Any] = {}

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        if self.state.global_step == 1:  # the first update loads kernels, after the cap was set
            gc.collect()
            torch.cuda.empty_cache()
            left = self._memory_budget.budget - used_bytes()
            self.figures = {"left": left, "asleep": upstream_vllm.sleeping_bytes()}
            self.figures["reserved"] = torch.cuda.memory_reserved()
            self.figures["fits"] = self._allocates(left - GIB // 4)
            self.figures["overruns"] = self._allocates(left + GIB // 4)
        return loss

    def _allocates(self, nbytes: int) -> bool:
        try:
            filler = torch.empty(nbytes, dtype=torch.uint8, device=self.args.device)
        except torch.OutOfMemoryError:
            return False
        finally:
            torch.cuda.empty_cache()
        del filler
        torch.cuda.empty_cache()
        return True


def budget(model: Path, out: Path) -> dict[str, Any]:
    """A budget of 16 GiB, of which vLLM's cache takes about ten."""
    settings = {"device_memory_budget": "16GiB", "vllm_gpu_memory_utilization": 0.8, "max_steps": 2}
    trainer = build(model, out, AllocatesInTheUpdate, **settings)
    trainer.train()
    figures = dict(trainer.figures)
    trainer._card.enter(Phase.UPDATE)
    torch.cuda.set_per_process_memory_fraction(1.0)
    filler = torch.empty(figures["left"] + GIB, dtype=torch.uint8, device="cuda")
    figures["breach"] = ""
    try:
        trainer._card.enter(Phase.STEP)
    except DeviceMemoryError as error:
        figures["breach"] = str(error)
    del filler
    return {**figures, "peaks": dict(trainer._memory_budget.peaks)}


def budget_copying(model: Path, out: Path) -> dict[str, Any]:
    """A budget that a sleeping cache, a sleeping copy of the weights and the policy would exceed together."""
    settings = {"device_memory_budget": "16GiB", "vllm_gpu_memory_utilization": 0.9, "max_steps": 2}
    trainer = build(model, out, **settings, **COPYING)
    awake_together = used_bytes() + upstream_vllm.sleeping_bytes()
    trainer.train()
    return {
        "settings": settings_of(trainer),
        "steps": trainer.state.global_step,
        "awake_together": awake_together,
        "peaks": dict(trainer._memory_budget.peaks),
    }


def utilization(model: Path, out: Path, *, as_module: bool) -> dict[str, Any]:
    """0.999 of the card is refused before an engine is built, then 0.85 starts and trains."""

    def policy() -> Path | nn.Module:
        return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32) if as_module else model

    error = ""
    try:
        build(policy(), out, vllm_gpu_memory_utilization=0.999)
    except SettingsError as raised:
        error = str(raised)
    num_engines = ProgramTrainer.num_engines
    gc.collect()
    for variable in (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
    ):  # set for vLLM, and read as a launch
        os.environ.pop(variable, None)
    trainer = build(policy(), out, vllm_gpu_memory_utilization=0.85, max_steps=2)
    used = trainer.used_when_adopted
    trainer.train()
    return {
        "error": error,
        "num_engines_then": num_engines,
        "steps": trainer.state.global_step,
        "used": used / torch.cuda.get_device_properties(0).total_memory,
    }


class WatchedMerges(ProgramTrainer):
    """Notes how many bytes more than at its beginning are allocated while vLLM's weights are read."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.merge_bytes: list[int] = []
        super().__init__(*args, **kwargs)

    def _policy_weights(self) -> Iterator[tuple[str, Tensor]]:
        before = allocated_bytes()
        yield from super()._policy_weights()
        self.merge_bytes.append(allocated_bytes(peak=True) - before)


def allocated_bytes(*, peak: bool = False) -> int:
    """Of the card, by torch; the peak since the last call that did not ask for it."""
    if not torch.cuda.is_available():
        return 0
    if peak:
        return torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def adapters(model: Path, out: Path) -> dict[str, Any]:
    """Adapters over a bf16 base, every weight of vLLM's compared after every sync."""
    kwargs = {"peft_config": LORA}
    settings = {"model_init_kwargs": {"dtype": "bfloat16"}, "learning_rate": 1e-3, "verify_weight_sync": "always"}
    trainer = build(model, out, WatchedMerges, kwargs, max_steps=3, **settings)
    before = {name: p.detach().cpu().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    moved = [name for name, p in trainer.model.named_parameters() if not torch.equal(p.detach().cpu(), before[name])]
    return {
        "settings": settings_of(trainer),
        "moved": moved,
        "merge_bytes": trainer.merge_bytes,
        "weight_bytes": sum(p.nbytes for p in trainer.model.parameters()),
        "num_verified": trainer._weight_sync._num_verified,
        "gap": [e["sampling/sampling_logp_difference/mean"] for e in trainer.state.log_history[:-1]],
    }


class WeightsAfterEachStep(TrainerCallback):
    def __init__(self) -> None:
        self.history: list[dict[str, Tensor]] = []

    def on_step_end(self, *_: Any, **kwargs: Any) -> None:
        named = kwargs["model"].named_parameters()
        self.history.append({name: p.detach().cpu().clone() for name, p in named if p.requires_grad})


def two_ranks(model: Path, out: Path) -> dict[str, Any]:
    """One of two ranks on one card, with adapters under DDP over gloo and an engine of its own."""
    watch = WeightsAfterEachStep()
    kwargs = {"callbacks": [watch], "peft_config": LORA}
    trainer = build(model, out, SharedCardTrainer, kwargs, max_steps=3, seed=7, **TWO_RANKS)
    trainer.train()
    return {
        "settings": settings_of(trainer),
        "history": watch.history,
        "wrapped": type(trainer.model_wrapped).__name__,
        "backend": torch.distributed.get_backend(),
        "asleep": sorted(upstream_vllm.sleeping_tags(trainer.vllm_generation.llm)),
        "gap": [e["sampling/sampling_logp_difference/mean"] for e in trainer.state.log_history[:-1]],
    }


class SharedCardTrainer(ProgramTrainer):
    """Two engines on one card: a cache of fixed size, since vLLM's own measurement takes the card for its alone."""

    def _engine_class(self, **arguments: Any) -> Any:
        return build_engine({**arguments, "kv_cache_memory_bytes": GIB, "worker_cls": "shared_card.SharedCardWorker"})


PROGRAMS: dict[str, Callable[[Path, Path], dict[str, Any]]] = {
    "sharing": train,
    "copying": lambda model, out: train(model, out, **COPYING),
    "stale": stale,
    "reference": reference,
    "gradients_sharing": gradients,
    "gradients_copying": lambda model, out: gradients(model, out, **COPYING),
    "gradients_resident": lambda model, out: gradients(model, out, **NEITHER),
    "gradients_resident_again": lambda model, out: gradients(model, out, **NEITHER),
    "budget": budget,
    "budget_copying": budget_copying,
    "utilization_string": lambda model, out: utilization(model, out, as_module=False),
    "utilization_module": lambda model, out: utilization(model, out, as_module=True),
    "adapters": adapters,
    "two_ranks": two_ranks,
}


def main() -> None:
    name, model, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    sys.path.insert(0, str(Path(__file__).parent))
    torch.save(PROGRAMS[name](model, out.with_suffix("")), out)
    if name == "two_ranks":
        torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # an engine's teardown may hang; the figures are written


if __name__ == "__main__":
    main()

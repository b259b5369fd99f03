"""A stand-in for vLLM's engine: fused weights, tags that sleep, NaN where memory was given back, a list of events.

It generates with the weights it holds, by running them through transformers, so tokens and log-probs tell whether they
are the policy's. Sleep and wake follow vLLM 0.26's executor: it counts as asleep until every tag is awake.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import trl.generation.vllm_generation as vllm_generation
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
PADDING = 64
ENGINE_ARGUMENTS = {
    *("model", "tensor_parallel_size", "gpu_memory_utilization", "max_model_len", "max_num_seqs", "enable_sleep_mode"),
    *("model_impl", "distributed_executor_backend", "seed", "max_num_batched_tokens", "logprobs_mode", "quantization"),
    *("trust_remote_code", "dtype"),
}  # of the arguments of vLLM 0.26's LLM, those that are used


class SleepModeBackend:
    def __init__(self) -> None:
        self._state = "RUNNING"


class CuMemBackend(SleepModeBackend):
    """vLLM 0.25 to 0.31: called with a level."""

    def suspend(self, level: int = 1) -> None: ...

    def resume(self, tags: list[str] | None = None) -> None: ...


class DiscardingBackend(SleepModeBackend):
    """vLLM 0.34: called with the addresses of what may be dropped."""

    def suspend(self, discardable: Collection[int] = ()) -> None: ...

    def resume(self, tags: list[str] | None = None) -> None: ...


class _PackedParameter:
    def __init__(self) -> None:
        self._packed_dim = 0


def _on_allocation(allocation_handle: Any) -> None: ...


def stand_in_for_vllm(
    monkeypatch: pytest.MonkeyPatch,
    *,
    pool_tags: Sequence[str] = ("weights", "kv_cache"),
    backend: type = CuMemBackend,
) -> None:
    """What TRL and this library look for in the vllm package, for an engine that sleeps through a backend of ours.

    Args:
        monkeypatch: restores what is installed.
        pool_tags: kinds of memory in the pool of an engine that has started.
        backend: vLLM's own.
    """
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # set where an engine starts; restored, absent as a rule, when the test ends
        monkeypatch.delenv(name)
    factory = type("SleepModeBackendFactory", (), {"_registry": {}})
    factory.register_backend = lambda name, module, cls: factory._registry.update({name: cls})
    allocations = {number: SimpleNamespace(tag=tag) for number, tag in enumerate(pool_tags)}
    pool = SimpleNamespace(pointer_to_data=allocations)
    modules: dict[str, dict[str, Any]] = {
        "device_allocator": {"get_mem_allocator_instance": lambda: pool},
        "device_allocator.cumem": {"create_and_map": _on_allocation, "unmap_and_release": _on_allocation},
        "device_allocator.sleep_mode_backend": {
            **{"SleepModeBackend": SleepModeBackend, "CuMemBackend": backend},
            **{"SleepModeBackendFactory": factory},
        },
        "model_executor.parameter": {"PackedvLLMParameter": _PackedParameter},
    }
    for name, contents in modules.items():
        module = ModuleType(f"vllm.{name}")
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, f"vllm.{name}", module)
    monkeypatch.setattr("trl_budget.upstream_vllm.has_sleep_backends", lambda: True)
    monkeypatch.setattr(vllm_generation, "SamplingParams", lambda **kwargs: SimpleNamespace(**kwargs), raising=False)


class FusedModel(nn.Module):
    """The tensors of vLLM's Qwen3 class, under its names."""

    packed_modules_mapping = PACKED

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.rows: dict[str, tuple[str, slice]] = {}
        parts: dict[str, list[tuple[str, Tensor]]] = {}
        for name, weight in policy.named_parameters():
            parts.setdefault(fused_name(name), []).append((name, weight.detach()))
        for fused, weights in parts.items():
            value = torch.cat([weight for _, weight in weights])
            start = 0
            for name, weight in weights:
                self.rows[name] = fused, slice(start, start + len(weight))
                start += len(weight)
            if "embed_tokens" in fused:
                value = torch.cat([value, value.new_zeros(-len(value) % PADDING, value.shape[1])])
            self._place(fused, nn.Parameter(value.clone(), requires_grad=False))

    def _place(self, name: str, parameter: nn.Parameter) -> None:
        *path, leaf = name.split(".")
        module: nn.Module = self
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        module.register_parameter(leaf, parameter)

    def view(self, name: str) -> Tensor:
        fused, rows = self.rows[name]
        return self.get_parameter(fused).data[rows]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            self.view(name).copy_(weight)


def fused_name(name: str) -> str:
    for fused, parts in PACKED.items():
        for part in parts:
            name = name.replace(f".{part}.", f".{fused}.")
    return name


@dataclass
class FakeLLM:
    """`vllm.LLM` as far as `rollout.py` uses it.

    Attributes:
        arguments: what the engine was built with.
        events: ("sleep" | "wake weights" | "wake kv_cache" | "load" | "generate" | "reset", what `watch` returned).
        watch: called at each event.
        fails: event, or "slept" for the end of a sleep -> error to raise the next time.
        cache: blocks of the KV cache and the tokens of each.
        mapped: what holds memory; more than is awake after a wake has failed.
    """

    arguments: dict[str, Any]
    watch: Callable[[], Any] = lambda: None
    events: list[tuple[str, Any]] = field(default_factory=list)
    fails: dict[str, BaseException] = field(default_factory=dict)
    cache: tuple[int, int] = (64, 16)
    mapped: set[str] = field(default_factory=lambda: {"weights", "kv_cache"})

    def __post_init__(self) -> None:
        self.reference: Qwen3ForCausalLM = AutoModelForCausalLM.from_pretrained(
            self.arguments["model"], dtype=self.arguments.get("dtype", "auto")
        )
        self.model = FusedModel(self.reference)
        load_weights = self.model.load_weights

        def recorded(weights: Iterable[tuple[str, Tensor]]) -> None:
            self._event("load")
            assert "weights" not in self.sleeping_tags, "weights were loaded into memory that is not mapped"
            load_weights(weights)

        self.model.load_weights = recorded
        self.sleeping_tags: set[str] = set()
        backend = SimpleNamespace(kept_tags=frozenset(), suspend=lambda level: self._discard())
        unknown = self.arguments.keys() - ENGINE_ARGUMENTS
        assert not unknown, f"vLLM's LLM takes no {unknown}"
        worker = SimpleNamespace(
            model_runner=SimpleNamespace(model=self.model),
            vllm_config=SimpleNamespace(model_config=SimpleNamespace(sleep_mode_backend="cumem")),
            _get_sleep_mode_backend=self._sleep_mode_backend,
        )
        executor = SimpleNamespace(
            driver_worker=worker, sleeping_tags=self.sleeping_tags, collective_rpc=self._collective_rpc
        )
        config = SimpleNamespace(max_model_len=self.arguments["max_model_len"] or 512)
        self.requests: dict[str, list[int]] = {}
        self.llm_engine = SimpleNamespace(
            model_executor=executor,
            model_config=config,
            vllm_config=SimpleNamespace(
                cache_config=SimpleNamespace(num_gpu_blocks=self.cache[0], block_size=self.cache[1])
            ),
            output_processor=SimpleNamespace(request_states=self.requests),
            abort_request=lambda ids, internal: [self.requests.pop(i) for i in ids],
        )
        self.backend = backend

    def _sleep_mode_backend(self) -> Any:
        """vLLM makes it by name when it is first needed."""
        name = self.llm_engine.model_executor.driver_worker.vllm_config.model_config.sleep_mode_backend
        assert name == "trl_budget", "vLLM's own backend drops weights"
        return self.backend

    def _event(self, name: str) -> None:
        self.events.append((name, self.watch()))
        if name in self.fails:
            raise self.fails.pop(name)

    def _collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        assert (method, kwargs) == ("sleep", {"level": 2})
        if "weights" in self.sleeping_tags:
            raise RuntimeError("vLLM would read buffers that are not mapped")
        self._discard()

    def _discard(self) -> None:
        self._event("sleep")
        self.mapped = set(self.backend.kept_tags)
        if "weights" not in self.backend.kept_tags:
            for parameter in self.model.parameters():
                parameter.data.fill_(torch.nan)

    def sleep(self, level: int) -> None:
        assert self.arguments["enable_sleep_mode"], "the engine was built without sleep mode"
        assert level == 2
        if self.sleeping_tags:
            return  # vLLM 0.26: "Executor is already sleeping."
        self._discard()
        if "slept" in self.fails:
            raise self.fails.pop("slept")
        self.sleeping_tags.update(("weights", "kv_cache"))

    def wake_up(self, tags: list[str]) -> None:
        for tag in tags:
            self.mapped.add(tag)
            self._event(f"wake {tag}")
            self.sleeping_tags.discard(tag)

    def reset_prefix_cache(self) -> None:
        self._event("reset")

    @torch.no_grad()
    def generate(self, prompts: list[dict[str, Any]], sampling_params: Any, use_tqdm: bool) -> list[Any]:
        assert not self.requests, "vLLM would wait for ever for requests of before"
        self.requests.update({str(i): prompt["prompt_token_ids"] for i, prompt in enumerate(prompts)})
        self._event("generate")
        assert not self.sleeping_tags, "vLLM would wait for ever"
        for name, parameter in self.reference.named_parameters():
            parameter.copy_(self.model.view(name))
        made = [self._complete(row, prompt["prompt_token_ids"], sampling_params) for row, prompt in enumerate(prompts)]
        self.requests.clear()
        return made

    def _complete(self, row: int, prompt_ids: list[int], sampling_params: Any) -> Any:
        """Row r takes the r-th likeliest token first, then the likeliest: rows of a group differ."""
        ids = list(prompt_ids)
        logprobs = []
        for position in range(sampling_params.max_tokens):
            scores = self.reference(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
            assert not scores.isnan().any(), "vLLM generated with weights that were given back"
            token = int(scores.argsort(descending=True)[row % 8 if position == 0 else 0])
            ids.append(token)
            logprobs.append({token: SimpleNamespace(rank=1, logprob=float(scores[token]))})
        output = SimpleNamespace(token_ids=ids[len(prompt_ids) :], logprobs=logprobs)
        return SimpleNamespace(prompt_token_ids=prompt_ids, outputs=[output])

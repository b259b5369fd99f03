"""The colocated engine's life: start, wake, weights, generate, sleep.

A subclass of TRL 1.16's `VLLMGeneration`. The card belongs to the trainer or to the engine, never to both: whoever
leaves has left before the other comes. vLLM sleeps once, after the last generation of a step, however often tools call
`generate`. In server mode, and with tensor parallelism, everything is TRL's.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from accelerate.utils.other import get_free_port
from torch import Tensor
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer.utils import ensure_master_addr_port

from trl_budget import upstream_vllm
from trl_budget.residency import Phase, release_cached_memory
from trl_budget.sequence_length import (
    check_cache,
    check_prompts,
    longest_completion,
    notice_of_cut_completions,
    refused_cache,
)
from trl_budget.upstream_engine import EngineProxy

logger = logging.getLogger(__name__)


class Card(Protocol):
    """Who holds the card's memory; `residency.Residency`."""

    def enter(self, phase: Phase) -> None:
        """Parks what must leave, then brings what must be there."""


@dataclass
class EngineSettings:
    """How the engine is built and handed the card.

    Attributes:
        sleeps: whether it gives its memory back after each rollout.
        dtype: of its weights, vLLM's choice when None.
        start: called before the engine is built, with the trainer's models off the card; refuses what cannot fit.
        adopt: called once with the engine that has started; returns whether its weights are the policy's own, which
            then need no sync. The policy is off the card.
        weights: name and value of every weight to load, while the card is the engine's; None reads them from the
            policy on the card.
        after_sync: called after every sync with the engine, weights awake.
        build: makes the engine; `vllm.LLM` when None.
    """

    sleeps: bool
    dtype: str | None = None
    start: Callable[[], None] = lambda: None
    adopt: Callable[[Any], bool] = lambda _: False
    weights: Callable[[], Generator[tuple[str, Tensor]]] | None = None
    after_sync: Callable[[Any], None] = lambda _: None
    build: Callable[..., Any] | None = None


class ColocatedGeneration(VLLMGeneration):
    """TRL's generation backend with the card handed over between the engine and the trainer.

    Args:
        settings: how the engine is built and handed the card.
        card: who holds the card's memory.
        arguments: `VLLMGeneration`'s own, without `enable_sleep_mode`: its way of sleeping stays off.
    """

    def __init__(self, settings: EngineSettings, card: Card, **arguments: Any) -> None:
        self._settings = settings
        self._card = card
        self._shares_weights = False
        self._has_current_weights = True  # the checkpoint that the policy was loaded from, until the first sync
        self._is_mapped_in_part = False
        self._num_sessions = 0
        self._has_told_of_cuts = False
        super().__init__(**arguments, enable_sleep_mode=False)

    def _init_vllm(self) -> None:
        """As TRL 1.16, for an engine in this process without tensor parallelism."""
        build = self._settings.build or upstream_vllm.engine_class()
        try:
            self._card.enter(Phase.START)
            self._settings.start()
            self._set_environment()
            engine = build(**self._engine_arguments())
            self.llm = EngineProxy(engine, self._opened) if self._settings.sleeps else engine
        except BaseException as error:
            self._card.enter(Phase.SCORE)  # the models may be the user's, who may try again with them
            refusal = upstream_vllm.cache_refusal(error)
            if refusal is not None:
                raise refused_cache(refusal, self._longest_completion) from error
            raise
        if self._settings.sleeps and upstream_vllm.has_sleep_backends():
            upstream_vllm.choose_sleep_backend(self.llm)
        try:
            self._shares_weights = self._settings.adopt(self.llm)
        finally:
            self.close()
        self._room = upstream_vllm.sequence_room(self.llm)
        check_cache(self._room, self._longest_completion)
        self.accelerator.wait_for_everyone()

    def _set_environment(self) -> None:
        """What vLLM's external launcher reads."""
        accelerator = self.accelerator
        os.environ["RANK"] = str(accelerator.process_index)
        os.environ["LOCAL_RANK"] = str(accelerator.local_process_index)
        os.environ["WORLD_SIZE"] = str(accelerator.num_processes)
        chosen = os.environ.get("MASTER_PORT", "").strip()
        if accelerator.num_processes == 1 and (not chosen.isdecimal() or int(chosen) == 0):
            # TRL takes 29500 while nobody listens there: two runs that start together take the same.
            os.environ["MASTER_PORT"] = str(get_free_port())
        ensure_master_addr_port()

    def _engine_arguments(self) -> dict[str, Any]:
        arguments = {
            "model": self.model.name_or_path,
            "tensor_parallel_size": self.tensor_parallel_size,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "max_model_len": self.max_model_length,
            "max_num_seqs": self.max_num_seqs,
            "enable_sleep_mode": self._settings.sleeps,
            "model_impl": self.model_impl,
            "distributed_executor_backend": "external_launcher",
            "seed": self.accelerator.process_index // self.tensor_parallel_size,
            "max_num_batched_tokens": 4096,  # vLLM's profiler takes memory for a full batch
            "logprobs_mode": "processed_logprobs",  # what the sampling correction divides by
            "quantization": None,  # a quantized policy is refused
            "trust_remote_code": self.trust_remote_code,
        }
        if self._settings.dtype is not None:
            arguments["dtype"] = self._settings.dtype
        return arguments

    @property
    def is_awake(self) -> bool:
        """Whether any part of the engine holds memory that it could give back."""
        if not self._settings.sleeps:
            return False
        return self._is_mapped_in_part or upstream_vllm.sleeping_tags(self.llm) != upstream_vllm.SLEEP_TAGS

    @contextmanager
    def session(self) -> Iterator[None]:
        """The engine may stay awake inside; it gives the card back when the outermost ends, also after an error."""
        self._num_sessions += 1
        try:
            yield
        finally:
            self._num_sessions -= 1
            if self._num_sessions == 0:
                self.close()

    def open(self) -> None:
        """Gives the engine the card, with the policy's present weights, so that it may generate; in a session."""
        assert self._num_sessions > 0, "the engine would keep the card"
        if not self._has_current_weights or self._has_dropped_weights:
            self.sync_weights()
        self._take_card()
        self._wake("weights")
        self._wake("kv_cache")

    @contextmanager
    def _opened(self) -> Iterator[None]:
        """For a user's call of the engine; inside a session that has opened it, changes nothing."""
        with self.session():
            self.open()
            yield

    def close(self) -> None:
        """Gives the trainer the card back; an engine that does not sleep only drops what a failure has left."""
        try:
            upstream_vllm.abort_requests(self.llm)
            if self._settings.sleeps:
                self._sleep()
                self._has_current_weights = self._shares_weights
        finally:
            self._card.enter(Phase.SCORE)

    @property
    def _has_dropped_weights(self) -> bool:
        """Whether the user has put the engine to sleep since the last sync."""
        asleep = upstream_vllm.sleeping_tags(self.llm) if self._settings.sleeps else ()
        return "weights" in asleep and not self._shares_weights

    def sync_weights(self) -> None:
        """As TRL 1.16; weights go straight from the host copy of the parked policy, so the card holds them once.

        Outside a session an engine that sleeps only notes it: it would drop the weights again before it generates.
        """
        if self._settings.sleeps and self._num_sessions == 0:
            self._has_current_weights = False
            return
        if self._settings.weights is not None or self._shares_weights:
            self._take_card()
        else:
            self._card.enter(Phase.SCORE)
        self._wake("weights")
        if not self._shares_weights:
            model = upstream_vllm.engine_model(self.llm)
            with closing(self._weights()) as weights:  # also while an error is on its way: a layer may be merged
                for name, weight in weights:
                    upstream_vllm.load_weight(model, name, weight)
        self.llm.reset_prefix_cache()
        self._settings.after_sync(self.llm)
        self._has_current_weights = True

    def _weights(self) -> Generator[tuple[str, Tensor]]:
        if self._settings.weights is None:
            yield from self._iter_named_params()
            return
        with closing(self._settings.weights()) as weights:
            for name, weight in weights:
                yield self._fix_param_name_to_vllm(name), weight

    def generate(self, prompts: list[list[int]], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """As TRL 1.16; wakes the engine and leaves it awake until the session ends, if there is one.

        Raises:
            SettingsError: a prompt that vLLM cannot hold, before any is generated.
        """
        with self.session():
            check_prompts(prompts, self._room)
            self._tell_of_cuts(prompts)
            self.open()
            return super().generate(prompts, *args, **kwargs)

    def _tell_of_cuts(self, prompts: list[list[int]]) -> None:
        """Once: a conversation may end in the cut that TRL leaves to vLLM, turn after turn."""
        notice = notice_of_cut_completions(max(map(len, prompts), default=1), self._room, self._longest_completion)
        if notice is not None and not self._has_told_of_cuts:
            self._has_told_of_cuts = True
            logger.warning(notice)

    @property
    def _longest_completion(self) -> int:
        return longest_completion(self.max_completion_length, self.generation_kwargs)

    def _take_card(self) -> None:
        if self._settings.sleeps:
            self._card.enter(Phase.ROLLOUT)

    def _wake(self, tag: str) -> None:
        if not self._settings.sleeps or tag not in upstream_vllm.sleeping_tags(self.llm):
            return
        release_cached_memory()  # the engine maps memory without asking torch
        self._is_mapped_in_part = True
        self.llm.wake_up(tags=[tag])
        self._is_mapped_in_part = False

    def _sleep(self) -> None:
        """Level 2: weights and cache are dropped, weights that are shared stay."""
        if self.is_awake:
            upstream_vllm.put_to_sleep(self.llm)
            self._is_mapped_in_part = False

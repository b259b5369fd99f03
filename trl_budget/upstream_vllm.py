"""The seams in vLLM that colocated rollouts use. Nothing is patched; vLLM is imported when an engine starts.

vLLM keeps what is needed here behind attributes that are not public; each is reached in one function, and a missing
one is an error that names the tested versions.
"""

from __future__ import annotations

import inspect
import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

from torch import Tensor, nn
from transformers import is_bitsandbytes_available
from trl import GRPOConfig
from trl.generation.vllm_generation import VLLMGeneration
from trl.import_utils import is_vllm_available

from trl_budget.errors import UpstreamMovedError
from trl_budget.sequence_length import CacheRefusal, SequenceRoom

logger = logging.getLogger(__name__)

TESTED_VLLM = "0.26.0 and 0.31.0"
SLEEP_BACKEND = "trl_budget"
SLEEP_TAGS = frozenset({"weights", "kv_cache"})
_COMPILATION_WRAPPER = "TorchCompileWithNoGuardsWrapper"


def engine_class() -> Callable[..., Any]:
    """`vllm.LLM`.

    Raises:
        ImportError: vLLM is not installed.
    """
    if not is_vllm_available():
        raise ImportError(
            "vLLM is not available and `use_vllm` is set to True. Install it with `pip install trl[vllm]`."
        )
    from vllm import LLM

    return LLM


def has_sleep_backends() -> bool:
    """Whether this vLLM lets a backend of our own put the engine to sleep (0.24 and later)."""
    try:
        from vllm.device_allocator import sleep_mode_backend  # noqa: F401
    except ImportError:
        return False
    return True


def choose_sleep_backend(llm: Any) -> None:
    """Makes a new engine sleep through `HandoverBackend`.

    vLLM reads the name from its model config when it first sleeps; no argument of `LLM` sets it in 0.26 or 0.31.
    """
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

    if SLEEP_BACKEND not in _reach(SleepModeBackendFactory, "_registry"):
        SleepModeBackendFactory.register_backend(SLEEP_BACKEND, "trl_budget.vllm_sleep", "HandoverBackend")
    config = _reach(_worker(llm), "vllm_config", "model_config")
    _reach(config, "sleep_mode_backend")
    config.sleep_mode_backend = SLEEP_BACKEND


def _executor(llm: Any) -> Any:
    return _reach(llm, "llm_engine", "model_executor")


def _worker(llm: Any) -> Any:
    worker = _reach(_executor(llm), "driver_worker")
    return getattr(worker, "worker", None) or worker  # inside vLLM's wrapper


def engine_model(llm: Any) -> nn.Module:
    """The model inside the engine, of this process."""
    return _reach(_executor(llm), "driver_worker", "model_runner", "model")


def detach_from_compilation(model: nn.Module) -> None:
    """Lets a transformers model run after vLLM has decorated its class for torch.compile.

    For an architecture without a class of its own (Olmo2), vLLM decorates transformers' class where it stands;
    instances made before lack what the decorated `__call__` reads: "no attribute 'do_not_compile'".
    """
    for module in model.modules():
        if _COMPILATION_WRAPPER in {base.__name__ for base in type(module).__mro__} and not hasattr(
            module, "do_not_compile"
        ):
            setattr(module, "do_not_compile", True)  # noqa: B010  (mypy: a module's attributes are tensors or modules)


def load_weight(model: nn.Module, name: str, weight: Tensor) -> None:
    """Loads one weight, under transformers' name, into vLLM's model; `weight` may be on the host."""
    _reach(model, "load_weights")([(name, weight)])


def packed_modules(model: nn.Module) -> Mapping[str, Sequence[str]]:
    """The engine's own table of fused modules, such as `qkv_proj` and the parts in it; empty without one."""
    return getattr(model, "packed_modules_mapping", None) or {}


def sleep_backend(llm: Any) -> Any:
    """The backend that puts this process' worker to sleep."""
    worker = _worker(llm)
    made = getattr(worker, "_get_sleep_mode_backend", None)
    return made() if made is not None else _reach(worker, "sleep_mode_backend")


def sleeping_tags(llm: Any) -> set[str]:
    """Which of "weights" and "kv_cache" are asleep."""
    return set(_reach(_executor(llm), "sleeping_tags"))


def put_to_sleep(llm: Any) -> None:
    """Level 2 for all of the engine that is awake, also where it woke in part, or failed to."""
    executor = _executor(llm)
    asleep = sleeping_tags(llm)
    try:
        if not asleep:
            llm.sleep(level=2)
        elif "weights" not in asleep:
            executor.collective_rpc("sleep", kwargs={"level": 2})
        else:  # the worker would first read buffers that are not mapped
            sleep_backend(llm).suspend(2)
    except AssertionError as error:
        if "Memory usage increased" not in str(error):  # said when it sleeps already
            raise
        logger.warning("vLLM fell asleep and says: %s Another process has taken memory of the card meanwhile.", error)
        sleep_backend(llm).suspend(2)
    _reach(executor, "sleeping_tags").update(SLEEP_TAGS)
    if "is_sleeping" in vars(executor):  # 0.26; derived from the tags in 0.31
        executor.is_sleeping = True


def abort_requests(llm: Any) -> None:
    """Drops what a generation that failed has left: the next one would wait for it for ever, or return it."""
    engine = _reach(llm, "llm_engine")
    if left := list(_reach(engine, "output_processor", "request_states")):
        engine.abort_request(left, internal=True)


def sequence_room(llm: Any) -> SequenceRoom:
    """How long one sequence of an engine that has started may become."""
    engine = _reach(llm, "llm_engine")
    cache = _reach(engine, "vllm_config", "cache_config")
    cache_tokens = getattr(cache, "kv_cache_size_tokens", None)  # 0.26 and later; counts groups of layers
    if not cache_tokens:
        cache_tokens = (_reach(cache, "num_gpu_blocks") or 0) * _reach(cache, "block_size")
    return SequenceRoom(_reach(engine, "model_config", "max_model_len"), cache_tokens or None)


def cache_refusal(error: BaseException) -> CacheRefusal | None:
    """What vLLM says where its KV cache would not hold one sequence; None for any other error."""
    text = str(error)
    if not isinstance(error, ValueError):
        return None
    if text.startswith("No available memory for the cache blocks"):
        return CacheRefusal()
    found = re.search(r"max seq len \((\d+)\), \(?([\d.]+) GiB .*?memory \(([\d.]+) GiB\)", text, re.DOTALL)
    if found is None:
        return None
    fitting = re.search(r"estimated maximum model length is (\d+)", text)
    return CacheRefusal(
        int(found[1]), float(found[2]), float(found[3]), int(fitting[1]) if fitting is not None else None
    )


def quantization_asked_for(model: str | nn.Module, args: GRPOConfig, quantization_config: Any) -> str | None:
    """How the policy is, or is to be, quantized, as far as it can be told before it is loaded; None if it is not.

    Args:
        model: TRL's argument, a name or a model.
        args: `model_init_kwargs` is for a model that is a name.
        quantization_config: TRL's argument, likewise.
    """
    if isinstance(model, nn.Module):
        return quantization_of(model)
    init_kwargs: Any = args.model_init_kwargs or {}
    config = quantization_config or init_kwargs.get("quantization_config")
    if config is None:
        bits = next((bits for bits in (4, 8) if init_kwargs.get(f"load_in_{bits}bit")), None)
        return f"bitsandbytes, {bits} bits" if bits is not None else None
    dequantizes = config.get("dequantize") if isinstance(config, Mapping) else getattr(config, "dequantize", False)
    return None if dequantizes else _quantizer(config)


def quantization_of(model: nn.Module) -> str | None:
    """How a loaded policy is quantized, "bitsandbytes, 4 bits"; None if it holds its weights as they are."""
    if is_bitsandbytes_available():
        import bitsandbytes as bnb

        for module in model.modules():
            if isinstance(module, bnb.nn.Linear4bit | bnb.nn.Linear8bitLt):
                return f"bitsandbytes, {4 if isinstance(module, bnb.nn.Linear4bit) else 8} bits"
    if not getattr(model, "is_quantized", False):
        return None
    return _quantizer(getattr(getattr(model, "config", None), "quantization_config", None) or {})


def _quantizer(config: Any) -> str:
    """Method and bits of a quantization config, an object or what `config.json` holds."""
    values: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
    method = values.get("quant_method") or "bitsandbytes"
    bits = next((bits for bits in (4, 8) if values.get(f"load_in_{bits}bit")), values.get("bits") or None)
    name = str(getattr(method, "value", method))
    return f"{name}, {bits} bits" if bits is not None else name


@contextmanager
def without_engine(args: GRPOConfig, *, applies: bool) -> Any:
    """`use_vllm` and vLLM's `generation_kwargs` off during TRL's constructor, which would start an engine."""
    if not applies:
        yield
        return
    original = args.generation_kwargs
    args.use_vllm, args.generation_kwargs = False, None
    try:
        yield
    finally:
        args.use_vllm, args.generation_kwargs = True, original


def restore_generation(trainer: Any, *, applies: bool) -> None:
    """Leaves the attributes that TRL's constructor leaves with `use_vllm`, after `without_engine`."""
    if not applies:
        return
    trainer.use_vllm = True
    del trainer.generation_config, trainer.generation_kwargs


def generation_arguments(trainer: Any) -> dict[str, Any]:
    """What TRL 1.16 passes to `VLLMGeneration` for a trainer; `enable_sleep_mode` is left out."""
    args = trainer.args
    return {
        "model": trainer.model,
        "accelerator": trainer.accelerator,
        "processing_class": trainer.processing_class,
        "mode": args.vllm_mode,
        "structured_outputs_regex": args.vllm_structured_outputs_regex,
        "tensor_parallel_size": args.vllm_tensor_parallel_size,
        "gpu_memory_utilization": args.vllm_gpu_memory_utilization,
        "max_model_length": args.vllm_max_model_length,
        "max_num_seqs": args.per_device_train_batch_size * args.vllm_tensor_parallel_size * args.steps_per_generation,
        "model_impl": args.vllm_model_impl,
        "trust_remote_code": getattr(args, "trust_remote_code", False),
        **{
            name: getattr(trainer, name)
            for name in ("repetition_penalty", "temperature", "top_p", "top_k", "min_p", "max_completion_length")
        },
        "logprobs": 0,
        "generation_kwargs": args.generation_kwargs,
    }


def sleeping_bytes() -> int:
    """Bytes of vLLM's pool that hold no memory at the moment; 0 before an engine has started, and before vLLM 0.24."""
    if "vllm" not in sys.modules or not has_sleep_backends():
        return 0
    from trl_budget import vllm_sleep

    return vllm_sleep.sleeping_bytes()


def check_sampling_mode(args: GRPOConfig) -> None:
    """TRL's check of the VESPO loss, which its constructor makes where it starts the engine.

    Raises:
        ValueError: as TRL 1.16.
    """
    mode = args.vllm_importance_sampling_mode
    if args.loss_type != "vespo" or not args.vllm_importance_sampling_correction:
        return
    if mode not in ("token_truncate", "token_mask"):
        raise ValueError(
            "VESPO loss requires `vllm_importance_sampling_mode` to be either 'token_truncate' or 'token_mask'. "
            f"Got: {mode}."
        )


def check_generation_seam() -> None:
    """Checks the constructor and methods of TRL's `VLLMGeneration` that are overridden.

    Raises:
        UpstreamMovedError: one has moved.
    """
    known = {"model", "accelerator", "mode", "gpu_memory_utilization", "max_num_seqs", "logprobs", "generation_kwargs"}
    missing = known - inspect.signature(VLLMGeneration.__init__).parameters.keys()
    missing |= {
        name for name in ("_init_vllm", "_iter_named_params", "sync_weights") if name not in vars(VLLMGeneration)
    }
    if missing:
        raise UpstreamMovedError(
            f"TRL {version('trl')}'s VLLMGeneration has no {', '.join(sorted(missing))}. The engine is started and "
            "synchronised through them. Install trl 1.16.0."
        )


def _reach(owner: Any, *names: str) -> Any:
    """An attribute of an attribute.

    Raises:
        UpstreamMovedError: vLLM has moved it.
    """
    for name in names:
        if not hasattr(owner, name):
            raise UpstreamMovedError(
                f"vLLM {version('vllm')}'s {type(owner).__name__} has no {name}. Colocated rollouts reach the "
                f"engine's weights and sleep state through it. Install a tested vLLM: {TESTED_VLLM}."
            )
        owner = getattr(owner, name)
    return owner

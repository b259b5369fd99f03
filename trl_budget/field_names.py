"""Says what was meant by a configuration field that does not exist.

The generated `__init__` of a dataclass names an unknown field and stops there. Here the nearest field is named, and
for fields that older versions of TRL and transformers had, what has taken their place. Nothing else of the class
changes: names are looked at before the generated `__init__` runs, which then gets its arguments as they came.
Source of what was removed: TRL's GRPOConfig of v0.14 to v0.27; transformers' MIGRATION_GUIDE_V5.md.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Collection, Iterable
from typing import Any, TypeVar

from trl_budget.errors import UnknownFieldError

Class = TypeVar("Class", bound=type)

_SERVER = "give it to `trl vllm-serve`, where vLLM runs as a server"
REMOVED = {
    "max_prompt_length": "leave prompts that are too long out of the dataset; with vLLM, vllm_max_model_length bounds "
    "a prompt and its completion together",
    "use_liger_loss": "set use_liger_kernel",
    "vllm_device": "set vllm_mode='colocate' for vLLM on the training device, or vllm_mode='server' and start it with "
    "`trl vllm-serve`",
    "vllm_dtype": f"{_SERVER}; beside the trainer it follows from the model",
    "vllm_enable_prefix_caching": f"{_SERVER}; beside the trainer it is vLLM's own choice",
    "vllm_guided_decoding_regex": "set vllm_structured_outputs_regex",
    "vllm_max_model_len": "set vllm_max_model_length",
    "wandb_log_unique_prompts": "set log_unique_prompts",
    "evaluation_strategy": "set eval_strategy",
    "group_by_length": "set train_sampling_strategy='group_by_length'",
    "include_inputs_for_metrics": "set include_for_metrics",
    "include_tokens_per_second": "set include_num_input_tokens_seen",
    "logging_dir": "set the environment variable TENSORBOARD_LOGGING_DIR",
    "no_cuda": "set use_cpu",
    "overwrite_output_dir": "leave it out; train(resume_from_checkpoint=...) says whether a run goes on",
    "per_gpu_eval_batch_size": "set per_device_eval_batch_size",
    "per_gpu_train_batch_size": "set per_device_train_batch_size",
    "push_to_hub_model_id": "set hub_model_id",
    "push_to_hub_token": "set hub_token",
    "warmup_ratio": "set warmup_steps, of which a number below 1 is a share of all steps",
}


def names_unknown_fields(cls: Class) -> Class:
    """A class decorator: a call with a keyword that `cls.__init__` does not take says what to write instead.

    Subclasses that are dataclasses of their own get a generated `__init__` of their own, without this.
    """
    generated = cls.__init__  # type: ignore[misc]
    known = tuple(inspect.signature(generated).parameters)[1:]

    @functools.wraps(generated)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        refuse_unknown(cls.__name__, kwargs, known)
        generated(self, *args, **kwargs)

    cls.__init__ = checked  # type: ignore[misc]
    return cls


def refuse_unknown(owner: str, given: Iterable[str], known: Collection[str]) -> None:
    """Refuses names that are not known.

    Args:
        owner: the class, named in the error.
        given: keywords of the call.
        known: names of its fields.

    Raises:
        UnknownFieldError: names each one, and what to write instead.
    """
    unknown = [name for name in given if name not in known]
    if unknown:
        raise UnknownFieldError(
            f"{owner} has no field {', '.join(map(repr, unknown))}. Nothing would read the value, so the run would be "
            f"another than the one that was asked for. {' '.join(_advice(name, known) for name in unknown)}"
        )


def _advice(name: str, known: Collection[str]) -> str:
    if name in REMOVED:
        return f"{name} is gone from TRL or transformers: {REMOVED[name]}."
    nearest = difflib.get_close_matches(name, known, n=1)
    return f"For {name}, did you mean {nearest[0]}?" if nearest else f"Leave {name} out: no field has a name like it."

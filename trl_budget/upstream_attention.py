"""The names under which transformers' models look up their attention: ours while rows are scored, theirs otherwise.

The policy's attention is exchanged by its name in the config, since a function is looked up in every call, in the
recompute of gradient checkpointing too. Code that asks for the name would get another answer: such models are named by
`asks_for_attention`, and whatever is not scoring sees the model's own name.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from trl_budget.attention import DISPATCHED, PREFIX, dispatching_implementation

_NAME = "_attn_implementation"


def own_attention(config: Any) -> str:
    """The attention implementation that the user chose, whatever stands in the config now."""
    return (config._attn_implementation or "eager").removeprefix(PREFIX)


def enable_packed_attention(models: Iterable[nn.Module | None]) -> None:
    """Adds packed rows to the attention of each model that uses one which can be dispatched; keeps it otherwise."""
    for module in _pretrained(models):
        if module.config._attn_implementation in DISPATCHED:
            module.config._attn_implementation = dispatching_implementation(module.config._attn_implementation)


def restore_attention(models: Iterable[nn.Module | None]) -> list[PreTrainedModel]:
    """Gives each model its own attention back. Returns the modules that had another."""
    renamed = [m for m in _pretrained(models) if (m.config._attn_implementation or "").startswith(PREFIX)]
    for module in renamed:
        module.config._attn_implementation = own_attention(module.config)
    return renamed


@contextmanager
def with_own_attention(models: Iterable[nn.Module | None]) -> Iterator[None]:
    """Each model has its own attention meanwhile: generation looks at the name, and so does what a user runs there."""
    renamed = restore_attention(models)
    try:
        yield
    finally:
        enable_packed_attention(renamed)


@contextmanager
def with_exact_attention(model: nn.Module) -> Iterator[None]:
    """`sdpa` in place of an attention that computes in bf16 and fp16 only, where the model has both."""
    flash = [m for m in _pretrained([model]) if own_attention(m.config).startswith("flash_attention")]
    before = [module.config._attn_implementation for module in flash]
    for module in flash:
        if module._supports_sdpa:
            module.config._attn_implementation = "sdpa"
    try:
        yield
    finally:
        for module, name in zip(flash, before, strict=True):
            module.config._attn_implementation = name


def packs_rows(model: Any) -> bool:
    """Whether the attention of a model, wrapped or not, takes packed rows."""
    config = next(module.config for module in model.modules() if isinstance(module, PreTrainedModel))
    return (config._attn_implementation or "").startswith((PREFIX, "flash_attention"))


def undispatched_attention(model: nn.Module) -> set[str]:
    """Names of the attention implementations in `model` that this library's dispatch does not stand in front of."""
    names = {module.config._attn_implementation or "eager" for module in _pretrained([model])}
    return {name for name in names if not name.startswith(PREFIX)}


def asks_for_attention(model: nn.Module) -> bool:
    """Whether the code of a model compares the name of its attention with the one that it has."""
    return any(
        own_attention(module.config) in _names_compared(code)
        for module in _pretrained([model])
        if (code := sys.modules.get(type(module).__module__)) is not None
    )


@functools.cache
def _names_compared(code: ModuleType) -> frozenset[str]:
    """The strings that a module of transformers compares an attention's name with."""
    try:
        tree = ast.parse(inspect.getsource(code))
    except (OSError, TypeError):  # typed into an interpreter, say
        return frozenset()
    compared = [[node.left, *node.comparators] for node in ast.walk(tree) if isinstance(node, ast.Compare)]
    asked = [sides for sides in compared if any(isinstance(s, ast.Attribute) and s.attr == _NAME for s in sides)]
    constants = (
        node for sides in asked for side in sides for node in ast.walk(side) if isinstance(node, ast.Constant)
    )
    return frozenset(node.value for node in constants if isinstance(node.value, str))


def _pretrained(models: Iterable[nn.Module | None]) -> list[PreTrainedModel]:
    return [
        module
        for model in models
        if model is not None
        for module in model.modules()
        if isinstance(module, PreTrainedModel)
    ]

"""What the package's classes override and what its modules read privately, from the classes and the syntax trees."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import trl_budget

FOLDER = Path(trl_budget.__file__).parent
UPSTREAM = {"trl", "transformers", "accelerate", "peft", "torch", "vllm"}
TABLE = "upstream_seams"  # holds the names as strings
NEEDS_VLLM = "vllm_sleep"
_PRIVATE = re.compile(r"_(?!_)\w*[a-zA-Z]\w*")


def trees() -> dict[str, ast.Module]:
    """The syntax tree of every module but the table."""
    files = (path for path in sorted(FOLDER.glob("*.py")) if path.stem != TABLE)
    return {path.stem: ast.parse(path.read_text()) for path in files}


def classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def body_names(node: ast.ClassDef) -> set[str]:
    """What a class body gives a value: methods, properties and attributes."""
    names = {part.name for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)}
    for part in node.body:
        targets = part.targets if isinstance(part, ast.Assign) else [part.target] if is_valued(part) else []
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def is_valued(part: ast.stmt) -> bool:
    return isinstance(part, ast.AnnAssign) and part.value is not None


def overrides() -> dict[tuple[str, str], tuple[type, Any]]:
    """(our class, name) -> the upstream class that defines it, and ours; of classes that can be imported."""
    found = {}
    for stem, tree in trees().items():
        if stem == NEEDS_VLLM:
            continue
        module = importlib.import_module("trl_budget" if stem == "__init__" else f"trl_budget.{stem}")
        for node in classes(tree):
            ours = getattr(module, node.name, None)
            bases = upstream_bases(ours) if inspect.isclass(ours) else []
            for name in body_names(node):
                owner = next((base for base in bases if name in vars(base)), None)
                if owner is not None:
                    found[node.name, name] = owner, vars(ours)[name]
    return found


def upstream_bases(ours: type) -> list[type]:
    return [base for base in ours.__mro__ if base.__module__.split(".")[0] in UPSTREAM]


def private_reads() -> set[tuple[str, str]]:
    """(module, name) of each private attribute that is not this package's, named by attribute or by string."""
    parsed = trees()
    ours = set().union(*(defined_names(tree) for tree in parsed.values()))
    found = set()
    for stem, tree in parsed.items():
        here, upstream = defined_names(tree), imported_from_upstream(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and is_private(node.attr):
                receiver = ast.unparse(node.value)
                is_of_self = receiver in ("self", "cls", "super()")
                is_upstream = receiver.split(".")[0] in upstream or (not is_of_self and of_every_tensor(node.attr))
                if is_upstream or node.attr not in (ours if is_of_self else here):
                    found.add((stem, node.attr))
            elif isinstance(node, ast.Constant) and is_private(node.value) and node.value not in ours:
                found.add((stem, node.value))
        found |= {(stem, name) for name in inherited_names(stem, tree)}
    return found


def is_private(name: object) -> bool:
    return isinstance(name, str) and _PRIVATE.fullmatch(name) is not None


def imported_from_upstream(tree: ast.Module) -> set[str]:
    """Names that a module binds to something of an upstream."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UPSTREAM:
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            paths = [alias for alias in node.names if alias.name.split(".")[0] in UPSTREAM]
            names |= {alias.asname or alias.name.split(".")[0] for alias in paths}
    return names


def of_every_tensor(name: str) -> bool:
    return hasattr(torch.Tensor, name) or name in nn.Module.__annotations__


def inherited_names(stem: str, tree: ast.Module) -> Iterator[str]:
    """Private attributes of `self` that an upstream class gives it, whoever else writes them."""
    for node in classes(tree):
        touched = {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute) and is_private(part.attr)}
        if stem == NEEDS_VLLM:  # whose bases may not be there to be asked
            yield from touched - body_names(node)
        elif stem != "__init__":
            ours = getattr(importlib.import_module(f"trl_budget.{stem}"), node.name, None)
            yield from touched & given_names(upstream_bases(ours) if inspect.isclass(ours) else [])


def given_names(bases: list[type]) -> set[str]:
    """What the methods of upstream classes store on `self`, from their source."""
    names = set()
    for base in bases:
        try:
            tree = ast.parse(inspect.cleandoc("\n" + inspect.getsource(base)))
        except (OSError, TypeError):  # written in C
            continue
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) == "self"
            ):
                names.add(node.attr)
    return names


def defined_names(tree: ast.Module) -> set[str]:
    """Functions, classes, variables, slots, and attributes of `self` and of its classes, that a module defines."""
    names = set()
    receivers = {"self", "cls", *(node.name for node in classes(tree))}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if ast.unparse(node.value) in receivers:
                names.add(node.attr)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
            names |= {part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant)}
    return names

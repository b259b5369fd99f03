"""The table of seams is complete, nothing in it is idle, and each one that upstream takes away is named."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
from types import CodeType, FunctionType
from typing import Any

import pytest
from fake_vllm import stand_in_for_vllm
from package_source import NEEDS_VLLM, body_names, classes, is_private, overrides, private_reads, trees
from torch import nn

from trl_budget import UpstreamMovedError, upstream
from trl_budget.upstream_seams import CALLS, ENGINE, OVERRIDES, PRIVATE, SLEEPING_WORKER, VLLM, Seam, moved_seams

CHECKED_WHEN_BUILT = (*OVERRIDES, *CALLS, *PRIVATE)
HAS_VLLM = importlib.util.find_spec("vllm") is not None


def named(seam: Seam) -> str:
    owner = seam.owner if isinstance(seam.owner, str) else seam.owner.__name__
    return f"{owner.rpartition(':')[2]}.{seam.name}"


def users(seams: tuple[Seam, ...]) -> set[tuple[str, str]]:
    return {(user, seam.name) for seam in seams for user in seam.used_by}


def test_every_override_is_in_the_table_and_every_line_of_it_is_one() -> None:
    found = {(owner, ours, name) for (ours, name), (owner, _) in overrides().items()}
    listed = {(seam.owner, ours, seam.name) for seam in OVERRIDES for ours in seam.used_by}
    assert found == listed


def test_every_parameter_that_an_override_names_is_in_the_table() -> None:
    listed = {(ours, seam.name): seam.parameters for seam in OVERRIDES for ours in seam.used_by}
    for (ours, name), (_, value) in overrides().items():
        if name.startswith("__") or name in ("forward", "backward") or not isinstance(value, FunctionType):
            continue  # constructors and autograd's methods have parameters of their own
        parameters = inspect.signature(value, follow_wrapped=False).parameters.values()
        taken = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        assert set(taken) - {"self"} <= set(listed[ours, name]), f"{ours}.{name}"


def test_every_private_attribute_that_is_read_is_in_the_table_and_every_line_of_it_is_read() -> None:
    called = {(user, name) for user, name in users(CALLS) if is_private(name)}
    vllm = {(user, name) for user, name in users(VLLM) if is_private(name)}
    reached = {("upstream_vllm", name) for name in SLEEPING_WORKER if is_private(name)}
    assert private_reads() == users(PRIVATE) | called | vllm | reached


def test_every_call_is_made_where_the_table_says() -> None:
    sources = {stem: ast.unparse(tree) for stem, tree in trees().items()}
    idle = [(user, name) for user, name in users(CALLS) if name != "__init__" and name not in sources[user]]
    assert not idle


def test_the_sleep_backend_overrides_nothing_but_what_is_in_the_table() -> None:
    (backend,) = classes(trees()[NEEDS_VLLM])
    methods = {name for name in body_names(backend) if name != "kept_tags"}
    assert methods == {name for user, name in users(VLLM) if user == backend.name}


def test_what_is_reached_in_an_engine_is_what_the_module_reaches() -> None:
    source = ast.unparse(trees()["upstream_vllm"])
    assert not [name for path in ENGINE for name in path if name not in source]


def is_here(seam: Seam) -> bool:
    return moved_seams([dataclasses.replace(seam, owner=_Nothing)]) != []


class _Nothing:
    def __init__(self) -> None: ...


@pytest.mark.parametrize("seam", CHECKED_WHEN_BUILT, ids=named)
def test_each_seam_that_upstream_takes_away_is_named(seam: Seam, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_here(seam):
        pytest.skip(f"is of {seam.needs}, and not of what is installed")
    tables = take_away(seam, monkeypatch)
    for table, lines in tables.items():
        monkeypatch.setattr(upstream, table, lines)
    upstream.check_seams.cache_clear()
    with pytest.raises(UpstreamMovedError) as error:
        upstream.check_seams()
    upstream.check_seams.cache_clear()
    phrases = str(error.value).split(" (installed")[0].split("; ")
    assert phrases and all(seam.name in phrase for phrase in phrases)


def take_away(seam: Seam, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Upstream without the attribute; where it is written in C, a table whose owner lacks it."""
    if seam.owner is nn.Module and seam.set_in is not None:
        monkeypatch.delitem(nn.Module.__annotations__, seam.name)
        return {}
    if seam.set_in is not None:
        function = inspect.unwrap(vars(seam.owner)[seam.set_in])
        monkeypatch.setattr(seam.owner, seam.set_in, renamed(function, seam.name))
        return {}
    try:
        monkeypatch.delattr(seam.owner, seam.name)
    except (AttributeError, TypeError):
        lacking = dataclasses.replace(seam, owner=_Nothing)
        tables = {"OVERRIDES": OVERRIDES, "CALLS": CALLS, "PRIVATE": PRIVATE}
        return {key: tuple(lacking if line is seam else line for line in lines) for key, lines in tables.items()}
    return {}


def renamed(function: FunctionType, name: str) -> FunctionType:
    """The function, with the attribute under another name."""

    def of(code: CodeType) -> CodeType:
        constants = tuple(
            of(constant) if isinstance(constant, CodeType) else "_moved" if constant == name else constant
            for constant in code.co_consts
        )
        return code.replace(
            co_names=tuple("_moved" if known == name else known for known in code.co_names), co_consts=constants
        )

    return FunctionType(of(function.__code__), function.__globals__, function.__name__, closure=function.__closure__)


def test_a_method_that_only_a_base_still_has_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    seam = next(line for line in OVERRIDES if line.name == "compute_loss")
    monkeypatch.delattr(seam.owner, seam.name)
    assert hasattr(seam.owner, seam.name), "transformers' own is found in its place"
    assert moved_seams([seam]) == ["GRPOTrainer.compute_loss does not exist"]


def test_a_lost_parameter_of_each_method_is_named() -> None:
    for seam in CHECKED_WHEN_BUILT:
        for parameter in seam.parameters:
            more = dataclasses.replace(seam, parameters=(*seam.parameters, f"{parameter}_moved"))
            assert f"takes no {parameter}_moved" in moved_seams([more])[0]


@pytest.mark.parametrize("seam", VLLM, ids=named)
def test_each_seam_that_vllm_takes_away_is_named(seam: Seam, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_vllm(monkeypatch)
    assert moved_seams([seam]) == []
    lacking = dataclasses.replace(seam, owner=f"{seam.owner.partition(':')[0]}:Nothing")
    assert moved_seams([lacking]) == [f"{lacking.owner} does not exist"]
    lacking = dataclasses.replace(seam, name=f"{seam.name}_moved")
    assert f"{seam.name}_moved" in moved_seams([lacking])[0]


@pytest.mark.vllm
@pytest.mark.skipif(not HAS_VLLM, reason="needs vLLM")
def test_every_seam_is_in_the_installed_vllm() -> None:
    assert moved_seams(VLLM) == []

"""A vLLM that sleeps otherwise than our backend expects is refused, by its version and by what its engine shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_vllm import DiscardingBackend, stand_in_for_vllm
from test_handover import COPYING, NEITHER, build
from tiny import save_tiny_model

from trl_budget import UpstreamMovedError, upstream_vllm_seams
from trl_budget.upstream_vllm_seams import check_vllm_version


@pytest.mark.parametrize("version", ["0.22.0", "0.22.1", "0.26.0", "0.31.0", "0.31.1", "0.31.0+cu130"])
def test_every_version_that_trl_supports_passes(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_vllm_seams, "installed_vllm", lambda: version)
    check_vllm_version()


@pytest.mark.parametrize("version", ["0.21.0", "0.22.0rc1", "0.32.0", "0.32.0rc1", "0.34.0", "1.0.0"])
def test_every_other_version_is_refused_with_what_to_install(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_vllm_seams, "installed_vllm", lambda: version)
    with pytest.raises(UpstreamMovedError) as error:
        check_vllm_version()
    message = str(error.value)
    assert f"vLLM {version} is installed" in message
    assert "support vLLM 0.22 to 0.31" in message
    assert "pip install 'vllm>=0.22,<0.32'" in message


def test_without_a_vllm_there_is_no_version_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_vllm_seams, "installed_vllm", lambda: None)
    check_vllm_version()


def test_the_trainer_refuses_it_before_it_loads_the_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_vllm_seams, "installed_vllm", lambda: "0.32.0")
    with pytest.raises(UpstreamMovedError, match=r"vLLM 0\.32\.0"):
        build(str(tmp_path / "no such model"), tmp_path)


@pytest.mark.parametrize("settings", [{"use_vllm": False}, {"vllm_mode": "server"}], ids=["none", "server"])
def test_a_trainer_that_starts_no_engine_takes_any_version(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream_vllm_seams, "installed_vllm", lambda: "0.32.0")
    with pytest.raises(Exception) as error:
        build(str(tmp_path / "no such model"), tmp_path, **settings)
    assert not isinstance(error.value, UpstreamMovedError)


# What vLLM 0.32 and 0.34 are, under a version number that passes, as a build of one's own may have.
LATER = {
    "0.32": ({"pool_tags": ("weights", "runtime", "kv_cache")}, "its pool holds runtime beside kv_cache, weights"),
    "0.34, call": ({"backend": DiscardingBackend}, "CuMemBackend.suspend takes no level"),
    "0.34, cache": ({"pool_tags": ("weights",)}, "its pool holds weights, and no kv_cache"),
}


@pytest.mark.parametrize(("changes", "named"), LATER.values(), ids=LATER)
@pytest.mark.parametrize("way", [{}, COPYING], ids=["sharing", "parking"])
def test_an_engine_that_sleeps_otherwise_is_refused_when_it_has_started(
    changes: dict[str, Any], named: str, way: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_for_vllm(monkeypatch, **changes)
    with pytest.raises(UpstreamMovedError) as error:
        build(save_tiny_model(tmp_path / "model"), tmp_path, **way)
    assert named in str(error.value)
    assert upstream_vllm_seams.TESTED_VLLM in str(error.value)


def test_an_engine_that_never_sleeps_may_keep_its_memory_where_it_likes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_for_vllm(monkeypatch, pool_tags=("weights", "runtime"))
    trainer = build(save_tiny_model(tmp_path / "model"), tmp_path, **NEITHER)
    assert trainer.vllm_generation.llm.events

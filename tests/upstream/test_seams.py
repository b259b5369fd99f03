"""The seams exist in the installed TRL, transformers and Accelerate, and a seam that moved is named."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest
import torch

from trl_budget import UpstreamMovedError, upstream
from trl_budget.upstream_seams import Seam


class _Upstream:
    """Stands in for an upstream class: one method as tested, one that lost a parameter."""

    def kept(self, model: object) -> None: ...

    def narrowed(self) -> None: ...


def test_every_seam_is_in_the_installed_versions() -> None:
    upstream.check_seams.cache_clear()
    upstream.check_seams()


def test_a_missing_method_and_a_lost_parameter_are_named_with_the_tested_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seams = [Seam(_Upstream, name, (), used) for name, used in {"kept": ("model",), "narrowed": ("model",)}.items()]
    monkeypatch.setattr(upstream, "OVERRIDES", (*seams, Seam(_Upstream, "gone", ())))
    upstream.check_seams.cache_clear()
    with pytest.raises(UpstreamMovedError) as error:
        upstream.check_seams()
    upstream.check_seams.cache_clear()
    message = str(error.value)
    assert "_Upstream.narrowed takes no model" in message
    assert "_Upstream.gone does not exist" in message
    assert "kept" not in message
    assert f"trl {version('trl')}" in message
    assert upstream.TESTED_VERSIONS["transformers"] in message


def test_a_fused_head_that_reads_its_chunk_size_elsewhere_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def add_fused_lm_head(model: object) -> None:
        def forward() -> object:
            return model

        forward()

    monkeypatch.setattr(upstream.trl_utils, "add_fused_lm_head", add_fused_lm_head)
    upstream.check_seams.cache_clear()
    with pytest.raises(UpstreamMovedError, match="add_fused_lm_head reads no _CHUNKED_LOGPROB_CHUNK_SIZE"):
        upstream.check_seams()
    upstream.check_seams.cache_clear()


def test_a_process_that_has_compiled_a_model_is_no_moved_upstream(monkeypatch: pytest.MonkeyPatch) -> None:
    constructor = torch.nn.Module.__init__

    def patched_init(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:  # as torch._dynamo.mutation_guard
        constructor(self, *args, **kwargs)

    monkeypatch.setattr(torch.nn.Module, "__init__", patched_init)
    upstream.check_seams.cache_clear()
    upstream.check_seams()

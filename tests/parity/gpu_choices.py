"""What `auto` picks for bf16 on CUDA, picked here in fp32 on the CPU, where training can be compared with stock's."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from trl_budget import upstream_model


def choose_as_on_cuda(monkeypatch: pytest.MonkeyPatch, *, room: int = 4096) -> None:
    """Layout and budget are decided from the facts of bf16 on CUDA, with memory for `room` tokens a pass."""
    collect = upstream_model.layout_facts

    def facts(*args: Any) -> Any:
        return dataclasses.replace(collect(*args), device_type="cuda", bf16=True)

    monkeypatch.setattr(upstream_model, "layout_facts", facts)
    monkeypatch.setattr(upstream_model, "available_tokens", lambda *_, **__: room)


def row(trainer: Any, name: str) -> Any:
    """A row of the table of settings."""
    return next(setting for setting in trainer.resolved_settings if setting.name == name)

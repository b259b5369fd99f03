"""Keeps what the imports made out of the collections after each test: they are most of this folder's time."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="session", autouse=True)
def _freeze_imports() -> None:
    gc.collect()
    gc.freeze()

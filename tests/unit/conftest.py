"""Unit tests build no trainers, so the costly collection after every test of the suite is left out here."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _collect_trainers() -> object:
    return None

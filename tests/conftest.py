"""Shared switches: no hub, quiet telemetry, and GPU or vLLM tests skipped with a reason where they cannot run."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.update({"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"})
sys.path.insert(0, str(Path(__file__).parent))

import torch

# A busy machine is no fault: an example may take as long as it takes.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skip(reason="needs a CUDA device, and torch.cuda.is_available() is False")
    no_vllm = pytest.mark.skip(reason="needs vLLM, which is not installed in this environment")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if item.get_closest_marker("vllm") and importlib.util.find_spec("vllm") is None:
            item.add_marker(no_vllm)


@pytest.fixture(autouse=True)
def _collect_trainers() -> object:
    """A trainer of one test must not own the parameters of the next."""
    yield
    gc.collect()


@pytest.fixture
def one_thread() -> object:
    """Torch computes on one thread, for tests that allow the rounding of other sums.

    Two threads sum by halves, which depend on shapes and processor: on an AMD EPYC gradients of layers in tiles
    were 1.1e-6 to 1.6e-6 from those of whole layers with two threads, and 2e-7 with one.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

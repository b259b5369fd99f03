"""The store that leaves activations where they are."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from trl_budget.activation_store import DeviceStore


class RecordingStore(DeviceStore):
    """Appends what happens, with the place of the activation in the order of keeping."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._num_kept = 0

    def keep(self, hidden_states: Tensor) -> Any:
        store, index, kept = self, self._num_kept, super().keep(hidden_states)
        self._num_kept += 1
        self.events.append(f"keep {index}")

        class Recorded:
            def take(self) -> Tensor:
                store.events.append(f"take {index}")
                return kept.take()

        return Recorded()


def test_what_is_taken_is_what_was_kept_without_its_graph() -> None:
    hidden_states = torch.randn(1, 4, 8, requires_grad=True) * 2
    kept = DeviceStore().keep(hidden_states)
    taken = kept.take()
    assert taken.data_ptr() == hidden_states.data_ptr()
    assert not taken.requires_grad


def test_a_store_holds_nothing_once_it_was_taken() -> None:
    kept = DeviceStore().keep(torch.randn(1, 4, 8))
    taken = kept.take()
    watch = weakref.ref(taken)
    del taken
    assert watch() is None


def test_taking_twice_is_refused() -> None:
    kept = DeviceStore().keep(torch.randn(1, 4, 8))
    kept.take()
    with pytest.raises(RuntimeError, match="second time"):
        kept.take()


def test_an_activation_that_was_written_to_is_refused() -> None:
    hidden_states = torch.randn(1, 4, 8)
    kept = DeviceStore().keep(hidden_states)
    hidden_states.add_(1)
    with pytest.raises(RuntimeError, match="written to"):
        kept.take()

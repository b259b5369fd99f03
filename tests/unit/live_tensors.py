"""Counts the bytes of the tensors that operations have made and that are still referred to, on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveTensors(TorchDispatchMode):
    """While entered, follows every operation, also those of a backward; what was there before is not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {t.untyped_storage()._cdata for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)}
        output = func(*args, **(kwargs or {}))
        for tensor in tree_iter(output):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in inputs:
                    self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(nbytes for _, nbytes in self._live.values()))
        return output

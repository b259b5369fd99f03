"""Compute weights follow the masters, and writes by others are adopted into the masters.

After every refresh `compute_weights == master_weights.to(dtype)`, bit for bit. What someone else wrote since (a
checkpoint, the best model, user code, an averaging callback) is found by torch's version counter and, since a write
through `.data` does not move that, by a checksum. Only elements that differ are adopted: a callback that swaps weights
out and back again must not cost the masters their low bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trl_budget.parameter_slots import ParameterSlot
from trl_budget.streams import CopyEngines


class ComputeWeights:
    """Tracks the compute weights of slots that have a separate master.

    Args:
        engines: copy engines, by CUDA device.
    """

    def __init__(self, engines: CopyEngines) -> None:
        self._engines = engines
        self._versions: dict[ParameterSlot, int] = {}
        self._checksums: dict[ParameterSlot, Tensor] = {}
        self._dtypes: dict[ParameterSlot, torch.dtype] = {}

    @torch.no_grad()
    def write(self, slot: ParameterSlot, start: int, stop: int) -> None:
        """Casts `master_weights[start:stop]` (flat) into the parameter; on CUDA asynchronously, see `CopyEngine`."""
        source = slot.master_weights.view(-1)[start:stop]
        # Not through `.data`: the write must move the version counter, as torch's own step does.
        target = slot.parameter.detach().view(-1)[start:stop]
        if target.device.type == "cuda":
            self._engines[target.device].upload(source, target)
        else:
            target.copy_(source)

    def record(self, slots: Sequence[ParameterSlot]) -> None:
        """Remembers the present values as the ones this library wrote. Uploads must have finished."""
        for slot in slots:
            self._versions[slot] = slot.parameter._version
            self._dtypes[slot] = slot.parameter.dtype
            self._checksums[slot] = checksum(slot.parameter)

    def changed(self, slots: Sequence[ParameterSlot]) -> list[ParameterSlot]:
        """The slots whose parameter somebody else has written since `record`, with one synchronisation per device."""
        by_device: dict[torch.device, list[ParameterSlot]] = {}
        for slot in slots:
            by_device.setdefault(slot.parameter.device, []).append(slot)
        found: list[ParameterSlot] = []
        for group in by_device.values():
            # `.to` because the model may have moved to another device since.
            recorded = [self._checksums[slot].to(slot.parameter.device) for slot in group]
            differ = [(checksum(slot.parameter) != old).any() for slot, old in zip(group, recorded, strict=True)]
            flags = torch.stack(differ).tolist()
            for slot, flag in zip(group, flags, strict=True):
                if flag or slot.parameter._version != self._versions[slot]:
                    found.append(slot)
        return found

    @torch.no_grad()
    def adopt(self, slot: ParameterSlot) -> int:
        """Takes over into the master every element that is not the master's cast. Returns how many.

        `model.float()` is no write: what it makes of the recorded cast is expected.
        """
        parameter = slot.parameter.detach()
        written = parameter.to("cpu", torch.float32)
        expected = slot.master_weights.to(self._dtypes[slot]).to(parameter.dtype).float()
        differs = written != expected
        slot.master_weights.copy_(torch.where(differs, written, slot.master_weights))
        return int(differs.sum())


@torch.no_grad()
def checksum(parameter: Tensor) -> Tensor:
    """Three numbers over the values, on the parameter's device: `[3]`, int64. Reads the parameter three times.

    Wrapping sums of the bit patterns over rows and over columns, each weighted by its index so that exchanged rows,
    columns and elements show, and a sum of the values. int32 words are summed into int32, which needs no widening:
    torch widens int16 to eight bytes an element before it sums, 3 GB for the embedding of a 4B model.
    """
    values = parameter.detach()
    if values.numel() == 0:
        return torch.zeros(3, dtype=torch.int64, device=values.device)
    table = values.reshape(values.shape[0] if values.dim() > 1 else 1, -1)
    words = _words(table)
    sums = [words.sum(dim=dim, dtype=torch.int32).to(torch.int64) for dim in (0, 1)]
    weighted = [(s * torch.arange(1, s.numel() + 1, device=s.device)).sum() for s in sums]
    total = table.sum(dtype=torch.float32).view(torch.int32).to(torch.int64)
    return torch.stack([*weighted, total])


def _words(table: Tensor) -> Tensor:
    """The bits of a `[R, C]` table as int32, two bf16 values a word; widened by a copy where they do not pair up."""
    if table.element_size() == 4 or (table.shape[1] % 2 == 0 and table.storage_offset() % 2 == 0):
        return table.view(torch.int32)
    return table.view(torch.int16).to(torch.int32)

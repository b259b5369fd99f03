"""Compute weights follow the masters, and writes by others are adopted into the masters.

After every refresh `compute_weights == master_weights.to(dtype)`, bit for bit. What someone else wrote since (a
checkpoint, the best model, user code, an averaging callback) is found by torch's version counter and, since a write
through `.data` does not move that, by a checksum. Only elements that differ are adopted: a callback that swaps weights
out and back again must not cost the masters their low bits. A save in between does not either (`lent_masters.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from trl_budget.parameter_slots import ParameterSlot
from trl_budget.streams import CopyEngines

CHECKSUM_BATCH_ELEMENTS = 2**18  # rows and columns whose sums are held at once


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
        for group in _by_device(slots):
            for slot, values in zip(group, checksums([slot.parameter for slot in group]), strict=True):
                self._versions[slot] = slot.parameter._version
                self._dtypes[slot] = slot.parameter.dtype
                self._checksums[slot] = values

    def changed(self, slots: Sequence[ParameterSlot]) -> list[ParameterSlot]:
        """The slots whose parameter somebody else has written since `record`, with one synchronisation per device."""
        found: list[ParameterSlot] = []
        for group in _by_device(slots):
            present = checksums([slot.parameter for slot in group])
            # `.to` because the model may have moved to another device since.
            recorded = torch.stack([self._checksums[slot].to(present.device) for slot in group])
            for slot, differs in zip(group, (present != recorded).any(1).tolist(), strict=True):
                if differs or slot.parameter._version != self._versions[slot]:
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


def _by_device(slots: Sequence[ParameterSlot]) -> list[list[ParameterSlot]]:
    groups: dict[torch.device, list[ParameterSlot]] = {}
    for slot in slots:
        groups.setdefault(slot.parameter.device, []).append(slot)
    return list(groups.values())


@torch.no_grad()
def checksums(parameters: Sequence[Tensor]) -> Tensor:
    """Three numbers over the values of each parameter: `[len(parameters), 3]`, int64, on the parameters' device.

    Wrapping sums of the bit patterns over rows and over columns, each weighted by its index so that exchanged rows,
    columns and elements show, and a sum of the values. int32 words are summed into int32, which needs no widening:
    torch widens int16 to eight bytes an element before it sums, 3 GB for the embedding of a 4B model.

    Reads each parameter three times. Three sums are queued per parameter, the rest per batch of parameters, since on
    a GPU the calls take longer than the work; temporaries stay below 10 MB, or 24 bytes per row and column of the
    largest parameter.

    Args:
        parameters: any shapes and dtypes of two or four bytes, contiguous, all on one device; read.
    """
    return torch.cat([_batch_checksums(batch) for batch in _checksum_batches(parameters)])


def _checksum_batches(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    batch: list[Tensor] = []
    length = 0
    for parameter in parameters:
        table = parameter.detach()
        if table.numel() > 0:
            table = table.reshape(table.shape[0] if table.dim() > 1 else 1, -1)
        if batch and length + sum(table.shape) > CHECKSUM_BATCH_ELEMENTS:
            yield batch
            batch, length = [], 0
        batch.append(table)
        length += sum(table.shape)
    yield batch


def _batch_checksums(tables: Sequence[Tensor]) -> Tensor:
    device = tables[0].device
    lengths = [n if table.numel() > 0 else 0 for table in tables for n in (table.shape[-1], table.shape[0])]
    stops = list(accumulate(lengths))
    starts = [0, *stops[:-1]]
    sums = torch.zeros(stops[-1] + 1, dtype=torch.int32, device=device)  # the first stays 0: sums before the first
    totals = torch.zeros(len(tables), dtype=torch.float32, device=device)
    for index, table in enumerate(tables):
        if table.numel() == 0:
            continue
        words = _words(table)
        for dim in (0, 1):
            start, length = starts[2 * index + dim], words.shape[1 - dim]
            torch.sum(words, dim=dim, dtype=torch.int32, out=sums[start + 1 : start + 1 + length])
        torch.sum(table, dim=(0, 1), dtype=torch.float32, out=totals[index])
    places = torch.arange(len(sums), device=device)
    before, at_end = torch.tensor([starts, stops], device=device)
    plain, weighted = sums.cumsum(0, dtype=torch.int64), (sums * places).cumsum(0)
    by_place = (weighted[at_end] - weighted[before]) - before * (plain[at_end] - plain[before])
    return torch.cat([by_place.view(-1, 2), totals.view(torch.int32).to(torch.int64)[:, None]], dim=1)


def _words(table: Tensor) -> Tensor:
    """The bits of a `[R, C]` table as int32, two bf16 values a word; widened by a copy where they do not pair up."""
    if table.element_size() == 4 or (table.shape[1] % 2 == 0 and table.storage_offset() % 2 == 0):
        return table.view(torch.int32)
    return table.view(torch.int16).to(torch.int32)

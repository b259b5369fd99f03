"""Plans which rows run together in one forward and backward pass: lengths, budget and ranks in, rows per pass out.

Pure Python, no tensors, deterministic: every rank computes every rank's plan from the gathered lengths and gets the
same one. Rows of a stock micro-batch stay together where that needs no further pass, because each stock micro-batch
that a pass touches costs one call of the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Passes = list[tuple[int, ...]]
RowLength = tuple[int, int]  # tokens of the prompt, tokens of the completion


@dataclass(frozen=True)
class PassCost:
    """What a pass costs on the device.

    Attributes:
        is_packed: rows lie end to end; otherwise each is as wide as the longest prompt and the longest completion of
            its pass together.
        quadratic: cost of attention for a row of `n` tokens is `quadratic * n * n`, in units of the cost that one
            token has in the layers that are linear in the length.
    """

    is_packed: bool
    quadratic: float = 0.0

    def tokens(self, lengths: Sequence[RowLength]) -> int:
        """Tokens that the pass holds on the device, padding included; an empty row counts as one."""
        if not lengths:
            return 0
        if self.is_packed:
            return sum(max(1, sum(length)) for length in lengths)
        prompts, completions = zip(*lengths, strict=True)
        return len(lengths) * (max(prompts) + max(completions))

    def of_row(self, length: RowLength) -> float:
        """Time of one row, in tokens of the linear layers."""
        tokens = max(1, sum(length))
        return tokens + self.quadratic * tokens * tokens


def plan_passes(
    lengths: Sequence[Sequence[RowLength]],
    budget: int,
    cost: PassCost,
    *,
    micro_batch_size: int,
    keeps_micro_batches_whole: bool = False,
) -> list[Passes]:
    """Distributes every rank's rows over passes.

    Args:
        lengths: each row's tokens, by rank; rows `[m * micro_batch_size, (m + 1) * micro_batch_size)` are stock
            micro-batch `m`.
        budget: tokens per pass. Only a single row, or a whole micro-batch that must not be cut, may exceed it.
        cost: how tokens and time of a pass are counted.
        micro_batch_size: rows of a stock micro-batch.
        keeps_micro_batches_whole: never cut a stock micro-batch.

    Returns:
        By rank, as many passes on each rank: row indices, ascending. Each row is in exactly one pass. A rank with
        fewer rows than passes has empty ones, in front.
    """
    planned = [_plan_rank(rows, budget, cost, micro_batch_size, keeps_micro_batches_whole) for rows in lengths]
    num_passes = max((len(passes) for passes in planned), default=0)
    return [
        _spread(rows, passes, num_passes, budget, cost, keeps_micro_batches_whole)
        for rows, passes in zip(lengths, planned, strict=True)
    ]


def _plan_rank(
    lengths: Sequence[RowLength], budget: int, cost: PassCost, micro_batch_size: int, keeps_whole: bool
) -> Passes:
    rows = range(len(lengths))
    micro_batches = [tuple(rows[start : start + micro_batch_size]) for start in range(0, len(rows), micro_batch_size)]
    if keeps_whole:
        return _fewest(micro_batches, lengths, budget, cost)
    by_row = _fewest([(row,) for row in rows], lengths, budget, cost)
    fits = [cost.tokens([lengths[row] for row in unit]) <= budget for unit in micro_batches]
    units = [
        part
        for unit, is_whole in zip(micro_batches, fits, strict=True)
        for part in ([unit] if is_whole else [(row,) for row in unit])
    ]
    by_micro_batch = _fewest(units, lengths, budget, cost)
    return by_micro_batch if len(by_micro_batch) <= len(by_row) else by_row


def _fewest(units: Sequence[tuple[int, ...]], lengths: Sequence[RowLength], budget: int, cost: PassCost) -> Passes:
    if not cost.is_packed:
        return _by_length(units, lengths, budget, cost)
    tokens = (cost.tokens([lengths[row] for row in unit]) for unit in units)
    needed = -(-sum(min(each, budget) for each in tokens) // budget)  # what exceeds the budget fills one pass only
    for num_passes in range(needed, len(units) + 1):
        passes = _largest_first(units, lengths, num_passes, budget, cost)
        if passes is not None:
            return passes
    return []


def _largest_first(
    units: Sequence[tuple[int, ...]], lengths: Sequence[RowLength], num_passes: int, budget: int, cost: PassCost
) -> Passes | None:
    """Each unit, the costliest first, to the cheapest pass with room; None if one finds no room."""
    weights = [sum(cost.of_row(lengths[row]) for row in unit) for unit in units]
    passes: list[list[int]] = [[] for _ in range(num_passes)]
    spent = [0.0] * num_passes
    for index in sorted(range(len(units)), key=lambda i: (-weights[i], i)):
        for candidate in sorted(range(num_passes), key=lambda i: (spent[i], i)):
            rows = passes[candidate]
            if not rows or cost.tokens([lengths[row] for row in (*rows, *units[index])]) <= budget:
                rows.extend(units[index])
                spent[candidate] += weights[index]
                break
        else:
            return None
    return [tuple(sorted(rows)) for rows in passes]


def _by_length(units: Sequence[tuple[int, ...]], lengths: Sequence[RowLength], budget: int, cost: PassCost) -> Passes:
    """Units of similar length together, where every row is padded to the longest of its pass."""

    def longest(unit: tuple[int, ...]) -> int:
        return max(sum(lengths[row]) for row in unit)

    passes: list[list[int]] = []
    for unit in sorted(units, key=lambda unit: (-longest(unit), unit)):
        if passes and cost.tokens([lengths[row] for row in (*passes[-1], *unit)]) <= budget:
            passes[-1].extend(unit)
        else:
            passes.append(list(unit))
    return [tuple(sorted(rows)) for rows in passes]


def _spread(
    lengths: Sequence[RowLength], passes: Passes, num_passes: int, budget: int, cost: PassCost, keeps_whole: bool
) -> Passes:
    """The same rows in `num_passes` passes, with empty ones where there are too few rows."""
    if len(passes) == num_passes:
        return passes
    if cost.is_packed and not keeps_whole and len(lengths) >= num_passes:
        rows = [(row,) for row in range(len(lengths))]
        spread = _largest_first(rows, lengths, num_passes, budget, cost)
        if spread is not None:
            return spread
    return [()] * (num_passes - len(passes)) + passes

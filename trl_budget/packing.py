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
        By rank, as many passes on each rank: row indices, ascending. Each row is in exactly one pass, and no pass is
        empty: the ranks meet in each of them, so the shortest rank gains nothing from fewer.
    """
    divisions = [_divisions(rows, budget, cost, micro_batch_size, keeps_micro_batches_whole) for rows in lengths]
    planned = [
        min((_fewest(units, rows, budget, cost) for units in of_rank), key=len)
        for rows, of_rank in zip(lengths, divisions, strict=True)
    ]
    num_passes = max((len(passes) for passes in planned), default=0)
    unit_size = micro_batch_size if keeps_micro_batches_whole else 1
    spread = [
        _spread(rows, passes, num_passes, of_rank, budget, cost, unit_size)
        for rows, passes, of_rank in zip(lengths, planned, divisions, strict=True)
    ]
    if len(spread) == 1:
        return spread
    return [_longest_first(rows, passes, cost) for rows, passes in zip(lengths, spread, strict=True)]


def _divisions(
    lengths: Sequence[RowLength], budget: int, cost: PassCost, micro_batch_size: int, keeps_whole: bool
) -> list[list[tuple[int, ...]]]:
    """What passes may be made of, the best first: micro-batches, cut where they exceed the budget, or single rows."""
    micro_batches = _units(range(len(lengths)), micro_batch_size)
    if keeps_whole:
        return [micro_batches]
    single = _units(range(len(lengths)), 1)
    fits = [cost.tokens([lengths[row] for row in unit]) <= budget for unit in micro_batches]
    cut = [
        part
        for unit, is_whole in zip(micro_batches, fits, strict=True)
        for part in ([unit] if is_whole else [(row,) for row in unit])
    ]
    return [cut, single]


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
    lengths: Sequence[RowLength],
    passes: Passes,
    num_passes: int,
    divisions: Sequence[Sequence[tuple[int, ...]]],
    budget: int,
    cost: PassCost,
    unit_size: int,
) -> Passes:
    """The same rows in `num_passes` passes, of the first units that are enough and fit."""
    if len(passes) == num_passes:
        return passes
    for units in divisions if cost.is_packed else ():
        spread = _largest_first(units, lengths, num_passes, budget, cost) if len(units) >= num_passes else None
        if spread is not None:
            return spread
    while len(passes) < num_passes:
        passes = _with_one_more(lengths, passes, cost, unit_size)
    return passes


def _longest_first(lengths: Sequence[RowLength], passes: Passes, cost: PassCost) -> Passes:
    """The ranks meet in every pass: those that take long at the same time."""
    return sorted(passes, key=lambda rows: -sum(cost.of_row(lengths[row]) for row in rows))


def _with_one_more(lengths: Sequence[RowLength], passes: Passes, cost: PassCost, unit_size: int) -> Passes:
    """The pass with the most tokens that can be cut, cut into its longer and its shorter units."""
    sizes = [cost.tokens([lengths[row] for row in rows]) if len(rows) > unit_size else -1 for rows in passes]
    largest = sizes.index(max(sizes))
    units = _units(passes[largest], unit_size)
    units.sort(key=lambda unit: (-max(sum(lengths[row]) for row in unit), unit))
    half = len(units) // 2
    parts = [tuple(sorted(row for unit in part for row in unit)) for part in (units[:half], units[half:])]
    return [*passes[:largest], *parts, *passes[largest + 1 :]]


def _units(rows: Sequence[int], unit_size: int) -> list[tuple[int, ...]]:
    """Ascending rows by stock micro-batch, or each by itself."""
    units: dict[int, list[int]] = {}
    for row in rows:
        units.setdefault(row // unit_size, []).append(row)
    return [tuple(unit) for unit in units.values()]

"""Division of rows into batches: over data ranks, by cache memory, and by pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

__all__ = [
    "PREFILL_POSITIONS",
    "RankBatches",
    "RowBytes",
    "RowSize",
    "batches_of",
    "capacity_of",
    "deal_rows",
    "plan_batches",
]

# New positions of one forward pass: bounds the memory of activations.
PREFILL_POSITIONS = 2**14
# Runs of rows of one kind in a group, where they are as long as they may be.
_RUNS = 4


RowBytes = Callable[[int, int], int]
"""Bytes of a row in a batch whose rows begin with, and may add, at most these positions."""


@dataclass(frozen=True)
class RowSize:
    """The positions that a row begins with, and those that it may add.

    continued: new positions of all copies of a row in one later pass. kind: rows of one number
    begin with the same ids, which are read once for those of a group; None: with others.
    """

    given: int
    added: int
    continued: int = 0
    kind: int | None = None

    @property
    def total(self) -> int:
        """All positions of the row."""
        return self.given + self.added


def batches_of(
    sizes: Sequence[RowSize],
    rows: Sequence[int],
    *,
    row_bytes: RowBytes,
    cache_bytes: float,
    positions: int = PREFILL_POSITIONS,
) -> list[list[int]]:
    """Cut `rows`, indices into `sizes`, into batches in their order.

    A batch has one row at least; more only if their caches fit `cache_bytes`, and their first
    positions and those of copies `positions`.
    """
    batches: list[list[int]] = []
    kinds: set[int | None] = set()
    given = added = total = continued = 0
    for row in rows:
        size = sizes[row]
        given, added = max(given, size.given), max(added, size.added)
        total, continued = total + size.given * (size.kind not in kinds), continued + size.continued
        rows_then = len(batches[-1]) + 1 if batches else 1
        is_small = max(total, continued) <= positions
        if batches and is_small and rows_then * row_bytes(given, added) <= cache_bytes:
            batches[-1].append(row)
        else:
            batches.append([row])
            kinds.clear()
            given, added, total, continued = size.given, size.added, size.given, size.continued
        if size.kind is not None:
            kinds.add(size.kind)
    return batches


def capacity_of(sizes: Sequence[RowSize]) -> int:
    """Return the slots of a cache of rows that end together before they add positions."""
    return max(size.given for size in sizes) + max(size.added for size in sizes)


def deal_rows(rows: Sequence[int], sizes: Sequence[RowSize], parts: int) -> list[list[int]]:
    """Deal rows into `parts` groups of nearly equal numbers; some are empty where rows are few.

    Neighbours of one kind stay together, in runs of a quarter of a group at most.
    """
    most = max(1, len(rows) // (_RUNS * parts))
    runs: list[list[int]] = []
    for row in rows:
        kind = sizes[row].kind
        joins = bool(runs) and kind is not None and sizes[runs[-1][0]].kind == kind
        if joins and len(runs[-1]) < most:
            runs[-1].append(row)
        else:
            runs.append([row])
    return [[row for run in runs[start::parts] for row in run] for start in range(parts)]


@dataclass(frozen=True)
class RankBatches:
    """The batches of this rank, and where expert ranks are in step, those of all data ranks.

    A batch is a list of groups of rows, one for each group in flight; groups may be empty. With
    `in_step`, all ranks have the same number of batches and groups. `most`: batches of a rank.
    """

    mine: list[list[list[int]]]
    everyone: list[list[list[list[int]]]]  # [rank][batch][group]
    most: int

    def largest(self, batch: int, group: int, size: Callable[[list[int]], int]) -> int:
        """Return the largest of a number over the data ranks' rows of one group."""
        return max(size(ranks[batch][group]) for ranks in self.everyone)


def plan_batches(
    sizes: Sequence[RowSize],
    *,
    rank: int,
    ranks: int,
    groups: int,
    in_step: bool,
    row_bytes: RowBytes,
    cache_bytes: float,
    positions: int = PREFILL_POSITIONS,
) -> RankBatches:
    """Divide all rows over the data ranks, longest first, and each rank's rows into batches.

    positions: as in `batches_of`. groups: rows in flight through the pipeline at the same time.
    With `in_step`, a row has memory for the most positions that a row of any rank adds, because it
    may have to step along.
    """
    order = sorted(range(len(sizes)), key=lambda row: (-sizes[row].total, row))
    if in_step:
        most_added = max((size.added for size in sizes), default=0)
        sizes = [replace(size, added=most_added) for size in sizes]
    everyone = []
    for own in deal_rows(order, sizes, ranks):
        found = batches_of(
            sizes,
            own,
            row_bytes=row_bytes,
            cache_bytes=cache_bytes,
            positions=positions,
        )
        split = [deal_rows(batch, sizes, min(groups, len(batch))) for batch in found]
        everyone.append(split)
    if in_step:
        most = max(len(batches) for batches in everyone)
        for batches in everyone:
            batches += [[] for _ in range(most - len(batches))]
        for batch in range(most):
            wide = max(len(batches[batch]) for batches in everyone)
            for batches in everyone:
                batches[batch] += [[] for _ in range(wide - len(batches[batch]))]
    longest = max(map(len, everyone))
    return RankBatches(everyone[rank], everyone if in_step else [everyone[rank]], longest)

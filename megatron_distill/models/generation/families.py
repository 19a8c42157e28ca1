"""Families: rows that begin with the same ids, which are computed once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil
from typing import Final

__all__ = ["PrefixFamily", "deal", "families_of", "saves_enough"]

# A shared beginning costs a pass of its own, and attention in two parts: it is used where it saves
# this part of the positions of its rows.
_LEAST_SAVED: Final = 0.2
# Pieces per rank of rows that share nothing, so that every rank has the same work.
_FINE: Final = 8

IdSequence = Sequence[int]


@dataclass(frozen=True)
class PrefixFamily:
    """Indices of rows, and the ids with which all of them begin; there may be none."""

    prefix: tuple[int, ...]
    rows: tuple[int, ...]


@dataclass
class _Node:
    """Neighbours in the order of ids that share `depth` ids, from place `first` on.

    saved: positions by the chosen (first, stop, depth) inside of it.
    """

    depth: int
    first: int
    saved: int = 0
    chosen: list[tuple[int, int, int]] = field(default_factory=list)

    def take(self, child: _Node) -> None:
        self.saved += child.saved
        self.chosen += child.chosen


def saves_enough(saved: int, whole: int) -> bool:
    """Return whether a shared beginning pays that saves so many of all positions of its rows."""
    return saved >= _LEAST_SAVED * whole


def families_of(rows: Sequence[tuple[int, ...]], *, copies: int = 1) -> list[PrefixFamily]:
    """Divide rows into families such that the most positions are saved.

    The shared beginnings of sorted rows are a tree. A node of `n` rows that share `d` ids saves
    `(n - copies) d` positions, or what its children save, if that is more. `copies`: ranks that
    compute each prefix. Every row has at least one id after the prefix of its family. Rows without
    a prefix are the last family.
    """
    order = sorted(range(len(rows)), key=lambda row: rows[row])
    before = list(accumulate((len(rows[row]) for row in order), initial=0))
    nodes: list[_Node] = []
    for stop in range(1, len(order) + 1):
        node, depth = _Node(0, stop - 1), -1
        if stop < len(order):
            depth = _shared(rows[order[stop - 1]], rows[order[stop]])
        while nodes and nodes[-1].depth > depth:
            closed = nodes.pop()
            closed.take(node)
            saved = (stop - closed.first - copies) * closed.depth
            whole = before[stop] - before[closed.first]
            if saved > closed.saved and saves_enough(saved, whole):
                closed.saved, closed.chosen = saved, [(closed.first, stop, closed.depth)]
            node = closed
        if nodes and nodes[-1].depth == depth:
            nodes[-1].take(node)
        else:
            nodes.append(_Node(depth, node.first, node.saved, node.chosen))
    chosen = sorted(nodes[0].chosen) if nodes else []
    found = [
        PrefixFamily(rows[order[first]][:depth], tuple(order[first:stop]))
        for first, stop, depth in chosen
    ]
    rest = set(range(len(rows))).difference(*(family.rows for family in found))
    return [*found, PrefixFamily((), tuple(sorted(rest)))] if rest else found


def _shared(one: IdSequence, other: IdSequence) -> int:
    """Return with how many equal ids two rows begin; each has one more at least."""
    most = min(len(one), len(other)) - 1
    if one[:most] == other[:most]:
        return most
    equal, unequal = 0, most
    while unequal - equal > 1:
        middle = (equal + unequal) // 2
        if one[equal:middle] == other[equal:middle]:
            equal = middle
        else:
            unequal = middle
    return equal


def deal(
    families: Sequence[PrefixFamily], lengths: Sequence[int], ranks: int
) -> list[list[PrefixFamily]]:
    """Deal families to ranks; the same on every rank.

    A family stays whole unless its positions exceed an equal share: each rank that has a part of it
    computes its prefix. The longest parts are dealt first, each to the rank with the least so far.
    `lengths`: positions of each row after the prefix.
    """
    if ranks == 1:
        return [list(families)]
    costs = [len(one.prefix) + sum(lengths[row] for row in one.rows) for one in families]
    share = sum(costs) / ranks
    parts: list[tuple[int, int, list[int]]] = []
    for number, (family, cost) in enumerate(zip(families, costs, strict=True)):
        count = min(len(family.rows), ceil(cost / share) if family.prefix else _FINE * ranks)
        rows = sorted(family.rows, key=lambda row: (-lengths[row], row))
        for start in range(count):
            own = rows[start::count]
            size = len(family.prefix) + sum(lengths[row] for row in own)
            parts.append((-size, number, own))
    loads = [0] * ranks
    dealt: list[dict[int, list[int]]] = [{} for _ in range(ranks)]
    for size, number, own in sorted(parts):
        rank = loads.index(min(loads))
        loads[rank] -= size
        dealt[rank].setdefault(number, []).extend(own)
    return [
        [PrefixFamily(families[number].prefix, tuple(rows)) for number, rows in sorted(one.items())]
        for one in dealt
    ]

"""Which nodes try a sum together, what each of them has found, and which of them are bad.

Each node sums with its neighbours in a ring, or a line. A bad one fails with both, and a neighbour
of it still succeeds with the next: that tells them apart. Of two nodes that fail together, and have
no other, either may be bad.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Final, NamedTuple

__all__ = [
    "BadSum",
    "NodeSums",
    "bad_sums",
    "broken_pairs",
    "is_timeout",
    "is_wait",
    "round_ends",
    "rounds",
    "sums_file",
    "untried_pairs",
]

# How a sum ends that takes too long, and one whose other side has left.
_TIMEOUT: Final = re.compile(r"tim(?:ed?|ing) ?out", re.IGNORECASE)
_LEFT: Final = re.compile(
    r"clos(?:ed|ing)|reset by|refused|broken pipe|premature|exited|retry", re.IGNORECASE
)
_TOGETHER_SECONDS: Final = 8.0  # that both sides wait for each other at least before a pair fails
_ALONE_SECONDS: Final = 20.0  # that a node's own sum takes at least before it fails
# Of the time for all sums, parts for the nodes' own, imports included; each round of pairs has one.
_OWN_PARTS: Final = 2


class BadSum(NamedTuple):
    """Why a sum or its node is bad; is_wait: it has not ended, as on a machine that is slow."""

    reason: str
    is_wait: bool


@dataclass(frozen=True)
class NodeSums:
    """The sums that one node has tried: its own under its name, and one under each neighbour's.

    begun, ended: seconds since the epoch. speeds: GB/s of a link, where they succeeded, 0 for a
    single rank. problems: where they failed and a rank told why.
    """

    node: str
    begun: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    speeds: dict[str, float] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    def failure(self, name: str) -> BadSum | None:
        """Return how the sum of this name has failed; None: it has not, or was not tried."""
        if name not in self.begun or name in self.speeds:
            return None
        reason = self.problems.get(name, "has not ended")
        # Alone there is no other side: a rank that has left is the node's own.
        waits = is_timeout(reason) if name == self.node else is_wait(reason)
        return BadSum(reason, name not in self.problems or waits)


def is_timeout(text: str) -> bool:
    """Return whether a sum with such an output has taken too long."""
    return _TIMEOUT.search(text) is not None


def is_wait(reason: str) -> bool:
    """Return whether a sum with such an error waited for its other side, or was left by it."""
    return is_timeout(reason) or _LEFT.search(reason) is not None


def sums_file(folder: Path, node: str) -> Path:
    """Return the file of a node's sums in the folder of a launch."""
    return folder / "sums" / f"{node}.json"


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Return the rounds of pairs of so many nodes; one is in at most one pair of a round.

    They are a ring where two rounds are enough for it, and else a line. Three are a ring always:
    in a line nothing would tell the middle one from the others.
    """
    even = [(place, place + 1) for place in range(0, count - 1, 2)]
    odd = [(place, place + 1) for place in range(1, count - 1, 2)]
    if count > 2 and count % 2 == 0:
        odd.append((count - 1, 0))
    last = [[(2, 0)]] if count == 3 else []
    return [one for one in (even, odd, *last) if one]


def round_ends(count: int, *, seconds: float, until: float) -> list[float]:
    """Return the end of the nodes' own sums, and that of each of so many rounds of pairs.

    The same for all nodes, so that one that waits in vain comes to the next round in time.
    """
    part = seconds / (_OWN_PARTS + count)
    return [until - part * left for left in reversed(range(count + 1))]


def bad_sums(nodes: Sequence[str], found: Mapping[str, NodeSums]) -> dict[str, BadSum]:
    """Return the bad ones of these nodes, whose order is that of the pairs.

    A node is bad if its own sum fails; or if it has no success with another node, and a failure
    with one that has. Where neither node of a pair that fails has a success, and no bad node
    explains that, both are bad: one is, and none is known to be.
    """
    bad = {}
    for node, sums in found.items():
        own = sums.failure(node)
        if own is not None and not (own.is_wait and _seconds(sums, node) < _ALONE_SECONDS):
            bad[node] = BadSum(f"the sum of its ranks: {own.reason}", own.is_wait)
    proven = {name for pair in _pairs(nodes) if _succeeds(found, *pair) for name in pair}
    failed = dict(_failures(nodes, found, without=bad))
    for node in nodes:
        own_pairs = [(pair, one) for pair, one in failed.items() if node in pair]
        if node not in proven and any(proven.intersection(pair) for pair, _ in own_pairs):
            texts = (f"its sum with {_other(pair, node)}: {one.reason}" for pair, one in own_pairs)
            bad[node] = BadSum("; ".join(texts), all(one.is_wait for _, one in own_pairs))
    explained = {*bad}
    for pair, one in failed.items():
        if not proven.intersection(pair) and not explained.intersection(pair):
            unknown = {node: f"its sum with {_other(pair, node)}: {one.reason}" for node in pair}
            bad |= {node: BadSum(text, is_wait=True) for node, text in unknown.items()}
    return bad


def broken_pairs(
    nodes: Sequence[str], found: Mapping[str, NodeSums], bad: Mapping[str, BadSum]
) -> Iterator[str]:
    """Return the failed sums of pairs in which neither node is bad."""
    for (node, other), one in _failures(nodes, found, without=bad):
        yield f"node {node}: its sum with {other}: {one.reason}"


def untried_pairs(
    nodes: Sequence[str], found: Mapping[str, NodeSums], bad: Mapping[str, BadSum]
) -> list[tuple[str, str]]:
    """Return the pairs of nodes that are not bad which have neither succeeded nor failed."""
    failed = dict(_failures(nodes, found, without=bad))
    return [
        pair
        for pair in _pairs(nodes)
        if not bad.keys() & {*pair} and pair not in failed and not _succeeds(found, *pair)
    ]


def _pairs(nodes: Sequence[str]) -> list[tuple[str, str]]:
    pairs = [pair for pairs in rounds(len(nodes)) for pair in pairs]
    return [(nodes[one], nodes[other]) for one, other in pairs]


def _other(pair: tuple[str, str], node: str) -> str:
    return pair[1] if node == pair[0] else pair[0]


def _seconds(sums: NodeSums, name: str) -> float:
    return sums.ended.get(name, inf) - sums.begun[name]


def _succeeds(found: Mapping[str, NodeSums], node: str, other: str) -> bool:
    """Return whether a side of a pair has the sum, and the other one tells of no error."""
    sides = [(found[one], name) for one, name in ((node, other), (other, node)) if one in found]
    failures = [one.failure(name) for one, name in sides]
    told = any(one is not None and not one.is_wait for one in failures)
    return not told and any(name in one.speeds for one, name in sides)


def _failures(
    nodes: Sequence[str], found: Mapping[str, NodeSums], *, without: Mapping[str, BadSum]
) -> Iterator[tuple[tuple[str, str], BadSum]]:
    """Yield the pairs that fail, and why, other than those with a node of `without`."""
    for node, other in _pairs(nodes):
        if node in without or other in without or _succeeds(found, node, other):
            continue
        failure = _failure_of_pair(found.get(node), found.get(other))
        if failure is not None:
            yield (node, other), failure


def _failure_of_pair(one: NodeSums | None, other: NodeSums | None) -> BadSum | None:
    """Return how two nodes have failed; None: one of them came too late, or not at all.

    A rank that tells of an error has failed. One that waited has if the other side waited with it.
    """
    if one is None or other is None:
        return None
    sides = ((one, other.node), (other, one.node))
    failures = [failure for mine, name in sides if (failure := mine.failure(name)) is not None]
    told = next((failure for failure in failures if not failure.is_wait), None)
    if told is not None or len(failures) < len(sides):
        return told
    # One without an end was killed with its node's check, at the end of all sums.
    end = min(mine.ended.get(name, inf) for mine, name in sides)
    began = max(mine.begun[name] for mine, name in sides)
    return failures[0] if end - began >= _TOGETHER_SECONDS else None

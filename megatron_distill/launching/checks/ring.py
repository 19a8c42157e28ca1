"""Which nodes try a sum together, what each of them has found, and which of them are bad.

The nodes stand in a ring, and each sums with both its neighbours. A bad one fails with both, and a
neighbour of it still succeeds with the next: one round of the ring tells them apart. Of two nodes
that fail together either may be the bad one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["TIMEOUT", "BadSum", "NodeSums", "bad_sums", "broken_pairs", "ring", "sums_file"]

TIMEOUT: Final = re.compile(r"tim(?:ed?|ing) ?out", re.IGNORECASE)


class BadSum(NamedTuple):
    """Why a sum or its node is bad; is_hang: it has not ended, as on a machine that is slow."""

    reason: str
    is_hang: bool


@dataclass(frozen=True)
class NodeSums:
    """The sums that one node has tried: its own under its name, and one under each neighbour's.

    begun: those that were tried. speeds: GB/s of a link, where they succeeded. problems: where they
    failed. One in neither has not ended.
    """

    node: str
    begun: list[str] = field(default_factory=list)
    speeds: dict[str, float] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    def failure(self, name: str) -> BadSum | None:
        """Return how the sum of this name has failed; None: it has not, or was not tried."""
        if name not in self.begun or name in self.speeds:
            return None
        reason = self.problems.get(name, "has not ended")
        return BadSum(reason, name not in self.problems or TIMEOUT.search(reason) is not None)


def sums_file(folder: Path, node: str) -> Path:
    """Return the file of a node's sums in the folder of a launch."""
    return folder / "sums" / f"{node}.json"


def ring(count: int) -> list[list[tuple[int, int]]]:
    """Return the rounds of pairs of neighbours; a node is in at most one pair of a round."""
    if count < 3:
        return [[(0, 1)]] if count == 2 else []
    even = [(place, place + 1) for place in range(0, count - 1, 2)]
    odd = [(place, place + 1) for place in range(1, count - 1, 2)]
    last = (count - 1, 0)
    return [even, [*odd, last]] if count % 2 == 0 else [even, odd, [last]]


def bad_sums(nodes: Sequence[str], found: Mapping[str, NodeSums]) -> dict[str, BadSum]:
    """Return the bad ones of nodes in the order of the ring.

    A node is bad if its own sum fails, or all those with neighbours that have no problem of their
    own. A node that is not in `found`, which has begun none, is neither, and no sum with it counts.
    """
    bad = {}
    for node, sums in found.items():
        own = sums.failure(node)
        if own is not None:
            bad[node] = BadSum(f"the sum of its ranks: {own.reason}", own.is_hang)
    sound = [node for node in nodes if node in found and node not in bad]
    for node in sound:
        tried = {other: _problem(found, node, other) for other in _neighbours(nodes, node)}
        counted = {other: one for other, one in tried.items() if other in sound}
        failed = [one for one in counted.values() if one is not None]
        if failed and len(failed) == len(counted):
            reason = "; ".join(one.reason for one in failed)
            bad[node] = BadSum(reason, all(one.is_hang for one in failed))
    return bad


def broken_pairs(
    nodes: Sequence[str], found: Mapping[str, NodeSums], bad: Mapping[str, BadSum]
) -> Iterator[str]:
    """Return the failed sums of pairs in which neither node is bad."""
    for pairs in ring(len(nodes)):
        for one, other in pairs:
            names = nodes[one], nodes[other]
            if all(name in found and name not in bad for name in names):
                problem = _problem(found, *names)
                if problem is not None:
                    yield f"node {names[0]}: {problem.reason}"


def _neighbours(nodes: Sequence[str], node: str) -> list[str]:
    place = nodes.index(node)
    pairs = [pair for pairs in ring(len(nodes)) for pair in pairs if place in pair]
    return [nodes[sum(pair) - place] for pair in pairs]


def _problem(found: Mapping[str, NodeSums], node: str, other: str) -> BadSum | None:
    """Return how the sum of two nodes has failed, as the first of them tells it, or the other."""
    for mine, theirs in ((node, other), (other, node)):
        failure = found[mine].failure(theirs)
        if failure is not None:
            return BadSum(f"its sum with {other}: {failure.reason}", failure.is_hang)
    return None

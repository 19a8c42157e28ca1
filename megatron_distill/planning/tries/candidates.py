"""Choices by bounds of their time, without those that cannot be the fastest of their layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush, nsmallest
from math import inf

from megatron_distill.planning.device import DeviceProfile
from megatron_distill.planning.run import Choice, PlannedRun
from megatron_distill.planning.tries.bounds import Order, least_order, least_order_of_family
from megatron_distill.planning.tries.choices import Tries
from megatron_distill.runtime.layout import Layout

__all__ = ["Candidate", "Candidates"]


@dataclass(frozen=True)
class Candidate:
    """A choice of the tries with a number, in their order.

    more: those with more recomputation that are made already; others: those that are not.
    """

    number: int
    choice: Choice
    more: tuple[Choice, ...]
    others: Iterator[Choice]


class Candidates:
    """Of each of the tries the first choice that fits, the one with the lowest bound first.

    Left out is what must come behind the best of its layout, or behind those of `most` layouts.
    """

    def __init__(
        self, run: PlannedRun, device: DeviceProfile, tries: Iterable[Tries], *, most: int | None
    ) -> None:
        self._run, self._device, self._most = run, device, most
        self._best: dict[Layout, Order] = {}
        self._enough: Order = (inf, inf)
        self._waiting: list[tuple[Order, int, Candidate]] = []
        families: dict[object, list[tuple[int, Tries]]] = {}
        for number, one in enumerate(tries):
            families.setdefault(one.family, []).append((number, one))
        # Their choices are made when no other one has a lower bound.
        self._families = [
            (least_order_of_family(run, members[0][1].first, device), members[0][0], members)
            for members in families.values()
        ]
        self._families.sort(reverse=True)

    def next(self) -> Candidate | None:
        """Return the candidate with the lowest bound, None where no other one can be fast."""
        while True:
            self._open_families()
            if not self._waiting:
                return None
            least, _, found = heappop(self._waiting)
            if least > self._enough:
                return None
            if self._may_be_best(found.choice.layout, least):
                return found

    def does_not_fit(self, one: Candidate) -> None:
        """Let the choices with more recomputation follow in place of one that does not fit."""
        more = (*one.more, *one.others)
        if more:
            # That of all layers has other stages, so that it may take less time than that of some.
            least = min(least_order(self._run, choice, self._device) for choice in more)
            self._add(least, Candidate(one.number, more[0], more[1:], one.others))

    def fits(self, one: Candidate, order: Order) -> None:
        """Leave out those that come behind one that fits; `order`: of its time."""
        layout = one.choice.layout
        self._best[layout] = min(self._best.get(layout, order), order)
        if self._most is not None and len(self._best) >= self._most:
            self._enough = nsmallest(self._most, self._best.values())[-1]

    def _may_be_best(self, layout: Layout, least: Order) -> bool:
        return least <= min(self._enough, self._best.get(layout, self._enough))

    def _add(self, least: Order, one: Candidate) -> None:
        heappush(self._waiting, (least, one.number, one))

    def _open_families(self) -> None:
        """Make the choices of families that may have the lowest bound of all."""
        while self._families:
            least, _, members = self._families[-1]
            if least > self._enough or (self._waiting and self._waiting[0][0] < least):
                return
            self._families.pop()
            for number, tries in members:
                if self._may_be_best(tries.layout, least):
                    first = Candidate(number, tries.first, (), tries.others)
                    self._add(least_order(self._run, tries.first, self._device), first)

"""Routes of answers over NCCL's rules: a communicator per pair of ranks, made in the first message.

gloo groups of two ranks stand for NCCL's, which needs GPUs. Each is made by both of its ranks, and
waits for the second one, as NCCL's does.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.runtime.bridge import Bridge
from megatron_distill.runtime.roles import Roles
from megatron_distill.train.teachers.answer_ways import (
    NcclWay,
    SlotPlace,
    connect_routes,
    private_slots,
)
from tests.distributed.pool import Pool
from tests.support.mapped_answers import crossing_plan

SECONDS = 30.0


class PairGroups:
    """Messages between two ranks over a group of the two, made in their first one."""

    def __init__(self, rank: int, store: dist.Store) -> None:
        self._rank = rank
        self._store = store
        self._groups: dict[tuple[int, int], Any] = {}
        self.aborted = 0

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The pairs of ranks whose group exists, in the order of their making."""
        return list(self._groups)

    def rank(self) -> int:
        """See `dist.ProcessGroup`."""
        return self._rank

    def send(self, tensors: list[Tensor], to: int, tag: int) -> dist.Work:
        """See `dist.ProcessGroup`."""
        return cast(dist.Work, self._with(to).send(tensors, int(to > self._rank), tag))

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        """See `dist.ProcessGroup`."""
        return cast(dist.Work, self._with(source).recv(tensors, int(source > self._rank), tag))

    def abort(self) -> None:
        """See `dist.ProcessGroup`."""
        self.aborted += 1

    def _with(self, peer: int) -> Any:
        low, high = pair = (min(self._rank, peer), max(self._rank, peer))
        if pair not in self._groups:
            place = dist.PrefixStore(f"pair/{low}/{high}", self._store)
            own = int(self._rank == high)
            limit = timedelta(seconds=SECONDS)
            self._groups[pair] = dist.ProcessGroupGloo(place, own, 2, timeout=limit)
        return self._groups[pair]


def exchange(rank: int, world: int) -> tuple[Sequence[tuple[int, int]], ...]:
    """Connect, then move the units of a round; returns the pairs after either."""
    assert dist.group.WORLD is not None
    store, plan = dist.distributed_c10d._get_default_store(), crossing_plan()
    bridge = Bridge(
        rank,
        Roles(world, (("teacher", 2),)),
        store,
        dist.group.WORLD,
        lambda _: nullcontext(),
        SECONDS,
    )
    pairs = PairGroups(rank, store)
    way = NcclWay(cast(dist.ProcessGroup, pairs), torch.device("cpu"))
    connect_routes(plan, way, bridge)
    connected = pairs.pairs
    places = dict.fromkeys(range(len(plan.columns)), torch.device("cpu"))
    slots = () if bridge.is_teacher else private_slots(plan, rank, places)
    for unit in range(plan.units.micro_batches):
        if bridge.is_teacher:
            columns = {
                number: torch.full((4, 1, 3), 10.0 * unit + number) for number in range(len(places))
            }
            for destination, parts in plan.sent(unit, rank).items():
                for sending in way.send(columns, parts, SlotPlace(destination, 0, unit)):
                    sending.wait()
        else:
            for source, parts in plan.received(unit, rank).items():
                way.receive(slots[0][unit], parts, source, SlotPlace(rank, 0, unit))
            for number, tensor in slots[0][unit].items():
                assert bool((tensor == 10.0 * unit + number).all()), (unit, number)
    return connected, pairs.pairs


@pytest.mark.slow
def test_every_route_is_made_before_the_first_round(pool: Pool) -> None:
    found = pool.run(4, exchange)
    of_rank = {0: [(0, 2), (0, 3)], 1: [(1, 2), (1, 3)], 2: [(0, 2), (1, 2)], 3: [(0, 3), (1, 3)]}
    for rank, (connected, used) in enumerate(found):
        assert connected == used == of_rank[rank]

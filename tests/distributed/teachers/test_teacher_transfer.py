"""Rows that move between layouts over gloo: each rank has the rows of its own layout."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_distill.train.teachers.transfer import Movement, transfer
from megatron_distill.train.teachers.units import Grid, Holding, messages
from tests.distributed.pool import Pool

LENGTH = 16


def rows_of(unit: int, holding: Holding) -> torch.Tensor:
    """Values [rows, 3] that name unit and position."""
    places = torch.cat([torch.arange(start, stop) for start, stop in holding.intervals])
    return (1000.0 * unit + places)[:, None] + torch.tensor([0.0, 0.25, 0.5])


def move_units(rank: int, world: int, producer: Grid, consumer: Grid) -> bool:
    """Move three units at once, twice into the same buffers."""
    assert dist.group.WORLD is not None
    expected: list[torch.Tensor] = []
    movements: list[Movement] = []
    for unit in range(3):
        holders = producer.holdings(LENGTH, replica=unit % producer.replicas)
        needs = consumer.holdings(LENGTH, replica=unit % consumer.replicas)
        sent = [rows_of(unit, one) for one in holders if one.rank == rank]
        wanted = [rows_of(unit, one) for one in needs if one.rank == rank]
        received = [torch.full_like(rows, torch.nan) for rows in wanted]
        expected += wanted
        movement = Movement(
            messages(holders, needs), *(x[0] if x else None for x in (sent, received))
        )
        movements.append(movement)
    for _ in range(2):
        transfer(movements, group=dist.group.WORLD, first_tag=7)
    found = [movement.received for movement in movements if movement.received is not None]
    return all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("producer", "consumer"),
    [
        (Grid(2, 1, 2, 1, True, (0, 1, 2, 3)), Grid(1, 2, 1, 2, False, (0, 1, 2, 3))),
        (Grid(1, 1, 1, 3, False, (1, 2, 3)), Grid(1, 1, 1, 1, False, (0,))),
        (Grid(2, 1, 1, 1, False, (2, 3)), Grid(1, 1, 1, 2, False, (0, 1))),
    ],
)
def test_units_arrive_in_the_other_layout(pool: Pool, producer: Grid, consumer: Grid) -> None:
    assert all(pool.run(4, move_units, producer, consumer))

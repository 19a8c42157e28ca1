"""Units, queries and keys of a teacher in another layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.train.teachers.transfer import Movement, transfer
from megatron_distill.train.teachers.units import Grid, Holding, messages
from tests.distributed.megatron_world import megatron_groups
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


HEADS_LENGTH, HEADS = 16, 4
Sizes = Mapping[str, int | bool]


def heads_of(
    grid: Grid, rank: int, unit: int, stage: int, first: int, count: int, *, is_whole: bool
) -> Tensor:
    """Values [s, 1, n, 1] that name unit, position and head, of a rank's positions."""
    holdings = replace(grid, sequence=False).holdings(
        HEADS_LENGTH, replica=unit % grid.replicas, stage=stage, is_whole=is_whole
    )
    (own,) = [one for one in holdings if one.rank == rank]
    places = torch.cat([torch.arange(*pair) for pair in own.intervals])
    values = 1000 * unit + HEADS * places[:, None] + torch.arange(first, first + count)
    return values.float()[:, None, :, None]


def move_heads(rank: int, world: int, teacher: Sizes, student: Sizes) -> int:
    """Move the queries and keys of four units at once; returns how many arrived on this rank."""
    with megatron_groups(**student) as groups:
        from megatron_distill.runtime.groups import Layout, create_second_groups
        from megatron_distill.train.teachers.attention_heads import attention_parts, joined_parts
        from megatron_distill.train.teachers.layout_ways import StageTensor, Ways
        from megatron_distill.train.teachers.transfer import Movement, transfer

        own_groups = create_second_groups(Layout(**teacher), timeout_minutes=5)
        assert dist.group.WORLD is not None
        ways = Ways(own_groups, groups, dist.group.WORLD)
        parts, copies = attention_parts(own_groups.tensor.size(), groups.tensor.size())
        heads = HEADS // own_groups.tensor.size()
        movements, found, expected = [], [], {}
        for unit in range(4):
            for kind in ("query", "key"):
                for part in range(parts):
                    output = StageTensor(1, 0, groups.pipeline.size() - 1, kind, part)
                    sent = received = None
                    if ways.holds(output, unit):
                        first, whole = heads * own_groups.tensor.rank(), kind == "key"
                        sent = heads_of(ways.teacher, rank, unit, 0, first, heads, is_whole=whole)
                    if ways.needs(output, unit):
                        first = groups.tensor.rank() * parts // copies * heads
                        wanted = heads_of(
                            ways.student, rank, unit, -1, first, heads * parts,
                            is_whole=kind == "key",
                        )  # fmt: skip
                        received = torch.full_like(wanted[:, :, :heads].contiguous(), torch.nan)
                        expected[kind, unit] = wanted
                        found.append(((kind, unit), received))
                    movements.append(
                        Movement(ways.messages(output, unit, HEADS_LENGTH), sent, received)
                    )
        transfer(movements, group=dist.group.WORLD)
        joined = joined_parts(found)
        assert joined.keys() == expected.keys()
        assert all(torch.equal(joined[name], wanted) for name, wanted in expected.items())
        return len(joined)


@pytest.mark.parametrize(
    ("teacher", "student", "arrived"),
    [
        pytest.param({"tensor": 4}, {"tensor": 2, "sequence": True}, 4, id="t4 to t2 d2"),
        pytest.param({"tensor": 1, "context": 2}, {"tensor": 4}, 8, id="c2 d2 to t4"),
        pytest.param(
            {"tensor": 2, "sequence": True}, {"pipeline": 2, "context": 2}, 8, id="t2 d2 to p2 c2"
        ),
    ],
)
def test_queries_and_keys_arrive_in_the_other_layout(
    pool: Pool, teacher: Sizes, student: Sizes, arrived: int
) -> None:
    found = pool.run(4, move_heads, teacher, student)
    stages = student.get("pipeline", 1)
    assert found == [0] * (4 - 4 // stages) + [arrived] * (4 // stages)

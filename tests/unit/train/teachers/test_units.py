"""Units and messages: each unit runs once, and each needed row arrives once from a holder."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_distill.data.collation import BatchLayout
from megatron_distill.runtime.batch import zigzag_index
from megatron_distill.train.teachers.units import Grid, Holding, Units, messages, moved_rows

SIZES = st.sampled_from([1, 2, 3, 4])
LENGTH = 2 * 4 * 3 * 4 * 3


@st.composite
def grids(draw: st.DrawFn, *, first_rank: int = 0) -> Grid:
    tensor, context, pipeline, replicas = (draw(SIZES) for _ in range(4))
    ranks = range(first_rank, first_rank + tensor * context * pipeline * replicas)
    return Grid(tensor, context, pipeline, replicas, draw(st.booleans()), tuple(ranks))


def positions(holding: Holding) -> list[int]:
    return [place for start, stop in holding.intervals for place in range(start, stop)]


@settings(max_examples=60)
@given(producer=grids(), consumer=st.one_of(grids(), grids(first_rank=300)), data=st.data())
def test_each_needed_row_arrives_once_from_a_rank_that_holds_it(
    producer: Grid, consumer: Grid, data: st.DataObject
) -> None:
    holders = producer.holdings(LENGTH, replica=data.draw(st.integers(0, producer.replicas - 1)))
    needs = consumer.holdings(LENGTH, replica=data.draw(st.integers(0, consumer.replicas - 1)))
    held = {one.rank: positions(one) for one in holders}
    received: dict[int, list[int | None]] = {one.rank: [None] * one.rows for one in needs}
    sent = Counter[tuple[int, int]]()
    for message in messages(holders, needs):
        for source, place in zip(
            held[message.source][message.sent],
            range(message.received.start, message.received.stop),
            strict=True,
        ):
            assert received[message.destination][place] is None
            received[message.destination][place] = source
        if not message.is_local:
            sent[message.source, message.destination] += message.rows
    for need in needs:
        assert received[need.rank] == positions(need)
        # The rows that a rank has itself do not move.
        own = set(held.get(need.rank, ())) & set(positions(need))
        arrived = sum(rows for (_, to), rows in sent.items() if to == need.rank)
        assert arrived == need.rows - len(own)
    if not producer.sequence and not set(held) & {need.rank for need in needs}:
        # Equal holders send equal numbers of rows, up to one for each interval.
        for need in needs:
            for first in range(0, len(holders), producer.tensor):
                group = holders[first : first + producer.tensor]
                counts = [sent[one.rank, need.rank] for one in group]
                assert max(counts) - min(counts) <= 2 * 2 * producer.context


def test_rows_that_move_are_counted() -> None:
    teacher = Grid(2, 1, 1, 1, False, (0, 1))
    student = Grid(1, 1, 1, 2, False, (0, 1))
    for replica in (0, 1):
        found = messages(teacher.holdings(8, replica=0), student.holdings(8, replica=replica))
        assert moved_rows(found) == 0  # every tensor rank has all rows
    split = Grid(2, 1, 1, 1, True, (0, 1))
    found = messages(split.holdings(8, replica=0), student.holdings(8, replica=1))
    assert moved_rows(found) == 4
    assert [message.source for message in found] == [0, 1]


@given(context=SIZES, tensor=SIZES)
def test_a_rank_holds_the_zigzag_pieces_in_their_local_order(context: int, tensor: int) -> None:
    grid = Grid(tensor, context, 1, 1, True, tuple(range(tensor * context)))
    for rank, holding in enumerate(grid.holdings(LENGTH, replica=0)):
        whole = zigzag_index(LENGTH, rank=rank // tensor, size=context)
        own = torch.tensor(positions(holding))
        assert torch.equal(own, whole.chunk(tensor)[rank % tensor])


@given(micro_batches=st.integers(1, 9), student=SIZES, teacher=st.integers(1, 7), data=st.data())
def test_each_unit_runs_once_and_rounds_are_even(
    micro_batches: int, student: int, teacher: int, data: st.DataObject
) -> None:
    units = Units(micro_batches, student, teacher)
    layouts = [BatchLayout(6 * micro_batches * student, 6, r, student) for r in range(student)]
    for micro_batch in range(micro_batches):
        for replica, layout in enumerate(layouts):
            unit = units.of_student(micro_batch, replica)
            assert layout.rows(micro_batch) == slice(6 * unit, 6 * unit + 6)
    start = data.draw(st.integers(0, micro_batches - 1))
    wave = range(start, min(start + units.wave, micro_batches))
    per_replica = [units.of_teacher(wave, replica) for replica in range(teacher)]
    assert sorted(unit for own in per_replica for unit in own) == list(units.of_wave(wave))
    counts = [len(own) for own in per_replica]
    assert max(counts) - min(counts) <= 1
    assert len(wave) < units.wave or min(counts) >= 1
    evened = [units.evened(wave, replica) for replica in range(teacher)]
    assert {len(own) for own in evened} == {max(counts)}
    for own, padded in zip(per_replica, evened, strict=True):
        assert padded[: len(own)] == own

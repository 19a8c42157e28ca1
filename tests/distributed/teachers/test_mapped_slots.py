"""Answers that senders write into slots of their receivers arrive whole, however fast they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.pool import Pool
from tests.support.mapped_answers import (
    EVENTS,
    ROUNDS,
    SECONDS,
    WORLD,
    crossing_plan,
    exchange,
    exchange_on_streams,
)


def tensors_read(rank: int) -> int:
    plan = crossing_plan()
    return ROUNDS * plan.units.micro_batches * len(plan.slot_rows(rank))


@pytest.mark.slow
@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_a_slow_reader_keeps_its_rows(pool: Pool, steps_ahead: int) -> None:
    # Its neighbour, which reads at once, has asked for the next round long before.
    found = pool.run(WORLD, exchange, steps_ahead, torch.device("cpu"), timeout=SECONDS)
    for rank in crossing_plan().student.ranks:
        assert found[rank] == [True] * tensors_read(rank)


@pytest.mark.parametrize("slow", ["reads", "copies"])
@pytest.mark.parametrize(
    ("steps_ahead", "blind"), [(0, False), (1, False), (0, True)], ids=["0", "1", "blind"]
)
def test_events_order_copies_and_reads_of_two_processes(
    pool: Pool, tmp_path: Path, steps_ahead: int, slow: str, blind: bool
) -> None:
    torch.zeros(2 * EVENTS * WORLD, dtype=torch.int64).numpy().tofile(tmp_path / "events")
    given = (steps_ahead, tmp_path, slow, blind)
    found = pool.run(WORLD, exchange_on_streams, *given, timeout=SECONDS)
    for rank in crossing_plan().student.ranks:
        assert len(found[rank]) == tensors_read(rank)
        assert all(found[rank]) != blind, found[rank]

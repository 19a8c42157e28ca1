"""Answers that senders write into slots of their receivers arrive whole, however fast they are."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_distill.config import TransferConfig
from megatron_distill.errors import ConfigError
from megatron_distill.runtime.bridge import memory_key
from megatron_distill.runtime.collectives import any_rank, together
from megatron_distill.runtime.launch import Device
from megatron_distill.train.assemble.answers.way import student_backend, teacher_way
from tests.distributed.pool import Pool
from tests.support.mapped_answers import (
    EVENTS,
    ROUNDS,
    SECONDS,
    WORLD,
    bridge_of,
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


def chosen_way(rank: int, world: int, apart: int | None) -> tuple[str, str]:
    """The way that `auto` is on each rank, and the error of `ipc` on the teacher's.

    apart: a rank in a container of its own on this machine.
    """
    bridge, plan = bridge_of(rank, world), crossing_plan()
    cpu = torch.device("cpu")
    device = Device("cpu", "gloo", cpu, bridge=bridge)
    if rank == apart:
        bridge.store.set(memory_key(rank), "another container")
    dist.barrier()
    if not bridge.is_teacher:
        found = student_backend(TransferConfig(), plan, device)
        dist.barrier()
        return found, ""
    with together():
        pass
    any_rank(False, device=cpu)  # in a run the student's ranks are a world of their own
    dist.barrier()
    found = bridge.published("backend/teacher")
    if apart is None:
        return found, ""
    with ExitStack() as resources, pytest.raises(ConfigError) as caught:
        teacher_way(TransferConfig(backend="ipc"), plan, device, resources)
    return found, str(caught.value)


@pytest.mark.parametrize(("apart", "way"), [(None, "ipc"), (0, "gloo")])
def test_auto_is_shared_memory_where_all_ranks_have_the_same(
    pool: Pool, apart: int | None, way: str
) -> None:
    found = pool.run(WORLD, chosen_way, apart, timeout=SECONDS)
    assert [one for one, _ in found] == [way] * WORLD
    if apart is not None:
        for rank in crossing_plan().teacher.ranks:
            assert f"teacher.transfer.backend = 'ipc': teacher.{rank - 2} and" in found[rank][1]
            assert "student.0 are on" in found[rank][1]
            assert "two containers. Set it to gloo" in found[rank][1]

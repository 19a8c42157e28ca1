"""Answers by CUDA IPC between processes on one GPU, and on two."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.support.mapped_answers import ROUNDS, SECONDS, WORLD, crossing_plan, exchange

pytestmark = pytest.mark.gpu

# The GPU of each rank: two of the student, two of the teacher.
PLACES = {"one GPU": (0, 0, 0, 0), "two GPUs": (0, 0, 1, 1)}


def take_part(rank: int, folder: Path, gpus: tuple[int, ...], steps_ahead: int) -> None:
    """One process; it raises where rows are not those that were sent."""
    torch.cuda.set_device(gpus[rank])
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=WORLD)
    found = exchange(rank, WORLD, steps_ahead, torch.device("cuda", gpus[rank]))
    plan = crossing_plan()
    if rank in plan.student.ranks:
        read = ROUNDS * plan.units.micro_batches * len(plan.slot_rows(rank))
        assert found == [True] * read, found
    dist.barrier()  # no process frees memory that another one has open
    dist.destroy_process_group()


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("place", PLACES)
def test_rows_written_from_another_process_arrive(
    tmp_path: Path, place: str, steps_ahead: int
) -> None:
    gpus = PLACES[place]
    if torch.cuda.device_count() <= max(gpus):
        pytest.skip(f"needs {max(gpus) + 1} GPUs, and torch sees {torch.cuda.device_count()}")
    running = mp.spawn(take_part, (tmp_path, gpus, steps_ahead), nprocs=WORLD, join=False)
    try:
        assert running.join(timeout=4 * SECONDS), "a process waits for the others"
    finally:
        for process in running.processes:
            process.kill()

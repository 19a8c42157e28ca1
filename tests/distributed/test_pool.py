"""The pool itself: results by rank, readable failures, crashes and hangs that cost one call."""

import os
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.distributed.pool import Pool


def summed_rank(rank: int, world_size: int, offset: int) -> tuple[int, int, float]:
    total = torch.tensor([float(rank + offset)])
    dist.all_reduce(total)
    return rank, dist.get_world_size(), total.item()


def process_id(rank: int, world_size: int) -> int:
    return os.getpid()


def fail_on_last_rank(rank: int, world_size: int) -> None:
    if rank == world_size - 1:
        raise ValueError("value seven is odd")
    dist.barrier()


def hang_on_first_rank(rank: int, world_size: int) -> None:
    if rank == 0:
        time.sleep(600)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pool]:
    """Two workers of our own: the failures below restart them, not the session's pool."""
    workers = Pool(2)
    yield workers
    workers.close()


@pytest.mark.parametrize("world_size", [1, 4, 3, 2])
def test_results_come_by_rank_from_a_group_of_the_asked_size(pool: Pool, world_size: int) -> None:
    total = float(sum(range(10, 10 + world_size)))
    expected = [(rank, world_size, total) for rank in range(world_size)]
    assert pool.run(world_size, summed_rank, 10) == expected


def test_a_rank_without_a_collective_waits_until_all_have_connected(pool: Pool) -> None:
    for _ in range(10):
        assert len(pool.run(4, process_id)) == 4


def test_failure_shows_the_traceback_of_the_rank_that_raised(pair: Pool) -> None:
    with pytest.raises(AssertionError, match="rank 1: Traceback(.|\n)*value seven is odd"):
        pair.run(2, fail_on_last_rank)
    assert len(pair.run(2, summed_rank, 0)) == 2


@pytest.mark.slow
def test_hang_shows_where_it_hangs_and_the_next_call_works(pair: Pool) -> None:
    with pytest.raises(AssertionError, match="no answer in time(.|\n)*hang_on_first_rank"):
        pair.run(2, hang_on_first_rank, timeout=10.0)  # time enough to be asked, on a busy machine
    assert len(pair.run(2, summed_rank, 0)) == 2

"""Ranks that fail together, and sums and votes over groups."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_distill.errors import CheckpointError, DataError, MegatronDistillError
from megatron_distill.runtime.collectives import (
    agree,
    any_rank,
    highest,
    on_first_rank,
    sum_over,
    together,
)
from tests.distributed.pool import Pool


def _fail_on(rank: int, world: int, failing: dict[int, str]) -> tuple[str, str] | None:
    try:
        with together():
            if rank in failing:
                raise DataError(failing[rank]) if rank % 2 == 0 else CheckpointError(failing[rank])
    except MegatronDistillError as error:
        dist.barrier()  # still in step with each other
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize(
    ("failing", "expected"),
    [
        ({}, None),
        ({0: "no file"}, ("DataError", "no file")),
        ({3: "torn"}, ("CheckpointError", "torn")),
        ({1: "first", 2: "second"}, ("CheckpointError", "first")),
    ],
)
def test_all_ranks_leave_with_the_error_of_the_lowest_failing_rank(
    pool: Pool, failing: dict[int, str], expected: tuple[str, str] | None
) -> None:
    assert pool.run(4, _fail_on, failing) == [expected] * 4


def _agree_keeps_the_cause(rank: int, world: int) -> bool:
    own = DataError("here") if rank == 1 else None
    try:
        agree(own)
    except DataError as error:
        return error.__cause__ is own
    return False


def test_the_failing_rank_keeps_its_traceback(pool: Pool) -> None:
    assert pool.run(2, _agree_keeps_the_cause)[1]


def _votes(rank: int, world: int, yes: int) -> bool:
    return any_rank(rank == yes, device=torch.device("cpu"))


def test_one_vote_is_enough_and_none_is_not(pool: Pool) -> None:
    assert pool.run(4, _votes, 2) == [True] * 4
    assert pool.run(4, _votes, -1) == [False] * 4


def _highest(rank: int, world: int) -> tuple[int, ...]:
    return highest(rank, 2**40 - rank, device=torch.device("cpu"))


def test_the_highest_of_each_value_may_come_from_another_rank(pool: Pool) -> None:
    assert pool.run(4, _highest) == [(3, 2**40)] * 4


def _sum(rank: int, world: int) -> tuple[float, float]:
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    value = torch.tensor([float(10**rank)])
    total = sum_over(value, rows[rank // 2], columns[rank % 2])
    return total.item(), value.item()


def test_a_sum_over_two_groups_is_over_their_product_and_leaves_its_input(pool: Pool) -> None:
    assert pool.run(4, _sum) == [(1111.0, float(10**rank)) for rank in range(4)]


CPU = torch.device("cpu")


def _long_work(rank: int, world: int, seconds: float) -> str | None:
    group = dist.new_group(timeout=timedelta(seconds=3))

    def work() -> str:
        time.sleep(seconds)
        return f"done by {rank}"

    return on_first_rank(work, device=CPU, group=group, beat_seconds=0.1)


@pytest.mark.slow
def test_the_first_rank_works_longer_than_a_collective_may_wait(pool: Pool) -> None:
    assert pool.run(4, _long_work, 4.0) == ["done by 0", None, None, None]


def _failing_work(rank: int, world: int) -> str | None:
    def work() -> None:
        raise DataError("row 7 is broken")

    try:
        on_first_rank(work, device=CPU)
    except DataError as error:
        dist.barrier()  # still in step with each other
        return str(error)
    return None


def test_an_error_of_the_first_rank_s_work_is_raised_on_all(pool: Pool) -> None:
    assert pool.run(4, _failing_work) == ["row 7 is broken"] * 4

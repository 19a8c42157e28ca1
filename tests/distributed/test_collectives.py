"""Messages of ranks: votes, errors, sums, and rows that others have read."""

from __future__ import annotations

import time
from datetime import timedelta
from unittest.mock import patch

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
    # More than a process stands on a busy machine.
    group = dist.new_group(timeout=timedelta(seconds=8))

    def work() -> str:
        time.sleep(seconds)
        return f"done by {rank}"

    return on_first_rank(work, device=CPU, group=group, beat_seconds=0.1)


@pytest.mark.slow
def test_the_first_rank_works_longer_than_a_collective_may_wait(pool: Pool) -> None:
    assert pool.run(4, _long_work, 9.0) == ["done by 0", None, None, None]


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


HALF = 3


def filled(rank: int, world: int, through_host: bool) -> list[float]:
    """A tensor's values on this rank; ranks 0 and 1 have read a half each, the others need all."""
    from megatron_distill.train.checkpoint import copies
    from megatron_distill.train.checkpoint.shards import Shard

    group = dist.group.WORLD
    assert group is not None
    first = HALF * rank
    shard = Shard("norm", torch.arange(first, first + HALF).float(), (6,), (0,), (6,), first)
    if rank > 1:
        shard = Shard("norm", torch.zeros(2 * HALF), (6,), (0,), (6,), copied_in=group)
    with patch.object(copies, "_needs_host", lambda *_: through_host):
        copies.fill_copies([shard], group)
    return shard.data.tolist()


@pytest.mark.parametrize("through_host", [False, True])
def test_ranks_get_rows_that_several_others_have_read(pool: Pool, through_host: bool) -> None:
    whole = [float(value) for value in range(2 * HALF)]
    assert pool.run(4, filled, through_host) == [whole[:HALF], whole[HALF:], whole, whole]


def choices(rank: int, world: int) -> tuple[bool, bool]:
    """Whether values of another device, and those of the host, are sent by the host over gloo."""
    from megatron_distill.train.checkpoint.copies import _needs_host

    group = dist.group.WORLD
    assert group is not None
    assert dist.get_backend(group) == "gloo"
    device, host = torch.empty(1, device="meta"), torch.empty(1)
    return _needs_host(device, group), _needs_host(host, group)


def test_gloo_is_given_no_memory_of_a_device(pool: Pool) -> None:
    assert pool.run(2, choices) == [(True, False)] * 2

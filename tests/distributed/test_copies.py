"""Values of a checkpoint that one rank has read and another needs: directly, or by the host."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.distributed.pool import Pool

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

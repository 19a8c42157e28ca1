"""Signs of life of one rank, as another one counts them."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from megatron_distill.runtime.heartbeats import (
    SignsOfOne,
    give_sign,
    living,
    take_leave,
    without_signs,
)


def test_looks_without_a_new_sign_are_counted_from_the_first_sign_to_the_leave() -> None:
    store = dist.HashStore()
    signs = SignsOfOne(store, 3)
    assert [signs.silent_looks() for _ in range(2)] == [0, 0]  # it has not begun
    give_sign(store, 3)
    assert [signs.silent_looks() for _ in range(3)] == [0, 1, 2]
    give_sign(store, 3)
    assert [signs.silent_looks() for _ in range(2)] == [0, 1]
    take_leave(store, 3)
    assert [signs.silent_looks() for _ in range(2)] == [0, 0]


def test_ranks_that_give_a_sign_are_told_from_a_lost_one(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    for rank in range(4):
        give_sign(store, rank)
    monkeypatch.setattr(time, "sleep", lambda _: [give_sign(store, rank) for rank in (0, 3)])
    assert living(store, [1, 3], seconds=0.0) == [3]
    assert living(store, [0, 3], seconds=60.0) == [0, 3]


def test_a_rank_that_writes_is_not_taken_for_a_silent_one() -> None:
    store = dist.HashStore()
    signs = SignsOfOne(store, 1)
    give_sign(store, 1)
    assert [signs.silent_looks() for _ in range(2)] == [0, 1]
    with without_signs(store, 1):
        assert [signs.silent_looks() for _ in range(3)] == [0, 0, 0]
    assert [signs.silent_looks() for _ in range(2)] == [1, 2]

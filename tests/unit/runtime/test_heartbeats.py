"""Signs of life of one rank, as another one counts them."""

from __future__ import annotations

import torch.distributed as dist

from megatron_distill.runtime.heartbeats import SignsOfOne, give_sign, take_leave


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

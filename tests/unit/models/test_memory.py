"""Memory of generation: the share of a GPU for the cache, and the temporaries of a draw."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_distill.models.generation import Sampling, memory
from megatron_distill.models.generation.draw import draw
from megatron_distill.models.generation.memory import CACHE_GIB, draw_bytes, free_cache_gib
from megatron_distill.ops import VocabShard
from tests.support.peaks import least_peak

GIB = 2**30


@pytest.fixture(scope="module")
def one_rank() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_cpu_has_a_fixed_cache_and_a_key_wins() -> None:
    assert free_cache_gib(None, torch.device("cpu")) == CACHE_GIB == 4.0
    for device in ("cpu", "cuda"):
        assert free_cache_gib(2.5, torch.device(device)) == 2.5


@pytest.mark.parametrize("other", [10.0, 90.0])
def test_a_gpu_gives_half_of_what_is_free_on_the_fullest(
    monkeypatch: pytest.MonkeyPatch, other: float
) -> None:
    """Free are 50 GiB, and 6 that the allocator keeps; `other` of another rank."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (50 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 20 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 14 * GIB)

    def highest(value: int, **_: Any) -> tuple[int]:
        return (max(value, -int(other * GIB)),)

    monkeypatch.setattr(memory, "highest", highest)
    assert free_cache_gib(None, torch.device("cuda")) == min(56.0, other) / 2


@pytest.mark.parametrize(
    "cuts",
    [
        {"temperature": 0.0},
        pytest.param({"temperature": 1.0}, marks=pytest.mark.slow),
        pytest.param({"temperature": 0.7}, marks=pytest.mark.slow),
        pytest.param({"min_p": 0.1}, marks=pytest.mark.slow),
        pytest.param({"top_k": 40}, marks=pytest.mark.slow),
        pytest.param({"top_p": 0.9}, marks=pytest.mark.slow),
        {"top_k": 40, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=str,
)
def test_the_memory_of_a_draw_is_counted(one_rank: dist.ProcessGroup, cuts: dict[str, Any]) -> None:
    sampling = Sampling(**{"temperature": 0.7, **cuts})
    rows, columns = 4, 50_000
    logits = torch.randn(rows, columns)
    shard, keys = VocabShard(columns, 0, columns), torch.arange(rows)
    peak = least_peak(
        lambda: draw(logits, shard=shard, group=one_rank, sampling=sampling, keys_b=keys), passes=2
    )
    assert 0.9 < (peak + logits.nbytes) / (rows * draw_bytes(columns, sampling)) <= 1.0

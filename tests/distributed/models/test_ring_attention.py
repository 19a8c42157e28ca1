"""The benchmark's ring of keys against the gathered keys of a run, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.workers import context, ring
from megatron_distill.models.attention_kernels.rule import AttentionRule
from megatron_distill.runtime.batch import zigzag_index
from megatron_distill.runtime.segments import Segments
from tests.distributed.pool import Pool
from tests.unit.models.test_attention_kernels import SCALE, Case, random_case

CASES = [
    replace(random_case(seed, softcap=False), window=None, rank=0, size=1)
    for seed in range(100, 110)
]


def _both_ways(rank: int, world: int, cases: list[Case]) -> list[tuple[list[Tensor], list[Tensor]]]:
    group = dist.new_group(list(range(world)))
    assert isinstance(group, dist.ProcessGroup)
    rule, found = AttentionRule(SCALE), []
    for case in cases:
        index = zigzag_index(case.bounds[0][-1], rank=rank, size=world)
        *whole, gradient = case.tensors(torch.float64)
        leaves = [x[index].requires_grad_() for x in whole]
        ways = []
        for attend in (context.gathered, ring.attend):
            out = attend(*leaves, Segments(case.bounds).sharded(rank, world), rule, group)
            grads = torch.autograd.grad(out, leaves, gradient[index])
            ways.append([out.detach(), *grads])
        found.append((ways[0], ways[1]))
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_values_and_gradients_of_both_ways_are_the_same(pool: Pool, world: int) -> None:
    for rank in pool.run(world, _both_ways, CASES):
        for gathered, around in rank:
            for one, other in zip(gathered, around, strict=True):
                torch.testing.assert_close(other, one, atol=1e-12, rtol=0)

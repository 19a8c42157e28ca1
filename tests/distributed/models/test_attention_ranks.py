"""Attention over context ranks: gathered and in a ring."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from benchmarks.workers import context, ring
from megatron_distill.models.attention_kernels.rule import AttentionRule
from megatron_distill.models.taps import LayerCall
from megatron_distill.runtime.batch import zigzag_index
from megatron_distill.runtime.segments import Segments
from tests.distributed.megatron_world import megatron_groups, small_architecture
from tests.distributed.pool import Pool
from tests.unit.models.test_attention_kernels import SCALE, Case, random_case

CASES = [
    replace(random_case(seed, softcap=seed % 3 == 0), rank=0, size=1) for seed in range(100, 112)
]


def _attended(rank: int, world: int, cases: list[Case]) -> list[list[Tensor]]:
    """The results of this rank's queries and the gradients of its tensors, of each case."""
    with megatron_groups(context=world) as groups:
        from megatron.core.transformer.enums import AttnMaskType

        from megatron_distill.models.attention import TorchAttention
        from megatron_distill.models.execution import Execution, transformer_config

        execution = Execution(torch.float64, torch.device("cpu"))
        config = transformer_config(small_architecture(), groups.layout, execution)
        found = []
        for case in cases:
            core = TorchAttention(
                config,
                1,
                AttnMaskType.causal,
                "self",
                softmax_scale=SCALE,
                pg_collection=groups.megatron,
                softcap=case.softcap,
            )
            core.window = case.window
            index = zigzag_index(case.bounds[0][-1], rank=rank, size=world)
            *whole, gradient = case.tensors(torch.float64)
            leaves = [x[index].requires_grad_() for x in whole]
            call = LayerCall(Segments(case.bounds).sharded(rank, world))
            out = core(*leaves, None, attention_bias=call)
            grads = torch.autograd.grad(out, leaves, gradient[index].flatten(2))
            found.append([out.detach().view_as(gradient[index]), *grads])
        return found


@pytest.mark.parametrize("world", [1, 2, 4])
def test_values_and_gradients_are_those_of_a_mask(pool: Pool, world: int) -> None:
    ranks = pool.run(world, _attended, CASES)
    for number, case in enumerate(CASES):
        length = case.bounds[0][-1]
        order = torch.cat([zigzag_index(length, rank=rank, size=world) for rank in range(world)])
        shards = [rank[number] for rank in ranks]
        for part, exact in enumerate(case.definition()):
            whole = torch.cat([shard[part] for shard in shards])[order.argsort()]
            torch.testing.assert_close(whole, exact, atol=1e-12, rtol=0)


def _held_after_forward(rank: int, world: int, case: Case) -> tuple[bool, bool]:
    """Whether the whole sequence's keys exist after a forward pass, with and without recomputing.

    In the second configuration they are made again by the recomputed forward pass.
    """
    with megatron_groups(context=world) as groups:
        from megatron.core.transformer.enums import AttnMaskType

        from megatron_distill.models import attention
        from megatron_distill.models.execution import Execution, Recompute, transformer_config

        index = zigzag_index(case.bounds[0][-1], rank=rank, size=world)
        leaves = [x[index].requires_grad_() for x in case.tensors(torch.float64)[:3]]
        call = LayerCall(Segments(case.bounds).sharded(rank, world))
        made: list[StorageWeakRef] = []
        gathered = attention.gathered_keys

        def noted(key: Tensor, value: Tensor, group: dist.ProcessGroup) -> Tensor:
            whole = gathered(key, value, group)
            made.append(StorageWeakRef(whole.untyped_storage()))
            return whole

        found = []
        with patch.object(attention, "gathered_keys", noted):
            for recompute in (Recompute(), Recompute(("attention",))):
                execution = Execution(torch.float64, torch.device("cpu"), recompute)
                config = transformer_config(small_architecture(), groups.layout, execution)
                core = attention.TorchAttention(
                    config, 1, AttnMaskType.causal, "self", pg_collection=groups.megatron
                )
                out = core(*leaves, None, attention_bias=call)
                found.append(not made[-1].expired())
                torch.autograd.grad(out.sum(), leaves)
        return found[0], found[1]


def test_the_backward_pass_saves_this_ranks_keys_alone(pool: Pool) -> None:
    case = Case(((0, 5, 16),))
    assert pool.run(2, _held_after_forward, case) == [(False, True)] * 2


RING_CASES = [
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
    for rank in pool.run(world, _both_ways, RING_CASES):
        for gathered, around in rank:
            for one, other in zip(gathered, around, strict=True):
                torch.testing.assert_close(other, one, atol=1e-12, rtol=0)

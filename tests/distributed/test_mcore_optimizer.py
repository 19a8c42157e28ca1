"""The patches of Megatron-Core's optimizers: the norm of all gradients, and their clipping."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.megatron_world import megatron_groups
from tests.distributed.pool import Pool
from tests.reference.tracing import HostWaits

SHAPES = ((3, 5), (7,), (1,), (2, 3, 4))


def _clipped(rank: int, world: int, max_norm: float) -> tuple[float, int, list[torch.Tensor]]:
    with megatron_groups() as groups:
        from megatron.core.optimizer import clip_grads

        generator = torch.Generator().manual_seed(3)
        parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        with HostWaits() as waits:
            norm = clip_grads.get_grad_norm_fp32(
                [parameter.grad for parameter in parameters],
                grad_stats_parallel_group=groups.world,
            )
        clip_grads.clip_grad_by_total_norm_fp32(parameters, max_norm=max_norm, total_norm=norm)
        return norm, waits.count, [parameter.grad for parameter in parameters]


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_the_norm_is_that_of_all_gradients_as_one_vector(pool: Pool, max_norm: float) -> None:
    ((norm, waits, clipped),) = pool.run(1, _clipped, max_norm)
    generator = torch.Generator().manual_seed(3)
    gradients = [torch.randn(shape, generator=generator) for shape in SHAPES]
    expected = torch.cat([gradient.flatten() for gradient in gradients]).double().norm().item()
    assert norm == pytest.approx(expected, rel=1e-6)
    assert waits == 1
    factor = min(1.0, max_norm / expected)
    for found, gradient in zip(clipped, gradients, strict=True):
        torch.testing.assert_close(found, gradient * factor, rtol=1e-5, atol=0)


def _no_gradients(rank: int, world: int) -> float:
    with megatron_groups() as groups:
        from megatron.core.optimizer import clip_grads

        return clip_grads.get_grad_norm_fp32([], grad_stats_parallel_group=groups.world)


def test_a_rank_without_gradients_adds_nothing(pool: Pool) -> None:
    assert pool.run(2, _no_gradients) == [0.0, 0.0]

"""The optimizer of ranks: its norm and its update."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.megatron_world import megatron_groups, small_architecture
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


MOE = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24}
# Of each step: what is not finite.
SPOILED = ("nothing", "a gradient", "nothing", "the loss", "the projectors", "nothing")
ONE = torch.tensor(1.0)
# Model, layout, settings, number format, limit of the norm.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], bool, torch.dtype, float]] = {
    "sharded": ({}, {}, True, torch.float32, 0.5),
    "whole, bf16": ({}, {}, False, torch.bfloat16, 0.5),
    "sharded, bf16, below the limit": ({}, {}, True, torch.bfloat16, 1e9),
    "whole, no limit": ({}, {}, False, torch.float32, 0.0),
    "experts": ({"moe": MOE}, {"expert": 2}, True, torch.bfloat16, 0.5),
    "experts, whole": ({"moe": MOE}, {"expert": 2}, False, torch.bfloat16, 0.5),
    "a gradient of one tensor rank": ({}, {"tensor": 2}, False, torch.bfloat16, 0.5),
}
Apply = Callable[[Any, Sequence[Tensor], float], tuple[float, bool]]


def ours(optimizer: Any, checked: Sequence[Tensor], limit: float) -> tuple[float, bool]:
    """The norm, and whether the update was applied; nothing is read before it was launched."""
    from megatron_distill.train.optimizer import apply_gradients, gradient_norm

    with HostWaits() as waits:
        update = apply_gradients(optimizer, clip_grad_norm=limit, checked=checked)
    assert waits.count == 0
    return gradient_norm(update.squares.tolist()), not update.skipped


def upstreams(optimizer: Any, checked: Sequence[Tensor], limit: float) -> tuple[float, bool]:
    """The same, by upstream's norm and clipping, decided on the host."""
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if not all(map(math.isfinite, [norm, *map(float, checked)])):
        return norm, False
    for part in optimizer.chained_optimizers:
        if limit > 0.0:
            parameters = part.get_parameters()
            clip_grad_by_total_norm_fp32(parameters, max_norm=limit, total_norm=norm)
    optimizer.step_with_ready_grads()
    return norm, True


def course(groups: Any, case: str, apply: Apply) -> tuple[list[tuple[float, bool]], list[Tensor]]:
    """Norms and decisions of all steps; then weights, moments and counts of steps."""
    from megatron_distill.config import OptimizerConfig, ScheduleConfig
    from megatron_distill.models.execution import Execution
    from megatron_distill.models.gpt import build_gpt
    from megatron_distill.train.optimizer import (
        allocate_moments,
        build_optimizer,
        wrap_data_parallel,
    )

    shape, _, distributed, dtype, limit = CASES[case]
    execution = Execution(dtype, torch.device("cpu"))
    architecture = small_architecture(**shape)
    chunks = list(build_gpt(architecture, groups=groups, execution=execution, seed=3))
    settings = OptimizerConfig(distributed=distributed, learning_rate=0.01)
    wrapped = wrap_data_parallel(chunks, settings, groups=groups)
    optimizer = build_optimizer(wrapped, settings, ScheduleConfig(), dtype=dtype)
    allocate_moments(optimizer, torch.device("cuda"))  # the fused Adam, which runs on a CPU too
    parameters = [one for chunk in chunks for one in chunk.parameters()]
    generator, found = torch.Generator().manual_seed(5), []
    for spoiled in SPOILED:
        for parameter in parameters:
            values = torch.randn(parameter.shape, generator=generator)
            parameter.main_grad.copy_(values)
        is_here = groups.tensor.rank() == groups.tensor.size() - 1
        if spoiled == "a gradient" and is_here:  # of the embedding, which tensor ranks divide
            parameters[0].main_grad.fill_(math.inf)
        losses = [torch.tensor(math.nan) if spoiled == "the loss" else ONE]
        losses.append(torch.tensor(math.inf) if spoiled == "the projectors" else ONE)
        found.append(apply(optimizer, losses, limit))
    states = [
        one
        for part in optimizer.chained_optimizers
        for state in part.optimizer.state.values()
        for one in state.values()
    ]
    return found, [one.detach().clone() for one in (*parameters, *states)]


def both(rank: int, world: int, case: str) -> list[tuple[list[tuple[float, bool]], list[Tensor]]]:
    with megatron_groups(**CASES[case][1]) as groups:
        return [course(groups, case, apply) for apply in (ours, upstreams)]


@pytest.mark.parametrize("case", CASES)
def test_an_update_has_the_bits_of_one_that_the_host_decides_on(pool: Pool, case: str) -> None:
    for (found, bits), (expected, reference) in pool.run(2, both, case):
        assert str(found) == str(expected)  # a norm may be no number
        assert [is_applied for _, is_applied in found] == [one == "nothing" for one in SPOILED]
        assert len(bits) == len(reference) > 40
        for one, other in zip(bits, reference, strict=True):
            assert torch.equal(one, other)
        counts = {float(one) for one in bits if one.dim() == 0}
        assert counts == {SPOILED.count("nothing")}


def with_an_empty_group(rank: int, world: int) -> list[tuple[bool, Tensor, int]]:
    """For both kinds of Adam: whether a skipped step changed anything; then a step, and waits."""
    with megatron_groups():
        from megatron_distill.train.optimizer import allocate_adam, step_unless

        found = []
        for device in ("cuda", "cpu"):
            weight = torch.nn.Parameter(torch.ones(3))
            adam = torch.optim.AdamW([{"params": [weight]}, {"params": []}], lr=0.1)
            allocate_adam(adam, torch.device(device))
            weight.grad = torch.full((3,), math.nan)
            with HostWaits() as waits:
                step_unless(torch.tensor(True), [adam], adam.step)
            state = adam.state[weight]
            is_left = bool((weight == 1).all()) and not any(one.any() for one in state.values())
            weight.grad = torch.ones(3)
            step_unless(torch.tensor(False), [adam], adam.step)
            assert state["step"] == 1
            found.append((is_left, weight.detach().clone(), waits.count))
        return found


def test_a_skipped_step_leaves_everything_and_only_a_plain_adam_waits(pool: Pool) -> None:
    ((fused, plain),) = pool.run(1, with_an_empty_group)
    assert fused[0]
    assert plain[0]
    torch.testing.assert_close(fused[1], plain[1])
    assert (fused[2], plain[2]) == (0, 1)

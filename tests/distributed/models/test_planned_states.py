"""The planner's bytes of weights, gradients and optimizer state against built students.

Every kind of model, tied and with experts, in stages, virtual stages, tensor, context and expert
ranks, with the distributed optimizer and without. Few of these widths fill Megatron's buffers
without gaps.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.distributed.megatron_world import build, megatron_groups, small_architecture
from tests.distributed.models.test_parameters import SHAPES
from tests.distributed.pool import Pool

RANKS = 4
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"tensor": 2, "pipeline": 2},
    {},
    {"pipeline": 2, "virtual_pipeline": 2},
    {"context": 2, "tensor": 2, "sequence": True},
)
OF_EXPERTS: dict[str, Any] = {"expert": 2, "pipeline": 2}
Bytes = tuple[int, int, int]
# Built and planned, tensors with a state, and numbers of gaps in the buffers.
Counted = tuple[Bytes, Bytes, int, int]


def counted(
    rank: int,
    world: int,
    shapes: dict[str, dict[str, Any]],
    layout: dict[str, Any],
    distributed: bool,
) -> dict[str, Counted]:
    """Weights, gradients and optimizer of this rank, of each kind of model."""
    with megatron_groups(**layout) as groups:
        import torch

        from benchmarks.harness.peak import persistent_bytes
        from megatron_distill.config import OptimizerConfig, ScheduleConfig
        from megatron_distill.models.pipeline_stages import even_layers
        from megatron_distill.planning.memory import student_states
        from megatron_distill.planning.parameters import stage_numbers
        from megatron_distill.planning.run import Choice, PlannedRun
        from megatron_distill.train.optimizer import build_optimizer, wrap_data_parallel

        found = {}
        for name, fields in shapes.items():
            shape = small_architecture(**fields)
            chunks = build(shape, groups, seed=None)
            settings = OptimizerConfig(distributed=distributed)
            wrapped = wrap_data_parallel(chunks, settings, groups=groups)
            optimizer = build_optimizer(wrapped, settings, ScheduleConfig(), dtype=torch.float32)
            training = SimpleNamespace(wrapped=wrapped, optimizer=optimizer)
            built = persistent_bytes(SimpleNamespace(models=chunks, training=training))  # type: ignore[arg-type]
            run = PlannedRun(
                student=shape, teacher=None, sequence_length=64, global_batch_size=RANKS,
                precision="fp32", is_distributed=distributed,
            )  # fmt: skip
            layers = even_layers(shape.num_layers, groups.layout.stages)
            choice = Choice(layout=groups.layout, ranks=world, micro_batch_size=1, layers=layers)
            numbers = stage_numbers(shape, groups.layout, layers)[groups.pipeline.rank()]
            tensors = sum(
                len(part.optimizer.state)
                for part in optimizer.chained_optimizers
                if part.optimizer is not None
            )
            found[name] = (
                (built.weights, built.gradient_buffers, built.optimizer),
                student_states(run, choice, numbers),
                tensors,
                built.gradient_buffers // 4 - numbers.total,
            )
        return found


def check(ranks: list[dict[str, Counted]], *, distributed: bool) -> None:
    assert any(gaps for rank in ranks for *_, gaps in rank.values()) == distributed
    for name in ranks[0]:
        for built, planned, tensors, gaps in (rank[name] for rank in ranks):
            assert built[:2] == planned[:2], name
            # Adam counts the steps of each tensor in four bytes. Where a shard has no gap, another
            # one has less.
            beyond = built[2] - planned[2] - 4 * tensors
            assert beyond <= 8 * gaps if distributed else beyond == 0, (name, beyond)
        # The plan is of the rank that has most.
        most = [max(rank[name][side][2] for rank in ranks) for side in (0, 1)]
        assert most[0] >= most[1], name


@pytest.mark.parametrize("distributed", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    "layout", [LAYOUTS[0], *(pytest.param(one, marks=pytest.mark.slow) for one in LAYOUTS[1:])],
    ids=str,
)  # fmt: skip
def test_every_kind_of_model_has_the_planned_states(
    pool: Pool, layout: dict[str, Any], distributed: bool
) -> None:
    check(pool.run(RANKS, counted, SHAPES, layout, distributed), distributed=distributed)


def test_experts_over_several_ranks_have_the_planned_states(pool: Pool) -> None:
    shapes = {name: fields for name, fields in SHAPES.items() if "moe" in fields}
    check(pool.run(RANKS, counted, shapes, OF_EXPERTS, True), distributed=True)

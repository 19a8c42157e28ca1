"""The planner's bytes of weights, gradients and optimizer state against built students.

Every kind of model, tied and with experts, in stages, virtual stages, tensor, context and expert
ranks, with the distributed optimizer and without.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.distributed.megatron_world import build, megatron_groups, small_architecture
from tests.distributed.models.test_parameters import SHAPES
from tests.distributed.pool import Pool

# Megatron's buffers begin every tensor at a multiple of 64 numbers and end at one of 128 for each
# rank that has a part. Each tensor of these widths is such a multiple on its own.
WIDE: dict[str, Any] = {
    "hidden_size": 128,
    "ffn_hidden_size": 256,
    "head_size": 64,
    "num_attention_heads": 4,
    "num_kv_heads": 4,
    "vocab_size": 200,
    "max_position_embeddings": 64,
}
RANKS = 4
BUFFER_END = 128
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"tensor": 2, "pipeline": 2},
    {},
    {"pipeline": 2, "virtual_pipeline": 2},
    {"context": 2, "tensor": 2, "sequence": True},
)
OF_EXPERTS: dict[str, Any] = {"expert": 2, "pipeline": 2}
Bytes = tuple[int, int, int]


def counted(
    rank: int,
    world: int,
    shapes: dict[str, dict[str, Any]],
    layout: dict[str, Any],
    distributed: bool,
) -> dict[str, tuple[Bytes, Bytes, int]]:
    """Weights, gradients and optimizer of this rank, built and planned; tensors with a state."""
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
            shape = small_architecture(**(WIDE | widened(fields)))
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
            )
        return found


def widened(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a shape with experts and heads of these widths."""
    found = {name: value for name, value in fields.items() if name != "head_size"}
    if "moe" in found:
        wide = {name: 64 for name in found["moe"] if name.endswith("ffn_hidden_size")}
        found["moe"] = found["moe"] | wide
    return found


def check(ranks: list[dict[str, tuple[Bytes, Bytes, int]]], *, distributed: bool) -> None:
    for name in ranks[0]:
        for built, planned, tensors in (rank[name] for rank in ranks):
            weights, gradients, states = (b - p for b, p in zip(built, planned, strict=True))
            # One end of a buffer for the dense tensors of each chunk, and one for its experts.
            end = 4 * BUFFER_END * RANKS * 4 if distributed else 0
            assert 0 <= weights <= end, (name, weights)
            assert 0 <= gradients <= end, (name, gradients)
            # Adam counts the steps of each tensor in four bytes; the last rank has less.
            assert states <= 2 * end + 4 * tensors, (name, states)
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

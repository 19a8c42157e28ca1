"""The planner's parameters of every rank against built models: all kinds, layouts, padding."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.megatron_world import build, megatron_groups, small_architecture
from tests.distributed.models.test_parameters import SHAPES
from tests.distributed.pool import Pool

# Ranks are four; stages of unequal depth, copies of tied embeddings, experts over two ranks.
LAYOUTS: tuple[dict[str, Any], ...] = (
    {},
    {"tensor": 2, "sequence": True},
    {"tensor": 2, "pipeline": 2},
    {"pipeline": 4},
    {"pipeline": 2, "virtual_pipeline": 2},
    {"context": 2, "tensor": 2, "sequence": True},
)
OF_EXPERTS: tuple[dict[str, Any], ...] = (
    {"expert": 2},
    {"expert": 2, "tensor": 2, "sequence": True},
    {"expert": 2, "pipeline": 2},
)


def counted(
    rank: int, world: int, shapes: dict[str, dict[str, Any]], layout: dict[str, Any]
) -> dict[str, tuple[tuple[int, int], tuple[int, int]]]:
    """Parameters of this rank, all and those of divided experts: built, and planned."""
    with megatron_groups(**layout) as groups:
        from megatron_distill.models.pipeline_stages import even_layers
        from megatron_distill.planning.parameters import stage_numbers
        from megatron_distill.train.throughput import RankParameters

        found = {}
        for name, fields in shapes.items():
            shape = small_architecture(**fields)
            built = RankParameters.of(build(shape, groups, seed=None), [])
            layers = even_layers(shape.num_layers, groups.layout.stages)
            numbers = stage_numbers(shape, groups.layout, layers)[groups.pipeline.rank()]
            found[name] = (built.student, built.experts), (numbers.total, numbers.experts)
        return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_kind_of_model_has_the_planned_parameters(pool: Pool, layout: dict[str, Any]) -> None:
    for rank in pool.run(4, counted, SHAPES, layout):
        for name, (built, planned) in rank.items():
            assert built == planned, name


@pytest.mark.parametrize("layout", OF_EXPERTS, ids=str)
def test_experts_over_several_ranks_have_the_planned_parameters(
    pool: Pool, layout: dict[str, Any]
) -> None:
    shapes = {name: fields for name, fields in SHAPES.items() if "moe" in fields}
    for rank in pool.run(4, counted, shapes, layout):
        for name, (built, planned) in rank.items():
            assert built == planned, name
            assert built[1] > 0

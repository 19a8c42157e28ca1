"""The planner's parameters and states of every rank against built models."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.distributed.hugging_face_models import MODELS
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
            numbers = stage_numbers(shape, groups.layout, layers, width=4)[groups.pipeline.rank()]
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


@pytest.mark.parametrize("layout", [LAYOUTS[2], OF_EXPERTS[2]], ids=str)
def test_every_hugging_face_family_has_the_planned_parameters(
    pool: Pool, layout: dict[str, Any], tmp_path: Path
) -> None:
    for rank in pool.run(4, counted, hugging_face_shapes(tmp_path), layout):
        for name, (built, planned) in rank.items():
            assert built == planned, name


def hugging_face_shapes(folder: Path) -> dict[str, dict[str, Any]]:
    """The small models of all families."""
    import transformers

    from megatron_distill.models.hugging_face.description import describe

    shapes = {}
    for name, (kind, settings) in MODELS.items():
        transformers.AutoConfig.for_model(kind, **settings).save_pretrained(folder / name)
        shapes[name] = describe(folder / name).architecture.as_dict()
    return shapes


RANKS = 4
STATE_LAYOUTS: tuple[dict[str, Any], ...] = (
    {"tensor": 2, "pipeline": 2},
    {},
    {"pipeline": 2, "virtual_pipeline": 2},
    {"context": 2, "tensor": 2, "sequence": True},
)
STATES_OF_EXPERTS: dict[str, Any] = {"expert": 2, "pipeline": 2}
Bytes = tuple[int, int, int]
# Built and planned, numbers of gaps in the buffers, and the stage.
Counted = tuple[Bytes, Bytes, int, int]


def counted_states(
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
            numbers = stage_numbers(shape, groups.layout, layers, width=4)[groups.pipeline.rank()]
            found[name] = (
                (built.weights, built.gradient_buffers, built.optimizer),
                student_states(run, choice, numbers),
                built.gradient_buffers // 4 - numbers.total,
                groups.pipeline.rank(),
            )
        return found


def check(ranks: list[dict[str, Counted]], *, distributed: bool) -> None:
    assert any(gaps for rank in ranks for *_, gaps, _ in rank.values()) == distributed
    for name in ranks[0]:
        for built, planned, *_ in (rank[name] for rank in ranks):
            assert built[:2] == planned[:2], name
            assert built[2] <= planned[2], name
        # The plan is of the shard that has most, in each stage.
        for stage in {rank[name][3] for rank in ranks}:
            there = [rank[name] for rank in ranks if rank[name][3] == stage]
            states = {built[2] for built, *_ in there}
            assert max(states) == there[0][1][2], name
            assert distributed or len(states) == 1, name


@pytest.mark.parametrize("distributed", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    "layout",
    [STATE_LAYOUTS[0], *(pytest.param(one, marks=pytest.mark.slow) for one in STATE_LAYOUTS[1:])],
    ids=str,
)
def test_every_kind_of_model_has_the_planned_states(
    pool: Pool, layout: dict[str, Any], distributed: bool
) -> None:
    check(pool.run(RANKS, counted_states, SHAPES, layout, distributed), distributed=distributed)


def test_experts_over_several_ranks_have_the_planned_states(pool: Pool) -> None:
    shapes = {name: fields for name, fields in SHAPES.items() if "moe" in fields}
    check(pool.run(RANKS, counted_states, shapes, STATES_OF_EXPERTS, True), distributed=True)


@pytest.mark.slow
@pytest.mark.parametrize("distributed", [False, True])
def test_every_hugging_face_family_has_the_planned_states(
    pool: Pool, distributed: bool, tmp_path: Path
) -> None:
    shapes = hugging_face_shapes(tmp_path)
    check(pool.run(RANKS, counted_states, shapes, STATE_LAYOUTS[0], distributed),
          distributed=distributed)  # fmt: skip

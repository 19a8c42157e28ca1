"""The peak of a whole step on every rank of small models against the plan of its stage."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.steps.cases import Body, Case, Ranks, Workload
from tests.distributed.megatron_world import megatron_groups
from tests.distributed.pool import Pool
from tests.support.peaks import least_peak

STUDENT, TEACHER = Body(4, 128, 352, 4, 2), Body(4, 64, 176, 4, 2)
EXPERTS = Body(4, 128, 176, 4, 2, num_experts=4)
# Layers decide the peak, or with few tokens the update of an embedding.
LAYERS = Workload("layers", STUDENT, TEACHER, 256, 128, 2, 4)
OF_EXPERTS = Workload("experts", EXPERTS, TEACHER, 256, 128, 2, 4)
WORDS = Workload("words", STUDENT, TEACHER, 4096, 32, 1, 2)
QUICK = (Case(WORDS, Ranks("PP2", 2, pipeline=2), "fp32"),)
SLOW = (
    Case(LAYERS, Ranks("PP2", 2, pipeline=2), "fp32"),
    Case(LAYERS, Ranks("PP2", 2, pipeline=2), "bf16"),
    Case(LAYERS, Ranks("PP2+VPP2", 2, pipeline=2, virtual_pipeline=2), "fp32"),
    Case(LAYERS, Ranks("PP4", 4, pipeline=4), "fp32"),
    Case(LAYERS, Ranks("TP2xPP2", 4, tensor=2, pipeline=2), "fp32"),
    Case(LAYERS, Ranks("TP2xPP2+SP", 4, tensor=2, pipeline=2, sequence=True), "fp32"),
    Case(LAYERS, Ranks("CP2xPP2", 4, context=2, pipeline=2), "fp32"),
    Case(OF_EXPERTS, Ranks("PP2", 2, pipeline=2), "fp32"),
    Case(WORDS, Ranks("DP2", 2), "fp32"),
    Case(WORDS, Ranks("TP2", 2, tensor=2), "bf16"),
)


def peak(rank: int, world: int, case: Case) -> tuple[int, float]:
    """Bytes of tensors that come and go in a step of this rank: measured, and planned."""
    ranks = case.ranks
    layout: dict[str, Any] = {
        "tensor": ranks.tensor,
        "pipeline": ranks.pipeline,
        "virtual_pipeline": ranks.virtual_pipeline,
        "context": ranks.context,
        "sequence": ranks.sequence,
    }
    with megatron_groups(**layout) as groups:
        import torch

        from benchmarks.steps.own_step import build_own_step
        from benchmarks.steps.planned import planned_peaks
        from benchmarks.steps.subject import random_batches
        from megatron_distill.planning.device import load_device

        device = torch.device("cpu")
        subject = build_own_step(case, groups=groups, device=device)
        batches = random_batches(case, 0, groups=groups, device=device)
        subject.step(batches)  # what modules keep from step to step
        measured = least_peak(lambda: subject.step(batches))
        machine = load_device("a100-80gb").model_copy(
            update={"kind": "cpu", "cores": torch.get_num_threads() * world, "reserved_gib": 0.0}
        )
        return measured, planned_peaks(case, machine)[groups.pipeline.rank()][1]


@pytest.mark.parametrize(
    "case",
    [*QUICK, *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)],
    ids=lambda case: case.name,
)
def test_the_step_of_every_rank_has_the_planned_peak(pool: Pool, case: Case) -> None:
    for measured, planned in pool.run(case.ranks.processes, peak, case):
        assert 0.95 * measured <= planned <= 1.10 * measured, planned / measured

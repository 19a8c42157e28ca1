"""The gathers of a teacher's layers, between two tokenizers: a step's own against the planner's."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import pytest

from tests.distributed.feature_worlds import (
    LENGTH,
    PAIRS,
    ROWS,
    STUDENT,
    TEACHER,
    Setting,
    take_step,
)
from tests.distributed.megatron_world import small_architecture
from tests.distributed.pool import Pool

CASES = {
    "CP2, recompute": (2, Setting({"context": 2}, "full", 2, tokens="own")),
    "TP2+sequence x PP2": (
        4, Setting({"tensor": 2, "sequence": True, "pipeline": 2}, tokens="own"),
    ),
    "CP2xTP2+sequence": (
        4, Setting({"context": 2, "tensor": 2, "sequence": True}, tokens="own"),
    ),
    "TP2": (2, Setting({"tensor": 2}, tokens="own")),
}  # fmt: skip
_SLOW = ("CP2xTP2+sequence",)


def measured(rank: int, world: int, setting: Setting) -> tuple[int, int]:
    """Bytes that a rank receives in a step, and the most that are alive while a loss is made."""
    from benchmarks.harness.peak import LiveStorages
    from megatron_distill.train import features

    received, peaks = 0, list[int]()
    gather, make = features._gathered, features.FeatureLosses._loss_of_states

    def counted(states: Any, group: Any) -> Any:
        nonlocal received
        received += (group.size() - 1) * states.nbytes
        return gather(states, group)

    def watched(*arguments: Any) -> Any:
        with LiveStorages(settled_above=0.8 * min(peaks, default=math.inf)) as live:
            loss = make(*arguments)
        peaks.append(live.peak)
        return loss

    with (
        patch.object(features, "_gathered", counted),
        patch.object(features.FeatureLosses, "_loss_of_states", watched),
    ):
        take_step(rank, world, setting)
    # Of equal losses; a thread may hold the tensors of a finished collective for a while.
    return received, min(peaks)


def planned(rank: int, world: int, setting: Setting) -> tuple[float, float]:
    """The same by the planner."""
    from megatron_distill.models.pipeline_stages import even_layers
    from megatron_distill.planning.gathered_layers import gathered_layers
    from megatron_distill.planning.run import Choice, ChunkLoss, PlannedRun
    from megatron_distill.runtime.layout import Layout

    run = PlannedRun(
        student=small_architecture(**STUDENT),
        teacher=small_architecture(**TEACHER),
        sequence_length=LENGTH,
        teacher_length=setting.teacher_length,
        global_batch_size=ROWS,
        precision="fp32",
        chunk_losses=(ChunkLoss("likelihood"),),
        paired_layers=tuple((ours, theirs, False) for ours, theirs, *_ in PAIRS),
    )
    layout = Layout(**setting.layout)
    choice = Choice(
        layout=layout,
        ranks=world,
        micro_batch_size=setting.micro_batch_size,
        layers=even_layers(4, layout.stages),
        place="shared",
        teacher_layout=layout,
        teacher_layers=even_layers(6, layout.stages),
    )
    # Stages are of consecutive ranks.
    found = gathered_layers(run, choice, rank * layout.pipeline // world)
    received = sum(found.received(measures=False)) * choice.micro_batches(run)
    return received, found.peak


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.slow] * (name in _SLOW)) for name in CASES]
)
def test_gathered_layers_have_the_planned_bytes(pool: Pool, case: str) -> None:
    world, setting = CASES[case]
    for rank, (received, peak) in enumerate(pool.run(world, measured, setting)):
        expected, most = planned(rank, world, setting)
        assert received == expected
        assert peak == most > 0, (peak, most)
        assert (received > 0) == (case != "TP2")

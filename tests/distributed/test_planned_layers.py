"""Losses between layers in a step against the planner's: gathers, products, and sums of maps."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
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

if TYPE_CHECKING:
    from megatron_distill.planning.run import Choice, PlannedRun

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


def taught(world: int, setting: Setting) -> tuple[PlannedRun, Choice]:
    """The planner's run and choice of a setting."""
    from megatron_distill.models.pipeline_stages import even_layers
    from megatron_distill.planning.run import Choice, ChunkLoss, LayerPair, PlannedRun
    from megatron_distill.runtime.layout import Layout

    is_own, width = setting.tokens == "own", TEACHER["hidden_size"]
    run = PlannedRun(
        student=small_architecture(**STUDENT),
        teacher=small_architecture(**TEACHER),
        sequence_length=LENGTH,
        teacher_length=setting.teacher_length if is_own else None,
        global_batch_size=ROWS,
        precision="fp32",
        chunk_losses=(ChunkLoss("likelihood"),) if is_own else (),
        paired_layers=tuple(LayerPair(*pair[:3]) for pair in setting.pairs),
        projector=(32, 24, width) if setting.projector == "mlp" else (32, width),
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
    return run, choice


def planned(rank: int, world: int, setting: Setting) -> tuple[float, float]:
    """The same by the planner."""
    from megatron_distill.planning.losses.gathered_layers import gathered_layers

    run, choice = taught(world, setting)
    # Stages are of consecutive ranks.
    found = gathered_layers(run, choice, rank * choice.layout.pipeline // world)
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


# The same layers as the losses between states, and one more pair of the same two.
WITH_MAPS = (*PAIRS, (2, 5, "attention", 0.5), (4, 2, "attention", 0.5), (4, 2, "mse", 0.1))
WORKING = {
    "CP2, recompute": (2, Setting({"context": 2}, "full", 2, pairs=WITH_MAPS)),
    "TP2+sequence x PP2, mlp": (
        4,
        Setting({"tensor": 2, "sequence": True, "pipeline": 2}, pairs=WITH_MAPS, projector="mlp"),
    ),
    "TP2": (2, Setting({"tensor": 2}, pairs=WITH_MAPS)),
}


def worked(rank: int, world: int, setting: Setting) -> tuple[int, int, int, int]:
    """FLOPs of a rank's losses forward and backward, bytes of summed maps, projectors' numbers."""
    from torch.utils.flop_counter import FlopCounterMode

    from megatron_distill.losses import features

    found = [0, 0]
    summed, whole = 0, features.dist.all_reduce

    def counting(place: int, work: Any) -> Any:
        def counted(*arguments: Any, **named: Any) -> Any:
            with FlopCounterMode(display=False) as counter:
                result = work(*arguments, **named)
            found[place] += counter.get_total_flops()
            return result

        return counted

    def reduced(maps: Any, group: Any) -> None:
        nonlocal summed
        summed += 2 * maps.nbytes * (group.size() - 1) // group.size()
        whole(maps, group=group)

    states, maps = features.FeatureLoss, features.AttentionLoss
    with (
        patch.object(states, "value", counting(0, states.value)),
        patch.object(states, "gradient", counting(1, states.gradient)),
        patch.object(maps, "value", counting(0, maps.value)),
        patch.object(maps, "gradients", counting(1, maps.gradients)),
        patch.object(features, "dist", SimpleNamespace(all_reduce=reduced)),
    ):
        result = take_step(rank, world, setting)
    projectors = sum(tensor.numel() for tensor in result.projectors.values())
    return *found, summed, projectors


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.slow] * (name != "TP2")) for name in WORKING]
)
def test_losses_between_layers_have_the_planned_work(pool: Pool, case: str) -> None:
    from megatron_distill.planning.losses.layer_messages import projector_numbers, received_bytes
    from megatron_distill.planning.losses.layer_passes import pair_work

    world, setting = WORKING[case]
    run, choice = taught(world, setting)
    count, layout = choice.micro_batches(run), choice.layout
    for rank, (*found, projectors) in enumerate(pool.run(world, worked, setting)):
        stage = rank * layout.pipeline // world
        (layers,) = choice.chunk_layers(stage)
        works = [
            pair_work(run, choice, pair.loss)
            for pair in run.paired_layers
            if pair.student - 1 in layers
        ]
        tensor, context = received_bytes(run, choice, stage)
        expected = (
            count * sum(one.value.flops for one in works),
            count * sum(one.gradient.flops for one in works),
            count * tensor,
        )
        assert context == 0.0
        if layout.context > 1 and rank:
            # The plan is of the first rank: it has the last keys.
            assert all(0 < a <= b or a == b for a, b in zip(found, expected, strict=True))
        else:
            assert tuple(found) == pytest.approx(expected, rel=1e-9)
        assert projectors == projector_numbers(run, choice) > 0

"""A live teacher within the student's step: memory of its hidden states, and their way."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch

from benchmarks.harness.peak import LiveStorages
from megatron_distill.losses import Term
from megatron_distill.runtime.batch import StepBatches
from tests.distributed.feature_worlds import (
    METRICS,
    STUDENT,
    TEACHER,
    Setting,
    build_losses,
    build_teacher,
    even_routes,
    whole_batch,
)
from tests.distributed.megatron_world import (
    megatron_groups,
    objective_of,
    small_architecture,
    student_of,
)
from tests.distributed.models.test_models import LENGTH
from tests.distributed.pool import Pool
from tests.support.peaks import PASSES, least_peak, settle

if TYPE_CHECKING:
    from megatron_distill.runtime.groups import Groups
    from megatron_distill.train.features import FeatureLosses
    from megatron_distill.train.objective import TokenObjective
    from megatron_distill.train.step import Student

ROWS = 4
LONG = 1024
SEQUENCE = {"tensor": 2, "sequence": True}
STAGES = {"pipeline": 2, "virtual_pipeline": 2}


def step_of(micro_batches: int) -> StepBatches:
    """Micro-batches of four sequences, each with tokens of its own."""
    whole, batches = whole_batch(), []
    for number in range(micro_batches):
        tokens = (whole.tokens_bs + number) % 200
        batch = replace(whole, tokens_bs=tokens, labels_bs=tokens.roll(-1, 1))
        batches.append(batch.with_trained_rows())
    return StepBatches(
        tuple(batches),
        ce_tokens=micro_batches * int(whole.ce_mask_bs.sum()),
        kd_tokens=micro_batches * int(whole.kd_mask_bs.sum()),
        positions=micro_batches * ROWS * LENGTH,
    )


def student_for(groups: Groups, step: StepBatches, recompute: str) -> Student:
    """The student, its gradients divided by the positions of this step."""
    shape = small_architecture(**STUDENT)
    return student_of(shape, groups, length=LENGTH, positions=step.positions, recompute=recompute)


def objective_with(groups: Groups, features: FeatureLosses | None) -> TokenObjective:
    """Cross-entropy, a divergence, and the feature losses if given."""
    return objective_of(
        small_architecture(**STUDENT),
        groups,
        ce_weight=1.0,
        terms=(Term("forward_kl"),),
        metrics=METRICS,
        chunk_tokens=None,
        features=features,
        feature_weights=tuple(pair.weight for pair in features.pairs) if features else (),
    )


class Away:
    """Host memory that is not in tensors, as pinned memory is not on the device."""

    def __init__(self, device: torch.device, stream: None = None) -> None:
        self._arrays: dict[int, Any] = {}

    def put(self, micro_batch: int, hidden_sbh: torch.Tensor) -> None:
        self._arrays[micro_batch] = hidden_sbh.numpy().copy()

    def take(self, micro_batch: int) -> torch.Tensor:
        return torch.from_numpy(self._arrays[micro_batch]).clone()


def peak_of_step(
    rank: int,
    world: int,
    layout: dict[str, Any],
    micro_batches: int,
    balanced: bool,
) -> int:
    """Peak bytes of tensors above those alive before the teacher's and the student's schedule.

    With several stages, and where the losses are measured first, the teacher's hidden states and
    features are in host memory.
    """
    with megatron_groups(**layout) as groups:
        from megatron_distill.train.loss_sizes import loss_values
        from megatron_distill.train.step import run_student
        from megatron_distill.train.teachers import host_states
        from megatron_distill.train.teachers.live import FeatureTeacher

        step, device = step_of(micro_batches), torch.device("cpu")
        student, teacher = student_for(groups, step, "full"), build_teacher(groups, TEACHER)
        features, host = build_losses(Setting(), groups), None
        if groups.pipeline.size() > 1 or balanced:
            teacher = replace(teacher, host_states=Away(device))  # type: ignore[arg-type]
            host = host_states.HostFeatures(device)
        features.attach(student.chunks)
        ways = even_routes(features.pairs, teacher.architecture.num_layers, groups.layout)
        source: Any = FeatureTeacher(teacher, ways, host)
        objective = objective_with(groups, features)

        def take() -> None:
            signals = source.signals(step.micro_batches)
            if balanced:
                signals = list(signals)
                loss_values(student, signals, objective, step)
            run_student(student, signals, [objective] * micro_batches, step)

        with patch.object(host_states, "HostStates", Away):
            take()
            return least_peak(take, 1 if world == 1 else PASSES)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "layout", "balanced"),
    [(1, {}, False), (1, {}, True), (2, SEQUENCE, False), (2, {"pipeline": 2}, False)],
)
def test_the_peak_of_a_step_does_not_grow_with_its_micro_batches(
    pool: Pool, world: int, layout: dict[str, Any], balanced: bool
) -> None:
    few, many = (pool.run(world, peak_of_step, layout, count, balanced) for count in (4, 16))
    for own_few, own_many in zip(few, many, strict=True):
        assert own_many <= 1.05 * own_few, (few, many)


def packed_step(documents: int) -> StepBatches:
    """Two micro-batches of a sample of so many equal documents."""
    generator = torch.Generator().manual_seed(5)
    whole, each = whole_batch(), LONG // documents
    batches = []
    for _ in range(2):
        tokens = torch.randint(0, 200, (1, LONG), generator=generator)
        mask = torch.ones(1, LONG, dtype=torch.bool)
        batch = replace(
            whole,
            tokens_bs=tokens,
            labels_bs=tokens.roll(-1, 1),
            ce_mask_bs=mask,
            kd_mask_bs=mask,
            position_ids_bs=torch.arange(LONG)[None] % each,
            document_ids_bS=torch.arange(LONG)[None] // each,
            sequence_index_s=torch.arange(LONG),
            sample_ids_b=torch.arange(1),
            documents=None,
        )
        batches.append(batch.with_trained_rows())
    return StepBatches(tuple(batches), ce_tokens=2 * LONG, kd_tokens=2 * LONG, positions=2 * LONG)


def peak_of_documents(rank: int, world: int, documents: int) -> int:
    """Peak bytes of tensors of a step, above those alive before."""
    with megatron_groups() as groups:
        from megatron_distill.train.step import run_student

        step = packed_step(documents)
        student, teacher = student_for(groups, step, "none"), build_teacher(groups, TEACHER)
        student = replace(student, sequence_length=LONG)
        teacher = replace(teacher, sequence_length=LONG)
        objective = objective_with(groups, None)

        def take() -> None:
            run_student(student, teacher.signals(step.micro_batches), [objective] * 2, step)

        take()
        with LiveStorages() as live:
            take()
        return live.peak


@pytest.mark.slow
def test_the_peak_of_a_step_is_that_of_one_document_a_sample(pool: Pool) -> None:
    (one,), (eight,) = (pool.run(1, peak_of_documents, count) for count in (1, 8))
    assert eight == pytest.approx(one, rel=0.05)


def bytes_of_signals(rank: int, world: int, micro_batches: int) -> tuple[bool, int]:
    """Whether this is the last stage, and the bytes that a step's signals hold there."""
    with megatron_groups(**SEQUENCE, pipeline=2) as groups:
        teacher, step = build_teacher(groups, TEACHER), step_of(micro_batches)
        teacher.signals(step.micro_batches)
        with LiveStorages() as live:
            signals = teacher.signals(step.micro_batches)
            torch.distributed.barrier()  # until then a stage may hold what it sends
            settle()
            held = live.current
        assert len(signals) == micro_batches
        return groups.is_last_stage, held


def test_with_stages_a_tensor_rank_holds_its_part_of_the_sequence_only(pool: Pool) -> None:
    part = ROWS * LENGTH // 2 * TEACHER["hidden_size"] * torch.float32.itemsize
    for is_last, held in pool.run(4, bytes_of_signals, 8):
        # Megatron's model keeps the input of its last micro-batch.
        assert held == (8 + 1) * part if is_last else held == 0


def means_of_step(
    rank: int, world: int, layout: dict[str, Any], through_host: bool, with_features: bool
) -> dict[str, float]:
    """The report of a step whose schedule runs twice, with signals kept in between."""
    with megatron_groups(**layout) as groups:
        from megatron_distill.train.step import run_student
        from megatron_distill.train.teachers.host_states import HostFeatures, HostStates
        from megatron_distill.train.teachers.live import FeatureTeacher

        device = torch.device("cpu")
        features = build_losses(Setting(), groups) if with_features else None
        step, objective = step_of(4), objective_with(groups, features)
        student, teacher = student_for(groups, step, "full"), build_teacher(groups, TEACHER)
        if through_host and groups.is_last_stage:
            teacher = replace(teacher, host_states=HostStates(device))
        source: Any = teacher
        if features is not None:
            features.attach(student.chunks)
            ways = even_routes(features.pairs, teacher.architecture.num_layers, groups.layout)
            source = FeatureTeacher(teacher, ways, HostFeatures(device) if through_host else None)
        signals = list(source.signals(step.micro_batches))
        means = [run_student(student, signals, [objective] * 4, step) for _ in range(2)]
        assert means[0] == means[1]
        return {name: float(mean) for name, mean in means[0].items()}


@pytest.mark.parametrize(
    ("world", "layout", "with_features"),
    [(2, STAGES, False), (2, STAGES, True), (1, {}, True)],
)
def test_host_memory_gives_the_same_losses(
    pool: Pool, world: int, layout: dict[str, Any], with_features: bool
) -> None:
    on_device, through_host = (
        pool.run(world, means_of_step, layout, host, with_features) for host in (False, True)
    )
    assert through_host == on_device
    assert on_device[0]["kd"] > 0
    assert ("features_loss" in on_device[0]) == with_features

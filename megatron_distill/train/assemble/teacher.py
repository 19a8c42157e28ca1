"""From a configuration to its teacher: a store, a live model here or elsewhere, or several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from megatron_distill.config import (
    ModelConfig,
    RunConfig,
    TrainConfig,
    is_aligned,
    teacher_parallel,
)
from megatron_distill.data.collation import UnitRows
from megatron_distill.data.tokenizers.open import Vocabulary
from megatron_distill.losses import ChunkTerm, Term
from megatron_distill.models.architecture import Architecture, Execution
from megatron_distill.models.gpt import vocab_shard
from megatron_distill.runtime.groups import Groups, create_second_groups
from megatron_distill.runtime.launch import Device
from megatron_distill.signals import Teacher
from megatron_distill.train.assemble.alignment import TeacherTokens
from megatron_distill.train.assemble.models import (
    layout_of,
    resolve_model,
    teacher_fp8,
    teacher_seed,
)
from megatron_distill.train.assemble.own_ranks import answer_metrics, open_own_ranks
from megatron_distill.train.assemble.several import OpenTeachers, open_several
from megatron_distill.train.assemble.stored import Stored, open_stored
from megatron_distill.train.teachers.live import OnlineTeacher, live_metrics
from megatron_distill.train.teachers.own_layout import OwnLayout
from megatron_distill.train.teachers.own_ranks import OwnRanksTeacher
from megatron_distill.train.teachers.resting import RestingTeacher
from megatron_distill.train.teachers.stored import stored_metrics

__all__ = ["OpenTeacher", "open_teacher"]


@dataclass(frozen=True)
class OpenTeacher:
    """The teacher of a run by its kind; at most one kind exists.

    Attributes:
        online: a live model on the student's ranks, in their layout or its own.
        remote: a live model on ranks of its own.
    """

    stored: Stored | None = None
    online: OnlineTeacher | OwnLayout | None = None
    remote: OwnRanksTeacher | None = None
    several: OpenTeachers | None = None

    @property
    def models(self) -> Mapping[str, OnlineTeacher | OwnLayout]:
        """The live models on these ranks by role in the log."""
        if self.several is not None:
            return self.several.models
        return {} if self.online is None else {"teacher": self.online}

    @property
    def shapes(self) -> Mapping[str, Architecture]:
        """The shapes of all live models by role in the log."""
        live = self.models if self.remote is None else {"teacher": self.remote}
        return {role: model.architecture for role, model in live.items()}

    def held_values(self, execution: Execution) -> int:
        """Numbers that this rank holds for a teacher beside its model: a head, slots of answers."""
        if self.remote is not None:
            return self.remote.held_bytes // execution.dtype.itemsize
        return self.online.head_copy if isinstance(self.online, OwnLayout) else 0

    def signals(self, section: ModelConfig | None) -> Teacher | None:
        """The source of the training samples' signals; `section` is the teacher's."""
        if self.several is not None:
            return self.several.teacher
        rests = section is not None and section.offload
        if rests and isinstance(self.online, OnlineTeacher):
            return RestingTeacher.of(self.online, key="teacher.offload")
        return self.online or self.remote or (self.stored.teacher if self.stored else None)

    def metrics(
        self, section: ModelConfig | None, terms: Sequence[Term | ChunkTerm]
    ) -> tuple[str, ...]:
        """The names of the reported metrics besides the losses; none without a teacher."""
        if self.stored is not None:
            return stored_metrics(self.stored.settings, terms)
        if self.remote is not None:
            assert section is not None, "it is the teacher's"
            return answer_metrics(section.transfer, terms)
        return live_metrics(terms) if self.models else ()

    def unit_rows(self, train: TrainConfig, groups: Groups) -> UnitRows | None:
        """The units of a step that a teacher with its own layout runs on this rank."""
        if not isinstance(self.online, OwnLayout):
            return None
        return self.online.unit_rows(_micro_batches(train, groups))

    def moved_bytes(self, train: TrainConfig, groups: Groups) -> int | None:
        """Bytes that a teacher in another layout or elsewhere sends in a step; None: none of them.

        Headers are not counted.
        """
        if self.remote is not None:
            return self.remote.step_bytes
        if not isinstance(self.online, OwnLayout):
            return None
        return self.online.moved_bytes(_micro_batches(train, groups), train.micro_batch_size)


def _micro_batches(train: TrainConfig, groups: Groups) -> int:
    return train.global_batch_size // (train.micro_batch_size * groups.data.size())


def open_teacher(
    config: RunConfig,
    terms: Sequence[Term | ChunkTerm],
    student: Architecture,
    tokens: tuple[Vocabulary, TeacherTokens | None],
    groups: Groups,
    execution: Execution,
    device: Device,
    resources: ExitStack,
) -> OpenTeacher:
    """Open the stores, build the live teacher or teachers, or reach one elsewhere.

    tokens: the student's vocabulary, and the teacher's own tokens if it has some. Raises
    ConfigError, CheckpointError or StoreError on all ranks.
    """
    of_student, own = tokens
    section, vocabulary = config.teacher, of_student if own is None else own.vocabulary
    if section is None:
        several = open_several(config, terms, student, vocabulary, groups, execution)
        return OpenTeacher(several=several)
    if device.bridge is not None:
        remote = open_own_ranks(
            config, student, terms, vocabulary, groups, execution, device, resources
        )
        return OpenTeacher(remote=remote)
    if section.store is not None:
        stored = open_stored(
            *(config, terms, student, vocabulary, groups, execution.device),
            student_tokenizer=None if own is None else of_student.identity,
        )
        resources.callback(stored.close)
        return OpenTeacher(stored=stored)
    return OpenTeacher(online=_live(config, section, student, vocabulary, groups, execution))


def _live(
    config: RunConfig,
    section: ModelConfig,
    student: Architecture,
    vocabulary: Vocabulary,
    groups: Groups,
    execution: Execution,
) -> OnlineTeacher | OwnLayout:
    """Build the model, in the student's layout or its own."""
    source = resolve_model(config, "teacher", vocabulary)
    # The head's rows are those of the student's vocabulary, unless the teacher has another one.
    of_head = source.architecture if is_aligned(config) else student
    layers = config.parallel.layers_per_stage.teacher
    execution = replace(execution, fp8=teacher_fp8(section), layers_per_stage=layers)
    seed, length = teacher_seed(config.seed), section.sequence_length or config.data.sequence_length
    shard = vocab_shard(of_head, groups, tokens=vocabulary.size)
    layout = layout_of(teacher_parallel(config))
    if layout == groups.layout.without_virtual_stages():
        return OnlineTeacher.of_source(
            source,
            execution,
            seed=seed,
            sequence_length=length,
            shard=shard,
            groups=groups,
            offload_hidden=section.offload_hidden,
        )
    seconds = config.runtime.timeout_seconds
    return OwnLayout.of_source(
        source,
        execution,
        seed=seed,
        sequence_length=length,
        shard=shard,
        groups=groups,
        own_groups=create_second_groups(layout, timeout_minutes=seconds / 60),
        timeout_seconds=seconds,
        offload_hidden=section.offload_hidden,
    )

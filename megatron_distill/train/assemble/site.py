"""The surroundings of a run's models on one rank, and what its teacher must fit."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from megatron_distill.data.tokenizers.open import Vocabulary
from megatron_distill.losses import ChunkTerm, Term
from megatron_distill.models.architecture import Architecture
from megatron_distill.models.execution import Execution
from megatron_distill.runtime.groups import Groups
from megatron_distill.runtime.launch import Device
from megatron_distill.train.assemble.alignment import TeacherTokenizer

__all__ = ["Site", "TeacherFit"]


@dataclass(frozen=True)
class Site:
    """The surroundings that a run's models are built in on one rank.

    Attributes:
        groups: the student's.
        execution: of the student.
        resources: closes files and threads at the end of the run.
    """

    groups: Groups
    execution: Execution
    device: Device
    resources: ExitStack


@dataclass(frozen=True)
class TeacherFit:
    """The facts of a run that its teacher must fit.

    Attributes:
        terms: of the objective.
        student: the student's shape.
        vocabulary: of the student's tokenizer.
        own: tokens of a teacher with a tokenizer of its own.
    """

    terms: Sequence[Term | ChunkTerm]
    student: Architecture
    vocabulary: Vocabulary
    own: TeacherTokenizer | None

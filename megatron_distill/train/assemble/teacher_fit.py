"""The facts of a run that its teacher must fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_distill.data.tokenizers.open import Vocabulary
from megatron_distill.losses import ChunkTerm, Term
from megatron_distill.models.architecture import Architecture
from megatron_distill.train.assemble.alignment import TeacherTokens

__all__ = ["TeacherFit"]


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
    own: TeacherTokens | None

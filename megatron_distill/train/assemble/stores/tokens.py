"""The tokens of a run, which the records of its stores must have."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_distill.config import DataConfig, ModelConfig
from megatron_distill.data.samples import JoinedSides
from megatron_distill.data.tokenizers.open import Vocabulary
from megatron_distill.errors import StoreError
from megatron_distill.log import get_logger
from megatron_distill.models.architecture import Architecture
from megatron_distill.store import UNKNOWN, StoreReader

__all__ = ["TokensOfRun"]

_LOGGER = get_logger(__name__)


@dataclass(frozen=True)
class TokensOfRun:
    """The tokens of a run, which the records of its stores must have.

    Attributes:
        vocabulary: of the teacher's tokens.
        student: the student's shape.
        length: positions of a record.
        student_tokenizer: of the student, if the teacher has another one.
        student_length: positions of the student's samples; None with one tokenizer.
        has_sources: whether the run reads a corpus.
        key: of the teacher in the configuration.
        is_beside: whether another teacher has a tokenizer of its own, and this one the student's.
    """

    vocabulary: Vocabulary
    student: Architecture
    length: int
    student_tokenizer: str | None
    student_length: int | None
    has_sources: bool = True
    key: str = "teacher"
    is_beside: bool = False

    @classmethod
    def of(
        cls,
        data: DataConfig,
        teacher: ModelConfig,
        vocabulary: Vocabulary,
        student: Architecture,
        student_tokenizer: str | None,
        *,
        key: str,
        is_beside: bool = False,
    ) -> TokensOfRun:
        """The tokens of a run, for the stores of one teacher."""
        length = teacher.sequence_length or data.sequence_length
        student_length = None if student_tokenizer is None else data.sequence_length
        has_sources = bool(data.sources)
        return cls(
            vocabulary,
            student,
            length,
            student_tokenizer,
            student_length,
            has_sources,
            key,
            is_beside,
        )

    @property
    def joined_sides(self) -> JoinedSides:
        """Whose tokens find records that are joined by documents."""
        return JoinedSides(student=int(self.is_beside), teacher=not self.is_beside)

    def is_by_document(self, store: StoreReader) -> bool:
        """Whether the samples of a store are in the teacher's tokens alone, and the run's not."""
        is_for_two = self.student_tokenizer is not None or self.is_beside
        return is_for_two and store.identity.student_tokenizer is None

    def check(self, store: StoreReader) -> None:
        """Raise StoreError unless a store's records have these tokens."""
        self._check_sides(store)
        self._check_tokenizer(store)
        _check_vocabulary(store, self.vocabulary, self.student)
        found = (store.settings.student_length, store.settings.sequence_length)
        if found == (self.student_length, self.length) or self.is_by_document(store):
            return
        if self.student_length is None:
            raise StoreError(
                f"{store.folder}: its sequence_length is {found[1]}, this run's {self.length}; set "
                "data.sequence_length to the store's, or capture a store for this run"
            )
        raise StoreError(
            f"{store.folder}: its samples have {found[0]} positions of the student and {found[1]} "
            f"of the teacher, this run's {self.student_length} and {self.length}. Set "
            f"data.sequence_length={found[0]} and {self.key}.sequence_length={found[1]}, or "
            "capture a store for this run"
        )

    def _check_sides(self, store: StoreReader) -> None:
        there, here = store.identity.student_tokenizer, self.student_tokenizer
        if self.is_by_document(store) and not self.has_sources:
            raise StoreError(
                f"{store.folder}: captured with the teacher's tokenizer alone, without tokens of "
                "this student; name the corpus in data.sources, or capture a store with "
                "capture.aligned=true"
            )
        if there is not None and self.is_beside:
            raise StoreError(
                f"{store.folder}: captured for a student with a tokenizer of its own, and "
                f"{self.key} has the tokenizer of the student. Capture a store with "
                "capture.aligned=false"
            )
        if there is not None and here is None:
            raise StoreError(
                f"{store.folder}: captured for a student with a tokenizer of its own, and no term "
                "has an alignment. Set alignment of objective.terms.0, or capture a store with "
                "capture.aligned=false"
            )
        if there is not None and here is not None and there != here:
            raise StoreError(
                f"{store.folder}: captured for a student with the tokenizer {there[:12]}, not "
                f"{here[:12]}; set data.tokenizer to that of the capture, or capture a store with "
                "this one"
            )

    def _check_tokenizer(self, store: StoreReader) -> None:
        there, here = store.identity.tokenizer, self.vocabulary.identity
        if there == UNKNOWN:
            _LOGGER.warning(
                "%s does not name its tokenizer, so it cannot be compared with that of this run",
                store.folder,
            )
        elif there != here:
            own = f"{self.key}.tokenizer"
            key = "data.tokenizer" if self.student_tokenizer is None else own
            raise StoreError(
                f"{store.folder}: its tokenizer is {there[:12]}, not {here[:12]} as in this run. "
                f"Remove {key} to use that of the store, or capture a store with this one"
            )


def _check_vocabulary(store: StoreReader, vocabulary: Vocabulary, student: Architecture) -> None:
    """Raise StoreError unless the ids of a store are those of this run.

    Older releases wrote the number of the teacher's rows, padding among them. With the run's
    tokenizer that is any number above its tokens; without a known one, that of the student's rows.
    """
    size, tokens = store.settings.vocab_size, vocabulary.size
    is_ours = store.identity.tokenizer == vocabulary.identity
    if size == tokens or (size > tokens and (is_ours or size == student.vocab_size)):
        return
    raise StoreError(
        f"{store.folder}: its vocab_size is {size}, this run's tokenizer has {tokens} tokens; use "
        "its tokenizer, or capture a store for this run"
    )

"""How much of samples in the tokens of two models is in chunks: bytes, tokens, labels, sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import numpy as np
from numpy.typing import NDArray

from megatron_distill.align import Coverage, SideCoverage
from megatron_distill.data.aligned.documents import is_unknown
from megatron_distill.data.samples import FULLY_TRAINED, NO_CHUNK, PADDING_DOCUMENT, Sample
from megatron_distill.data.tokenizers.protocol import Tokenizer

__all__ = ["StepCoverage", "TokenBytes", "sample_coverage"]


@dataclass(frozen=True)
class TokenBytes:
    """The number of bytes of each token of a vocabulary, read at first use."""

    tokenizer: Tokenizer

    @cached_property
    def lengths_v(self) -> NDArray[np.int64]:
        """Bytes of each id in running text, int64; 0 for special tokens."""
        return np.array([len(token or b"") for token in self.tokenizer.token_bytes()], np.int64)


@dataclass(frozen=True)
class StepCoverage:
    """The coverage of a step's samples, as figures for the log."""

    student: TokenBytes
    teacher: TokenBytes

    def __call__(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Shares of bytes and tokens in chunks, of unknown tokens, and of chunks by size."""
        parts = (sample_coverage(sample, self.student, self.teacher) for sample in samples)
        found = reduce(Coverage.merge, parts)
        figures: dict[str, float] = {}
        for name, side in (("student", found.student), ("teacher", found.teacher)):
            figures[f"{name}_bytes"] = side.aligned_bytes / max(1, side.bytes)
            figures[f"{name}_tokens"] = side.aligned_tokens / max(1, side.tokens)
            figures[f"{name}_unknown"] = side.unknown / max(1, side.tokens)
        for name in ("one_to_one", "one_to_many", "many_to_one", "many_to_many"):
            figures[name] = getattr(found, name) / max(1, found.chunks)
        largest = {
            "largest_student": found.largest_student,
            "largest_teacher": found.largest_teacher,
        }
        return figures | largest


def sample_coverage(sample: Sample, student: TokenBytes, teacher: TokenBytes) -> Coverage:
    """Coverage of a sample; labels are those that a loss trains, of the teacher those in chunks."""
    other = sample.teacher
    assert other is not None, "an aligned sample has the teacher's tokens"
    documents_S1 = sample.document_ids_S1
    is_label_S1 = (sample.flags_S1 & FULLY_TRAINED > 0) & (documents_S1 != PADDING_DOCUMENT)
    is_label_S1[0] = False
    is_label_S1[1:] &= documents_S1[1:] == documents_S1[:-1]
    numbers = other.student_chunks_S1, other.chunks_U1
    sides = (
        _side(sample.tokens_S1, documents_S1, numbers[0], student, is_label_S1),
        _side(other.tokens_U1, other.document_ids_U1, numbers[1], teacher, numbers[1] != NO_CHUNK),
    )
    own, others = (np.bincount(one[one != NO_CHUNK]) for one in numbers)
    return Coverage(
        student=sides[0],
        teacher=sides[1],
        texts=int(documents_S1.max()) + 1,
        chunks=len(own),
        trained_chunks=len(own),
        one_to_one=int(np.count_nonzero((own == 1) & (others == 1))),
        one_to_many=int(np.count_nonzero((own == 1) & (others > 1))),
        many_to_one=int(np.count_nonzero((own > 1) & (others == 1))),
        many_to_many=int(np.count_nonzero((own > 1) & (others > 1))),
        largest_student=int(own.max(initial=0)),
        largest_teacher=int(others.max(initial=0)),
    )


def _side(
    tokens_n: NDArray[np.int32],
    documents_n: NDArray[np.int32],
    chunks_n: NDArray[np.int32],
    of_token: TokenBytes,
    is_label_n: NDArray[np.bool_],
) -> SideCoverage:
    is_real_n, inside_n = documents_n != PADDING_DOCUMENT, chunks_n != NO_CHUNK
    bytes_n = of_token.lengths_v[tokens_n] * is_real_n
    unknown_n = is_unknown(of_token.tokenizer, tokens_n) & is_real_n
    return SideCoverage(
        tokens=int(np.count_nonzero(is_real_n)),
        aligned_tokens=int(np.count_nonzero(inside_n)),
        bytes=int(bytes_n.sum()),
        aligned_bytes=int(bytes_n[inside_n].sum()),
        labels=int(np.count_nonzero(is_label_n)),
        aligned_labels=int(np.count_nonzero(is_label_n & inside_n)),
        unknown=int(np.count_nonzero(unknown_n)),
    )

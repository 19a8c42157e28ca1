"""Held-out losses per byte of text, which models with different tokenizers have in common."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_distill.data.collation import label_masks, pack_samples
from megatron_distill.data.samples import Sample
from megatron_distill.errors import DataError

__all__ = ["HeldOutText", "measure_text", "require_comparable"]

# Largest difference of two tokenizers' texts: the first tokens of documents, which are no labels.
_DIFFERENCE = 0.01


@dataclass(frozen=True)
class HeldOutText:
    """The labels of held-out samples, and their text.

    Attributes:
        samples: number of samples.
        labels: number of labels that cross-entropy counts.
        text_bytes: bytes of the labels' text; the end of a document has none.
    """

    samples: int
    labels: int
    text_bytes: int

    @property
    def bytes_per_label(self) -> float:
        """Mean number of bytes of a label."""
        return self.text_bytes / self.labels

    def bits_per_byte(self, nats_per_label: float) -> float:
        """The mean cross-entropy of the labels, in bits per byte of their text."""
        return nats_per_label * self.labels / (self.text_bytes * math.log(2))


def measure_text(
    samples: Iterable[Sample], token_bytes: Sequence[bytes | None], *, isolate_documents: bool
) -> HeldOutText:
    """Count the labels of samples, and the bytes of their text.

    token_bytes: of each id of the samples' tokenizer. isolate_documents: as in training; the first
    token of a document is then no label. Raises DataError: the labels have no text.
    """
    lengths_V = np.array([len(one or b"") for one in token_bytes], np.int64)
    count = labels = text_bytes = 0
    for sample in samples:
        marks_1S1 = pack_samples([sample]).marks_GS1
        is_label_S = label_masks(marks_1S1, isolate_documents=isolate_documents)[0][0].numpy()
        count += 1
        labels += int(is_label_S.sum())
        text_bytes += int(lengths_V[sample.tokens_S1[1:][is_label_S]].sum())
    if not text_bytes:
        raise DataError(
            f"{count} held-out samples contain no text to predict; raise data.validation_fraction"
        )
    return HeldOutText(count, labels, text_bytes)


def require_comparable(student: HeldOutText, teacher: HeldOutText) -> None:
    """Raise DataError unless both tokenizers' labels are the same text, but for first tokens."""
    if abs(student.text_bytes - teacher.text_bytes) > _DIFFERENCE * teacher.text_bytes:
        raise DataError(
            f"the held-out labels are {student.text_bytes:,} bytes of text for the student and "
            f"{teacher.text_bytes:,} for the teacher, too different to compare. Documents are "
            "short, or the tokenizers share no boundary; change data.sources or raise "
            "data.validation_fraction"
        )

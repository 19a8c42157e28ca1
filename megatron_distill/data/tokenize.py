"""A corpus tokenised once: the documents of a source as token rows, in the order of its files."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from megatron_distill.data.corpora import SourceSpec, source_files
from megatron_distill.data.documents import Cursor, DocumentReader, reading_table
from megatron_distill.data.stream import TextEncoder, encoded
from megatron_distill.errors import DataError


def tokenized_documents(
    spec: SourceSpec, tokenizer: TextEncoder, *, skip_bad: bool
) -> Iterator[list[NDArray[np.int32]]]:
    """Yield each document as consecutive rows of ids, its end-of-document token last.

    Nothing is held out or shuffled. Raises DataError, see `DocumentReader`.
    """
    if spec.format == "megatron":
        raise DataError("a source of format megatron is tokenised already")
    reader = DocumentReader(
        source_files(spec),
        read=reading_table(spec.text_key)[spec.format, spec.documents],
        skip_bad=skip_bad,
    )
    pieces = reader.documents(range(len(reader.files)), Cursor())
    parts: list[NDArray[np.int32]] = []
    for row, is_end in encoded(((piece, piece.is_end) for piece in pieces), tokenizer):
        parts.append(row)
        if is_end:
            yield parts
            parts = []

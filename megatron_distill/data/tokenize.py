"""A corpus tokenised once: the documents of a source as token rows, in the order of its files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_distill.data.corpora import SourceSpec, source_files
from megatron_distill.data.documents import Cursor, Document, DocumentReader, reading_table
from megatron_distill.data.stream import TextEncoder
from megatron_distill.errors import DataError

_ENCODED_CHARACTERS: Final = 1 << 22  # tokenised at once: enough to keep many cores busy


def tokenized_documents(
    spec: SourceSpec, tokenizer: TextEncoder, *, skip_bad: bool
) -> Iterator[list[NDArray[np.int32]]]:
    """Yield each document as consecutive rows of ids, the last one its end-of-document token.

    Nothing is held out or shuffled. Raises DataError, see `DocumentReader`.
    """
    if spec.format == "megatron":
        raise DataError("a source of format megatron is tokenised already")
    reader = DocumentReader(
        source_files(spec),
        read=reading_table(spec.text_key)[spec.format, spec.documents],
        skip_bad=skip_bad,
    )
    end = np.array([tokenizer.eos_id], np.int32)
    parts: list[NDArray[np.int32]] = []
    pieces = reader.documents(range(len(reader.files)), Cursor())
    for batch in _batches(pieces):
        rows = tokenizer.encode_batch([piece.text for piece in batch])
        for row, piece in zip(rows, batch, strict=True):
            parts.append(row)
            if piece.is_end:
                yield [*parts, end]
                parts = []


def _batches(pieces: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= _ENCODED_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch

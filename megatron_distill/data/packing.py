"""Documents laid end to end and cut into windows of S + 1 tokens."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_distill.data.samples import FULLY_TRAINED, PADDING_DOCUMENT, Sample

Mark = TypeVar("Mark")


@dataclass(frozen=True)
class _Segment(Generic[Mark]):
    tokens: NDArray[np.int32]
    mark: Mark


class Packer(Generic[Mark]):
    """Cuts a row of documents into windows of S + 1 tokens with stride S.

    The last label of one sample is the first token of the next, so that every token but the very
    first is a label exactly once. A document that does not end inside a sample goes on in the next
    one as a document of its own there, since attention cannot look back across samples.

    Each document carries a mark; `start` gives the mark and the token offset at which the next
    sample begins, which is all that is needed to come back there.
    """

    def __init__(self, sequence_length: int, *, padding_token: int) -> None:
        self.sequence_length = sequence_length
        self.padding_token = padding_token
        self._segments: deque[_Segment[Mark]] = deque()
        self._offset = 0  # of the next sample inside the first segment
        self._available = 0

    @property
    def is_ready(self) -> bool:
        """Whether a whole sample can be cut."""
        return self._available > self.sequence_length

    @property
    def start(self) -> tuple[Mark, int] | None:
        """Mark and token offset of the document where the next sample begins; None if unknown."""
        if not self._segments:
            return None
        return self._segments[0].mark, self._offset

    def add(self, tokens: NDArray[np.int32], mark: Mark, *, skip: int = 0) -> None:
        """Append a document, without its first `skip` tokens (only where nothing is held yet)."""
        assert skip == 0 or not self._segments, "only the first document can begin inside"
        if len(tokens) <= skip:
            return
        if not self._segments:
            self._offset = skip
        self._segments.append(_Segment(tokens, mark))
        self._available += len(tokens) - skip

    def take(self, sample_id: int) -> Sample:
        """Cut the next sample; only when `is_ready`."""
        assert self.is_ready
        return self._cut(self.sequence_length + 1, sample_id)

    def flush(self, sample_id: int) -> Sample | None:
        """Cut what is left into one sample filled up with padding; None if it holds no label."""
        assert not self.is_ready
        sample = self._cut(self._available, sample_id) if self._available > 1 else None
        self._segments.clear()
        self._available = self._offset = 0
        return sample

    def _cut(self, length: int, sample_id: int) -> Sample:
        width = self.sequence_length + 1
        tokens = np.full(width, self.padding_token, np.int32)
        documents = np.full(width, PADDING_DOCUMENT, np.int32)
        filled, offset = 0, self._offset
        for document, segment in enumerate(self._segments):
            part = segment.tokens[offset : offset + length - filled]
            tokens[filled : filled + len(part)] = part
            documents[filled : filled + len(part)] = document
            filled, offset = filled + len(part), 0
            if filled == length:
                break
        self._advance(length - 1)
        flags = np.where(documents == PADDING_DOCUMENT, 0, FULLY_TRAINED).astype(np.uint8)
        return Sample(tokens, documents, flags, sample_id)

    def _advance(self, count: int) -> None:
        self._available -= count
        self._offset += count
        while self._segments and self._offset >= len(self._segments[0].tokens):
            self._offset -= len(self._segments.popleft().tokens)

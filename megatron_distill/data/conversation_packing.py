"""Whole conversations put into windows of S + 1 tokens, so that little of a window stays empty."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_distill.data.samples import FULLY_TRAINED, PADDING_DOCUMENT, Sample

TRUNCATIONS: Final = ("right", "left", "split", "drop", "error")


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [start, stop) of all tokens of a source: a conversation, or a part of a long one."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.stop - self.start


def cut_conversation(start: int, stop: int, *, width: int, truncation: str) -> list[Piece]:
    """The pieces of at most `width` tokens that a conversation gives under a policy.

    right keeps its beginning, left its end, split all of it: the last token of a piece is the first
    of the next, so that each label is trained once, without what lies before its piece. drop (and
    error, which is the caller's to raise) keeps nothing of a longer one.
    """
    assert truncation in TRUNCATIONS, truncation
    if stop - start <= width:
        return [Piece(start, stop)]
    if truncation == "right":
        return [Piece(start, start + width)]
    if truncation == "left":
        return [Piece(stop - width, stop)]
    if truncation == "split":
        begins = range(start, stop - 1, width - 1)
        return [Piece(begin, min(begin + width, stop)) for begin in begins]
    return []


def fill_windows(lengths: Sequence[int], *, width: int) -> list[list[int]]:
    """Places of pieces put together so that the lengths of a window's add up to at most `width`.

    Best fit decreasing: the longest first, each into the window that it fills best; within a window
    and between windows of equals the order of the pieces. O(n log n), a pure function.
    """
    windows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens free, window), ascending
    for place in sorted(range(len(lengths)), key=lambda place: (-lengths[place], place)):
        length = lengths[place]
        assert 0 < length <= width, length
        found = bisect_left(free, (length, -1))
        if found < len(free):
            left, window = free.pop(found)
        else:
            left, window = width, len(windows)
            windows.append([])
        windows[window].append(place)
        if left > length:
            insort(free, (left - length, window))
    return [sorted(window) for window in windows]


def packed_sample(
    pieces: Sequence[Piece],
    tokens_n: NDArray[np.int32],
    flags_n: NDArray[np.uint8],
    *,
    width: int,
    padding_token: int,
    sample_id: int,
) -> Sample:
    """One sample of pieces, each a document of its own, and padding after them."""
    tokens = np.full(width, padding_token, np.int32)
    documents = np.full(width, PADDING_DOCUMENT, np.int32)
    flags = np.zeros(width, np.uint8)
    filled = 0
    for document, piece in enumerate(pieces):
        own = slice(filled, filled + piece.length)
        tokens[own] = tokens_n[piece.start : piece.stop]
        flags[own] = flags_n[piece.start : piece.stop]
        documents[own] = document
        filled += piece.length
    return Sample(tokens, documents, flags, sample_id)


def trains_something(piece: Piece, flags_n: NDArray[np.uint8]) -> bool:
    """Whether a label of the piece is trained; its first token is no label."""
    return bool((flags_n[piece.start + 1 : piece.stop] & FULLY_TRAINED).any())

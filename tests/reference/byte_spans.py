"""Byte ranges of a text's tokens, byte by byte."""

from __future__ import annotations

from collections.abc import Sequence

Range = tuple[int, int]


def spans_of_tokens(text: str, tokens: Sequence[bytes], *, space: str = "") -> list[Range]:
    """Ranges of tokens that write a text, and a space "first" or "last" beyond it."""
    data = text.encode()
    before = int(space == "first" and bool(text))
    added = b" " * (space == "last" and bool(text))
    assert b"".join(tokens) == b" " * before + data + added
    spans: list[Range] = []
    place = 0
    for token in tokens:
        ends = [min(max(at - before, 0), len(data)) for at in (place, place + len(token))]
        spans.append((ends[0], ends[1]))
        place += len(token)
    return spans

"""Which characters of a text each token covers, character by character."""

from __future__ import annotations

from collections.abc import Sequence

Span = tuple[int, int]


def spans_of_bytes(text: str, tokens: Sequence[bytes]) -> list[Span]:
    """Spans of tokens that together are the text's bytes: first to last character touched."""
    character_of_byte = [
        index for index, character in enumerate(text) for _ in character.encode("utf-8")
    ]
    assert b"".join(tokens) == text.encode("utf-8")
    spans: list[Span] = []
    place = 0
    for token in tokens:
        touched = [character_of_byte[place + offset] for offset in range(len(token))]
        spans.append((min(touched), max(touched) + 1))
        place += len(token)
    return spans


def spans_of_rewritten(
    origins: Sequence[int], tokens: Sequence[bytes], rewritten: str, *, has_dummy: bool
) -> list[Span]:
    """Spans of tokens that together are a rewritten text, whose character i began at origins[i].

    A character that became several is covered by the tokens of each of them. With `has_dummy` the
    first rewritten character is an added space; it covers the characters removed behind it.
    """
    sources: list[Span] = []
    for index in range(len(rewritten)):
        later = [origin for origin in origins[index + 1 :] if origin > origins[index]]
        stop = later[0] if later else origins[index]
        if has_dummy and index == 0:
            stop = origins[1]
        sources.append((origins[index], stop))
    spans: list[Span] = []
    place = 0
    touched_by_byte = [
        source
        for character, source in zip(rewritten, sources, strict=True)
        for _ in character.encode("utf-8")
    ]
    assert b"".join(tokens) == rewritten.encode("utf-8")
    for token in tokens:
        touched = touched_by_byte[place : place + len(token)]
        spans.append((touched[0][0], touched[-1][1]))
        place += len(token)
    return spans

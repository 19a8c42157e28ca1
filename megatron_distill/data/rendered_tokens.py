"""Tokens of text that a chat template wrote, special tokens spelled out in it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from megatron_distill.data.tokenizer_protocol import Encoding, Tokenizer

_Part = tuple[str, int | None]


def encode_rendered(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Encoding]:
    """Tokens and offsets of each text, each special token that it spells out being that token.

    Some tokenizers never make a special token of a text: what lies between two of them is then
    encoded as a text of its own. Raises DataError as `encode_with_offsets` does.
    """
    if tokenizer.reads_special_tokens:
        return tokenizer.encode_with_offsets(texts)
    by_length = sorted(tokenizer.special_ids, key=len, reverse=True)
    special = re.compile(f"({'|'.join(map(re.escape, by_length))})")
    parts = [_parts(text, special, tokenizer.special_ids) for text in texts]
    plain = [part for row in parts for part, number in row if number is None]
    encoded = iter(tokenizer.encode_with_offsets(plain))
    return [
        _joined(
            row,
            [next(encoded) if number is None else _single(part, number) for part, number in row],
        )
        for row in parts
    ]


def _parts(text: str, special: re.Pattern[str], ids: dict[str, int]) -> list[_Part]:
    """The text in pieces: special tokens with their ids, and what lies between them."""
    found = enumerate(special.split(text))
    # Every second piece is what the pattern has found.
    return [(piece, ids[piece] if at % 2 else None) for at, piece in found if piece]


def _single(text: str, number: int) -> Encoding:
    ids, start, stop = (np.array([value], np.int32) for value in (number, 0, len(text)))
    return Encoding(ids, start, stop)


def _joined(row: Sequence[_Part], encodings: Sequence[Encoding]) -> Encoding:
    places = [0, *accumulate(len(part) for part, _ in row)]
    nothing = np.zeros(0, np.int32)
    moved = [
        (one.ids_n, one.starts_n + place, one.stops_n + place)
        for one, place in zip(encodings, places, strict=False)
    ]
    ids, starts, stops = (
        np.concatenate([nothing, *columns], dtype=np.int32)
        for columns in (zip(*moved, strict=True) if moved else ((), (), ()))
    )
    return Encoding(ids, starts, stops)

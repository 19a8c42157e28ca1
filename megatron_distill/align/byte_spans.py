"""The byte range of each token of a text, for every kind of tokenizer.

Where the bytes of the tokens, one after another, are the text, their lengths give the ranges. A
tokenizer may rewrite the text (lower case, normal forms, unknown characters, lost spaces). Then its
own encoding gives the characters of each token.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from os.path import commonprefix
from typing import Final, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_distill.align.chunks import Bools, Ints
from megatron_distill.errors import DataError

__all__ = ["ByteTokenizer", "CharacterSpans", "continued_spans", "token_spans"]

_SPACE: Final = b" "
# One of these is in every vocabulary, so a space put before or behind a text is found.
_PROBES: Final = ("a", "e", "1", ".", "-")
_TABLES: Final = 8
_AROUND: Final = 20  # bytes of a text before and behind a difference, in messages


class CharacterSpans(Protocol):
    """Token ids of a text and the characters `text[starts_n[i]:stops_n[i]]` of each."""

    @property
    def ids_n(self) -> NDArray[np.int32]:
        """Token ids."""
        ...

    @property
    def starts_n(self) -> NDArray[np.int32]:
        """First character of each token; never decreases."""
        ...

    @property
    def stops_n(self) -> NDArray[np.int32]:
        """Character after the last of each token; never decreases."""
        ...


class ByteTokenizer(Protocol):
    """A tokenizer with the bytes of its tokens; see `data.tokenizers.protocol`."""

    @property
    def name(self) -> str:
        """Its origin, for messages."""
        ...

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Special tokens to their ids."""
        ...

    def token_bytes(self) -> Sequence[bytes | None]:
        """The bytes of every id inside running text; None for special tokens and empty ids."""
        ...

    def encode_with_offsets(self, texts: Sequence[str]) -> Sequence[CharacterSpans]:
        """Token ids of each text and the characters of each token."""
        ...


@dataclass(frozen=True, eq=False)
class _ByteTable:
    """The bytes of a tokenizer's tokens, and the space that it adds to a text.

    spellings: of each special id. space_first, space_last: whether it adds one there.
    """

    of_id: Sequence[bytes | None]
    lengths_V: Ints
    has_bytes_V: Bools
    spellings: Mapping[int, tuple[bytes, ...]]
    space_first: bool
    space_last: bool

    def joined(self, ids: Sequence[int]) -> bytes:
        return b"".join([self.of_id[number] or b"" for number in ids])


def token_spans(tokenizer: ByteTokenizer, token_ids: ArrayLike, text: str) -> Ints:
    """The half-open byte range of each token in the text's UTF-8, int64 `[N, 2]`.

    token_ids: integers `[N]`, an encoding of the text. Any tokens whose bytes are the text will do;
    where the tokenizer rewrites characters, it must be the encoding that the tokenizer gives.
    Special tokens may stand before and behind the text; inside it the text must spell them.

    Empty ranges: special tokens that the text does not spell, spaces that the tokenizer adds. Of
    tokens that share rewritten characters with no boundary between them, the first one has their
    range and the rest have none. Unknown tokens have the range of their characters.

    Tables of the last few tokenizers stay in memory. Raises DataError: the ids do not encode the
    text, or the tokenizer does not report the characters of a token. It names the tokenizer, the
    text around the first difference and its byte.
    """
    return continued_spans(tokenizer, token_ids, text)[0]


def continued_spans(
    tokenizer: ByteTokenizer, token_ids: ArrayLike, text: str
) -> tuple[Ints, Bools]:
    """The ranges as of `token_spans`, and of each token whether it continues the one before it.

    Such a token has an empty range and is a further part of rewritten characters. Their range is
    that of the last token with text; its probability is a factor of theirs. A space that the
    tokenizer adds, and a special token, continue nothing.
    """
    table = _table(tokenizer)  # type: ignore[arg-type]  # every object has a hash
    ids_N = _checked_ids(token_ids, table, tokenizer.name)
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{tokenizer.name}: the text {text[:40]!r} contains an unpaired surrogate at character "
            f"{error.start}; give valid UTF-8"
        ) from error
    found = _by_bytes(table, ids_N, data)
    if found is not None:
        return found, np.zeros(len(ids_N), np.bool_)
    return _by_characters(tokenizer, table, ids_N, text, data)


@lru_cache(maxsize=_TABLES)
def _table(tokenizer: ByteTokenizer) -> _ByteTable:
    of_id = tokenizer.token_bytes()
    spellings: dict[int, tuple[bytes, ...]] = {}
    for text, number in tokenizer.special_ids.items():
        spellings[number] = (*spellings.get(number, ()), text.encode())
    probes = [
        [of_id[number] or b"" for number in encoding.ids_n.tolist()]
        for encoding in tokenizer.encode_with_offsets(_PROBES)
    ]
    return _ByteTable(
        of_id,
        np.array([len(token or b"") for token in of_id], np.int64),
        np.array([token is not None for token in of_id], np.bool_),
        spellings,
        space_first=any(b"".join(tokens).startswith(_SPACE) for tokens in probes),
        space_last=any(b"".join(tokens).endswith(_SPACE) for tokens in probes),
    )


def _checked_ids(token_ids: ArrayLike, table: _ByteTable, name: str) -> Ints:
    ids_N = np.asarray(token_ids)
    if ids_N.size == 0:
        return np.zeros(0, np.int64)
    if ids_N.ndim != 1 or ids_N.dtype.kind not in "iu":
        raise ValueError(f"token_ids: {ids_N.dtype} of shape {ids_N.shape}; give integers [N]")
    ids_N = ids_N.astype(np.int64, copy=False)
    is_outside = (ids_N < 0) | (ids_N >= len(table.of_id))
    if is_outside.any():
        index = int(np.argmax(is_outside))
        raise DataError(
            f"{name}: token {index} is id {int(ids_N[index])}, and ids are in "
            f"[0, {len(table.of_id)}); give ids of this tokenizer"
        )
    return ids_N


def _by_bytes(table: _ByteTable, ids_N: Ints, data: bytes) -> Ints | None:
    """The spans if the tokens' bytes and the special tokens that the text spells are the text."""
    widths_N = table.lengths_V[ids_N]
    if table.has_bytes_V[ids_N].all():
        fits = _ends_of_run(table, table.joined(ids_N.tolist()), data, 0)
        path = [(fits[len(data)], 0, len(ids_N))] if len(data) in fits else None
    else:
        path = _through_specials(table, ids_N, data, widths_N)
    if path is None:
        return None
    for (dropped_first, dropped_last), start, stop in path:
        if start < stop:
            widths_N[start] -= dropped_first
            widths_N[stop - 1] -= dropped_last
    stops_N = np.cumsum(widths_N)
    return np.stack([stops_N - widths_N, stops_N], axis=1)


_Dropped = tuple[int, int]  # spaces that the tokenizer added first and last


def _ends_of_run(table: _ByteTable, joined: bytes, data: bytes, begin: int) -> dict[int, _Dropped]:
    """Where a run of tokens ends in the text if it begins at a byte, at most once per end."""
    found: dict[int, _Dropped] = {}
    if data.startswith(joined, begin):
        found[begin + len(joined)] = (0, 0)
    less = begin + len(joined) - 1
    if table.space_last and joined.endswith(_SPACE) and data.startswith(joined[:-1], begin):
        found[less] = (0, 1)
    if table.space_first and joined.startswith(_SPACE) and data.startswith(joined[1:], begin):
        found[less] = (1, 0)
    return found


def _through_specials(
    table: _ByteTable, ids_N: Ints, data: bytes, widths_N: Ints
) -> list[tuple[_Dropped, int, int]] | None:
    """The runs between special tokens, if they and the spelled special tokens are the text.

    Also writes the lengths of the spelled special tokens into `widths_N`. All places that the
    tokens so far can end at are followed: a special token can be spelled or stand outside the text.
    Places from which the further tokens cannot reach the end are not: of n spelled tokens in a row
    there would be n squared.
    """
    has_bytes = table.has_bytes_V[ids_N]
    edges = np.flatnonzero(np.diff(has_bytes.astype(np.int8), prepend=0, append=0)).tolist()
    runs = dict(zip(edges[::2], edges[1::2], strict=True))
    first, last = (edges[0], edges[-1]) if edges else (len(ids_N), 0)
    least_N1 = len(data) - _most_bytes_from(table, ids_N, widths_N)
    items: list[tuple[int, int]] = []
    steps: list[dict[int, tuple[int, _Dropped]]] = []  # end: (begin, spaces dropped)
    ends: list[int] = [0]
    place = 0
    while place < len(ids_N):
        stop = runs.get(place, place + 1)
        reached: dict[int, tuple[int, _Dropped]] = {}
        joined = table.joined(ids_N[place:stop].tolist()) if place in runs else b""
        for begin in ends:
            if place in runs:
                fits = _ends_of_run(table, joined, data, begin)
            else:
                spelled = table.spellings.get(int(ids_N[place]), ())
                fits = {begin + len(one): (0, 0) for one in spelled if data.startswith(one, begin)}
                if spelled and not first <= place < last:
                    fits.setdefault(begin, (0, 0))
            for end, dropped in fits.items():
                if end >= least_N1[stop]:
                    reached.setdefault(end, (begin, dropped))
        if not reached:
            return None
        items.append((place, stop))
        steps.append(reached)
        ends, place = list(reached), stop
    end, path = len(data), []
    for (start, stop), reached in zip(reversed(items), reversed(steps), strict=True):
        if end not in reached:
            return None
        begin, dropped = reached[end]
        if start in runs:
            path.append((dropped, start, stop))
        else:
            widths_N[start] = end - begin
        end = begin
    return path


def _most_bytes_from(table: _ByteTable, ids_N: Ints, widths_N: Ints) -> Ints:
    """The most bytes that each token and those behind it can cover, int64 `[N + 1]`."""
    most_N1 = np.append(widths_N, 0)
    for place in np.flatnonzero(~table.has_bytes_V[ids_N]).tolist():
        spelled = table.spellings.get(int(ids_N[place]), ())
        most_N1[place] = max(map(len, spelled), default=0)
    return np.cumsum(most_N1[::-1])[::-1]


def _by_characters(
    tokenizer: ByteTokenizer, table: _ByteTable, ids_N: Ints, text: str, data: bytes
) -> tuple[Ints, Bools]:
    """The spans from the characters of each token that the tokenizer gives for the text.

    Also which tokens continue another one, see `continued_spans`.
    """
    found = (
        (characters_n2, encoded_n, lead)
        for characters_n2, encoded_n in _encodings(tokenizer, text)
        if (lead := _lead(table, ids_N, encoded_n)) is not None
    )
    characters_n2, encoded_n, lead = next(found, (None, None, 0))
    if characters_n2 is None or encoded_n is None:
        raise DataError(_no_encoding(tokenizer, table, ids_N, data))
    leads_b = (np.frombuffer(data, np.uint8) & 0xC0) != 0x80
    byte_of_character = np.append(np.flatnonzero(leads_b), len(data))
    spans_n2 = byte_of_character[_with_removed(characters_n2, text)].astype(np.int64)
    before_n = np.maximum.accumulate(spans_n2[:, 1])[:-1]
    shares_n = np.zeros(len(spans_n2) + 1, np.bool_)
    shares_n[1:-1] = spans_n2[1:, 0] < before_n
    edges = np.flatnonzero(np.diff(shares_n.astype(np.int8)))
    continues_N = np.zeros(len(ids_N), np.bool_)
    for start, stop in zip(edges[::2].tolist(), (edges[1::2] + 1).tolist(), strict=True):
        is_begin = start == 0 or not table.has_bytes_V[encoded_n[start - 1]]
        group = slice(start, stop)
        spans_n2[group], first = _split(
            table, encoded_n[group], spans_n2[group], data, is_begin=is_begin
        )
        if first is not None:
            continues_N[lead + start + first + 1 : lead + stop] = True
    spans_N2 = np.zeros((len(ids_N), 2), np.int64)
    spans_N2[lead : lead + len(spans_n2)] = spans_n2
    spans_N2[lead + len(spans_n2) :] = spans_n2[:, 1].max(initial=0)
    early = spans_N2[1:, 0] < spans_N2[:-1, 1]
    if early.any():
        index = int(np.argmax(early)) + 1
        place = int(spans_N2[index, 0])
        raise DataError(
            f"{tokenizer.name}: cannot be inverted at byte {place} of a text, "
            f"{_excerpt(data, place)}: token {index} begins before the token in front of it ends. "
            "Leave this text out"
        )
    return spans_N2, continues_N


def _encodings(tokenizer: ByteTokenizer, text: str) -> Iterator[tuple[Ints, Ints]]:
    """Yield characters `[n, 2]` and ids of the text's tokens: of the whole, then around specials.

    In a rendered conversation the text between special tokens is encoded on its own.
    """
    yield _whole(tokenizer, [text])
    by_length = sorted(tokenizer.special_ids, key=len, reverse=True)
    spelled = "|".join(map(re.escape, by_length))
    parts = re.split(f"({spelled})", text) if spelled else [text]
    if len(parts) > 1:
        yield _whole(tokenizer, parts)


def _whole(tokenizer: ByteTokenizer, parts: Sequence[str]) -> tuple[Ints, Ints]:
    """Parts of odd index are special tokens."""
    encodings = iter(tokenizer.encode_with_offsets(parts[::2]))
    spans, ids = [], []
    for index, begin in enumerate(accumulate((len(part) for part in parts[:-1]), initial=0)):
        part = parts[index]
        if index % 2:
            ids.append(np.array([tokenizer.special_ids[part]], np.int64))
            spans.append(np.array([[begin, begin + len(part)]], np.int64))
        else:
            encoding = next(encodings)
            ids.append(encoding.ids_n.astype(np.int64))
            characters_n2 = np.stack([encoding.starts_n, encoding.stops_n], axis=1)
            spans.append(characters_n2.astype(np.int64) + begin)
    return np.concatenate(spans), np.concatenate(ids)


def _with_removed(characters_n2: Ints, text: str) -> Ints:
    """Spans with the characters that the tokenizer removes or composes, but for white space.

    They belong to the token before them (the accent of a letter), at the beginning to the first.
    """
    starts_n, stops_n = characters_n2[:, 0].copy(), characters_n2[:, 1].copy()
    has_text = starts_n < stops_n
    depth = np.bincount(starts_n, minlength=len(text) + 1) - np.bincount(
        stops_n, minlength=len(text) + 1
    )
    edges = np.flatnonzero(np.diff(np.cumsum(depth[:-1]) > 0, prepend=True, append=True))
    of_edge = np.searchsorted(characters_n2[:, 1], edges, side="left")
    behind_edge = np.searchsorted(characters_n2[:, 1], edges, side="right")
    for at in range(0, len(edges), 2):
        start, stop = int(edges[at]), int(edges[at + 1])
        if start == 0 and not text[stop - 1].isspace():
            starts_n[(starts_n == stop) & has_text] = 0
        elif not text[start].isspace():
            white = next((place for place in range(start, stop) if text[place].isspace()), stop)
            before = slice(of_edge[at], behind_edge[at])
            stops_n[before] = np.where(has_text[before], white, stops_n[before])
    return np.stack([starts_n, stops_n], axis=1)


def _lead(table: _ByteTable, ids_N: Ints, encoded_n: Ints) -> int | None:
    """How many special tokens stand before the encoding in the ids; None if it is not in them."""
    extra = len(ids_N) - len(encoded_n)
    if extra < 0:
        return None
    # Places of ids that must be in the encoding.
    inside = np.flatnonzero([number not in table.spellings for number in ids_N.tolist()])
    least = max(0, int(inside[-1]) + 1 - len(encoded_n)) if len(inside) else 0
    most = min(extra, int(inside[0])) if len(inside) else extra
    for lead in range(least, most + 1):
        if np.array_equal(ids_N[lead : lead + len(encoded_n)], encoded_n):
            return lead
    return None


def _split(
    table: _ByteTable, ids_n: Ints, spans_n2: Ints, data: bytes, *, is_begin: bool
) -> tuple[Ints, int | None]:
    """The spans of tokens that share characters, from the tokens' bytes.

    The bytes must be those of the characters, or of characters of the same lengths (as in another
    case): then the index is None. Otherwise the first token with text has all: its index.
    is_begin: whether a text, or one behind a special token, begins with them.
    """
    start, stop = int(spans_n2[0, 0]), int(spans_n2[:, 1].max())
    widths_n = table.lengths_V[ids_n]
    joined = table.joined(ids_n.tolist())
    covered = data[start:stop]
    # Inside a text a space here is a part of the characters, as NFKC writes one for a bare accent.
    may_be_added = table.space_first and is_begin and joined.startswith(_SPACE)
    if may_be_added and (not covered.startswith(_SPACE) or joined[1:] == covered):
        joined = joined[1:]
        widths_n[np.argmax(widths_n > 0)] -= 1
    first = None
    if not table.has_bytes_V[ids_n].all() or _shape(joined) != _shape(covered):
        first = int(np.argmax((widths_n > 0) | ~table.has_bytes_V[ids_n]))
        widths_n[:] = 0
        widths_n[first] = stop - start
    stops_n = start + np.cumsum(widths_n)
    return np.stack([stops_n - widths_n, stops_n], axis=1), first


def _shape(data: bytes) -> bytes:
    """1 for the first byte of each character, 0 for the further ones."""
    return bytes((byte & 0xC0) != 0x80 for byte in data)


def _no_encoding(tokenizer: ByteTokenizer, table: _ByteTable, ids_N: Ints, data: bytes) -> str:
    """The message for ids that do not encode a text."""
    place = 0
    for number in ids_N.tolist():
        token = table.of_id[number]
        if token is None:
            texts = table.spellings.get(number, ())
            token = next((one for one in texts if data.startswith(one, place)), b"")
        if place == 0 and table.space_first and not data.startswith(_SPACE):
            token = token.removeprefix(_SPACE)
        equal = len(commonprefix([token, data[place : place + len(token)]]))
        place += equal
        if equal < len(token):
            break
    return (
        f"{tokenizer.name}: these ids do not encode the text at or after byte {place} of "
        f"{len(data)}, {_excerpt(data, place)}. Give the ids that this tokenizer's encode_batch "
        "returns for the text"
    )


def _excerpt(data: bytes, place: int) -> str:
    near = data[max(0, place - _AROUND) : place + _AROUND]
    return f"near {near.decode(errors='replace')!r}"

"""Building a vocabulary map from two tokenizers, with the tokens encoded in batches.

A row is evidence only if the teacher's tokens have exactly the bytes of the student's token. A
tokenizer may put a space before a text, or read its beginning differently. So the tokens inside a
running text are tried in several ways.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_distill.align.special_roles import DeclaresSpecialTokens, paired_special_tokens
from megatron_distill.align.vocabulary_map import (
    MOST_PIECES,
    Evidence,
    VocabularyMap,
    VocabularySide,
    piece_weights,
)
from megatron_distill.errors import DataError

__all__ = ["PLAIN_TERMS", "MappedTokenizer", "build_vocabulary_map", "check_two_tokenizers"]

PLAIN_TERMS: Final = "leave out `alignment` and use the plain terms of objective.terms"
# Texts before a token, with which a tokenizer encodes it as inside a running text.
_ANCHORS: Final = ("", "\n", "=", "a", "1")
_SPACE: Final = b" "

Spelled = tuple[int, ...]


class MappedTokenizer(DeclaresSpecialTokens, Protocol):
    """A tokenizer whose vocabulary can be mapped; see `data.tokenizers.protocol`."""

    @property
    def identity(self) -> str:
        """Digest of the vocabulary and its rules."""
        ...

    @property
    def vocab_size(self) -> int:
        """Ids are in [0, vocab_size)."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Token ids of each text, int32, without special tokens before or after."""
        ...

    def token_bytes(self) -> Sequence[bytes | None]:
        """The bytes of every id inside running text; None for special tokens and empty ids."""
        ...


def check_two_tokenizers(student: MappedTokenizer, teacher: MappedTokenizer) -> None:
    """Raise DataError for one tokenizer on both sides, with a pointer to the plain terms."""
    if student.identity == teacher.identity:
        raise DataError(
            f"objective.terms[].alignment: {student.name} and {teacher.name} are one tokenizer "
            f"(identity {student.identity}), so there is nothing to align; {PLAIN_TERMS}"
        )


def build_vocabulary_map(
    student: MappedTokenizer,
    teacher: MappedTokenizer,
    *,
    special_pairs: Sequence[tuple[str, str]] = (),
) -> VocabularyMap:
    """Return the vocabulary map of two tokenizers.

    special_pairs: spellings of special tokens that are one beyond the roles. Raises DataError: one
    tokenizer on both sides, no token of equal bytes, or a pair that names no special token.
    """
    check_two_tokenizers(student, teacher)
    special = paired_special_tokens(student, teacher, special_pairs=special_pairs)
    student_ids = _ids_of_bytes(student, without=special.keys())
    teacher_ids = _ids_of_bytes(teacher, without=special.values())
    _prefer_own_encoding(student, student_ids, among=teacher_ids)
    _prefer_own_encoding(teacher, teacher_ids, among=student_ids)

    rows: dict[int, Spelled] = {number: (partner,) for number, partner in special.items()}
    evidence_V = np.full(student.vocab_size, Evidence.NO_TOKEN, np.uint8)
    evidence_V[list(student.special_ids.values())] = Evidence.SPECIAL
    evidence_V[list(special)] = Evidence.ROLE
    pairs = dict(special)
    for token, ids in student_ids.items():
        partners = teacher_ids.get(token, [])
        for place, number in enumerate(ids):
            is_pair = place < len(partners)
            evidence_V[number] = Evidence.EXACT if is_pair else Evidence.SHARED
            if partners:
                rows[number] = (partners[place if is_pair else 0],)
            if is_pair:
                pairs[number] = partners[place]
    first_ids = {token: ids[0] for token, ids in teacher_ids.items()}
    unequal = [token for token in student_ids if token not in teacher_ids]
    for token, (kind, pieces) in _spelled(teacher, unequal, first_ids).items():
        evidence_V[student_ids[token]] = kind
        if pieces:
            rows.update(dict.fromkeys(student_ids[token], pieces))
    return VocabularyMap(
        student=_side(student, student_ids),
        teacher=_side(teacher, teacher_ids),
        student_ids_p=np.array(sorted(pairs), np.int64),
        teacher_ids_p=np.array([pairs[number] for number in sorted(pairs)], np.int64),
        evidence_V=evidence_V,
        special_pairs=tuple(special_pairs),
        **_row_arrays(rows, student.vocab_size)._asdict(),
    )


def _side(
    tokenizer: MappedTokenizer, ids_of_bytes: Mapping[bytes, Sequence[int]]
) -> VocabularySide:
    collisions = sum(len(ids) - 1 for ids in ids_of_bytes.values())
    return VocabularySide(tokenizer.name, tokenizer.identity, tokenizer.vocab_size, collisions)


def _ids_of_bytes(
    tokenizer: MappedTokenizer, *, without: Collection[int]
) -> dict[bytes, list[int]]:
    """Ids of each byte string, ascending; special tokens and `without` have none."""
    excluded = {*tokenizer.special_ids.values(), *without}
    found: dict[bytes, list[int]] = {}
    for number, token in enumerate(tokenizer.token_bytes()):
        if token and number not in excluded:
            found.setdefault(token, []).append(number)
    return found


def _prefer_own_encoding(
    tokenizer: MappedTokenizer,
    ids_of_bytes: dict[bytes, list[int]],
    *,
    among: Mapping[bytes, Sequence[int]],
) -> None:
    """Put the id that the tokenizer itself gives for the bytes first, where several ids have them.

    A SentencePiece model with byte fallback has `a` twice, and never encodes it as <0x61>.
    """
    shared = [token for token, ids in ids_of_bytes.items() if len(ids) > 1 and token in among]
    if not shared:
        return
    bytes_of = _bytes_by_id(tokenizer)
    found = {token: pieces[0] for token, pieces in _encoded(tokenizer, shared, bytes_of).items()
             if len(pieces) == 1}  # fmt: skip
    for token, number in found.items():
        ids = ids_of_bytes[token]
        ids.remove(number)
        ids.insert(0, number)


def _bytes_by_id(tokenizer: MappedTokenizer) -> list[bytes | None]:
    """The bytes of every id; None for special tokens."""
    found = list(tokenizer.token_bytes())
    for number in tokenizer.special_ids.values():
        found[number] = None
    return found


def _spelled(
    teacher: MappedTokenizer, tokens: Sequence[bytes], first_ids: Mapping[bytes, int]
) -> dict[bytes, tuple[Evidence, Spelled]]:
    """The teacher's tokens of each byte string, and the evidence for them; empty for a hole."""
    encoded = _encoded(teacher, tokens, _bytes_by_id(teacher))
    longest = max(map(len, first_ids), default=0)
    found: dict[bytes, tuple[Evidence, Spelled]] = {}
    for token in tokens:
        if token in encoded:
            found[token] = (Evidence.ENCODED, encoded[token])
            continue
        pieces = _fewest(token, first_ids, longest)
        found[token] = (Evidence.SPELLED if pieces else Evidence.HOLE, pieces)
    return found


def _encoded(
    tokenizer: MappedTokenizer, tokens: Sequence[bytes], bytes_of: Sequence[bytes | None]
) -> dict[bytes, Spelled]:
    """Ids of the tokens with exactly these bytes, as the tokenizer encodes them in a text.

    Byte strings that are no UTF-8, or that it encodes only as tokens of other bytes, are left out.
    """
    open_texts: dict[bytes, str] = {}
    for token in tokens:
        try:
            open_texts[token] = token.decode()
        except UnicodeDecodeError:
            continue
    found: dict[bytes, Spelled] = {}
    for anchor in _ANCHORS:
        before = tuple(tokenizer.encode_batch([anchor])[0].tolist()) if anchor else ()
        todo = [token for token in open_texts if token not in found]
        rows = tokenizer.encode_batch([anchor + open_texts[token] for token in todo])
        for token, ids_n in zip(todo, rows, strict=True):
            ids = tuple(ids_n.tolist())
            pieces = _without_space(ids[len(before) :], token, bytes_of)
            if ids[: len(before)] == before and pieces:
                found[token] = pieces
        if anchor:
            continue
        # A tokenizer that puts a space before a text encodes " word" as the text "word".
        todo = [token for token in open_texts if token not in found and token[:1] == _SPACE]
        rows = tokenizer.encode_batch([open_texts[token][1:] for token in todo])
        for token, ids_n in zip(todo, rows, strict=True):
            ids = tuple(ids_n.tolist())
            if _joined(ids, bytes_of) == token:
                found[token] = ids
    return found


def _without_space(ids: Spelled, token: bytes, bytes_of: Sequence[bytes | None]) -> Spelled:
    """The ids if their bytes are the token's, without a space token put first; else none."""
    found = _joined(ids, bytes_of)
    if found == token:
        return ids
    if ids and found == _SPACE + token and bytes_of[ids[0]] == _SPACE:
        return ids[1:]
    return ()


def _joined(ids: Spelled, bytes_of: Sequence[bytes | None]) -> bytes | None:
    pieces = [bytes_of[number] for number in ids]
    return None if None in pieces else b"".join(piece for piece in pieces if piece is not None)


def _fewest(token: bytes, first_ids: Mapping[bytes, int], longest: int) -> Spelled:
    """Ids of the fewest tokens with these bytes, of several spellings that with long tokens first.

    None if no tokens have these bytes. Found from the last byte on.
    """
    unknown = len(token) + 1
    counts = [unknown] * len(token) + [0]
    stops = [0] * len(token)
    for start in reversed(range(len(token))):
        for stop in range(min(len(token), start + longest), start, -1):
            if counts[stop] + 1 < counts[start] and token[start:stop] in first_ids:
                counts[start], stops[start] = counts[stop] + 1, stop
    if counts[0] == unknown:
        return ()
    ids: list[int] = []
    start = 0
    while start < len(token):
        ids.append(first_ids[token[start : stops[start]]])
        start = stops[start]
    return tuple(ids)


class _RowArrays(NamedTuple):
    row_offsets: NDArray[np.int64]
    row_teacher_ids_n: NDArray[np.int64]
    row_weights_n: NDArray[np.float32]
    pieces_V: NDArray[np.int32]


def _row_arrays(rows: Mapping[int, Spelled], size: int) -> _RowArrays:
    """The rows as one array each; weights of a repeated teacher token are summed."""
    weights = [piece_weights(pieces) for pieces in range(MOST_PIECES + 1)]
    pieces_V = np.zeros(size, np.int32)
    lengths_V = np.zeros(size, np.int64)
    ids: list[int] = []
    values: list[NDArray[np.float32]] = []
    for number in sorted(rows):
        first = rows[number][:MOST_PIECES]
        row = weights[len(first)]
        pieces_V[number] = len(rows[number])
        distinct = tuple(dict.fromkeys(first))
        if len(distinct) < len(first):
            cell_n = np.array([distinct.index(one) for one in first])
            row = np.bincount(cell_n, row.astype(np.float64)).astype(np.float32)
        lengths_V[number] = len(distinct)
        ids += distinct
        values.append(row)
    return _RowArrays(
        np.concatenate([[0], np.cumsum(lengths_V)]).astype(np.int64),
        np.array(ids, np.int64),
        np.concatenate(values) if values else np.zeros(0, np.float32),
        pieces_V,
    )

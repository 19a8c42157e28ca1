"""Chunks of a conversation that two chat templates render in their own ways.

The contents of a message are the same bytes in both renderings, so their tokens align as those of a
text. Of the text around contents only the tokens that end a turn or the text align, by their place.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_distill.align.chunks import Chunks, Ints, checked_spans, chunks_of_ends

__all__ = ["ENDS_TEXT", "ENDS_TURN", "NO_ROLE", "RenderedTokens", "align_messages", "closing_roles"]

NO_ROLE: Final = 0
ENDS_TURN: Final = 1
ENDS_TEXT: Final = 2


@dataclass(frozen=True, eq=False)
class RenderedTokens:
    """The tokens of a conversation that one template has rendered.

    spans_N2: int64, the byte range of each token in the rendering, as of `token_spans`; tokens
    without text stand in their place too. contents_K2: int64, the byte range of each message's
    content in the rendering, ascending. roles_N: NO_ROLE, ENDS_TURN or ENDS_TEXT of each token, as
    of `closing_roles`.
    """

    spans_N2: Ints
    contents_K2: Ints
    roles_N: NDArray[np.int8]


def closing_roles(
    token_ids: ArrayLike, *, ends_turn: Collection[int], ends_text: Collection[int]
) -> NDArray[np.int8]:
    """The closing role of each token, int8 `[N]`, from a tokenizer's table of special ids.

    An id in both is ENDS_TURN.
    """
    ids_N = np.asarray(token_ids)
    roles_N = np.zeros(len(ids_N), np.int8)
    roles_N[np.isin(ids_N, list(ends_text))] = ENDS_TEXT
    roles_N[np.isin(ids_N, list(ends_turn))] = ENDS_TURN
    return roles_N


def align_messages(student: RenderedTokens, teacher: RenderedTokens) -> Chunks:
    """The minimal chunks of the contents, and of the tokens that end turns.

    Within a content the chunks are those of `align_spans`. A token that reaches out of a content is
    in no chunk, and no other token is in a chunk with it. The first closing token after a content,
    before the next one, is one chunk with that of the other side. It may end a turn or the text.
    Behind that of the last message the next ENDS_TEXT is one chunk likewise. A closing token
    without a partner is in none. Raises ValueError: as `align_spans`, for contents as well; numbers
    of messages or lengths of a content that differ.
    """
    sides = [
        (
            checked_spans(side.spans_N2, f"{name}.spans_N2"),
            checked_spans(side.contents_K2, f"{name}.contents_K2"),
            side.roles_N,
        )
        for name, side in (("student", student), ("teacher", teacher))
    ]
    (_, contents_K2, _), (_, of_teacher_K2, _) = sides
    if len(contents_K2) != len(of_teacher_K2):
        raise ValueError(
            f"the student's rendering has {len(contents_K2)} contents, the teacher's "
            f"{len(of_teacher_K2)}; give the same messages on both sides"
        )
    lengths_K = contents_K2[:, 1] - contents_K2[:, 0]
    differs_K = lengths_K != of_teacher_K2[:, 1] - of_teacher_K2[:, 0]
    if differs_K.any():
        index = int(np.argmax(differs_K))
        raise ValueError(
            f"content {index} has {int(lengths_K[index])} bytes in the student's rendering and "
            f"{int(np.diff(of_teacher_K2[index])[0])} in the teacher's; give ranges of equal text"
        )
    closing = np.stack([_closing_tokens(spans, found, roles) for spans, found, roles in sides])
    closing[:, (closing < 0).any(axis=0)] = -1
    units = [
        _in_units(spans_N2, found_K2, lengths_K, closing_L)
        for (spans_N2, found_K2, _), closing_L in zip(sides, closing, strict=True)
    ]
    chunks = chunks_of_ends(
        (units[0].tokens, units[0].ends),
        (units[1].tokens, units[1].ends),
        first=(units[0].first, units[1].first),
    )
    whole_C = np.ones(len(chunks), np.bool_)
    for side, ranges_C2 in zip(units, (chunks.student, chunks.teacher), strict=True):
        reaching = np.concatenate([np.zeros(1, np.int64), np.cumsum(side.reaches_out)])
        whole_C &= reaching[ranges_C2[:, 1]] == reaching[ranges_C2[:, 0]]
    return Chunks(chunks.student[whole_C], chunks.teacher[whole_C])


@dataclass(frozen=True, eq=False)
class _Units:
    """The tokens of one side in units that both sides have: contents and closing tokens.

    tokens: indices of the tokens in a unit; one that meets two contents is in both. ends: where
    each ends, in bytes of all units one after another. first: the place in `tokens` of the first
    token of its unit. reaches_out: of every token, whether it reaches out of a content.
    """

    tokens: Ints
    ends: Ints
    first: Ints
    reaches_out: NDArray[np.bool_]


def _in_units(spans_N2: Ints, contents_K2: Ints, lengths_K: Ints, closing_L: Ints) -> _Units:
    """Unit 2k is content k, unit 2k + 1 its closing token, and the last the end of the text."""
    starts_N, stops_N = spans_N2[:, 0], spans_N2[:, 1]
    lengths_U = np.ones(len(closing_L) + len(lengths_K), np.int64)
    lengths_U[: 2 * len(lengths_K) : 2] = lengths_K
    begins_U = np.cumsum(lengths_U) - lengths_U

    # A token meets the contents that end after its first byte and begin before its end.
    text = np.flatnonzero(starts_N < stops_N)
    begin_n = np.searchsorted(contents_K2[:, 1], starts_N[text], side="right")
    count_n = np.searchsorted(contents_K2[:, 0], stops_N[text], side="left") - begin_n
    count_n = np.maximum(count_n, 0)
    token_e = np.repeat(text, count_n)
    within_e = np.arange(len(token_e)) - np.repeat(np.cumsum(count_n) - count_n, count_n)
    content_e = np.repeat(begin_n, count_n) + within_e
    filled = lengths_K[content_e] > 0
    token_e, content_e = token_e[filled], content_e[filled]
    bounds_e2 = contents_K2[content_e]
    reaches_e = (starts_N[token_e] < bounds_e2[:, 0]) | (stops_N[token_e] > bounds_e2[:, 1])
    reaches_out = np.zeros(len(spans_N2), np.bool_)
    reaches_out[token_e[reaches_e]] = True
    within_e = np.minimum(stops_N[token_e], bounds_e2[:, 1]) - bounds_e2[:, 0]

    found = np.flatnonzero(closing_L >= 0)
    units = np.concatenate([2 * content_e, np.minimum(2 * found + 1, len(lengths_U) - 1)])
    order = np.argsort(units, kind="stable")
    units = units[order]
    tokens = np.concatenate([token_e, closing_L[found]])[order]
    ends = begins_U[units] + np.concatenate([within_e, np.ones_like(found)])[order]
    return _Units(tokens, ends, np.searchsorted(units, units, side="left"), reaches_out)


def _closing_tokens(spans_N2: Ints, contents_K2: Ints, roles_N: NDArray[np.int8]) -> Ints:
    """The closing token of each message and then that of the text, int64 `[K + 1]`; -1 for none."""
    count = len(contents_K2)
    found = np.full(count + 1, -1, np.int64)
    if count == 0:
        return found
    closing = np.flatnonzero(roles_N)
    # The first token that begins at or after the end of each content, and the next content's.
    behind_K = np.searchsorted(spans_N2[:, 0], contents_K2[:, 1])
    limit_K = np.append(np.searchsorted(spans_N2[:, 0], contents_K2[1:, 0]), len(spans_N2))
    place_K = np.searchsorted(closing, behind_K)
    token_K = np.append(closing, len(spans_N2))[place_K]
    found[:count] = np.where(token_K < limit_K, token_K, -1)
    ends = np.flatnonzero(roles_N == ENDS_TEXT)
    behind = ends[ends > found[count - 1]] if found[count - 1] >= 0 else ends[:0]
    if len(behind):
        found[count] = behind[0]
    return found

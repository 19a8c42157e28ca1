"""Two renderings of a conversation align by the contents of their messages.

Regimes: templates that write other words around contents, tokens that reach over the edge of a
content, an end of turn on one side only, an end of text behind it, empty contents, contents that
differ, white space at an edge that one tokenizer drops; hundreds of random conversations.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_distill.align import Chunks, RenderedTokens, align_messages, closing_roles
from megatron_distill.align.byte_spans import token_spans
from megatron_distill.align.messages import ENDS_TEXT, ENDS_TURN
from megatron_distill.data.chat.template import encode_rendered
from tests.support.tokenizer_kinds import tokenizer_of

Parts = list[tuple[str, str]]  # of a rendering: "content", "turn", "text" or "", and its text


def tokens(parts: Parts, cuts: list[int] | None = None) -> RenderedTokens:
    """A rendering cut into bytes, or at given places; ends of turn and text are one token each."""
    edges = [0, *accumulate(len(text) for _, text in parts)]
    places = list(zip(parts, pairwise(edges), strict=True))
    closing = {span: kind for (kind, _), span in places if kind in ("turn", "text")}
    inside = {at for start, stop in closing for at in range(start + 1, stop)}
    inner = set(range(edges[-1] + 1)) if cuts is None else {0, edges[-1], *cuts}
    bounds = sorted((inner | {edge for span in closing for edge in span}) - inside)
    spans = list(pairwise(bounds))
    roles = {"turn": ENDS_TURN, "text": ENDS_TEXT}
    return RenderedTokens(
        np.array(spans, np.int64).reshape(-1, 2),
        np.array([span for (kind, _), span in places if kind == "content"]).reshape(-1, 2),
        np.array([roles[closing[span]] if span in closing else 0 for span in spans], np.int8),
    )


def ranges(chunks: Chunks) -> list[tuple[int, int, int, int]]:
    return [tuple(row) for row in np.hstack([chunks.student, chunks.teacher]).tolist()]


STUDENT: Parts = [("", "Q:"), ("content", "ab"), ("turn", "#"), ("", "A:"), ("content", "cde"),
                  ("turn", "#"), ("text", "!")]  # fmt: skip
TEACHER: Parts = [("", "["), ("content", "ab"), ("", "]"), ("content", "cde"), ("text", "$"),
                  ("text", "$")]  # fmt: skip


def test_contents_and_ends_of_turns_align_by_their_places() -> None:
    # The first turn has no closing token at the teacher. Its "]" is not taken for one.
    found = ranges(align_messages(tokens(STUDENT), tokens(TEACHER)))
    contents = [(2, 3, 1, 2), (3, 4, 2, 3), (7, 8, 4, 5), (8, 9, 5, 6), (9, 10, 6, 7)]
    assert found == [*contents, (10, 11, 7, 8), (11, 12, 8, 9)]
    swapped = ranges(align_messages(tokens(TEACHER), tokens(STUDENT)))
    assert swapped == [(c, d, a, b) for a, b, c, d in found]


def test_a_token_over_an_edge_is_in_no_chunk() -> None:
    # Student tokens: "Q:a" reaches into the content, "b" is whole; "A", ":", "c", "de", "#", "!".
    student = tokens(STUDENT, [3, 6, 7, 8])
    assert ranges(align_messages(student, tokens(TEACHER))) == [
        (1, 2, 2, 3),
        (5, 6, 4, 5),
        (6, 7, 5, 7),
        (7, 8, 7, 8),
        (8, 9, 8, 9),
    ]
    # One that reaches out behind, "b]": its bytes before the edge are in no chunk either.
    teacher = tokens(TEACHER, [1, 2, 4, 5, 6, 7])
    assert ranges(align_messages(tokens(STUDENT), teacher))[:2] == [(2, 3, 1, 2), (7, 8, 3, 4)]
    # One from the first content into the second.
    teacher = tokens(TEACHER, [1, 2, 5, 6, 7])
    assert ranges(align_messages(tokens(STUDENT), teacher))[:2] == [(2, 3, 1, 2), (8, 9, 3, 4)]


def test_a_tail_that_one_side_leaves_out_stays_in_its_message() -> None:
    student: Parts = [("content", "ab "), ("turn", "#"), ("content", "c"), ("turn", "#")]
    side = tokens(student)
    kept = np.array([0, 1, 3, 4, 5])
    dropping = RenderedTokens(side.spans_N2[kept], side.contents_K2, side.roles_N[kept])
    assert ranges(align_messages(dropping, side)) == [
        (0, 1, 0, 1),
        (1, 2, 1, 2),
        (2, 3, 3, 4),
        (3, 4, 4, 5),
        (4, 5, 5, 6),
    ]


def test_empty_contents_and_conversations_have_their_ends_only() -> None:
    student: Parts = [("", "Q"), ("content", ""), ("", "\n"), ("turn", "#")]
    teacher: Parts = [("", "USER"), ("content", ""), ("text", "$"), ("", ".")]
    assert ranges(align_messages(tokens(student), tokens(teacher))) == [(2, 3, 4, 5)]
    assert ranges(align_messages(tokens([("", "Q")]), tokens([]))) == []


def test_contents_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match=r"has 2 contents, the teacher's 1; give the same mess"):
        align_messages(tokens(STUDENT), tokens(TEACHER[:2]))
    other: Parts = [*TEACHER[:3], ("content", "cd")]
    with pytest.raises(ValueError, match="content 1 has 3 bytes in the student's rendering and 2"):
        align_messages(tokens(STUDENT), tokens(other))


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_chunks_of_messages_are_the_same_bytes_and_minimal(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 6), max_size=4))
    around = st.text("xyz", max_size=3)
    sides, parts_of = [], []
    for _ in range(2):
        parts: Parts = [("", data.draw(around))]
        for number, length in enumerate(lengths):
            parts += [("content", "abcdef"[:length]), ("", data.draw(around))]
            parts += [("turn", f"#{number}")] * data.draw(st.integers(0, 1))
            parts += [("", data.draw(around))]
        size = sum(len(text) for _, text in parts)
        sides.append(tokens(parts, list(data.draw(st.sets(st.integers(0, size))))))
        parts_of.append("".join(text for _, text in parts))
    chunks = align_messages(*sides)
    expected = 0
    for number, (start, stop) in enumerate(sides[0].contents_K2.tolist()):
        # Common ends inside the content, and its edges where both sides have one there.
        bounds = []
        for side in sides:
            begin = side.contents_K2[number, 0]
            bounds.append(
                {0, *side.spans_N2.ravel().tolist()} & set(range(begin, begin + stop - start + 1))
            )
        common = {at - start for at in bounds[0]} & {
            at - int(sides[1].contents_K2[number, 0]) for at in bounds[1]
        }
        expected += max(0, len(common) - 1)
        expected += all(f"#{number}" in text for text in parts_of)
    assert len(chunks) == expected
    for begin, end, other, stop in ranges(chunks):
        written = [
            text[side.spans_N2[first, 0] : side.spans_N2[last - 1, 1]]
            for text, side, first, last in (
                (parts_of[0], sides[0], begin, end),
                (parts_of[1], sides[1], other, stop),
            )
        ]
        assert written[0] == written[1]


def test_two_templates_and_two_tokenizers() -> None:
    contents = ["What is a shard? 漢", " A part \U0001f9d9 of the whole.\n"]
    sides, ids = [], []
    for kind, form in (("hf_bytes", "U:{0}{2}A:{1}{2}"), ("sp_bpe", "[I]{0}[/I]{1}{2}")):
        tokenizer = tokenizer_of(kind)
        (eos,) = (word for word, at in tokenizer.special_ids.items() if at == tokenizer.eos_id)
        text = form.format(*contents, eos)
        (encoding,) = encode_rendered(tokenizer, [text])
        places = [len(text[: text.index(content)].encode()) for content in contents]
        ids.append(encoding.ids_n.tolist())
        sides.append(
            RenderedTokens(
                token_spans(tokenizer, encoding.ids_n, text),
                np.array([(at, at + len(content.encode())) for at, content in
                          zip(places, contents, strict=True)]),
                closing_roles(encoding.ids_n, ends_turn=[], ends_text=[tokenizer.eos_id]),
            )
        )  # fmt: skip
    chunks = align_messages(*sides)
    assert chunks.student[-1].tolist() == [len(ids[0]) - 1, len(ids[0])]
    assert chunks.teacher[-1].tolist() == [len(ids[1]) - 1, len(ids[1])]
    for side, (start, stop) in zip(
        (chunks.student, chunks.teacher), pairwise([0, 1, 2]), strict=True
    ):
        spans = sides[start].spans_N2
        aligned = sum(int(spans[last - 1, 1] - spans[first, 0]) for first, last in side[:-1])
        assert aligned >= sum(len(content.encode()) for content in contents) - 6, stop

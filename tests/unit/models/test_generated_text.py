"""Text of ids that arrive one by one: whole characters and stop strings; rows shared by ranks."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_distill.models.generation.batches import RowSize, plan_batches
from megatron_distill.models.generation.text import TextStream


def by_bytes(ids: Sequence[int]) -> str:
    """A decoder with one id per byte."""
    return bytes(ids).decode("utf-8", "replace")


def without_first_space(ids: Sequence[int]) -> str:
    """A decoder that drops a leading space, as SentencePiece's."""
    return by_bytes(ids).removeprefix(" ")


def pieces(stream: TextStream, ids: bytes) -> list[str]:
    found = []
    for token in ids:
        is_over = stream.push(token)
        found.append(stream.new_text())
        if is_over:
            break
    stream.finish()
    return [*found, stream.new_text()]


@given(st.text(max_size=12))
def test_streamed_pieces_join_to_the_text_and_split_no_character(text: str) -> None:
    found = pieces(TextStream(by_bytes), text.encode("utf-8", "replace"))
    assert "".join(found) == text.encode("utf-8", "replace").decode()
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in found)


@given(st.text("ab\u00e9 ", max_size=20), st.lists(st.text("ab\u00e9", min_size=1, max_size=3)))
def test_a_stop_string_over_several_ids_ends_the_text_before_it(
    text: str, strings: list[str]
) -> None:
    stream = TextStream(by_bytes, tuple(strings))
    found = pieces(stream, text.encode())
    # The first that is complete; of those that are complete with one character, the longest.
    ends = [(text.find(one) + len(one), text.find(one)) for one in strings if one in text]
    first = min((end for end, _ in ends), default=0)
    expected = text[: min(start for end, start in ends if end == first)] if ends else text
    assert stream.text == "".join(found) == expected
    assert stream.is_stopped == bool(ends)


def test_text_that_may_become_a_stop_string_waits() -> None:
    stream = TextStream(by_bytes, ("\n\nQ",))
    assert pieces(stream, b"a\n\nb\n\nQ") == ["a", "", "", "\n\nb", "", "", "", ""]


PIECES = ("a", "b\n\nc: d", "Q", ":", " e", "\n\nc:")


def by_pieces(ids: Sequence[int]) -> str:
    """A decoder with several characters per id."""
    return "".join(PIECES[token] for token in ids)


@pytest.mark.parametrize(
    ("strings", "ids", "text", "is_stopped"),
    [
        ((": ", "\n\n"), (0, 1), "ab", True),  # two in one id: the earliest
        (("c: d", "\n\nc"), (0, 1), "ab", True),  # one inside of the other
        (("a\n\n",), (0, 5, 4), "", True),  # over two ids, and the whole text
        (("Q:",), (4, 2, 3, 4), " e", True),
        (("Q:",), (3, 4, 2), ": eQ", False),  # the prompt ends with its beginning
    ],
)
def test_stops_in_ids_of_several_characters(
    strings: tuple[str, ...], ids: tuple[int, ...], text: str, is_stopped: bool
) -> None:
    """The prompt has each stop string, which ends nothing."""
    stream = TextStream(by_pieces, strings, context=(0, 5, 1, 2, 3, 2))
    for token in ids:
        if stream.push(token):
            break
    assert (stream.finish(), stream.is_stopped) == (text, is_stopped)


def test_the_first_space_is_kept_after_a_prompt() -> None:
    stream = TextStream(without_first_space, context=b"ab")
    assert "".join(pieces(stream, b" c d")) == " c d"


def test_an_unfinished_character_is_in_the_text_at_its_end() -> None:
    assert pieces(TextStream(by_bytes), b"a\xc3") == ["a", "", "\N{REPLACEMENT CHARACTER}"]


sizes_of_rows = st.lists(st.builds(RowSize, st.integers(1, 90), st.integers(0, 40)), max_size=12)


@pytest.mark.parametrize("in_step", [False, True])
@given(sizes_of_rows)
def test_data_ranks_share_the_rows(in_step: bool, sizes: list[RowSize]) -> None:
    plans = [
        plan_batches(
            sizes, rank=rank, ranks=3, groups=2, in_step=in_step, row_bytes=add, cache_bytes=200
        )
        for rank in range(3)
    ]
    rows = [row for plan in plans for batch in plan.mine for group in batch for row in group]
    assert sorted(rows) == list(range(len(sizes)))
    if in_step:
        shapes = {tuple(len(batch) for batch in plan.mine) for plan in plans}
        assert len(shapes) == 1, "ranks would make different numbers of steps"

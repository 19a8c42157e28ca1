"""Maps of two vocabularies: rows have the token's bytes, pairs are one to one, parts fit together.

Regimes: tokens that are no UTF-8, bytes that a vocabulary has twice, a space put before a text,
tokenizers that rewrite, special tokens of one role, vocabularies without a common token, shards
with padding, one tokenizer on both sides.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_distill.align import build_vocabulary_map
from megatron_distill.align.special_roles import SpecialRole, paired_special_tokens, special_roles
from megatron_distill.align.vocabulary_map import (
    Evidence,
    VocabularyMap,
    VocabularySide,
    piece_weights,
)
from megatron_distill.data.tokenizers.open import Tokenizer
from megatron_distill.data.tokenizers.tiktoken_bpe import TiktokenRules, TiktokenTokenizer
from megatron_distill.errors import DataError
from tests.reference.vocabulary_maps import (
    can_be_spelled,
    dense_weights,
    equal_bytes,
    relaxed_pairs,
)
from tests.support.rewriting_tokenizers import kind_of
from tests.support.tokenizer_kinds import tokenizer_of

KINDS = ("hf_bytes", "sp_bpe", "hf_unigram", "hf_wordpiece", "tiktoken", "hf_fallback")
BYTES = [bytes([byte]) for byte in range(256)]


@cache
def map_of(student: str, teacher: str) -> VocabularyMap:
    return build_vocabulary_map(kind_of(student), kind_of(teacher))


def ranked(
    *tokens: bytes, special: tuple[str, ...] = ("<|endoftext|>",), **roles: Any
) -> Tokenizer:
    ranks = {token: rank for rank, token in enumerate((*BYTES, *tokens))}
    ids = {text: len(ranks) + place for place, text in enumerate(special)}
    rules = TiktokenRules(r"\p{N}+|[^\p{N}]+", ids, **roles)
    return TiktokenTokenizer(ranks, rules, name=f"ranks of {len(tokens)} merges")


# Each kind on both sides, beside two others.
PAIRS = [(KINDS[at], KINDS[(at + by) % len(KINDS)]) for at in range(len(KINDS)) for by in (1, 3)]


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_rows_have_the_bytes_of_their_token(student: str, teacher: str) -> None:
    found = map_of(student, teacher)
    mine, its = kind_of(student).token_bytes(), kind_of(teacher).token_bytes()
    vocabulary = frozenset(filter(None, its))
    assert found.exact_pairs == equal_bytes(mine, its) > 0
    to_teacher = found.student_to_teacher()
    for number, token in enumerate(mine):
        evidence = Evidence(found.evidence_V[number])
        ids, weights = found.row(number)
        pieces = int(found.pieces_V[number])
        if evidence in (Evidence.EXACT, Evidence.SHARED):
            assert its[ids[0]] == token
            assert weights.tolist() == [1.0]
            assert to_teacher[number] == (ids[0] if evidence == Evidence.EXACT else -1)
        elif evidence == Evidence.HOLE:
            assert not can_be_spelled(token, vocabulary)
        elif token is None:
            is_special = number in kind_of(student).special_ids.values()
            assert (evidence != Evidence.NO_TOKEN) == is_special
        elif len(ids) == pieces:
            assert b"".join(its[one] for one in ids) == token not in vocabulary
            np.testing.assert_allclose(
                weights, dense_weights(ids, found.teacher.size)[ids], atol=1e-7
            )
        else:  # repeated teacher tokens, or more than eight
            assert token.startswith(its[ids[0]])
            assert weights[0] >= 0.9 - 1e-6


def test_weights_of_one_two_and_three_pieces() -> None:
    tokens = (b"20", b"201", b"\xe4\xb8", b"77", b"777")
    found = build_vocabulary_map(ranked(*tokens), ranked())
    dense = {token: dict(zip(*found.row(256 + place), strict=True))
             for place, token in enumerate(tokens)}  # fmt: skip
    two, three = (0.909091, 0.090909), (0.900901, 0.090090, 0.009009)
    for token, wanted in {b"20": two, b"201": three, b"\xe4\xb8": two}.items():
        assert list(dense[token]) == list(token)
        np.testing.assert_allclose(list(dense[token].values()), wanted, atol=5e-7)
    # One teacher token as every piece has the whole weight.
    assert dense[b"77"] == dense[b"777"] == {ord("7"): 1.0}
    assert found.pieces_V[256:261].tolist() == [2, 3, 2, 2, 3]
    assert found.evidence_V[258] == Evidence.SPELLED  # half of a character has no text to encode
    assert piece_weights(1).tolist() == [1.0]
    for pieces in range(1, 40):
        assert abs(piece_weights(pieces).astype(np.float64).sum() - 1) < 1e-6


def published_row(weights: list[float]) -> list[float]:
    """A row as X-Token's published recipe changes it: a token of other text has entries 1 and 3.

    A short row goes on with tokens of no weight, and the last one gets 0.2. The row is divided by
    its sum, and its largest three and the last one once more stay, divided by their sum.
    """
    whole = np.array([*weights, 0.2])
    kept = np.array([*np.sort(whole)[::-1][:3], 0.2])
    return (kept / kept.sum()).tolist()


@pytest.mark.parametrize(
    ("text", "published"),
    [
        (b"20", [0.6523, 0.1426, 0.0649, 0.1426]),
        (b"201", [0.6484, 0.1436, 0.0649, 0.1436]),
    ],
)
def test_rows_have_every_piece_and_no_token_of_other_bytes(
    text: bytes, published: list[float]
) -> None:
    """The recipe gives 28.7 % of '201' to a token of other text, and nothing to its '1'."""
    found = build_vocabulary_map(ranked(b"20", b"201"), ranked())
    ids, weights = found.row(254 + len(text))
    assert bytes(ids.tolist()) == text
    assert float(weights.sum()) == pytest.approx(1.0, abs=1e-6)
    # The published numbers were rounded to bf16 on the way.
    recipe = published_row(weights.astype(np.float64).tolist())
    assert recipe == pytest.approx(published, rel=5e-3)
    assert recipe[1] + recipe[3] == pytest.approx(0.287, abs=1.5e-3)
    assert weights[0] - recipe[0] > 0.25


def test_of_two_tokens_with_the_same_bytes_the_one_that_is_encoded_is_the_pair() -> None:
    # The model has "e" as a piece, and as the byte of its fallback with a lower id.
    sentencepiece, plain = tokenizer_of("sp_bpe"), tokenizer_of("hf_bytes")
    ids = [n for n, token in enumerate(sentencepiece.token_bytes()) if token == b"e"]
    assert len(ids) == 2
    byte, piece = ids
    (letter,) = (n for n, token in enumerate(plain.token_bytes()) if token == b"e")
    assert map_of("hf_bytes", "sp_bpe").student_to_teacher()[letter] == piece
    found = map_of("sp_bpe", "hf_bytes")
    assert found.student_to_teacher()[ids].tolist() == [-1, letter]
    assert found.evidence_V[byte] == Evidence.SHARED
    assert found.row(byte)[0].tolist() == [letter]
    assert found.student.collisions > 0 == found.teacher.collisions
    # With the bytes twice on both sides, the second tokens are a pair as well.
    both = map_of("sp_bpe", "hf_fallback").student_to_teacher()
    its = [n for n, token in enumerate(kind_of("hf_fallback").token_bytes()) if token == b"e"]
    assert both[ids].tolist() == its


def test_special_tokens_pair_by_role_alone() -> None:
    turns = ("<|endoftext|>", "<|im_end|>", "<|tool|>")
    student = ranked(special=turns, eos="<|im_end|>")
    teacher = ranked(special=("<|begin_of_text|>", "<|eot_id|>", "<|tool|>", "<|end_of_text|>"),
                     eos="<|end_of_text|>", bos="<|begin_of_text|>")  # fmt: skip
    assert special_roles(student) == {SpecialRole.END_OF_TEXT: 256, SpecialRole.END_OF_TURN: 257}
    assert paired_special_tokens(student, teacher) == {256: 259, 257: 257}
    found = build_vocabulary_map(student, teacher)
    assert [Evidence(one) for one in found.evidence_V[256:]] == [
        Evidence.ROLE, Evidence.ROLE, Evidence.SPECIAL]  # fmt: skip
    assert found.student_to_teacher()[256:].tolist() == [259, 257, -1]
    named = build_vocabulary_map(student, teacher, special_pairs=[("<|tool|>", "<|tool|>")])
    assert named.student_to_teacher()[256:].tolist() == [259, 257, 258]
    with pytest.raises(DataError, match="'<|x|>' is not a special token of ranks of 0 merges"):
        paired_special_tokens(student, teacher, special_pairs=[("<|tool|>", "<|x|>")])
    with pytest.raises(DataError, match="one of the two is paired already"):
        paired_special_tokens(student, teacher, special_pairs=[("<|tool|>", "<|tool|>")] * 2)
    # A token that the tokenizer declares, without a spelling of the table.
    own = ranked(special=("<stop>",), eos="<stop>", pad="<stop>")
    assert special_roles(own) == {SpecialRole.END_OF_TEXT: 256}


def test_one_tokenizer_on_both_sides_is_refused() -> None:
    with pytest.raises(DataError, match=r"are one tokenizer .* use the plain terms"):
        build_vocabulary_map(ranked(b"ab"), ranked(b"ab"))


def test_vocabularies_without_a_common_token_are_refused() -> None:
    latin, greek = ranked_words("abc"), ranked_words("\u03b1\u03b2\u03b3")
    with pytest.raises(DataError, match="words of abc and words of .*: no token of the student"):
        build_vocabulary_map(latin, greek)


def ranked_words(alphabet: str) -> Tokenizer:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from megatron_distill.data.tokenizers.hugging_face import HuggingFaceTokenizer

    words = {"[UNK]": 0, "</s>": 1} | {one: 2 + place for place, one in enumerate(alphabet)}
    backend = Backend(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="[UNK]")
    return HuggingFaceTokenizer(wrapped, name=f"words of {alphabet}")


@st.composite
def small_maps(draw: st.DrawFn) -> VocabularyMap:
    size, teacher_size = draw(st.integers(1, 12)), draw(st.integers(1, 8))
    ids = st.lists(st.integers(0, teacher_size - 1), max_size=4, unique=True)
    rows = [draw(ids) for _ in range(size)]
    weights = [draw(st.lists(st.sampled_from([1, 2, 3, 6, 12]), min_size=len(row),
                             max_size=len(row))) for row in rows]  # fmt: skip
    rows[0], weights[0] = [draw(st.integers(0, teacher_size - 1))], [1]
    taken: set[int] = set()
    evidence = [Evidence.HOLE if not row else Evidence.ENCODED for row in rows]
    for number, row in enumerate(rows):
        if len(row) == 1 and row[0] not in taken and (number == 0 or draw(st.booleans())):
            taken.add(row[0])
            evidence[number] = Evidence.EXACT
    student_ids = [n for n, kind in enumerate(evidence) if kind == Evidence.EXACT]
    return VocabularyMap(
        VocabularySide("student", "s", size),
        VocabularySide("teacher", "t", teacher_size),
        np.array(student_ids, np.int64),
        np.array([rows[number][0] for number in student_ids], np.int64),
        np.cumsum([0, *map(len, rows)]).astype(np.int64),
        np.array(sum(rows, []), np.int64),
        np.array([w / sum(row) for row in weights for w in row], np.float32),
        np.array(evidence, np.uint8),
        np.array([len(row) for row in rows], np.int32),
    )


@settings(max_examples=80, deadline=None)
@given(found=small_maps(), parts=st.integers(1, 4), padding=st.integers(0, 5))
def test_shards_together_are_the_map(found: VocabularyMap, parts: int, padding: int) -> None:
    rows = {
        number: dict(zip(*(one.tolist() for one in found.row(number)), strict=True))
        for number in range(found.student.size)
    }
    strict = dict(zip(found.student_ids_p.tolist(), found.teacher_ids_p.tolist(), strict=True))
    wanted = {"strict": strict, "relaxed": relaxed_pairs(rows, strict)}
    bounds = np.linspace(0, found.student.size + padding, parts + 1).astype(int).tolist()
    for partition in ("strict", "relaxed"):
        pairs = {}
        for start, stop in itertools.pairwise(bounds):
            part = found.columns(start, stop, partition=partition)
            assert len(part.row_offsets) == stop - start + 1
            for column in range(stop - start):
                entries = slice(part.row_offsets[column], part.row_offsets[column + 1])
                row = dict(zip(part.row_teacher_ids_n[entries].tolist(),
                               part.row_weights_n[entries].tolist(), strict=True))  # fmt: skip
                assert row == rows.get(start + column, {})
            ids = zip((part.columns_p + start).tolist(), part.teacher_ids_p.tolist(), strict=True)
            pairs |= dict(ids)
        assert pairs == wanted[partition]
        vector = found.student_to_teacher(partition).tolist()
        assert vector == [pairs.get(number, -1) for number in range(found.student.size)]
        uncommon = set(range(found.teacher.size)) - set(pairs.values())
        assert found.uncommon_teacher_ids(partition).tolist() == sorted(uncommon)
    reached = {number for row in rows.values() for number in row}
    assert set(found.unreached_teacher_ids) == set(range(found.teacher.size)) - reached


def changed(array: np.ndarray, place: int, value: float) -> np.ndarray:
    copy = array.copy()
    copy[place] = value
    return copy


@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        ("row_weights_n", 5, 0.5, r"the row of student id \d+ sums to 0.5000000, not to 1"),
        ("row_weights_n", 5, -1, "has a weight that is not positive"),
        ("row_weights_n", 5, np.nan, "has a weight that is not positive"),
        ("row_teacher_ids_n", 5, 10**6, r"teacher id 1000000 is outside of its vocabulary of 257"),
        ("row_teacher_ids_n", 0, 9, "a pair's projection row is not its teacher token alone"),
        ("student_ids_p", 0, 7, "the student ids of the pairs do not rise"),
        ("teacher_ids_p", 0, 7, "two student tokens are paired with one teacher token"),
        ("row_offsets", 3, 9, "row_offsets do not rise from 0"),
        ("evidence_V", 257, Evidence.HOLE, r"student id 257 has a row without evidence"),
        ("evidence_V", 3, 9, "evidence 9 is unknown"),
        ("pieces_V", 257, 0, "has pieces without a row, or a row without pieces"),
        ("pieces_V", 257, 1, "has a row longer than its number of pieces"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    name: str, place: int, value: float, message: str
) -> None:
    found = build_vocabulary_map(ranked(b"20", b"201"), ranked())
    with pytest.raises(DataError, match=message):
        replace(found, **{name: changed(getattr(found, name), place, value)})


def test_arrays_of_another_kind_or_shape_are_refused() -> None:
    found = build_vocabulary_map(ranked(b"20"), ranked())
    with pytest.raises(DataError, match=r"row_weights_n is float64 \[\d+\], not float32"):
        replace(found, row_weights_n=found.row_weights_n.astype(np.float64))
    with pytest.raises(DataError, match=r"evidence_V is uint8 \[3\], not uint8 \[258\]"):
        replace(found, evidence_V=found.evidence_V[:3])
    repeated = np.repeat(found.row_teacher_ids_n[-3:-2], 2)
    ids = np.concatenate([found.row_teacher_ids_n[:-3], repeated, found.row_teacher_ids_n[-1:]])
    with pytest.raises(DataError, match="repeats a teacher id"):
        replace(found, row_teacher_ids_n=ids)

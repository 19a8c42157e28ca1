"""Characters that a tokenizer rewrites, with several tokens for one: each is whole in its chunk.

A Korean text in conjoining letters and accents behind their letters, as macOS writes file names,
read after NFC or NFKC. The oracle is the normal form of the bytes of each chunk.
"""

from __future__ import annotations

import itertools
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_distill.data.aligned.conversations import ConversationAligner, teacher_template
from megatron_distill.data.aligned.documents import AlignedDocument, PairEncoder, Side
from megatron_distill.data.aligned.packing import AlignedPacker, Window
from megatron_distill.data.chat.conversations import PLAIN_TEMPLATE, ConversationSpec
from megatron_distill.data.chat.spans import Rendered
from megatron_distill.data.samples import FULLY_TRAINED, NO_CHUNK
from tests.support.rewriting_tokenizers import kind_of

KINDS = ("hf_nfc", "hf_nfkc", "hf_bytes", "tiktoken", "sp_bpe", "sp_nfkc")
PAIRS = [pair for pair in itertools.permutations(KINDS, 2) if {"hf_nfc", "hf_nfkc"} & {*pair}]
TEXTS = (
    "cafe\u0301",
    "e\u0301e\u0301 e\u0301te\u0301 x",
    *(
        unicodedata.normalize("NFD", text)
        for text in ("한국어 씀", "Tiếng Việt có dấu", "À bientôt!")
    ),
    "a \ufb01ne \u00bd x\u00a8 \u2460",
    "a\u0323\u0301 \u212b",
)
# Marks in their canonical order, and none behind a ligature: the library's offsets are exact there.
clusters = st.sampled_from(
    ["a", "b", " ", "e\u0301", "a\u0323\u0302", "o\u0302\u0301", "\u1112\u1161\u11ab",
     "\u1112\u1161", "\ufb01", "\u00bd", "漢", "\u00e9", "n\u0303\u00a8"]
)  # fmt: skip
texts = st.lists(clusters, max_size=12).map(lambda parts: f"x{''.join(parts)}x")


def document_of(pair: tuple[str, str], text: str) -> AlignedDocument:
    (found,) = PairEncoder(kind_of(pair[0]), kind_of(pair[1]))([text], [True])
    return found


def bytes_of(kind: str, ids: list[int]) -> bytes:
    table = kind_of(kind).token_bytes()
    return b"".join(table[number] or b"" for number in ids)


def check_chunks(
    pair: tuple[str, str], sides: list[tuple[np.ndarray, np.ndarray]], text: str
) -> None:
    """The chunks of both sides, (tokens, chunk numbers), are the same characters."""
    for _, chunks in sides:
        inside = chunks[chunks != NO_CHUNK]
        assert (np.diff(inside) >= 0).all(), (pair, text)
    for chunk in range(int(sides[0][1].max(initial=NO_CHUNK)) + 1):
        own, other = (
            bytes_of(kind, tokens[chunks == chunk].tolist())
            for kind, (tokens, chunks) in zip(pair, sides, strict=True)
        )
        if own == other:  # a part of a character, too
            continue
        forms = [
            unicodedata.normalize("NFKC", data.decode()).replace(" ", "") for data in (own, other)
        ]
        assert forms[0] == forms[1], (pair, text, chunk)


@settings(max_examples=40, deadline=None)
@given(pair=st.sampled_from(PAIRS), text=texts)
def test_a_chunk_has_all_tokens_of_its_characters(pair: tuple[str, str], text: str) -> None:
    check_document(pair, text)


@pytest.mark.parametrize("text", TEXTS)
def test_texts_by_hand_have_whole_characters_in_chunks(text: str) -> None:
    for pair in PAIRS:
        check_document(pair, text)


def check_document(pair: tuple[str, str], text: str) -> None:
    document = document_of(pair, text)
    sides = [(one.tokens_n, one.chunks_n) for one in (document.student, document.teacher)]
    check_chunks(pair, sides, text)
    if not document.unknown:
        # Tokens outside of chunks write nothing, but for spaces that are added.
        for kind, (tokens, chunks) in zip(pair, sides, strict=True):
            left = bytes_of(kind, tokens[chunks == NO_CHUNK].tolist())
            assert left.strip() == b"", (kind, text)
    check_samples(pair, document, text)


def check_samples(pair: tuple[str, str], document: AlignedDocument, text: str) -> None:
    """No sample ends within a character, and all chunks but the first one are in one."""
    widest = [int(np.diff(one.cuts).max()) for one in (document.student, document.teacher)]
    windows = [Window(width + 3, 0) for width in widest]
    packer = AlignedPacker[int](*windows)
    packer.add(document, 0)
    samples = []
    while packer.is_ready:
        samples.append(packer.take(len(samples)))
    last = packer.flush(len(samples))
    samples += [] if last is None else [last]
    count = 0
    for sample in samples:
        teacher = sample.teacher
        check_chunks(
            pair,
            [(sample.tokens_S1, teacher.student_chunks_S1), (teacher.tokens_U1, teacher.chunks_U1)],
            text,
        )
        count += teacher.chunks
    begins = [one.chunks_n[0] == 0 for one in (document.student, document.teacher)]
    assert count == document.chunks - any(begins)


@pytest.mark.parametrize(
    "pair", [("hf_nfc", "hf_bytes"), pytest.param(("sp_bpe", "hf_nfkc"), marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("text", TEXTS)
def test_conversations_have_the_chunks_of_documents(pair: tuple[str, str], text: str) -> None:
    student, teacher = map(kind_of, pair)
    spec = ConversationSpec(chat_template=PLAIN_TEMPLATE)
    aligner = ConversationAligner(student, teacher, teacher_template(spec, teacher))
    place = {0: (0, len(text))}
    rendered = Rendered(text, place, contents=place)
    (encoding,) = student.encode_with_offsets([text])
    flags_n = np.full(len(encoding.ids_n), FULLY_TRAINED, np.uint8)
    (found,) = aligner.aligned([(rendered, rendered)], [encoding], [flags_n])
    assert found.problem is None
    document = document_of(pair, text)
    for chunks_n, side in (
        (found.chunks_n, document.student),
        (found.chunks_m, document.teacher),
    ):
        expected = side.chunks_n[:-1]  # without the end of the document
        first = int(any(one.chunks_n[0] == 0 for one in (document.student, document.teacher)))
        expected = np.where(expected >= first, expected - first, NO_CHUNK)
        assert chunks_n.tolist() == expected.tolist()
    check_chunks(pair, [(encoding.ids_n, found.chunks_n), (found.tokens_m, found.chunks_m)], text)


def test_a_letter_with_its_accent_is_one_chunk_of_two_tokens() -> None:
    document = document_of(("hf_nfc", "hf_bytes"), "cafe\u0301")
    assert document.student.chunks_n.tolist() == [0, 1, 2, 3, 3, 4]
    assert document.student.cuts.tolist() == [0, 1, 2, 3, 5, 6]
    assert Side.of_chunks(document.student.tokens_n, document.student.chunks_n).part(
        3, 4
    ).chunks_n.tolist() == [NO_CHUNK, 0, 0]

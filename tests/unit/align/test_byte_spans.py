"""Byte ranges of tokens, for every kind of tokenizer.

Regimes: parts of characters, byte fallback, spaces put first and last, other cases, composed and
removed accents, unknown characters, lost white space; special tokens that the text spells, that it
does not, and both; ids that do not encode it; pairs of kinds, whose chunks cover every byte.
"""

from __future__ import annotations

import itertools
import json
import tracemalloc
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron_distill.align import align_spans, continued_spans, coverage, token_spans
from megatron_distill.data.tokenizers.open import train_bpe
from megatron_distill.errors import DataError
from tests.reference.byte_spans import Range, spans_of_tokens
from tests.support.rewriting_tokenizers import REWRITING, kind_of, rewriting_tokenizer
from tests.support.tokenizer_kinds import HARD_TEXTS, KINDS, no_underscores, tokenizer_of

# The space that a tokenizer adds to a text.
EXACT = {"hf_bytes": "", "tiktoken": "", "sp_bpe": "first", "sp_suffix": "last",
         "hf_fallback": "first", "hf_runs": ""}  # fmt: skip
WRITES_ALL = (*EXACT, "hf_nfc", "hf_lower", "hf_unigram")
HUMAN_RIGHTS = Path(__file__).parent / "human_rights.txt"  # article 1 of the declaration of 1948

characters = st.one_of(
    st.characters(exclude_categories=("Cs",)),
    st.sampled_from(
        " \n\t\x00abAB\u0301\u0323\u200d\u3000\ufb01\u00bd\u212b\u0130漢한\u1112\u1161"
    ),
    st.sampled_from(["\U0001f469", "\U0001f3fd", "\ufe0f", "\u2026", "\uff76", "\uff9e", "É"]),
)
# Without the character that stands for a space, and without special tokens.
any_text = st.text(characters, max_size=40).map(
    lambda text: text.replace("\u2581", "_").replace("<", "(").replace("[", "(")
)
examples = settings(max_examples=25, deadline=None)
Ints = NDArray[np.int64]


def encoded(kind: str, text: str) -> list[int]:
    ids: list[int] = kind_of(kind).encode_batch([text])[0].tolist()
    return ids


def spans(kind: str, text: str, ids: list[int] | None = None) -> list[Range]:
    found = token_spans(kind_of(kind), encoded(kind, text) if ids is None else ids, text)
    assert found.dtype == np.int64
    return [(start, stop) for start, stop in found.tolist()]


@pytest.mark.parametrize("kind", EXACT)
@examples
@given(text=any_text)
@example(text=HARD_TEXTS[7])
@example(text=" a")
@example(text="   ")
def test_ranges_of_exact_tokenizers_are_the_slow_reference_s(kind: str, text: str) -> None:
    of_id = kind_of(kind).token_bytes()
    tokens = [of_id[number] or b"" for number in encoded(kind, text)]
    assert spans(kind, text) == spans_of_tokens(text, tokens, space=EXACT[kind])


def rewritten(kind: str, text: str) -> str:
    """The text as the tokenizer writes it, without white space at its ends."""
    if kind in REWRITING:
        normalizer: Any = rewriting_tokenizer(kind).hugging_face.backend_tokenizer.normalizer
        return str(normalizer.normalize_str(text)).strip()
    if kind == "sp_nfkc":
        processor: Any = tokenizer_of(kind)._processor  # type: ignore[attr-defined]
        return str(processor.normalize(text)).replace("\u2581", " ").strip()
    return text.strip()


@pytest.mark.parametrize(
    "kind", ["hf_nfc", "hf_nfkc", "hf_lower", "hf_wordpiece", "hf_unigram", "sp_nfkc"]
)
@examples
@given(text=any_text)
@example(text="E\u0301te\u0301 \u1112\u1161\u11ab \u0130x \ufb01n\u2026 \U0001f44d\U0001f3fdÉ")
def test_a_range_is_the_text_that_its_token_rewrites(kind: str, text: str) -> None:
    of_id, data = kind_of(kind).token_bytes(), text.encode()
    ids, found = encoded(kind, text), spans(kind, text)
    assert all(0 <= start <= stop <= len(data) for start, stop in found)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(found))
    covered = {at for span in found for at in range(*span)}
    lost = bytes(byte for at, byte in enumerate(data) if at not in covered)
    # WordPiece drops control characters between spaces, SentencePiece those that it cannot write.
    assert lost.decode().strip() == "" or kind in ("hf_wordpiece", "sp_nfkc")
    # Tokens up to the next range that begins a character, with those without a range behind it.
    begin = 0
    for index in range(1, len(ids) + 1):
        place = found[index][0] if index < len(ids) else len(data)
        if index < len(ids) and (found[index][0] == found[index][1] or data[place] & 0xC0 == 0x80):
            continue
        group = slice(begin, index)
        begin = index
        if any(of_id[number] is None for number in ids[group]):
            continue  # unknown characters
        written = b"".join(of_id[number] or b"" for number in ids[group]).decode().strip()
        ends = [at for span in found[group] if span[0] < span[1] for at in span]
        if ends:
            own = rewritten(kind, data[min(ends) : max(ends)].decode())
            assert unicodedata.normalize("NFC", written) == unicodedata.normalize("NFC", own)
        else:
            assert written == "", "a token without a range adds a space"


# Python's own source, parts of it, and bytes that are no UTF-8, read with replacement characters.
code = st.sampled_from(Path(json.decoder.__file__).read_text(encoding="utf-8").splitlines())
repaired = st.binary(max_size=24).map(lambda data: data.decode(errors="replace"))
texts = st.one_of(any_text, code, st.tuples(code, any_text, code).map("\n".join), repaired).map(
    lambda text: text.replace("\u2581", "_").replace("<", "(").replace("[", "(")
)


@settings(max_examples=20, deadline=None)
@given(text=texts)
@example(text=HARD_TEXTS[7])
@example(text="E\u0301te\u0301 \U0001f44d\U0001f3fd \ufffd\ufffd def f(x):\n\treturn 漢字")
def test_chunks_of_every_two_kinds_cover_every_byte(text: str) -> None:
    kinds = (*WRITES_ALL, "hf_wordpiece")
    sides = {kind: np.array(spans(kind, text), np.int64).reshape(-1, 2) for kind in kinds}
    size = len(text.encode())
    for first, second in itertools.permutations(kinds, 2):
        own, others = sides[first], sides[second]
        chunks = align_spans(own, others)
        figures = coverage(chunks, own, others)
        aligned = (figures.student.aligned_bytes, figures.teacher.aligned_bytes)
        assert (first, second, *aligned) == (first, second, *covered_bytes(own, others, size))
        assert np.array_equal(own[chunks.student[:, 1] - 1, 1], others[chunks.teacher[:, 1] - 1, 1])


def covered_bytes(own: Ints, others: Ints, size: int) -> tuple[int, int]:
    """Bytes of the tokens of both sides up to their last common end.

    That is the whole text where both sides write all of it. WordPiece leaves out white space and
    control characters, also at the end of the text.
    """
    ends = [set(side[side[:, 0] < side[:, 1], 1].tolist()) for side in (own, others)]
    last = max(ends[0] & ends[1], default=0)
    found = [int((side[:, 1] - side[:, 0])[side[:, 1] <= last].sum()) for side in (own, others)]
    if all(int((side[:, 1] - side[:, 0]).sum()) == size for side in (own, others)):
        assert found == [size, size]
    return found[0], found[1]


@pytest.mark.parametrize("name", ["code", "scripts"])
def test_real_text_is_in_chunks_but_for_a_thousandth_under_all_pairs(name: str) -> None:
    """Python's own source, and one paragraph in ten languages of ten scripts or accents."""
    path = Path(json.decoder.__file__) if name == "code" else HUMAN_RIGHTS
    text = path.read_text(encoding="utf-8")
    tokenizers = [kind_of(kind) for kind in WRITES_ALL]
    if name == "scripts":  # whose merges cross characters, and end inside of them
        lines = text.splitlines()
        tokenizers += [train_bpe(lines, vocab_size=500), train_bpe(lines[::2], vocab_size=700)]
    sides = []
    for tokenizer in tokenizers:
        ids = tokenizer.encode_batch([text])[0].tolist()
        sides.append(np.array(token_spans(tokenizer, ids, text)).reshape(-1, 2))
    for pair in itertools.combinations(sides, 2):
        figures = coverage(align_spans(*pair), *pair)
        for side in (figures.student, figures.teacher):
            assert side.aligned_bytes >= 0.999 * len(text.encode())
        assert figures.chunks > len(text) / 40  # and not in a few large ones


def test_hard_texts_have_ranges_under_every_kind() -> None:
    for kind in (*KINDS, *REWRITING):
        for text in no_underscores(HARD_TEXTS):
            last = max((stop for _, stop in spans(kind, text)), default=0)
            if kind != "hf_wordpiece" or text.rstrip().isprintable():
                assert len(text.rstrip().encode()) <= last <= len(text.encode()), (kind, text)


def test_tokens_of_one_rewritten_character_are_one_range() -> None:
    # The accent after the letter is composed into two bytes, of which no boundary is in the text.
    assert spans("hf_nfc", "e\u0301x") == [(0, 3), (3, 3), (3, 4)]
    for kind, text, expected in [
        ("hf_nfc", "e\u0301x", [False, True, False]),
        ("hf_nfkc", "a\u00a8", [False, False, True, True]),  # a space and an accent of two bytes
        ("hf_lower", "É", [False, False, False]),  # a space first, and a byte for each byte
        ("sp_suffix", "a ", [False] * 3),
    ]:
        _, continues = continued_spans(kind_of(kind), encoded(kind, text), text)
        assert (kind, continues.tolist()) == (kind, expected)
    assert spans("hf_lower", "É") == [(0, 0), (0, 1), (1, 2)]
    assert spans("hf_unigram", "\u2603\u2603 ")[:2] == [(0, 0), (0, 6)]


@pytest.mark.parametrize("kind", [*EXACT, "hf_nfc", "hf_wordpiece", "sp_nfkc"])
def test_special_tokens_around_a_text_have_no_bytes(kind: str) -> None:
    tokenizer = kind_of(kind)
    text = "plain words"
    inner = spans(kind, text)
    last = inner[-1][1]
    ids = [*[tokenizer.eos_id] * 2, *encoded(kind, text), tokenizer.eos_id]
    assert spans(kind, text, ids) == [(0, 0), (0, 0), *inner, (last, last)]
    assert spans(kind, "", [tokenizer.eos_id]) == [(0, 0)]
    assert spans(kind, "", []) == []


@pytest.mark.parametrize("kind", ["hf_bytes", "tiktoken", "sp_bpe", "hf_fallback", "hf_wordpiece"])
def test_special_tokens_that_the_text_spells_have_its_bytes(kind: str) -> None:
    tokenizer = kind_of(kind)
    (eos,) = (text for text, number in tokenizer.special_ids.items() if number == tokenizer.eos_id)
    text = f"plain{eos}words{eos}"
    width = len(eos)
    parts = [encoded(kind, "plain"), [tokenizer.eos_id], encoded(kind, "words")]
    ids = [*parts[0], *parts[1], *parts[2], tokenizer.eos_id]
    found = spans(kind, text, [tokenizer.eos_id, *ids, tokenizer.eos_id])
    assert found[0] == (0, 0)
    assert found[1 + len(parts[0])] == (5, 5 + width)
    assert found[-2:] == [(10 + width, 10 + 2 * width), (10 + 2 * width, 10 + 2 * width)]
    assert [span for span in found if span[0] < span[1]][0][0] == 0


def test_a_text_of_many_spelled_special_tokens_takes_no_memory_for_each_pair_of_them() -> None:
    special, count = "<|endoftext|>", 1500
    tracemalloc.start()
    found = spans("hf_bytes", special * count, [0] * (count + 1))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # One of the tokens is not in the text.
    assert sorted(stop - start for start, stop in found) == [0, *[len(special)] * count]
    assert peak < 50e6


def test_a_special_token_before_a_text_that_spells_it_in_letters() -> None:
    # SentencePiece encodes the spelling as letters, so the token itself stands outside the text.
    tokenizer = tokenizer_of("sp_bpe")
    assert tokenizer.bos_id is not None
    inner = encoded("sp_bpe", "<s>x")
    assert tokenizer.bos_id not in inner
    assert spans("sp_bpe", "<s>x", [tokenizer.bos_id, *inner])[0] == (0, 0)
    assert spans("sp_bpe", "<s>x", [tokenizer.bos_id, *encoded("sp_bpe", "x")])[0] == (0, 3)


@pytest.mark.parametrize(
    ("kind", "text", "ids_of", "message"),
    [
        ("hf_bytes", "plain words", "plain swords", r"byte 6 of 11, near 'plain words'"),
        ("hf_bytes", "words", " words", r"byte 0 of 5, near 'words'"),
        ("tiktoken", "one two", "one", r"byte 3 of 7, near 'one two'"),
        ("sp_bpe", "one", "one two", r"byte 3 of 3, near 'one'"),
        ("hf_wordpiece", "One two", "one three", r"these ids do not encode the text"),
        ("sp_nfkc", "\ufb01ne", "fin", r"Give the ids that this tokenizer's encode_batch"),
    ],
)
def test_ids_of_another_text_are_refused(kind: str, text: str, ids_of: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        spans(kind, text, encoded(kind, ids_of))
    assert str(caught.value).startswith(kind_of(kind).name)


def test_a_special_token_inside_a_text_that_does_not_spell_it_is_refused() -> None:
    tokenizer = kind_of("hf_bytes")
    ids = [*encoded("hf_bytes", "one"), tokenizer.eos_id, *encoded("hf_bytes", " two")]
    with pytest.raises(DataError, match="do not encode the text"):
        spans("hf_bytes", "one two", ids)


def test_ids_and_texts_that_are_none_are_refused() -> None:
    for number in (-1, kind_of("tiktoken").vocab_size):
        with pytest.raises(DataError, match=rf"token 1 is id {number}, and ids are in \[0, 511\)"):
            spans("tiktoken", "a", [*encoded("tiktoken", "a"), number])
    with pytest.raises(DataError, match="do not encode the text"):
        spans("tiktoken", "a", [*encoded("tiktoken", "a"), 505])  # an id without a token
    with pytest.raises(DataError, match="an unpaired surrogate at character 1"):
        spans("tiktoken", "a\ud83d", [1])
    with pytest.raises(ValueError, match=r"token_ids: float64 of shape \(1,\)"):
        token_spans(kind_of("tiktoken"), [0.5], "a")

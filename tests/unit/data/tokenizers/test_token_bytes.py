"""The bytes of a token: those of a text's tokens, one after another, are the text.

Regimes: bytes of one character in several tokens, byte fallback, spaces put first and last, parts
of words, tokens that were added, special tokens, ids without a token.
"""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.rewriting_tokenizers import REWRITING, rewriting_tokenizer
from tests.support.tokenizer_kinds import HARD_TEXTS, KINDS, LOSSLESS, no_underscores, tokenizer_of

any_text = st.text(
    st.one_of(
        st.characters(exclude_categories=("Cs",)),
        st.sampled_from(" \n\t\x00ab\u0301\u200d\u3000\ufb01漢\U0001f469"),
    ),
    max_size=40,
).map(lambda text: text.replace("\u2581", "_").replace("<", "("))


def written(kind: str, text: str) -> bytes:
    tokenizer = rewriting_tokenizer(kind) if kind in REWRITING else tokenizer_of(kind)
    of_id = tokenizer.token_bytes()
    (ids_n,) = tokenizer.encode_batch([text])
    return b"".join(of_id[number] or b"\xff" for number in ids_n.tolist())


@pytest.mark.parametrize("kind", [*LOSSLESS, "sp_suffix", "hf_fallback", "hf_runs"])
@settings(max_examples=20, deadline=None)
@given(text=any_text)
def test_the_bytes_of_a_text_s_tokens_are_the_text(kind: str, text: str) -> None:
    expected = text.encode()
    if text:
        expected = b" " * (kind in ("sp_bpe", "hf_fallback")) + expected
        expected += b" " * (kind == "sp_suffix")
    assert written(kind, text) == expected


def test_a_rewriting_tokenizer_s_tokens_are_the_rewritten_text() -> None:
    for text in no_underscores(HARD_TEXTS):
        assert written("hf_nfc", text) == unicodedata.normalize("NFC", text).encode()
        if text and not text[0].isspace():
            assert written("hf_lower", text) == b" " + text.lower().encode()
    assert written("hf_wordpiece", "Plain  WORDS\n\u00e9t\u00e9") == b"plainwordsete"
    assert written("hf_unigram", "plain words") == b" plain words"
    assert written("sp_nfkc", "  \ufb01ne \t") == b" fine"


@pytest.mark.parametrize("kind", [*KINDS, *REWRITING])
def test_every_id_has_an_entry_and_special_tokens_have_no_bytes(kind: str) -> None:
    tokenizer = rewriting_tokenizer(kind) if kind in REWRITING else tokenizer_of(kind)
    of_id = tokenizer.token_bytes()
    assert len(of_id) == tokenizer.vocab_size
    special = set(tokenizer.special_ids.values())
    known = set(tokenizer.vocabulary().values())
    assert {number for number, token in enumerate(of_id) if token is None} == special | (
        set(range(tokenizer.vocab_size)) - known
    )
    assert b"" not in of_id


def test_added_tokens_are_literal_and_byte_tokens_are_bytes() -> None:
    nfc = rewriting_tokenizer("hf_nfc")
    assert nfc.token_bytes()[nfc.vocabulary()["<tool>"]] == b"<tool>"
    fallback = rewriting_tokenizer("hf_fallback")
    assert fallback.token_bytes()[fallback.vocabulary()["<0xE6>"]] == b"\xe6"
    # Spaces in a text become this token; the same letters in a text do as well.
    runs = rewriting_tokenizer("hf_runs")
    number = runs.vocabulary()["\u2581\u2581"]
    assert [runs.encode_batch(["a" + run])[0][-1] for run in ("  ", "\u2581\u2581")] == [number] * 2
    assert runs.token_bytes()[number] == b"  "
    # Without byte fallback the same spelling is six characters.
    wordpiece = rewriting_tokenizer("hf_wordpiece")
    part = next(token for token in wordpiece.vocabulary() if token.startswith("##"))
    assert wordpiece.token_bytes()[wordpiece.vocabulary()[part]] == part[2:].encode()

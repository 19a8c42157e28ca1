"""Every kind of tokenizer: text and back, spans, bytes of tokens, saved folders."""

from __future__ import annotations

import shutil
import unicodedata
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_distill.data.tokenizers.open import holds_tokenizer, load_tokenizer
from megatron_distill.data.tokenizers.tiktoken_encodings import byte_characters
from megatron_distill.errors import DataError
from tests.reference.token_spans import Span, spans_of_bytes, spans_of_rewritten
from tests.support.rewriting_tokenizers import REWRITING, rewriting_tokenizer
from tests.support.tokenizer_kinds import (
    BYTE_LEVEL,
    HARD_TEXTS,
    KEEPS_CHARACTERS,
    KINDS,
    LOSSLESS,
    no_underscores,
    tokenizer_of,
)

every_kind = pytest.mark.parametrize("kind", KINDS)
# One of each library, for what its class does whatever the model is.
every_class = pytest.mark.parametrize("kind", ["hf_bytes", "sp_bpe", "tiktoken"])
characters = st.one_of(
    st.characters(exclude_categories=("Cs",)),
    st.sampled_from(" \n\t\r\x00ab\u0301\u200d\u3000\ufb01\u00bd\u00a8\u212b漢\U0001f469"),
)
any_text = st.text(characters, max_size=40).map(lambda text: text.replace("\u2581", "_"))
examples = settings(max_examples=25, deadline=None)


def with_hard_texts(test: Callable[..., None]) -> Callable[..., None]:
    """Try each of the hard texts beside those that are drawn."""
    for text in no_underscores(HARD_TEXTS):
        test = example(text=text)(test)
    return test


def spans(kind: str, text: str) -> list[Span]:
    (found,) = tokenizer_of(kind).encode_with_offsets([text])
    assert found.ids_n.dtype == found.starts_n.dtype == found.stops_n.dtype == np.int32
    return list(zip(found.starts_n.tolist(), found.stops_n.tolist(), strict=True))


def token_bytes(kind: str, ids: list[int]) -> list[bytes]:
    """The bytes of tokens of a byte-level vocabulary."""
    byte_of = {character: byte for byte, character in enumerate(byte_characters())}
    tokenizer = tokenizer_of(kind)
    special = tokenizer.special_ids
    return [
        spelled.encode() if spelled in special else bytes(byte_of[c] for c in spelled)
        for number in ids
        for spelled, at in tokenizer.vocabulary().items()
        if at == number
    ]


def expected_spans(kind: str, text: str) -> list[Span]:
    """The ids of an independent, slow reading."""
    tokenizer = tokenizer_of(kind)
    if kind in BYTE_LEVEL:
        return spans_of_bytes(text, token_bytes(kind, tokenizer.encode_batch([text])[0].tolist()))
    processor = tokenizer._processor
    rewritten, origins = processor.normalize(text, with_offsets=True)
    tokens = [
        bytes([int(piece.piece[3:5], 16)]) if processor.is_byte(piece.id) else piece.piece.encode()
        for piece in processor.encode(text, out_type="proto").pieces
    ]
    has_dummy = kind != "sp_suffix"
    return spans_of_rewritten(origins, tokens, rewritten, has_dummy=has_dummy)


def check_spans(kind: str, text: str) -> None:
    found = spans(kind, text)
    assert found == expected_spans(kind, text)
    assert all(0 <= start <= stop <= len(text) for start, stop in found)
    starts, stops = [start for start, _ in found], [stop for _, stop in found]
    assert starts == sorted(starts)
    assert stops == sorted(stops)
    if kind in KEEPS_CHARACTERS:
        assert {at for start, stop in found for at in range(start, stop)} == set(range(len(text)))


@pytest.mark.parametrize("kind", LOSSLESS)
@examples
@given(text=any_text)
@with_hard_texts
def test_a_lossless_tokenizer_gives_any_text_back(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    (ids_n,) = tokenizer.encode_batch([text])
    assert ids_n.dtype == np.int32
    assert len(ids_n) == 0 or 0 <= ids_n.min() <= ids_n.max() < tokenizer.vocab_size
    assert tokenizer.decode(ids_n.tolist()) == text
    if "<|endoftext|>" not in text:  # spelled, it is the token itself, as Hugging Face reads it
        assert tokenizer.eos_id not in ids_n


def test_a_model_with_spaces_behind_words_adds_one_at_the_end() -> None:
    tokenizer = tokenizer_of("sp_suffix")
    for text in no_underscores(HARD_TEXTS):
        expected = f"{text} ".removeprefix(" ") if text else ""  # a first space is lost
        assert tokenizer.decode(tokenizer.encode_batch([text])[0].tolist()) == expected


def test_a_normalising_model_gives_the_normal_form_back() -> None:
    tokenizer = tokenizer_of("sp_nfkc")
    for text in ("  \ufb01ne  \t words\n", "\uff57ide de\u0301f", "plain", "", "   "):
        expected = " ".join(unicodedata.normalize("NFKC", text).split())
        assert tokenizer.decode(tokenizer.encode_batch([text])[0].tolist()) == expected


def test_a_metaspace_tokenizer_gives_text_of_its_alphabet_back() -> None:
    tokenizer = tokenizer_of("hf_unigram")
    for text in HARD_TEXTS[2:]:
        (ids_n,) = tokenizer.encode_batch([text])
        # The space that it puts first is one with a space that is there.
        assert tokenizer.decode(ids_n.tolist()) == text.removeprefix(" ")


def test_a_space_written_as_sentencepiece_writes_it_becomes_a_space() -> None:
    tokenizer = tokenizer_of("sp_bpe")
    assert tokenizer.decode(tokenizer.encode_batch(["a\u2581b"])[0].tolist()) == "a b"


@every_kind
def test_a_batch_equals_its_texts_one_by_one(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    alone = [tokenizer.encode_batch([text])[0].tolist() for text in HARD_TEXTS]
    assert [ids_n.tolist() for ids_n in tokenizer.encode_batch(HARD_TEXTS)] == alone
    found = tokenizer.encode_with_offsets(HARD_TEXTS)
    assert [encoding.ids_n.tolist() for encoding in found] == alone
    assert tokenizer.encode_batch([]) == []
    assert tokenizer.encode_with_offsets([]) == []


@pytest.mark.parametrize("kind", [*KEEPS_CHARACTERS, "sp_nfkc"])
@examples
@given(text=any_text)
@with_hard_texts
def test_spans_of_any_text_are_those_of_the_slow_reference(kind: str, text: str) -> None:
    check_spans(kind, text)


@pytest.mark.parametrize("kind", BYTE_LEVEL)
@examples
@given(text=any_text, data=st.data())
def test_a_run_of_tokens_decodes_to_its_span(kind: str, text: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    (ids_n,) = tokenizer.encode_batch([text])
    found = [(0, 0), *spans(kind, text)]
    # A border between tokens is one between characters where no character is shared.
    borders = [at for at in range(len(found) - 1) if found[at][1] <= found[at + 1][0]]
    borders.append(len(ids_n))
    first, last = sorted(data.draw(st.tuples(*[st.sampled_from(borders)] * 2)))
    start = found[first + 1][0] if first < len(ids_n) else len(text)
    stop = found[last][1] if last > first else start
    assert tokenizer.decode(ids_n[first:last].tolist()) == text[start:stop]


def test_a_metaspace_token_covers_its_text() -> None:
    tokenizer = tokenizer_of("hf_unigram")
    spelled = {number: token for token, number in tokenizer.vocabulary().items()}
    for text in HARD_TEXTS:
        (found,) = tokenizer.encode_with_offsets([text])
        stop_before = 0
        for number, start, stop in zip(found.ids_n, found.starts_n, found.stops_n, strict=True):
            token = spelled[int(number)].replace("\u2581", " ")
            if token == " " and start == 0 and not text.startswith(" "):
                assert stop == 1  # the space put first lies on the first character
                continue
            assert start == stop_before
            if token != "<unk>":
                assert token in (text[start:stop], " " + text[start:stop])
            stop_before = stop
        assert stop_before == len(text)


@pytest.mark.parametrize("kind", ["sp_bpe", "sp_suffix", "sp_nfkc"])
@examples
@given(text=any_text)
def test_spans_hold_those_that_sentencepiece_gives(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    pieces = tokenizer._processor.encode(text, out_type="proto").pieces
    data = text.encode()
    for (start, stop), piece in zip(spans(kind, text), pieces, strict=True):
        # Its spans count bytes, and give a character in parts to the last of them.
        assert start == len(data[: piece.begin].decode())
        assert stop >= len(data[: piece.end].decode())


@every_kind
def test_parts_of_an_emoji_cover_all_of_it(kind: str) -> None:
    text = "a \U0001f9d9"  # no text that they were trained on has it
    tokenizer = tokenizer_of(kind)
    (found,) = tokenizer.encode_with_offsets([text])
    at_emoji = [span for span in spans(kind, text) if span[1] == 3 and span[0] < 3]
    assert at_emoji
    if kind in KEEPS_CHARACTERS:
        assert len(at_emoji) == 4
        assert set(at_emoji[1:]) == {(2, 3)}
        assert tokenizer.decode(found.ids_n.tolist()[:-2]).endswith("\ufffd")


@every_class
@examples
@given(ids=st.lists(st.one_of(st.integers(0, 600), st.integers()), max_size=20))
def test_no_ids_are_too_odd_to_decode(kind: str, ids: list[int]) -> None:
    text = tokenizer_of(kind).decode(ids)
    text.encode()


@every_class
def test_an_id_without_a_token_is_a_replacement_character(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode_batch(["word"])[0].tolist()
    for wrong in (-1, tokenizer.vocab_size, 10**9, 2**70):
        found = tokenizer.decode([wrong, *ids, wrong, wrong])
        assert found.replace(" ", "") == "\ufffdword\ufffd\ufffd"


@every_kind
def test_special_tokens_have_ids_and_are_spelled_out(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    assert tokenizer.eos_id in tokenizer.special_ids.values()
    for text, number in tokenizer.special_ids.items():
        assert 0 <= number < tokenizer.vocab_size
        if text != "<unk>":
            assert tokenizer.decode([number]) == text
    known = {None, *tokenizer.special_ids.values()}
    assert {tokenizer.bos_id, tokenizer.pad_id} <= known
    vocabulary = tokenizer.vocabulary()
    assert vocabulary.items() >= tokenizer.special_ids.items()
    assert max(vocabulary.values()) + 1 == tokenizer.vocab_size


@every_class
def test_half_a_surrogate_pair_is_refused(kind: str) -> None:
    for call in (tokenizer_of(kind).encode_batch, tokenizer_of(kind).encode_with_offsets):
        with pytest.raises(DataError, match="an unpaired surrogate at character 2"):
            call(["fine", "ab\ud83d"])


@every_kind
def test_a_saved_folder_is_the_same_tokenizer(kind: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(kind)
    folder = tmp_path / "deep" / "kept"
    for _ in range(2):  # the second time over the first
        tokenizer.save(folder)
        assert [path.name for path in folder.parent.iterdir()] == ["kept"]
    assert holds_tokenizer(folder)
    found = load_tokenizer(folder)
    assert type(found) is type(tokenizer)
    for field in ("vocab_size", "eos_id", "bos_id", "pad_id", "special_ids", "identity"):
        assert getattr(found, field) == getattr(tokenizer, field), field
    assert found.vocabulary() == tokenizer.vocabulary()
    expected = [ids_n.tolist() for ids_n in tokenizer.encode_batch(HARD_TEXTS)]
    assert [ids_n.tolist() for ids_n in found.encode_batch(HARD_TEXTS)] == expected


@every_class
def test_a_chat_template_beside_it_is_read_and_saved(kind: str, tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}\u00e9"
    assert tokenizer_of(kind).chat_template is None
    tokenizer_of(kind).save(tmp_path / "one")
    (tmp_path / "one" / "chat_template.jinja").write_text(template, encoding="utf-8")
    found = load_tokenizer(tmp_path / "one")
    assert found.chat_template == template
    assert found.identity == tokenizer_of(kind).identity
    found.save(tmp_path / "two")
    assert load_tokenizer(tmp_path / "two").chat_template == template


def test_all_kinds_have_identities_of_their_own() -> None:
    # A post-processor that trims offsets gives the same ids.
    assert len({tokenizer_of(kind).identity for kind in KINDS}) == len(KINDS) - 1


@pytest.mark.parametrize("kind", ["sp_bpe", "tiktoken"])
def test_a_model_s_folder_keeps_another_kind_in_a_folder_of_its_own(
    kind: str, tmp_path: Path
) -> None:
    tokenizer_of(kind).save(tmp_path / "tokenizer")
    (tmp_path / "config.json").write_text("{}")
    assert holds_tokenizer(tmp_path)
    assert load_tokenizer(tmp_path).identity == tokenizer_of(kind).identity
    tokenizer_of("hf_bytes").save(tmp_path / "other")
    shutil.copytree(tmp_path / "other", tmp_path, dirs_exist_ok=True)
    assert load_tokenizer(tmp_path).identity == tokenizer_of("hf_bytes").identity


plain_text = any_text.map(lambda text: text.replace("<", "("))  # no special token


def written(kind: str, text: str) -> bytes:
    tokenizer = rewriting_tokenizer(kind) if kind in REWRITING else tokenizer_of(kind)
    of_id = tokenizer.token_bytes()
    (ids_n,) = tokenizer.encode_batch([text])
    return b"".join(of_id[number] or b"\xff" for number in ids_n.tolist())


@pytest.mark.parametrize("kind", [*LOSSLESS, "sp_suffix", "hf_fallback", "hf_runs"])
@settings(max_examples=20, deadline=None)
@given(text=plain_text)
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


@every_class
def test_texts_end_by_the_settings_beside_the_files_whether_a_folder_or_a_file_is_given(
    kind: str, tmp_path: Path
) -> None:
    tokenizer = tokenizer_of(kind)
    tokenizer.save(tmp_path)
    more = 5 if tokenizer.eos_id != 5 else 6
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [{more}]}}')
    files = [*tmp_path.glob("*.model"), *tmp_path.glob("*.tiktoken")]
    assert len(files) == (0 if kind == "hf_bytes" else 1)
    for path in (tmp_path, *files):
        assert load_tokenizer(path).end_ids == (tokenizer.eos_id, more)
    assert tokenizer.end_ids == (tokenizer.eos_id,)

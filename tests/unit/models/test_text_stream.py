"""The text of ids that arrive one by one or many at once, by tokenizers of every kind."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_distill.data.tokenizers.hugging_face import HuggingFaceTokenizer
from megatron_distill.data.tokenizers.open import Tokenizer
from megatron_distill.models.generation import Stops, WriteRow
from megatron_distill.models.generation.flight import RowText
from megatron_distill.models.generation.text import Decode, TextStream
from tests.support.tokenizer_kinds import HARD_TEXTS, KINDS

UNFINISHED = "\N{REPLACEMENT CHARACTER}"


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    return KINDS[kind]()


def one_by_one(
    decode: Decode, strings: Sequence[str], context: Sequence[int], ids: Sequence[int]
) -> tuple[str, int]:
    """The text up to a stop string and the ids read, with two decodes after every id."""
    known = list(context)[-4:]
    start, settled, text = 0, len(known), ""
    for count, token in enumerate([*ids, None], 1):
        if token is not None:
            known.append(token)
        before, now = decode(known[start:settled]), decode(known[start:])
        is_whole = token is None or not now.endswith(UNFINISHED)
        if len(now) > len(before) and is_whole:
            text += now[len(before) :]
            settled = len(known)
            start = max(0, settled - 4)
            places = [place for one in strings if (place := text.find(one)) >= 0]
            if places:
                return text[: min(places)], min(count, len(ids))
    return text, len(ids)


def streamed(stream: TextStream, ids: Sequence[int], chunk: int) -> tuple[str, int]:
    """The same by a stream that gets `chunk` ids at once."""
    read = 0
    for first in range(0, len(ids), chunk):
        read += stream.extend(ids[first : first + chunk])
        if stream.is_stopped:
            break
    return stream.finish(), read


@pytest.mark.parametrize("kind", KINDS)
@given(
    texts=st.lists(st.sampled_from(HARD_TEXTS), max_size=2),
    more=st.text("ab \n漢é👍", max_size=8),
    strange=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 2**20)), max_size=3),
    cut=st.integers(0, 40),
    context=st.integers(0, 9),
    places=st.lists(st.tuples(st.integers(0, 99), st.integers(1, 4)), max_size=2),
)
def test_many_ids_at_once_have_the_text_of_one_by_one(
    kind: str,
    texts: list[str],
    more: str,
    strange: list[tuple[int, int]],
    cut: int,
    context: int,
    places: list[tuple[int, int]],
) -> None:
    """Of texts that end inside of a character, with ids at random, special ones too."""
    tokenizer = tokenizer_of(kind)
    text = more + "".join(one[:60] for one in texts)
    ids = [int(one) for one in tokenizer.encode_batch([text])[0]]
    ids = ids[: max(0, len(ids) - cut)]
    for place, token in strange:
        ids.insert(min(place, len(ids)), token % tokenizer.vocab_size)
    whole = tokenizer.decode(ids)
    strings = tuple(one for start, size in places if (one := whole[start : start + size]))
    expected = one_by_one(tokenizer.decode, strings, ids[:context], ids[context:])
    for chunk in (1, 3, 16, max(1, len(ids))):
        stream = TextStream(tokenizer.decode, strings, ids[:context])
        assert streamed(stream, ids[context:], chunk) == expected, chunk


@cache
def byte_fallback() -> HuggingFaceTokenizer:
    """Bytes for characters that it does not know, as those of Llama 2, Mistral and Gemma."""
    import tokenizers
    from tokenizers import decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581ab"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    return HuggingFaceTokenizer(wrapped, name="byte fallback")


@given(
    text=st.text("ab é漢👍", max_size=12),
    context=st.text("ab é漢👍", max_size=4),
    chunk=st.sampled_from([1, 3, 16, 99]),
)
def test_characters_that_are_bytes_stay_whole_one_after_the_other(
    text: str, context: str, chunk: int
) -> None:
    """This decoder makes a whole run of bytes unreadable that begins inside of a character."""
    tokenizer = byte_fallback()
    before, ids = ([int(one) for one in ids] for ids in tokenizer.encode_batch([context, text]))
    stream = TextStream(tokenizer.decode, (), before)
    assert streamed(stream, ids, chunk) == (text, len(ids))


@given(st.integers(1, 20), st.sampled_from([1, 4, 16]), st.booleans())
def test_a_row_ends_at_the_same_id_however_many_come_at_once(
    limit: int, chunk: int, has_decoder: bool
) -> None:
    tokenizer = tokenizer_of("hf_bytes")
    ids = [int(one) for one in tokenizer.encode_batch(["ab é漢 words\n\nmore"])[0]]
    strings = ("\n\nm",) if has_decoder else ()
    decode = tokenizer.decode if has_decoder else None
    stops = Stops(ids=(ids[-2],), strings=strings)
    rows = []
    for size in (1, chunk):
        row = RowText.of(0, WriteRow((1,), 0, limit), limit, stops, decode, ())
        for first in range(0, len(ids), size):
            if row.is_live:
                part = ids[first : first + size]
                row.extend(part, [0.25 - place for place in range(first, first + len(part))])
        row.ended = row.ended or "length"
        rows.append(row.written())
    assert rows[0] == rows[1]
    assert len(rows[0].ids) == len(rows[0].log_probs) <= limit
    assert max(rows[0].log_probs) <= 0.0, "rounding makes none positive"


def test_a_text_that_nobody_needs_earlier_is_decoded_once() -> None:
    """Two decodes for each id were most of the host's work while a GPU waits."""
    tokenizer = tokenizer_of("hf_bytes")
    ids = [int(one) for one in tokenizer.encode_batch(["plain words, " * 30])[0]]
    calls = []

    def decode(given: Sequence[int]) -> str:
        calls.append(len(given))
        return tokenizer.decode(given)

    for strings, most in (((), 4), (("never",), len(ids) // 16 * 2 + 4)):
        calls.clear()
        stops = Stops(strings=strings)
        row = RowText.of(0, WriteRow((1,), 0, 999), 999, stops, decode, ())
        for first in range(0, len(ids), 16):
            part = ids[first : first + 16]
            row.extend(part, [0.0] * len(part))
        row.ended = "length"
        assert row.written().text == "plain words, " * 30
        assert len(calls) <= most

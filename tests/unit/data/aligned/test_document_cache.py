"""Aligned documents on disk: the same samples, nothing encoded twice, damage, full disks, keys."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from megatron_distill.data.aligned import cache as document_cache
from megatron_distill.data.aligned.cache import (
    CachedDocument,
    DocumentCache,
    cache_folder,
    document_key,
)
from megatron_distill.data.aligned.documents import AlignedDocument, PairEncoder
from megatron_distill.data.chat.source import ConversationOptions
from megatron_distill.data.formats import SourceSpec
from megatron_distill.data.samples import Sample
from megatron_distill.data.sources import (
    DataOptions,
    TeacherReading,
    held_out_samples,
    open_training,
    samples_per_epoch,
)
from megatron_distill.data.text import documents as text_documents
from megatron_distill.data.text.documents import Cursor, Document
from megatron_distill.data.tokenizers.open import Tokenizer
from megatron_distill.errors import DataError
from tests.support.data_fixtures import jsonl_source
from tests.support.tokenizer_kinds import HARD_TEXTS, tokenizer_of, training_texts
from tests.unit.data.aligned.test_aligned_stream import same

UNALIGNED = "\N{GRINNING FACE}" * 3  # one unknown token of the student
LINES = [text for text in training_texts() if text.strip()]
TEXTS = ["\n".join(LINES[first : first + 2]) for first in range(0, 24, 2)]
TEXTS += ["naïve words", UNALIGNED, "x" * 9]


@pytest.fixture(scope="module")
def tokenizers() -> tuple[Tokenizer, Tokenizer]:
    return tokenizer_of("sp_nfkc"), tokenizer_of("hf_bytes")


@pytest.fixture
def encoded(
    tokenizers: tuple[Tokenizer, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> Counter[str]:
    """How often each text was encoded, by both tokenizers together, in this process."""
    counts: Counter[str] = Counter()
    for kind in {type(one) for one in tokenizers}:
        real = kind.encode_batch

        def counting(self: Tokenizer, texts: Sequence[str], real=real) -> list[np.ndarray]:  # type: ignore[no-untyped-def]
            counts.update(texts)
            return real(self, texts)  # type: ignore[no-any-return]

        monkeypatch.setattr(kind, "encode_batch", counting)
    return counts


def once(tokenizers: tuple[Tokenizer, Tokenizer], encoded: Counter[str]) -> Counter[str]:
    """The counts of encoding each text once; those so far are forgotten.

    Spans of rewritten texts encode more: the text again, and characters for the first time.
    """
    for _ in range(2):
        encoded.clear()
        PairEncoder(*tokenizers)(TEXTS, [True] * len(TEXTS))
    found = encoded.copy()
    assert set(found) == set(TEXTS)
    assert min(found.values()) == 2
    encoded.clear()
    return found


def options(teacher: Tokenizer, folder: Path | None, **changes: object) -> DataOptions:
    """The options of a run whose cache is in a folder; None: it has none."""
    given = DataOptions(
        48,
        shuffle_buffer=5,
        shuffle_samples=2,
        teacher=TeacherReading(teacher, 40, max_unaligned=1.0, workers=0),
        conversations=None if folder is None else ConversationOptions(folder),
        document_cache_gib=0.0 if folder is None else 1.0,
    )
    return replace(given, **changes)  # type: ignore[arg-type]


def samples_of(
    specs: Sequence[SourceSpec], student: Tokenizer, given: DataOptions, count: int
) -> list[Sample]:
    source = open_training(specs, tokenizer=student, options=given, seed=3)
    return [source.next_sample() for _ in range(count)]


def assert_same(found: Sequence[Sample], expected: Sequence[Sample]) -> None:
    assert len(found) == len(expected)
    assert all(same(*pair) for pair in zip(found, expected, strict=True))


def segments(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.rglob("manifest.json"))


def test_further_epochs_and_runs_tokenise_nothing_and_have_the_same_samples(
    tokenizers: tuple[Tokenizer, Tokenizer],
    tmp_path: Path,
    encoded: Counter[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    student, teacher = tokenizers
    specs = [jsonl_source(tmp_path / "rows.jsonl", TEXTS)]
    given, pass_over = options(teacher, tmp_path / "cache"), once(tokenizers, encoded)
    epoch = samples_per_epoch(specs[0], tokenizer=student, options=options(teacher, None), seed=3)
    expected = samples_of(specs, student, options(teacher, None), 3 * epoch)
    # Without a cache each epoch encodes each text, and that of the count did.
    assert all(encoded[text] >= 4 * count for text, count in pass_over.items())
    encoded.clear()
    with caplog.at_level(logging.INFO):
        assert_same(samples_of(specs, student, given, 3 * epoch), expected)
    assert encoded == pass_over
    assert (
        f"jsonl: {len(TEXTS)} documents of an epoch, of which 0 were in {tmp_path}" in caplog.text
    )
    assert segments(tmp_path) == ["000000"]
    # A later run; the document without a chunk is left out for the same reason.
    encoded.clear()
    caplog.clear()
    assert_same(samples_of(specs, student, given, 3 * epoch), expected)
    held_out = replace(given, validation_fraction=1.0)
    held_out_samples(specs, tokenizer=student, options=held_out, samples=3)
    assert not encoded
    assert f"rows.jsonl:{TEXTS.index(UNALIGNED) + 1}: each of its chunks has an" in caplog.text
    # Another shuffling and other lengths read the same documents.
    other = replace(given, sequence_length=30, shuffle_buffer=3)
    source = open_training(specs, tokenizer=student, options=other, seed=9)
    for _ in range(2 * epoch):
        source.next_sample()
    assert not encoded
    assert segments(tmp_path) == ["000000"]


@pytest.mark.parametrize("taken", [1, 7])
def test_a_stream_resumes_bit_for_bit_with_a_part_of_its_documents_cached(
    tokenizers: tuple[Tokenizer, Tokenizer],
    tmp_path: Path,
    encoded: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
    taken: int,
) -> None:
    monkeypatch.setattr(document_cache, "SEGMENT_BYTES", 1000)
    student, teacher = tokenizers
    specs = [jsonl_source(tmp_path / "rows.jsonl", TEXTS)]
    specs.append(replace(jsonl_source(tmp_path / "more.jsonl", TEXTS[3:9]), weight=2.0))
    given = options(teacher, tmp_path / "cache")
    whole = open_training(specs, tokenizer=student, options=options(teacher, None), seed=3)
    expected = [whole.next_sample() for _ in range(taken)]
    state = json.loads(json.dumps(whole.state_dict()))
    following = [whole.next_sample() for _ in range(40)]
    cached = open_training(specs, tokenizer=student, options=given, seed=3)
    assert_same([cached.next_sample() for _ in range(taken)], expected)
    assert cached.state_dict() == state
    assert segments(tmp_path)
    encoded.clear()
    resumed = open_training(specs, tokenizer=student, options=given, seed=3)
    resumed.load_state_dict(state)
    assert_same([resumed.next_sample() for _ in range(40)], following)
    assert len(encoded.keys() & set(TEXTS)) < len(TEXTS)  # those of the segments are not
    resumed.load_state_dict(state)
    encoded.clear()
    assert_same([resumed.next_sample() for _ in range(40)], following)
    assert not encoded


def document(text: str, *, is_end: bool = True, is_start: bool = True) -> Document:
    return Document(text, b"", is_end, Cursor(), Path("rows"), is_start)


def assert_equal(found: AlignedDocument | DataError, expected: AlignedDocument | DataError) -> None:
    if isinstance(expected, DataError):
        assert str(found) == str(expected)
        return
    assert found.unknown == expected.unknown
    for side in ("student", "teacher"):
        left, right = getattr(found, side), getattr(expected, side)
        for field in fields(left):
            arrays = getattr(left, field.name), getattr(right, field.name)
            assert arrays[0].dtype == arrays[1].dtype
            np.testing.assert_array_equal(*arrays, err_msg=f"{side} {field.name}")


PAIRS = (
    ("hf_bytes", "sp_bpe"),
    ("sp_nfkc", "hf_unigram"),
    ("sp_suffix", "tiktoken"),  # a space behind the text, which is in no chunk
)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_documents_are_read_as_they_were_encoded(
    pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Segments so small that the documents are in several, and one is in memory.
    monkeypatch.setattr(document_cache, "SEGMENT_BYTES", 4000)
    student, teacher = map(tokenizer_of, pair)
    texts = [text for text in (*HARD_TEXTS, *training_texts()[:4]) if text]
    edges = list(product((False, True), repeat=2))
    documents = [document(text, is_end=e, is_start=s) for text in texts for e, s in edges]
    found = PairEncoder(student, teacher, (3, None))(
        [one.text for one in documents],
        [one.is_end for one in documents],
        starts=[one.is_start for one in documents],
    )
    kept = DocumentCache(tmp_path / "documents", 1 << 30)
    keys = [document_key(one) for one in documents]
    for key, item in zip(keys, found, strict=True):
        kept.add(key, item)
    for reopened in (False, True):
        if reopened:
            kept.flush()
            kept = DocumentCache(tmp_path / "documents", 1 << 30)
        assert len(segments(tmp_path)) > 3
        for one, item, read in zip(documents, found, kept.find(keys), strict=True):
            assert isinstance(read, CachedDocument), "it was added"
            assert_equal(read.found(is_end=one.is_end), item)
    assert kept.find([document_key(document("another text"))]) == [None]


@pytest.mark.parametrize("name", ["tokens", "manifest.json", "keys"])
def test_a_damaged_segment_is_written_anew(
    tokenizers: tuple[Tokenizer, Tokenizer],
    tmp_path: Path,
    encoded: Counter[str],
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    student, teacher = tokenizers
    specs = [jsonl_source(tmp_path / "rows.jsonl", TEXTS)]
    given, pass_over = options(teacher, tmp_path / "cache"), once(tokenizers, encoded)
    expected = samples_of(specs, student, given, 30)
    (damaged,) = (tmp_path / "cache").glob(f"documents-*/*/{name}")
    os.truncate(damaged, damaged.stat().st_size - 8)
    encoded.clear()
    assert_same(samples_of(specs, student, given, 30), expected)
    assert f"{damaged.parent}: is damaged and removed; its documents are enc" in caplog.text
    assert encoded == pass_over
    encoded.clear()
    assert_same(samples_of(specs, student, given, 30), expected)
    assert not encoded


def test_a_full_disk_is_warned_of_once_and_leaves_nothing(
    tokenizers: tuple[Tokenizer, Tokenizer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    student, teacher = tokenizers
    specs = [jsonl_source(tmp_path / "rows.jsonl", TEXTS)]
    expected = samples_of(specs, student, options(teacher, None), 60)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    found = samples_of(specs, student, options(teacher, tmp_path / "cache"), 60)
    assert_same(found, expected)
    (warning,) = [one.message for one in caplog.records if "No space left" in one.message]
    assert "cannot be written (No space left on device), so that documents are encoded" in warning
    assert "data.document_cache_gib=0" in warning
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_a_cache_holds_at_most_its_limit(
    tokenizers: tuple[Tokenizer, Tokenizer],
    tmp_path: Path,
    encoded: Counter[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    student, teacher = tokenizers
    specs = [jsonl_source(tmp_path / "rows.jsonl", TEXTS)]
    most = 2000
    given = options(teacher, tmp_path / "cache", document_cache_gib=most / 2**30)
    with caplog.at_level(logging.INFO):
        found = samples_of(specs, student, given, 60)
    assert_same(found, samples_of(specs, student, options(teacher, None), 60))
    assert caplog.text.count("further documents are encoded in each epoch") == 1
    sizes = [
        path.stat().st_size
        for path in (tmp_path / "cache").rglob("*")
        if path.is_file() and path.suffix != ".json"
    ]
    assert most / 2 < sum(sizes) <= most
    encoded.clear()
    samples_of(specs, student, given, 60)
    assert 0 < len(encoded) < len(TEXTS)
    # Full from the start, it is left as it is.
    assert segments(tmp_path) == ["000000"]


def test_changed_texts_alone_are_encoded_and_other_tokenizers_have_another_folder(
    tokenizers: tuple[Tokenizer, Tokenizer], tmp_path: Path, encoded: Counter[str]
) -> None:
    student, teacher = tokenizers
    given = options(teacher, tmp_path / "cache")
    samples_of([jsonl_source(tmp_path / "rows.jsonl", TEXTS)], student, given, 30)
    encoded.clear()
    # Another file in another order, with one text changed.
    texts = [*reversed(TEXTS[1:]), "one new text"]
    specs = [jsonl_source(tmp_path / "renamed.jsonl", texts)]
    found = samples_of(specs, student, given, 30)
    assert set(encoded) == {"one new text"}
    assert_same(found, samples_of(specs, student, options(teacher, None), 30))
    tiktoken = tokenizer_of("tiktoken")
    folders = [
        cache_folder(tmp_path, *both, begins)
        for both in (tokenizers, tokenizers[::-1], (student, tiktoken))
        for begins in ((None, None), (1, None), (None, 1))
    ]
    assert len(set(folders)) == len(folders)
    assert cache_folder(tmp_path, *tokenizers, (1, None)) == folders[1]


def test_pieces_of_long_files_are_cached_each(
    tokenizers: tuple[Tokenizer, Tokenizer],
    tmp_path: Path,
    encoded: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(text_documents, "PIECE_BYTES", 400)
    student, teacher = tokenizers
    path = tmp_path / "long.txt"
    path.write_text("\n".join(training_texts()[:60]))
    specs = [SourceSpec("text", (str(path),))]
    given = options(teacher, tmp_path / "cache")
    expected = samples_of(specs, student, options(teacher, None), 120)
    encoded.clear()
    assert_same(samples_of(specs, student, given, 120), expected)
    assert len([text for text in encoded if len(text) > 300]) > 3
    counts = encoded.copy()
    assert_same(samples_of(specs, student, given, 120), expected)
    assert encoded == counts
    # The first piece as a text of its own has the end of a document behind it.
    first = next(iter(encoded))
    encoded.clear()
    samples_of([jsonl_source(tmp_path / "rows.jsonl", [first])], student, given, 2)
    assert encoded[first] >= 2


def test_processes_share_a_folder_and_leftovers_are_removed(
    tokenizers: tuple[Tokenizer, Tokenizer], tmp_path: Path
) -> None:
    folder = tmp_path / "documents"
    documents = [document(text) for text in TEXTS]
    keys = [document_key(one) for one in documents]
    found = PairEncoder(*tokenizers)(TEXTS, [True] * len(TEXTS))
    left = folder / f"000000.partial-{os.uname().nodename}-99999999"
    left.mkdir(parents=True)
    one, two = DocumentCache(folder, 1 << 30), DocumentCache(folder, 1 << 30)
    for kept, part in ((one, slice(0, 9)), (two, slice(5, None))):
        for key, item in zip(keys[part], found[part], strict=True):
            kept.add(key, item)
    one.flush()
    assert not left.exists()
    two.flush()
    assert segments(tmp_path) == ["000000", "000001"]
    lengths = [json.loads(path.read_bytes())["keys"] for path in folder.glob("*/manifest.json")]
    assert sorted(lengths) == sorted([9, len(TEXTS) - 9])  # none is written twice
    assert None not in two.find(keys)
    assert None not in DocumentCache(folder, 1 << 30).find(keys)

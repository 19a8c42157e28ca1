"""Samples of a student find a store's records by documents: a join by brute force over bytes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from megatron_distill.data.collation import pack_samples, unpack_samples
from megatron_distill.data.formats import SourceSpec
from megatron_distill.data.routing import Routing
from megatron_distill.data.samples import NO_CHUNK, Sample
from megatron_distill.data.sources import DataOptions, JoinedStore, TeacherReading, open_training
from megatron_distill.data.tokenizers.open import Tokenizer
from megatron_distill.errors import DataError
from megatron_distill.store import CaptureSettings, DocumentIndex, StoreSet
from megatron_distill.store.documents import pieces_of_sample, publish_documents
from tests.support.data_fixtures import jsonl_source
from tests.support.store_samples import begin, fill
from tests.support.tokenizer_kinds import training_texts

# Records are shorter than many documents, and samples have other lengths than records.
RECORD, STUDENT, TEACHER = 37, 50, 44
LINES = [text for text in training_texts() if text.strip()][:60]
TEXTS = ["\n".join(LINES[first : first + 1 + first % 5]) for first in range(0, 54, 2)]
OTHERS = [text + "." for text in TEXTS]
Range = tuple[int, int, int]  # of a token: document, first byte, end


@pytest.fixture
def spec(tmp_path: Path) -> SourceSpec:
    return jsonl_source(tmp_path / "rows.jsonl", TEXTS)


def options(length: int, reading: TeacherReading | None = None) -> DataOptions:
    """Documents in the order of the file, so that an oracle knows which one comes next."""
    return DataOptions(length, shuffle_buffer=1, shuffle_samples=1, teacher=reading)


def store_of(folder: Path, spec: SourceSpec, teacher: Tokenizer, samples: int) -> list[Sample]:
    """Write a store of a stream in the teacher's tokens; its values are made up."""
    stream = open_training([spec], tokenizer=teacher, options=options(RECORD), seed=3)
    found = [stream.next_sample() for _ in range(samples)]
    wanted = CaptureSettings(k=4, vocab_size=teacher.vocab_size, sequence_length=RECORD)
    writer = begin(folder, wanted, samples=samples, per_shard=7)
    fill(writer)
    writer.finish()
    for shard in range(writer.plan.shards):
        first = writer.plan.first(shard)
        pieces = [
            pieces_of_sample(
                sample.sample_id - first,
                sample.document_ids_S1,
                [(part.digest, part.first) for part in sample.documents],
            )
            for sample in found[first : first + writer.plan.count(shard)]
        ]
        publish_documents(folder, writer.plan, shard, pieces)
    return found


def index_of(folder: Path) -> DocumentIndex:
    with StoreSet.open([str(folder)]).stores[0] as store:
        return DocumentIndex(StoreSet([store]))


def joined(
    folder: Path, spec: SourceSpec, student: Tokenizer, teacher: Tokenizer, share: float = 0.01
) -> Iterator[Sample]:
    """Samples of the student, joined with a store."""
    join = JoinedStore(index_of(folder))
    reading = TeacherReading(teacher, TEACHER, share, workers=0, stores=(join,))
    given = options(STUDENT, reading)
    stream = open_training([spec], tokenizer=student, options=given, seed=5)
    while True:
        yield stream.next_sample()


@dataclass
class Walk:
    """Byte ranges of one side's tokens, from texts alone: documents follow in the file's order."""

    tokenizer: Tokenizer
    texts: Sequence[str]
    document: int = -1
    token: int = 0

    def __post_init__(self) -> None:
        lengths = [len(piece or b"") for piece in self.tokenizer.token_bytes()]
        self._tokens: list[list[int]] = []
        self._ranges: list[list[Range]] = []
        for number, text in enumerate(self.texts):
            ids = [*self.tokenizer.encode_batch([text])[0].tolist(), self.tokenizer.eos_id]
            ends = np.cumsum([lengths[one] for one in ids]).tolist()
            assert ends[-1] == len(text.encode()), "its tokens are the text's bytes"
            self._tokens.append(ids)
            self._ranges.append(
                [(number, start, end) for start, end in zip([0, *ends], ends, strict=False)]
            )

    def ranges(
        self, tokens_n: np.ndarray, documents_n: np.ndarray, *, shares_last: bool
    ) -> list[Range | None]:
        """The range of each token of the next sample; None for padding.

        shares_last: whether the sample begins with the last token of the one before.
        """
        found: list[Range | None] = []
        if shares_last and self.document >= 0:
            self.token -= 1
        last = None
        for token, number in zip(tokens_n.tolist(), documents_n.tolist(), strict=True):
            if number < 0:
                found.append(None)
                continue
            ended = self.document < 0 or self.token == len(self._tokens[self.document])
            if number != last:
                if ended:
                    self.document, self.token = (self.document + 1) % len(self.texts), 0
                elif not shares_last:
                    self.token -= 1  # the token of context
            last = number
            assert self._tokens[self.document][self.token] == token
            found.append(self._ranges[self.document][self.token])
            self.token += 1
        return found


def places_by_bytes(
    records: Sequence[Sample], teacher: Tokenizer, texts: Sequence[str]
) -> dict[Range, tuple[int, int]]:
    """Record and position of each token by its byte range: the longest context, then the first."""
    walk, best = Walk(teacher, texts), dict[Range, tuple[int, int, int]]()
    for number, record in enumerate(records):
        ranges = walk.ranges(record.tokens_S1, record.document_ids_S1, shares_last=number > 0)
        documents = record.document_ids_S1.tolist()
        for position in range(RECORD):
            label = ranges[position + 1]
            if label is None or documents[position] != documents[position + 1]:
                continue
            context = documents[: position + 1].count(documents[position])
            found = (-context, number, position)
            best[label] = min(best.get(label, found), found)
    return {label: found[1:] for label, found in best.items()}


def test_each_chunk_has_the_records_of_its_own_bytes(
    student: Tokenizer, teacher: Tokenizer, spec: SourceSpec, tmp_path: Path
) -> None:
    records = store_of(tmp_path / "store", spec, teacher, samples=70)
    expected = places_by_bytes(records, teacher, TEXTS)
    sides = Walk(student, TEXTS), Walk(teacher, TEXTS)
    live = open_training(
        [spec], tokenizer=student, seed=9,
        options=options(STUDENT, TeacherReading(teacher, TEACHER, 0.01, workers=0)),
    )  # fmt: skip
    samples = joined(tmp_path / "store", spec, student, teacher)
    chunks = 0
    for _ in range(60):
        sample, plain = next(samples), live.next_sample()
        other = sample.teacher
        # The samples are those beside a live teacher: no chunk is missing.
        np.testing.assert_array_equal(sample.tokens_S1, plain.tokens_S1)
        np.testing.assert_array_equal(sample.flags_S1, plain.flags_S1)
        for name in ("tokens_U1", "document_ids_U1", "chunks_U1", "student_chunks_S1"):
            np.testing.assert_array_equal(getattr(other, name), getattr(plain.teacher, name))
        own = sides[0].ranges(sample.tokens_S1, sample.document_ids_S1, shares_last=False)
        of_teacher = sides[1].ranges(other.tokens_U1, other.document_ids_U1, shares_last=False)
        for chunk in range(other.chunks):
            ours = [own[i] for i in np.flatnonzero(other.student_chunks_S1 == chunk)]
            labels = np.flatnonzero(other.chunks_U1 == chunk)
            theirs = [of_teacher[i] for i in labels]
            assert ours[0][:2] == theirs[0][:2]
            assert ours[-1][2] == theirs[-1][2]
            for place, label in zip(other.places_U12[labels].tolist(), theirs, strict=True):
                assert tuple(place) == expected[label]
            chunks += 1
        assert (other.places_U12[other.chunks_U1 == NO_CHUNK] == -1).all()
    assert chunks > 500
    # The places travel with the batch.
    batch = pack_samples([sample, sample])
    (again, _) = unpack_samples(batch, slice(0, 2))
    np.testing.assert_array_equal(again.teacher.places_U12, other.places_U12)


def test_documents_of_which_the_stores_teacher_takes_no_sample_need_no_record(
    student: Tokenizer, teacher: Tokenizer, spec: SourceSpec, tmp_path: Path
) -> None:
    """Of two sources the store has the second; the first is of another teacher."""
    store_of(tmp_path / "store", spec, teacher, samples=70)
    other = replace(jsonl_source(tmp_path / "other.jsonl", OTHERS), teacher="b")
    specs = [other, replace(spec, teacher="a")]
    reading = TeacherReading(teacher, TEACHER, 0.01, workers=0)
    join = JoinedStore(index_of(tmp_path / "store"), "a", takes_all=False)
    live, stored = (
        open_training(
            specs, tokenizer=student, seed=5,
            options=replace(options(STUDENT, one), routing=Routing(("a", "b"))),
        )
        for one in (reading, replace(reading, stores=(join,)))
    )  # fmt: skip
    for _ in range(40):
        plain, sample = live.next_sample(), stored.next_sample()
        np.testing.assert_array_equal(sample.tokens_S1, plain.tokens_S1)
        np.testing.assert_array_equal(sample.teacher.chunks_U1, plain.teacher.chunks_U1)
        has_record = sample.teacher.places_U12[sample.teacher.chunks_U1 != NO_CHUNK, 0] >= 0
        assert has_record.all() if sample.teacher_number == 0 else not has_record.any()
    # A source without a teacher is drawn for others alone, or for this one too.
    nameless = [replace(other, teacher=None), replace(spec, teacher="a")]
    drawn = Routing(("a", "b"), (0.0, 1.0))
    for is_drawn in (False, True):
        one = replace(reading, stores=(replace(join, is_drawn=is_drawn),))
        given = replace(options(STUDENT, one), routing=drawn)
        stream = open_training(nameless, tokenizer=student, options=given, seed=5)
        if is_drawn:
            with pytest.raises(DataError, match=r"teachers\.a\.store does not have 2 of"):
                list(islice(iter(stream.next_sample, None), 40))
        else:
            assert {stream.next_sample().teacher_number for _ in range(40)} == {0, 1}
    takes_all = replace(reading, stores=(replace(join, takes_all=True),))
    stream = open_training(specs, tokenizer=student, options=options(STUDENT, takes_all), seed=5)
    with pytest.raises(DataError, match=r"teachers\.a\.store does not have 2 of .*other\.jsonl"):
        list(islice(iter(stream.next_sample, None), 40))


def test_what_a_store_lacks_is_left_out_up_to_a_share_of_documents(
    student: Tokenizer,
    teacher: Tokenizer,
    spec: SourceSpec,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    records = store_of(tmp_path / "store", spec, teacher, samples=14)
    known = places_by_bytes(records, teacher, TEXTS)
    there = {document for document, _, _ in known}
    assert 3 < len(there) < len(TEXTS) - 3
    with caplog.at_level(logging.WARNING):
        samples = joined(tmp_path / "store", spec, student, teacher, share=1.0)
        found = [next(samples) for _ in range(40)]
    assert "teacher.store has none of it" in caplog.text
    assert "teacher.store has only a part of it" in caplog.text
    sides = (
        Walk(student, [TEXTS[one] for one in sorted(there)]),
        Walk(teacher, [TEXTS[one] for one in sorted(there)]),
    )
    whole = 0
    for sample in found:
        other = sample.teacher
        # Only documents of the store are read, and each chunk has all of its records.
        sides[0].ranges(sample.tokens_S1, sample.document_ids_S1, shares_last=False)
        ranges = sides[1].ranges(other.tokens_U1, other.document_ids_U1, shares_last=False)
        for i in np.flatnonzero(other.chunks_U1 != NO_CHUNK):
            document, start, end = ranges[i]
            label = (sorted(there)[document], start, end)
            assert tuple(other.places_U12[i].tolist()) == known[label]
            whole += 1
        counts = [np.unique(one[one >= 0]) for one in (other.chunks_U1, other.student_chunks_S1)]
        assert counts[0].tolist() == counts[1].tolist() == list(range(other.chunks))
    assert whole > 100
    strict = joined(tmp_path / "store", spec, student, teacher)
    with pytest.raises(DataError) as caught:
        list(islice(strict, 60))
    text = str(caught.value)
    assert text.startswith("data.max_unaligned=0.01: teacher.store does not have 2 of ")
    assert "rows.jsonl:" in text
    assert "capture more samples of it, or raise data.max_unaligned" in text


def test_a_changed_document_is_another_document(
    student: Tokenizer, teacher: Tokenizer, spec: SourceSpec, tmp_path: Path
) -> None:
    store_of(tmp_path / "store", spec, teacher, samples=70)
    changed = [*TEXTS[:4], TEXTS[4] + ".", TEXTS[5] + ".", *TEXTS[6:]]
    other = jsonl_source(tmp_path / "changed.jsonl", changed)
    samples = joined(tmp_path / "store", other, student, teacher)
    with pytest.raises(DataError, match=r"has none of .*changed\.jsonl:6\. Use the corpus"):
        list(islice(samples, 60))


def test_texts_of_another_corpus_are_an_error_with_any_share(
    student: Tokenizer, teacher: Tokenizer, spec: SourceSpec, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # No sample would ever be full: the stream would be read again and again.
    monkeypatch.setattr("megatron_distill.data.aligned.stream._MOST_ABSENT", 20)
    store_of(tmp_path / "store", spec, teacher, samples=20)
    other = jsonl_source(tmp_path / "other.jsonl", OTHERS)
    samples = joined(tmp_path / "store", other, student, teacher, share=1.0)
    with pytest.raises(DataError, match=r"has none of the first 20 documents of .*other\.jsonl"):
        next(samples)


def test_a_small_corpus_without_a_document_of_the_store_ends_with_its_first_epoch(
    student: Tokenizer, teacher: Tokenizer, spec: SourceSpec, tmp_path: Path
) -> None:
    store_of(tmp_path / "store", spec, teacher, samples=20)
    other = jsonl_source(tmp_path / "other.jsonl", OTHERS)
    samples = joined(tmp_path / "store", other, student, teacher, share=1.0)
    with pytest.raises(DataError) as caught:
        next(samples)
    assert str(caught.value).startswith(
        f"data.max_unaligned=1: no sample can be made of data source {other.name}: of the "
        f"{len(TEXTS)} documents of an epoch {len(TEXTS)} are not in teacher.store; the last is "
        f"{tmp_path / 'other.jsonl'}:"
    )


def test_a_store_without_the_begin_of_text_names_the_setting(
    student: Tokenizer, teacher: Tokenizer, spec: SourceSpec, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    store_of(tmp_path / "store", spec, teacher, samples=70)
    join = JoinedStore(index_of(tmp_path / "store"))
    reading = TeacherReading(teacher, TEACHER, 0.01, workers=0, stores=(join,))
    for tokenizer in (student, teacher):
        monkeypatch.setattr(tokenizer, "bos_id", 0)
    given = replace(options(STUDENT, reading), add_bos=True)
    stream = open_training([spec], tokenizer=student, options=given, seed=5)
    # A document has one token more here, so that its last one has no record.
    with pytest.raises(DataError, match=r"has only a part of .* and data\.add_bos"):
        list(islice(iter(stream.next_sample, None), 60))


@pytest.mark.parametrize("kind", ["rows", "pieces of a file"])
def test_begin_of_text_tokens_shift_no_place(
    student: Tokenizer, teacher: Tokenizer, spec: SourceSpec, tmp_path: Path, kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for tokenizer, bos_id in ((student, 1), (teacher, 2)):
        monkeypatch.setattr(tokenizer, "bos_id", bos_id)
        monkeypatch.setattr(tokenizer, "adds_bos", True)
    if kind != "rows":
        monkeypatch.setattr("megatron_distill.data.text.documents.PIECE_BYTES", 120)
        (tmp_path / "long.txt").write_text("\n".join(TEXTS))
        spec = SourceSpec("text", (str(tmp_path / "long.txt"),))
    records = store_of(tmp_path / "store", spec, teacher, samples=70)
    firsts = used = 0
    for sample in islice(joined(tmp_path / "store", spec, student, teacher), 40):
        other = sample.teacher
        for label in np.flatnonzero(other.chunks_U1 != NO_CHUNK):
            number, position = other.places_U12[label].tolist()
            pair = slice(position, position + 2)
            assert (
                records[number].tokens_S1[pair].tolist()
                == other.tokens_U1[label - 1 : label + 1].tolist()
            )
            assert len(set(records[number].document_ids_S1[pair].tolist())) == 1
            firsts += int(other.tokens_U1[label - 1] == 2)
            used += 1
    # The first token of a text is a label, behind that of its beginning.
    assert firsts >= (20 if kind == "rows" else 1)
    assert used > 500

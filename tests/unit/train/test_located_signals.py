"""Signals of samples that find their records by documents: each label has its own position.

Memory is that of the rows that a sample uses, in however many records they are.
"""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_distill.data.collation import micro_batch, pack_samples
from megatron_distill.data.samples import NO_CHUNK, Sample, TeacherTokens, untrained_like
from megatron_distill.errors import StoreError
from megatron_distill.losses import ChunkTerm
from megatron_distill.runtime.batch import Batch
from megatron_distill.store import (
    CaptureSettings,
    SampleRecord,
    SampleTokens,
    StoreSet,
    cut_to_rows,
    pack,
    unpack,
)
from megatron_distill.train.teachers.record_signals import require_tokens_at, wanted_rows
from megatron_distill.train.teachers.stored import (
    HostBatch,
    JoinedSamples,
    read_records,
    recorded_signal,
)
from tests.support.store_samples import made_up, settings, tokens_of, top_k_of, write_store

UID = b"12345678"
LENGTH = 12  # of the teacher's side; records have 16 positions
TERMS = [ChunkTerm("likelihood"), ChunkTerm("common", top_k=3, temperature=2.0)]


def exact() -> CaptureSettings:
    return settings(codec="f32", vocab_size=40, temperatures=(2.0,))


def record_of(number: int) -> SampleRecord:
    wanted = exact()
    logits = np.random.default_rng(number).normal(0, 3, (wanted.sequence_length, 40))
    plain = tokens_of(number, wanted)
    plain["document_ids_S1"] = np.repeat([0, 1], [9, 8]).astype(np.int32)
    entries, scalars = top_k_of(logits, wanted.k, plain["tokens_S1"][1:], wanted.temperatures)
    return SampleRecord(number, **plain, entries=entries, scalars=scalars)


RECORDS = {number: record_of(number) for number in (4, 6, 9)}
# Of two samples: record, its first position, number of labels.
RUNS = ([(6, 2, 5), (4, 9, 4)], [(9, 0, 7), (6, 10, 3)])


def sample_of(runs: list[tuple[int, int, int]]) -> Sample:
    """A sample whose teacher's tokens are runs of records, one document for each run."""
    tokens, documents, places = [], [], []
    for document, (number, first, count) in enumerate(runs):
        tokens += RECORDS[number].tokens_S1[first : first + count + 1].tolist()
        documents += [document] * (count + 1)
        places += [[-1, -1], *([number, first + i] for i in range(count))]
    padding = LENGTH + 1 - len(tokens)
    places_U12 = np.array(places + [[-1, -1]] * padding, np.int32)
    is_label = places_U12[:, 0] >= 0
    chunks = np.where(is_label, np.cumsum(is_label) - 1, NO_CHUNK).astype(np.int32)
    tokens_U1 = np.array(tokens + [0] * padding, np.int32)
    documents_U1 = np.array(documents + [-1] * padding, np.int32)
    flags = np.full(LENGTH + 1, 3, np.uint8)
    other = TeacherTokens(tokens_U1, documents_U1, chunks, chunks, places_U12)
    return Sample(tokens_U1, documents_U1, flags, 0, teacher=other)


def batch_of(*samples: Sample) -> Batch:
    return micro_batch(pack_samples(samples), slice(0, len(samples)), isolate_documents=True)


@pytest.mark.parametrize("ranks", [1, 3])
def test_each_label_has_the_values_of_its_place(ranks: int) -> None:
    whole = batch_of(sample_of(RUNS[0]), sample_of(RUNS[1]))
    host = HostBatch.of(whole if ranks == 1 else whole.context_shard(1, ranks))
    assert host.record_numbers == (4, 6, 9)
    packed = [
        cut_to_rows(
            pack(RECORDS[number], exact(), UID), wanted_rows(host.places_bs2, number), exact()
        )
        for number in host.record_numbers
    ]
    found = recorded_signal(packed, host, TERMS, exact(), vocab_size=40)
    likelihood, common = found.by_term
    assert common.temperature == 2.0
    labels = 0
    alone = {
        number: exact().kind.signal([unpack(pack(record, exact(), UID))], temperature=2.0)
        for number, record in RECORDS.items()
    }
    rows = zip(host.places_bs2.reshape(-1, 2).tolist(), host.labels_bs.reshape(-1), strict=True)
    for row, ((number, position), label) in enumerate(rows):
        if number < 0:
            continue
        scalars, expected = RECORDS[number].scalars, alone[number]
        assert likelihood.ids[row].tolist() == [label]
        assert float(likelihood.log_probs[row]) == scalars.label_log_prob_S[position]
        for name in ("ids", "log_probs", "log_tail"):
            assert torch.equal(getattr(common, name)[row], getattr(expected, name)[position])
        labels += 1
    assert labels == sum(count for runs in RUNS for _, _, count in runs)


@pytest.mark.parametrize("is_by_document", [True, False])
def test_one_of_several_teachers_reads_the_records_of_its_own_samples(
    is_by_document: bool,
) -> None:
    samples = [
        replace(sample_of(runs), sample_id=20 + number, teacher_number=number, number_in_source=3)
        for number, runs in enumerate(RUNS)
    ]
    if not is_by_document:
        samples = [
            replace(one, teacher=replace(one.teacher, places_U12=None))  # type: ignore[type-var]
            for one in samples
        ]
    batch = batch_of(*samples)
    routed = HostBatch.of(batch, JoinedSamples(1, takes_all=False, of_source=False))
    named = HostBatch.of(batch, JoinedSamples(1, takes_all=True, of_source=False))
    assert (routed.is_trained_b, named.is_trained_b) == ((False, True), (True, True))
    assert routed.record_numbers == ((6, 9) if is_by_document else (20, 21))
    assert named.record_numbers == ((4, 6, 9) if is_by_document else (20, 21))
    of_source = HostBatch.of(batch, JoinedSamples(1, takes_all=False, of_source=True))
    assert of_source.sample_ids == (3, 3)
    if routed.places_bs2 is not None:
        assert (routed.places_bs2[0] == -1).all()
        assert np.array_equal(routed.places_bs2[1], named.places_bs2[1])


def test_a_batch_of_padding_needs_no_record() -> None:
    filler = untrained_like(sample_of(RUNS[0]), 7)
    host = HostBatch.of(batch_of(filler, filler))
    assert host.record_numbers == ()
    found = recorded_signal([], host, TERMS, exact(), vocab_size=40)
    assert found.tokens == 2 * LENGTH


@pytest.mark.parametrize("wrong", ["label", "token", "document"])
def test_other_tokens_at_a_place_are_an_error(wrong: str) -> None:
    host = HostBatch.of(batch_of(sample_of(RUNS[0])))
    given = (host.tokens_bs, host.labels_bs)
    record = RECORDS[6]
    tokens, documents = record.tokens_S1.copy(), record.document_ids_S1.copy()
    require_tokens_at(
        SampleTokens(tokens, documents, record.flags_S1), 6, host.places_bs2, given, ""
    )
    if wrong == "document":
        documents[5:] += 1
    else:
        tokens[7 if wrong == "label" else 2] ^= 1
    with pytest.raises(StoreError, match=r"here: at position . its tokens differ .* data\.add_bos"):
        require_tokens_at(
            SampleTokens(tokens, documents, record.flags_S1), 6, host.places_bs2, given, "here"
        )


def scattered(records: int, labels: int, length: int) -> Batch:
    """A sample whose labels are dealt out to records in turn: pairs of tokens, one each."""
    wanted = large(length)
    own: list[int] = []
    places: list[list[int]] = []
    for label in range(labels):
        number = label % records
        found = tokens_of(number, wanted)
        documents = found["document_ids_S1"]
        is_same = (documents[:-1] == documents[1:]) & (documents[:-1] >= 0)
        position = int(np.flatnonzero(is_same)[7 * (label // records)])
        own += found["tokens_S1"][position : position + 2].tolist()
        places += [[-1, -1], [number, position]]
    places_U12 = np.array(places, np.int32)
    is_label = places_U12[:, 0] >= 0
    chunks = np.where(is_label, np.cumsum(is_label) - 1, NO_CHUNK).astype(np.int32)
    tokens_U1 = np.array(own, np.int32)
    documents_U1 = np.arange(2 * labels, dtype=np.int32) // 2
    flags = np.full(2 * labels, 3, np.uint8)
    other = TeacherTokens(tokens_U1, documents_U1, chunks, chunks, places_U12)
    return batch_of(Sample(tokens_U1, documents_U1, flags, 0, teacher=other))


def large(length: int) -> CaptureSettings:
    return settings(k=64, sequence_length=length)


def traced(folder: Path, batch: Batch, length: int) -> tuple[int, int, int]:
    """Bytes that the read records hold; the largest number while reading, and while decoding."""
    host = HostBatch.of(batch)
    terms = [ChunkTerm("likelihood"), ChunkTerm("common", top_k=40)]
    stores = StoreSet.open([str(folder)])
    read_records(stores, [host])  # what is made once is no part of the figures
    tracemalloc.start()
    try:
        packed = read_records(stores, [host])
        held, of_reading = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        found = recorded_signal(packed, host, terms, large(length), vocab_size=131_073)
        of_decoding = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        stores.close()
    for label, (number, position) in enumerate(host.places_bs2.reshape(-1, 2).tolist()):
        if number >= 0:
            scalars = made_up(number, large(length)).scalars
            expected = scalars.label_log_prob_S.astype(np.float16)[position]
            assert float(found.label_log_prob[label]) == float(expected)
    return held, of_reading, of_decoding


def test_memory_is_that_of_the_rows_and_not_of_their_records(tmp_path: Path) -> None:
    length, labels = 512, 24
    write_store(tmp_path, large(length), samples=24, per_shard=24)
    one_record = length * 64 * 8  # ids and log-probabilities, decoded
    of_rows = labels * 64 * 8
    figures = {
        records: traced(tmp_path, scattered(records, labels, length), length)
        for records in (4, 12, 24)
    }
    for held, of_reading, of_decoding in figures.values():
        assert held < 3 * of_rows + 24 * 1024  # with the headers of at most 24 records
        assert of_reading < 6 * one_record  # one record at a time
        assert of_decoding < 12 * of_rows + 64 * 1024
    # Six times as many records take no more than their headers.
    assert figures[24][0] - figures[4][0] < 24 * 512
    assert figures[24][1] < 1.1 * figures[4][1]

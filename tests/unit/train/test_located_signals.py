"""Signals of samples that find their records by documents: each label has its own position."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_distill.data.collation import micro_batch, pack_samples
from megatron_distill.data.samples import NO_CHUNK, Sample, TeacherTokens, untrained_like
from megatron_distill.errors import StoreError
from megatron_distill.losses import ChunkTerm
from megatron_distill.runtime.batch import Batch
from megatron_distill.signals import TopK
from megatron_distill.store import CaptureSettings, SampleRecord, SampleTokens, pack, unpack
from megatron_distill.train.teachers.located import require_tokens_at
from megatron_distill.train.teachers.stored import HostBatch, recorded_signal
from tests.support.store_samples import settings, tokens_of, top_k_of

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
    packed = [pack(RECORDS[number], exact(), UID) for number in host.record_numbers]
    found = recorded_signal(packed, host, TERMS, exact(), vocab_size=40)
    likelihood, common = found.by_term
    assert isinstance(likelihood, TopK)
    assert isinstance(common, TopK)
    assert common.temperature == 2.0
    assert host.places_bs2 is not None
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
        assert scalars is not None
        assert isinstance(expected, TopK)
        assert likelihood.ids[row].tolist() == [label]
        assert float(likelihood.log_probs[row]) == scalars.label_log_prob_S[position]
        for name in ("ids", "log_probs", "log_tail"):
            assert torch.equal(getattr(common, name)[row], getattr(expected, name)[position])
        labels += 1
    assert labels == sum(count for runs in RUNS for _, _, count in runs)


def test_a_batch_of_padding_needs_no_record() -> None:
    filler = untrained_like(sample_of(RUNS[0]), 7)
    host = HostBatch.of(batch_of(filler, filler))
    assert host.record_numbers == ()
    found = recorded_signal([], host, TERMS, exact(), vocab_size=40)
    assert found.tokens == 2 * LENGTH


@pytest.mark.parametrize("wrong", ["label", "token", "document"])
def test_other_tokens_at_a_place_are_an_error(wrong: str) -> None:
    host = HostBatch.of(batch_of(sample_of(RUNS[0])))
    assert host.places_bs2 is not None
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
    with pytest.raises(
        StoreError, match=r"here: at position . it has other tokens .* data\.add_bos"
    ):
        require_tokens_at(
            SampleTokens(tokens, documents, record.flags_S1), 6, host.places_bs2, given, "here"
        )

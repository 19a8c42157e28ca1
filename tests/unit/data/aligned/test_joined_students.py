"""The student's tokens of samples in two tokenizers find a store's records by documents."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_distill.data.collation import count_labels, micro_batch, pack_samples, unpack_samples
from megatron_distill.data.formats import SourceSpec
from megatron_distill.data.samples import CE_TRAINED, FULLY_TRAINED, Sample, untrained_like
from megatron_distill.data.sources import JoinedStore, TeacherReading, open_training
from megatron_distill.data.tokenizers.open import Tokenizer
from megatron_distill.errors import DataError, StoreError
from megatron_distill.losses import Term
from megatron_distill.store import StoreSet, cut_to_rows, unpack
from megatron_distill.train.teachers.record_signals import wanted_rows
from megatron_distill.train.teachers.stored import (
    HostBatch,
    JoinedSamples,
    read_records,
    recorded_signal,
)
from tests.support.data_fixtures import jsonl_source
from tests.support.tokenizer_kinds import byte_level
from tests.unit.data.aligned.test_joined_documents import (
    STUDENT,
    TEACHER,
    TEXTS,
    Walk,
    index_of,
    options,
    places_by_bytes,
    store_of,
)


@pytest.fixture
def spec(tmp_path: Path) -> SourceSpec:
    return jsonl_source(tmp_path / "rows.jsonl", TEXTS)


def samples_of(
    spec: SourceSpec, student: Tokenizer, joins: Sequence[JoinedStore], count: int, share: float = 1
) -> list[Sample]:
    reading = TeacherReading(
        byte_level(), TEACHER, share, workers=0, distils_all=True, stores=tuple(joins)
    )
    stream = open_training([spec], tokenizer=student, options=options(STUDENT, reading), seed=5)
    return [stream.next_sample() for _ in range(count)]


def test_each_label_has_the_record_of_its_own_bytes(
    student: Tokenizer, spec: SourceSpec, tmp_path: Path
) -> None:
    records = store_of(tmp_path / "store", spec, student, samples=70)
    expected = places_by_bytes(records, student, TEXTS)
    join = JoinedStore(index_of(tmp_path / "store"), "near", is_of_student=True)
    live, found = (samples_of(spec, student, joins, 40) for joins in ((), (join,)))
    walk, labels = Walk(student, TEXTS), 0
    for plain, sample in zip(live, found, strict=True):
        np.testing.assert_array_equal(sample.tokens_S1, plain.tokens_S1)
        np.testing.assert_array_equal(sample.flags_S1, plain.flags_S1)
        places = sample.teacher.student_places_S1k2
        documents = sample.document_ids_S1
        ranges = walk.ranges(sample.tokens_S1, documents, shares_last=False)
        for token, own in enumerate(ranges):
            if own is None or token == 0 or documents[token] != documents[token - 1]:
                assert (places[token] == -1).all()
            else:
                assert tuple(places[token, 0].tolist()) == expected[own]
                labels += 1
    assert labels > 1000


def test_the_signal_of_each_label_is_that_of_its_record_in_every_context_shard(
    student: Tokenizer, spec: SourceSpec, tmp_path: Path
) -> None:
    store_of(tmp_path / "store", spec, student, samples=70)
    join = JoinedStore(index_of(tmp_path / "store"), "near", is_of_student=True)
    joins = [replace(join, takes_all=False, is_drawn=False), join]
    samples = [replace(one, teacher_number=1) for one in samples_of(spec, student, joins, 5)]
    samples[2] = replace(untrained_like(samples[2], 7), teacher_number=1)
    samples[3] = replace(samples[3], teacher_number=0)
    teachers: list[Any] = [one.teacher for one in samples]
    batch = pack_samples(unpack_samples(pack_samples(samples), slice(0, 5)))
    whole = micro_batch(batch, slice(0, 5), isolate_documents=True)
    stores = StoreSet.open([str(tmp_path / "store")])
    settings = stores.stores[0].settings
    for shard in (whole, replace(whole, teacher=None).context_shard(0, 5)):
        host = HostBatch.of(shard, JoinedSamples(1, takes_all=False, of_source=False, column=1))
        given = np.stack([own.student_places_S1k2[1:, 1] for own in teachers])
        given[3] = -1  # the sample of the other teacher
        np.testing.assert_array_equal(host.places_bs2, given[:, host.sequence_index_s])
        # Tokens differ from those of the made-up records, so that they are not compared here.
        packed = []
        for number in host.record_numbers:
            content, _ = stores.packed_with_tokens(number)
            packed.append(cut_to_rows(content, wanted_rows(host.places_bs2, number), settings))
        signal = recorded_signal(packed, host, [Term()], settings, vocab_size=400).by_term[0]
        used = 0
        for row, (number, position) in enumerate(host.places_bs2.reshape(-1, 2).tolist()):
            if number < 0:
                continue
            record = unpack(stores.packed_with_tokens(number)[0])
            own = settings.kind.signal([record], temperature=1.0)
            for name in ("ids", "log_probs", "log_tail"):
                assert torch.equal(getattr(signal, name)[row], getattr(own, name)[position])
            used += 1
        assert used > 5
    host = HostBatch.of(whole, JoinedSamples(1, takes_all=True, of_source=False, column=1))
    with pytest.raises(StoreError, match="its tokens differ"):
        read_records(stores, [host])
    stores.close()


def test_labels_that_a_store_lacks_are_not_distilled_and_all_documents_stay(
    student: Tokenizer, spec: SourceSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records = store_of(tmp_path / "store", spec, student, samples=14)
    known = places_by_bytes(records, student, TEXTS)
    index = index_of(tmp_path / "store")
    join = JoinedStore(index, "near", is_of_student=True)
    elsewhere = replace(join, takes_all=False, is_drawn=False)  # takes no sample of the source
    with caplog.at_level(logging.WARNING):
        found = samples_of(spec, student, [elsewhere, join], 40)
    assert "teachers.near.store has none of it" in caplog.text
    assert "teachers.near.store has only a part of it" in caplog.text
    walk, live = Walk(student, TEXTS), samples_of(spec, student, [elsewhere], 40)
    distilled = 0
    for plain, sample in zip(live, found, strict=True):
        np.testing.assert_array_equal(sample.tokens_S1, plain.tokens_S1)
        np.testing.assert_array_equal(sample.teacher.chunks_U1, plain.teacher.chunks_U1)
        documents = sample.document_ids_S1
        ranges = walk.ranges(sample.tokens_S1, documents, shares_last=False)
        for token, own in enumerate(ranges):
            if own is None or token == 0 or documents[token] != documents[token - 1]:
                continue
            assert plain.flags_S1[token] == FULLY_TRAINED
            assert sample.flags_S1[token] == (FULLY_TRAINED if own in known else CE_TRAINED)
            distilled += own in known
    (counts,) = count_labels(pack_samples(found), isolate_documents=True)
    (all_counts,) = count_labels(pack_samples(live), isolate_documents=True)
    assert counts.kd == distilled < 0.6 * counts.ce
    assert (counts.ce, counts.chunks) == (all_counts.ce, all_counts.chunks)
    assert all_counts.kd == all_counts.ce
    message = r"teachers\.near\.store does not have 2 of .* to leave them out of the terms without"
    with pytest.raises(DataError, match=message):
        samples_of(spec, student, [join], 40, share=0.01)


def test_a_document_that_the_other_teachers_store_lacks_is_left_out_first(
    student: Tokenizer, spec: SourceSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # In as many records the student's longer tokens have more of the texts.
    store_of(tmp_path / "near", spec, student, samples=30)
    store_of(tmp_path / "far", spec, byte_level(), samples=14)
    joins = [
        JoinedStore(index_of(tmp_path / name), name, is_of_student=name == "near")
        for name in ("near", "far")
    ]
    with caplog.at_level(logging.WARNING):
        for sample in samples_of(spec, student, joins, 30):
            assert sample.teacher.places_U12 is not None
            assert sample.teacher.student_places_S1k2 is not None
    assert "teachers.far.store has none of it" in caplog.text
    assert "teachers.near.store has none of it" not in caplog.text

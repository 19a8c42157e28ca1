"""Lists of a store's documents: where each token is, the longest context first.

A list that is damaged, or differs from the records, costs no record.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_distill.data.samples import Sample
from megatron_distill.data.text.documents import content_digest
from megatron_distill.data.text.stream import Packer
from megatron_distill.errors import StoreError
from megatron_distill.store import DocumentIndex, StoreReader, StoreSet, repair, verify
from megatron_distill.store.documents import (
    documents_name,
    load_documents,
    pieces_of_sample,
    publish_documents,
    unlisted_shards,
)
from tests.support.store_samples import begin, contents, made_up, settings, write_store

LENGTHS = (3, 40, 1, 9, 17, 2, 26)
WIDTH = settings().sequence_length


def digest_of(number: int) -> bytes:
    return content_digest(f"document {number}".encode())


def packed_documents(documents: Iterable[tuple[int, int]]) -> list[Sample]:
    """Samples of documents, (number, length) each; token j of document d is 100 d + j."""
    packer: Packer[int] = Packer(WIDTH, padding_token=9_999, digest_of=digest_of)
    samples: list[Sample] = []
    for number, length in documents:
        packer.add(100 * number + np.arange(length, dtype=np.int32), number)
        while packer.is_ready:
            samples.append(packer.take(len(samples)))
    last = packer.flush(len(samples))
    return samples if last is None else [*samples, last]


def packed_epochs(epochs: int, seed: int) -> list[Sample]:
    """Samples of all documents, in a new order in each epoch."""
    rng = np.random.default_rng(seed)
    orders = [rng.permutation(len(LENGTHS)).tolist() for _ in range(epochs)]
    return packed_documents((number, LENGTHS[number]) for order in orders for number in order)


def write(folder: Path, samples: Sequence[Sample], *, per_shard: int = 4) -> Path:
    writer = begin(folder, settings(), samples=len(samples), per_shard=per_shard)
    for shard in writer.holes():
        first = writer.plan.first(shard)
        with writer.shard(shard) as open_shard:
            for sample in samples[first : first + writer.plan.count(shard)]:
                names = ("tokens_S1", "document_ids_S1", "flags_S1")
                plain = {name: getattr(sample, name) for name in names}
                open_shard.add(replace(made_up(sample.sample_id, settings()), **plain))
    writer.finish()
    for shard in range(writer.plan.shards):
        first = writer.plan.first(shard)
        pieces = [
            pieces_of_sample(
                offset,
                samples[first + offset].document_ids_S1,
                [(part.digest, part.first) for part in samples[first + offset].documents],
            )
            for offset in range(writer.plan.count(shard))
        ]
        publish_documents(folder, writer.plan, shard, pieces)
    return folder


def by_brute_force(samples: Sequence[Sample], token: int) -> tuple[int, int] | None:
    """Record and position that predict a token, of those with the longest context the first."""
    found: list[tuple[int, int, int]] = []
    for number, sample in enumerate(samples):
        tokens, documents = sample.tokens_S1.tolist(), sample.document_ids_S1.tolist()
        for position in range(len(tokens) - 1):
            is_label = tokens[position + 1] == token and documents[position + 1] >= 0
            if is_label and documents[position] == documents[position + 1]:
                context = documents[: position + 1].count(documents[position])
                found.append((-context, number, position))
    return None if not found else min(found)[1:]


@pytest.mark.parametrize(("epochs", "seed"), [(1, 0), (3, 1)])
def test_each_token_is_found_where_brute_force_finds_it(
    tmp_path: Path, epochs: int, seed: int
) -> None:
    parts = [packed_epochs(epochs, seed), packed_epochs(1, seed + 10)]
    folders = [str(write(tmp_path / str(number), part)) for number, part in enumerate(parts)]
    stores = StoreSet.open(folders)
    index, samples = DocumentIndex(stores), [*parts[0], *parts[1]]
    stores.close()
    known = 0
    for number, length in enumerate(LENGTHS):
        places = index.places(digest_of(number), length)
        assert places[0].tolist() == [-1, -1]
        for token in range(1, length):
            assert tuple(places[token].tolist()) == by_brute_force(samples, 100 * number + token)
            known += 1
    assert known == sum(LENGTHS) - len(LENGTHS)
    assert index.places(digest_of(99), 5) is None
    with pytest.raises(StoreError, match="has 40 tokens of a document of which .* gives 39 .*bos"):
        index.places(digest_of(1), 39)


def test_a_text_that_occurs_often_has_few_pieces(tmp_path: Path) -> None:
    # Pages of a crawl: each look-up would go over all copies, and the index hold them.
    samples = packed_documents((number, LENGTHS[number]) for number in (3, 3, 5) * 150)
    with StoreSet.open([str(write(tmp_path / "store", samples))]).stores[0] as store:
        index = DocumentIndex(StoreSet([store]))
    for number in (3, 5):
        places = index.places(digest_of(number), LENGTHS[number])
        for token in range(1, LENGTHS[number]):
            assert tuple(places[token].tolist()) == by_brute_force(samples, 100 * number + token)
    assert index.pieces <= 2 * (LENGTHS[3] + LENGTHS[5])


def test_a_store_without_lists_is_refused_by_name(tmp_path: Path) -> None:
    write_store(tmp_path / "store", settings())
    with (
        StoreSet.open([str(tmp_path / "store")]).stores[0] as store,
        pytest.raises(
            StoreError, match="has no lists of documents, .* Start the same capture again"
        ),
    ):
        DocumentIndex(StoreSet([store]))


@pytest.mark.parametrize("damage", ["missing", "changed", "swapped"])
def test_a_damaged_list_is_moved_away_and_its_records_stay(tmp_path: Path, damage: str) -> None:
    samples = packed_epochs(1, 0)
    store = write(tmp_path / "store", samples)
    assert verify(store).problems == ()
    whole = contents(store)
    path = store / "shards" / documents_name(1)
    intact = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "changed":
        path.write_bytes(intact.replace(b'"documents": "', b'"documents": "AA'))
    else:
        shutil.copyfile(path.with_name(documents_name(0)), path)
    plan = begin(store, settings(), samples=len(samples)).plan
    words = {"missing": "cannot be read", "changed": "does not match its seal"}
    with pytest.raises(
        StoreError,
        match=f"{words.get(damage, 'belongs to shard 0')}.* start the capture of {store} again, "
        "which rewrites the list from the texts without the teacher",
    ):
        load_documents(store, plan, 1)
    report = verify(store)
    assert (report.bad_shards, report.bad_lists) == ((), (1,))
    assert report.samples == len(samples)
    (problem,) = report.problems
    assert problem.file == f"shards/{documents_name(1)}"
    assert words.get(damage, "belongs to shard 0") in problem.text
    assert "start the capture" not in problem.text
    moved = repair(store, report)
    assert [one.name for one in moved] == ([] if damage == "missing" else [documents_name(1)])
    # Records are found by number still, and a capture lists the documents again.
    assert begin(store, settings(), samples=len(samples)).holes() == []
    assert unlisted_shards(store, plan) == [1]
    with StoreReader.open(store) as reader:
        assert len(reader.read(range(len(samples)))) == len(samples)
        with pytest.raises(StoreError, match=f"{documents_name(1)}: cannot be read"):
            DocumentIndex(StoreSet([reader]))
    path.write_bytes(intact)
    assert verify(store).problems == ()
    assert {n: c for n, c in contents(store).items() if "quarantine" not in n} == whole


# How the list of a record differs -> the finding.
DIFFERENCES = {
    "one document less": "lists 2 documents; the record has 3 documents",
    "none": "lists 0 documents; the record has 3 documents",
    "other place": "lists 8 tokens from position 1 on for document 0; the record has 8 tokens "
    "from 0 on",
    "other count": "lists 7 tokens from position 0 on for document 0; the record has 8 tokens "
    "from 0 on",
    "other beginning": "lists token 5 of its text as the first one of document 1, which begins "
    "inside the record",
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_a_sealed_list_that_differs_from_the_records_is_found(
    tmp_path: Path, difference: str
) -> None:
    samples = packed_documents((copy, 9 if copy % 2 else 4) for copy in range(24))
    store = write(tmp_path / "store", samples)
    assert verify(store).problems == ()
    plan = begin(store, settings(), samples=len(samples)).plan
    pieces = load_documents(store, plan, 1).copy()
    chosen = 2
    assert pieces["count"][pieces["sample"] == chosen].tolist() == [8, 4, 5]
    first = int(np.flatnonzero(pieces["sample"] == chosen)[0])
    if difference == "one document less":
        pieces = np.delete(pieces, first + 2)
    elif difference == "none":
        pieces = pieces[pieces["sample"] != chosen]
    else:
        field = {"place": "place", "count": "count", "beginning": "first"}[difference.split()[1]]
        change = {"place": 1, "count": -1, "first": 5}[field]
        row = first + (field == "first")
        pieces[field][row] = int(pieces[field][row]) + change
    publish_documents(store, plan, 1, [pieces])
    report = verify(store)
    assert [(one.shard, one.sample_id, one.text) for one in report.problems] == [
        (1, plan.first(1) + chosen, DIFFERENCES[difference])
    ]
    assert (report.bad_shards, report.bad_lists, report.samples) == ((), (1,), len(samples))
    repair(store, report)
    assert unlisted_shards(store, plan) == [1]


def test_an_equal_list_stays_and_another_one_is_replaced(tmp_path: Path) -> None:
    samples = packed_epochs(1, 0)
    store = write(tmp_path / "store", samples)
    path = store / "shards" / documents_name(0)
    content, time = path.read_bytes(), path.stat().st_mtime_ns
    plan = begin(store, settings(), samples=len(samples)).plan
    pieces = load_documents(store, plan, 0)
    publish_documents(store, plan, 0, [pieces])
    assert path.stat().st_mtime_ns == time
    publish_documents(store, plan, 0, [pieces[:1]])
    assert len(load_documents(store, plan, 0)) == 1
    publish_documents(store, plan, 0, [pieces])
    assert path.read_bytes() == content

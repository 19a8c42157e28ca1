"""Lists of a store's documents: where each token is, the longest context first; damage, repair."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from megatron_distill.data.samples import Sample
from megatron_distill.data.text.documents import content_digest
from megatron_distill.data.text.stream import Packer
from megatron_distill.errors import StoreError
from megatron_distill.store import DocumentIndex, StoreSet, repair, verify
from megatron_distill.store.documents import (
    documents_name,
    load_documents,
    pieces_of_sample,
    publish_documents,
)
from tests.support.store_samples import begin, fill, settings, write_store

LENGTHS = (3, 40, 1, 9, 17, 2, 26)
WIDTH = settings().sequence_length


def digest_of(number: int) -> bytes:
    return content_digest(f"document {number}".encode())


def packed_epochs(epochs: int, seed: int) -> list[Sample]:
    """Samples of all documents in a new order in each epoch; token j of document d is 100 d + j."""
    packer: Packer[int] = Packer(WIDTH, padding_token=9_999, digest_of=digest_of)
    samples: list[Sample] = []
    rng = np.random.default_rng(seed)
    for _ in range(epochs):
        for number in rng.permutation(len(LENGTHS)).tolist():
            packer.add(100 * number + np.arange(LENGTHS[number], dtype=np.int32), number)
            while packer.is_ready:
                samples.append(packer.take(len(samples)))
    last = packer.flush(len(samples))
    return samples if last is None else [*samples, last]


def write(folder: Path, samples: Sequence[Sample], *, per_shard: int = 4) -> Path:
    writer = begin(folder, settings(), samples=len(samples), per_shard=per_shard)
    fill(writer)
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
        assert places is not None
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
    packer: Packer[int] = Packer(WIDTH, padding_token=9_999, digest_of=digest_of)
    samples: list[Sample] = []
    for copy in range(300):
        for number in (3, 5) if copy % 2 else (3,):
            packer.add(100 * number + np.arange(LENGTHS[number], dtype=np.int32), number)
        while packer.is_ready:
            samples.append(packer.take(len(samples)))
    with StoreSet.open([str(write(tmp_path / "store", samples))]).stores[0] as store:
        index = DocumentIndex(StoreSet([store]))
    for number in (3, 5):
        places = index.places(digest_of(number), LENGTHS[number])
        assert places is not None
        for token in range(1, LENGTHS[number]):
            assert tuple(places[token].tolist()) == by_brute_force(samples, 100 * number + token)
    assert index.pieces <= 2 * (LENGTHS[3] + LENGTHS[5])


def test_a_store_without_lists_is_refused_by_name(tmp_path: Path) -> None:
    write_store(tmp_path / "store", settings())
    with (
        StoreSet.open([str(tmp_path / "store")]).stores[0] as store,
        pytest.raises(StoreError, match="does not list the documents .* capture it again"),
    ):
        DocumentIndex(StoreSet([store]))


@pytest.mark.parametrize("damage", ["missing", "changed", "swapped"])
def test_a_damaged_list_is_an_error_and_repair_makes_a_hole_of_its_shard(
    tmp_path: Path, damage: str
) -> None:
    samples = packed_epochs(1, 0)
    store = write(tmp_path / "store", samples)
    assert verify(store).problems == ()
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
    with pytest.raises(StoreError, match=words.get(damage, "belongs to shard 0")):
        load_documents(store, plan, 1)
    report = verify(store)
    assert report.bad_shards == (1,)
    assert words.get(damage, "belongs to shard 0") in report.problems[0].text
    repair(store, report)
    assert begin(store, settings(), samples=len(samples)).holes() == [1]
    assert not path.exists()


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

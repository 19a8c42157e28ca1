"""A store as the corpus: every sample once an epoch, shares, held-out samples, exact resume."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megatron_distill.data.samples import Sample
from megatron_distill.data.stored import (
    Share,
    StoredSamples,
    held_out_numbers,
    read_held_out_numbers,
)
from megatron_distill.errors import DataError, StoreError
from megatron_distill.store import StoreSet
from tests.support.store_samples import settings, tokens_of, write_store

SAMPLES = 10


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("stores")
    for name in ("a", "b"):
        write_store(root / name, settings(), samples=SAMPLES, dataset=name)
    return [root / "a", root / "b"]


def opened(folders: list[Path]) -> StoreSet:
    return StoreSet.open([str(folder) for folder in folders])


def stream(stores: StoreSet, *, seed: int = 1, held_out: list[int] = []) -> StoredSamples:  # noqa: B006
    return StoredSamples(stores, [Share(range(stores.samples), 1.0)], seed=seed, held_out=held_out)


def numbers(source: StoredSamples, count: int) -> list[int]:
    return [source.next_sample().sample_id for _ in range(count)]


def assert_is(sample: Sample, number: int) -> None:
    expected = tokens_of(number % SAMPLES, settings())
    assert sample.sample_id == number
    np.testing.assert_array_equal(sample.tokens_S1, expected["tokens_S1"])
    np.testing.assert_array_equal(sample.document_ids_S1, expected["document_ids_S1"])
    np.testing.assert_array_equal(sample.flags_S1, expected["flags_S1"])


def test_every_epoch_has_every_sample_once_as_the_corpus_gave_it(folders: list[Path]) -> None:
    source = stream(opened(folders))
    epochs = []
    for _ in range(3):
        epoch = [source.next_sample() for _ in range(2 * SAMPLES)]
        for sample in epoch:
            assert_is(sample, sample.sample_id)
        epochs.append([sample.sample_id for sample in epoch])
        assert sorted(epochs[-1]) == list(range(2 * SAMPLES))
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_another_seed_is_another_order(folders: list[Path]) -> None:
    stores = opened(folders)
    assert numbers(stream(stores), 20) != numbers(stream(stores, seed=2), 20)
    assert numbers(stream(stores), 20) == numbers(stream(opened(folders)), 20)


def test_shares_take_turns_by_weight_each_in_epochs_of_its_own(folders: list[Path]) -> None:
    stores = opened(folders)
    shares = [Share(range(SAMPLES), 3.0), Share(range(SAMPLES, 2 * SAMPLES), 1.0)]
    source = StoredSamples(stores, shares, seed=1)
    samples = [source.next_sample() for _ in range(4 * SAMPLES)]
    assert all(sample.source == sample.sample_id // SAMPLES for sample in samples)
    drawn = [sample.sample_id for sample in samples]
    first = [number for number in drawn if number < SAMPLES]
    assert Counter(first) == dict.fromkeys(range(SAMPLES), 3)
    assert sorted(set(drawn) - set(first)) == list(range(SAMPLES, 2 * SAMPLES))
    for end in range(1, len(drawn) + 1):
        assert abs(sum(number < SAMPLES for number in drawn[:end]) - 0.75 * end) < 1


def test_held_out_samples_are_never_trained_on_and_the_same_for_every_seed(
    folders: list[Path],
) -> None:
    stores = opened(folders)
    held_out = held_out_numbers(stores.samples, 5)
    assert len(set(held_out)) == 5
    trained = numbers(stream(stores, held_out=held_out), 30)
    assert Counter(trained) == dict.fromkeys(set(range(20)) - set(held_out), 2)
    shares = [Share(range(SAMPLES), 3.0), Share(range(SAMPLES, 2 * SAMPLES), 1.0)]
    kept = read_held_out_numbers(stores, shares, held_out)
    for number, sample in zip(held_out, kept.samples, strict=True):
        assert_is(sample, number)
        assert sample.source == number // SAMPLES


def test_it_goes_on_at_any_place(folders: list[Path]) -> None:
    whole = numbers(stream(opened(folders), held_out=[3, 4]), 50)
    source = stream(opened(folders), held_out=[3, 4])
    for place in range(45):
        state = json.loads(json.dumps(source.state_dict()))
        again = stream(opened(folders), held_out=[3, 4])
        again.load_state_dict(state)
        assert numbers(again, 5) == whole[place : place + 5]
        source.next_sample()


def test_a_state_of_other_stores_or_of_a_corpus_is_refused(
    folders: list[Path], tmp_path: Path
) -> None:
    state = stream(opened(folders)).state_dict()
    with pytest.raises(DataError, match="differ from the stores in the checkpoint"):
        stream(opened(folders[:1])).load_state_dict(state)
    with pytest.raises(DataError, match="restore those"):
        stream(opened(folders)).load_state_dict({"taken": [3], "sources": [{}]})


def test_nothing_left_to_train_on_is_reported(folders: list[Path]) -> None:
    with pytest.raises(DataError, match="contain only 20 samples"):
        held_out_numbers(20, 20)
    shares = [Share(range(1), 1.0), Share(range(1, 20), 1.0)]
    with pytest.raises(DataError, match="it would hold out 1 sample, all that a store has"):
        StoredSamples(opened(folders), shares, seed=0, held_out=[0])


def test_a_damaged_record_is_named_when_its_turn_comes(folders: list[Path], tmp_path: Path) -> None:
    write_store(tmp_path / "c", settings(), samples=SAMPLES)
    path = tmp_path / "c" / "shards" / "logits-000000.array_record"
    content = bytearray(path.read_bytes())
    content[300] ^= 1
    path.write_bytes(content)
    source = stream(opened([tmp_path / "c"]))
    with pytest.raises(StoreError, match=r"logits-000000.array_record.*sample"):
        numbers(source, SAMPLES)

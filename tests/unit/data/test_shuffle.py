"""Shuffled windows: every sample once, an order from the seed alone, resumable anywhere."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_distill.data.blending import ShuffledSamples
from megatron_distill.data.formats import SourceSpec
from megatron_distill.data.samples import Sample, SampleList
from megatron_distill.data.sources import DataOptions, held_out_samples, open_training
from megatron_distill.errors import DataError
from tests.support.data_fixtures import ByteTokenizer, write_files


def numbered(count: int) -> SampleList:
    """Samples that hold nothing but their number."""
    return SampleList(
        [
            Sample(np.full(3, n, np.int32), np.zeros(3, np.int32), np.full(3, 3, np.uint8), n)
            for n in range(count)
        ]
    )


def shuffled(*, window: int, seed: int = 1, count: int = 400) -> ShuffledSamples:
    return ShuffledSamples(numbered(count), window=window, seed=seed, name="numbers")


def numbers(source: ShuffledSamples, count: int) -> list[int]:
    return [source.next_sample().sample_id for _ in range(count)]


@pytest.mark.parametrize("window", [1, 2, 7, 50])
def test_every_window_holds_its_samples_once(window: int) -> None:
    found = numbers(shuffled(window=window), 3 * window)
    windows = [found[start : start + window] for start in range(0, 3 * window, window)]
    for number, part in enumerate(windows):
        assert sorted(part) == list(range(number * window, (number + 1) * window))
    if window == 50:
        orders = {tuple(n % window for n in part) for part in windows}
        assert len(orders) == 3, "every window has an order of its own"
        assert tuple(range(window)) not in orders


def test_the_order_depends_on_the_seed_and_on_nothing_else() -> None:
    first, again, other = (numbers(shuffled(window=30, seed=seed), 90) for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize("window", [1, 6])
def test_resuming_at_every_position_equals_the_uninterrupted_order(window: int) -> None:
    source = shuffled(window=window)
    states = []
    found = []
    for _ in range(40):
        states.append(json.dumps(source.state_dict()))
        found.append(source.next_sample().sample_id)
    for position, state in enumerate(states):
        resumed = shuffled(window=window)
        resumed.next_sample()
        resumed.load_state_dict(json.loads(state))
        assert json.dumps(resumed.state_dict()) == state
        assert numbers(resumed, 40 - position) == found[position:]


def test_it_reads_one_window_at_first_and_then_one_sample_for_each_given() -> None:
    inner = numbered(400)
    source = ShuffledSamples(inner, window=20, seed=1, name="numbers")
    assert inner.state_dict() == {"next": 0}
    for given in range(1, 70):
        source.next_sample()
        assert inner.state_dict() == {"next": 20 + given}


def test_another_window_is_refused_on_resuming() -> None:
    state = shuffled(window=6).state_dict()
    with pytest.raises(
        DataError, match=r"numbers: shuffle_samples differs from the checkpoint \(7, was 6\)"
    ):
        shuffled(window=7).load_state_dict(state)


def test_a_batch_holds_many_documents_where_one_fills_many_batches(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "long", [f"{n:03d} " * 800 for n in range(30)])
    specs = [SourceSpec("text", (f"{folder}/*.txt",))]

    def batch(shuffle_samples: int) -> set[bytes]:
        options = DataOptions(
            sequence_length=64, shuffle_buffer=30, shuffle_samples=shuffle_samples
        )
        source = open_training(specs, tokenizer=ByteTokenizer(), options=options, seed=3)
        return words([source.next_sample() for _ in range(16)])

    assert len(batch(1)) <= 2
    assert len(batch(1024)) >= 12


def test_held_out_samples_come_from_many_documents(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "long", [f"{n:03d} " * 800 for n in range(30)])
    specs = [SourceSpec("text", (f"{folder}/*.txt",))]
    options = DataOptions(sequence_length=64, validation_fraction=1.0)
    held_out = held_out_samples(specs, tokenizer=ByteTokenizer(), options=options, samples=20)
    assert len(held_out.samples) == 20
    assert [sample.sample_id for sample in held_out.samples] == list(range(20))
    assert len(words(list(held_out.samples))) >= 3
    everything = held_out_samples(specs, tokenizer=ByteTokenizer(), options=options, samples=1500)
    assert len(words(list(everything.samples))) == 30


def words(samples: list[Sample]) -> set[bytes]:
    """The different numbers that the samples are made of."""
    texts = [bytes((sample.tokens_S1 - 1).clip(0).astype(np.uint8)) for sample in samples]
    return {
        word for text in texts for word in text.split(b" ") if len(word) == 3 and b"\0" not in word
    }

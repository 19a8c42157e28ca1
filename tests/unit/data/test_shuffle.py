"""The order of numbers that a seed fixes, and the shuffling of samples in windows."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_distill.data.blending import ShuffledSamples
from megatron_distill.data.formats import SourceSpec
from megatron_distill.data.samples import Sample, SampleList, shuffled
from megatron_distill.data.sources import DataOptions, held_out_samples, open_training
from megatron_distill.errors import DataError
from tests.support.data_fixtures import ByteTokenizer, write_files


@settings(deadline=None, max_examples=25)
@given(count=st.integers(1, 700), key=st.tuples(st.integers(0, 99), st.integers(0, 99)))
def test_every_number_stands_at_one_place(count: int, key: tuple[int, int]) -> None:
    assert sorted(shuffled(place, count, *key) for place in range(count)) == list(range(count))


def test_the_order_is_fixed_for_all_time() -> None:
    assert [shuffled(place, 10, 1, 2) for place in range(10)] == [7, 2, 6, 3, 8, 9, 1, 0, 4, 5]


def test_another_key_is_another_order() -> None:
    orders = {
        tuple(shuffled(place, 50, seed, epoch) for place in range(50)) for seed, epoch in KEYS
    }
    assert len(orders) == len(KEYS)


KEYS = [(seed, epoch) for seed in range(5) for epoch in range(5)]


def test_a_number_comes_at_every_place_about_as_often() -> None:
    count, orders = 12, 3000
    for number_of in (0, 7):
        seen = [0] * count
        for key in range(orders):
            seen[shuffled(number_of, count, key)] += 1
        # Five standard deviations of a fair draw.
        spread = 5 * (orders / count * (1 - 1 / count)) ** 0.5
        assert max(abs(times - orders / count) for times in seen) < spread


def test_a_place_of_a_huge_range_is_found_at_once() -> None:
    count = 10**12 + 39
    found = [shuffled(place, count, 3) for place in range(2000)]
    assert len(set(found)) == 2000
    assert max(found) < count
    assert sum(number > count // 2 for number in found) == pytest.approx(1000, abs=112)


def numbered(count: int) -> SampleList:
    """Samples that hold nothing but their number."""
    return SampleList(
        [
            Sample(np.full(3, n, np.int32), np.zeros(3, np.int32), np.full(3, 3, np.uint8), n)
            for n in range(count)
        ]
    )


def in_windows(*, window: int, seed: int = 1, count: int = 400) -> ShuffledSamples:
    return ShuffledSamples(numbered(count), window=window, seed=seed, name="numbers")


def numbers(source: ShuffledSamples, count: int) -> list[int]:
    return [source.next_sample().sample_id for _ in range(count)]


@pytest.mark.parametrize("window", [1, 2, 7, 50])
def test_every_window_holds_its_samples_once(window: int) -> None:
    found = numbers(in_windows(window=window), 3 * window)
    windows = [found[start : start + window] for start in range(0, 3 * window, window)]
    for number, part in enumerate(windows):
        assert sorted(part) == list(range(number * window, (number + 1) * window))
    if window == 50:
        orders = {tuple(n % window for n in part) for part in windows}
        assert len(orders) == 3, "every window has an order of its own"
        assert tuple(range(window)) not in orders


def test_the_order_depends_on_the_seed_and_on_nothing_else() -> None:
    first, again, other = (numbers(in_windows(window=30, seed=seed), 90) for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize("window", [1, 6])
def test_resuming_at_every_position_equals_the_uninterrupted_order(window: int) -> None:
    source = in_windows(window=window)
    states = []
    found = []
    for _ in range(40):
        states.append(json.dumps(source.state_dict()))
        found.append(source.next_sample().sample_id)
    for position, state in enumerate(states):
        resumed = in_windows(window=window)
        resumed.next_sample()
        resumed.load_state_dict(json.loads(state))
        assert json.dumps(resumed.state_dict()) == state
        assert numbers(resumed, 40 - position) == found[position:]


def test_it_reads_one_window_at_first_and_then_one_sample_for_each_given() -> None:
    inner = numbered(400)
    source = ShuffledSamples(inner, window=20, seed=1, name="numbers")
    assert inner.state_dict() == {"next": 0}
    for taken in range(1, 70):
        source.next_sample()
        assert inner.state_dict() == {"next": 20 + taken}


def test_another_window_is_refused_on_resuming() -> None:
    state = in_windows(window=6).state_dict()
    with pytest.raises(
        DataError, match=r"numbers: shuffle_samples differs from the checkpoint \(7, was 6\)"
    ):
        in_windows(window=7).load_state_dict(state)


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

"""Which sample stands where, and that the source brings them so, reading as little as it can."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron_distill.data.collation import BatchLayout
from megatron_distill.data.samples import FULLY_TRAINED, Sample
from megatron_distill.train.capture.order import CaptureOrder, HoleSource

ORDERS = [
    CaptureOrder((0, 1, 2, 3, 4), 23, 5, 1, 2, 2),
    CaptureOrder((0, 1, 2, 3, 4), 23, 5, 2, 2, 2),
    CaptureOrder((0, 1, 2, 3, 4), 23, 5, 3, 1, 4),
    CaptureOrder((1, 4), 23, 5, 4, 2, 1),
    CaptureOrder((2, 3), 23, 5, 2, 3, 3),
    CaptureOrder((4,), 23, 5, 2, 2, 1),
    CaptureOrder((0, 1), 2, 1, 2, 1, 1),
]


class Numbered:
    """Samples that carry their number; counts what is read."""

    def __init__(self) -> None:
        self.position = 0
        self.read: list[int] = []

    def next_sample(self) -> Sample:
        self.read.append(self.position)
        tokens = np.full(5, self.position, np.int32)
        flags = np.full(5, FULLY_TRAINED, np.uint8)
        sample = Sample(tokens, np.zeros(5, np.int32), flags, self.position)
        self.position += 1
        return sample

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def source_of(order: CaptureOrder, stream: Numbered, **known: Any) -> HoleSource:
    places = {int(name[1:]): state for name, state in known.items()}
    return HoleSource(stream, order, known=places)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_each_replica_gets_whole_shards_one_after_another(order: CaptureOrder) -> None:
    source = source_of(order, Numbered())
    by_replica: list[list[int]] = [[] for _ in range(order.replicas)]
    for _ in range(order.steps):
        batch = [source.next_sample() for _ in range(order.global_batch_size)]
        for replica in range(order.replicas):
            layout = BatchLayout(
                order.global_batch_size, order.micro_batch_size, replica, order.replicas
            )
            for index in range(layout.micro_batches):
                rows = batch[layout.rows(index)]
                by_replica[replica] += [sample.sample_id for sample in rows]
                for sample in rows:
                    if sample.sample_id >= 0:
                        assert (sample.tokens_S1 == sample.sample_id).all()
                    assert (sample.flags_S1 != 0).all() == (sample.sample_id >= 0)
    for replica, found in enumerate(by_replica):
        expected = [
            sample
            for shard in order.holes[replica :: order.replicas]
            for sample in range(shard * 5, min(shard * 5 + 5, order.samples))
        ]
        if order.samples_per_shard == 1:
            expected = [replica]
        assert found[: len(expected)] == expected
        assert set(found[len(expected) :]) <= {-1}
    kept = [sample for found in by_replica for sample in found if sample >= 0]
    assert len(kept) == len(set(kept)) == order.wanted_samples


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_it_holds_no_more_than_a_shard_for_each_other_replica(order: CaptureOrder) -> None:
    source = source_of(order, Numbered())
    for _ in range(order.steps * order.global_batch_size):
        source.next_sample()
        assert len(source._held) <= max(0, order.replicas - 1) * order.samples_per_shard
    assert not source._held


def test_it_goes_on_at_the_nearest_known_place() -> None:
    stream, order = Numbered(), CaptureOrder((3, 6), 40, 5, 1, 5, 1)
    source = source_of(order, stream, _2={"position": 10}, _5={"position": 25}, _7={})
    found = [source.next_sample().sample_id for _ in range(10)]
    assert found == [*range(15, 20), *range(30, 35)]
    assert stream.read == [*range(10, 20), *range(25, 35)]
    # Samples passed at the beginning of a shard, and not known, are reported once.
    assert list(source.passed) == [(3, {"position": 15}), (6, {"position": 30})]


def test_a_place_behind_is_not_gone_back_to() -> None:
    stream, order = Numbered(), CaptureOrder((0, 2), 15, 5, 1, 5, 1)
    source = source_of(order, stream, _1={"position": 5})
    assert [source.next_sample().sample_id for _ in range(10)] == [*range(5), *range(10, 15)]
    assert stream.read == list(range(15))


def test_without_holes_there_are_no_steps() -> None:
    assert CaptureOrder((), 23, 5, 2, 2, 2).steps == 0

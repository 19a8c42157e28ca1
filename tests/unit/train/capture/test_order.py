"""The order in which replicas capture samples, the places to go on from, and the progress."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_distill import log
from megatron_distill.data.collation import BatchLayout
from megatron_distill.data.samples import FULLY_TRAINED, Sample
from megatron_distill.errors import StoreError
from megatron_distill.train.capture.order import CaptureOrder, HoleSource, StreamPositions
from megatron_distill.train.progress import CaptureProgress, Done, Work
from tests.support.terminals import Clock

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


UID = b"12345678"
STATES = {3: {"taken": [15], "sources": [{"given": 0.5}]}, 12: {"taken": [60], "sources": []}}


def test_states_come_back_by_shard(tmp_path: Path) -> None:
    StreamPositions(tmp_path, UID).save(STATES)
    (tmp_path / "stream-000004.json.partial-elsewhere").write_text("half")
    assert StreamPositions(tmp_path, UID).load() == STATES
    assert StreamPositions(tmp_path / "absent", UID).load() == {}


def test_a_state_of_another_store_is_refused(tmp_path: Path) -> None:
    StreamPositions(tmp_path, UID).save(STATES)
    with pytest.raises(StoreError, match="stream-000003.json: belongs to another store, 31323334"):
        StreamPositions(tmp_path, b"87654321").load()


def test_a_renamed_file_is_refused(tmp_path: Path) -> None:
    StreamPositions(tmp_path, UID).save(STATES)
    (tmp_path / "stream-000003.json").rename(tmp_path / "stream-000005.json")
    with pytest.raises(
        StoreError, match="stream-000005.json: not the content for this file name; remove it"
    ):
        StreamPositions(tmp_path, UID).load()


def test_a_changed_byte_is_found(tmp_path: Path) -> None:
    StreamPositions(tmp_path, UID).save(STATES)
    path = tmp_path / "stream-000012.json"
    path.write_text(path.read_text().replace("60", "61"))
    with pytest.raises(StoreError, match=r"stream-000012.json: damaged.*remove it, and the stream"):
        StreamPositions(tmp_path, UID).load()


def test_in_a_finished_store_no_position_is_saved(tmp_path: Path) -> None:
    StreamPositions(tmp_path / "gone", UID).save(STATES)
    assert list(tmp_path.iterdir()) == []


WORK = Work(shards=10, shards_before=4, samples=600, sequence_length=50)


@pytest.fixture
def lines() -> list[str]:
    found: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logger = log.configure(0, stream=io.StringIO())
    logger.addHandler(Kept())
    return found


def play(stream: io.StringIO, seconds: float) -> None:
    """Six steps of 100 samples, a shard each but for the first."""
    clock = Clock()
    progress = CaptureProgress(stream, WORK, samples_per_shard=100, clock=clock)
    for step in range(6):
        clock.now += seconds
        progress.update(Done(max(0, step - 1), 100 * step, 600_000 * max(0, step - 1)))
    clock.now += seconds
    progress.close(Done(6, 600, 3_600_000))


def test_a_log_gets_a_line_now_and_then_and_one_at_the_end(lines: list[str]) -> None:
    stream = io.StringIO()
    play(stream, seconds=20.0)
    assert stream.getvalue() == ""
    assert lines == [
        "samples 100/600  shards 4/10",
        "samples 300/600  shards 6/10  250 tok/s  120.0 bytes/token  eta 1:00",
        "samples 500/600  shards 8/10  250 tok/s  120.0 bytes/token  eta 0:20",
        "samples 600/600  shards 10/10  250 tok/s  120.0 bytes/token  in 2:20",
    ]

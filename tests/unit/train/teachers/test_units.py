"""Units of answers and the slots of devices."""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_distill.data.collation import BatchLayout
from megatron_distill.errors import ConfigError
from megatron_distill.runtime.batch import zigzag_index
from megatron_distill.train.teachers.device_slots import (
    open_memory,
    require_peer,
    share_memory,
    share_with,
)
from megatron_distill.train.teachers.units import Grid, Holding, Units, messages, moved_rows

SIZES = st.sampled_from([1, 2, 3, 4])
LENGTH = 2 * 4 * 3 * 4 * 3


@st.composite
def grids(draw: st.DrawFn, *, first_rank: int = 0) -> Grid:
    tensor, context, pipeline, replicas = (draw(SIZES) for _ in range(4))
    ranks = range(first_rank, first_rank + tensor * context * pipeline * replicas)
    return Grid(tensor, context, pipeline, replicas, draw(st.booleans()), tuple(ranks))


def positions(holding: Holding) -> list[int]:
    return [place for start, stop in holding.intervals for place in range(start, stop)]


@settings(max_examples=25)
@given(producer=grids(), consumer=st.one_of(grids(), grids(first_rank=300)), data=st.data())
def test_each_needed_row_arrives_once_from_a_rank_that_holds_it(
    producer: Grid, consumer: Grid, data: st.DataObject
) -> None:
    holders = producer.holdings(LENGTH, replica=data.draw(st.integers(0, producer.replicas - 1)))
    needs = consumer.holdings(LENGTH, replica=data.draw(st.integers(0, consumer.replicas - 1)))
    held = {one.rank: positions(one) for one in holders}
    received: dict[int, list[int | None]] = {one.rank: [None] * one.rows for one in needs}
    sent = Counter[tuple[int, int]]()
    for message in messages(holders, needs):
        for source, place in zip(
            held[message.source][message.sent],
            range(message.received.start, message.received.stop),
            strict=True,
        ):
            assert received[message.destination][place] is None
            received[message.destination][place] = source
        if not message.is_local:
            sent[message.source, message.destination] += message.rows
    for need in needs:
        assert received[need.rank] == positions(need)
        # The rows that a rank has itself do not move.
        own = set(held.get(need.rank, ())) & set(positions(need))
        arrived = sum(rows for (_, to), rows in sent.items() if to == need.rank)
        assert arrived == need.rows - len(own)
    if not producer.sequence and not set(held) & {need.rank for need in needs}:
        # Equal holders send equal numbers of rows, up to one for each interval.
        for need in needs:
            for first in range(0, len(holders), producer.tensor):
                group = holders[first : first + producer.tensor]
                counts = [sent[one.rank, need.rank] for one in group]
                assert max(counts) - min(counts) <= 2 * 2 * producer.context


def test_rows_that_move_are_counted() -> None:
    teacher = Grid(2, 1, 1, 1, False, (0, 1))
    student = Grid(1, 1, 1, 2, False, (0, 1))
    for replica in (0, 1):
        found = messages(teacher.holdings(8, replica=0), student.holdings(8, replica=replica))
        assert moved_rows(found) == 0  # every tensor rank has all rows
    split = Grid(2, 1, 1, 1, True, (0, 1))
    found = messages(split.holdings(8, replica=0), student.holdings(8, replica=1))
    assert moved_rows(found) == 4
    assert [message.source for message in found] == [0, 1]


@given(context=SIZES, tensor=SIZES)
def test_a_rank_holds_the_zigzag_pieces_in_their_local_order(context: int, tensor: int) -> None:
    grid = Grid(tensor, context, 1, 1, True, tuple(range(tensor * context)))
    for rank, holding in enumerate(grid.holdings(LENGTH, replica=0)):
        whole = zigzag_index(LENGTH, rank=rank // tensor, size=context)
        own = torch.tensor(positions(holding))
        assert torch.equal(own, whole.chunk(tensor)[rank % tensor])


@given(micro_batches=st.integers(1, 9), student=SIZES, teacher=st.integers(1, 7), data=st.data())
def test_each_unit_runs_once_and_rounds_are_even(
    micro_batches: int, student: int, teacher: int, data: st.DataObject
) -> None:
    units = Units(micro_batches, student, teacher)
    layouts = [BatchLayout(6 * micro_batches * student, 6, r, student) for r in range(student)]
    for micro_batch in range(micro_batches):
        for replica, layout in enumerate(layouts):
            unit = units.of_student(micro_batch, replica)
            assert layout.rows(micro_batch) == slice(6 * unit, 6 * unit + 6)
    start = data.draw(st.integers(0, micro_batches - 1))
    wave = range(start, min(start + units.wave, micro_batches))
    per_replica = [units.of_teacher(wave, replica) for replica in range(teacher)]
    assert sorted(unit for own in per_replica for unit in own) == list(units.of_wave(wave))
    counts = [len(own) for own in per_replica]
    assert max(counts) - min(counts) <= 1
    assert len(wave) < units.wave or min(counts) >= 1
    evened = [units.evened(wave, replica) for replica in range(teacher)]
    assert {len(own) for own in evened} == {max(counts)}
    for own, padded in zip(per_replica, evened, strict=True):
        assert padded[: len(own)] == own


KEY = "teacher.transfer.backend"
HANDLES = (3, b"\x01\x02", 64, 0, b"/torch_1", 7, b"\xff\x00", True)


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Memory whose allocator is told to be CUDA's."""
    found = torch.zeros(64, dtype=torch.uint8)
    segment = {"address": found.data_ptr(), "total_size": 64, "is_expandable": False}
    properties = SimpleNamespace(uuid="GPU-a")
    for name, value in (
        ("get_allocator_backend", lambda: "native"),
        ("memory_snapshot", lambda: [segment]),
        ("get_device_properties", lambda _: properties),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    return found


@pytest.mark.parametrize("cause", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_memory_that_cannot_be_shared_is_refused_by_name(
    whole: torch.Tensor, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", cause)
    if cause.startswith("backend"):
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    else:
        (segment,) = torch.cuda.memory_snapshot()
        segment["is_expandable"] = True
    with pytest.raises(ConfigError, match=f"{KEY} = 'ipc'.*{cause}.*set {KEY} to nccl or gloo"):
        share_memory(whole, KEY)


def test_a_driver_that_does_not_share_is_named(whole: torch.Tensor) -> None:
    # Memory of a CPU has no handle.
    with pytest.raises(ConfigError, match="does not share memory between processes of "):
        share_memory(whole, KEY)


def test_handles_travel_as_json_and_open_on_the_own_device(
    whole: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[Any, ...]] = []

    def open_shared(*handles: Any) -> torch.UntypedStorage:
        opened.append(handles)
        return whole.untyped_storage()

    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", lambda _: HANDLES)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", staticmethod(open_shared))
    published = json.loads(json.dumps(share_memory(whole, KEY)))
    found = open_memory(published, torch.device("cpu", 0), KEY)
    assert published[0] == "GPU-a"
    assert opened == [(0, *HANDLES[1:])]
    assert found.data_ptr() == whole.data_ptr()
    assert found.shape == (64,)


def test_each_sender_has_a_count_of_its_own(
    whole: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter(range(7, 10))  # torch makes one whenever memory is shared
    monkeypatch.setattr(
        torch.UntypedStorage, "_share_cuda_", lambda _: (*HANDLES[:5], next(counts), *HANDLES[6:])
    )
    published = json.loads(json.dumps(share_with(whole, (2, 5), KEY)))
    assert published.keys() == {"2", "5"}
    assert [shared[6] for shared in published.values()] == [7, 8]


@pytest.mark.parametrize(
    ("gpus", "reaches", "expected"),
    [
        (["GPU-b"], True, "teacher.0 does not see the GPU of student.1, GPU-a.*'5'; let each rank"),
        (["GPU-b", "GPU-a"], False, "of teacher.0 cannot access the memory of that of student.1"),
        (["GPU-b", "GPU-a"], True, None),
        (["GPU-a"], False, None),  # its own
    ],
)
def test_a_gpu_that_cannot_write_the_slots_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, gpus: list[str], reaches: bool, expected: str | None
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    properties = [SimpleNamespace(uuid=gpu) for gpu in gpus]
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, peer: reaches)
    names = {"receiver": "student.1", "sender": "teacher.0"}

    def require() -> None:
        require_peer(["GPU-a", *HANDLES], torch.device("cuda", 0), key=KEY, **names)

    if expected is None:
        require()
        return
    with pytest.raises(ConfigError, match=f"{KEY} = 'ipc': .*{expected}"):
        require()

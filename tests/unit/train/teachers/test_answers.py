"""Answers of a teacher on ranks of its own: bytes, hashes and headers."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from megatron_distill.runtime.batch import zigzag_index
from megatron_distill.runtime.bridge import Bridge
from megatron_distill.runtime.lone_failure import LoneFailure
from megatron_distill.runtime.roles import Roles
from megatron_distill.runtime.shared_memory import shared_path
from megatron_distill.train.teachers.answer_ways import HostWay, private_slots
from megatron_distill.train.teachers.answers import (
    AnswerError,
    AnswerHeader,
    AnswerPlan,
    Column,
    Output,
    RequestKind,
    RoundRequest,
    token_hash,
)
from megatron_distill.train.teachers.attention_heads import attention_parts
from megatron_distill.train.teachers.mapped_slots import (
    Credits,
    SharedMemoryWay,
    create_shared,
    map_shared,
    mapped_bytes,
    slots_of,
)
from megatron_distill.train.teachers.served_steps import SENDING, SLOT
from megatron_distill.train.teachers.serving import AnswerSender
from megatron_distill.train.teachers.units import Grid, Units
from tests.support.batches import batch_of


def plan_of(*, steps_ahead: int = 1, sequence: bool = False) -> AnswerPlan:
    """Four student ranks, TP2 in two replicas, and a teacher of TP2 in three replicas."""
    return AnswerPlan(
        Units(micro_batches=6, student_replicas=2, teacher_replicas=3),
        teacher=Grid(2, 1, 1, 3, sequence, tuple(range(4, 10))),
        student=Grid(2, 1, 1, 2, sequence, tuple(range(4))),
        length=16,
        sequences=3,
        outputs=(Output(None, 0, 0, (Column("hidden", torch.bfloat16, (40,)),)),),
        steps_ahead=steps_ahead,
    )


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("steps_ahead", [0, 1, 2])
def test_slots_and_bytes_are_those_of_the_formulas(steps_ahead: int, sequence: bool) -> None:
    plan = plan_of(steps_ahead=steps_ahead, sequence=sequence)
    unit = 16 * 3 * 40 * 2 // (2 if sequence else 1)
    assert plan.slot_bytes(rank=1) == (steps_ahead + 1) * 6 * unit
    routes = plan.step_bytes()
    for rank in range(4):
        assert sum(size for (_, to), size in routes.items() if to == rank) == 6 * unit
    # The units of each student replica go to all three teachers' replicas in turn.
    assert {source for source, _ in routes} == set(range(4, 10))


def staged_plan() -> AnswerPlan:
    """A student of TP2 x PP2, a teacher of PP2 x DP3; layer 1 for both stages, 4 for the first."""
    hidden = Column("hidden", torch.bfloat16, (40,))
    ids = Column("ids", torch.int32, (3,)), Column("values", torch.float32, (9,))
    return AnswerPlan(
        Units(micro_batches=6, student_replicas=1, teacher_replicas=3),
        teacher=Grid(1, 1, 2, 3, sequence=False, ranks=tuple(range(4, 10))),
        student=Grid(2, 1, 2, 1, sequence=True, ranks=tuple(range(4))),
        length=16,
        sequences=3,
        outputs=(
            Output(None, 1, 1, ids, splits=False),
            Output(1, 0, 0, (hidden,)),
            Output(1, 0, 1, (hidden,)),
            Output(4, 1, 0, (hidden,)),
        ),
        steps_ahead=1,
    )


def test_layer_outputs_go_from_their_stage_to_the_stages_that_need_them() -> None:
    plan = staged_plan()
    # Each tensor rank has half of a hidden state's rows, and all rows of the ids.
    rows = {0: {2: 8, 4: 8}, 1: {2: 8, 4: 8}, 2: {0: 16, 1: 16, 3: 8}, 3: {0: 16, 1: 16, 3: 8}}
    assert {rank: plan.slot_rows(rank) for rank in range(4)} == rows
    places = dict.fromkeys(range(len(plan.columns)), torch.device("cpu"))
    routes = plan.step_bytes()
    for rank in range(4):
        slots = private_slots(plan, rank, places)
        received = {number: [0] * count for number, count in rows[rank].items()}
        for unit in range(6):
            for source, parts in plan.received(unit, rank).items():
                assert plan.sends(source)
                assert plan.teacher.replica(source) == unit % 3
                assert parts == plan.sent(unit, source)[rank]
                for part in parts:
                    assert plan.columns[part.column][0].source == plan.teacher.stage(source)
                    for row in range(part.message.rows):
                        received[part.column][part.message.destination_start + row] += 1
        assert all(counts == [6] * len(counts) for counts in received.values())
        held = sum(one.nbytes for block in slots for slot in block for one in slot.values())
        assert held == plan.slot_bytes(rank)
        assert plan.slot_bytes(rank) == 2 * sum(n for (_, to), n in routes.items() if to == rank)
        numbers = list(rows[rank])
        size = mapped_bytes(plan, rank, numbers)
        assert 0 <= size - plan.slot_bytes(rank) < 256 * len(numbers)
        tensors, memory = create_shared(plan, rank, numbers)
        shared = slots_of(plan, tensors)
        assert [list(slot) for block in shared for slot in block] == [numbers] * 12
        for number, tensor in enumerate(t for block in shared for s in block for t in s.values()):
            tensor.fill_(number)
        with memory:
            again = slots_of(plan, map_shared(shared_path(memory), plan, rank, numbers))
        for number, tensor in enumerate(t for block in again for s in block for t in s.values()):
            assert bool((tensor == number).all())
            assert tensor.untyped_storage().data_ptr() % 256 == 0
        assert {route for route in routes if route[1] == rank} == {
            (source, rank) for source in plan.sources(rank)
        }
        for source in plan.sources(rank):
            held = plan.micro_batches(source, rank)
            assert held == tuple(u for u in range(6) if u % 3 == plan.teacher.replica(source))


def test_records_for_chunks_reach_each_context_rank_whole() -> None:
    ids = (Column("ids", torch.int32, (3,)),)
    plan = replace(
        staged_plan(),
        units=Units(micro_batches=1, student_replicas=1, teacher_replicas=1),
        teacher=Grid(2, 2, 1, 1, sequence=True, ranks=tuple(range(4, 8))),
        student=Grid(2, 2, 1, 1, sequence=True, ranks=tuple(range(4))),
        outputs=(Output(None, 0, 0, ids, splits=False, is_whole=True),),
    )
    holdings = replace(plan.teacher, sequence=False).holdings(16, replica=0)
    held = {
        one.rank: torch.cat([torch.arange(*pair) for pair in one.intervals]) for one in holdings
    }
    assert {len(positions) for positions in held.values()} == {8}
    for rank in range(4):
        assert plan.slot_rows(rank) == {0: 16}
        slot = torch.full((16,), -1)
        for source, parts in plan.received(0, rank).items():
            for part in parts:
                slot[part.message.received] = held[source][part.message.sent]
        assert slot.tolist() == list(range(16))


@pytest.mark.parametrize(("teacher", "student"), [(4, 2), (2, 2), (1, 4)])
def test_heads_go_to_the_tensor_ranks_that_share_them(teacher: int, student: int) -> None:
    parts, copies = attention_parts(teacher, student)
    query = (Column("query", torch.float32, (2, 3)),) * parts
    own = Grid(student, 2, 1, 1, sequence=True, ranks=tuple(range(2 * student)))
    theirs = range(2 * student, 2 * student + teacher)
    plan = replace(
        staged_plan(),
        units=Units(micro_batches=1, student_replicas=1, teacher_replicas=1),
        teacher=Grid(teacher, 1, 1, 1, sequence=True, ranks=tuple(theirs)),
        student=own,
        outputs=(
            Output(1, 0, 0, query, splits=False, kind="query"),
            Output(1, 0, 0, query, splits=False, is_whole=True, kind="key"),
        ),
    )
    for rank in own.ranks:
        tensor, context = rank % student, rank // student
        rows = [8] * parts + [16] * parts
        assert plan.slot_rows(rank) == dict(enumerate(rows))
        received: dict[int, list[int]] = {number: [-1] * count for number, count in enumerate(rows)}
        for source, found in plan.received(0, rank).items():
            for part in found:
                # Its heads are the next ones of those before.
                assert source - theirs.start == tensor * parts // copies + part.column % parts
                places = range(16)[part.message.sent]
                received[part.column][part.message.received] = list(places)
        positions = zigzag_index(16, rank=context, size=2).tolist()
        assert [received[number] for number in range(parts)] == [positions] * parts
        assert [received[parts + number] for number in range(parts)] == [list(range(16))] * parts


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_unit_has_one_hash_on_both_sides(size: int) -> None:
    whole = batch_of(2, 16)
    for rank in range(size):
        shard = whole.context_shard(rank, size)
        assert token_hash(shard) == token_hash(whole, context_rank=rank, context_size=size)


def test_a_hash_is_of_tokens_and_samples() -> None:
    whole = batch_of(2, 16)
    tokens_bs = whole.tokens_bs.clone()
    tokens_bs[1, 7] += 1
    others = (
        replace(whole, tokens_bs=tokens_bs),
        replace(whole, sample_ids_b=whole.sample_ids_b + 1),
    )
    assert len({token_hash(one) for one in (whole, *others)}) == 3
    own = [replace(whole, teacher=batch_of(2, 8)), replace(whole, teacher=batch_of(2, 4))]
    assert len({token_hash(one) for one in (whole, *own)}) == 3
    shard = own[0].context_shard(1, 2)
    assert token_hash(shard) == token_hash(own[0], context_rank=1, context_size=2)
    assert 0 < token_hash(whole) < 1 << 63


def test_commands_and_headers_arrive_as_they_are_sent() -> None:
    command = RoundRequest(RequestKind.HELD_OUT, number=3, turn=9, block=1)
    assert RoundRequest.of(command.tensor()) == command
    header = AnswerHeader(9, 4, token_hash(batch_of(1, 8)), 2, asks_to_stop=True)
    assert header.tensor().shape == AnswerHeader.empty().shape
    without = AnswerHeader(9, 4, 0, 0, has_failed=True), AnswerHeader(9, 4, 0, 0, is_left_out=True)
    for one in (header, *without):
        assert AnswerHeader.of(one.tensor()) == one
    assert [one.has_rows for one in (header, *without)] == [True, False, False]


@pytest.mark.parametrize("sequence", [False, True])
def test_an_answer_of_another_shape_is_named_with_unit_and_route(sequence: bool) -> None:
    plan = plan_of(sequence=sequence)
    roles = Roles(10, (("teacher", 6),))
    store = cast(dist.Store, None)  # nothing is sent
    bridge = Bridge(6, roles, store, cast(dist.ProcessGroup, None), lambda _: nullcontext(), 1.0)
    way = SharedMemoryWay({}, Credits(bridge, rounds=plan.blocks))
    device, command = torch.device("cpu"), RoundRequest(RequestKind.STEP, 3, 3, 0)
    rows = 8 if sequence else 16
    assert plan.sent_rows(6) == {0: rows}
    sender = AnswerSender(plan, way, bridge, device=device, alone=LoneFailure())
    given = torch.zeros(rows, 3, 41, dtype=torch.bfloat16)
    with pytest.raises(
        AnswerError, match=r"^unit 4 of step 3 from teacher.* to .*student"
    ) as error:
        sender.put(command, 4, {0: given}, batch_of(3, 16))
    sender.stop()
    assert " from teacher.2 to student.0" in str(error.value)
    assert f"its hidden is [{rows}, 3, 41] of torch.bfloat16" in str(error.value)
    assert f"planned [{rows}, 3, 40] of torch.bfloat16" in str(error.value)


@pytest.mark.parametrize("request_kind", [RequestKind.STEP, RequestKind.HELD_OUT])
def test_a_senders_seconds_are_of_steps_alone(request_kind: RequestKind) -> None:
    sent: list[tuple[int, int]] = []
    done = SimpleNamespace(wait=lambda: None)

    def send(_: Any, to: int, tag: int) -> Any:
        sent.append((to, tag))
        return done

    group: Any = SimpleNamespace(send=send)
    roles, store = Roles(10, (("teacher", 6),)), cast(dist.Store, None)
    bridge = Bridge(6, roles, store, group, lambda _: nullcontext(), 1.0)
    device = torch.device("cpu")
    sender = AnswerSender(plan_of(), HostWay(bridge), bridge, device=device, alone=LoneFailure())
    sender.refuse(RoundRequest(request_kind, 3, 3, 0), 4)
    sender.stop()
    assert sent
    is_step = request_kind == RequestKind.STEP
    assert {name: time > 0.0 for name, time in sender.seconds.items()} == {
        SLOT: is_step,
        SENDING: is_step,
    }

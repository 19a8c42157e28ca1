"""Messages of a teacher on ranks of its own: bytes by route, and when a route is first used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from megatron_distill.runtime.bridge import Bridge, Sending
from megatron_distill.runtime.roles import Roles
from megatron_distill.train.teachers.answer_ways import Columns, SlotPlace
from megatron_distill.train.teachers.answers import ROWS_TAG, AnswerRows
from tests.distributed.pool import Pool
from tests.distributed.teachers.test_answer_routes import PairGroups
from tests.e2e.runs import SECONDS, records
from tests.e2e.teachers.roles import run_apart, train_in_roles
from tests.e2e.teachers.test_teacher_ranks import (
    FEATURES,
    GLOO,
    SENT,
    SHORT,
    TOP_K,
    assert_same,
    of_roles,
)


def bytes_in_roles(
    rank: int, world: int, config: Path, overrides: Sequence[str]
) -> tuple[dict[tuple[int, int], int], dict[tuple[int, int], int]]:
    """Train; returns the bytes of the rows that this rank sent by route, and the step's formula.

    Sent are messages of the bridge, and rows written into shared memory.
    """
    from megatron_distill.train.teachers.mapped_slots import SharedMemoryWay
    from megatron_distill.train.teachers.own_ranks import Asking

    sent: dict[tuple[int, int], int] = {}
    formula: dict[tuple[int, int], int] = {}
    usual, write, ask = Bridge.send, SharedMemoryWay.send, Asking.ask

    def count(to: int, size: int) -> None:
        sent[rank, to] = sent.get((rank, to), 0) + size

    def counted(bridge: Bridge, tensor: Tensor, to: int, *, tag: int) -> Sending:
        if tag == ROWS_TAG:
            count(to, tensor.nbytes)
        return usual(bridge, tensor, to, tag=tag)

    def written(
        way: SharedMemoryWay, columns: Columns, parts: Sequence[AnswerRows], to: SlotPlace
    ) -> Any:
        slot = way.slots[to.rank][to.block][to.micro_batch]
        rows = [slot[part.column][part.message.received] for part in parts]
        for row in rows:
            row.zero_() if row.dtype.is_floating_point else row.fill_(-1)
        found = write(way, columns, parts, to)
        sources = [columns[part.column][part.message.sent] for part in parts]
        count(to.rank, sum(a.nbytes for a, b in zip(rows, sources, strict=True) if a.equal(b)))
        return found

    def asked(asking: Asking, *given: Any) -> Any:
        formula.update(asking.plan.step_bytes())
        return ask(asking, *given)

    with (
        patch.object(Bridge, "send", counted),
        patch.object(SharedMemoryWay, "send", written),
        patch.object(Asking, "ask", asked),
    ):
        train_in_roles(rank, world, config, overrides, None)
    return sent, formula


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "given"),
    [("TP2+sequence and 1", (GLOO,)), ("PP2 and PP2", (FEATURES, TOP_K, SENT))],
    ids=["by the network", "into shared memory"],
)
def test_each_route_carries_the_bytes_of_the_formula(
    pool: Pool, dense: Path, tmp_path: Path, case: str, given: Sequence[str]
) -> None:
    students, teachers, layouts = of_roles(case)
    own = [f"output={tmp_path}", f"teacher.ranks={teachers}", "train.steps=3", *layouts, *given]
    world = students + teachers
    found = pool.run(world, bytes_in_roles, dense, own, timeout=SECONDS)
    formula = found[0][1]
    assert len(formula) >= 2
    counted = {route: count for sent, _ in found for route, count in sent.items()}
    assert counted == {route: 3 * count for route, count in formula.items()}
    name = Roles(world, (("teacher", teachers),)).name
    logged = {f"{name(source)} to {name(to)}": count for (source, to), count in formula.items()}
    assert [record["answer_bytes"] for record in records(tmp_path)] == [logged] * 3


def pairs_in_roles(
    rank: int, world: int, config: Path, overrides: Sequence[str]
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Train with a group per pair of ranks; returns the pairs at the first round and at the end."""
    from megatron_distill.train.assemble.answers import way as assembly
    from megatron_distill.train.teachers.own_ranks import Asking
    from megatron_distill.train.teachers.serving import TeacherServer

    made: list[PairGroups] = []
    begun: list[list[tuple[int, int]]] = []

    def groups_of_pairs(bridge: Bridge, name: str) -> PairGroups:
        made.append(PairGroups(bridge.rank, bridge.store))
        return made[0]

    def noting(usual: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*given: Any) -> Any:
            begun.append(made[0].pairs)
            return usual(*given)

        return noted

    with (
        patch.object(Bridge, "nccl", groups_of_pairs),
        patch.object(assembly, "_backend", lambda *_: "nccl"),
        patch.object(Asking, "ask", noting(Asking.ask)),
        patch.object(TeacherServer, "serve", noting(TeacherServer.serve)),
    ):
        train_in_roles(rank, world, config, overrides, None)
    (group,) = made
    assert group.aborted == 1
    return begun[0], group.pairs


@pytest.mark.slow
def test_no_communicator_of_two_ranks_is_made_in_a_step(
    pool: Pool, dense: Path, tmp_path: Path
) -> None:
    apart = tmp_path / "apart"
    given = [*SHORT, FEATURES, *of_roles("PP2 and PP2")[2]]
    own = [f"output={apart}", "teacher.ranks=2", *given]
    found = pool.run(4, pairs_in_roles, dense, own, timeout=SECONDS)
    assert all(at_start == at_end for at_start, at_end in found)
    assert [len(pairs) for pairs, _ in found] == [2, 1, 1, 2]
    expected = run_apart(pool, 2, 2, dense, tmp_path / "gloo", *given)
    assert_same(records(apart), expected, first=0.0, later=0.0)

"""Messages between pipeline stages where NCCL carries out those of a group one after the other.

With a device in `init_process_group`, torch has one communicator and one stream for all messages
of a group that are no batch (ProcessGroupNCCL::pointToPoint, "eager" since torch 2.8). A message
begins when both ranks have come to it: after the one before it in the group's stream, and after
what the rank had waited for. Orders that wait for each other in a circle would never end. gloo has
no such order, so the test notes it, and looks for circles.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.distributed.megatron_world import build, megatron_groups, small_architecture
from tests.distributed.pool import Pool

SAMPLES, LENGTH = 2, 16


class Message(NamedTuple):
    """A message as one rank issues it; earlier: the numbers of those that it waited for before."""

    is_send: bool
    peer: int
    group: str
    earlier: frozenset[int]


class Noted:
    """A work whose wait is noted."""

    def __init__(self, work: Any, note: Callable[[], None]) -> None:
        self._work, self._note = work, note

    def wait(self) -> None:
        """Wait as before."""
        self._work.wait()
        self._note()


@contextmanager
def noted_messages() -> Iterator[list[Message]]:
    """Note the messages that are issued one by one."""
    found: list[Message] = []
    waited: set[int] = set()

    def noting(original: Any, *, is_send: bool) -> Any:
        def issue(*, tensor: Any, group: Any, **peer: int) -> Noted:
            number = len(found)
            (other,) = peer.values()
            found.append(Message(is_send, other, group.group_name, frozenset(waited)))
            return Noted(original(tensor=tensor, group=group, **peer), lambda: waited.add(number))

        return issue

    with (
        patch.object(dist, "isend", noting(dist.isend, is_send=True)),
        patch.object(dist, "irecv", noting(dist.irecv, is_send=False)),
    ):
        yield found


def messages(
    rank: int, world: int, layout: dict[str, int], micro_batches: int, forward_only: bool
) -> list[Message]:
    """The messages of one pass of the schedule, overlapped as on a GPU."""
    with megatron_groups(**layout) as groups:
        from megatron_distill.models.gpt import run_model
        from megatron_distill.runtime.batch import Batch
        from megatron_distill.train.step import run_schedule

        architecture = small_architecture(num_layers=2 * layout["pipeline"])
        chunks = build(architecture, groups, seed=3)
        for chunk in chunks:
            # Sent tensors stay, because gloo reads them later than a CUDA stream would.
            chunk.config.deallocate_pipeline_outputs = False
            chunk.config.overlap_p2p_comm = len(chunks) > 1
            assert not chunk.config.batch_p2p_comm
        batch = Batch.untrained(torch.ones((SAMPLES, LENGTH), dtype=torch.int64))

        def loss(hidden: Any) -> tuple[Any, Any, dict[str, Any]]:
            total = hidden.sum()
            return total, torch.ones((), dtype=torch.int64), {"total": total.detach()}

        def step(iterator: Iterator[Batch], chunk: torch.nn.Module) -> tuple[Any, Any]:
            return run_model(chunk, next(iterator), context_size=1), loss

        with noted_messages() as found:
            run_schedule(
                step,
                chunks,
                [batch] * micro_batches,
                groups=groups,
                micro_batch_size=SAMPLES,
                sequence_length=LENGTH,
                forward_only=forward_only,
            )
        return found


def circle(
    of_ranks: list[list[Message]], stream: Callable[[Message], Hashable], *, one_queue: bool
) -> list[Any]:
    """Beginnings and ends of messages that wait for each other in a circle.

    stream: what the messages of one stream have in common. one_queue: streams share a hardware
    queue, in which nothing begins before everything that was issued earlier has begun.
    """
    count: dict[Any, int] = {}
    after: dict[Any, set[Any]] = {}
    for rank, own in enumerate(of_ranks):
        names: list[tuple[Any, ...]] = []
        last: dict[Hashable, tuple[Any, ...]] = {}
        for number, one in enumerate(own):
            ends = (rank, one.peer) if one.is_send else (one.peer, rank)
            place = (rank, *ends, one.group)
            count[place] = count.get(place, 0) + 1
            name = (*ends, one.group, count[place])
            before: set[Any] = {("end", names[earlier]) for earlier in one.earlier}
            if stream(one) in last:
                before.add(("end", last[stream(one)]))
            if one_queue and number:
                before.add(("begin", rank, number - 1))
            after[("begin", rank, number)] = before
            after.setdefault(("end", name), set()).add(("begin", rank, number))
            last[stream(one)] = name
            names.append(name)
    ends_of = [before for node, before in after.items() if node[0] == "end"]
    assert all(len(before) == 2 for before in ends_of), "a message without its other end"
    try:
        TopologicalSorter(after).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


CASES: list[tuple[int, dict[str, int], int]] = [
    (2, {"pipeline": 2}, 4),
    (2, {"pipeline": 2, "virtual_pipeline": 2}, 4),
    (3, {"pipeline": 3}, 5),
    (4, {"pipeline": 4}, 8),
    (3, {"pipeline": 3, "virtual_pipeline": 2}, 6),
    (4, {"pipeline": 4, "virtual_pipeline": 2}, 8),
]
QUICK = CASES[-1:]


@pytest.mark.parametrize("forward_only", [False, True], ids=["training", "forward"])
@pytest.mark.parametrize(
    ("world", "layout", "micro_batches"),
    [
        pytest.param(*one, marks=() if one in QUICK else pytest.mark.slow, id=str(one[1]))
        for one in CASES
    ],
)
def test_no_messages_wait_for_each_other(
    pool: Pool, world: int, layout: dict[str, int], micro_batches: int, forward_only: bool
) -> None:
    found = pool.run(world, messages, layout, micro_batches, forward_only)
    assert all(found)
    for one_queue in (False, True):
        assert circle(found, lambda one: one.group, one_queue=one_queue) == []


def test_a_circle_is_found() -> None:
    """Two ranks that both receive before they send, in one stream or in one for each direction."""
    received_first = [
        [Message(False, 1 - rank, "g", frozenset()), Message(True, 1 - rank, "g", frozenset())]
        for rank in (0, 1)
    ]
    assert circle(received_first, lambda one: one.group, one_queue=False)
    for one_queue in (False, True):
        assert circle(received_first, lambda one: one.is_send, one_queue=one_queue) == []

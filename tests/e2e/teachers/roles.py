"""Runs whose teachers have ranks of their own: a pool's worker joins the world of its role."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist

from megatron_distill.config import TeacherRanks, teacher_ranks
from megatron_distill.runtime.launch import Device, Launch, joined_world
from megatron_distill.runtime.termination import TerminationRequest
from tests.distributed.pool import Pool, meet
from tests.e2e.runs import SECONDS, Course, StopAfter, configure, log_of, records


@contextmanager
def roles(rank: int, world: int, teachers: TeacherRanks) -> Iterator[Device]:
    """Join the world of this rank's role in a pool worker, whose own group returns afterwards."""
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    place = dist.PrefixStore("launch", store)
    try:
        with joined_world(
            device="cpu",
            backend="gloo",
            threads=1,
            timeout_seconds=SECONDS,
            launch=Launch(rank, world, place, teachers),
        ) as device:
            yield device
    finally:
        again = dist.PrefixStore("again", store)
        dist.init_process_group("gloo", store=again, rank=rank, world_size=world)
        meet(again, "connected", world, timedelta(seconds=SECONDS))


def train_in_roles(
    rank: int,
    world: int,
    config_path: Path,
    overrides: Sequence[str],
    stop_after: int | None = None,
) -> bool:
    """Run one training with teachers on the last ranks; returns whether the student finished."""
    config = configure(rank, config_path, overrides, world)
    from megatron_distill.train.assemble.run import run_training

    stop: TerminationRequest = StopAfter(stop_after)
    with roles(rank, world, teacher_ranks(config, ranks_per_node=world)) as device:
        return run_training(config, device, stop)


def apart(
    pool: Pool,
    world: int,
    config: Path,
    output: Path,
    *overrides: str,
    stop_after: int | None = None,
) -> Course:
    """Train with the teachers that have `ranks` on the last ones; returns every record."""
    changes = [f"output={output}", *overrides]
    pool.run(world, train_in_roles, config, changes, stop_after, timeout=SECONDS)
    return records(output)


def run_apart(
    pool: Pool, students: int, teachers: int, config: Path, output: Path, *overrides: str,
    stop_after: int | None = None,
) -> Course:  # fmt: skip
    """Train with a teacher on ranks of its own and return every record."""
    own = (f"teacher.ranks={teachers}", *overrides)
    return apart(pool, students + teachers, config, output, *own, stop_after=stop_after)


def passes_in_roles(
    rank: int, world: int, config: Path, overrides: Sequence[str]
) -> tuple[int, int, int]:
    """Run one training; returns this rank's forward passes, units left out, and answers read."""
    from megatron_distill.train.teachers.answer_ring import AnswerRing
    from megatron_distill.train.teachers.serving import AnswerSender, TeacherServer

    counted = [(TeacherServer, "_forward"), (AnswerSender, "leave_out"), (AnswerRing, "take")]
    with ExitStack() as stack:
        passes, left_out, read = (
            stack.enter_context(
                patch.object(owner, name, autospec=True, side_effect=getattr(owner, name))
            )
            for owner, name in counted
        )
        train_in_roles(rank, world, config, overrides)
    return passes.call_count, left_out.call_count, read.call_count


def log_in_roles(rank: int, world: int, config: Path, overrides: Sequence[str]) -> str:
    """Run one training to its end; returns the log of this rank."""
    with log_of(rank) as stream:
        assert train_in_roles(rank, world, config, overrides, None)
    return stream.getvalue()

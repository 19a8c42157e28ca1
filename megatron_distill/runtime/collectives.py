"""Collectives that keep all ranks of a run together, in success and in failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Final, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    MegatronDistillError,
    StoreError,
    TrainingError,
)
from megatron_distill.runtime.host_copy import HostCopy
from megatron_distill.runtime.segments import copied

Result = TypeVar("Result")

_BEAT_SECONDS: Final = 5.0
ERROR_TYPES: tuple[type[MegatronDistillError], ...] = (
    ConfigError,
    DataError,
    StoreError,
    CheckpointError,
    TrainingError,
)


def agree(error: MegatronDistillError | None, *, group: dist.ProcessGroup | None = None) -> None:
    """Raise on every rank the error of the lowest failed rank; return if no rank failed.

    A rank-local failure must pass through here before the next collective, so that no rank waits
    for a rank that has ended.

    Collective: `group` (the world), one all-gather of a short object per rank.
    """
    answer = None if error is None else (ERROR_TYPES.index(type(error)), str(error))
    answers = [answer] * dist.get_world_size(group)
    if len(answers) > 1:
        dist.all_gather_object(answers, answer, group=group)
    for answer in answers:
        if answer is not None:
            kind, message = answer
            raise ERROR_TYPES[kind](message) from error


@contextmanager
def together(*, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run a block that may fail on some ranks; its outcome is the same on all ranks.

    The block itself must not communicate. Raises as `agree`.

    Collective: `group` (the world), one all-gather of a short object per rank, after the block.
    """
    failure: MegatronDistillError | None = None
    try:
        yield
    except ERROR_TYPES as error:
        failure = error
    agree(failure, group=group)


def highest(
    *values: int, device: torch.device, group: dist.ProcessGroup | None = None
) -> tuple[int, ...]:
    """Return the largest of each value over all ranks.

    Collective: `group` (the world), one all-reduce of 8 bytes per value.
    """
    (largest,) = begin_highest(*values, device=device, group=group).read()
    return tuple(largest.tolist())


def begin_highest(
    *values: int, device: torch.device, group: dist.ProcessGroup | None = None
) -> HostCopy:
    """Begin what `highest` does; the answer is read later, as int64, and nothing waits before.

    Collective: that of `highest`.
    """
    largest = copied(torch.tensor(values, dtype=torch.int64), device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return HostCopy.begin(largest)


def any_rank(flag: bool, *, device: torch.device, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether the flag is set on at least one rank.

    Collective: `group` (the world), one all-reduce of 8 bytes.
    """
    return bool(highest(int(flag), device=device, group=group)[0])


def on_first_rank(
    work: Callable[[], Result],
    *,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    beat_seconds: float = _BEAT_SECONDS,
) -> Result | None:
    """Run work of any duration on the first rank while all other ranks wait.

    It runs in a thread of that rank, so that no collective waits longer than `beat_seconds`.
    Returns the work's result on the first rank, None elsewhere. Its error is raised on every rank.

    Collective: `group` (the world), one all-reduce of 8 bytes every `beat_seconds`, then one
    all-gather of a short object per rank.
    """
    found: Result | None = None
    failure: MegatronDistillError | None = None
    with ThreadPoolExecutor(1, thread_name_prefix="first-rank") as worker:
        doing = worker.submit(work) if dist.get_rank(group) == 0 else None
        is_done = False
        while not is_done:
            if doing is not None:
                wait([doing], timeout=beat_seconds)
            is_done = any_rank(doing is not None and doing.done(), device=device, group=group)
        if doing is not None:
            try:
                found = doing.result()
            except ERROR_TYPES as error:
                failure = error
    agree(failure, group=group)
    return found


def from_first_rank(work: Callable[[], Result]) -> Result:
    """Run short work on the first rank and return its result on every rank.

    Its error is raised on every rank.

    Collective: world, one all-gather of a short object per rank, then one broadcast of the result.
    """
    found: list[Result | None] = [None]
    with together():
        if dist.get_rank() == 0:
            found = [work()]
    dist.broadcast_object_list(found, src=0)
    return cast(Result, found[0])


def sum_over(values: Tensor, *groups: dist.ProcessGroup) -> Tensor:
    """Return the sum of a tensor over the product of several groups.

    Collective: one all-reduce per group of more than one rank, the tensor's size each.
    """
    total = values.clone()
    for group in groups:
        if group.size() > 1:
            dist.all_reduce(total, group=group)
    return total

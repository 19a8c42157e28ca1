"""Sharded checkpoints of a student: written to a partial folder, renamed, listed by step.

    <output>/checkpoints/step_0000020/          complete
    <output>/checkpoints/step_0000040.partial/  being written, or left by a killed run

A folder is complete if and only if it has its final name.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.errors import CheckpointError
from megatron_distill.log import get_logger
from megatron_distill.runtime.atomic_files import PARTIAL, replace_file, replace_folder, set_aside
from megatron_distill.runtime.collectives import any_rank, together
from megatron_distill.runtime.main_thread import awake_until
from megatron_distill.runtime.progress import size
from megatron_distill.train.checkpoint.best import BEST_FILE, Best
from megatron_distill.train.checkpoint.description import Description, complete_checkpoints
from megatron_distill.train.checkpoint.shards import Shard, Staging
from megatron_distill.train.checkpoint.writer import (
    IndexEntry,
    failure_of,
    take_snapshot,
    write_common,
    write_index,
    write_rank_file,
)
from megatron_distill.train.run_folder import SETTINGS_FILE

_LOGGER = get_logger(__name__)
_FP32_BYTES: Final = 4


def _name_of(step: int) -> str:
    return f"step_{step:07d}"


@dataclass(frozen=True)
class _Attempt:
    """One checkpoint being written: its folder and its description."""

    partial: Path
    final: Path
    description: Description
    started: float  # time.monotonic()

    def described(self) -> Description:
        """Return the description with the seconds of the save until now."""
        return replace(self.description, save_seconds=time.monotonic() - self.started)


class CheckpointFolder:
    """The checkpoints of one run: saves, and removes all but the newest ones and the best.

    Every method is called by all ranks together. `close` must be called at the end. `beside`: a
    file outside that every save must find; without it the run's folder is taken for removed.
    """

    def __init__(
        self, root: Path, *, keep: int, asynchronous: bool, beside: Path | None = None
    ) -> None:
        self._root = root
        self._beside = beside
        self._keep = keep
        self._writer: ThreadPoolExecutor | None = None
        self._staging: Staging | None = None
        self._pending: tuple[_Attempt, Future[list[IndexEntry] | str]] | None = None
        if asynchronous:
            self._staging = Staging()
            self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-writer")

    @classmethod
    def of_run(cls, output: str, keep: int, *, asynchronous: bool) -> CheckpointFolder:
        """Return the checkpoints of a run, whose settings every save must find."""
        root, settings = Path(output) / "checkpoints", Path(output) / SETTINGS_FILE
        return cls(root, keep=keep, asynchronous=asynchronous, beside=settings)

    def prepare(self) -> None:
        """Create the folder and remove partial checkpoints of a killed run; raises CheckpointError.

        A run that was killed before it named its newest checkpoint as the best is made up for.

        Collective: world, one all-gather of a short object per rank.
        """
        with together():
            if dist.get_rank() == 0:
                try:
                    self._root.mkdir(parents=True, exist_ok=True)
                    for leftover in self._root.glob(f"*{PARTIAL}"):
                        shutil.rmtree(leftover)
                    for newest in complete_checkpoints(self._root)[-1:]:
                        with suppress(CheckpointError):  # the resume from it reports the damage
                            self._name_best(Best.of(Description.read(newest).best, newest))
                except OSError as error:
                    raise self._unwritable(error) from error

    def require_room(self, weights: Sequence[Shard]) -> None:
        """Raise CheckpointError on all ranks if the disk has no room for the next checkpoint.

        Counted are the weights and what Adam keeps for them, which may not exist yet: moments, and
        fp32 copies of narrower weights.

        Collective: world, one all-gather of an integer, and of a short object per rank.
        """
        windows = [window.data for window in take_snapshot(weights, {}, None).windows]
        self._check_space(sum(one.nbytes + one.numel() * _adam_bytes(one) for one in windows))

    def save(
        self,
        shards: Sequence[Shard],
        description: Description,
        objects: Mapping[str, bytes] | None = None,
    ) -> None:
        """Write one checkpoint; with asynchronous saving, copy the shards and start to.

        Replicas write parts of about the same size. `objects`: this rank's, by names that no other
        rank has, in torch's archive format.

        Raises CheckpointError on all ranks when the folder cannot be written, the disk is full, or
        the run's folder was removed. The attempt's `.partial` folder is then removed.

        Collective: world, gathers of a short object per rank, and of one per tensor at the end.
        """
        self.finish()
        name = _name_of(description.step)
        final, partial = self._root / name, self._root / (name + PARTIAL)
        attempt = _Attempt(partial, final, description, time.monotonic())
        with together():
            snapshot = take_snapshot(shards, objects or {}, self._staging)
        self._begin(attempt)
        self._check_space(snapshot.nbytes, attempt.partial)
        with together():
            if dist.get_rank() == 0:
                try:
                    write_common(attempt.partial)
                except OSError as error:
                    raise self._failed(attempt, str(error.strerror)) from error
        work = (snapshot, attempt.partial, dist.get_rank())
        if self._writer is None:
            self._complete(attempt, write_rank_file(*work))
            return
        self._pending = (attempt, self._writer.submit(write_rank_file, *work))

    def poll(self) -> None:
        """Publish an asynchronous checkpoint if it is completely written.

        Collective: world, one all-reduce of an integer while one is being written.
        """
        if self._pending is not None:
            writing = not self._pending[1].done()
            if not any_rank(writing, device=torch.device(torch.cuda.current_device())):
                self.finish()

    def finish(self) -> None:
        """Wait for an asynchronous checkpoint that is still being written, and publish it."""
        if self._pending is not None:
            attempt, writing = self._pending
            self._pending = None
            self._complete(attempt, awake_until(writing))

    def close(self) -> None:
        """End the writing thread; an unfinished checkpoint stays partial."""
        if self._writer is not None:
            self._writer.shutdown(wait=True)
            self._writer = None
        if self._staging is not None:
            self._staging.release()
            self._staging = None

    def _begin(self, attempt: _Attempt) -> None:
        """Create the folder of an attempt, which every rank must see."""
        with together():
            if dist.get_rank() == 0:
                try:
                    self._check_in_place()
                    # Without parents: a folder that was removed must not look like a run's.
                    attempt.partial.mkdir()
                except OSError as error:
                    raise self._unwritable(error) from error
        with together():
            if not attempt.partial.is_dir():
                raise CheckpointError(
                    f"rank {dist.get_rank()} does not see {attempt.partial}, which rank 0 made; "
                    "set `output` to a folder that all nodes share"
                )

    def _check_in_place(self) -> None:
        """Raise CheckpointError where the run's folder, or a part that a resume needs, is gone."""
        for path in (self._root.parent, self._root, self._beside):
            if path is not None and not path.exists():
                raise CheckpointError(
                    f"output={self._root.parent}: {path} is gone, removed or renamed since the "
                    "start, so that this run cannot go on. Start again, which resumes from the "
                    "newest checkpoint that is left, or from step 0"
                )

    def _unwritable(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"cannot write a checkpoint in {self._root}: {error.strerror}; free disk space or "
            "change `output`"
        )

    def _check_space(self, own: int, partial: Path | None = None) -> None:
        """Raise if the disk has too little space for the bytes of all ranks; removes `partial`."""
        sizes: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(sizes, own)
        with together():
            if dist.get_rank() == 0:
                free = shutil.disk_usage(self._root).free
                if free < sum(sizes):
                    if partial is not None:
                        shutil.rmtree(partial, ignore_errors=True)
                    needed, left = _sizes(sum(sizes), free)
                    raise CheckpointError(
                        f"no space left for a checkpoint in {self._root}: it needs {needed} and "
                        f"{left} are free; free some, lower checkpoint.keep, or change `output`"
                    )

    def _complete(self, attempt: _Attempt, outcome: list[IndexEntry] | str) -> None:
        """Rename a written checkpoint to its final name, and remove those beyond the limit.

        `outcome`: the contents of this rank's file, or the reason of a failure.
        """
        is_first = dist.get_rank() == 0
        outcomes: list[Any] | None = [None] * dist.get_world_size() if is_first else None
        dist.gather_object(outcome, outcomes, dst=0)
        with together():
            if outcomes is not None:
                for failure in outcomes:
                    if isinstance(failure, str):
                        raise self._failed(attempt, failure)
                self._publish(attempt, [entry for stored in outcomes for entry in stored])

    def _publish(self, attempt: _Attempt, stored: list[IndexEntry]) -> None:
        try:
            write_index(stored, attempt.partial)
            attempt.described().write(attempt.partial)
            # Removing the one before takes long; this one has its name first.
            before = replace_folder(attempt.partial, attempt.final)
            shutil.rmtree(before, ignore_errors=True)
        except (OSError, ValueError) as error:
            raise self._failed(attempt, failure_of(error, 0)) from error
        best = Best.of(attempt.description.best, attempt.final)
        try:
            self._name_best(best)
            for old in complete_checkpoints(self._root)[: -self._keep]:
                if best is None or old.name != _name_of(best.step):
                    _remove(old)
        except OSError as error:
            place = "" if error.filename is None else f" at {error.filename}"
            raise CheckpointError(
                f"{attempt.final} is saved, but naming the best checkpoint or removing older ones "
                f"failed{place}: {error.strerror}; free disk space or change `output`, and start "
                "again"
            ) from error
        _LOGGER.info("saved %s", attempt.final)

    def _name_best(self, best: Best | None) -> None:
        """Write the file that names the best checkpoint, unless it does; raises OSError.

        A kill between a checkpoint and this file leaves the file of before, or none.
        """
        if best is None or not (self._root / _name_of(best.step)).is_dir():
            return
        path, content = self._root / BEST_FILE, json.dumps(vars(best), indent=1).encode()
        if not path.is_file() or path.read_bytes() != content:
            replace_file(path, content)

    def _failed(self, attempt: _Attempt, reason: str) -> CheckpointError:
        """Remove the attempt and return the error with its reason."""
        shutil.rmtree(attempt.partial, ignore_errors=True)
        return CheckpointError(
            f"saving {attempt.final} failed: {reason}; earlier checkpoints are untouched; free "
            "disk space or change `output`, and start again"
        )


def _adam_bytes(weight: Tensor) -> int:
    """Return the bytes of Adam's state for one number of a weight in a checkpoint."""
    copies = 3 if weight.itemsize < _FP32_BYTES else 2
    return copies * _FP32_BYTES


def _sizes(needed: int, free: int) -> tuple[str, str]:
    """Write two numbers of bytes, in full where they look the same."""
    short = size(needed), size(free)
    return short if short[0] != short[1] else (f"{needed:,} bytes", f"{free:,} bytes")


def _remove(checkpoint: Path) -> None:
    """Remove a complete checkpoint; an interrupted removal leaves none that looks complete."""
    shutil.rmtree(set_aside(checkpoint), ignore_errors=True)

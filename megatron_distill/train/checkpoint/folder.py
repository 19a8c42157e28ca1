"""Sharded checkpoints of a student: written to a partial folder, renamed, listed by step.

    <output>/checkpoints/step_0000020/          complete
    <output>/checkpoints/step_0000040.partial/  being written, or left by a killed run

A folder is complete if and only if it has its final name.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME

from megatron_distill.errors import CheckpointError
from megatron_distill.log import get_logger
from megatron_distill.models.hugging_face.assets import ASSETS_FOLDER
from megatron_distill.runtime.atomic_files import flush_folder, replace_file, write_flushed
from megatron_distill.runtime.collectives import any_rank, together
from megatron_distill.train.checkpoint.best import BEST_FILE, Best
from megatron_distill.train.checkpoint.shards import Shard, Staging
from megatron_distill.train.checkpoint.writer import (
    Snapshot,
    Stored,
    failure_of,
    take_snapshot,
    write_common,
    write_index,
    write_rank_file,
)

_LOGGER = get_logger(__name__)
_FINISHED = re.compile(r"step_(\d{7,})")
_PARTIAL = ".partial"
_PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
DESCRIPTION_FILE = "description.json"


@dataclass(frozen=True)
class Description:
    """Description of a checkpoint, readable without Megatron: `description.json` in its folder."""

    step: int
    tokens: int
    bad_steps: int
    architecture: dict[str, object]
    tokenizer: str  # content hash
    layout: str  # of the run that wrote it
    data: dict[str, Any]  # the loader's position
    balance: dict[str, Any] = field(default_factory=dict)  # running means of the losses
    # The feature losses and their projectors; None: none.
    features: dict[str, Any] | None = None
    # The settings of the run that wrote it; empty in imports and in older versions' checkpoints.
    configuration: dict[str, Any] = field(default_factory=dict)
    best: dict[str, Any] | None = None  # see `Best`; None: the run keeps no best checkpoint
    save_seconds: float | None = None  # from the start of the save to the complete folder

    def write(self, folder: Path) -> None:
        """Write the file and flush it to disk."""
        write_flushed(folder / DESCRIPTION_FILE, json.dumps(vars(self), indent=1).encode())

    @classmethod
    def read(cls, folder: Path) -> Description:
        """Read the description of a complete checkpoint; raises CheckpointError."""
        path = folder / DESCRIPTION_FILE
        try:
            found = cls(**json.loads(path.read_text()))
            if not isinstance(found.architecture, dict):
                raise TypeError("its architecture is not an object")
        except FileNotFoundError:
            raise CheckpointError(
                f"{folder} is not a checkpoint: it has no {DESCRIPTION_FILE}; name a run's output "
                "folder or one of its checkpoints/step_* folders"
            ) from None
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{path} is damaged ({error}); use another checkpoint") from None
        return found


def _name_of(step: int) -> str:
    return f"step_{step:07d}"


def complete_checkpoints(root: Path) -> list[Path]:
    """Return the complete checkpoints of a folder, oldest first."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if _FINISHED.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def resolve_checkpoint(path: str) -> Path:
    """Return the checkpoint folder for a user's path: the path itself, or the newest of a run.

    Raises CheckpointError when there is none.
    """
    given = Path(path)
    for root in (given / "checkpoints", given):
        complete = complete_checkpoints(root)
        if complete:
            return complete[-1]
    if (given / DESCRIPTION_FILE).is_file():
        return given
    _refuse_pickle(given)
    raise CheckpointError(
        f"{path} contains no complete checkpoint; name the output folder of a run or one of its "
        "checkpoints/step_* folders"
    )


def _refuse_pickle(given: Path) -> None:
    """Raise CheckpointError for unsharded checkpoints, such as those of old Megatron-LM."""
    globs = (f"{folder}*{suffix}" for folder in ("", "*/", "*/*/") for suffix in _PICKLES)
    found = (path for glob in globs for path in sorted(given.glob(glob)))
    # A partial checkpoint of this library, left by a killed run, contains one such pickle.
    strange = (path for path in found if path.name != COMMON_STATE_FNAME)
    pickle = given if given.suffix in _PICKLES else next(strange, None)
    if pickle is not None and pickle.is_file():
        raise CheckpointError(
            f"{pickle} is a pickle, which can run code when it is read, and is refused; convert "
            "the model to safetensors where it was made, and import that"
        )


def assets_of(checkpoint: Path) -> Path:
    """Return the folder of the Hugging Face files of a checkpoint or of its run."""
    own = checkpoint / ASSETS_FOLDER
    return own if own.is_dir() else checkpoint.parent.parent / ASSETS_FOLDER


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

    Every method is called by all ranks together. `close` must be called at the end.
    """

    def __init__(self, root: Path, *, keep: int, asynchronous: bool) -> None:
        self._root = root
        self._keep = keep
        self._writer: ThreadPoolExecutor | None = None
        self._staging: Staging | None = None
        self._pending: tuple[_Attempt, Future[list[Stored] | str]] | None = None
        if asynchronous:
            self._staging = Staging()
            self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-writer")

    def prepare(self) -> None:
        """Create the folder and remove partial checkpoints of a killed run; raises CheckpointError.

        Collective: world, one all-gather of a short object per rank.
        """
        with together():
            if dist.get_rank() == 0:
                try:
                    self._root.mkdir(parents=True, exist_ok=True)
                    for leftover in self._root.glob(f"*{_PARTIAL}"):
                        shutil.rmtree(leftover)
                except OSError as error:
                    raise self._unwritable(error) from error

    def save(
        self,
        shards: Sequence[Shard],
        description: Description,
        objects: Mapping[str, bytes] | None = None,
    ) -> None:
        """Write one checkpoint; with asynchronous saving, copy the shards and start to.

        Replicas write parts of about the same size. `objects`: this rank's, by names that no other
        rank has, in torch's archive format.

        Raises CheckpointError on all ranks when the folder cannot be written or the disk is full.
        The attempt's `.partial` folder is then removed.

        Collective: world, gathers of a short object per rank, and of one per tensor at the end.
        """
        self.finish()
        name = _name_of(description.step)
        final, partial = self._root / name, self._root / (name + _PARTIAL)
        attempt = _Attempt(partial, final, description, time.monotonic())
        with together():
            snapshot = take_snapshot(shards, objects or {}, self._staging)
        self._begin(attempt)
        self._check_space(snapshot, attempt)
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
            self._complete(attempt, writing.result())

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
                    attempt.partial.mkdir(parents=True)
                except OSError as error:
                    raise self._unwritable(error) from error
        with together():
            if not attempt.partial.is_dir():
                raise CheckpointError(
                    f"rank {dist.get_rank()} does not see {attempt.partial}, which rank 0 made; "
                    "set `output` to a folder that all nodes share"
                )

    def _unwritable(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"cannot write a checkpoint in {self._root}: {error.strerror}; free disk space or "
            "change `output`"
        )

    def _check_space(self, snapshot: Snapshot, attempt: _Attempt) -> None:
        """Raise before a save if the disk has too little space for it."""
        sizes: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(sizes, snapshot.nbytes)
        with together():
            if dist.get_rank() == 0:
                free = shutil.disk_usage(self._root).free
                if free < sum(sizes):
                    shutil.rmtree(attempt.partial, ignore_errors=True)
                    raise CheckpointError(
                        f"no space left for a checkpoint in {self._root}: it needs "
                        f"{sum(sizes) / 1e6:.1f} MB and {free / 1e6:.1f} MB are free; free some, "
                        "lower checkpoint.keep, or change `output`"
                    )

    def _complete(self, attempt: _Attempt, outcome: list[Stored] | str) -> None:
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

    def _publish(self, attempt: _Attempt, stored: list[Stored]) -> None:
        try:
            write_index(stored, attempt.partial)
            attempt.described().write(attempt.partial)
            flush_folder(attempt.partial)
            if attempt.final.exists():
                _remove(attempt.final)
            attempt.partial.rename(attempt.final)
            flush_folder(self._root)
        except (OSError, ValueError) as error:
            raise self._failed(attempt, failure_of(error, 0)) from error
        best = Best.of(attempt.description.best, attempt.final)
        if best is not None and best.step == attempt.description.step:
            replace_file(self._root / BEST_FILE, json.dumps(vars(best), indent=1).encode())
        for old in complete_checkpoints(self._root)[: -self._keep]:
            if best is None or old.name != _name_of(best.step):
                _remove(old)
        _LOGGER.info("saved %s", attempt.final)

    def _failed(self, attempt: _Attempt, reason: str) -> CheckpointError:
        """Remove the attempt and return the error with its reason."""
        shutil.rmtree(attempt.partial, ignore_errors=True)
        return CheckpointError(
            f"saving {attempt.final} failed: {reason}; earlier checkpoints are untouched; free "
            "disk space or change `output`, and start again"
        )


def _remove(checkpoint: Path) -> None:
    """Remove a complete checkpoint; an interrupted removal leaves none that looks complete."""
    doomed = checkpoint.with_name(f"{checkpoint.name}.old{_PARTIAL}")
    checkpoint.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)

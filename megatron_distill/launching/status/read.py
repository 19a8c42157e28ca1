"""The state of a run, a capture, rollouts or an evaluation from files: no process is asked.

Any machine that sees the folder may read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from megatron_distill.errors import ConfigError
from megatron_distill.launching.grace import is_step, newest_records
from megatron_distill.launching.records import LAUNCHES, ROLLOUTS, Launches, LaunchRecord
from megatron_distill.launching.status.file_jobs import (
    FOLDERS,
    capture_status,
    is_store,
    nothing_here,
    of_files,
    rollout_status,
)
from megatron_distill.launching.status.job_state import job_state, submitted_at
from megatron_distill.launching.status.run_checkpoint import read_saved
from megatron_distill.launching.status.run_status import RunStatus, in_words
from megatron_distill.launching.status.step_figures import (
    slowest_of_teachers,
    slowest_ranks,
    speed,
    why_no_slowest,
)
from megatron_distill.launching.status.time_left import pause_seconds, seconds_left

__all__ = ["read_status"]


def read_status(run: Path) -> RunStatus:
    """Return the state of a run, a capture, rollouts, or of jobs that read a model's folder.

    Raises ConfigError: the folder is none of these, or this user may not read it.
    """
    try:
        for folder in (run, *run.parents):
            if folder.exists() and not folder.is_dir():
                raise ConfigError(f"{folder}: it is a file; {FOLDERS}")
        if (run / ROLLOUTS).is_file():
            return rollout_status(run)
        if is_store(run):
            return capture_status(run)
        return _run_status(run)
    except OSError as error:
        remedy = "look at the disk, or name another copy of the folder"
        if isinstance(error, PermissionError):
            remedy = "ask the owner of the run for the permission to read its folder"
        raise ConfigError(
            f"{run}: cannot read {error.filename or 'its files'} ({error.strerror}); {remedy}"
        ) from error


def _run_status(run: Path) -> RunStatus:
    launches = Launches(run / LAUNCHES, run, f"output={run}")
    begun = launches.all()
    settings = _settings(run / "config.yaml")
    readers = _readers(run)
    if settings is None and not begun and launches.submission() is None:
        if readers:
            return _of_readers(run, readers)
        raise nothing_here(run)
    records = newest_records(run)
    steps = [one for one in records if is_step(one)]
    seconds, tokens_per_second = speed(records)
    saved = read_saved(run, settings or {})
    # The log may have lost its end: what is saved is done.
    step = max([saved.step, *(int(one["step"]) for one in steps)])
    train = (settings or {}).get("train")
    wanted = train.get("steps") if isinstance(train, dict) else None
    wanted = wanted if isinstance(wanted, int) else None
    state, detail = job_state(
        run,
        launches,
        begun,
        log=run / "metrics.jsonl",
        step=step,
        is_done=saved.is_done(step, wanted),
        step_seconds=seconds,
        pause_seconds=pause_seconds(run, settings or {}, records, saved),
    )
    left = seconds_left(run, settings or {}, records, saved, step=step, is_done=state == "done")
    slowest = slowest_ranks(records)
    return RunStatus(
        run=str(run),
        state=state,
        detail=saved.explained(state, detail, step=step, steps=wanted),
        step=step,
        steps=wanted,
        step_seconds=seconds,
        tokens_per_second=tokens_per_second,
        seconds_left=left,
        checkpoint=saved.name,
        checkpoint_age=saved.age,
        save_seconds=saved.seconds,
        launches=len(begun),
        restarts=begun[-1].restart if begun else 0,
        slowest_ranks=slowest,
        slowest_reason=None if slowest else why_no_slowest(run, settings, saved.name, steps=step),
        slowest_teacher_ranks=slowest_of_teachers(records),
        jobs={one.command: in_words(one.state, one.detail) for one in readers},
    )


@dataclass(frozen=True)
class _Reader:
    """The launches of a command that reads a run or a model, and its state."""

    command: str
    begun: Sequence[LaunchRecord]
    state: str
    detail: str
    newest: float  # of its launches and submissions, seconds since the epoch


def _readers(folder: Path) -> list[_Reader]:
    """Return the jobs that read a folder and have their records there."""
    found = []
    for path in sorted(folder.glob(f"{LAUNCHES}_*")):
        command = path.name.removeprefix(f"{LAUNCHES}_")
        launches = Launches(path, folder, f"{command} {folder}")
        begun = launches.all()
        if not begun and launches.submission() is None:
            continue
        newest = launches.of(begun[-1]) if begun else path
        state, detail = job_state(
            path,  # the lock in the run's own folder is of its training
            launches,
            begun,
            log=newest / "rank_00000.err",
            step=0,
            is_done=False,
            step_seconds=None,
        )
        last = max([submitted_at(launches), *(one.started for one in begun)])
        found.append(_Reader(command, begun, state, detail, last))
    return found


def _of_readers(folder: Path, readers: Sequence[_Reader]) -> RunStatus:
    """Return the state of a folder that is only read: that of the newest job."""
    newest = max(readers, key=lambda one: one.newest)
    found = of_files(
        folder,
        newest.state,
        newest.detail,
        done=0,
        wanted=None,
        seconds=None,
        begun=newest.begun,
        unit="",
    )
    return replace(found, jobs={one.command: in_words(one.state, one.detail) for one in readers})


def _settings(path: Path) -> Mapping[str, Any] | None:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML ({error}); start the run again") from error
    return found if isinstance(found, dict) else {}

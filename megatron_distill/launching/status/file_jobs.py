"""The state of captures and rollouts, whose progress is a number of files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from megatron_distill.errors import ConfigError
from megatron_distill.launching.records import (
    LAUNCHES,
    ROLLOUTS,
    Launches,
    LaunchRecord,
    complete_parts,
    complete_shards,
    job_folders,
    launches_beside,
    progress_of,
)
from megatron_distill.launching.status.job_state import changed, job_state, submitted_at
from megatron_distill.launching.status.run_status import RunStatus

__all__ = ["FOLDERS", "capture_status", "is_store", "nothing_here", "of_files", "rollout_status"]

_RECENT_FILES: Final = 50
# States of jobs side by side: the first that one of them has is that of all.
_BY_LIFE: Final = ("running", "starting", "waiting", "failed", "stopped")
FOLDERS: Final = (
    "name the folder `output` of a run, `store.path` of a capture, or --output of rollouts"
)


def nothing_here(folder: Path) -> ConfigError:
    """Return the error of a folder in which no job has begun."""
    if not folder.exists() and not launches_beside(folder).exists():
        return ConfigError(f"{folder}: there is no such folder; {FOLDERS}")
    return ConfigError(
        f"{folder}: no run has started here (no config.yaml, no launch, no job that Slurm has "
        f"accepted); {FOLDERS}"
    )


def is_store(folder: Path) -> bool:
    """Return whether a capture has written a folder, or been launched to."""
    return (folder / "shards").is_dir() or launches_beside(folder).is_dir()


def _jobs_of(store: Path) -> list[Launches]:
    """Return the launches of a capture, those of each job where the newest one is of several."""
    beside, named = launches_beside(store), f"store.path={store}"
    groups = {1: [Launches(beside, store, named)]}
    for folder, job, jobs in job_folders(beside):
        groups.setdefault(jobs, []).append(Launches(folder, store, named, job=job, jobs=jobs))

    def newest(group: Sequence[Launches]) -> float:
        starts = [launch.started for one in group for launch in one.all()]
        return max([*starts, *map(submitted_at, group)])

    return max(groups.values(), key=newest)


def capture_status(store: Path) -> RunStatus:
    """Return the state of a capture, of all its jobs where several write the store.

    Raises ConfigError: none has begun.
    """
    jobs, wanted = _jobs_of(store), None
    begun = sorted((one for job in jobs for one in job.all()), key=lambda one: one.started)
    if not begun and not store.exists() and not any(map(submitted_at, jobs)):
        raise nothing_here(store)
    with suppress(OSError, ValueError, LookupError, TypeError, ZeroDivisionError):
        plan = json.loads((store / "plan.json").read_text(encoding="utf-8"))
        wanted = -(-int(plan["samples"]) // int(plan["samples_per_shard"]))
    done = progress_of(store)
    seconds = _seconds_between(complete_shards(store), begun)
    states = [_state_of_job(store, job, wanted=wanted, shard_seconds=seconds) for job in jobs]
    state, detail = states[0]
    if jobs[0].jobs > 1:
        state, detail = _together(jobs, states, is_whole=wanted is not None and done >= wanted)
    return of_files(
        store, state, detail, done=done, wanted=wanted, seconds=seconds, begun=begun, unit="shard"
    )


def rollout_status(folder: Path) -> RunStatus:
    """Return the state of rollouts into a folder."""
    launches, wanted = Launches(folder / LAUNCHES, folder, f"--output {folder}"), None
    begun, files = launches.all(), complete_parts(folder)
    with suppress(OSError, ValueError, LookupError, TypeError, ZeroDivisionError):
        settings = json.loads((folder / ROLLOUTS).read_text(encoding="utf-8"))["settings"]
        wanted = -(-int(settings["rows"]) // int(settings["part_rows"]))
    seconds = _seconds_between(files, begun)
    state, detail = job_state(
        folder,
        launches,
        begun,
        log=max(files, key=changed, default=folder / ROLLOUTS),
        step=len(files),
        is_done=wanted is not None and len(files) >= wanted,
        step_seconds=seconds,
    )
    return of_files(
        folder,
        state,
        detail,
        done=len(files),
        wanted=wanted,
        seconds=seconds,
        begun=begun,
        unit="part",
    )


def _seconds_between(files: Sequence[Path], begun: Sequence[LaunchRecord]) -> float | None:
    """Return the mean time between the newest files of the newest launch; None: too few."""
    since = begun[-1].started if begun else 0.0
    ends = sorted(time for time in map(changed, files) if time > since)[-_RECENT_FILES:]
    return (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else None


def of_files(
    folder: Path,
    state: str,
    detail: str,
    *,
    done: int,
    wanted: int | None,
    seconds: float | None,
    begun: Sequence[LaunchRecord],
    unit: str,
) -> RunStatus:
    """Return the state of a job whose progress is a number of files."""
    return RunStatus(
        run=str(folder),
        state=state,
        detail=detail,
        step=done,
        steps=wanted,
        step_seconds=seconds,
        tokens_per_second=None,
        seconds_left=None if seconds is None or not wanted else (wanted - done) * seconds,
        checkpoint=None,
        checkpoint_age=None,
        save_seconds=None,
        launches=len(begun),
        restarts=begun[-1].restart if begun else 0,
        slowest_ranks=None,
        unit=unit,
    )


def _state_of_job(
    store: Path, launches: Launches, *, wanted: int | None, shard_seconds: float | None
) -> tuple[str, str]:
    """Return the state of one of the jobs of a capture, from its own shards and launches."""
    job, jobs = launches.job, launches.jobs
    files = complete_shards(store, job=job, jobs=jobs)
    return job_state(
        store,
        launches,
        launches.all(),
        log=max(files, key=changed, default=store / "shards" / "none"),
        step=len(files),
        is_done=wanted is not None and len(files) >= len(range(job, wanted, jobs)),
        step_seconds=None if shard_seconds is None else shard_seconds * jobs,
    )


def _together(
    jobs: Sequence[Launches], states: Sequence[tuple[str, str]], *, is_whole: bool
) -> tuple[str, str]:
    """Return the state of a store that several jobs write; some may never have begun."""
    has = {state for state, _ in states}
    if has == {"done"} and is_whole:
        return "done", ""
    texts = [
        f"job {job.job} of {job.jobs} {state}" + (f" ({detail})" if detail else "")
        for job, (state, detail) in zip(jobs, states, strict=True)
    ]
    return next((one for one in _BY_LIFE if one in has), "stopped"), "; ".join(texts)

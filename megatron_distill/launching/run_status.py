"""The state of a run, a capture, rollouts or an evaluation from files: no process is asked.

Any machine that sees the folder may read it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import yaml

from megatron_distill.errors import ConfigError, counted
from megatron_distill.launching.grace import is_step, newest_records
from megatron_distill.launching.records import (
    LAUNCHES,
    ROLLOUTS,
    Launches,
    LaunchRecord,
    Outcome,
    complete_parts,
    complete_shards,
    job_folders,
    progress_of,
)
from megatron_distill.launching.run_checkpoint import checkpoint_text, read_saved
from megatron_distill.launching.step_figures import (
    slowest_of_teachers,
    slowest_ranks,
    speed,
    why_no_slowest,
)
from megatron_distill.launching.time_left import seconds_left
from megatron_distill.runtime.folder_lock import is_locked, is_released_here
from megatron_distill.runtime.progress import duration

__all__ = ["RunStatus", "read_status"]

_RECENT_FILES: Final = 50
_LEAST_SILENCE: Final = 120.0  # seconds without a sign, from which on a run counts as ended
_SILENT_STEPS: Final = 10.0
# States of jobs side by side: the first that one of them has is that of all.
_BY_LIFE: Final = ("running", "starting", "waiting", "failed", "stopped")
_FOLDERS: Final = (
    "name the folder `output` of a run, `store.path` of a capture, or --output of rollouts"
)
_ERROR: Final = "error: "  # in the log of a job that does not begin


@dataclass(frozen=True)
class RunStatus:
    """The state of a run, a capture or rollouts; times in seconds, None: not known from the files.

    Attributes:
        state: `running`, `starting`, `waiting`, `done`, `stopped` or `failed`.
        detail: about the state, in words.
        step, steps: done, and of the whole run; of a capture its shards, of rollouts their parts.
        step_seconds: median of the newest steps, or mean of the newest shards or parts.
            tokens_per_second: a step's tokens over that time.
        seconds_left: until the end of the last step, shard or part, of a run with what is due then.
        checkpoint: the newest one's name; its age, and the time that its save took. A name without
            an age is of a folder that no start can read.
        launches: number; restarts: of the newest job.
        slowest_ranks: with the phases in which they are slow, see `logging.straggler_interval`.
            slowest_teacher_ranks: the same of each teacher on ranks of its own, by its name.
        slowest_reason: why there are no slowest ranks.
        unit: `step`, `shard` of a capture, `part` of rollouts, or empty: jobs without progress.
        jobs: states of jobs that read the folder, by command, such as `evaluate`.
    """

    run: str
    state: str
    detail: str
    step: int
    steps: int | None
    step_seconds: float | None
    tokens_per_second: float | None
    seconds_left: float | None
    checkpoint: str | None
    checkpoint_age: float | None
    save_seconds: float | None
    launches: int
    restarts: int
    slowest_ranks: str | None
    slowest_teacher_ranks: Mapping[str, str] = field(default_factory=dict)
    unit: str = "step"
    jobs: Mapping[str, str] = field(default_factory=dict)
    slowest_reason: str | None = None

    def lines(self) -> list[str]:
        """Return the state as lines of a name and a text."""
        rows = [("state", _text_of(self.state, self.detail))]
        done = f"{self.step:,}"
        if self.steps and self.step <= self.steps:
            done += f" of {self.steps:,} ({100 * self.step / self.steps:.1f} %)"
        elif self.steps:  # of a later start, or of changed settings
            wanted = "train.steps =" if self.unit == "step" else f"the {self.unit}s planned,"
            done += f", past {wanted} {self.steps:,}"
        if self.unit:
            rows.append((self.unit, done))
        if self.step_seconds is not None:
            speed = f"{self.step_seconds:.3g} s per {self.unit}"
            if self.tokens_per_second is not None:
                speed += f", {self.tokens_per_second:,.0f} tokens/s"
            rows.append(("speed", speed))
        if self.seconds_left is not None:
            rows.append(("left", duration(self.seconds_left)))
        if self.unit == "step":
            text = checkpoint_text(self.checkpoint, self.checkpoint_age, self.save_seconds)
            rows.append(("checkpoint", text))
        if self.launches:
            restarts = counted(self.restarts, "restart")
            rows.append(("launches", f"{self.launches}, with {restarts} of the newest job"))
        if self.unit == "step":
            reason = self.slowest_reason or "logging.straggler_interval"
            rows.append(("slowest", self.slowest_ranks or f"not known ({reason})"))
        for name, slowest in self.slowest_teacher_ranks.items():
            rows.append(("slowest", f"of {name}, {slowest}"))
        rows += self.jobs.items()
        return [self.run, *(f"{name:<11} {text}" for name, text in rows)]


def read_status(run: Path) -> RunStatus:
    """Return the state of a run, a capture, rollouts, or of jobs that read a model's folder.

    Raises ConfigError: the folder is none of these, or this user may not read it.
    """
    try:
        for folder in (run, *run.parents):
            if folder.exists() and not folder.is_dir():
                raise ConfigError(f"{folder}: it is a file; {_FOLDERS}")
        if (run / ROLLOUTS).is_file():
            return _rollout_status(run)
        if (run / "shards").is_dir() or _beside(run).is_dir():
            return _capture_status(run)
        return _run_status(run)
    except OSError as error:
        remedy = "look at the disk, or name another copy of the folder"
        if isinstance(error, PermissionError):
            remedy = "ask the owner of the run for the permission to read its folder"
        raise ConfigError(
            f"{run}: cannot read {error.filename or 'its files'} ({error.strerror}); {remedy}"
        ) from error


def _nothing_here(folder: Path) -> ConfigError:
    return ConfigError(
        f"{folder}: no run has started here (no config.yaml, no launch, no job that Slurm has "
        f"accepted); {_FOLDERS}"
    )


def _run_status(run: Path) -> RunStatus:
    launches = Launches(run / LAUNCHES, run, f"output={run}")
    begun = launches.all()
    settings = _settings(run / "config.yaml")
    readers = _readers(run)
    if settings is None and not begun and launches.submission() is None:
        if readers:
            return _of_readers(run, readers)
        raise _nothing_here(run)
    records = newest_records(run)
    steps = [one for one in records if is_step(one)]
    seconds, tokens_per_second = speed(records)
    saved = read_saved(run, settings or {})
    # The log may have lost its end: what is saved is done.
    step = max([saved.step, *(int(one["step"]) for one in steps)])
    train = (settings or {}).get("train")
    wanted = train.get("steps") if isinstance(train, dict) else None
    wanted = wanted if isinstance(wanted, int) else None
    state, detail = _state(
        run,
        launches,
        begun,
        log=run / "metrics.jsonl",
        step=step,
        is_done=saved.is_done(step, wanted),
        step_seconds=seconds,
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
        jobs={one.command: _text_of(one.state, one.detail) for one in readers},
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
        state, detail = _state(
            path,  # the lock in the run's own folder is of its training
            launches,
            begun,
            log=newest / "rank_00000.err",
            step=0,
            is_done=False,
            step_seconds=None,
        )
        last = max([_submitted_at(launches), *(one.started for one in begun)])
        found.append(_Reader(command, begun, state, detail, last))
    return found


def _of_readers(folder: Path, readers: Sequence[_Reader]) -> RunStatus:
    """Return the state of a folder that is only read: that of the newest job."""
    newest = max(readers, key=lambda one: one.newest)
    found = _of_files(
        folder,
        newest.state,
        newest.detail,
        done=0,
        wanted=None,
        seconds=None,
        begun=newest.begun,
        unit="",
    )
    return replace(found, jobs={one.command: _text_of(one.state, one.detail) for one in readers})


def _text_of(state: str, detail: str) -> str:
    return f"{state}: {detail}" if detail else state


def _beside(store: Path) -> Path:
    """Return the folder of the launches that write a store."""
    return store.with_name(f"{store.name}.{LAUNCHES}")


def _jobs_of(store: Path) -> list[Launches]:
    """Return the launches of a capture, those of each job where the newest one is of several."""
    beside, named = _beside(store), f"store.path={store}"
    groups = {1: [Launches(beside, store, named)]}
    for folder, job, jobs in job_folders(beside):
        groups.setdefault(jobs, []).append(Launches(folder, store, named, job=job, jobs=jobs))

    def newest(group: Sequence[Launches]) -> float:
        starts = [launch.started for one in group for launch in one.all()]
        return max([*starts, *map(_submitted_at, group)])

    return max(groups.values(), key=newest)


def _capture_status(store: Path) -> RunStatus:
    jobs, wanted = _jobs_of(store), None
    begun = sorted((one for job in jobs for one in job.all()), key=lambda one: one.started)
    if not begun and not store.exists() and not any(map(_submitted_at, jobs)):
        raise _nothing_here(store)
    with suppress(OSError, ValueError, LookupError, TypeError, ZeroDivisionError):
        plan = json.loads((store / "plan.json").read_text(encoding="utf-8"))
        wanted = -(-int(plan["samples"]) // int(plan["samples_per_shard"]))
    done = progress_of(store)
    seconds = _seconds_between(complete_shards(store), begun)
    states = [_state_of_job(store, job, wanted=wanted, shard_seconds=seconds) for job in jobs]
    state, detail = states[0]
    if jobs[0].jobs > 1:
        state, detail = _together(jobs, states, is_whole=wanted is not None and done >= wanted)
    return _of_files(
        store, state, detail, done=done, wanted=wanted, seconds=seconds, begun=begun, unit="shard"
    )


def _rollout_status(folder: Path) -> RunStatus:
    launches, wanted = Launches(folder / LAUNCHES, folder, f"--output {folder}"), None
    begun, files = launches.all(), complete_parts(folder)
    with suppress(OSError, ValueError, LookupError, TypeError, ZeroDivisionError):
        settings = json.loads((folder / ROLLOUTS).read_text(encoding="utf-8"))["settings"]
        wanted = -(-int(settings["rows"]) // int(settings["part_rows"]))
    seconds = _seconds_between(files, begun)
    state, detail = _state(
        folder,
        launches,
        begun,
        log=max(files, key=_changed, default=folder / ROLLOUTS),
        step=len(files),
        is_done=wanted is not None and len(files) >= wanted,
        step_seconds=seconds,
    )
    return _of_files(
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
    ends = sorted(time for time in map(_changed, files) if time > since)[-_RECENT_FILES:]
    return (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else None


def _of_files(
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
    return _state(
        store,
        launches,
        launches.all(),
        log=max(files, key=_changed, default=store / "shards" / "none"),
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


def _state(
    run: Path,
    launches: Launches,
    begun: Sequence[LaunchRecord],
    *,
    log: Path,
    step: int,
    is_done: bool | None,
    step_seconds: float | None,
) -> tuple[str, str]:
    """Return state and detail; is_done None: the job is done where no process writes any more."""
    launch = begun[-1] if begun else None
    outcome = None if launch is None else launches.outcome(launch)
    if launch is None or outcome is not None:
        ended = 0.0 if outcome is None else outcome.ended
        submitted = _submitted(launches, after=max(ended, _changed(log)))
        if submitted is not None:
            return submitted
        if launch is not None and outcome is not None and not _is_later(log, outcome):
            return _of_outcome(launch, outcome)
        place = ""
    else:
        place = f"launch {launch.name} on {', '.join(launch.nodes)}"
    if is_done:
        return "done", ""
    files = [log, *(launches.of(launch).glob("rank_*") if launch is not None else ())]
    # Its checks of the nodes take up to a minute, before any rank writes.
    begun_at = 0.0 if launch is None else launch.started
    silence = time.time() - max(begun_at, *(_changed(file) for file in files))
    patience = max(_LEAST_SILENCE, _SILENT_STEPS * (step_seconds or 0.0))
    locks = [lock for lock in (run / ".lock", launches.lock_file) if lock.is_file()]
    is_over = not place and bool(locks) and all(map(is_released_here, locks))
    if any(map(is_locked, locks)) or (silence < patience and not is_over):
        return ("running" if log.is_file() else "starting"), place
    if place:
        return "failed", f"{place} has given no sign for {duration(silence)}"
    return ("done", "") if is_done is None else ("stopped", f"at {launches.unit} {step}")


def _submitted(launches: Launches, *, after: float) -> tuple[str, str] | None:
    """Return the state of a submission to Slurm since `after` that has begun no launch, or None."""
    found = launches.submission()
    if found is None or found.submitted <= after:
        return None
    submitted = found.submitted
    logs = [file for file in launches.folder.glob("log-*.txt") if _changed(file) > submitted]
    if not logs:
        age = duration(max(0.0, time.time() - submitted))
        return "waiting", (
            f"job {', '.join(found.jobs)} submitted {age} ago, no launch since then; "
            f"{_asked_of_slurm(found.jobs)}"
        )
    newest = max(logs, key=_changed)
    lines = newest.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line.partition(_ERROR)[2] for line in lines if _ERROR in line]
    if errors:
        return "failed", f"{errors[-1]} ({newest})"
    if time.time() - _changed(newest) < _LEAST_SILENCE:
        return "starting", str(newest)
    return None


def _asked_of_slurm(jobs: Sequence[str]) -> str:
    """Return how a user asks for jobs, since one that is cancelled in the queue leaves no file."""
    return f"`squeue --jobs={','.join(jobs)}` tells whether it is still in the queue"


def _submitted_at(launches: Launches) -> float:
    found = launches.submission()
    return 0.0 if found is None else found.submitted


def _of_outcome(launch: LaunchRecord, outcome: Outcome) -> tuple[str, str]:
    if outcome.status == "done":
        return "done", ""
    if outcome.next.startswith("goes on"):
        # Only Slurm's jobs have plain numbers.
        asks = f"; {_asked_of_slurm([launch.job])}" if launch.job.isdecimal() else ""
        return "waiting", f"{outcome.reason}: {outcome.next}{asks}"
    state = "stopped" if outcome.status == "unfinished" else "failed"
    return state, f"{outcome.reason}: {outcome.next}"


def _is_later(log: Path, outcome: Outcome) -> bool:
    """Return whether a start without a launch has written since the newest launch ended."""
    return _changed(log) > outcome.ended


def _changed(path: Path) -> float:
    with suppress(FileNotFoundError):
        return path.stat().st_mtime
    return 0.0


def _settings(path: Path) -> Mapping[str, Any] | None:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML ({error}); start the run again") from error
    return found if isinstance(found, dict) else {}

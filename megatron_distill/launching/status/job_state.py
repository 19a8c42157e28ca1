"""The state of a job from its launches, its locks and the age of its newest signs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from megatron_distill.launching.records import Launches, LaunchRecord, Outcome
from megatron_distill.runtime.folder_lock import is_locked, is_released_here
from megatron_distill.runtime.progress import duration

__all__ = ["changed", "job_state", "submitted_at"]

_LEAST_SILENCE: Final = 120.0  # seconds without a sign, from which on a run counts as ended
_SILENT_STEPS: Final = 10.0
_ERROR: Final = "error: "  # in the log of a job that does not begin


def job_state(
    run: Path,
    launches: Launches,
    begun: Sequence[LaunchRecord],
    *,
    log: Path,
    step: int,
    is_done: bool | None,
    step_seconds: float | None,
    pause_seconds: float = 0.0,
) -> tuple[str, str]:
    """Return the state of a job in `run`, and its detail in words.

    log: changes with each step. is_done None: the job is done where no process writes any more.
    pause_seconds: that may pass between two steps, as of a validation.
    """
    launch = begun[-1] if begun else None
    outcome = None if launch is None else launches.outcome(launch)
    if launch is None or outcome is not None:
        ended = 0.0 if outcome is None else outcome.ended
        submitted = _submitted(launches, after=max(ended, changed(log)))
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
    silence = time.time() - max(begun_at, *(changed(file) for file in files))
    patience = max(_LEAST_SILENCE, _SILENT_STEPS * (step_seconds or 0.0)) + pause_seconds
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
    logs = [file for file in launches.folder.glob("log-*.txt") if changed(file) > submitted]
    if not logs:
        age = duration(max(0.0, time.time() - submitted))
        return "waiting", (
            f"job {', '.join(found.jobs)} submitted {age} ago, no launch since then; "
            f"{_asked_of_slurm(found.jobs)}"
        )
    newest = max(logs, key=changed)
    lines = newest.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line.partition(_ERROR)[2] for line in lines if _ERROR in line]
    if errors:
        return "failed", f"{errors[-1]} ({newest})"
    if time.time() - changed(newest) < _LEAST_SILENCE:
        return "starting", str(newest)
    return None


def _asked_of_slurm(jobs: Sequence[str]) -> str:
    """Return how a user asks for jobs, since one that is cancelled in the queue leaves no file."""
    return f"`squeue --jobs={','.join(jobs)}` tells whether it is still in the queue"


def submitted_at(launches: Launches) -> float:
    """Return when the newest submission to Slurm was made, in seconds since the epoch; 0: none."""
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
    return changed(log) > outcome.ended


def changed(path: Path) -> float:
    """Return when a file was written last, in seconds since the epoch; 0: it is not there."""
    with suppress(FileNotFoundError):
        return path.stat().st_mtime
    return 0.0

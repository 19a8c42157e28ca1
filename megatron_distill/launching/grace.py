"""The time that a stop needs, from what earlier jobs measured: steps, validations and saves."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, Final, TypeGuard

from megatron_distill.runtime.atomic_files import replace_file
from megatron_distill.runtime.folder_lock import LAUNCH_VARIABLE

__all__ = [
    "USUAL_SECONDS",
    "LongestStep",
    "grace_seconds",
    "is_number",
    "is_step",
    "measured_looks",
    "newest_records",
    "newest_with",
    "save_seconds",
]

USUAL_SECONDS: Final = 300.0  # of a job that has not measured anything
_LONGEST_STEP: Final = "longest_step.json"
_NOTEWORTHY: Final = 1.1  # times as long as the longest one before
_MARGIN_SECONDS: Final = 60.0  # Slurm may signal a minute early, and processes take time to end
_STEPS: Final = 100
_LAUNCHES: Final = 8  # the last ones that measured: a slow hour does not count for ever
_TAIL_BYTES: Final = 1_000_000


def grace_seconds(measured: Path) -> float | None:
    """Return twice the longest recent step and save and the last validation, and a minute.

    measured: the folder of a run, of a store, or of a command's records, see `Launches.measured`.
    None: nothing is measured.
    """
    steps = [float(one["step_seconds"]) for one in newest_records(measured) if is_step(one)]
    steps = steps or _longest_in(measured)
    if not steps:
        return None
    folders = (measured / "checkpoints").glob("step_*")
    saves = max((save_seconds(folder) or 0.0 for folder in folders), default=0.0)
    validation = newest_with(measured, "validation_seconds").get("validation_seconds")
    needed = max(steps[-_STEPS:]) + (validation if is_number(validation) else 0.0) + saves
    return 2.0 * needed + _MARGIN_SECONDS


class LongestStep:
    """Writes the longest step of a capture or an evaluation into a folder, for later launches."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = folder / _LONGEST_STEP
        self._clock = clock
        self._ended: float | None = None
        self._longest = max(_steps_in(self._file), default=0.0)

    def end_step(self) -> None:
        """Write the time since the step before if it is the longest.

        The first step, which has the start in it, is not measured.
        """
        now = self._clock()
        seconds = 0.0 if self._ended is None else now - self._ended
        self._ended = now
        if seconds > _NOTEWORTHY * self._longest:
            self._longest = seconds
            # Without the file a stop has the usual time; a finished store has no such folder.
            with suppress(OSError):
                replace_file(self._file, json.dumps({"step_seconds": seconds}).encode())


def measured_looks(requested: Callable[[], bool]) -> Callable[[], bool]:
    """Return a look at a request to stop that writes the longest time between two looks.

    For later launches of a command that reads a model, into the records of this one, on its first
    rank. Elsewhere it is the look alone.
    """
    launch = os.environ.get(LAUNCH_VARIABLE)
    if launch is None or os.environ.get("RANK", "0") != "0":
        return requested
    steps = _longest_step(Path(launch))

    def look() -> bool:
        steps.end_step()
        return requested()

    return look


@cache  # one for all models of a command: it also builds the next one between two looks
def _longest_step(folder: Path) -> LongestStep:
    return LongestStep(folder)


def _longest_in(folder: Path) -> list[float]:
    files = [*folder.glob(_LONGEST_STEP), *folder.glob(f"*/{_LONGEST_STEP}")]
    newest = sorted(files, key=_written_at)[-_LAUNCHES:]
    return [one for file in newest for one in _steps_in(file)]


def _written_at(file: Path) -> float:
    with suppress(OSError):
        return file.stat().st_mtime
    return 0.0


def _steps_in(file: Path) -> list[float]:
    with suppress(OSError, ValueError, LookupError, TypeError):
        return [float(json.loads(file.read_text(encoding="utf-8"))["step_seconds"])]
    return []


def newest_with(results: Path, name: str) -> dict[str, Any]:
    """Return the last record of a run's `metrics.jsonl` with a name, however long ago; or none."""
    with (
        suppress(OSError, ValueError),
        (results / "metrics.jsonl").open("rb") as stream,
        mmap(stream.fileno(), 0, access=ACCESS_READ) as log,
    ):
        at = log.rfind(f'"{name}"'.encode())
        if at >= 0:
            line, _, _ = log[log.rfind(b"\n", 0, at) + 1 :].partition(b"\n")
            found = json.loads(line)
            return found if isinstance(found, dict) else {}
    return {}


def newest_records(results: Path) -> list[dict[str, Any]]:
    """Return the newest records of a run's `metrics.jsonl`; none without the file."""
    lacks = (FileNotFoundError, NotADirectoryError)
    with suppress(*lacks), (results / "metrics.jsonl").open("rb") as stream:
        stream.seek(0, 2)
        stream.seek(max(0, stream.tell() - _TAIL_BYTES))
        found = []
        for line in stream.read().split(b"\n"):
            with suppress(ValueError):  # the first line may be cut, the last one half written
                record = json.loads(line)
                if isinstance(record, dict):
                    found.append(record)
        return found
    return []


def is_step(record: Mapping[str, Any]) -> bool:
    """Return whether a record is of a step, with its time."""
    return isinstance(record.get("step"), int) and is_number(record.get("step_seconds"))


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value of a record is a finite number; JSON in Python has others too."""
    return isinstance(value, (int, float)) and math.isfinite(value)


def save_seconds(checkpoint: Path) -> float | None:
    """Return the time that a checkpoint's save took; None: its description does not have it."""
    with suppress(OSError, ValueError, TypeError, AttributeError):
        text = (checkpoint / "description.json").read_text(encoding="utf-8")
        return float(json.loads(text).get("save_seconds"))
    return None

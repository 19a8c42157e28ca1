"""The time that a stop needs: a step, a validation and a save, as the run has measured them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

__all__ = ["USUAL_SECONDS", "grace_seconds", "is_step", "newest_records", "save_seconds"]

USUAL_SECONDS: Final = 300.0  # of a job that has not measured anything
_MARGIN_SECONDS: Final = 60.0  # Slurm may signal a minute early, and processes take time to end
_STEPS: Final = 100
_TAIL_BYTES: Final = 1_000_000


def grace_seconds(results: Path) -> float | None:
    """Return twice the longest recent step, validation and save, and a minute.

    None: nothing is measured.
    """
    records = newest_records(results)
    steps = [float(one["step_seconds"]) for one in records if is_step(one)]
    if not steps:
        return None
    validation = max((float(one.get("validation_seconds", 0.0)) for one in records), default=0.0)
    folders = (results / "checkpoints").glob("step_*")
    saves = max((save_seconds(folder) or 0.0 for folder in folders), default=0.0)
    return 2.0 * (max(steps[-_STEPS:]) + validation + saves) + _MARGIN_SECONDS


def newest_records(results: Path) -> list[dict[str, Any]]:
    """Return the newest records of a run's `metrics.jsonl`; none without the file."""
    with suppress(FileNotFoundError), (results / "metrics.jsonl").open("rb") as stream:
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
    return isinstance(record.get("step"), int) and isinstance(
        record.get("step_seconds"), (int, float)
    )


def save_seconds(checkpoint: Path) -> float | None:
    """Return the time that a checkpoint's save took; None: its description does not have it."""
    with suppress(OSError, ValueError, TypeError, AttributeError):
        text = (checkpoint / "description.json").read_text(encoding="utf-8")
        return float(json.loads(text).get("save_seconds"))
    return None

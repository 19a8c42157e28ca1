"""The time that a stop needs: a step and a save, as the run itself has measured them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

__all__ = ["USUAL_SECONDS", "grace_seconds", "newest_records"]

USUAL_SECONDS: Final = 300.0  # of a job that has not measured anything
_MARGIN_SECONDS: Final = 60.0  # Slurm may signal a minute early, and processes take time to end
_STEPS: Final = 100
_TAIL_BYTES: Final = 1_000_000


def grace_seconds(results: Path) -> float | None:
    """Return twice the longest recent step and save, and a minute; None: nothing is measured."""
    steps = [float(one["step_seconds"]) for one in newest_records(results) if "step_seconds" in one]
    if not steps:
        return None
    saves = max(_save_seconds(results), default=0.0)
    return 2.0 * (max(steps[-_STEPS:]) + saves) + _MARGIN_SECONDS


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


def _save_seconds(results: Path) -> Iterator[float]:
    """Return the times of the saves that the checkpoints' descriptions have."""
    for file in (results / "checkpoints").glob("step_*/description.json"):
        with suppress(OSError, ValueError):
            seconds = json.loads(file.read_text(encoding="utf-8")).get("save_seconds")
            if seconds is not None:
                yield float(seconds)

"""The metrics file of a finished or running run, read back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_distill.errors import DataError

__all__ = ["METRICS_FILE", "RunLog", "Series", "read_run"]

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True)
class Series:
    """One metric over a run: its values, and the tokens trained on up to each of them."""

    tokens: NDArray[np.float64]
    values: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True)
class RunLog:
    """The records of one run in the order of their steps; `label` is how a reader knows it."""

    label: str
    folder: Path
    steps: tuple[Mapping[str, object], ...]
    validations: tuple[Mapping[str, object], ...]

    @property
    def last_step(self) -> int:
        """The number of optimizer steps done."""
        return int(str(self.steps[-1]["step"])) if self.steps else 0

    def training(self, name: str) -> Series:
        """Return one metric of the steps; values that were not finite are left out."""
        return _series((_number(record, "tokens"), _number(record, name)) for record in self.steps)

    def held_out(self, name: str) -> Series:
        """Return one metric of the validations; values that were not finite are left out."""
        tokens_at = {record["step"]: _number(record, "tokens") for record in self.steps}
        # A validation before the first step has no step's record to take its tokens from.
        tokens_at.setdefault(0, 0.0)
        return _series(
            (tokens_at.get(record["step"]), _number(_validation(record), name))
            for record in self.validations
        )

    def last_held_out(self, name: str) -> float | None:
        """Return a metric of the last validation, None where that has no such finite number."""
        return _number(_validation(self.validations[-1]), name) if self.validations else None


def read_run(folder: Path, *, label: str) -> RunLog:
    """Read `folder/metrics.jsonl`; a torn last line, as a running or killed run has, is left out.

    Raises DataError if the file is missing or another line of it is no record.
    """
    path = folder / METRICS_FILE
    if not path.is_file():
        raise DataError(f"{path}: there is no such file; name the output folder of a run")
    steps: list[Mapping[str, object]] = []
    validations: list[Mapping[str, object]] = []
    lines = path.read_bytes().split(b"\n")[:-1]
    for number, line in enumerate(lines, start=1):
        record = _parse(line)
        if record is None:
            raise DataError(f"{path}:{number}: no JSON object with a whole number under `step`")
        (validations if "validation" in record else steps).append(record)
    return RunLog(label, folder, tuple(steps), tuple(validations))


def _parse(line: bytes) -> Mapping[str, object] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    good = isinstance(record, dict) and isinstance(record.get("step"), int)
    return record if good else None


def _validation(record: Mapping[str, object]) -> Mapping[str, object]:
    nested = record["validation"]
    return nested if isinstance(nested, Mapping) else {}


def _number(record: Mapping[str, object], name: str) -> float | None:
    value = record.get(name)
    return float(value) if isinstance(value, (int, float)) else None


def _series(points: Iterator[tuple[float | None, float | None]]) -> Series:
    whole = [
        (tokens, value) for tokens, value in points if tokens is not None and value is not None
    ]
    table = np.array(whole, dtype=np.float64).reshape(-1, 2)
    return Series(table[:, 0], table[:, 1])

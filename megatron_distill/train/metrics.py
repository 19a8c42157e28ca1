"""The metrics of a run: one JSON object per line, and whatever else wants to see each record."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Protocol

from megatron_distill.errors import ConfigError
from megatron_distill.log import get_logger

__all__ = ["JsonLinesSink", "MetricsLog", "MetricsSink", "Record", "flat_scalars", "to_json"]

logger = get_logger(__name__)

Record = Mapping[str, object]
"""Plain values under plain names: `step` always, and under `validation` a record of its own; both
have a record of each source of a blend under `sources`."""


class MetricsSink(Protocol):
    """Something that takes the records of a run, in order."""

    def write(self, record: Record) -> None:
        """Take one record; `record["step"]` is the number of optimizer steps done."""

    def close(self) -> None:
        """Write out what is held back; no record follows."""


class MetricsLog:
    """Hands every record to every sink; rank 0 has the sinks, any other rank has none."""

    def __init__(self, sinks: Sequence[MetricsSink] = ()) -> None:
        self._sinks = tuple(sinks)

    def write(self, record: Record) -> None:
        """Hand `record` to every sink."""
        for sink in self._sinks:
            sink.write(record)

    def close(self) -> None:
        """Close every sink, also when closing one of them fails."""
        sinks, self._sinks = self._sinks, ()
        with ExitStack() as stack:
            for sink in reversed(sinks):
                stack.callback(sink.close)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class JsonLinesSink:
    """Appends records to a file of JSON lines, which holds each step of the run once.

    Opening it drops what a killed run wrote after the checkpoint that is now resumed: the lines of
    steps after `resume_step`, and a torn last line. That happens under another name that then
    replaces the file. Every line is handed to the operating system at once.

    Raises ConfigError when the file cannot be written.
    """

    def __init__(self, path: Path, *, resume_step: int) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                _drop_after(path, resume_step)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise self._unwritable(error) from error

    def write(self, record: Record) -> None:
        """Append one line."""
        try:
            self._file.write(to_json(record) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._unwritable(error) from error

    def close(self) -> None:
        """Close the file; what a full disk refused before is lost, and was an error then."""
        with suppress(OSError):
            self._file.close()

    def _unwritable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"output: cannot write {self._path}: {error.strerror}; free space or set `output` to"
            " a folder that can be written"
        )


def to_json(record: Record) -> str:
    """Return `record` as one line of JSON.

    JSON has no NaN and no infinity: such a value becomes null, and `not_finite` maps its name
    (`validation.ce_loss` for a nested one) to "NaN", "Infinity" or "-Infinity".
    """
    not_finite: dict[str, str] = {}
    plain = _finite(record, "", not_finite)
    if not_finite:
        plain["not_finite"] = not_finite
    return json.dumps(plain, allow_nan=False)


def flat_scalars(record: Record) -> Iterator[tuple[str, float]]:
    """Yield the numbers of `record` under names such as `train/ce_loss`, `validation/ce_loss`.

    What is nested deeper has a longer name: `train/sources/wiki/ce_loss`.
    """
    for name, value in record.items():
        if name != "step":
            yield from _numbers(name if name == "validation" else f"train/{name}", value)


def _numbers(name: str, value: object) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _numbers(f"{name}/{key}", inner)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield name, float(value)


def _finite(record: Record, prefix: str, not_finite: dict[str, str]) -> dict[str, object]:
    plain: dict[str, object] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            plain[name] = _finite(value, f"{prefix}{name}.", not_finite)
        elif isinstance(value, float) and not math.isfinite(value):
            plain[name] = None
            not_finite[prefix + name] = json.dumps(value)
        else:
            plain[name] = value
    return plain


def _drop_after(path: Path, resume_step: int) -> None:
    """Rewrite `path` without the lines of steps after `resume_step` and without damaged lines."""
    lines = path.read_bytes().split(b"\n")
    torn, whole = lines[-1], lines[:-1]
    kept: list[bytes] = []
    damaged: list[int] = []
    for number, line in enumerate(whole, start=1):
        step = _step_of(line)
        if step is None:
            damaged.append(number)
        elif step <= resume_step:
            kept.append(line)
    if damaged:
        logger.warning("%s: dropped lines that are no records: %s", path, damaged)
    if len(kept) == len(whole) and not torn:
        return
    replacement = path.with_name(path.name + ".tmp")
    with replacement.open("wb") as file:
        file.writelines(line + b"\n" for line in kept)
        file.flush()
        os.fsync(file.fileno())
    replacement.replace(path)


def _step_of(line: bytes) -> int | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return step if isinstance(step, int) else None

"""Training runs as child processes, made one after the other: resumed, never repeated."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_distill.errors import ConfigError, StoreError, TrainingError
from megatron_distill.evaluation.report import summarize
from megatron_distill.evaluation.runs import RunLog, read_run
from megatron_distill.runtime.torchrun import run_child, threads_per_process, torchrun_command
from megatron_distill.signals.store import Manifest, Plan

__all__ = ["ChildCapture", "ChildRun", "RunStoppedError", "ask", "make"]


class RunStoppedError(Exception):
    """A signal ended a child before it was done; what it has done is kept."""


@dataclass(frozen=True, kw_only=True)
class Child:
    """One child process: what it is called, how it is started, and when it is done.

    `settings` is its whole configuration as text: it is never continued under other settings.
    Beside its folder `place/name` stand `name.yaml`, those settings, and, once it is finished and
    saved, `name.json`, its summary.
    """

    name: str
    label: str
    place: Path
    script: Path
    arguments: tuple[str, ...]
    settings: str
    processes: int

    @property
    def folder(self) -> Path:
        """The child's output folder."""
        return self.place / self.name

    @property
    def settings_file(self) -> Path:
        """The settings that it was started with."""
        return self.place / f"{self.name}.yaml"

    @property
    def summary_file(self) -> Path:
        """There once the child has done all and saved it."""
        return self.place / f"{self.name}.json"

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do."""
        return self.summary_file.exists()


@dataclass(frozen=True, kw_only=True)
class ChildRun(Child):
    """One training run."""

    steps: int

    @property
    def extent(self) -> str:
        """How much it does, in words."""
        return f"{self.steps} steps"

    def log(self) -> RunLog:
        """Read the run's metrics."""
        return read_run(self.folder, label=self.label)

    def outcome(self, seconds: float) -> Mapping[str, object]:
        """Return the summary; raises RunStoppedError if the last step is not reached."""
        del seconds  # a run has its own, start-up apart
        log = self.log()
        if log.last_step < self.steps:
            raise RunStoppedError(f"{self.label}: stopped at step {log.last_step} of {self.steps}")
        return vars(summarize(log))


@dataclass(frozen=True, kw_only=True)
class ChildCapture(Child):
    """One capture of a teacher, whose folder is the store."""

    samples: int

    @property
    def extent(self) -> str:
        """How much it does, in words."""
        return f"{self.samples} samples"

    def summary(self) -> Mapping[str, Any]:
        """Read the summary of the finished capture."""
        summary: Mapping[str, Any] = json.loads(self.summary_file.read_text(encoding="utf-8"))
        return summary

    def outcome(self, seconds: float) -> Mapping[str, object]:
        """Return the summary; raises RunStoppedError if the store is not finished."""
        plan = Plan.load(self.folder)
        try:
            manifest = Manifest.load(self.folder, plan)
        except StoreError as error:
            raise RunStoppedError(f"{self.label}: {error}") from error
        totals = manifest.totals
        return {
            "label": self.label,
            "tokens": manifest.tokens,
            "bytes_per_token": manifest.file_bytes / manifest.tokens,
            "kept_mass": totals.kept_mass / totals.positions,
            "seconds": seconds,
        }


def claim(child: Child) -> None:
    """Keep the settings of a child beside it; raises ConfigError if they are another's."""
    file = child.settings_file
    try:
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(child.settings)
        before = file.read_text()
    except OSError as error:
        raise ConfigError(
            f"--output {child.place}: cannot write there ({error.strerror}); name another folder"
        ) from error
    if before != child.settings:
        was, now = _first_difference(before, child.settings)
        raise ConfigError(
            f"{file}: that run was started with other settings (there {was!r}, here {now!r}); add"
            " --fresh to throw it away, or name another --output"
        )


def make(child: ChildRun | ChildCapture) -> None:
    """Start or continue a child under torchrun and wait until it has done all.

    Raises ConfigError if it was started with other settings, RunStoppedError if a signal came, and
    TrainingError if it failed.
    """
    claim(child)
    if child.finished:
        return
    started = time.perf_counter()
    _wait_for(
        torchrun_command(str(child.script), child.arguments, processes=child.processes),
        processes=child.processes,
        label=child.label,
    )
    write_json(child.summary_file, child.outcome(time.perf_counter() - started))


def ask(script: Path, arguments: Sequence[str], *, answer: Path) -> str:
    """Return what `script` has written into the file `answer`; it runs if there is none yet.

    Raises RunStoppedError if a signal came, and TrainingError if the script failed.
    """
    if not answer.exists():
        _wait_for([sys.executable, str(script), *arguments], processes=1, label=script.name)
    return answer.read_text(encoding="utf-8")


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write a JSON file that appears under its name only when complete."""
    partial = path.with_name(path.name + ".tmp")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def _wait_for(command: Sequence[str], *, processes: int, label: str) -> None:
    threads = str(threads_per_process(processes))
    outcome = run_child(command, environment={**os.environ, "OMP_NUM_THREADS": threads})
    if outcome.interrupted_by is not None:
        raise RunStoppedError(f"{label}: stopped by a signal")
    if outcome.status != 0:
        raise TrainingError(
            f"{label}: failed with exit status {outcome.status}; its own message stands above"
        )


def _first_difference(before: str, after: str) -> tuple[str, str]:
    pairs = zip(before.splitlines(), after.splitlines(), strict=False)
    different = ((one.strip(), other.strip()) for one, other in pairs if one != other)
    return next(different, ("", "more lines"))

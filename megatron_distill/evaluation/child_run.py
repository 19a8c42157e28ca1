"""Training runs as child processes, made one after the other: resumed, never repeated."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_distill.errors import ConfigError, TrainingError
from megatron_distill.evaluation.report import summarize
from megatron_distill.evaluation.runs import RunLog, read_run
from megatron_distill.runtime.torchrun import run_child, threads_per_process, torchrun_command

__all__ = ["ChildRun", "RunStoppedError", "ask", "make"]


class RunStoppedError(Exception):
    """A signal ended a child before it was done; what it has done is kept."""


@dataclass(frozen=True)
class ChildRun:
    """One training run: what it is called, how it is started, and when it is done.

    `settings` is its whole configuration as text: a run is never continued under other settings.
    Beside the run's folder `place/name` stand `name.yaml`, those settings, and, once the run is
    finished and saved, `name.json`, its summary.
    """

    name: str
    label: str
    place: Path
    script: Path
    arguments: tuple[str, ...]
    settings: str
    steps: int
    processes: int

    @property
    def folder(self) -> Path:
        """The run's output folder."""
        return self.place / self.name

    @property
    def settings_file(self) -> Path:
        """The settings that the run was started with."""
        return self.place / f"{self.name}.yaml"

    @property
    def summary_file(self) -> Path:
        """There once the run has reached its last step and saved it."""
        return self.place / f"{self.name}.json"

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do."""
        return self.summary_file.exists()

    def log(self) -> RunLog:
        """Read the run's metrics."""
        return read_run(self.folder, label=self.label)


def claim(run: ChildRun) -> None:
    """Keep the settings of a run beside it; raises ConfigError if they are another's."""
    file = run.settings_file
    try:
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(run.settings)
        before = file.read_text()
    except OSError as error:
        raise ConfigError(
            f"--output {run.place}: cannot write there ({error.strerror}); name another folder"
        ) from error
    if before != run.settings:
        was, now = _first_difference(before, run.settings)
        raise ConfigError(
            f"{file}: that run was started with other settings (there {was!r}, here {now!r}); add"
            " --fresh to throw it away, or name another --output"
        )


def make(run: ChildRun) -> None:
    """Start or continue a run under torchrun and wait until it has reached its last step.

    Raises ConfigError if the run was started with other settings, RunStoppedError if a signal
    came, and TrainingError if the run failed.
    """
    claim(run)
    if run.finished:
        return
    _wait_for(
        torchrun_command(str(run.script), run.arguments, processes=run.processes),
        processes=run.processes,
        label=run.label,
    )
    log = run.log()
    if log.last_step < run.steps:
        raise RunStoppedError(f"{run.label}: stopped at step {log.last_step} of {run.steps}")
    write_json(run.summary_file, vars(summarize(log)))


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

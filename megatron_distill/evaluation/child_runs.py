"""Training runs and captures as child processes, one after the other; resumed, never repeated."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from megatron_distill.errors import ConfigError, DataError, StoreError, TrainingError, counted
from megatron_distill.evaluation.runs import (
    RunLog,
    read_run,
    summarize,
)
from megatron_distill.runtime.atomic_files import replace_file
from megatron_distill.runtime.torchrun import (
    available_cores,
    run_child,
    threads_per_process,
    torchrun_command,
)
from megatron_distill.store import Manifest, Plan

__all__ = [
    "Child",
    "ChildCapture",
    "ChildRun",
    "Clock",
    "RunStoppedError",
    "announce",
    "ask",
    "check_equal_start",
    "claim",
    "make",
    "processes_here",
    "remove_child",
    "write_json",
]


class RunStoppedError(Exception):
    """A signal ended a child before it was done; its output folder can be resumed."""


@dataclass(frozen=True, kw_only=True)
class Child:
    """One child process: its name, its command line, and its files.

    `settings` is its complete configuration as text; a child is never resumed with other settings.
    Next to its folder `place/name` are `name.yaml`, the settings, and, once it is finished and
    saved, `name.json`, its summary. `note` is shown when it starts.
    """

    name: str
    label: str
    place: Path
    script: Path
    arguments: tuple[str, ...]
    settings: str
    processes: int
    note: str = ""

    @property
    def folder(self) -> Path:
        """The child's output folder."""
        return self.place / self.name

    @property
    def settings_file(self) -> Path:
        """The file of the settings that it was started with."""
        return self.place / f"{self.name}.yaml"

    @property
    def summary_file(self) -> Path:
        """The summary, which exists once the child has finished and saved."""
        return self.place / f"{self.name}.json"

    @property
    def finished(self) -> bool:
        """Whether the child has finished."""
        return self.summary_file.exists()


@dataclass(frozen=True, kw_only=True)
class ChildRun(Child):
    """One training run."""

    steps: int

    @property
    def extent(self) -> str:
        """How much it does, in words."""
        return counted(self.steps, "step")

    def log(self) -> RunLog:
        """Read the run's metrics."""
        return read_run(self.folder, label=self.label)

    def outcome(self, seconds: float) -> Mapping[str, object]:
        """Return the summary; raises RunStoppedError if the last step is not reached."""
        del seconds  # a run measures its own time, without start-up
        log = self.log()
        if log.last_step < self.steps:
            raise RunStoppedError(f"{self.label}: stopped at step {log.last_step} of {self.steps}")
        return vars(summarize(log))


@dataclass(frozen=True, kw_only=True)
class ChildCapture(Child):
    """One capture of a teacher; its folder is the store."""

    samples: int

    @property
    def extent(self) -> str:
        """How much it does, in words."""
        return counted(self.samples, "sample")

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


@dataclass(frozen=True)
class Clock:
    """The time of a call that makes some children and what follows from them.

    is_whole: whether none of them had been started by an earlier call.
    """

    is_whole: bool
    began: float

    @classmethod
    def of(cls, children: Sequence[Child]) -> Clock:
        """Start the clock, before the children."""
        return cls(not any(one.settings_file.exists() for one in children), time.perf_counter())

    @property
    def seconds(self) -> float | None:
        """The seconds until now; None where an earlier call did a part of the work."""
        return time.perf_counter() - self.began if self.is_whole else None


def claim(child: Child) -> None:
    """Write a child's settings next to its folder; raises ConfigError if the file differs."""
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
            f"{file}: that run was started with other settings (it has {was!r}, this "
            f"call has {now!r}); add --fresh to throw it away, or name another --output"
        )


def make(child: ChildRun | ChildCapture) -> None:
    """Start or resume a child under torchrun and wait until it has finished.

    Raises ConfigError if it was started with other settings, RunStoppedError after a signal, and
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


def announce(child: ChildRun | ChildCapture, console: Console, number: str, *, seed: int) -> None:
    """Print a child's label, extent and command, or that it has finished before."""
    console.print(f"\n[bold]{number} {child.label}[/bold] (seed {seed})", end="")
    if child.finished:
        console.print(": finished before")
        return
    console.print(f": {child.extent} in {counted(child.processes, 'process', 'processes')}")
    if child.note:
        console.print(f"  {child.note}", markup=False)
    script = os.path.relpath(child.script)
    call = ["torchrun", f"--nproc-per-node={child.processes}", script, *child.arguments]
    console.print(f"  {shlex.join(call)}", style="dim", markup=False)


def remove_child(child: Child) -> None:
    """Delete the folder and the files of an earlier call."""
    if child.folder.is_dir():
        shutil.rmtree(child.folder)
    child.settings_file.unlink(missing_ok=True)
    child.summary_file.unlink(missing_ok=True)


def processes_here(*, model_ranks: int, micro_batches: int) -> int:
    """Ranks of a run: those of its layout, or on a CPU one per core where it is data parallel.

    micro_batches: of one step, over all ranks.
    """
    if model_ranks > 1 or torch.cuda.is_available():
        return model_ranks
    fitting = range(1, min(available_cores(), micro_batches) + 1)
    return max(ranks for ranks in fitting if micro_batches % ranks == 0)


def ask(script: Path, arguments: Sequence[str], *, answer: Path) -> str:
    """Return the content of the file `answer`; run `script`, which writes it, if it is missing.

    Raises RunStoppedError after a signal, and TrainingError if the script failed.
    """
    if not answer.exists():
        _wait_for([sys.executable, str(script), *arguments], processes=1, label=script.name)
    return answer.read_text(encoding="utf-8")


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write a JSON file that appears under its name only when complete."""
    replace_file(path, (json.dumps(content, indent=1) + "\n").encode())


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


def check_equal_start(alone: RunLog, distilled: RunLog) -> None:
    """Raise DataError unless both students had equal initial weights and numbers of tokens."""
    first = [float(run.training("ce_loss").values[0]) for run in (alone, distilled)]
    tokens = [float(run.training("tokens").values[-1]) for run in (alone, distilled)]
    if abs(first[0] - first[1]) > 1e-3 * abs(first[0]) or tokens[0] != tokens[1]:
        raise DataError(
            f"{alone.folder} and {distilled.folder} cannot be compared: first cross-entropies"
            f" {first[0]:.4f} and {first[1]:.4f}, tokens {tokens[0]:.0f} and {tokens[1]:.0f};"
            " start over with --fresh"
        )

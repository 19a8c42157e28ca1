"""The program of a launch: a command of megatron-distill or a script, and the folders it writes."""

from __future__ import annotations

import argparse
import hashlib
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from megatron_distill.errors import ConfigError
from megatron_distill.launching.checks.node_view import named_paths
from megatron_distill.launching.records import (
    LAUNCHES,
    Launches,
    job_folder,
    launches_beside,
    other_content,
    progress_of,
)

__all__ = ["JobRanks", "NoAnswerError", "Program", "add_folder"]

_CLI: Final = ("-m", "megatron_distill.cli")
# Commands with settings, which show them by --print-config.
_JOBS: Final = ("train", "capture")
# Commands that read the folder of a run or of a model, and the options that name one.
_READERS: Final = ("evaluate", "generate", "evaluate.py", "generate.py")
# A command that reads such a folder, and goes on in one of its own.
_WRITER: Final = "rollout"
_WRITERS: Final = (_WRITER, "rollout.py")
_READ: Final = ("--run", "--hf", "--checkpoint")
# Commands in ranks without a folder that their words name alike.
_OTHERS: Final = ("convert",)
# Commands whose layout is compared with the ranks before these start; scripts do that in the ranks.
_LAID_OUT: Final = (*_JOBS, "evaluate", "generate", _WRITER)
_PREFLIGHT: Final = ("-m", "megatron_distill.commands.preflight")
_SECONDS: Final = 300.0  # an import from a slow shared disk
_ERROR: Final = "error: "
_MISSING: Final = "ModuleNotFoundError: "
_NO_SETTINGS: Final = (
    "a script without --print-config needs --folder, a folder for the records of its launches"
)
_PRUNING: Final = (
    ". Layers are pruned at the start of train: set student.keep_layers or student.num_layers; a "
    "script of your own that prunes is --command prune.py, with --folder for its records"
)


def add_folder(parser: argparse.ArgumentParser) -> None:
    """Add the option of the records' folder, which every way to submit has."""
    parser.add_argument(
        "--folder", metavar="FOLDER",
        help="for the records of a script, of convert, or of a run "
        "or model whose folder cannot be written",
    )  # fmt: skip


class NoAnswerError(ConfigError):
    """The program could not be asked: it has not started, or ended without an error of its own."""

    def __init__(self, command: Sequence[str], reason: str) -> None:
        super().__init__(f"{' '.join(command)}: {reason}")
        self.last_line = reason.splitlines()[-1]


@dataclass(frozen=True)
class JobRanks:
    """The ranks of a job: its nodes with ranks, and those of each; None: one per GPU, else 1."""

    nodes: int
    per_node: int | None = None


@dataclass(frozen=True)
class Program:
    """A command with its words: `train tiny.yaml output=runs/a`, or the path of a script.

    folder: of the records, for a program that does not name one.
    """

    command: str
    words: tuple[str, ...]
    folder: str | None = None

    @classmethod
    def of(cls, words: Sequence[str], folder: str | None = None) -> Program:
        """Read a script or a command, with its words; a configuration alone is one to train.

        Raises ConfigError where there is none.
        """
        if not words:
            raise ConfigError("give a configuration, such as configs/tiny.yaml")
        first = words[0]
        if Path(first).suffix in (".yaml", ".yml"):
            return cls("train", tuple(words), folder)
        return cls(first, tuple(words[1:]), folder)

    @property
    def torchrun_words(self) -> list[str]:
        """The module or script and its words, as torchrun takes them."""
        if self.command.endswith(".py"):
            return [self.command, *self.words]
        return [*_CLI, self.command, *self.words]

    def on_node(
        self,
        launch: Path,
        *,
        endpoint: str,
        stop_seconds: float,
        options: Sequence[str],
        ranks_per_node: int | None,
    ) -> list[str]:
        """Return the words that start the ranks of a node, after its Python.

        launch: the folder of its records. endpoint, stop_seconds, options, ranks_per_node: those of
        `launching.node`.
        """
        words = ["-m", "megatron_distill.launching.node", "--launch", str(launch)]
        words += ["--endpoint", endpoint, "--stop-seconds", str(stop_seconds), *options]
        if ranks_per_node is not None:
            words += ["--ranks-per-node", str(ranks_per_node)]
        return [*words, "--", *self.torchrun_words]

    @property
    def spelled(self) -> list[str]:
        """The command and its words, for records and messages."""
        return [self.command, *self.words]

    def launches(
        self, run: Sequence[str], *, ranks: JobRanks | None = None, sees_results: bool = True
    ) -> Launches:
        """Return the folder of the program's launches; `run` starts Python on a node.

        ranks: that the layout of a command is compared with; None: that is left to the ranks.
        sees_results: whether this machine sees the folder that a command reads, and a script.
        Raises ConfigError: configuration or layout is wrong, with the program's own message;
        NoAnswerError: the program cannot start.
        """
        name = Path(self.command).name
        if name in (*_READERS, *_WRITERS):
            found = self._reading(name.removesuffix(".py"), sees_results=sees_results)
            if ranks is not None and name in _LAID_OUT:
                self._printed([*run, *self._preflight(ranks)])
            return found
        if name not in (*_JOBS, *_OTHERS) and not name.endswith(".py"):
            known = ", ".join((*_JOBS, _WRITER, *_READERS[:2], *_OTHERS))
            hint = _PRUNING if name == "prune" else ""
            raise ConfigError(
                f"{name or repr(name)}: not a command for a cluster; {known} are, and scripts{hint}"
            )
        if name.endswith(".py") and sees_results and not Path(self.command).is_file():
            raise ConfigError(f"{self.command}: there is no such script in {Path.cwd()}")
        if self.folder is not None and name not in _JOBS:
            folder = Path(self.folder)
            return Launches(folder / LAUNCHES, folder, f"--folder {folder}")
        if name in _OTHERS:
            raise ConfigError(f"{name}: give --folder, a folder for the records of its launches")
        return self._settled(run, ranks)

    def _reading(self, name: str, *, sees_results: bool) -> Launches:
        """Return the folder of the launches of a command that reads a run or a model."""
        results = Path(_read_folder(name, self.words))
        if sees_results and not results.is_dir():
            raise ConfigError(
                f"{name} {results}: there is no such folder; give the folder of a run, or of "
                "weights with --hf or --checkpoint"
            )
        if name == _WRITER:  # without .py
            return self._written(results)
        folder = results if self.folder is None else Path(self.folder)
        beside = folder / f"{LAUNCHES}_{name}"
        return Launches(beside, results, f"{name} {results}", paths=(str(results),))

    def _written(self, read: Path) -> Launches:
        """Return the folder of the launches of a command that goes on in its --output."""
        if self.folder is not None:
            raise ConfigError(
                f"--folder {self.folder}: {self.command} keeps its records in its --output; leave "
                "the option out"
            )
        folder = Path(_value_of(("--output",), self.words) or "")
        if not folder.name:
            raise ConfigError(f"{self.command}: give --output, a folder for the texts")
        if (problem := other_content(folder)) is not None:
            raise ConfigError(problem)
        named = _value_of(("--prompts",), self.words)
        step = progress_of(read)
        # Of the model and the prompts as this machine sees them.
        state = [*self.words, str(step)]
        for path in ([] if named is None else [Path(named)]) + ([] if step else [read]):
            with suppress(OSError):
                found = path.stat()
                state += [str(found.st_size), str(found.st_mtime_ns)]
        digest = hashlib.sha256("\0".join(state).encode()).hexdigest()
        paths = tuple(dict.fromkeys([str(read), str(folder), *([named] if named else [])]))
        return Launches(folder / LAUNCHES, folder, f"--output {folder}", digest, paths)

    def _settled(self, run: Sequence[str], ranks: JobRanks | None) -> Launches:
        """Return the folder of the launches of a program that shows its settings."""
        if self.folder is not None:
            raise ConfigError(
                f"--folder {self.folder}: {self.command} keeps its records next to its results; "
                "leave the option out"
            )
        try:
            shown = [*self.torchrun_words, "--print-config"]
            if ranks is not None and self.command in _LAID_OUT:
                shown = self._preflight(ranks)
            text = self._printed([*run, *shown])
            settings = yaml.safe_load(text)
        except NoAnswerError as error:
            if "--print-config" not in error.last_line:
                raise
            raise ConfigError(f"{self.command}: {error.last_line}; {_NO_SETTINGS}") from None
        except yaml.YAMLError:
            settings = None
        if not isinstance(settings, Mapping) and self.command in _JOBS:
            raise ConfigError(
                f"{text.partition(chr(10))[0]!r} comes before the settings of {self.command}: the "
                "login shell of a node writes that; keep ~/.bashrc silent where no terminal is"
            )
        if not isinstance(settings, Mapping):
            raise ConfigError(f"{self.command}: writes no YAML of its settings; {_NO_SETTINGS}")
        digest = hashlib.sha256(text.encode()).hexdigest()
        paths = tuple(dict.fromkeys(named_paths(settings)))
        if "output" in settings:
            folder = Path(str(settings["output"]))
            return Launches(folder / LAUNCHES, folder, f"output={folder}", digest, paths)
        store = settings.get("store")
        if isinstance(store, Mapping) and "path" in store:
            folder = Path(str(store["path"]))
            beside = launches_beside(folder)
            job, jobs = store.get("job", 0), store.get("jobs", 1)
            beside = beside if jobs == 1 else job_folder(beside, job, jobs)
            named = f"store.path={folder}"
            return Launches(beside, folder, named, digest, paths, job=job, jobs=jobs)
        raise ConfigError(f"{self.command}: has neither `output` nor `store.path` in its settings")

    def check_layout(self, run: Sequence[str], *, nodes: int, ranks: int) -> None:
        """Raise ConfigError unless the layout fits so many nodes and ranks of each."""
        self._printed([*run, *self.torchrun_words, "--print-layout", f"{nodes}x{ranks}"])

    def _preflight(self, ranks: JobRanks) -> list[str]:
        """Return the words of the check of settings and layout, which prints the settings."""
        options = ["--nodes", str(ranks.nodes)]
        if ranks.per_node is not None:
            options += ["--ranks-per-node", str(ranks.per_node)]
        return [*_PREFLIGHT, *options, "--", *self.spelled]

    @staticmethod
    def _printed(command: Sequence[str]) -> str:
        """Return what a command prints; raises ConfigError."""
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            reason = f"has not ended within {_SECONDS:.0f} s; look at the disk of the Python "
            raise NoAnswerError(command, f"{reason}environment") from None
        if done.returncode != 0:
            lines = [one for one in done.stderr.splitlines() if not one.startswith("srun:")]
            own = [place for place, line in enumerate(lines) if line.startswith(_ERROR)]
            if own:
                raise ConfigError("\n".join(lines[own[0] :]).removeprefix(_ERROR))
            missing = next((line for line in lines[-1:] if line.startswith(_MISSING)), None)
            if missing is not None:
                reason = f"{missing.removeprefix(_MISSING)}; install it for this Python, or name "
                raise NoAnswerError(command, f"{reason}one that has it")
            last = "\n".join(lines[-5:])
            raise NoAnswerError(command, f"status {done.returncode}: {last}".strip())
        return done.stdout


def _read_folder(name: str, words: Sequence[str]) -> str:
    """Return the folder that a reading command names; raises ConfigError where it names none."""
    found = _value_of(_READ, words)
    if found:
        return found
    if words and not words[0].startswith("-"):
        return words[0]
    raise ConfigError(f"{name}: give the folder of a run first, e.g. runs/first, or --hf DIR")


def _value_of(options: Sequence[str], words: Sequence[str]) -> str | None:
    """Return the value of the last of these options, as argparse does; None: none is given."""
    for place in reversed(range(len(words))):
        option, equals, value = words[place].partition("=")
        if option in options and (equals or place + 1 < len(words)):
            return value if equals else words[place + 1]
    return None

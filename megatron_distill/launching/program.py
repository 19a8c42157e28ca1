"""The program of a launch: a command of megatron-distill or a script, and the folders it writes."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from megatron_distill.errors import ConfigError
from megatron_distill.launching.node_view import named_paths
from megatron_distill.launching.records import LAUNCHES, Launches

__all__ = ["NoAnswerError", "Program"]

_CLI: Final = ("-m", "megatron_distill.cli")
# Commands with settings, which show them by --print-config.
_JOBS: Final = ("train", "capture")
# Commands whose first word is the folder of a run that they read.
_READERS: Final = ("evaluate", "generate", "evaluate.py", "generate.py")
_SECONDS: Final = 300.0  # an import from a slow shared disk
_ERROR: Final = "error: "


class NoAnswerError(ConfigError):
    """The program could not be asked: it has not started, or ended without an error of its own."""

    def __init__(self, command: Sequence[str], reason: str) -> None:
        super().__init__(f"{' '.join(command)}: {reason}")
        self.last_line = reason.splitlines()[-1]


@dataclass(frozen=True)
class Program:
    """A command with its words: `train tiny.yaml output=runs/a`, or the path of a script."""

    command: str
    words: tuple[str, ...]

    @classmethod
    def of(cls, words: Sequence[str]) -> Program:
        """Read a script or a command, with its words; a configuration alone is one to train.

        Raises ConfigError where there is none.
        """
        if not words:
            raise ConfigError("give a configuration, such as configs/tiny.yaml")
        first = words[0]
        if Path(first).suffix in (".yaml", ".yml"):
            return cls("train", tuple(words))
        return cls(first, tuple(words[1:]))

    @property
    def torchrun_words(self) -> list[str]:
        """The module or script and its words, as torchrun takes them."""
        if self.command.endswith(".py"):
            return [self.command, *self.words]
        return [*_CLI, self.command, *self.words]

    @property
    def spelled(self) -> list[str]:
        """The command and its words, for records and messages."""
        return [self.command, *self.words]

    def launches(self, run: Sequence[str]) -> Launches:
        """Return the folder of the program's launches; `run` starts Python on a node.

        Raises ConfigError: the configuration is wrong, with the program's own message;
        NoAnswerError: the program cannot start.
        """
        name = Path(self.command).name
        if name in _READERS:
            folder = Path(self.words[0] if self.words else "runs")
            kind = name.removesuffix(".py")
            return Launches(folder / f"{LAUNCHES}_{kind}", folder, f"{kind} {folder}")
        if name not in _JOBS and not name.endswith(".py"):
            known = ", ".join((*_JOBS, *_READERS[:2]))
            raise ConfigError(f"{name}: is no command for a cluster; {known} are, and scripts")
        text = self._answer(run, "--print-config")
        settings, digest = yaml.safe_load(text), hashlib.sha256(text.encode()).hexdigest()
        assert isinstance(settings, dict), "--print-config writes a mapping"
        paths = tuple(dict.fromkeys(named_paths(settings)))
        if "output" in settings:
            folder = Path(str(settings["output"]))
            return Launches(folder / LAUNCHES, folder, f"output={folder}", digest, paths)
        store = settings.get("store")
        if isinstance(store, Mapping) and "path" in store:
            folder = Path(str(store["path"]))
            beside = folder.with_name(f"{folder.name}.{LAUNCHES}")
            return Launches(beside, folder, f"store.path={folder}", digest, paths)
        raise ConfigError(f"{self.command}: has neither `output` nor `store.path` in its settings")

    def check_layout(self, run: Sequence[str], *, nodes: int, ranks: int) -> None:
        """Raise ConfigError unless the layout fits so many nodes and ranks of each."""
        self._answer(run, "--print-layout", f"{nodes}x{ranks}")

    def _answer(self, run: Sequence[str], *options: str) -> str:
        """Return what the program prints with these options; raises ConfigError."""
        command = [*run, *self.torchrun_words, *options]
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
            last = "\n".join(lines[-5:])
            raise NoAnswerError(command, f"status {done.returncode}: {last}".strip())
        return done.stdout

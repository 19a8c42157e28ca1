"""A command: its arguments, its work and its exit status; an error is one line, no traceback.

No slow import at module level, so that `--help` and wrong arguments are reported at once.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from megatron_distill import log
from megatron_distill.errors import ConfigError, MegatronDistillError
from megatron_distill.launching.standard_output import status_with_output
from megatron_distill.runtime.atomic_files import replace_file
from megatron_distill.runtime.termination import Interruption
from megatron_distill.runtime.torchrun import keep_threads_awake

if TYPE_CHECKING:
    from megatron_distill.config import RunConfig
    from megatron_distill.runtime.launch import Device, Launch

__all__ = [
    "PROGRAM",
    "Command",
    "is_stream",
    "keep_result",
    "model_world",
    "no_file",
    "note",
    "spelled",
    "with_launch",
    "write_result",
]

PROGRAM: Final = "megatron-distill"
ERROR_STATUS: Final = 1
_SIGNALLED: Final = 128  # plus the signal, as in shells
# Paths of descriptors of this process, also where one is redirected to a file.
_DESCRIPTORS: Final = re.compile(r"/dev/(std|fd/)|/proc/[^/]+/(task/[^/]+/)?fd/")

# Command lines in a checkout of the repository, for commands that a message proposes.
SCRIPTS: Final[Mapping[str, str]] = {
    "evaluate": "python launch/evaluate.py",
    "generate": "python launch/generate.py",
    "convert": "python tools/convert_checkpoint.py",
    "store": "python tools/teacher_store.py",
}


class ScriptMain(Protocol):
    """The main function of a script; with None it reads the arguments of the process."""

    def __call__(self, arguments: Sequence[str] | None = None) -> int:
        """Run the command and return its exit status."""
        ...


def _accept(_: argparse.Namespace) -> None:
    """The default check: any combination of valid arguments is valid."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command of `megatron-distill`, which a script may run as well.

    description: text of `megatron-distill COMMAND --help`. run: does the work and returns the exit
    status; a MegatronDistillError ends with 1. check: returns the error of an invalid combination
    of arguments, or None. in_ranks: torchrun may run it in several ranks. has_actions: the first
    argument is an action such as `export`. passes_on: what follows `--` are words of another
    program, unread. tidies_up: SIGTERM and SIGINT let it remove unfinished files. stopped: the line
    after an interruption.
    """

    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    check: Callable[[argparse.Namespace], str | None] = _accept
    in_ranks: bool = False
    has_actions: bool = False
    passes_on: bool = False
    tidies_up: bool = False
    stopped: str = "stopped"

    def script(self, description: str | None) -> ScriptMain:
        """Return the main function of a script with this description."""

        def main(arguments: Sequence[str] | None = None) -> int:
            """Run the command and return its exit status."""
            parser = argparse.ArgumentParser(
                description=description, formatter_class=argparse.RawDescriptionHelpFormatter
            )

            def work() -> int:
                given = self.parse(parser, arguments)
                given.is_script = True
                return self.execute(given)

            return status_with_output(work)

        return main

    def parse(
        self, parser: argparse.ArgumentParser, arguments: Sequence[str] | None
    ) -> argparse.Namespace:
        """Read the arguments; wrong ones end the process with status 2, as argparse does."""
        self.add_arguments(parser)
        parser.set_defaults(is_script=False)
        # Allow options between positional arguments; argparse cannot combine that with actions.
        read = parser.parse_args if self.has_actions else parser.parse_intermixed_args
        given = _read_own(parser, arguments) if self.passes_on else read(arguments)
        objection = self.check(given)
        if objection is not None:
            parser.error(objection)
        return given

    def execute(self, given: argparse.Namespace) -> int:
        """Do the work and return the exit status."""
        log.configure(rank := int(os.environ.get("RANK", "0")))
        keep_threads_awake()
        interruption = Interruption()
        try:
            with interruption if self.tidies_up else nullcontext():
                return self.run(given)
        except MegatronDistillError as error:
            sys.stderr.write(f"error: {error}\n")
            return ERROR_STATUS
        except KeyboardInterrupt as stop:
            if rank == 0:
                sys.stderr.write(f"{self.stopped}\n")
            return interruption.status if interruption.received else _status_of(stop)


def _status_of(stop: KeyboardInterrupt) -> int:
    """Return the status of the signal that an interruption names, by default SIGINT's."""
    number = stop.args[0] if stop.args else signal.SIGINT
    return _SIGNALLED + (number if isinstance(number, int) else signal.SIGINT)


def _read_own(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None
) -> argparse.Namespace:
    """Read the words before `--`, and add those after it to `words` as they are."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    own = words.index("--") if "--" in words else len(words)
    given, unknown = parser.parse_known_intermixed_args(words[:own])
    if unknown:
        parser.error(
            f"unrecognized arguments: {' '.join(unknown)}; options of the submitted command "
            "follow --, as in ... -- --tasks mmlu"
        )
    given.words = [*given.words, *words[own + 1 :]]
    return given


def with_launch(work: Callable[[Launch], None]) -> int:
    """Do work that all ranks share and return the exit status; an error is written once.

    Collective: the whole world, rendezvous.
    """
    from megatron_distill.runtime.launch import Launch

    launch = Launch.from_environment()
    return launch.status_of(lambda: work(launch))


@contextmanager
def model_world(
    launch: Launch, configuration: Callable[[], RunConfig]
) -> Iterator[tuple[RunConfig, Device]]:
    """Read a configuration on all ranks, join them, and yield it with this rank's device.

    Raises a MegatronDistillError on all ranks together.

    Collective: the whole world, rendezvous.
    """
    from megatron_distill.runtime.launch import joined_world

    with launch.together("configuration"):
        config = configuration()
    # Text is written and scored without messages that are launched ahead of what hides them.
    with joined_world(**config.runtime.of_world(), launch=launch) as device:
        yield config, device


def no_file(path: Path | None) -> str | None:
    """Return the error of a file to write, before the work whose result it gets; None: none."""
    try:
        return None if path is None or is_stream(path) else _wrong_place(path)
    except OSError as error:  # a folder on the way that this user may not enter
        return f"{path}: cannot be written ({error.strerror}); name another file"


def _wrong_place(path: Path) -> str | None:
    if path.is_dir():
        return f"{path} is a folder; name a file in it"
    folder = path.resolve().parent if path.is_symlink() else path.parent
    if not folder.is_dir():
        return f"{path}: the folder {folder} is not there; make it"
    if path.exists():
        is_allowed = os.access(path, os.W_OK)
        return None if is_allowed else f"{path}: this file cannot be written; name another file"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{path}: no file can be made in {folder}; name one in another folder"
    # The superuser has every permission, also where the system takes no file, as in /proc.
    with tempfile.TemporaryFile(dir=folder):
        return None


def is_stream(path: Path) -> bool:
    """Whether a path is a pipe, a device or a descriptor of this process, such as /dev/stdout."""
    is_descriptor = _DESCRIPTORS.match(str(path.absolute())) is not None
    return is_descriptor or (path.exists() and not path.is_file() and not path.is_dir())


def write_result(path: Path, text: str) -> None:
    """Write a command's result to a file, whole or not at all, so that an earlier one stays.

    A stream, and a file in a folder that takes no other file, are written in place. Raises
    ConfigError where the system refuses.
    """
    target = path.resolve()  # the file behind a link
    try:
        if is_stream(path) or not os.access(target.parent, os.W_OK | os.X_OK):
            path.write_text(text, encoding="utf-8")
        else:
            replace_file(target, text.encode())
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be written ({error.strerror}); name another file"
        ) from error


def keep_result(path: Path, text: str) -> None:
    """Write a result as `write_result`; where that fails, to standard output before it raises."""
    try:
        write_result(path, text)
    except ConfigError as error:
        sys.stdout.write(text.removesuffix("\n") + "\n")
        raise ConfigError(f"{error}. Standard output has its content instead") from error


def spelled(given: argparse.Namespace, command: str) -> str:
    """Return a command's spelling: a script's path or `megatron-distill COMMAND`, as called."""
    return SCRIPTS[command] if given.is_script else f"{PROGRAM} {command}"


def note(launch: Launch, *lines: str) -> None:
    """Write lines to standard error on the first rank; standard output is for results."""
    if launch.rank == 0:
        sys.stderr.write("".join(f"{line}\n" for line in lines))

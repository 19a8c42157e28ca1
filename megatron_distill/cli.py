"""The program `megatron-distill`: a table of commands, each imported only when it is chosen."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Final

from megatron_distill import __version__
from megatron_distill.commands.command import PROGRAM, Command
from megatron_distill.launching.option_numbers import whole_number
from megatron_distill.launching.standard_output import status_with_output

__all__ = ["main"]

MODULE: Final = "megatron_distill.cli"
USAGE_STATUS: Final = 2
SIGINT_STATUS: Final = 130


@dataclass(frozen=True)
class Entry:
    """A line of the table: its summary, and the module that holds the command as COMMAND."""

    summary: str
    module: str

    def load(self) -> Command:
        """Import the command."""
        command: Command = import_module(f"megatron_distill.commands.{self.module}").COMMAND
        return command


@dataclass(frozen=True)
class Group:
    """A line of the table that stands for a table of its own."""

    summary: str
    entries: Mapping[str, Entry]


DATA: Final = Group(
    "preview samples, tokenise a corpus, map vocabularies",
    {
        "preview": Entry("show the samples of a run, coloured by mask", "preview"),
        "tokenize": Entry("write a corpus as token ids, once", "tokenize"),
        "vocabulary-map": Entry(
            "build, inspect or verify a map of two tokenizers", "vocabulary_map"
        ),
    },
)
SUBMIT: Final = Group(
    "start a job on a cluster",
    {
        "slurm": Entry("write a batch script, submit it, print the job's number", "submit_slurm"),
        "kubernetes": Entry("write the manifest of a JobSet", "submit_kubernetes"),
        "ssh": Entry("run a job on machines without a scheduler", "submit_ssh"),
    },
)
COMMANDS: Final[Mapping[str, Entry | Group]] = {
    "train": Entry("train a student, with a teacher or without", "train"),
    "plan": Entry("layouts that fit a number of devices, with time and memory", "plan"),
    "calibrate": Entry("measure this machine for plan, or refine a device by a run", "calibrate"),
    "capture": Entry("run a teacher once and store its outputs", "capture"),
    "evaluate": Entry("held-out losses of a trained student, or results of tasks", "evaluate"),
    "generate": Entry("text from a trained student or a Hugging Face folder", "generate"),
    "rollout": Entry("texts of a model for a file of prompts, as data to train on", "rollout"),
    "convert": Entry("Hugging Face weights to checkpoints, and back", "convert"),
    "store": Entry("inspect, verify, repair or convert a teacher store", "store"),
    "data": DATA,
    "submit": SUBMIT,
    "status": Entry("state, step, speed and time left of a run, from its files", "status"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the first words name and return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return status_with_output(lambda: _main(words))
    except KeyboardInterrupt:  # while modules are imported; a command has a line of its own
        sys.stderr.write("stopped\n")
        return SIGINT_STATUS


def _main(words: Sequence[str]) -> int:
    program = argparse.ArgumentParser(prog=PROGRAM, add_help=False, allow_abbrev=False)
    program.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    program.parse_known_args(words[:1])
    return _choose(COMMANDS, words, path=())


def _choose(
    table: Mapping[str, Entry | Group] | Mapping[str, Entry],
    words: Sequence[str],
    *,
    path: tuple[str, ...],
) -> int:
    name = " ".join((PROGRAM, *path))
    if not words or words[0] in ("-h", "--help", "help"):
        (sys.stdout if words else sys.stderr).write(_table_text(table, name))
        return 0 if words else USAGE_STATUS
    found = table.get(words[0])
    if found is None:
        near = difflib.get_close_matches(words[0], table, n=1)
        guess = f"did you mean {near[0]}? The" if near else "the"
        sys.stderr.write(
            f"{name}: {words[0]!r} is not a command; {guess} commands are {', '.join(table)}\n"
        )
        return USAGE_STATUS
    path = (*path, words[0])
    if isinstance(found, Group):
        return _choose(found.entries, words[1:], path=path)
    return _run(found.load(), words[1:], path=path)


def _table_text(table: Mapping[str, Entry | Group] | Mapping[str, Entry], name: str) -> str:
    lines = [f"usage: {name} COMMAND ...", ""]
    width = max(9, *map(len, table))
    lines += [f"  {command:<{width}} {entry.summary}" for command, entry in table.items()]
    return "\n".join([*lines, "", f"{name} COMMAND --help lists the arguments of a command.", ""])


def _run(command: Command, words: Sequence[str], *, path: tuple[str, ...]) -> int:
    """Run one command, here or in ranks that this process starts."""
    parser = argparse.ArgumentParser(
        prog=" ".join((PROGRAM, *path)),
        description=command.description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    processes: int | None = None
    if command.in_ranks:
        processes, words = _without_processes(parser, words)
    given = command.parse(parser, words)
    if processes is None or processes == 1:
        return command.execute(given)
    from megatron_distill.runtime.torchrun import run_ranks

    return run_ranks(MODULE, [*path, *words], processes=processes)


def _without_processes(
    parser: argparse.ArgumentParser, words: Sequence[str]
) -> tuple[int | None, Sequence[str]]:
    """Return the number of ranks to start, and the words without it, wherever it stands."""
    parser.add_argument(
        "--processes",
        type=whole_number("2"),
        metavar="N",
        help="start N ranks on this machine; not in torchrun",
    )
    option = argparse.ArgumentParser(prog=parser.prog, add_help=False, allow_abbrev=False)
    option.add_argument("--processes", type=whole_number("2"))
    found, others = option.parse_known_args(words)
    if found.processes is None:
        return None, words
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        parser.error(
            f"--processes {found.processes}: torchrun has started this process already (rank "
            f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']}); leave --processes out"
        )
    if found.processes < 1:
        parser.error(f"--processes {found.processes}: must be 1 or more")
    return found.processes, others


if __name__ == "__main__":
    sys.exit(main())

"""The batch script of a submission to Slurm, complete and readable by itself."""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import megatron_distill
from megatron_distill.errors import ConfigError
from megatron_distill.launching.grace import USUAL_SECONDS, grace_seconds
from megatron_distill.launching.program import Program
from megatron_distill.launching.records import Launches, bad_nodes

__all__ = [
    "LONGEST_WARNING",
    "Demand",
    "asks_for_cores",
    "batch_script",
    "limit_seconds",
    "option_objection",
    "python_path",
]

LONGEST_WARNING: Final = 65_535  # seconds before the limit, of sbatch --signal

# The forms of a time limit that sbatch takes, as `time` of its manual lists them. It would also
# take 24:90, as 25 minutes and a half: its author meant other fields.
_SIXTIETHS: Final = r"0*[0-5]?\d"
_LIMIT: Final = re.compile(
    rf"(?P<minutes>\d+)(:(?P<seconds>{_SIXTIETHS}))?"
    rf"|(?P<h>\d+):(?P<m>{_SIXTIETHS}):(?P<s>{_SIXTIETHS})"
    rf"|(?P<days>\d+)-(?P<hours>\d+)(:(?P<min>{_SIXTIETHS})(:(?P<sec>{_SIXTIETHS}))?)?",
    re.ASCII,
)
_MOST_SECONDS: Final = 2**31 - 1  # of Slurm's integers
_NO_REQUEUE: Final = "--no-requeue"
_UNLIMITED: Final = ("INFINITE", "UNLIMITED")
_INSTALLED: Final = ("site-packages", "dist-packages")
# Characters that sbatch takes in a line of #SBATCH as they are.
_PLAIN: Final = re.compile(r"[\w@%+=:,./\[\]*?~^-]*", re.ASCII)
_LETTERS: Final = {
    "J": "job-name", "N": "nodes", "n": "ntasks", "t": "time", "p": "partition", "A": "account",
    "q": "qos", "G": "gpus", "c": "cpus-per-task", "a": "array", "d": "dependency", "o": "output",
    "D": "chdir", "x": "exclude",
}  # fmt: skip
# Options that a submission has itself, and those that its batch script needs as they are.
_OWN: Final = (
    "job-name", "nodes", "time", "partition", "account", "qos", "gpus-per-node", "cpus-per-task",
    "array", "no-requeue",
)  # fmt: skip
_FIXED: Final = {
    "ntasks": "a node has one task, which starts its ranks",
    "ntasks-per-node": "a node has one task, which starts its ranks",
    "signal": "set --grace-seconds for an earlier warning",
    "output": "the job's log is next to its records",
    "open-mode": "launches write one log after the other",
    "chdir": "the job works in the folder of the submission",
    "requeue": "a job is requeued without it",
}
# Options that allot a node's one task more cores than one.
_CORES: Final = ("cpus-per-task", "cpus-per-gpu", "mincpus")


@dataclass(frozen=True)
class Demand:
    """The demands of a job on Slurm; None: as the cluster has it.

    Attributes:
        spare: nodes beyond `nodes`, of which the checks may exclude some.
        options: further ones of sbatch, as it takes them.
        gpus_per_node: a number, or a type and a number as a100:8.
        chain: jobs that follow each other, under one name; 1: one job that requeues itself.
        array: tasks that follow each other; 1: none.
        rules: options of `launching.slurm_job`.
        variables: of the environment of the ranks.
    """

    name: str
    nodes: int
    spare: int = 0
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    gpus_per_node: str | None = None
    cpus_per_task: int | None = None
    options: Sequence[str] = ()
    chain: int = 1
    array: int = 1
    rules: Sequence[str] = field(default=())
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def requeues(self) -> bool:
        """Whether a job goes on by itself; a chain and an array have their next job instead."""
        return self.chain == 1 and self.array == 1 and _NO_REQUEUE not in self.rules


def batch_script(
    demand: Demand,
    program: Program,
    launches: Launches,
    *,
    submission: str,
    grace: float | None,
) -> str:
    """Return the text of the script.

    submission: a name that the launches of this submission share. grace: seconds of the save
    before the time limit; None: as the run has measured it. Raises ConfigError: the time limit
    leaves no time for a step, or Slurm cannot write to a path.
    """
    # A line break in a word would end the comment, and with it the part that sbatch reads.
    comment = " ".join(shlex.join(program.spelled).split())
    excluded = [one.node for one in bad_nodes(launches.folder)]
    lines = ["#!/usr/bin/env bash", f"# {comment}", *_demands(demand, excluded)]
    warned = grace or grace_seconds(launches.measured) or USUAL_SECONDS
    limit = None if demand.time is None else limit_seconds(demand.time)
    if limit is not None and limit <= warned:
        raise ConfigError(
            f"--time {demand.time}: is {limit:,.0f} s for Slurm, and the save before the limit "
            f"takes {math.ceil(warned):,} of them. Ask for more, as 24:00:00 for a day, or set "
            "--grace-seconds"
        )
    # Where more was measured, the job stops by its own clock before the signal.
    lines.append(f"#SBATCH --signal=B:USR1@{min(math.ceil(warned), LONGEST_WARNING)}")
    place = "%A_%a" if demand.array > 1 else "%j"
    folder = _writable(launches.folder.resolve()).replace("%", "%%")
    lines += [
        "#SBATCH --open-mode=append",
        _line("output", f"{folder}/log-{place}.txt"),
        _line("chdir", _writable(Path.cwd())),
        "",
        "set -euo pipefail",
    ]
    # srun hands them on by --export=ALL.
    lines += [f"export {name}={shlex.quote(text)}" for name, text in demand.variables.items()]
    path = python_path()
    if path is not None:
        lines.append(f"export PYTHONPATH={shlex.quote(path)}${{PYTHONPATH:+:$PYTHONPATH}}")
    rules = [*demand.rules, "--submission", submission, "--wanted-nodes", str(demand.nodes)]
    if not demand.requeues and _NO_REQUEUE not in rules:
        rules.append(_NO_REQUEUE)
    words = [sys.executable, "-m", "megatron_distill.launching.slurm_job", *rules, "--"]
    lines += [
        "trap '' USR1 # until Python handles it",
        f"exec {shlex.join([*words, *program.spelled])}",
        "",
    ]
    return "\n".join(lines)


def limit_seconds(text: str) -> float | None:
    """Return the seconds of a time limit as sbatch reads it; None: there is none.

    Raises ConfigError: sbatch would refuse it, or read other numbers than its author meant.
    """
    if text.upper() in _UNLIMITED:
        return None
    given, found = f"--time {shlex.quote(text)}", _LIMIT.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"{given}: sbatch takes minutes, minutes:seconds, hours:minutes:seconds, days-hours, "
            "days-hours:minutes, days-hours:minutes:seconds or UNLIMITED, with minutes and "
            "seconds below 60 behind another number; write 24:00:00 or 1-0 for a day"
        )
    of = {name: int(value or 0) for name, value in found.groupdict().items()}
    hours = 24 * of["days"] + of["hours"] + of["h"]
    minutes = 60 * hours + of["minutes"] + of["m"] + of["min"]
    seconds = 60.0 * minutes + of["seconds"] + of["s"] + of["sec"]
    if seconds > _MOST_SECONDS:
        raise ConfigError(
            f"{given}: is more than the 68 years that Slurm counts; write UNLIMITED for no limit"
        )
    return seconds or None  # sbatch takes zero for no limit


def option_objection(option: str) -> str | None:
    """Return why a further option of sbatch is refused, None if it is not."""
    name, value = _parts(option)
    if not option.startswith("-") or not name:
        return f"--sbatch {option}: write it as sbatch takes it, --sbatch=--{option}"
    if re.search(r"(^|\s)-\D", value) or "\n" in option:
        return f"--sbatch {option}: give one option, and repeat --sbatch for the next"
    if name in _OWN:
        text = f"write --{name}" + (f" {value}" if value else "")
        return f"--sbatch {option}: submit has this option itself; {text}"
    if name in _FIXED:
        return f"--sbatch {option}: the batch script sets --{name}; {_FIXED[name]}"
    return None


def asks_for_cores(options: Sequence[str]) -> bool:
    """Return whether further options of sbatch allot a node's task more cores than one."""
    found = dict(map(_parts, options))
    # With a value, as --exclusive=user, a job shares nodes, and has the cores that it asks for.
    return found.get("exclusive") == "" or not found.keys().isdisjoint(_CORES)


def _parts(option: str) -> tuple[str, str]:
    """Return the long name of an option of sbatch, and its value."""
    if option.startswith("--"):
        name, _, value = option[2:].replace("=", " ", 1).partition(" ")
        return name, value
    letter, value = option[1:2], option[2:].lstrip(" =")
    return _LETTERS.get(letter, letter), value


def _line(name: str, value: str) -> str:
    """Return a line of #SBATCH; sbatch reads quotes and backslashes as a shell does."""
    if _PLAIN.fullmatch(value) is None:
        value = '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return f"#SBATCH --{name}={value}"


def _demands(demand: Demand, excluded: Sequence[str]) -> list[str]:
    """Return the lines of Slurm's options; the last of two with one name would replace the first.

    excluded: bad nodes.
    """
    dependencies = ["singleton"] if demand.chain > 1 else []
    nodes = sorted(set(excluded))
    further = []
    for option in demand.options:
        name, value = _parts(option)
        if name == "exclude":
            nodes.append(value)
        elif name == "dependency":
            dependencies.append(value)
        else:
            is_long = re.match(r"--[\w-]+=", option) is not None
            further.append(_line(name, value) if is_long else f"#SBATCH {option}")
    given = {
        "job-name": demand.name,
        "nodes": demand.nodes + demand.spare,
        "ntasks-per-node": 1,
        "time": demand.time,
        "partition": demand.partition,
        "account": demand.account,
        "qos": demand.qos,
        "gpus-per-node": demand.gpus_per_node,
        "cpus-per-task": demand.cpus_per_task,
        "dependency": ",".join(dependencies) or None,
        "array": f"1-{demand.array}%1" if demand.array > 1 else None,
        "exclude": ",".join(nodes) or None,
    }
    lines = [_line(key, str(value)) for key, value in given.items() if value is not None]
    lines.append("#SBATCH --requeue" if demand.requeues else "#SBATCH --no-requeue")
    return lines + further


def _writable(path: Path) -> str:
    """Return a path for a line of #SBATCH."""
    text = str(path)
    if "\\" in text or "\n" in text:
        raise ConfigError(
            f"{text!r}: Slurm replaces no job number in a path with a backslash or a line break; "
            "rename the folder"
        )
    return text


def python_path() -> str | None:
    """Return the folder that nodes import the package from; None where it is installed."""
    assert megatron_distill.__file__ is not None
    parent = Path(megatron_distill.__file__).resolve().parent.parent
    return None if parent.name in _INSTALLED else str(parent)

"""The batch script of a submission to Slurm, complete and readable by itself."""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import megatron_distill
from megatron_distill.errors import ConfigError
from megatron_distill.launching.grace import USUAL_SECONDS, grace_seconds
from megatron_distill.launching.program import Program
from megatron_distill.launching.records import Launches, bad_nodes

__all__ = ["Demand", "batch_script", "limit_seconds", "python_path"]

# The forms of a time limit that sbatch takes, as `time` of its manual lists them.
_LIMIT: Final = re.compile(
    r"(?P<minutes>\d+)(:(?P<seconds>\d+))?|(?P<h>\d+):(?P<m>\d+):(?P<s>\d+)"
    r"|(?P<days>\d+)-(?P<hours>\d+)(:(?P<min>\d+)(:(?P<sec>\d+))?)?"
)
_UNLIMITED: Final = ("0", "INFINITE", "UNLIMITED")
_INSTALLED: Final = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class Demand:
    """The demands of a job on Slurm; None: as the cluster has it.

    Attributes:
        spare: nodes beyond `nodes`, of which the checks may exclude some.
        options: further ones of sbatch, as it takes them.
        chain: jobs that follow each other, under one name; 1: one job that requeues itself.
        array: tasks that follow each other; 1: none.
        rules: options of `launching.slurm_job`.
    """

    name: str
    nodes: int
    spare: int = 0
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    gpus_per_node: int | None = None
    cpus_per_task: int | None = None
    options: Sequence[str] = ()
    chain: int = 1
    array: int = 1
    rules: Sequence[str] = field(default=())

    @property
    def requeues(self) -> bool:
        """Whether a job goes on by itself; a chain and an array have their next job instead."""
        return self.chain == 1 and self.array == 1


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
    leaves no time for a step, or a path has a space.
    """
    lines = ["#!/usr/bin/env bash", f"# {' '.join(program.spelled)}", *_demands(demand)]
    warned = grace or grace_seconds(launches.results) or USUAL_SECONDS
    limit = None if demand.time is None else limit_seconds(demand.time)
    if limit is not None and limit <= warned:
        raise ConfigError(
            f"--time {demand.time}: is {limit:,.0f} s for Slurm, and the save before the limit "
            f"takes {math.ceil(warned):,} of them; ask for more time, as 24:00:00 for a day, or "
            "set --grace-seconds"
        )
    lines.append(f"#SBATCH --signal=B:USR1@{math.ceil(warned)}")
    excluded = sorted({one.node for one in bad_nodes(launches.folder)})
    if excluded:
        lines.append(f"#SBATCH --exclude={','.join(excluded)}")
    place = "%A_%a" if demand.array > 1 else "%j"
    lines += [
        "#SBATCH --open-mode=append",
        f"#SBATCH --output={_unspaced(launches.folder.resolve() / f'log-{place}.txt')}",
        f"#SBATCH --chdir={_unspaced(Path.cwd())}",
        "",
        "set -euo pipefail",
    ]
    path = python_path()
    if path is not None:
        lines.append(f"export PYTHONPATH={shlex.quote(path)}${{PYTHONPATH:+:$PYTHONPATH}}")
    rules = [*demand.rules, "--submission", submission, "--wanted-nodes", str(demand.nodes)]
    rules += [] if demand.requeues else ["--no-requeue"]
    words = [sys.executable, "-m", "megatron_distill.launching.slurm_job", *rules, "--"]
    lines += [
        "trap '' USR1 # until Python handles it",
        f"exec {shlex.join([*words, *program.spelled])}",
        "",
    ]
    return "\n".join(lines)


def limit_seconds(text: str) -> float | None:
    """Return the seconds of a time limit as sbatch reads it; None: there is none.

    Raises ConfigError: sbatch would refuse it.
    """
    if text.upper() in _UNLIMITED:
        return None
    found = _LIMIT.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"--time {text}: sbatch takes minutes, minutes:seconds, hours:minutes:seconds, or "
            "days-hours; write 24:00:00 or 1-0 for a day"
        )
    of = {name: int(value or 0) for name, value in found.groupdict().items()}
    hours = 24 * of["days"] + of["hours"] + of["h"]
    minutes = 60 * hours + of["minutes"] + of["m"] + of["min"]
    return 60.0 * minutes + of["seconds"] + of["s"] + of["sec"]


def _demands(demand: Demand) -> list[str]:
    """Return the lines of Slurm's options."""
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
        "dependency": "singleton" if demand.chain > 1 else None,
        "array": f"1-{demand.array}%1" if demand.array > 1 else None,
    }
    lines = [f"#SBATCH --{key}={value}" for key, value in given.items() if value is not None]
    lines.append("#SBATCH --requeue" if demand.requeues else "#SBATCH --no-requeue")
    return lines + [f"#SBATCH {option}" for option in demand.options]


def _unspaced(path: Path) -> str:
    """Return a path for a line of #SBATCH, which ends at a space."""
    text = str(path)
    if " " in text:
        raise ConfigError(f"{text}: Slurm's script takes no path with a space; rename the folder")
    return text


def python_path() -> str | None:
    """Return the folder that nodes import the package from; None where it is installed."""
    assert megatron_distill.__file__ is not None
    parent = Path(megatron_distill.__file__).resolve().parent.parent
    return None if parent.name in _INSTALLED else str(parent)

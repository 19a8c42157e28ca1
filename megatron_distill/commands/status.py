"""The state of a run, from the files of its folder."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from megatron_distill.commands.command import ERROR_STATUS, Command
from megatron_distill.errors import ConfigError


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="folder `output` of a run, a store, or rollouts"
    )
    parser.add_argument("--json", action="store_true", help="one object per run and line")


def _run(given: argparse.Namespace) -> int:
    from megatron_distill.launching.status.read import read_status

    shown = 0
    for name in given.runs:
        try:
            status = read_status(Path(name))
        except ConfigError as error:  # the rest of runs/* is shown
            sys.stderr.write(f"error: {error}\n")
            continue
        if given.json:
            sys.stdout.write(f"{json.dumps(asdict(status))}\n")
        else:
            lines = ["", *status.lines()] if shown else status.lines()
            sys.stdout.write("".join(f"{line}\n" for line in lines))
        shown += 1
    return 0 if shown == len(given.runs) else ERROR_STATUS


COMMAND = Command(
    description="""Show the state of a run: step, speed, time left, checkpoint and slowest ranks.

    megatron-distill status runs/a
    megatron-distill status runs/* --json
    megatron-distill status stores/a rollouts/a

Reads the files of the run's folder alone, on any machine.""",
    add_arguments=_add_arguments,
    run=_run,
)

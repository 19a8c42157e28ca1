"""torchrun for the ranks of one node of a launch: a file per rank, and the node's outcome.

`launching.node` starts it as a child process: the launch's folder, the node's name, its place among
the nodes, their addresses with commas between them, then torchrun's arguments.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final
from unittest.mock import patch

import psutil
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher import api as launcher
from torch.distributed.run import config_from_args, parse_args
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

from megatron_distill.launching.records import (
    LOST_PEER,
    LOST_RENDEZVOUS,
    NodeOutcome,
    Status,
    write_record,
)
from megatron_distill.runtime.folder_lock import LAUNCH_VARIABLE
from megatron_distill.runtime.local_ranks import FirstFailure, first_failure
from megatron_distill.runtime.lone_failure import LOST_PEER_STATUS, unfinished_file

__all__ = ["main", "rank_file"]

CONSOLE_RANK: Final = "0"
# Of errors that a user repairs, the one that another launch may get past.
_TRIED_AGAIN: Final = "TrainingError"
# Ranks leave together. A node with a failed rank does not come to torchrun's last barrier, where
# the others would wait for five minutes: longer than schedulers leave a cancelled job.
_LAST_BARRIER_SECONDS: Final = 15.0


def rank_file(folder: Path, rank: int) -> Path:
    """Return the files of a rank without their suffix."""
    return folder / f"rank_{rank:05d}"


class RankLogs(LogsSpecs):
    """The streams of each rank in two files; those of rank 0 go to the job's log as well."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self._folder = folder
        self.error_files: list[str] = []

    @property
    def root_log_dir(self) -> str:
        """The folder of the launch."""
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the files of this node's ranks."""
        logs = LogsDest(filtered_stdout=os.devnull, filtered_stderr=os.devnull)
        for local_rank, environment in envs.items():
            base = rank_file(self._folder, int(environment["RANK"]))
            logs.stdouts[local_rank] = str(base.with_suffix(".out"))
            logs.stderrs[local_rank] = str(base.with_suffix(".err"))
            if environment["RANK"] == CONSOLE_RANK:
                logs.tee_stdouts[local_rank] = logs.stdouts[local_rank]
                logs.tee_stderrs[local_rank] = logs.stderrs[local_rank]
            logs.error_files[local_rank] = str(base.with_suffix(".json"))
            environment[LAUNCH_VARIABLE] = str(self._folder)
            environment["TORCHELASTIC_ERROR_FILE"] = logs.error_files[local_rank]
        # A JobSet that is applied again has the launches' names of the one before.
        for file in logs.error_files.values():
            Path(file).unlink(missing_ok=True)
            unfinished_file(file).unlink(missing_ok=True)
        self.error_files = list(logs.error_files.values())
        return logs


def main(arguments: Sequence[str]) -> int:
    """Run the ranks to their end, record the node's outcome, and return 0."""
    folder, node, index = Path(arguments[0]), arguments[1], int(arguments[2])
    logging.disable(logging.ERROR)  # torchrun logs the failed process, not the reason
    # `launching.node` tells the ranks of a stop. A scheduler may signal every process.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, _leave_to_ranks)
    # Without its parent the outcome would have no record; the ranks then save and leave.
    _prctl_pr_set_pdeathsig(signal.SIGKILL)
    found = _run(folder, arguments[3].split(","), arguments[4:])
    outcome = NodeOutcome(node, index, *found)
    write_record(folder / "nodes" / f"{index}.json", outcome)
    return 0


def _run(
    folder: Path, addresses: Sequence[str], words: Sequence[str]
) -> tuple[Status, float, int | None, int, str | None]:
    """Run torchrun; return status, time, first failed rank, order and message."""
    config, program, program_arguments = config_from_args(parse_args(list(words)))
    logs = RankLogs(folder)
    config.logs_specs, config.log_line_prefix_template = logs, " "
    agent = partial(launcher.LocalElasticAgent, exit_barrier_timeout=_LAST_BARRIER_SECONDS)
    order = patch.object(dynamic_rendezvous, "sorted", partial(_in_order, addresses), create=True)
    try:
        with patch.object(launcher, "LocalElasticAgent", agent), order:
            launcher.elastic_launch(config=config, entrypoint=program)(*program_arguments)
    except ChildFailedError as error:
        failure = first_failure(error.failures)
        return (
            _status_of(failure),
            float(failure.seconds),
            failure.rank,
            failure.order + (LOST_PEER if failure.exit_code == LOST_PEER_STATUS else 0),
            failure.message,
        )
    except (RendezvousError, dist.DistError) as error:
        if logs.error_files:  # the ranks had begun: the first node, which has the store, has ended
            message = "error: the rendezvous on the first node ended before these ranks"
            return Status.FAILED, time.time(), None, LOST_RENDEZVOUS, message
        cause = error.__cause__ or error  # torch's own text names no port
        text = str(cause).strip().partition("\n")[0] or type(cause).__name__
        message = f"error: the nodes did not meet: {text}"
        return Status.FAILED, time.time(), None, 9, message
    unfinished = any(unfinished_file(file).exists() for file in logs.error_files)
    return (Status.UNFINISHED if unfinished else Status.DONE), time.time(), None, 0, None


def _in_order(addresses: Sequence[str], nodes: Iterable[Any]) -> list[Any]:
    """Return torchrun's nodes in the order of the launch, in which they get their ranks.

    torchrun itself sorts them by address, n10 before n9. Neighbours of the scheduler would not be
    neighbours in rank, and a teacher's nodes not the last.
    """
    places = {address: place for place, address in enumerate(addresses)}
    return sorted(nodes, key=lambda node: (places.get(node.addr, len(places)), node))


def _status_of(failure: FirstFailure) -> Status:
    if failure.was_ended:
        return Status.ENDED
    if failure.kind is None or failure.kind == _TRIED_AGAIN:
        return Status.FAILED
    return Status.MISCONFIGURED


def _leave_to_ranks(number: int, _: FrameType | None) -> None:
    """Ignore a signal while there are ranks; end before there are any."""
    if not psutil.Process().children():
        os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""torchrun for the ranks of one machine, with the failed rank's own message as the only report.

`runtime.torchrun.run_ranks` starts it as a child process: python -m, torchrun's arguments.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import parse_args, run
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

from megatron_distill.runtime.lone_failure import LOST_PEER_STATUS
from megatron_distill.runtime.termination import BROKEN_PIPE_STATUS

__all__ = ["FirstFailure", "first_failure", "main"]

_ENDING = (signal.SIGTERM, signal.SIGINT)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the ranks to their end; return the exit status of the first rank to fail, or 0."""
    logging.disable(logging.ERROR)  # torchrun logs the failed process, not the reason
    # The ranks have SIGTERM when this process ends, and it is of no use once its parent is gone.
    _prctl_pr_set_pdeathsig(signal.SIGKILL)
    try:
        run(parse_args(arguments))
    except ChildFailedError as error:
        return _report(error.failures)
    return 0


@dataclass(frozen=True)
class FirstFailure:
    """The failure among ranks of one machine that is the cause of the others.

    Attributes:
        rank: of the whole launch.
        exit_code: negative for the signal that ended the process.
        seconds: since the epoch.
        order: kind of failure; of several machines' failures the lowest is the cause.
        message: a line for the user, None where the rank was asked to end, or its standard output
            has lost its reader.
        kind: class of an error that all ranks raised together, such as ConfigError; else None.
    """

    rank: int
    exit_code: int
    seconds: int
    order: int
    message: str | None
    kind: str | None

    @property
    def was_ended(self) -> bool:
        """Whether a signal asked the rank to end."""
        return self.kind is None and _is_ending(self.exit_code)


def first_failure(failures: Mapping[int, ProcessFailure]) -> FirstFailure:
    """Return the failure that came first; a rank that lost a peer or was ended is not the cause."""
    rank = min(failures, key=lambda rank: (_order(failures[rank]), failures[rank].timestamp, rank))
    failure = failures[rank]
    return FirstFailure(
        rank=rank,
        exit_code=failure.exitcode,
        seconds=failure.timestamp,
        order=_order(failure),
        message=_message(rank, failures),
        kind=_kind(failure),
    )


def _message(rank: int, failures: Mapping[int, ProcessFailure]) -> str | None:
    failure = failures[rank]
    message = _own_message(failure)
    if message is not None:
        return message
    if _was_ended(failure) or failure.exitcode == BROKEN_PIPE_STATUS:
        return None
    if failure.exitcode < 0:
        reason = f"error: rank {rank} died of {signal.Signals(-failure.exitcode).name}"
        lost = _of_survivors(failures)
        return reason if lost is None else f"{reason}; {lost}"
    return f"error: rank {rank} failed with exit status {failure.exitcode}, see above"


def _report(failures: Mapping[int, ProcessFailure]) -> int:
    """Write the reason of the failure, unless a rank wrote it, and return the exit status."""
    first = first_failure(failures)
    if first.message is not None:
        sys.stderr.write(f"{first.message}\n")
    elif first.exit_code < 0:
        sys.stderr.write("stopped\n")
    if _own_message(failures[first.rank]) is not None:
        return 1  # the status of a rank with a message; torchrun may have ended it while exiting
    return first.exit_code if first.exit_code > 0 else 128 - first.exit_code


def _of_survivors(failures: Mapping[int, ProcessFailure]) -> str | None:
    """Return the message of a rank that lost a peer: which one, where, and at which step."""
    for failure in failures.values():
        message = _own_message(failure)
        if failure.exitcode == LOST_PEER_STATUS and message is not None:
            return message.removeprefix("error: ")
    return None


def _order(failure: ProcessFailure) -> int:
    has_message = _own_message(failure) is not None
    if failure.exitcode == LOST_PEER_STATUS:
        return 1 if has_message else 2  # of equals the earlier one: a lost rank is that
    if has_message:
        return 0
    if not _was_ended(failure):
        return 1
    return 3 if failure.exitcode > 0 else 4  # exit status > 0: cleaned up and wrote "stopped"


def _own_message(failure: ProcessFailure) -> str | None:
    """Return the message that a rank wrote for torchrun."""
    written = failure.error_file_data["message"]
    return str(written["message"]) if isinstance(written, dict) else None


def _kind(failure: ProcessFailure) -> str | None:
    """Return the class of an error that the rank told torchrun, see `tell_torchrun`."""
    written = failure.error_file_data["message"]
    details = written.get("extraInfo") if isinstance(written, dict) else None
    kind = details.get("kind") if isinstance(details, dict) else None
    return None if kind is None else str(kind)


def _was_ended(failure: ProcessFailure) -> bool:
    return _is_ending(failure.exitcode)


def _is_ending(exit_code: int) -> bool:
    return exit_code in {sign for number in _ENDING for sign in (-number, 128 + number)}


if __name__ == "__main__":
    sys.exit(main())

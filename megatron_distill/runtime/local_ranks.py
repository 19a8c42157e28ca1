"""torchrun for the ranks of one machine, with the failed rank's own message as the only report.

`runtime.torchrun.run_ranks` starts it as a child process: python -m, torchrun's arguments.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Mapping, Sequence

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import parse_args, run

from megatron_distill.runtime.lone_failure import LOST_PEER_STATUS

__all__ = ["main"]

_ENDING = (signal.SIGTERM, signal.SIGINT)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the ranks to their end; return the exit status of the first rank to fail, or 0."""
    logging.disable(logging.ERROR)  # torchrun logs the failed process, not the reason
    try:
        run(parse_args(arguments))
    except ChildFailedError as error:
        return _report(error.failures)
    return 0


def _report(failures: Mapping[int, ProcessFailure]) -> int:
    """Write the reason of the failure, unless a rank wrote it, and return the exit status."""
    # A rank that torchrun ended after another's failure is not the cause.
    rank = min(failures, key=lambda rank: (_order(failures[rank]), failures[rank].timestamp, rank))
    failure = failures[rank]
    message = _own_message(failure)
    if message is not None:
        sys.stderr.write(f"{message}\n")
        return 1  # the status of a rank with a message; torchrun may have ended it while exiting
    if failure.exitcode < 0:
        ended_by = signal.Signals(-failure.exitcode)
        reason = "stopped" if ended_by in _ENDING else f"error: rank {rank} died of {ended_by.name}"
        lost = None if ended_by in _ENDING else _of_survivors(failures)
        sys.stderr.write(f"{reason}\n" if lost is None else f"{reason}; {lost}\n")
    elif not _was_ended(failure):
        sys.stderr.write(
            f"error: rank {rank} failed with exit status {failure.exitcode}, see above\n"
        )
    return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode


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


def _was_ended(failure: ProcessFailure) -> bool:
    return failure.exitcode in {sign for number in _ENDING for sign in (-number, 128 + number)}


if __name__ == "__main__":
    sys.exit(main())

"""Standard output, and error, that cannot be written: a full disk, or a reader that left early.

A failed write raises nothing: ranks would have to learn of it, in the middle of a collective. The
work goes on, and the command's end tells of it.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr, redirect_stdout, suppress
from typing import Any, Final, TextIO, cast

from megatron_distill.runtime.termination import BROKEN_PIPE_STATUS

__all__ = ["status_with_output"]

_ERROR_STATUS: Final = 1


class _Output:
    """A text stream that keeps its first failure and is silent from then on."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream  # None: the process began with its standard output closed
        self.failure: OSError | None = None

    def write(self, text: str) -> int:
        """Write, unless a write has failed before."""
        if self.failure is None:
            try:
                self._there().write(text)
            except OSError as error:
                self.failure = error
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write all lines."""
        self.write("".join(lines))

    def flush(self) -> None:
        """Flush, unless a write has failed before."""
        if self.failure is None and self._stream is not None:
            try:
                self._stream.flush()
            except OSError as error:
                self.failure = error

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self._stream is not None and self._stream.isatty()

    def give_up(self) -> None:
        """Let the interpreter's own flush at its end, which would fail again, go nowhere."""
        with suppress(OSError):  # a stream in memory has no descriptor
            nowhere = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(nowhere, self._there().fileno())
            finally:
                os.close(nowhere)

    def _there(self) -> TextIO:
        if self._stream is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self._stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Messages(_Output):
    """Standard error, which goes on after a full disk: a later line may have space again."""

    def write(self, text: str) -> int:
        """Write, unless the reader has left."""
        self._try_again()
        return super().write(text)

    def flush(self) -> None:
        """Flush, unless the reader has left."""
        self._try_again()
        super().flush()

    def _try_again(self) -> None:
        if not isinstance(self.failure, BrokenPipeError):
            self.failure = None


def status_with_output(work: Callable[[], int]) -> int:
    """Do a program's work and return its exit status, also where standard output failed.

    A full disk is one line on standard error. A pipe without a reader is silent, as in other
    programs: the status tells of it. Standard error that cannot be written is no failure.
    """
    output, messages = _Output(sys.stdout), _Messages(sys.stderr)
    ended: SystemExit | None = None
    with redirect_stdout(cast("TextIO", output)), redirect_stderr(cast("TextIO", messages)):
        try:
            status = work()
        except SystemExit as end:  # argparse, after its help or wrong arguments
            ended, status = end, end.code if isinstance(end.code, int) else 0
    output.flush()
    messages.flush()
    if messages.failure is not None:
        messages.give_up()
    if output.failure is None:
        if ended is not None:
            raise ended
        return status
    output.give_up()
    if isinstance(output.failure, BrokenPipeError):
        return status or BROKEN_PIPE_STATUS
    _tell(
        f"error: standard output cannot be written ({output.failure.strerror}); free disk space "
        "or send it elsewhere"
    )
    return status or _ERROR_STATUS


def _tell(text: str) -> None:
    """Write a line to standard error, or as a rank to torchrun, whose report ends with it."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from megatron_distill.runtime.lone_failure import tell_torchrun

        if tell_torchrun(text):
            return
    with suppress(OSError):
        sys.stderr.write(f"{text}\n")

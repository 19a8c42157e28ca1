"""SIGTERM, SIGINT, SIGHUP: a request to finish the step, save and exit, or an exit with cleanup."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Final

# Of a command whose standard output has lost its reader, as of one that SIGPIPE ends in a shell.
BROKEN_PIPE_STATUS: Final = 128 + signal.SIGPIPE


class Interrupted(Exception):  # noqa: N818 - no error: the request to stop that all ranks share
    """Work ended early on all ranks together, because a signal to one of them asked for it."""


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask to stop: also that of a closed terminal, unless nohup is used."""
    usual = (signal.SIGTERM, signal.SIGINT)
    ignores_hang_up = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return usual if ignores_hang_up else (*usual, signal.SIGHUP)


class TerminationRequest:
    """Records a termination signal until the loop checks it.

    A repeated signal changes nothing in a rank of torchrun: on Ctrl-C it gets one signal from the
    terminal and another from torchrun. In a single process a second Ctrl-C is a KeyboardInterrupt.
    Its user may not want to wait for a start that reads a large model or corpus.

    Args:
        note: what the first rank writes to standard error at the first signal; empty: nothing.
    """

    def __init__(self, *, note: str = "") -> None:
        self.signal_number: int | None = None
        self._ends_the_process = False
        self._note = note if os.environ.get("RANK", "0") == "0" else ""
        self._previous: dict[int, object] = {}
        self.actions: list[Callable[[], None]] = []  # once, at the first signal

    def __enter__(self) -> TerminationRequest:
        for number in stop_signals():
            self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # A rank may be at its end because of a signal that a peer had first. Its own signal, which
        # comes now, must not make a failure of that.
        is_at_its_end = self._ends_the_process and kind is None
        for number, handler in self._previous.items():
            after = signal.SIG_IGN if is_at_its_end else handler
            signal.signal(number, after)  # type: ignore[arg-type]

    def _remember(self, number: int, _: FrameType | None) -> None:
        is_alone = "RANK" not in os.environ
        if self.received and is_alone and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self._note and not self.received:
            again = "; Ctrl-C again ends it at once" if is_alone else ""
            # Not through a stream, which the signal may have found in the middle of a write.
            with suppress(OSError):  # the terminal may be gone
                os.write(2, f"\n{self._note}{again}\n".encode())
        self.record(number)

    def record(self, number: int) -> None:
        """Record a signal, and take the actions that wait for the first one."""
        self.signal_number = number
        actions, self.actions = self.actions, []
        for action in actions:
            action()

    def expect_from_torchrun(self) -> None:
        """Deliver SIGTERM to this process when its parent torchrun ends.

        Ranks run in separate sessions, so that no other signal reaches them if torchrun is killed.
        Linux only, like torchrun's own handling. The process has nothing to do after this block,
        and ignores signals then.
        """
        if "TORCHELASTIC_RUN_ID" in os.environ:
            self._ends_the_process = True
            from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

            _prctl_pr_set_pdeathsig(signal.SIGTERM)

    @property
    def received(self) -> bool:
        """Whether this rank got a termination signal."""
        return self.signal_number is not None


class Interruption(TerminationRequest):
    """Raises KeyboardInterrupt at the first termination signal and ignores later ones.

    Unfinished files are then removed undisturbed, since Ctrl-C reaches a worker more than once.
    """

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self.received:
            super().__exit__(kind, value, traceback)
        elif value is not None and not isinstance(value, KeyboardInterrupt):
            # The interrupted work may have handled the interruption as a failure, and failed again
            # in a collective with ranks that had already left.
            raise KeyboardInterrupt from value

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            return
        super()._remember(number, frame)
        raise KeyboardInterrupt

    @property
    def status(self) -> int:
        """The exit status of a process ended by the signal, as in shells: 128 + its number."""
        assert self.signal_number is not None
        return 128 + self.signal_number


def was_interrupted() -> bool:
    """Return whether an `Interruption` is in force here and has had its signal."""
    handler = signal.getsignal(signal.SIGTERM)
    request = getattr(handler, "__self__", None)
    return isinstance(request, Interruption) and request.received


def is_requested() -> bool:
    """Return whether a `TerminationRequest` is in force here and has had its signal."""
    request = _request()
    return request is not None and request.received


def request_termination() -> None:
    """Record a signal that another process of the launch had, as if it were this one's."""
    request = _request()
    if request is not None and not request.received:
        request.record(signal.SIGTERM)


def when_requested(action: Callable[[], None]) -> Callable[[], None]:
    """Take an action at the first signal of the request in force here; return what forgets it.

    The action runs in the signal's handler. Without a request in force there is none.
    """
    request = _request()
    if request is None:
        return lambda: None

    def forget() -> None:
        with suppress(ValueError):
            request.actions.remove(action)

    request.actions.append(action)
    if request.received and action in request.actions:  # before it was one of them
        forget()
        action()
    return forget


def _request() -> TerminationRequest | None:
    handler = signal.getsignal(signal.SIGTERM)
    request = getattr(handler, "__self__", None)
    return request if isinstance(request, TerminationRequest) else None

"""SIGTERM and SIGINT: a request to finish the step, save and leave, or an end with tidying up."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType


class TerminationRequest:
    """Remembers a termination signal until the loop asks for it.

    A repeated signal changes nothing: on Ctrl-C a worker hears once from the terminal and once more
    from torchrun, and both mean the same.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> TerminationRequest:
        for number in self.SIGNALS:
            self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _remember(self, number: int, _: FrameType | None) -> None:
        self.signal_number = number

    def expect_from_torchrun(self) -> None:
        """Let the end of torchrun, if that started this process, be such a signal too.

        Ranks live in sessions of their own: where torchrun is killed, nothing else would tell them.
        Linux only, like torchrun's own handling of it.
        """
        if "TORCHELASTIC_RUN_ID" in os.environ:
            from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

            _prctl_pr_set_pdeathsig(signal.SIGTERM)

    @property
    def received(self) -> bool:
        """Whether this rank was asked to stop."""
        return self.signal_number is not None


class Interruption(TerminationRequest):
    """Raises KeyboardInterrupt at the first termination signal, and is deaf to those after it.

    What is half done is then removed undisturbed, while Ctrl-C reaches a worker more than once.
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
            # What was underway may have taken the interruption for a failure of its own, and broke
            # where it told ranks of it that had left by then.
            raise KeyboardInterrupt from value

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            return
        super()._remember(number, frame)
        raise KeyboardInterrupt

    @property
    def status(self) -> int:
        """The exit status of a process that ended so, as shells count."""
        assert self.signal_number is not None
        return 128 + self.signal_number

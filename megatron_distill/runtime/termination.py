"""SIGTERM and SIGINT as a request to finish the step, save and leave."""

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

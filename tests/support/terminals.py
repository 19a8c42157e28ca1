"""A clock that a test moves, a stream that takes itself for a terminal, and a terminal."""

from __future__ import annotations

import io
import os
import tty
from contextlib import suppress


class Clock:
    """Seconds that stand still until `now` is changed."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    """Keeps everything that is drawn."""

    def isatty(self) -> bool:
        return True


class PseudoTerminal(io.TextIOWrapper):
    """Standard output on a terminal of the system; `shown`: the bytes of each flush."""

    def __init__(self) -> None:
        self._screen, program = os.openpty()
        tty.setraw(program)  # a line's end stays as it is
        os.set_blocking(self._screen, False)
        self.shown: list[bytes] = []
        super().__init__(os.fdopen(program, "wb", buffering=0), "utf-8", newline="")

    def flush(self) -> None:
        """Send what was written, and keep what the terminal received."""
        super().flush()
        with suppress(BlockingIOError):
            self.shown.append(os.read(self._screen, 2**16))

    def close(self) -> None:
        """Close both ends."""
        if not self.closed:
            super().close()
            os.close(self._screen)

"""A clock that a test moves, and a stream that takes itself for a terminal."""

from __future__ import annotations

import io


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

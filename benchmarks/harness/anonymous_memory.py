"""Peak anonymous memory of a block: memory that is not mapped from a file."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

import psutil


@dataclass
class AnonymousPeak:
    """The peak anonymous memory of this process within a block, above its memory at the start.

    Pages of mapped files are the system's cache and not counted.

    Attributes:
        look_seconds: sampling interval.
        with_children: whether the memory of child processes counts.
        bytes: the peak so far.
    """

    look_seconds: float
    with_children: bool = False
    bytes: int = field(default=0, init=False)

    def __enter__(self) -> AnonymousPeak:
        self._before = self._now()
        self.bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._done.wait(self.look_seconds):
            self.bytes = max(self.bytes, self._now() - self._before)

    def _now(self) -> int:
        if not self.with_children:
            return _anonymous("self")
        own = psutil.Process()
        return sum(_anonymous(str(one.pid)) for one in (own, *own.children(recursive=True)))


def _anonymous(process: str) -> int:
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0  # the process has ended meanwhile
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))

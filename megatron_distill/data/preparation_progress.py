"""How far the preparation of conversations has come: a bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Final, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from megatron_distill.log import get_logger

_LINE_SECONDS: Final = 30.0
_LOG = get_logger(__name__)


class PreparationProgress:
    """Says how much is prepared: on `stream` where that is a terminal, else in the log."""

    def __init__(
        self, name: str, *, total_bytes: int, is_shown: bool, stream: TextIO | None = None
    ) -> None:
        self._name = name
        self._total = max(1, total_bytes)
        self._conversations = self._tokens = self._bytes = 0
        self._started = self._said = time.monotonic()
        self._bar: Progress | None = None
        console = Console(file=stream or sys.stderr)
        if is_shown and console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                TimeRemainingColumn(),
                console=console,
                auto_refresh=False,
                transient=True,
            )
            self._task = self._bar.add_task(f"preparing {name}", total=self._total)

    def __enter__(self) -> PreparationProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def seconds(self) -> float:
        """Time since the beginning."""
        return time.monotonic() - self._started

    def advance(self, *, bytes_read: int, conversations: int, tokens: int) -> None:
        """Count what one more block brought."""
        self._bytes += bytes_read
        self._conversations += conversations
        self._tokens += tokens
        if self._bar is not None:
            self._bar.update(self._task, completed=self._bytes, description=self._status())
            self._bar.refresh()
        elif time.monotonic() - self._said >= _LINE_SECONDS:
            self._said = time.monotonic()
            _LOG.info("%s (%.0f%%)", self._status(), 100 * min(1.0, self._bytes / self._total))

    def _status(self) -> str:
        rate = self._tokens / max(self.seconds, 1e-9)
        return (
            f"preparing {self._name}: {self._conversations:,} conversations, "
            f"{self._tokens:,} tokens, {rate:,.0f} tokens/s"
        )

"""Progress of a job: one bar on a terminal, lines elsewhere, with rate and time left."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TextIO, cast

from rich.console import Console
from rich.file_proxy import FileProxy
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

__all__ = [
    "SecondsClock",
    "Pace",
    "ProgressFigure",
    "ProgressReporter",
    "duration",
    "gigabytes",
    "short_count",
    "shortened",
    "significant",
    "size",
]

SecondsClock = Callable[[], float]
_WINDOW: Final = 50
_REDRAW_SECONDS: Final = 0.1
_LINE_SECONDS: Final = 30.0
_LEAST_BAR: Final = 5
_USUAL_TIME: Final = "eta 0:00"
_BETWEEN: Final = "  "
_MOST_LINES: Final = 40
_FIRST_LINES: Final = 8


@dataclass(frozen=True)
class ProgressFigure:
    """One figure of a progress line.

    If the text does not fit, a bar shows the first of `shorter` that fits. It omits a figure that
    is `only_in_lines`.
    """

    text: str
    only_in_lines: bool = False
    shorter: tuple[str, ...] = ()


class Pace:
    """The rate over the last 50 updates, without the first one, which allocates and compiles."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, float]] = deque(maxlen=_WINDOW)

    def add(self, now: float, count: float) -> None:
        """Record the count reached at this time."""
        self._marks.append((now, count))

    @property
    def per_second(self) -> float | None:
        """The rate; None until it is known."""
        if not self._marks:
            return None
        (then, first), (now, last) = self._marks[0], self._marks[-1]
        return (last - first) / (now - then) if now > then and last > first else None


class ProgressReporter:
    """A progress bar if `stream` is a terminal, else periodic lines.

    Write log lines through the attribute `stream`, which puts them above the bar. A stream that
    takes nothing any more, as a closed terminal, ends the display and nothing else.

    Args:
        stream: where the bar is drawn.
        label: the unit of the count ("step").
        total: the count at the end; None: unknown, so that the bar has no end and no time left.
        done: the count at the start, of a resumed job.
        as_percent: whether the count is shown as a percentage.
        every: counts between two lines, besides the first and the last; None: every 30 seconds.
        write_line: takes the lines; None: they are written to `stream`.
        shows_bar: whether to draw a bar on a terminal.
        clock: in seconds.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        label: str,
        total: int | None,
        done: int = 0,
        as_percent: bool = False,
        every: int | None = None,
        write_line: Callable[[str], None] | None = None,
        shows_bar: bool = True,
        clock: SecondsClock = time.monotonic,
    ) -> None:
        self.stream = stream
        self.total = total
        self.done = self._start = done
        self._label, self._as_percent, self._every = label, as_percent, every
        self._write_line = write_line or self._to_stream
        self._clock = clock
        self._pace = Pace()
        self._started = self._last_line = self._drawn = clock()
        self._is_first = True
        self._bar: Progress | None = None
        self._console: Console | None = None
        if shows_bar and stream.isatty():
            self._open_bar(Console(file=stream, soft_wrap=True))

    def _open_bar(self, console: Console) -> None:
        self._console = console
        self.stream = cast(TextIO, FileProxy(console, console.file))
        # No refresh thread: it would take the interpreter lock from the work.
        self._bar = Progress(
            TextColumn("{task.fields[head]}", markup=False, table_column=Column(no_wrap=True)),
            BarColumn(bar_width=None),
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
            console=console,
            auto_refresh=False,
            expand=True,
            transient=True,
        )
        self._task = self._bar.add_task(
            "starting", total=self.total, completed=self.done, head=self._head()
        )
        self._bar.start()
        self._bar.refresh()

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._started

    @property
    def per_second(self) -> float | None:
        """Recent counts per second; None until it is known."""
        return self._pace.per_second

    @property
    def seconds_left(self) -> float | None:
        """Time to the end at this rate; None until the rate is known, and without a total."""
        rate = self.per_second
        return (self.total - self.done) / rate if rate and self.total is not None else None

    def count(self, done: int) -> float:
        """Record the count without output; return the time."""
        now = self._clock()
        self.done = done
        if done > self._start:
            self._pace.add(now, done)
        return now

    def update(self, done: int, fields: Callable[[], Sequence[ProgressFigure]]) -> None:
        """Record the count; `fields` is called only if the bar or a line is due."""
        now = self.count(done)
        is_last = self.total is not None and done >= self.total
        if self._bar is not None:
            if now - self._drawn >= _REDRAW_SECONDS or is_last:
                self._drawn = now
                self._draw(self._bar, fields)
        elif self._is_due(now, is_last=is_last):
            self._last_line, self._is_first = now, False
            with suppress(OSError):
                self._write_line(self.status(fields()))

    def _draw(self, bar: Progress, fields: Callable[[], Sequence[ProgressFigure]]) -> None:
        text = self._fitting(fields(), bar.console.width)
        try:
            bar.update(self._task, completed=self.done, head=self._head(), description=text)
            bar.refresh()
        except OSError:  # the terminal was closed: the work goes on without it
            self.close()

    def status(self, fields: Sequence[ProgressFigure]) -> str:
        """Return the whole line: count, fields, time left."""
        texts = [self._head(), *(field.text for field in fields), *self._time_left()]
        return _BETWEEN.join(texts)

    def line(self, text: str) -> None:
        """Write a separate line, above the bar."""
        with suppress(OSError):
            if self._console is not None:
                self._console.print(text, markup=False, highlight=False, soft_wrap=True)
            else:
                self._write_line(text)

    def close(self) -> None:
        """Remove the bar; `line` still works."""
        bar, self._bar = self._bar, None
        if bar is not None:
            with suppress(OSError):
                bar.stop()

    def _is_due(self, now: float, *, is_last: bool) -> bool:
        if self._every is None:
            return now - self._last_line >= _LINE_SECONDS
        return self._is_first or is_last or self.done % self._every == 0

    def _head(self) -> str:
        if self.total is None:
            return f"{self._label} {self.done}"
        if self._as_percent:
            return f"{self._label} {100 * min(1.0, self.done / max(1, self.total)):.0f}%"
        return f"{self._label} {self.done}/{self.total}"

    def _time_left(self) -> Iterator[str]:
        left = self.seconds_left
        if left is not None and left > 0:
            yield f"eta {duration(left)}"

    def _fitting(self, fields: Sequence[ProgressFigure], width: int) -> str:
        """Return the fields that fit beside a short bar; the first and the time left always."""
        width -= len(self._head()) + _LEAST_BAR + 2
        end = list(self._time_left())
        room = end or [_USUAL_TIME]  # reserved, so that figures do not flicker
        chosen: list[str] = []
        for field in [field for field in fields if not field.only_in_lines]:
            texts = (field.text, *field.shorter)
            fits = [text for text in texts if len(_BETWEEN.join([*chosen, text, *room])) <= width]
            if chosen and not fits:
                break
            chosen.append(fits[0] if fits else texts[-1])
        return _BETWEEN.join([*chosen, *end])

    def _to_stream(self, text: str) -> None:
        self.stream.write(text + "\n")
        self.stream.flush()


def significant(value: float, digits: int = 4) -> str:
    """Return a number with `digits` significant digits, also if it is small."""
    return f"{value:#.{digits}g}"


def short_count(value: float) -> str:
    """Return a number of up to three digits with k, M or G."""
    if value < 1e4:
        return f"{value:.0f}"
    return _in_unit(value, ((1e9, "G"), (1e6, "M"), (1e3, "k")))


def size(count: float) -> str:
    """Return a number of bytes in the unit that fits it."""
    if count < 1e3:
        return f"{count:.0f} bytes"
    return _in_unit(count, ((1e12, " TB"), (1e9, " GB"), (1e6, " MB"), (1e3, " kB")))


def _in_unit(value: float, units: Sequence[tuple[float, str]]) -> str:
    """Return three digits of a number with the largest unit that it reaches once rounded."""
    rounded = float(f"{value:.3g}")
    limit, unit = next((one for one in units if rounded >= one[0]), units[-1])
    return f"{value / limit:.3g}{unit}"


def shortened(lines: Sequence[str]) -> Iterator[str]:
    """Yield lines of one form; of very many the first ones and the last."""
    if len(lines) <= _MOST_LINES:
        yield from lines
        return
    yield from lines[:_FIRST_LINES]
    yield f"  ... {len(lines) - _FIRST_LINES - 1:,} more in this order ..."
    yield lines[-1]


def gigabytes(count: float) -> str:
    """Return a number of bytes in gigabytes."""
    return f"{count / 1e9:.2f} GB"


def duration(seconds: float) -> str:
    """Return minutes and seconds, preceded by hours if there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"

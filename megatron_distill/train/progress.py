"""How far a run has come: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TextIO, cast

from rich.console import Console
from rich.file_proxy import FileProxy
from rich.progress import BarColumn, Progress, TextColumn

from megatron_distill.train.metrics import Record

__all__ = [
    "LiveProgress",
    "PlainProgress",
    "duration",
    "gigabytes",
    "open_progress",
    "short_count",
    "size",
]


_PACE_WINDOW = 50
_REDRAW_SECONDS = 0.1
_SOURCE_LOSSES = (("ce_loss", "ce"), ("kd_loss", "kd"))

Clock = Callable[[], float]


def open_progress(
    stream: TextIO,
    *,
    total_steps: int,
    start_step: int,
    interval: int = 1,
    clock: Clock = time.monotonic,
) -> LiveProgress | PlainProgress:
    """Return a live bar if `stream` is a terminal, else plain lines on it.

    Both are sinks for metrics. A plain line comes every `interval` steps, for the first step and
    for the last. `start_step` is the number of steps that a resumed run has behind it.
    """
    run = _Run(total_steps, start_step, clock)
    if stream.isatty():
        return LiveProgress(Console(file=stream), run)
    return PlainProgress(stream, run, interval=interval)


class _Run:
    """What the display knows of the run: its pace, and the last records."""

    def __init__(self, total_steps: int, start_step: int, clock: Clock) -> None:
        self.total_steps = total_steps
        self.step = start_step
        self.clock = clock
        self.started = clock()
        self.record: Record = {}
        self.validation: Record = {}
        self.peak_memory = 0.0
        # The first step is left out of the pace: it allocates, compiles and fills caches.
        self._marks: deque[tuple[float, int]] = deque(maxlen=_PACE_WINDOW)
        self._first: tuple[float, float] | None = None

    def take(self, record: Record) -> None:
        now = self.clock()
        self.step = cast(int, record["step"])
        self.record = record
        self.peak_memory = max(self.peak_memory, _number(record, "peak_memory_bytes") or 0.0)
        self._marks.append((now, self.step))
        if self._first is None:
            self._first = (now, _number(record, "tokens") or 0.0)

    def seconds_left(self) -> float | None:
        if len(self._marks) < 2:
            return None
        (then, first_step), (now, last_step) = self._marks[0], self._marks[-1]
        if last_step == first_step:
            return None
        return (self.total_steps - last_step) * (now - then) / (last_step - first_step)

    def mean_tokens_per_second(self) -> float | None:
        tokens = _number(self.record, "tokens")
        if self._first is None or tokens is None:
            return None
        (then, first_tokens), now = self._first, self._marks[-1][0]
        return (tokens - first_tokens) / (now - then) if now > then else None

    def closing_line(self) -> str:
        if not self.record:
            return f"no step was needed: {self.step} of {self.total_steps} steps were done before"
        elapsed = duration(self.clock() - self.started)
        parts = [
            f"finished {self.step} steps in {elapsed}"
            if self.step >= self.total_steps
            else f"stopped at step {self.step} of {self.total_steps} after {elapsed}"
        ]
        tokens = _number(self.record, "tokens")
        if tokens is not None:
            parts.append(f"{short_count(tokens)} tokens")
        loss = _number(self.record, "ce_loss")
        if loss is not None:
            parts.append(f"ce {loss:.4f}")
        held_out = _number(self.validation, "ce_loss")
        if held_out is not None:
            parts.append(f"held-out ce {held_out:.4f}")
        rate = self.mean_tokens_per_second()
        if rate is not None:
            parts.append(f"{short_count(rate)} tokens/s")
        if self.peak_memory:
            parts.append(f"peak memory {gigabytes(self.peak_memory)}")
        return ", ".join(parts)


class LiveProgress:
    """A bar with the loss terms, tokens/s, the time left and the peak memory.

    Whatever else writes to the terminal goes through `stream`, which puts it above the bar.
    """

    def __init__(self, console: Console, run: _Run) -> None:
        self._run = run
        self._console = console
        self.stream: TextIO = cast(TextIO, FileProxy(console, console.file))
        # No refresh thread: it would take the interpreter lock from the training step.
        self._bar = Progress(
            TextColumn("{task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("{task.description}"),
            console=console,
            auto_refresh=False,
            expand=True,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=run.total_steps, completed=run.step)
        self._drawn = run.clock()
        self._bar.start()
        self._bar.refresh()

    def write(self, record: Record) -> None:
        """Move the bar, or print a line above it if `record` is a validation."""
        validation = record.get("validation")
        if isinstance(validation, Mapping):
            self._run.validation = validation
            self._bar.print(
                _validation_line(record, validation), markup=False, highlight=False, soft_wrap=True
            )
            return
        self._run.take(record)
        now = self._run.clock()
        if now - self._drawn < _REDRAW_SECONDS and self._run.step < self._run.total_steps:
            return
        self._drawn = now
        self._bar.update(
            self._task, completed=self._run.step, description=_status(self._run, short=True)
        )
        self._bar.refresh()

    def close(self) -> None:
        """Take the bar away and print the closing line."""
        self._bar.stop()
        self._console.print(self._run.closing_line(), markup=False, highlight=False, soft_wrap=True)


class PlainProgress:
    """The same as lines, for log files and pipes."""

    def __init__(self, stream: TextIO, run: _Run, *, interval: int) -> None:
        self._run = run
        self.stream = stream
        self._interval = interval
        self._silent = True

    def write(self, record: Record) -> None:
        """Print a line if one is due; a validation always is."""
        validation = record.get("validation")
        if isinstance(validation, Mapping):
            self._run.validation = validation
            self._print(_validation_line(record, validation))
            return
        self._run.take(record)
        step, total = self._run.step, self._run.total_steps
        if self._silent or step % self._interval == 0 or step >= total:
            self._silent = False
            self._print(f"step {step}/{total}  {_status(self._run, short=False)}")

    def close(self) -> None:
        """Print the closing line."""
        self._print(self._run.closing_line())

    def _print(self, line: str) -> None:
        self.stream.write(line + "\n")
        self.stream.flush()


def _status(run: _Run, *, short: bool) -> str:
    record = run.record
    parts = []
    for name, label in (("ce_loss", "ce"), ("kd_loss", "kd"), ("total_loss", "total")):
        value = _number(record, name)
        # Without a teacher there is one term: saying it three times says nothing.
        if value is None or (name != "ce_loss" and not _has_kd(record)):
            continue
        parts.append(f"{label} {value:.3f}")
    if not short:
        for name, label, form in (
            ("grad_norm", "grad norm", ".3g"),
            ("learning_rate", "lr", ".2e"),
        ):
            value = _number(record, name)
            if value is not None:
                parts.append(f"{label} {value:{form}}")
    rate = _number(record, "tokens_per_second")
    if rate is not None:
        parts.append(f"{short_count(rate)} tok/s")
    if run.peak_memory:
        parts.append(("" if short else "peak ") + gigabytes(run.peak_memory))
    left = run.seconds_left()
    parts.append(f"eta {'-' if left is None else duration(left)}")
    return "  ".join(parts)


def _has_kd(record: Record) -> bool:
    return bool(_number(record, "kd_loss"))


def _validation_line(record: Record, validation: Record) -> str:
    parts = [f"step {record['step']} held-out:"]
    for name, label, form in (
        ("ce_loss", "ce", ".4f"),
        ("kd_loss", "kd", ".4f"),
        ("top1_agreement", "top-1 agreement", ".1%"),
        ("teacher_ce_loss", "teacher's ce", ".4f"),
    ):
        value = _number(validation, name)
        if value is not None and (name != "kd_loss" or _has_kd(validation)):
            parts.append(f"{label} {value:{form}}")
    return "\n".join(["  ".join(parts), *_source_lines(record, validation)])


def _source_lines(record: Record, validation: Record) -> Iterator[str]:
    """One line with the held-out losses of all sources, where there are several."""
    sources = validation.get("sources")
    if not isinstance(sources, Mapping):
        return
    parts = []
    for name, figures in sources.items():
        losses = [(label, _number(figures, key)) for key, label in _SOURCE_LOSSES]
        known = [f"{label} {loss:.4f}" for label, loss in losses if loss is not None]
        parts.append(f"{name} {' '.join(known) or '-'}")
    yield f"step {record['step']} held-out by source: {', '.join(parts)}"


def _number(record: Record, name: str) -> float | None:
    value = record.get(name)
    return float(value) if isinstance(value, (int, float)) else None


def short_count(value: float) -> str:
    """Return a number of up to three digits with k, M or G."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g}{unit}"
    return f"{value:.0f}"


def size(count: float) -> str:
    """Return a number of bytes in the unit that fits it."""
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= limit:
            return f"{count / limit:.3g} {unit}"
    return f"{count:.0f} bytes"


def gigabytes(count: float) -> str:
    """Return a number of bytes in gigabytes."""
    return f"{count / 1e9:.2f} GB"


def duration(seconds: float) -> str:
    """Return minutes and seconds, with hours in front where there are some."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"

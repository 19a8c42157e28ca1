"""The reporter of progress."""

from __future__ import annotations

import errno
import io
import re

import pytest

from megatron_distill.runtime.progress import (
    ProgressFigure,
    ProgressReporter,
    short_count,
    significant,
    size,
)
from tests.support.terminals import Clock, Terminal

FIELDS = (
    ProgressFigure("first 1.000"),
    ProgressFigure("only in lines", only_in_lines=True),
    ProgressFigure("14.8k tok/s"),
    ProgressFigure("1.23 GB"),
)


def drawn(terminal: Terminal) -> list[str]:
    """Every frame of a bar, without what moves the cursor."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    return [frame.rstrip() for frame in re.split(r"[\r\n]+", text) if frame.strip()]


def play(reporter: ProgressReporter, clock: Clock, last: int, seconds: float) -> None:
    for count in range(1, last + 1):
        clock.now += seconds
        reporter.update(count, lambda: FIELDS)
    reporter.close()


def test_without_an_interval_a_line_comes_every_thirty_seconds() -> None:
    lines: list[str] = []
    clock = Clock()
    reporter = ProgressReporter(
        io.StringIO(), label="a", total=8, write_line=lines.append, clock=clock, as_percent=True
    )
    play(reporter, clock, 8, 10.0)
    assert [line.split("  ")[0] for line in lines] == ["a 38%", "a 75%"]


@pytest.mark.parametrize(
    ("columns", "shown", "left_out"),
    [(80, "14.8k tok/s  1.23 GB", "only in lines"), (50, "14.8k tok/s", "1.23 GB")],
)
def test_a_bar_has_the_figures_that_fit_its_terminal(
    columns: int, shown: str, left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal, clock = Terminal(), Clock()
    play(ProgressReporter(terminal, label="step", total=9, clock=clock), clock, 8, 2.0)
    frames = drawn(terminal)
    assert frames[-1].startswith("step 8/9")
    assert frames[-1].endswith(f"{shown}  eta 0:02")
    assert "first 1.000" in frames[-1]
    assert left_out not in terminal.getvalue()
    assert max(map(len, frames)) <= columns
    text = terminal.getvalue()
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is shown again"


def test_a_resumed_job_takes_its_pace_from_its_own_counts() -> None:
    stream, clock = io.StringIO(), Clock()
    reporter = ProgressReporter(stream, label="step", total=110, done=100, every=1, clock=clock)
    for step in range(101, 104):
        clock.now += 5.0
        reporter.update(step, lambda: ())
    assert stream.getvalue().splitlines()[-1] == "step 103/110  eta 0:35"


def test_without_a_total_a_line_has_the_count_alone_and_no_time_left() -> None:
    stream, clock = io.StringIO(), Clock()
    reporter = ProgressReporter(stream, label="document", total=None, clock=clock)
    play(reporter, clock, 4, 15.0)
    assert [line.split("  ")[:2] for line in stream.getvalue().splitlines()] == [
        ["document 2", "first 1.000"],
        ["document 4", "first 1.000"],
    ]
    assert "eta" not in stream.getvalue()
    assert reporter.seconds_left is None


def test_a_bar_without_a_total_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    terminal, clock = Terminal(), Clock()
    play(ProgressReporter(terminal, label="document", total=None, clock=clock), clock, 8, 2.0)
    last = drawn(terminal)[-1]
    assert last.startswith("document 8")
    assert last.endswith("14.8k tok/s  1.23 GB")


@pytest.mark.parametrize(
    ("value", "text"),
    [(4.0, "4.000"), (0.0001234, "0.0001234"), (1.2e-7, "1.200e-07"), (float("nan"), "nan")],
)
def test_a_small_loss_keeps_its_digits(value: float, text: str) -> None:
    assert significant(value) == text


@pytest.mark.parametrize(
    ("value", "count", "bytes_text"),
    [
        (2, "2", "2 bytes"),
        (9_999, "9999", "10 kB"),
        (10_000, "10k", "10 kB"),
        (999_499, "999k", "999 kB"),
        (999_936, "1M", "1 MB"),
        (999_700_000, "1G", "1 GB"),
        (20_480_000_000, "20.5G", "20.5 GB"),
    ],
)
def test_a_number_is_rounded_before_its_unit_is_chosen(
    value: int, count: str, bytes_text: str
) -> None:
    assert (short_count(value), size(value)) == (count, bytes_text)


class ClosedTerminal(Terminal):
    """Takes some writes, and none once its window is closed."""

    is_open = True

    def write(self, text: str) -> int:
        if not self.is_open:
            raise OSError(errno.EIO, "Input/output error")
        return super().write(text)


@pytest.mark.parametrize("shows_bar", [True, False])
def test_a_closed_terminal_ends_the_display_and_not_the_work(shows_bar: bool) -> None:
    terminal, clock = ClosedTerminal(), Clock()
    reporter = ProgressReporter(
        terminal, label="step", total=9, every=1, shows_bar=shows_bar, clock=clock
    )
    for count in range(1, 9):
        clock.now += 2.0
        reporter.update(count, lambda: FIELDS)
        terminal.is_open = count < 4
    reporter.line("a line")
    reporter.close()
    assert (reporter.done, reporter.per_second) == (8, 0.5)
    assert "step 4/9" in terminal.getvalue()
    assert "step 5/9" not in terminal.getvalue()

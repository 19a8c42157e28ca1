"""Standard output that cannot be written: one line or silence, and no traceback at the end."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_distill.launching.standard_output import status_with_output
from tests.guards.source_tree import ROOT

HELP = (sys.executable, "-m", "megatron_distill.cli", "--help")
FULL = (
    "error: standard output cannot be written (No space left on device); free disk space or send "
    "it elsewhere\n"
)


def ended(output: int) -> tuple[int, str]:
    """Exit status and standard error of a help that is written to this descriptor."""
    done = subprocess.run(
        HELP, cwd=ROOT, stdout=output, stderr=subprocess.PIPE, text=True, timeout=240, check=False
    )
    return done.returncode, done.stderr


def test_a_full_disk_is_one_line() -> None:
    with Path("/dev/full").open("wb") as full:
        assert ended(full.fileno()) == (1, FULL)


def test_a_reader_that_left_early_is_told_by_the_status_alone() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert ended(writer) == (141, "")
    finally:
        os.close(writer)


MESSAGES = """
import sys
from megatron_distill.launching.standard_output import status_with_output
def work():
    for number in range(3):
        sys.stderr.write(f"line {number}\\n")
    sys.stdout.write("the result\\n" * int(sys.argv[1]))
    return 0
sys.exit(status_with_output(work))
"""


@pytest.mark.parametrize(("results", "status"), [(0, 0), (1, 141)])
def test_a_reader_of_both_streams_that_left_early_is_silent(results: int, status: int) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-c", MESSAGES, str(results)]
    try:
        done = subprocess.run(words, cwd=ROOT, stdout=writer, stderr=writer, check=False)
    finally:
        os.close(writer)
    assert done.returncode == status


@pytest.mark.parametrize("device", ["/dev/full", None])
def test_messages_that_cannot_be_written_cost_no_result(device: str | None) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    file = os.open(device, os.O_WRONLY) if device else writer
    words = [sys.executable, "-c", MESSAGES, "1"]
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=file, check=False)
    os.close(writer)
    assert (done.returncode, done.stdout) == (0, b"the result\n")


class Failing(io.StringIO):
    """A stream whose disk is full, at the first write or at the end."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind
        self.writes = 0

    def write(self, text: str) -> int:
        self.writes += 1
        return self._refused() if self._kind == "write" else len(text)

    def flush(self) -> None:
        if self._kind == "flush":
            self._refused()

    def _refused(self) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("kind", ["write", "flush"])
def test_the_work_ends_as_it_would_and_then_the_failure_is_told(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks may be in a collective: no write raises."""
    stream, done = Failing(kind), []

    def work() -> int:
        for _ in range(2):
            sys.stdout.write("a result\n")
        done.append("all of it")
        return 0

    monkeypatch.setattr(sys, "stdout", stream)
    assert status_with_output(work) == 1
    assert sys.stdout is stream
    assert done == ["all of it"]
    assert capsys.readouterr().err == FULL
    assert stream.writes == (1 if kind == "write" else 2), "nothing after the first failure"


def test_a_commands_own_error_keeps_its_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", Failing("flush"))
    assert status_with_output(lambda: 78) == 78
    assert capsys.readouterr().err == FULL


def test_an_output_that_was_closed_before_the_start_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert status_with_output(lambda: 0) == 0
    assert status_with_output(lambda: sys.stdout.write("a result") * 0) == 1
    assert "cannot be written (Bad file descriptor)" in capsys.readouterr().err

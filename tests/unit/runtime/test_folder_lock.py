"""A second start in a folder that is in use: refused soon, or let in where the first one ends."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from megatron_distill.errors import ConfigError
from megatron_distill.runtime import folder_lock
from megatron_distill.runtime.folder_lock import is_released_here, refuse_holder, take_lock
from megatron_distill.runtime.termination import TerminationRequest

NAMED = "output=runs/a"


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISTILL_LAUNCH", "SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    return tmp_path / ".lock"


def let_go_later(held: folder_lock.FolderLock) -> None:
    threading.Timer(0.5, held.close).start()


def test_a_live_holder_is_named_within_seconds(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert folder_lock._MOMENT_SECONDS == 3.0
    monkeypatch.setattr(folder_lock, "_MOMENT_SECONDS", 0.3)
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    held, began = take_lock(lock, named=NAMED), time.monotonic()
    monkeypatch.setenv("SLURM_JOB_ID", "13")
    with pytest.raises(ConfigError) as early:
        refuse_holder(lock, named=NAMED)
    with pytest.raises(ConfigError) as refused:
        take_lock(lock, named=NAMED)
    assert 0.6 < time.monotonic() - began < 5
    host = os.uname().nodename
    text = (
        f"output=runs/a: another run (process {os.getpid()} of Slurm job 12 on {host}) is writing "
        "there; wait for its end, stop it, or name another folder"
    )
    assert str(early.value) == str(refused.value) == text
    held.close()
    refuse_holder(lock, named=NAMED)
    take_lock(lock, named=NAMED).close()
    refuse_holder(lock.with_name("none"), named=NAMED)


def test_a_holder_that_ends_in_this_moment_is_no_obstacle(lock: Path) -> None:
    let_go_later(take_lock(lock, named=NAMED))
    refuse_holder(lock, named=NAMED)
    take_lock(lock, named=NAMED).close()


def test_one_that_was_told_to_end_is_waited_for(
    lock: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(folder_lock, "_MOMENT_SECONDS", 0.0)
    monkeypatch.setattr(logging.getLogger("megatron_distill"), "propagate", True)
    with TerminationRequest() as request:
        held = take_lock(lock, named=NAMED)
        os.kill(os.getpid(), signal.SIGTERM)
    assert request.received
    refuse_holder(lock, named=NAMED)
    let_go_later(held)
    take_lock(lock, named=NAMED).close()
    (text,) = {*caplog.messages}
    assert "output=runs/a: waiting 120 s at most for another run (process " in text
    assert text.endswith("), which is ending")
    assert is_released_here(lock)
    assert "ending" not in lock.read_text()


def test_a_signal_after_the_end_of_a_run_marks_no_other_file(lock: Path) -> None:
    with TerminationRequest():
        take_lock(lock, named=NAMED).close()
        with lock.open("rb+") as other:  # takes the number of the closed descriptor
            os.kill(os.getpid(), signal.SIGTERM)
            assert b"ending" not in other.read()


def test_a_holder_that_does_not_end_in_time_is_named_with_the_wait(
    lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_lock, "_PATIENCE_SECONDS", 0.4)
    with TerminationRequest():
        held = take_lock(lock, named=NAMED)
        os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(ConfigError, match="there, still after a wait of 0 s; wait for"):
        take_lock(lock, named=NAMED)
    held.close()


@pytest.mark.parametrize(
    ("first", "second", "waits"),
    [
        ({"DISTILL_LAUNCH": "/l/12-0"}, {"DISTILL_LAUNCH": "/l/12-1"}, True),
        ({"DISTILL_LAUNCH": "/l/12-0"}, {"DISTILL_LAUNCH": "/l/13-0"}, True),  # of a chain
        ({"DISTILL_LAUNCH": "/l/12-0"}, {}, False),
        ({}, {"DISTILL_LAUNCH": "/l/12-0"}, False),
        ({"SLURM_JOB_ID": "12"}, {"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "1"}, True),
        ({"SLURM_JOB_ID": "1"}, {"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "1"}, False),
        ({"SLURM_JOB_ID": "12"}, {"SLURM_JOB_ID": "12"}, False),
    ],
)
def test_the_rank_before_a_requeue_is_waited_for(
    first: dict[str, str],
    second: dict[str, str],
    waits: bool,
    lock: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(folder_lock, "_MOMENT_SECONDS", 0.0)
    for name, value in first.items():
        monkeypatch.setenv(name, value)
    held = take_lock(lock, named=NAMED)
    for name in first:
        monkeypatch.delenv(name)
    for name, value in second.items():
        monkeypatch.setenv(name, value)
    if waits:
        refuse_holder(lock, named=NAMED)
        let_go_later(held)
        take_lock(lock, named=NAMED).close()
        return
    for attempt in (refuse_holder, take_lock):
        with pytest.raises(ConfigError, match="is writing there; wait for"):
            attempt(lock, named=NAMED)
    held.close()

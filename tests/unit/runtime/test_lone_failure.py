"""Ranks that fail or fall silent alone: signs, the main thread's place, locks, the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron_distill.errors import ConfigError
from megatron_distill.runtime import heartbeats, lone_failure, main_thread
from megatron_distill.runtime.folder_lock import take_lock
from megatron_distill.runtime.heartbeats import (
    SignsOfOne,
    give_sign,
    living,
    take_leave,
    without_signs,
)
from megatron_distill.runtime.lone_failure import LoneFailure, PeerWatch, Progress
from megatron_distill.runtime.main_thread import MainThread, awake_until
from megatron_distill.runtime.roles import Roles
from megatron_distill.runtime.termination import Interrupted, TerminationRequest
from tests.guards.source_tree import ROOT

# An allocation that is refused by the system, as by torch on a host without memory. No thread can
# start then either, since its stack needs memory too.
EXHAUSTED = """
import resource
import torch
import torch.distributed as dist
from megatron_distill.runtime.lone_failure import LoneFailure
from megatron_distill.runtime.roles import Roles

alone = LoneFailure(1, Roles(2, (("teacher", 1),)), dist.HashStore())
alone.progress.begin(7)
with alone:
    pages = int(open("/proc/self/statm").read().split()[0])
    limit = pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    torch.empty(1 << 40, dtype=torch.uint8)
"""


def test_exhausted_memory_is_named_with_role_and_step() -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXHAUSTED],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    last = done.stderr.rstrip().splitlines()[-1]
    assert last.startswith("error: teacher.0 on "), done.stderr
    assert " failed at step 7: RuntimeError: " in last
    assert "can't allocate memory: you tried to allocate 1099511627776 bytes" in last


@pytest.mark.parametrize("kind", [Interrupted, KeyboardInterrupt, ConfigError])
def test_a_stop_of_all_ranks_together_leaves_the_block(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "_exit", sys.exit)  # the end of a rank that fails alone
    with pytest.raises(kind), LoneFailure(1, Roles(2), dist.HashStore()):
        raise kind
    assert capsys.readouterr().err == ""


# Of the watching rank, with `runtime.timeout_seconds`: the patience and its name.
SILENT = {
    "it loads": (None, 600, 600.0, "runtime.timeout_seconds = 600 s"),
    "it trains": (7, 600, heartbeats.SILENT_SECONDS, "20 s"),
    "it trains with a short timeout": (7, 6, 6.0, "runtime.timeout_seconds = 6 s"),
}


@pytest.mark.parametrize("case", SILENT)
@pytest.mark.parametrize("rank", [0, 1], ids=["student", "teacher"])
def test_a_rank_without_signs_is_given_up_sooner_once_steps_run(
    case: str, rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step, timeout, patience, name = SILENT[case]
    store, peer = dist.HashStore(), 1 - rank
    roles = Roles(2, (("teacher", 1),))
    watch = PeerWatch(
        LoneFailure(rank, roles, store, Progress(step)), patience_seconds=float(timeout)
    )
    store.set(lone_failure.host_key(peer), "node-b")
    heartbeats.give_sign(store, peer)  # its last one
    looks: list[float] = []
    monkeypatch.setattr(watch, "_ended", SimpleNamespace(wait=looks.append))
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    with pytest.raises(SystemExit, match="1"):
        watch._watch()
    # The first look sees the sign. A launcher kills the stopped process 30 s later.
    assert patience <= sum(looks[1:]) < patience + lone_failure._WATCH_SECONDS
    assert step is None or sum(looks) + 30 < 60
    text = capsys.readouterr().err
    assert f"{roles.name(peer)} on node-b gave no sign of life for {name}, and " in text
    assert store.get("failed").decode() == str(peer)


def test_looks_without_a_new_sign_are_counted_from_the_first_sign_to_the_leave() -> None:
    store = dist.HashStore()
    signs = SignsOfOne(store, 3)
    assert [signs.silent_looks() for _ in range(2)] == [0, 0]  # it has not begun
    give_sign(store, 3)
    assert [signs.silent_looks() for _ in range(3)] == [0, 1, 2]
    give_sign(store, 3)
    assert [signs.silent_looks() for _ in range(2)] == [0, 1]
    take_leave(store, 3)
    assert [signs.silent_looks() for _ in range(2)] == [0, 0]


def test_ranks_that_give_a_sign_are_told_from_a_lost_one(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    for rank in range(4):
        give_sign(store, rank)
    monkeypatch.setattr(time, "sleep", lambda _: [give_sign(store, rank) for rank in (0, 3)])
    assert living(store, [1, 3], seconds=0.0) == [3]
    assert living(store, [0, 3], seconds=60.0) == [0, 3]


def test_a_rank_that_writes_is_not_taken_for_a_silent_one() -> None:
    store = dist.HashStore()
    signs = SignsOfOne(store, 1)
    give_sign(store, 1)
    assert [signs.silent_looks() for _ in range(2)] == [0, 1]
    with without_signs(store, 1):
        assert [signs.silent_looks() for _ in range(3)] == [0, 0, 0]
    assert [signs.silent_looks() for _ in range(2)] == [1, 2]


LOOKS, SECONDS, PATIENCE = 6, 0.05, 10.0


def waiting_main() -> MainThread:
    """The main thread, which has come to its wait: it has used no processor for some looks."""
    main = MainThread()
    while main.idle_looks() < LOOKS:
        time.sleep(SECONDS)
    return MainThread()


def seen(found: Future[tuple[list[int], str]]) -> None:
    """Look at the main thread again and again, once it waits."""
    main = waiting_main()
    looks = []
    for _ in range(LOOKS):
        looks.append(main.idle_looks())
        time.sleep(SECONDS)
    found.set_result((looks, main.stack()[-1].name))


def runs(found: Future[bool]) -> None:
    """Look at the main thread as often as it is seen to run; False: once it was not.

    A busy machine may give it a core long after it wants one.
    """
    main = MainThread()
    main.idle_looks()
    for _ in range(LOOKS):
        end = time.monotonic() + PATIENCE
        while main.idle_looks() > 0:
            if time.monotonic() > end:
                found.set_result(False)
                return
            time.sleep(SECONDS)
        time.sleep(SECONDS)
    found.set_result(True)


def test_looks_at_a_single_wait_are_counted_and_its_place_is_known() -> None:
    found: Future[tuple[list[int], str]] = Future()
    thread = threading.Thread(target=seen, args=[found])
    thread.start()
    thread.join()  # the wait
    looks, place = found.result()
    assert looks == list(range(LOOKS))
    assert place == "_wait_for_tstate_lock"


def test_a_wait_for_a_checkpoint_and_a_computation_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main_thread, "_PAUSE_SECONDS", SECONDS / 10)
    found: Future[bool] = Future()
    threading.Thread(target=runs, args=[found]).start()
    assert awake_until(found)

    again: Future[bool] = Future()
    threading.Thread(target=runs, args=[again]).start()
    while not again.done():
        sum(range(1000))
    assert again.result()


def test_a_signal_to_stop_ends_the_wait(tmp_path: Path) -> None:
    held = take_lock(tmp_path / "lock", named="output=runs/a", holder="job 7 on n1")
    (tmp_path / "lock").write_text("job 7 on n1\nending\n")
    began = time.monotonic()
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        with TerminationRequest() as request, pytest.raises(ConfigError) as refused:
            take_lock(tmp_path / "lock", named="output=runs/a")
    finally:
        held.close()
    assert request.received
    assert time.monotonic() - began < 30
    assert str(refused.value).startswith("output=runs/a: another run (job 7 on n1) is writing")

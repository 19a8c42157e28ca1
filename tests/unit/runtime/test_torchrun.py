"""Child processes under torchrun: signals, exit statuses, abandoned ranks."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from megatron_distill.runtime.torchrun import (
    keep_threads_awake,
    run_child,
    threads_per_process,
    torchrun_command,
)

PATIENCE = 240.0  # nothing takes that long but a hang

# A launcher with two ranks in sessions of their own, as torchrun's are. A rank writes its process
# id, then waits; on SIGTERM it prints `saved` and leaves with 0, or ignores it.
RANK = textwrap.dedent(
    """
    import os, pathlib, signal, sys, time
    folder, rank, ignores = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "ignoring"
    def save(*_):
        (folder / f"saved{rank}").touch()
        sys.exit(0)
    def note(*_):
        (folder / f"signalled{rank}").touch()
    signal.signal(signal.SIGTERM, note if ignores else save)
    part = folder / f"part{rank}"
    part.write_text(str(os.getpid()))
    part.rename(folder / f"rank{rank}")
    while True:
        time.sleep(600)
    """
)
LAUNCHER = textwrap.dedent(
    """
    import pathlib, signal, subprocess, sys
    folder, manner, rank_program = sys.argv[1], sys.argv[2], sys.argv[3]
    signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path(folder) / "launcher_hit").touch())
    ranks = [
        subprocess.Popen([sys.executable, "-c", rank_program, folder, str(rank), manner],
                         start_new_session=True)
        for rank in range(2)
    ]
    if manner == "abandon":
        import time
        while not (pathlib.Path(folder) / "looked").exists():
            time.sleep(0.02)
        sys.exit(7)
    sys.exit(max(rank.wait() for rank in ranks))
    """
)
PARENT = textwrap.dedent(
    """
    import os, signal, sys
    from megatron_distill.runtime.torchrun import run_child
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    outcome = run_child([sys.executable, "-c", *sys.argv[2:]], environment=os.environ,
                        grace_seconds=float(sys.argv[1]))
    print(outcome.status, outcome.interrupted_by, outcome.is_late)
    """
)


# It notes that it has seen both ranks.
LOOKING = """\
import pathlib, sys
from megatron_distill.runtime import torchrun
usual = torchrun._Family._look
def look(family):
    usual(family)
    folder = pathlib.Path(sys.argv[3])
    if len(family._seen) >= 2 and len(list(folder.glob("rank*"))) == 2:
        (folder / "looked").touch()
torchrun._Family._look = look
"""
# Under a scheduler, which may send one request as several signals.
SCHEDULED = PARENT.replace("grace_seconds=", "signals=(15, 10), second_kills=False, grace_seconds=")


def start(
    folder: Path, manner: str, *, grace_seconds: float = 60, parent: str = PARENT
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, "-c", parent, str(grace_seconds)),
            *(LAUNCHER, str(folder), manner, RANK),
        ],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for(folder: Path, names: str) -> None:
    """Wait for a file of each rank."""
    deadline = time.monotonic() + PATIENCE
    while len(list(folder.glob(names))) < 2:
        assert time.monotonic() < deadline, f"there is no {names} of each rank"
        time.sleep(0.02)


def rank_processes(folder: Path) -> list[psutil.Process]:
    wait_for(folder, "rank*")
    return [psutil.Process(int(path.read_text())) for path in sorted(folder.glob("rank*"))]


def assert_gone(ranks: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(ranks, timeout=PATIENCE)
    assert not alive


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_every_rank_save_and_leave(tmp_path: Path, number: int) -> None:
    parent = start(tmp_path, "listen")
    ranks = rank_processes(tmp_path)
    # As a terminal does: to the whole group of the foreground.
    os.killpg(parent.pid, number)
    printed, _ = parent.communicate(timeout=PATIENCE)
    assert printed.split() == ["0", str(int(number)), "False"]
    assert (tmp_path / "saved0").exists()
    assert (tmp_path / "saved1").exists()
    assert not (tmp_path / "launcher_hit").exists()
    assert_gone(ranks)


@pytest.mark.slow
def test_a_second_signal_kills_ranks_that_do_not_listen(tmp_path: Path) -> None:
    parent = start(tmp_path, "ignoring")
    ranks = rank_processes(tmp_path)
    parent.send_signal(signal.SIGINT)
    wait_for(tmp_path, "signalled*")
    assert parent.poll() is None, "the first signal waits"
    parent.send_signal(signal.SIGINT)
    parent.communicate(timeout=PATIENCE)
    assert_gone(ranks)


def test_several_signals_of_a_scheduler_are_one_request(tmp_path: Path) -> None:
    parent = start(tmp_path, "listen", parent=SCHEDULED)
    ranks = rank_processes(tmp_path)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
        parent.send_signal(number)
    printed, _ = parent.communicate(timeout=PATIENCE)
    assert printed.split()[0] == "0"
    assert (tmp_path / "saved0").exists()
    assert (tmp_path / "saved1").exists()
    assert_gone(ranks)


# Its job ends in 30 s.
LIMITED = PARENT.replace("grace_seconds=", "latest=time.time() + 30.0, grace_seconds=").replace(
    "import os", "import time, os"
)


@pytest.mark.slow
@pytest.mark.parametrize(("grace", "parent"), [(0.5, PARENT), (3600.0, LIMITED)])
def test_ranks_that_do_not_listen_are_killed_after_the_grace_or_before_the_end(
    tmp_path: Path, grace: float, parent: str
) -> None:
    process = start(tmp_path, "ignoring", grace_seconds=grace, parent=parent)
    ranks = rank_processes(tmp_path)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=PATIENCE)
    assert printed.split()[1:] == [str(int(signal.SIGTERM)), "True"]
    assert_gone(ranks)


@pytest.mark.slow
def test_ranks_abandoned_by_their_launcher_are_ended(tmp_path: Path) -> None:
    parent = start(tmp_path, "abandon", parent=LOOKING + PARENT)
    ranks = rank_processes(tmp_path)
    printed, _ = parent.communicate(timeout=PATIENCE)
    assert printed.split() == ["7", "None", "False"]
    assert_gone(ranks)


def test_the_childs_status_environment_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    program = "import os, sys; sys.exit(int(os.environ['STATUS']))"
    outcome = run_child([sys.executable, "-c", program], environment={**os.environ, "STATUS": "3"})
    assert (outcome.status, outcome.interrupted_by) == (3, None)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_the_command_is_torchrun_by_this_python_with_a_port_of_its_own() -> None:
    command = torchrun_command("launch/x.py", ["--config", "a b.yaml"], processes=4)
    assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert "--standalone" in command
    assert command[-4:] == ["--nproc-per-node=4", "launch/x.py", "--config", "a b.yaml"]


@pytest.mark.parametrize(("cores", "processes", "threads"), [(2, 4, 1), (16, 4, 4), (7, 2, 3)])
def test_threads_use_each_core_once(
    cores: int, processes: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_distill.runtime.torchrun.available_cores", lambda: cores)
    assert threads_per_process(processes) == threads


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ("active", "300000")),
        ({"GOMP_SPINCOUNT": "7"}, ("active", "7")),
        ({"OMP_WAIT_POLICY": "passive"}, ("passive", None)),
    ],
)
def test_threads_wait_awake_unless_the_user_has_a_policy(
    given: dict[str, str], expected: tuple[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    for name in names:
        monkeypatch.setenv(name, "")  # for the end of the test, which restores it
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    keep_threads_awake()
    assert tuple(map(os.environ.get, names)) == expected


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="torch has libgomp on Linux alone")
def test_a_command_s_threads_wait_awake(tmp_path: Path) -> None:
    """Torch is loaded after the variables are set: its library shows them when it is."""
    free = {name: value for name, value in os.environ.items() if "SPINCOUNT" not in name}
    free.pop("OMP_WAIT_POLICY", None)
    words = ["-m", "megatron_distill.cli", "generate", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, *words], env={**free, "OMP_DISPLAY_ENV": "verbose"},
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert "OMP_WAIT_POLICY = 'ACTIVE'" in done.stderr
    assert "GOMP_SPINCOUNT = '300000'" in done.stderr

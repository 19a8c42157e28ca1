"""Programs that stand in for Slurm's, nvidia-smi and torchrun, and jobs that the real scripts run.

`srun` starts its command here, once for each node of its list, and passes on SIGUSR1. Programs in
the folder `on_n1` come first on node n1. Node n7 has the address 127.0.0.7.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_distill.cli import main
from megatron_distill.launching.records import Launches, Outcome
from tests.guards.source_tree import ROOT

BY_HAND = ROOT / "launch" / "slurm.sbatch"
PATIENCE = 120.0  # seconds; nothing takes that long but a hang
_FIRST_PORT, _PORTS = 10_000, 20_000  # of rendezvous, as docs/clusters.md has them
_SEPARATOR = "\x1f"  # between the words of a call
_NEEDED = ("bash", "sh", "tr")  # nothing else of this machine, such as its Slurm, is found

_LOGGED = "{{ printf '%s\\037' {name} \"$@\"; echo; }} >> {log}\n"
_PROGRAMS = {
    "sbatch": 'echo "$JOB;cluster"',
    "scontrol": """\
case "$1 $2" in
    "show hostnames") printf '%s\\n' $NODES ;;
    "show job") echo "JobId=$JOB EndTime=Unknown ExcNodeList=(null)" ;;
    "show node") echo "NodeName=$3 NodeAddr=127.0.0.${{3#n}}" ;;
esac
""",
    "squeue": """\
case "$*" in
    *--jobs=*) echo job.sbatch ;;
    *) printf '4712 job.sbatch\\n4713 other.sbatch\\n' ;;
esac
""",
    "srun": """\
while true; do
    case "$1" in
        --nodelist=*) nodes=${{1#--nodelist=}}; shift ;;
        --*) shift ;;
        *) break ;;
    esac
done
place=0 tasks=
trap 'kill -USR1 $tasks' USR1
for node in $(echo "$nodes" | tr , ' '); do
    SLURMD_NODENAME=$node SLURM_NODEID=$place PATH={folder}/on_$node:$PATH "$@" &
    tasks="$tasks $!" place=$((place + 1))
done
worst=0
for task in $tasks; do
    wait "$task"
    status=$?
    while [ $status -eq 138 ]; do  # SIGUSR1 has come
        wait "$task"
        status=$?
    done
    [ $status -eq 0 ] || worst=$status
done
exit $worst
""",
}
# In place of torchrun, with RANKS: its words are written down, and RANKS is the node's outcome.
# Real ranks write down where they run.
_TORCHRUN = """\
import json, os, signal, sys, time
module = "megatron_distill.launching.ranks"
def note(*words):
    with open({log!r}, "a") as log:
        log.write({separator!r}.join([*words, ""]) + "\\n")
if module in sys.orig_argv and "RANKS" in os.environ:
    folder, node, index, _, *words = sys.orig_argv[sys.orig_argv.index(module) + 1 :]
    status, told = os.environ["RANKS"], []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    note("torchrun", node, *words)
    end = time.monotonic() + {patience}
    while status == "unfinished" and not told and time.monotonic() < end:
        time.sleep(0.01)
    outcome = {{"node": node, "index": int(index), "status": status, "seconds": time.time()}}
    outcome["message"] = None if status in ("done", "unfinished") else "error: of the ranks"
    with open(f"{{folder}}/nodes/{{index}}.json", "w") as file:
        json.dump(outcome, file)
    os._exit(0)
if "RANK" in os.environ:
    note("rank", os.environ["RANK"], os.environ["SLURMD_NODENAME"])
"""
_GPUS = """\
case "$1" in
    --list-gpus) printf 'GPU 0: a\\nGPU 1: a\\n' ;;
    --query-gpu=*) printf '0, 0\\n1, 0\\n' ;;
esac
"""


@dataclass(frozen=True)
class StandIn:
    """The programs' folder, what they were called with, and a script of settings to submit.

    job: the number of Slurm, from which a port follows that is free.
    """

    folder: Path
    job: int

    @property
    def port(self) -> int:
        return _FIRST_PORT + self.job % _PORTS

    @property
    def program(self) -> str:
        return str(self.folder / "program.py")

    def called(self, *start: str) -> list[list[str]]:
        """The calls that begin with these words; torchrun's have the node as second word."""
        lines = (self.folder / "log").read_text().splitlines()
        calls = [line.split(_SEPARATOR)[:-1] for line in lines]
        return [one for one in calls if one[: len(start)] == list(start)]

    @property
    def launches(self) -> Launches:
        return Launches(self.folder / "run" / "launches", self.folder / "run", "")

    @property
    def outcomes(self) -> list[Outcome | None]:
        return [self.launches.outcome(launch) for launch in self.launches.all()]

    def give_gpus(self, *nodes: str) -> None:
        """Let these nodes have an nvidia-smi, with two GPUs."""
        for node in nodes:
            (self.folder / f"on_{node}").mkdir()
            _write_program(self.folder / f"on_{node}" / "nvidia-smi", _GPUS)

    def submit(self, *words: str, program: Sequence[str] = ()) -> Path:
        """Submit over two nodes by the command; returns the batch script.

        program: () is that of settings.
        """
        program = program or ("--command", self.program, "teacher.ranks=2")
        assert main(["submit", "slurm", *program, "--nodes", "2", *words]) == 0
        (submitted,) = self.called("sbatch")
        return Path(submitted[-1])

    @contextmanager
    def job_of(
        self, script: Path, *words: str, nodes: Sequence[str] = ("n1", "n2", "n3"), **more: str
    ) -> Iterator[subprocess.Popen[str]]:
        """A batch script as Slurm runs it, in a job of these nodes; more: variables."""
        variables = {
            "SLURM_JOB_ID": str(self.job), "SLURM_JOB_NODELIST": "n[...]", "NODES": " ".join(nodes),
            "JOB": str(self.job), "PYTHON": sys.executable,
            "PYTHONPATH": f"{self.folder / 'hook'}{os.pathsep}{ROOT}", **more,
        }  # fmt: skip
        job = subprocess.Popen(
            ["bash", str(script), *words], env=os.environ | variables, cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        try:
            yield job
        finally:
            with suppress(ProcessLookupError):
                job.kill()
            job.communicate()

    def run(
        self, script: Path, *words: str, nodes: Sequence[str] = ("n1", "n2", "n3"), **more: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a batch script to its end. RANKS: the outcome of the ranks of each node."""
        with self.job_of(script, *words, nodes=nodes, **more) as job:
            out, err = job.communicate(timeout=PATIENCE)
        return subprocess.CompletedProcess([], job.returncode, out, err)

    def warn(self, job: subprocess.Popen[str], *, nodes: int) -> str:
        """Send what Slurm sends before the time limit, once all nodes run; returns the log."""
        deadline = time.monotonic() + PATIENCE
        while len(self.called("torchrun")) < nodes:
            assert job.poll() is None, job.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        job.send_signal(signal.SIGUSR1)
        _, err = job.communicate(timeout=PATIENCE)
        return err


@contextmanager
def programs(folder: Path) -> Iterator[StandIn]:
    """Programs of a job with a port of its own; no others of this machine are found."""
    with pytest.MonkeyPatch.context() as patch:
        (folder / "bin").mkdir()
        for name in _NEEDED:
            (folder / "bin" / name).symlink_to(_found(name))
        log = folder / "log"
        log.touch()
        for name, text in _PROGRAMS.items():
            text = (_LOGGED + text).format(name=name, log=log, folder=folder)
            _write_program(folder / "bin" / name, text)
        (folder / "hook").mkdir()
        hook = _TORCHRUN.format(log=str(log), separator=_SEPARATOR, patience=PATIENCE)
        (folder / "hook" / "sitecustomize.py").write_text(hook)
        (folder / "program.py").write_text(f"print({f'output: {folder}/run'!r})\n")
        for name in [name for name in os.environ if name.startswith("SLURM")]:
            patch.delenv(name)
        found = StandIn(folder, _free_job())
        patch.setenv("PATH", str(folder / "bin"))
        patch.setenv("JOB", str(found.job))
        yield found


def _write_program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def _found(name: str) -> Path:
    return next(path for path in (Path("/bin", name), Path("/usr/bin", name)) if path.exists())


def _free_job() -> int:
    """A number of a job whose port is free."""
    for port in range(_FIRST_PORT + os.getpid() % _PORTS, _FIRST_PORT + 2 * _PORTS):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", _FIRST_PORT + port % _PORTS))
            return port % _PORTS + _PORTS
    raise AssertionError("no free port")

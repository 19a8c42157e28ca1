"""A real Slurm of several nodes on this machine: own munged, slurmctld and slurmd, all ended."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
PATIENCE = 240.0  # nothing takes that long but a hang
_FOLDERS = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"))
_MARK = "MEGATRON_DISTILL_TEST_CLUSTER"  # in the environment of everything that the cluster starts
_JOBS = 20  # at most, of a cluster
_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
FirstJobId={first_job}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdTimeout=10
KillWait=120
MailProg=/bin/true
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
"""
_NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=8000\n"
)
_PARTITION = "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"


def missing_programs() -> list[str]:
    """Return the programs of Slurm and munge that this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name, path=_FOLDERS) is None]


@dataclass
class Cluster:
    """A running Slurm; `daemons` are its slurmd processes by the name of the node."""

    folder: Path
    environment: dict[str, str]
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def call(self, *words: str) -> str:
        """Run one of Slurm's programs and return what it printed."""
        done = subprocess.run(
            words, env=self.environment, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def submit(self, words: Sequence[str], *, nodes: int = 2, options: Sequence[str] = ()) -> Job:
        """Submit launch/slurm.sbatch with small demands."""
        log = self.folder / "job-%j.log"
        asked = [f"--nodes={nodes}", "--cpus-per-task=1", f"--output={log}", *options]
        number = self.call("sbatch", "--parsable", *asked, "launch/slurm.sbatch", *words).strip()
        return Job(self, number, self.folder / f"job-{number}.log")

    def submit_by_command(
        self, words: Sequence[str], *, logs: Path, nodes: int = 2, ranks: int = 1
    ) -> list[Job]:
        """Submit by `megatron-distill submit slurm`; `logs`: the folder of the launches."""
        program = [sys.executable, "-m", "megatron_distill.cli", "submit", "slurm"]
        asked = ["--nodes", f"{nodes}", "--cpus-per-task", "1", "--ranks-per-node", f"{ranks}"]
        numbers = self.call(*program, *asked, *words).split()
        return [Job(self, number, logs / f"log-{number}.txt") for number in numbers]

    def cancel_jobs(self) -> None:
        """Cancel every job, and wait for their ends."""
        left = self.call("squeue", "--noheader", "--format=%i").split()
        if left:
            self.call("scancel", *left)
        self.wait_until(
            lambda: not self.call("squeue", "--noheader").strip(), lambda: self.call("squeue")
        )

    def kill_node(self, name: str) -> None:
        """End a node as a power cut does: its daemon and all processes of its steps."""
        daemon = self.daemons.pop(name)
        daemon.kill()
        daemon.wait()
        for process in self.processes():
            with suppress(psutil.Error):
                found = process.environ()  # of a daemon that runs a step, or of the step
                if name in (found.get("SLURM_TEST_NODE"), found.get("SLURMD_NODENAME")):
                    process.kill()

    def give_up_node(self, name: str) -> None:
        """Call a node down now, as Slurm does once it has been silent for SlurmdTimeout."""
        self.call("scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=silent")

    def start_node(self, name: str) -> None:
        """Start a node's daemon."""
        slurmd = shutil.which("slurmd", path=_FOLDERS)
        assert slurmd is not None
        with (self.folder / f"{name}.log").open("ab") as log:
            self.daemons[name] = subprocess.Popen(
                [slurmd, "-D", "-N", name, "-f", str(self.folder / "slurm.conf")],
                env=self.environment | {"SLURM_TEST_NODE": name},
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def processes(self) -> Iterator[psutil.Process]:
        """Return every process that belongs to this cluster."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(_MARK) == str(self.folder):
                    yield process

    def wait_until(self, condition: Callable[[], bool], message: Callable[[], str]) -> None:
        """Wait for something, and fail with a text if it does not come."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, message()
            time.sleep(0.1)


@dataclass(frozen=True)
class Job:
    """A submitted job."""

    cluster: Cluster
    number: str
    file: Path

    @property
    def fields(self) -> Mapping[str, str]:
        """The job in `scontrol show job`."""
        line = self.cluster.call("scontrol", "show", "job", self.number, "--oneliner")
        return dict(word.split("=", 1) for word in line.split() if "=" in word)

    @property
    def log(self) -> str:
        """The job's log."""
        return self.file.read_text(errors="replace") if self.file.exists() else ""

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait for something that this job does."""
        self.cluster.wait_until(condition, lambda: f"{self.fields}\n{self.log}")

    def wait_for_end(self) -> str:
        """Wait until the job has ended for good, and return `STATE status:signal`."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")
        self.wait_for(lambda: self.fields["JobState"].startswith(ended))
        return f"{self.fields['JobState']} {self.fields['ExitCode']}"

    def task(self, number: int) -> Job:
        """Return a task of this array."""
        name = f"{self.number}_{number}"
        return Job(self.cluster, name, self.file.with_name(f"log-{name}.txt"))

    def warn(self) -> None:
        """Tell the batch script what Slurm tells it before the time limit."""
        self.batch_process().send_signal(signal.SIGUSR1)

    def batch_process(self) -> psutil.Process:
        """Return the process of the batch script."""
        number, _, task = self.number.partition("_")
        for process in self.cluster.processes():
            with suppress(psutil.Error):
                found = process.environ()
                job = found.get("SLURM_ARRAY_JOB_ID", found.get("SLURM_JOB_ID"))
                is_of_job = (job, found.get("SLURM_ARRAY_TASK_ID", "")) == (number, task)
                if is_of_job and "megatron_distill.launching.slurm_job" in process.cmdline():
                    return process
        raise AssertionError(f"no batch script\n{self.log}")

    def cancel(self) -> None:
        """Cancel the job and wait for its end."""
        self.cluster.call("scancel", self.number)
        self.wait_for_end()

    def ranks(self) -> list[psutil.Process]:
        """Return the running ranks of the job, by their number."""
        ranks = {}
        for process in self.cluster.processes():
            with suppress(psutil.Error):
                found = process.environ()
                if found.get("SLURM_JOB_ID") == self.number and "RANK" in found:
                    ranks.setdefault(int(found["RANK"]), process)
        return [ranks[rank] for rank in sorted(ranks)]

    def rank(self, rank: int) -> psutil.Process:
        """Return a running rank of the job."""
        ranks = self.ranks()
        assert len(ranks) > rank, f"no rank {rank}\n{self.log}"
        return ranks[rank]


@contextmanager
def slurm_cluster(folder: Path, *, nodes: Sequence[str]) -> Iterator[Cluster]:
    """Start a Slurm with these nodes; whatever happens, nothing of it is left at the end."""
    user, host = pwd.getpwuid(os.getuid()).pw_name, socket.gethostname()
    ports = free_ports(1 + len(nodes))
    # Jobs of two clusters on this machine have other numbers, and so other ports of rendezvous.
    text = _CONFIGURATION.format(
        host=host, port=ports[0], first_job=_JOBS * ports[0], user=user, folder=folder
    )
    for name, port in zip(nodes, ports[1:], strict=True):
        text += _NODE.format(name=name, host=host, port=port)
        (folder / name).mkdir()
    (folder / "state").mkdir()
    (folder / "slurm.conf").write_text(text + _PARTITION)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    cluster = Cluster(folder, _environment(folder))
    with ExitStack() as stack:
        stack.callback(_end, cluster)
        _start(cluster, stack, "munged", *_munge_options(folder))
        cluster.wait_until((folder / "munge.socket").exists, lambda: _logs(folder))
        _start(cluster, stack, "slurmctld", "-D", "-f", str(folder / "slurm.conf"))
        for name in nodes:
            cluster.start_node(name)
        cluster.wait_until(lambda: _idle(cluster) == len(nodes), lambda: _logs(folder))
        yield cluster


def _environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    return kept | {
        "SLURM_CONF": str(folder / "slurm.conf"),
        "PATH": _FOLDERS,
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        _MARK: str(folder),
    }


def _munge_options(folder: Path) -> list[str]:
    files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log"}
    names = [f"--{option}={folder}/munge.{file}" for option, file in files.items()]
    return ["--foreground", "--force", *names, f"--seed-file={folder}/munge.seed"]


def _start(cluster: Cluster, stack: ExitStack, name: str, *options: str) -> None:
    program = shutil.which(name, path=_FOLDERS)
    assert program is not None
    log = stack.enter_context((cluster.folder / f"{name}.log").open("ab"))
    daemon = subprocess.Popen(
        [program, *options],
        env=cluster.environment, stdout=log, stderr=log, start_new_session=True,
    )  # fmt: skip
    stack.callback(daemon.wait)
    stack.callback(daemon.kill)


def _idle(cluster: Cluster) -> int:
    try:
        found = cluster.call("sinfo", "--noheader", "--Node", "--format=%T")
    except AssertionError:  # slurmctld does not answer yet
        return 0
    return found.split().count("idle")


def _logs(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace")[-2000:] for path in folder.glob("*.log"))


def _end(cluster: Cluster) -> None:
    for daemon in cluster.daemons.values():
        daemon.kill()
        daemon.wait()
    left = [*cluster.processes(), *_steps(cluster.folder)]
    for process in left:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=30)


def _steps(folder: Path) -> Iterator[psutil.Process]:
    """Return Slurm's processes of steps, which have no environment, by their sockets."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.name().startswith("slurmstepd"):
                sockets = process.net_connections("unix")
                if any(str(one.laddr).startswith(f"{folder}/") for one in sockets):
                    yield process


def free_ports(count: int) -> list[int]:
    """Return ports that are free now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]

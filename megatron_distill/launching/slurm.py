"""A job of Slurm as its batch script sees it: nodes, steps, end, requeue."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from megatron_distill.errors import ConfigError
from megatron_distill.launching.ports import PORTS, TRIED_PORTS
from megatron_distill.log import get_logger

__all__ = ["Container", "SlurmJob"]

_LOGGER = get_logger(__name__)
_SECONDS: Final = 60.0  # of a call of Slurm's programs
_RUNNING: Final = frozenset({"RUNNING", "SUSPENDED", "STOPPED", "CONFIGURING"})
# Of nodes, as sinfo writes them: states that an administrator ends, and marks behind a state. Four
# marks are of a restart, after which Slurm itself takes the node back.
_OUT: Final = frozenset({"drained", "draining", "fail", "failing", "future", "inval"})
_MARKS: Final = "*~#!%$@^+-"
_RESTARTS: Final = frozenset("@^!%")
_STRIDE: Final = 7919  # to another port, so that jobs with numbers side by side never meet there


@dataclass(frozen=True)
class Container:
    """An image that pyxis, a plugin of Slurm, starts on each node; `mounts` as it writes them."""

    image: str
    mounts: str | None = None
    python: str = "python3"

    def options(self, folder: str) -> list[str]:
        """Return the options of srun; the image sees `folder` under the same path."""
        mounts = [f"{folder}:{folder}", *([] if self.mounts is None else [self.mounts])]
        return [
            f"--container-image={self.image}",
            f"--container-mounts={','.join(mounts)}",
            f"--container-workdir={folder}",
            "--no-container-mount-home",
        ]


@dataclass(frozen=True)
class SlurmJob:
    """The job of this batch script.

    Attributes:
        job: its number. restart: how often it was requeued.
        nodes: names, in Slurm's order. end: of its time, seconds since the epoch; None: no limit.
        waited: seconds in the queue, after the jobs that it depends on; None: Slurm does not say.
        shown: its name for scontrol, which in an array has the task's number.
        cpus: of each task, where the job asks for them.
    """

    job: str
    shown: str
    restart: int
    nodes: tuple[str, ...]
    end: float | None
    waited: float | None = None
    cpus: str | None = None
    container: Container | None = None
    node_options: tuple[str, ...] = ()

    @classmethod
    def from_environment(cls, container: Container | None) -> SlurmJob:
        """Read the job that this process belongs to; raises ConfigError outside of one."""
        job = os.environ.get("SLURM_JOB_ID")
        if job is None:
            raise ConfigError(
                "SLURM_JOB_ID is not set: this runs in a job of Slurm; submit it with "
                "`megatron-distill submit slurm` or `sbatch launch/slurm.sbatch`"
            )
        array = os.environ.get("SLURM_ARRAY_JOB_ID")
        shown = job if array is None else f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
        names = _answer("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"])
        found = _fields(_answer("scontrol", "show", "job", shown, "--oneliner"))
        eligible, start = (_seconds_of(found, name) for name in ("EligibleTime", "StartTime"))
        return cls(
            job=job,
            shown=shown,
            restart=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
            nodes=tuple(names.split()),
            end=_seconds_of(found, "EndTime"),
            waited=None if eligible is None or start is None else max(0.0, start - eligible),
            cpus=os.environ.get("SLURM_CPUS_PER_TASK"),
            container=container,
        )

    def on_nodes(self, nodes: Sequence[str], *, waits: int = 60) -> list[str]:
        """Return the start of a command that runs once on each of these nodes.

        waits: seconds for the last node after the first has ended; 0: no node ends another one,
        not even by a failure.
        """
        words = [
            "srun",
            f"--nodes={len(nodes)}",
            f"--ntasks={len(nodes)}",
            "--ntasks-per-node=1",
            f"--nodelist={','.join(nodes)}",
            f"--kill-on-bad-exit={int(waits > 0)}",
            f"--wait={waits}",
            "--export=ALL",
        ]
        words += [] if self.cpus is None else [f"--cpus-per-task={self.cpus}"]
        return words + ([] if self.container is None else self.container.options(str(Path.cwd())))

    def stop(self, step: subprocess.Popen[bytes]) -> None:
        """Tell the tasks of a step that `on_nodes` has started to stop."""
        step.send_signal(signal.SIGUSR1)  # srun passes it on; it would answer SIGTERM by a kill

    def address(self, node: str) -> str:
        """Return a name or an address that other nodes reach this one by."""
        with suppress(OSError):
            socket.getaddrinfo(node, None)
            return node
        found = _fields(_answer("scontrol", "show", "node", node, "--oneliner"))
        return found.get("NodeAddr", node)

    @property
    def ports(self) -> Sequence[int]:
        """Ports that follow from the job's number; the second and later are for taken ones."""
        numbers = (int(self.job) + place * _STRIDE for place in range(TRIED_PORTS))
        return [PORTS[number % len(PORTS)] for number in numbers]

    def pause(self, starts: int) -> float:
        """Return 0: the queue of Slurm makes a requeued job wait."""
        del starts
        return 0.0

    def requeue(self, *, without: Sequence[str], silent: Sequence[str]) -> str | None:
        """Put the job back into its queue, to start on other nodes than `without`.

        A silent one may be back: it is not excluded where the partition has too few others. Returns
        the reason where Slurm refuses, or where the job would wait for ever. The job ends soon
        after.
        """
        job, lack, added = _shown(self.shown), None, list(without)
        if added:
            lack = _lack(job, added, wanted=len(self.nodes))
        if lack is not None and not set(added).isdisjoint(silent):
            _LOGGER.warning("%s: a node that has not answered may be back", lack)
            added = [node for node in without if node not in silent]
            lack = _lack(job, added, wanted=len(self.nodes)) if added else None
        if lack is not None:
            return (
                f"{lack}: repair or resume enough of them, remove their lines in "
                "`launches/bad_nodes`, and submit the job again"
            )
        failure = _failure("scontrol", "requeue", self.shown)
        if failure is None and added:
            nodes = f"ExcNodeList={','.join([*_excluded(job), *added])}"
            # Slurm now ends all processes of the job, and takes this only of a job that waits.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            refused = _failure("scontrol", "update", f"JobId={self.shown}", nodes)
            if refused is not None:
                _LOGGER.warning("requeued, but without its exclusion of nodes: %s", refused)
        return None if failure is None else f"{failure}; submit the job again"

    def exclude_later(self, nodes: Sequence[str]) -> None:
        """Let waiting jobs of the same script and words start on other nodes than these.

        Not where their partition has too few others for them, so that none waits for ever.
        """
        try:
            own = _answer("squeue", "--noheader", f"--jobs={self.job}", "--format=%o")
            user = f"--user={os.getuid()}"
            waiting = _answer(
                *("squeue", "--noheader", "--array", user, "--states=PENDING", "--format=%i %o")
            )
        except ConfigError as error:
            _LOGGER.warning("later jobs do not exclude %s: %s", ", ".join(nodes), error)
            return
        command = own.partition("\n")[0].strip()  # an array has a line for each of its tasks
        found = [line.strip().partition(" ") for line in waiting.splitlines()]
        for later in [name for name, _, its in found if command and its == command]:
            job = _shown(later)
            refused = _lack(job, nodes, wanted=_wanted(job) or len(self.nodes))
            if refused is None:
                excluded = ",".join([*_excluded(job), *nodes])
                refused = _failure(
                    "scontrol", "update", f"JobId={later}", f"ExcNodeList={excluded}"
                )
            if refused is not None:
                _LOGGER.warning("job %s does not exclude %s: %s", later, ", ".join(nodes), refused)

    def is_running(self, job: str) -> bool:
        """Return whether a job of this number holds nodes now; without an answer it does not."""
        try:
            found = _answer("squeue", "--noheader", f"--jobs={job}", "--format=%T")
        except ConfigError:  # Slurm forgets jobs that have ended
            return False
        return bool(_RUNNING & set(found.split()))


def _shown(job: str) -> Mapping[str, str]:
    """Return the fields of a job, none where Slurm gives no answer."""
    with suppress(ConfigError):
        return _fields(_answer("scontrol", "show", "job", job, "--oneliner"))
    return {}


def _excluded(job: Mapping[str, str]) -> list[str]:
    """Return the nodes that a job excludes so far, as Slurm writes them."""
    known = job.get("ExcNodeList", "(null)")
    return [] if known == "(null)" else [known]


def _wanted(job: Mapping[str, str]) -> int | None:
    """Return the nodes that a waiting job starts on at least; Slurm writes `4` or `2-4`."""
    found = re.match(r"\d+", job.get("NumNodes", ""))
    return None if found is None else int(found[0])


def _lack(job: Mapping[str, str], nodes: Sequence[str], *, wanted: int) -> str | None:
    """Return how many nodes a job's partition has besides these, where they are too few.

    None: they are enough, or Slurm does not say. Busy nodes count, and so do those that the job's
    constraint, gres or list of nodes rules out. Nodes that only an administrator brings back do
    not: a job would wait for them for ever.
    """
    partition, excluded = job.get("Partition"), ",".join([*_excluded(job), *nodes])
    if partition is None:
        return None
    try:
        there = _nodes_of(partition)
        names = _answer("scontrol", "show", "hostnames", excluded).split()
    except ConfigError:
        return None
    others = {name: node for name, node in there.items() if name not in names}
    out = [f"{name} ({node.state})" for name, node in others.items() if node.stays_out()]
    left = len(others) - len(out)
    if not there or left >= wanted:
        return None
    without = " and ".join(filter(None, (", ".join(nodes), ", ".join(out))))
    return f"{left} of {wanted} nodes are left in partition {partition} without {without}"


@dataclass(frozen=True)
class _Node:
    """A node of a partition: its state without marks, these, and the reason of an outage."""

    state: str
    marks: str
    reason: str

    def stays_out(self) -> bool:
        """Return whether the node serves no job before an administrator acts.

        Slurm takes nodes that are down back when they register, as far as ReturnToService lets it.
        """
        if _RESTARTS & set(self.marks):
            return False
        if self.state != "down":
            return self.state in _OUT
        rule = _return_to_service()
        return rule == 0 or (rule == 1 and not self.reason.startswith("Not responding"))


def _nodes_of(partition: str) -> dict[str, _Node]:
    """Return the nodes of a partition by name. Raises ConfigError: Slurm gives no answer."""
    columns = "--format=%N|%T|%E"
    answer = _answer("sinfo", "--noheader", "--Node", f"--partition={partition}", columns)
    found = {}
    for line in answer.splitlines():
        name, state, reason = line.strip().split("|", 2)
        plain = state.rstrip(_MARKS)
        found[name] = _Node(plain, state[len(plain) :], reason)
    return found


def _return_to_service() -> int | None:
    """Return the rule by which nodes that are down come back; None: Slurm does not say."""
    with suppress(ConfigError):
        settings = _answer("scontrol", "show", "config")
        if (found := re.search(r"^ReturnToService\s*=\s*(\d)", settings, re.MULTILINE)) is not None:
            return int(found[1])
    return None


def _answer(*command: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{' '.join(command)}: {error}; is Slurm's program there?") from None
    if done.returncode != 0:
        raise ConfigError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _failure(*command: str) -> str | None:
    try:
        _answer(*command)
    except ConfigError as error:
        return str(error)
    return None


def _fields(line: str) -> Mapping[str, str]:
    """Return the fields of a line of `scontrol show`."""
    return dict(re.findall(r"(\w+)=(\S*)", line))


def _seconds_of(job: Mapping[str, str], name: str) -> float | None:
    try:
        return time.mktime(time.strptime(job.get(name, ""), "%Y-%m-%dT%H:%M:%S"))
    except ValueError:  # Unknown: as the end of a job without a limit
        return None

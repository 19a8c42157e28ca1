"""The records of a job's launches: which ended how, and whether the next one is worth its nodes.

<run>/launches/job.sbatch                the newest batch script, which Slurm may have refused
<run>/launches/submission.json           numbers of the newest jobs that Slurm has accepted
<run>/launches/bad_nodes                 nodes that failed a check: time, name, reason
<run>/launches/done                      settings that reached their end: digest, and progress there
<run>/launches/stop                      made by a user: no further launch
<run>/launches/12345-0/launch.json       job 12345, not yet requeued: nodes, command, progress
<run>/launches/12345-0/health/n1.json    a node before the ranks start
<run>/launches/12345-0/sums/n1.json      all-reduces of its ranks, alone and with other nodes'
<run>/launches/12345-0/nodes/0.json      the outcome of a node's ranks
<run>/launches/12345-0/rank_00003.err    output of a rank; rank_00003.out is its standard output
<run>/launches/12345-0/outcome.json      the outcome of the launch

A capture has them in <store>.launches, and each of four jobs that write one store side by side in
<store>.launches/job_0_of_4 to job_3_of_4.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from megatron_distill.errors import ConfigError, counted
from megatron_distill.runtime.atomic_files import replace_file

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = [
    "CANCELLED",
    "EXIT_STATUS",
    "LAUNCHES",
    "LOST_PEER",
    "LOST_RENDEZVOUS",
    "ROLLOUTS",
    "BadNode",
    "LaunchRecord",
    "Launches",
    "NodeOutcome",
    "Outcome",
    "Status",
    "Submission",
    "bad_nodes",
    "complete_parts",
    "complete_shards",
    "disk_errors",
    "job_folder",
    "job_folders",
    "launches_beside",
    "local_time",
    "other_content",
    "progress_of",
    "read_record",
    "write_record",
]

LAUNCHES: Final = "launches"
CANCELLED: Final = "cancelled"  # begins `Outcome.next` of a launch that was told to leave
ROLLOUTS: Final = "rollouts.json"  # in a folder of rollouts, their settings and sums
LOST_PEER: Final = 10
LOST_RENDEZVOUS: Final = 20  # order of a node whose ranks outlived the first node's torchrun
_SHARD: Final = re.compile(r"logits-(\d+)\.array_record")  # beside its description
_JOB: Final = re.compile(r"job_(\d+)_of_(\d+)")
_CHECKPOINT: Final = re.compile(r"step_(\d{7,})")
# Files of folders that are not for rollouts.
_OTHER_CONTENT: Final = {
    "config.yaml": "a run",
    "config.json": "a Hugging Face model",
    "description.json": "a checkpoint",
    "plan.json": "a store",
}
T = TypeVar("T", bound="DataclassInstance")


class Status(StrEnum):
    """How a launch, or a node's part of it, ended."""

    DONE = "done"
    UNFINISHED = "unfinished"  # stopped by a signal after a save
    MISCONFIGURED = "misconfigured"  # an error that a user repairs: no launch would get further
    FAILED = "failed"
    ENDED = "ended"  # a node: a signal ended its ranks


# Of a job; 75 and 78 are EX_TEMPFAIL and EX_CONFIG of sysexits.h.
EXIT_STATUS: Final = {
    Status.DONE: 0,
    Status.UNFINISHED: 75,
    Status.MISCONFIGURED: 78,
    Status.FAILED: 1,
}


@dataclass(frozen=True)
class NodeOutcome:
    """The outcome of one node's ranks.

    Attributes:
        node: its name. index: its place among the nodes of the launch.
        rank: the first rank that failed, None if none did.
        seconds: since the epoch, of that failure or of the end.
        order: as of `runtime.local_ranks.FirstFailure`; from `LOST_PEER` on the rank failed only
            because a rank of another node was lost.
        message: a line for the user.
    """

    node: str
    index: int
    status: Status
    seconds: float
    rank: int | None = None
    order: int = 0
    message: str | None = None


@dataclass(frozen=True)
class LaunchRecord:
    """The start of one launch.

    Attributes:
        job: the scheduler's number. restart: launches of that job before this one.
        submission: launches with the same one are counted together.
        nodes: of the ranks, in order; addresses: of them.
        progress: of the run before the launch, see `progress_of`.
        started: seconds since the epoch.
        paths: of the settings, under which all nodes must see the same.
        ports: for the rendezvous, of which the first node takes the first free one.
    """

    job: str
    restart: int
    submission: str
    command: list[str]
    nodes: list[str]
    addresses: list[str]
    progress: int
    started: float
    paths: list[str] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.job}-{self.restart}"


@dataclass(frozen=True)
class Outcome:
    """The end of one launch; `next` is the decision about the next one, in words."""

    status: Status
    reason: str
    progress: int
    ended: float
    next: str = ""


@dataclass(frozen=True)
class Submission:
    """Jobs that Slurm has accepted: their numbers, and the time just before it was asked."""

    jobs: list[str]
    submitted: float


@dataclass(frozen=True)
class BadNode:
    """A node that failed a check; `when` is a local date and time.

    is_silent: it has not answered at all, and may be back later.
    """

    when: str
    node: str
    reason: str
    is_silent: bool = False


@dataclass(frozen=True)
class Launches:
    """The folder of a job's launches, and the folder of its results, which show its progress.

    Attributes:
        named: the key and value of the results' folder, for messages.
        digest: of the job's settings; None: a job without, which is never marked as done.
        paths: of the settings.
        job, jobs: of those that write one store side by side.
    """

    folder: Path
    results: Path
    named: str
    digest: str | None = None
    paths: tuple[str, ...] = ()
    job: int = 0
    jobs: int = 1

    @property
    def progress(self) -> int:
        """The step of the newest checkpoint of a run, or the shards or parts that are written."""
        if self.unit == "part":
            return len(complete_parts(self.results))
        return progress_of(self.results, job=self.job, jobs=self.jobs)

    @property
    def without_progress(self) -> str:
        """The progress that a launch lacks, with a remedy where there is a usual one."""
        lacks = "no new checkpoint" if self.unit == "step" else f"no new {self.unit}"
        return lacks + ("; lower --part-rows" if self.unit == "part" else "")

    @property
    def unit(self) -> str:
        """The unit of the progress: a step, a shard of a store, or a part of rollouts."""
        units = {"store.path": "shard", "--output": "part"}
        return next((unit for start, unit in units.items() if self.named.startswith(start)), "step")

    @property
    def measured(self) -> Path:
        """The folder with the times of its steps: its records where it reads a model."""
        is_reader = self.folder.name.startswith(f"{LAUNCHES}_")
        return self.folder if is_reader or self.unit == "part" else self.results

    def of(self, launch: LaunchRecord) -> Path:
        """Return the folder of one launch."""
        return self.folder / launch.name

    def begin(self, launch: LaunchRecord) -> Path:
        """Create the folder of a launch and record it; raises OSError."""
        folder = self.of(launch)
        (folder / "nodes").mkdir(parents=True, exist_ok=True)
        for name in ("health", "sums"):
            (folder / name).mkdir(exist_ok=True)
        write_record(folder / "launch.json", launch)
        return folder

    def all(self) -> list[LaunchRecord]:
        """Return the launches so far, oldest first."""
        files = self.folder.glob("*/launch.json")
        found = [read_record(file, LaunchRecord) for file in files]
        return sorted((one for one in found if one is not None), key=lambda one: one.started)

    def outcome(self, launch: LaunchRecord) -> Outcome | None:
        """Return the outcome of a launch; None: it runs, or it was killed with its node."""
        return read_record(self.of(launch) / "outcome.json", Outcome)

    def starts_without_progress(self, submission: str, *, before: int | None = None) -> int:
        """Return how many of the newest launches of a submission began at the present progress.

        before: only launches with a lower `restart` count.
        """
        now, count = self.progress, 0
        for launch in reversed([one for one in self.all() if one.submission == submission]):
            if before is not None and launch.restart >= before:
                continue
            if launch.progress != now:
                break
            count += 1
        return count

    def useless(self, starts: int) -> str:
        """Return the text about so many launches without progress."""
        text = f"{counted(starts, 'launch', 'launches')} since {self.unit} {self.progress}"
        return f"{text} brought {self.without_progress}"

    def refusal(self, submission: str, *, max_starts: int) -> tuple[Status, str] | None:
        """Return status and reason if no later job of a submission is to begin, None if one is.

        Jobs of a chain and tasks of an array wait in the queue already when one ends for good.
        """
        earlier = [one for one in self.all() if one.submission == submission]
        last = self.outcome(earlier[-1]) if earlier else None
        if last is not None and last.status is Status.MISCONFIGURED:
            text = "repair the error of the launch before, and call `megatron-distill submit` again"
            return Status.MISCONFIGURED, f"{text}: {last.reason}"
        starts = self.starts_without_progress(submission)
        for launch in earlier[len(earlier) - starts :]:
            ended = self.outcome(launch)
            starts -= ended is not None and ended.next.startswith(CANCELLED)
        return (Status.FAILED, self.useless(starts)) if starts >= max_starts else None

    @property
    def script_file(self) -> Path:
        """The newest batch script; Slurm may have refused it."""
        return self.folder / "job.sbatch"

    @property
    def submission_file(self) -> Path:
        """The record of the newest jobs that Slurm has accepted."""
        return self.folder / "submission.json"

    def submission(self) -> Submission | None:
        """Return the newest jobs that Slurm has accepted; None: there are none."""
        return read_record(self.submission_file, Submission)

    @property
    def stop_file(self) -> Path:
        """The file that ends the launches."""
        return self.folder / "stop"

    @property
    def lock_file(self) -> Path:
        """The file that a job locks while it runs."""
        return self.folder / ".lock"

    def is_done(self) -> bool:
        """Return whether a job of these settings reached its end, and its results are there."""
        try:
            digest, text = (self.folder / "done").read_text().split()
            progress = int(text)
        except (FileNotFoundError, ValueError):
            return False
        is_there = self.results.is_dir() and self.progress >= progress
        return digest == self.digest and is_there

    def objection(self) -> str | None:
        """Return why no launch is to begin, None if one is; raises OSError."""
        if self.is_done():
            return f"nothing to do: {self.folder / 'done'} is of an earlier launch"
        if self.stop_file.exists():
            return f"not started: remove {self.stop_file} to go on"
        return None

    def mark_done(self) -> None:
        """Record that a job of these settings reached its end; raises OSError."""
        if self.digest is not None:
            text = f"{self.digest} {self.progress}\n"
            replace_file(self.folder / "done", text.encode())

    def add_bad_nodes(self, found: Sequence[BadNode]) -> None:
        """Record nodes that failed a check; raises OSError."""
        with (self.folder / "bad_nodes").open("a", encoding="utf-8") as stream:
            stream.writelines(f"{one.when}\t{one.node}\t{one.reason}\n" for one in found)


def launches_beside(store: Path) -> Path:
    """Return the folder of the launches that write a store, next to it."""
    if store.name in ("", ".."):
        store = Path(os.path.abspath(store))  # noqa: PTH100 - resolve() would follow links
    return store.parent / f"{store.name}.{LAUNCHES}"


@contextmanager
def disk_errors(launches: Launches) -> Iterator[None]:
    """Turn an OSError into a ConfigError with the folder and what to do about it."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{launches.named}: cannot write in {launches.folder} ({error.strerror}); free space, "
            "let this user write there, or name another folder"
        ) from error


def bad_nodes(folder: Path) -> list[BadNode]:
    """Return the recorded nodes of a folder of launches; a user removes lines of repaired ones."""
    try:
        lines = (folder / "bad_nodes").read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return []
    parts = [line.split("\t", 2) for line in lines if line.strip()]
    if any(len(one) != 3 for one in parts):
        raise ConfigError(
            f"{folder / 'bad_nodes'}: a line is not time, node and reason with tabs between them; "
            "remove the line"
        )
    return [BadNode(when, node, reason) for when, node, reason in parts]


def job_folder(folder: Path, job: int, jobs: int) -> Path:
    """Return the folder of the launches of one of several jobs, each of which has its own lock."""
    return folder / f"job_{job}_of_{jobs}"


def job_folders(folder: Path) -> list[tuple[Path, int, int]]:
    """Return such folders with job and number of jobs, by these numbers."""
    found = [(path, _JOB.fullmatch(path.name)) for path in folder.glob("job_*")]
    numbered = [(path, int(name[1]), int(name[2])) for path, name in found if name]
    return sorted(numbered, key=lambda one: (one[2], one[1]))


def complete_shards(store: Path, *, job: int = 0, jobs: int = 1) -> list[Path]:
    """Return the complete shards that one of the jobs writes."""
    found = [(path, _SHARD.fullmatch(path.name)) for path in (store / "shards").glob("logits-*")]
    return [path for path, name in found if name and int(name[1]) % jobs == job]


def other_content(rollouts: Path) -> str | None:
    """Return why a folder is not for rollouts; None: it is, or there is none yet."""
    if rollouts.exists() and not rollouts.is_dir():
        return f"--output {rollouts}: it is a file; name a folder"
    for name, kind in _OTHER_CONTENT.items():
        if (rollouts / name).exists():
            return f"--output {rollouts}: it is the folder of {kind} ({name}); name another"
    return None


def complete_parts(rollouts: Path) -> list[Path]:
    """Return the complete parts of rollouts."""
    return sorted(rollouts.glob("part-*.jsonl"))


def progress_of(results: Path, *, job: int = 0, jobs: int = 1) -> int:
    """Return the step of the newest checkpoint of a run, or the number of shards of a store."""
    with suppress(FileNotFoundError, NotADirectoryError):
        folders = list((results / "checkpoints").iterdir())
        names = [_CHECKPOINT.fullmatch(one.name) for one in folders if one.is_dir()]
        return max((int(found[1]) for found in names if found), default=0)
    with suppress(FileNotFoundError, NotADirectoryError):
        return len(complete_shards(results, job=job, jobs=jobs))
    return 0


def write_record(path: Path, record: Any) -> None:
    """Write a dataclass as JSON, whole or not at all; raises OSError."""
    replace_file(path, json.dumps(asdict(record), indent=1).encode())


def read_record(path: Path, kind: type[T]) -> T | None:
    """Return a dataclass from JSON; None: there is no such file, or it is damaged.

    A record of a later version may have fields more.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        kept = {one.name: found[one.name] for one in fields(kind) if one.name in found}
        if "status" in kept:
            kept["status"] = Status(kept["status"])
        return kind(**kept)
    except (OSError, ValueError, TypeError):
        return None


def local_time(seconds: float | None = None) -> str:
    """Return a local date and time without zone, as Slurm writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(seconds))

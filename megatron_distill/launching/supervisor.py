"""One launch of a job from its first node: checks, ranks, outcome, and the decision what follows.

A failure is followed by another launch as long as launches bring new checkpoints.
"""

from __future__ import annotations

import math
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Final

from megatron_distill.errors import ConfigError, counted
from megatron_distill.launching.checks.node_health import Health
from megatron_distill.launching.checks.nodes import bad_nodes
from megatron_distill.launching.grace import USUAL_SECONDS, grace_seconds
from megatron_distill.launching.outcomes import classified, report
from megatron_distill.launching.policy import Policy
from megatron_distill.launching.program import JobRanks, NoAnswerError, Program
from megatron_distill.launching.records import (
    CANCELLED,
    EXIT_STATUS,
    Launches,
    LaunchRecord,
    NodeOutcome,
    Outcome,
    Status,
    disk_errors,
    read_record,
    write_record,
)
from megatron_distill.launching.scheduler import Scheduler
from megatron_distill.log import get_logger
from megatron_distill.runtime.folder_lock import take_lock
from megatron_distill.runtime.termination import stop_signals

__all__ = ["supervise"]

_LOGGER = get_logger(__name__)
_POLL_SECONDS: Final = 0.5
_MEASURE_SECONDS: Final = 30.0  # between looks at the times of steps and saves
_LEAVE_SECONDS: Final = 30.0  # of a job whose ranks had to be killed, to ask for the next launch
_LATE_SIGNAL_SECONDS: Final = 10.0  # from a scheduler's signal to the ranks to that to this process


class _Stop:
    """The signals of a scheduler: SIGUSR1 before the end of the time, SIGTERM to leave for good."""

    def __init__(self) -> None:
        self.is_near_end = False
        self.is_cancelled = False

    def __enter__(self) -> _Stop:
        for number in (signal.SIGUSR1, *stop_signals()):
            signal.signal(number, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the handlers: a late signal must not end the process in its last lines."""

    def _remember(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.is_near_end = True
        else:
            self.is_cancelled = True

    @property
    def received(self) -> bool:
        return self.is_near_end or self.is_cancelled

    def comes_within(self, seconds: float) -> bool:
        """Wait for a signal: a scheduler sends it to the ranks too, in any order."""
        return _waited_for(lambda: self.received, seconds)

    def cancels_within(self, seconds: float) -> bool:
        """Wait for the signal to leave for good."""
        return _waited_for(lambda: self.is_cancelled, seconds)


def _waited_for(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


def supervise(job: Scheduler, program: Program, policy: Policy) -> int:
    """Run one launch of the job and return its exit status, one of `EXIT_STATUS`."""
    with _Stop() as stop:
        try:
            began = time.monotonic()
            launches, unanswered = _settings(job, program, policy)
            queue = "" if job.waited is None else f"waited {job.waited:.0f} s in the queue; "
            _LOGGER.info("%ssettings read in %.1f s", queue, time.monotonic() - began)
            if launches.digest is None:  # only the jobs of one chain have nothing left to do
                launches = replace(launches, digest=policy.submission)
            with disk_errors(launches):
                if (status := _status_without_ranks(launches, policy)) is not None:
                    return EXIT_STATUS[status]
                with _held(launches, job):
                    return _launch(job, program, policy, launches, stop, unanswered=unanswered)
        except ConfigError as error:
            if stop.received and isinstance(error, NoAnswerError):  # a terminal's, to all processes
                _LOGGER.info("stopped before the settings were read")
                return EXIT_STATUS[Status.UNFINISHED]
            _LOGGER.error("error: %s", error)
            return EXIT_STATUS[Status.MISCONFIGURED]


def _status_without_ranks(launches: Launches, policy: Policy) -> Status | None:
    """Return the status of a job that is not to begin, and log why; None: it is."""
    if (objection := launches.objection()) is not None:
        _LOGGER.info("%s", objection)
        return Status.DONE
    if policy.requeues:  # the launch before has decided
        return None
    refusal = launches.refusal(policy.submission, max_starts=policy.max_starts)
    if refusal is None:
        return None
    _LOGGER.error("not started: %s", refusal[1])
    return refusal[0]


def _settings(job: Scheduler, program: Program, policy: Policy) -> tuple[Launches, str | None]:
    """Read the settings and check the layout on the first node; return the launches' folder.

    The second value: the first node has no answer, though it had one before an earlier launch. The
    settings are then as this machine reads them. Raises ConfigError.
    """
    first = job.nodes[0]
    ranks = JobRanks(policy.wanted_nodes or len(job.nodes), policy.ranks_per_node)
    try:
        return program.launches([*job.on_nodes([first]), policy.python], ranks=ranks), None
    except NoAnswerError as error:
        if job.restart == 0:
            raise
        return program.launches([sys.executable]), f"no answer from {first}: {error.last_line}"


@contextmanager
def _held(launches: Launches, job: Scheduler) -> Iterator[None]:
    """Hold the folder against other jobs; the lock ends with this process or with its job.

    Where the file system has no locks, the scheduler is asked for the last holder.
    """
    path = launches.lock_file
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_text() if path.exists() else ""
    holder = f"job {job.job} on {job.nodes[0]}"
    lock = take_lock(path, named=launches.named, holder=holder, patience_seconds=0.0)
    try:
        found = re.match(r"job (\S+) on", before)
        if found is not None and found[1] != job.job and job.is_running(found[1]):
            path.write_text(before)  # for the next job that asks
            raise ConfigError(
                f"{launches.named}: job {found[1]} is writing there; wait for its end or name "
                "another folder"
            )
        yield
    finally:
        lock.close()


def _launch(
    job: Scheduler,
    program: Program,
    policy: Policy,
    launches: Launches,
    stop: _Stop,
    *,
    unanswered: str | None,
) -> int:
    launch = LaunchRecord(
        job=job.job,
        restart=job.restart,
        submission=policy.submission,
        command=program.spelled,
        nodes=list(job.nodes),
        addresses=[job.address(node) for node in job.nodes],
        progress=launches.progress,
        started=time.time(),
        paths=list(launches.paths),
        ports=list(job.ports),
    )
    folder = launches.begin(launch)
    if unanswered is not None and not stop.received:  # a terminal's signal ends readers, too
        outcome = Outcome(Status.FAILED, unanswered, launch.progress, time.time())
        first = launch.nodes[:1]
        return _decide(job, policy, launches, launch, outcome, stop, without=(), silent=first)
    bad, without = bad_nodes(job, policy, launch, folder, is_stopped=lambda: stop.received)
    if stop.received:
        reason = "stopped before its ranks began"
        outcome = Outcome(Status.UNFINISHED, reason, launch.progress, time.time())
        return _decide(job, policy, launches, launch, outcome, stop, without=(), silent=())
    for one in bad:
        _LOGGER.error("node %s: %s", one.node, one.reason)
    names = [one.node for one in bad]
    healthy = [place for place, node in enumerate(launch.nodes) if node not in names]
    silent = [one.node for one in bad if one.is_silent]
    # A silent one may be slow, as with an image to import: later submissions try it again.
    launches.add_bad_nodes([one for one in bad if one.node in without and not one.is_silent])
    lasting = [node for node in without if node not in silent]
    if lasting and not policy.requeues:
        job.exclude_later(lasting)
    wanted = policy.wanted_nodes or len(launch.nodes)
    if len(healthy) < wanted:
        reason = f"{counted(len(bad), 'node')} failed the checks: {', '.join(names)}"
        outcome = Outcome(Status.FAILED, reason, launches.progress, time.time())
    else:
        launch = replace(
            launch,
            nodes=[launch.nodes[place] for place in healthy[:wanted]],
            addresses=[launch.addresses[place] for place in healthy[:wanted]],
        )
        launches.begin(launch)
        outcome = _run_ranks(job, program, policy, launch, launches, stop)
    return _decide(job, policy, launches, launch, outcome, stop, without=without, silent=silent)


def _run_ranks(
    job: Scheduler,
    program: Program,
    policy: Policy,
    launch: LaunchRecord,
    launches: Launches,
    stop: _Stop,
) -> Outcome:
    folder = launches.of(launch)
    first = read_record(folder / "health" / f"{launch.nodes[0]}.json", Health)
    assert first is not None  # it has passed the checks
    words = program.on_node(
        folder.resolve(),
        endpoint=f"{launch.addresses[0]}:{first.port}",
        stop_seconds=_stop_seconds(job, policy, launches.measured),
        options=[*job.node_options, *_end_option(job)],
        ranks_per_node=policy.ranks_per_node,
    )
    command = [*job.on_nodes(launch.nodes), policy.python, *words]
    _LOGGER.info(
        "launch %s on %s, from %s %d; ranks write to %s",
        launch.name,
        ", ".join(launch.nodes),
        launches.unit,
        launch.progress,
        folder,
    )
    status, was_told = _wait(job, command, policy, launches.measured, stop)
    found = [
        read_record(folder / "nodes" / f"{index}.json", NodeOutcome)
        for index in range(len(launch.nodes))
    ]
    nodes = [one for one in found if one is not None]
    if any(one.status in (Status.UNFINISHED, Status.ENDED) for one in nodes):
        was_told = was_told or stop.comes_within(_LATE_SIGNAL_SECONDS)
    silent = [node for node, one in zip(launch.nodes, found, strict=True) if one is None]
    progress, now = launches.progress, time.time()
    result, reason = classified(nodes, silent, status, was_told=was_told)
    if result in (Status.FAILED, Status.MISCONFIGURED):
        report(nodes, folder, shows_traceback=result is Status.FAILED)
    return Outcome(result, reason, progress, now)


def _stop_seconds(job: Scheduler, policy: Policy, measured: Path) -> float:
    """Return the seconds after which a node kills ranks that were told to save.

    Never less than the time that `_wait` leaves them before the end of the job: measured steps and
    saves may become longer within a launch.
    """
    known = policy.grace_seconds or grace_seconds(measured) or 0.0
    half = 0.0 if job.end is None else (job.end - time.time()) / 2
    return max(USUAL_SECONDS, known, half)


def _end_option(job: Scheduler) -> list[str]:
    """Return when nodes kill ranks that do not end: a job that is timed out is never requeued."""
    if job.end is None:
        return []
    left = job.end - time.time()
    return ["--end", f"{job.end - min(_LEAVE_SECONDS, left / 4):.0f}"]


def _wait(
    job: Scheduler, command: Sequence[str], policy: Policy, measured: Path, stop: _Stop
) -> tuple[int, bool]:
    """Wait for the ranks; return the step's status, and whether they were told to stop."""
    step = subprocess.Popen(command, start_new_session=True)
    told, looked, deadline = False, -math.inf, math.inf
    begun = time.time()
    while True:
        try:
            return step.wait(timeout=_POLL_SECONDS), told or stop.received
        except subprocess.TimeoutExpired:
            pass
        if told:
            continue
        if job.end is not None and time.monotonic() - looked > _MEASURE_SECONDS:
            looked = time.monotonic()
            grace = policy.grace_seconds or grace_seconds(measured) or USUAL_SECONDS
            deadline = job.end - min(grace, (job.end - begun) / 2)
        if stop.received or time.time() >= deadline:
            source = "signal" if stop.is_near_end else "clock"
            stop.is_near_end = stop.is_near_end or not stop.is_cancelled
            near = f"the end of the job's time is near ({source})"
            _LOGGER.info("%s: saving", "the job is cancelled" if stop.is_cancelled else near)
            job.stop(step)
            told = True


def _decide(
    job: Scheduler,
    policy: Policy,
    launches: Launches,
    launch: LaunchRecord,
    outcome: Outcome,
    stop: _Stop,
    *,
    without: Sequence[str],
    silent: Sequence[str],
) -> int:
    """Decide about the next launch, record it, ask for it, and return this one's exit status."""
    status, reaches = EXIT_STATUS[outcome.status], f"{launches.unit} {outcome.progress}"
    starts = launches.starts_without_progress(policy.submission)
    goes_on, pause = False, 0.0
    if outcome.status is Status.DONE:
        launches.mark_done()
        text = "done"
    elif outcome.status is Status.MISCONFIGURED:
        text = "no further launch: the error above is to be repaired first"
    elif stop.is_cancelled:
        text = f"{CANCELLED} after {reaches}; the same submission goes on from there"
    elif launches.stop_file.exists():
        text = f"no further launch: {launches.stop_file} exists"
    elif starts >= policy.max_starts:
        text = f"no further launch: {launches.useless(starts)}"
        status = EXIT_STATUS[Status.FAILED]
    else:
        goes_on = policy.requeues
        text = f"goes on from {reaches}" if goes_on else f"the next job goes on from {reaches}"
        pause = job.pause(starts) if goes_on else 0.0
        text += f" in {pause:.0f} s" if pause else ""
    write_record(launches.of(launch) / "outcome.json", replace(outcome, next=text))
    say = _LOGGER.info if status in (0, EXIT_STATUS[Status.UNFINISHED]) else _LOGGER.error
    say("%s", text if text == outcome.reason else f"{outcome.reason}: {text}")
    if goes_on:
        sys.stderr.flush()
        if stop.cancels_within(pause):
            refused: str | None = f"cancelled; the same submission goes on from {reaches}"
        else:
            refused = job.requeue(without=without, silent=silent)
        if refused is not None:
            _LOGGER.error("no further launch: %s", refused)
            ended = replace(outcome, next=f"no further launch: {refused}")
            write_record(launches.of(launch) / "outcome.json", ended)
    return status

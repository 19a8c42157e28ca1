"""The end of a rank whose peers do not know of its failure: at once, without cleanup.

Cleanup waits for peers: for their part of a checkpoint, for NCCL's queue. They wait for this rank.
So the process ends. Its peers may be in a GPU kernel that never returns, where no signal reaches
them. So a thread of each polls the rendezvous store for a failed rank. A rank that lost a peer
first exchanges with the others where each of them waited.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Final

import torch.distributed as dist

from megatron_distill.errors import MegatronDistillError
from megatron_distill.runtime import heartbeats
from megatron_distill.runtime.hang_watch import Hang, HangWatch, count_failure, news
from megatron_distill.runtime.heartbeats import SignsOfOne, give_sign, living, take_leave
from megatron_distill.runtime.main_thread import MainThread, Progress, place_of
from megatron_distill.runtime.roles import Roles
from megatron_distill.runtime.termination import Interrupted, was_interrupted

__all__ = [
    "LOST_PEER_STATUS",
    "LoneFailure",
    "PeerWatch",
    "Progress",
    "host_key",
    "tell_torchrun",
    "tell_unfinished",
    "unfinished_file",
]


def tell_torchrun(text: str, *, kind: str | None = None) -> bool:
    """Give torchrun the message that its report ends with; return whether it will show it.

    It will not without torchrun, or if it is going to restart the ranks. `kind`: class of an error
    that all ranks raised together, for `runtime.local_ranks`.
    """
    restarts, most = (
        int(os.environ.get(f"TORCHELASTIC_{name}", "0"))
        for name in ("RESTART_COUNT", "MAX_RESTARTS")
    )
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None or restarts != most:
        return False
    details = {"py_callstack": text, "timestamp": str(int(time.time()))}
    if kind is not None:
        details["kind"] = kind
    try:
        Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": details}}))
    except OSError:
        return False
    return True


def tell_unfinished() -> None:
    """Note beside torchrun's error file that this rank was stopped before the end of its job."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        with suppress(OSError):  # a full disk: the launcher then takes the job for finished or not
            unfinished_file(file).touch()


def unfinished_file(error_file: str) -> Path:
    """Return the file of `tell_unfinished` beside a rank's error file."""
    return Path(error_file).with_suffix(".unfinished")


FAILED_STATUS: Final = 1
LOST_PEER_STATUS: Final = 75  # of a rank that failed because of another one
_EXCHANGE_SECONDS: Final = 3.0
_REPORT_SECONDS: Final = 20.0
_WATCH_SECONDS: Final = 5.0  # 200 requests per second at the store of 1,000 ranks
_FAILED: Final = "failed"
# gloo raises plain RuntimeErrors; each has the place in its source.
_GLOO_SOURCE: Final = "gloo/transport"


@dataclass(frozen=True)
class LoneFailure:
    """A block that ends the process if this rank fails alone.

    Errors that all ranks raise together, and interruptions, leave the block. So does every error
    if there is no store: in a world of one, or in a process group of the caller. After an
    interruption a collective may fail because a peer has left already: not a failure either.

    A message names rank or role, host and step.
    """

    rank: int = 0
    roles: Roles = Roles(1)
    store: dist.Store | None = None
    progress: Progress = field(default_factory=Progress)
    reporting: threading.Lock = field(default_factory=threading.Lock, compare=False)

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        together = (
            MegatronDistillError,
            Interrupted,
            KeyboardInterrupt,
            SystemExit,
            GeneratorExit,
        )
        if self.store is None or error is None or isinstance(error, together) or was_interrupted():
            return
        status = LOST_PEER_STATUS if _is_lost_peer(error) else FAILED_STATUS
        if not self.reporting.acquire(blocking=False):
            # A lost peer fails every thread that waits for it. Another one reports and ends the
            # process; a wait at the store would hold up its messages, which share the connection.
            time.sleep(4 * _EXCHANGE_SECONDS + _sign_seconds())
        try:  # memory may be exhausted: nothing here may keep the process from its end
            _end_anyway(status)
            if status == LOST_PEER_STATUS:
                self._report_waiting(error)
            else:
                self._report_failure(error)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)

    def _report_failure(self, error: BaseException) -> None:
        """Write the traceback, and one line for torchrun's report."""
        with suppress(MemoryError):
            sys.stderr.write("".join(traceback.format_exception(error)))
        self._report(f"{_one_line(error)}; its traceback is above")

    def _report(self, reason: str) -> None:
        """Write one line for torchrun's report, and end the peers."""
        text = f"error: {self._place()} failed{self._at_step()}: {reason}"
        if not tell_torchrun(text):
            sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
        self._tell_peers()

    def end_idle(self, main_thread: MainThread, *, patience_seconds: float) -> None:
        """End this process, whose main thread does not run; from another thread."""
        if not self.reporting.acquire(blocking=False):
            return
        try:
            _end_anyway(FAILED_STATUS)
            stack = main_thread.stack()
            sys.stderr.write("".join(["Main thread (most recent call last):\n", *stack.format()]))
            last = stack[-1]
            self._report(
                f"its main thread has waited in {last.name}, {Path(last.filename).name}:"
                f"{last.lineno}, for runtime.timeout_seconds = {patience_seconds:g} s; its calls "
                "are above"
            )
        finally:
            os._exit(FAILED_STATUS)

    def end_hung(self, hang: Hang, *, seconds: float) -> None:
        """Write why a step hangs, and end this process and its peers; from another thread."""
        if not self.reporting.acquire(blocking=False):
            return
        try:
            _end_anyway(FAILED_STATUS)
            sys.stderr.write(hang.stacks(self.roles))
            longest = self.progress.longest_seconds
            text = hang.sentence(self.roles, seconds=seconds, longest=longest)
            if not tell_torchrun(text):
                sys.stderr.write(f"{text}\n")
            sys.stderr.flush()
            self._tell_peers(hang.culprit)
        finally:
            os._exit(FAILED_STATUS)

    def end_given_up(self) -> None:
        """End this process, which its peers take for the failed one; from another thread."""
        if self.reporting.acquire(blocking=False):  # else it ends because of its own failure
            _end_after("its peers have given it up", self.roles.name(self.rank))

    def _place(self) -> str:
        return f"{self.roles.name(self.rank)} on {socket.gethostname()}"

    def _at_step(self) -> str:
        step, unit = self.progress.step, self.progress.unit
        if step is None:
            return ""
        return f" at step {step}" if unit is None else f" at step {step}, unit {unit}"

    def _tell_peers(self, failed: int | None = None) -> None:
        assert self.store is not None
        with suppress(dist.DistError):
            _note_failed(self.store, self.rank if failed is None else failed)

    def _report_waiting(self, error: BaseException) -> None:
        """Write where this rank waited; one rank collects that of all ranks, and writes it last."""
        assert self.store is not None
        place, step = _place(error), self._at_step()  # of now: another thread may go on
        name = f"{self.roles.name(self.rank)}{step}"
        sys.stderr.write(f"{name} waited in {place} and failed: {_one_line(error)}\n")
        sys.stderr.flush()
        with suppress(dist.DistError):
            self.store.set(f"waited/{self.rank}", place)
            if self.store.add("waited/count", 1) > 1:
                seconds = 2 * _EXCHANGE_SECONDS + _sign_seconds()
                self.store.wait(["waited/told"], timedelta(seconds=seconds))
                return
            time.sleep(_EXCHANGE_SECONDS)
            if not self.store.check([_FAILED]):  # else the lost rank has written the cause
                text = self._collected(step)
                # Also here: torchrun shows it only if it takes this rank for the first to fail.
                shown = text.removeprefix("error: ") if tell_torchrun(text) else text
                sys.stderr.write(f"{shown}\n")
                sys.stderr.flush()
            self.store.set("waited/told", "yes")
        self._tell_peers()

    def _collected(self, step: str) -> str:
        """Return which ranks waited where, and which did not answer."""
        assert self.store is not None
        waiting: dict[str, list[int]] = defaultdict(list)
        silent = []
        for rank in range(self.roles.size):
            if self.store.check([f"waited/{rank}"]):
                waiting[self.store.get(f"waited/{rank}").decode()].append(rank)
            else:
                silent.append(rank)
        silent = self._lost(silent)
        names = self.roles.names
        places = "; ".join(f"{names(ranks)} in {place}" for place, ranks in waiting.items())
        text = (
            f"error: a rank was lost{step}, or did not answer within "
            f"runtime.timeout_seconds. {places}"
        )
        if not silent:
            return f"{text}. All ranks waited: compare where"
        hosts = self._hosts(silent)
        return f"{text}. No answer from {names(silent)}{hosts}: look at its output and its machine"

    def _lost(self, silent: list[int]) -> list[int]:
        """Return those ranks without an answer that give no sign of life either, if there are any.

        With several roles a rank may wait for a command, and not know that another one was lost.
        """
        assert self.store is not None
        if not self.roles.are_split or len(silent) < 2:
            return silent
        alive = living(self.store, silent, seconds=_sign_seconds())
        return [rank for rank in silent if rank not in alive] or silent

    def _hosts(self, ranks: Sequence[int]) -> str:
        """Return the hosts of some ranks in words, where `PeerWatch` has noted them."""
        assert self.store is not None
        keys = [host_key(rank) for rank in ranks]
        found = {self.store.get(key).decode() for key in keys if self.store.check([key])}
        return f" on {', '.join(sorted(found))}" if found else ""


class PeerWatch:
    """A block during which a thread ends this process soon after another rank has failed.

    It looks every few seconds; without a store it does nothing. It notes the rank's host, and ends
    the launch when a step hangs, see `HangWatch`. With several roles it also gives signs of life
    for `Launch.together`. Then it ends the process, too, when the next
    rank has given no sign for `patience_seconds`, or `SILENT_SECONDS` once its own first step has
    begun. A role may wait without limit for another, and a stopped process or a lost machine closes
    no connection. A rank of the student also ends if its main thread does not run for
    `patience_seconds`, once its first step has begun. The teachers' ranks wait for its commands
    without limit.
    """

    def __init__(self, alone: LoneFailure, *, patience_seconds: float) -> None:
        self._alone = alone
        self._rank = alone.rank
        self._roles = alone.roles
        self._store = alone.store
        self._patience = patience_seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peer-watch", daemon=True)

    def __enter__(self) -> None:
        if self._store is not None:
            self._store.set(host_key(self._rank), socket.gethostname())
            self._give_sign()
            self._thread.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self._store is not None:
            with suppress(dist.DistError):
                take_leave(self._store, self._rank)

    def _give_sign(self) -> None:
        if self._roles.are_split:
            assert self._store is not None
            give_sign(self._store, self._rank)

    def _watch(self) -> None:
        assert self._store is not None
        watched = (self._rank + 1) % self._roles.size
        signs = SignsOfOne(self._store, watched)
        main_thread = MainThread()
        hangs = self._hang_watch(main_thread)
        # A store that is gone is not a failure: torchrun keeps it until its own ranks have ended.
        with suppress(dist.DistError):
            while not self._ended.wait(_WATCH_SECONDS):
                if self._roles.are_split:
                    self._give_sign()
                    if signs.silent_looks() * _WATCH_SECONDS >= self._silence:
                        self._end_without(watched)
                    self._look_at(main_thread)
                found = news(self._store)
                if found.has_failed:
                    self._end_because_of(int(self._store.get(_FAILED)))
                    return
                if (hang := hangs.look(found, seconds=_WATCH_SECONDS)) is not None:
                    self._alone.end_hung(hang, seconds=hangs.quiet_seconds)

    def _hang_watch(self, main_thread: MainThread) -> HangWatch:
        assert self._store is not None
        return HangWatch(
            self._store,
            self._rank,
            self._roles,
            self._alone.progress,
            main_thread,
            patience_seconds=self._patience,
            ended=self._ended,
            give_sign=self._give_sign,
        )

    def _end_because_of(self, failed: int) -> None:
        if failed == self._rank:
            self._alone.end_given_up()
        else:
            _end_after(f"{self._roles.name(failed)} has failed", self._roles.name(self._rank))

    @property
    def _silence(self) -> float:
        """Seconds without a sign after which a rank is given up.

        A thread gives the signs, whatever the rank does; only an extension that keeps the
        interpreter for itself delays them. Before the first step that may be an import or a read of
        weights. After it the short time and torchrun's 30 s for a stopped process end a launch
        within a minute.
        """
        if self._alone.progress.step is None:
            return self._patience
        return min(self._patience, heartbeats.SILENT_SECONDS)

    def _look_at(self, main_thread: MainThread) -> None:
        """End this process if its main thread, on a rank of the student, does not run."""
        if self._rank not in self._roles.student.ranks or self._alone.progress.step is None:
            return
        # A wait for a peer ends after the same time, and with the peer's name: that comes first.
        most = self._patience + _EXCHANGE_SECONDS + 3 * _WATCH_SECONDS
        if main_thread.idle_looks() * _WATCH_SECONDS > most:
            self._alone.end_idle(main_thread, patience_seconds=self._patience)

    def _end_without(self, silent: int) -> None:
        assert self._store is not None
        name, seconds = self._roles.name, f"{self._silence:g} s"
        if self._silence == self._patience:
            seconds = f"runtime.timeout_seconds = {seconds}"
        try:
            host = self._store.get(host_key(silent)).decode()
            text = (
                f"error: {name(silent)} on {host} gave no sign of life for {seconds}, and "
                f"{name(self._rank)} ends; check its process and its machine"
            )
            if not tell_torchrun(text):
                sys.stderr.write(f"{text}\n")
            sys.stderr.flush()
            _note_failed(self._store, silent)
        finally:
            os._exit(FAILED_STATUS)


def _end_anyway(status: int) -> None:
    """End this process some time later: a store behind a broken link answers no request."""
    timer = threading.Timer(_REPORT_SECONDS, os._exit, (status,))
    timer.daemon = True
    with suppress(RuntimeError, MemoryError):  # without memory no thread starts
        timer.start()


def _sign_seconds() -> float:
    """Return the seconds in which every living rank gives a sign."""
    return 1.5 * _WATCH_SECONDS


def host_key(rank: int) -> str:
    """Return the key of a rank's host in the rendezvous store."""
    return f"host/{rank}"


def _note_failed(store: dist.Store, rank: int) -> None:
    store.set(_FAILED, str(rank))
    count_failure(store)


def _end_after(reason: str, name: str) -> None:
    try:
        sys.stderr.write(f"{name} ends, because {reason}\n")
        sys.stderr.flush()
    finally:
        os._exit(LOST_PEER_STATUS)


def _is_lost_peer(error: BaseException) -> bool:
    """Return whether a collective failed because another rank ended or did not answer."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and _GLOO_SOURCE in str(error)


def _place(error: BaseException) -> str:
    """Return the collective in which an error arose, and the line that called it."""
    return place_of(traceback.extract_tb(error.__traceback__))


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__

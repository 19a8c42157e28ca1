"""Uses of memory that nothing orders, between threads and streams that are only recorded.

Each thread and each stream has a clock of what it knows to be done elsewhere; waits, events and
messages hand it on. Two uses of the same memory, one of which writes, are a race unless the clock
of the later one has the earlier one. That does not depend on how fast the threads happen to run.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

# Of threads and streams by name: how much of its work is known to be done.
Clock = dict[str, int]


class Here(threading.local):
    """The running thread: its role, a rank of a launch, and its current stream."""

    role = ""
    stream = ""

    @property
    def thread(self) -> str:
        """The thread's name; the main one of a role is named after it."""
        name = threading.current_thread().name
        return name if name == self.role else f"{self.role}/{name}"


@dataclass
class Races:
    """Observations of a program: races, and waits, by file and function.

    blind: waits that have no effect, as if the program did not have them.
    """

    blind: Collection[str] = ()
    found: set[str] = field(default_factory=set)
    waits: set[str] = field(default_factory=set)
    host_waits: Counter[tuple[str, str]] = field(default_factory=Counter)  # of threads, for streams
    here: Here = field(default_factory=Here)
    lock: Any = field(default_factory=threading.RLock)
    streams: Counter[str] = field(default_factory=Counter)
    _clocks: dict[str, Clock] = field(default_factory=dict)

    def clock(self, name: str) -> Clock:
        """Return a copy of the clock of a thread or a stream."""
        with self.lock:
            return dict(self._clocks.setdefault(name, {name: 0}))

    def learn(self, name: str, known: Clock) -> None:
        """Let a thread or a stream know what a clock has."""
        with self.lock:
            own = self._clocks.setdefault(name, {name: 0})
            for other, done in known.items():
                own[other] = max(done, own.get(other, 0))

    def act(self, name: str) -> Clock:
        """Begin further work of a thread or a stream; return its clock then."""
        with self.lock:
            self.learn(name, {name: self.clock(name)[name] + 1})
            return self.clock(name)

    def launch(self, stream: str | None = None) -> str:
        """Let the running thread begin work of a stream, or of the current one; return it."""
        stream = self.here.stream if stream is None else stream
        self.learn(stream, self.act(self.here.thread))
        self.act(stream)
        return stream

    def has_effect(self, kind: str, *, of_thread: bool = False) -> bool:
        """Note a wait, of a thread for a stream or another one; return whether it is not blind."""
        frame = sys._getframe(1)
        while "megatron_distill/" not in frame.f_code.co_filename:
            if frame.f_back is None:  # of a test
                return True
            frame = frame.f_back
        name = Path(frame.f_code.co_filename).name
        function = frame.f_code.co_qualname.partition(".<locals>")[0].rpartition(".")[2]
        wait = f"{name}:{function}, {kind}"
        with self.lock:
            self.waits.add(wait)
            if of_thread:
                self.host_waits[self.here.thread, wait] += 1
        return wait not in self.blind

    def wait_on_host(self, known: Clock, kind: str) -> None:
        """Let the running thread wait for work of a stream."""
        if self.has_effect(kind, of_thread=True):
            self.learn(self.here.thread, known)


@dataclass
class _Use:
    name: str  # of the thread or stream
    turn: int  # of its work
    span: tuple[int, int]  # bytes
    writes: bool


@dataclass(eq=False)
class Memory:
    """An allocation, of a stream or of the host if that is None.

    `recorded`: of streams, up to where their work has to be done before the memory is used anew.
    `is_pinned`: memory of the host for which torch looks at that itself.
    """

    races: Races
    stream: str | None
    title: str
    is_pinned: bool = False
    uses: list[_Use] = field(default_factory=list)
    recorded: Clock = field(default_factory=dict)

    def use(self, name: str, tensor: Tensor, *, writes: bool) -> None:
        """Note a use in the work that a thread or a stream has begun last."""
        span = _span(tensor)
        with self.races.lock:
            clock = self.races.clock(name)
            for one in self.uses:
                overlaps = max(one.span[0], span[0]) < min(one.span[1], span[1])
                if overlaps and (one.writes or writes) and clock.get(one.name, 0) < one.turn:
                    first, second = ("written" if one else "read" for one in (one.writes, writes))
                    self.races.found.add(
                        f"{self.title} is {first} by {one.name} and {second} by {name}"
                    )
            self.uses.append(_Use(name, clock[name], span, writes))

    def free(self) -> None:
        """Let later work of its own stream, or of the running thread, use the memory anew."""
        races, uses, self.uses = self.races, self.uses, []
        if self.is_pinned or not races.here.role:
            return
        with races.lock:
            thread = races.here.thread
            clocks = races.clock(thread), races.clock(self.stream or thread), self.recorded
            for one in uses:
                if max(clock.get(one.name, 0) for clock in clocks) < one.turn:
                    races.found.add(f"{self.title} is free while {one.name} uses it")

    def __del__(self) -> None:
        self.free()


def _span(tensor: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()

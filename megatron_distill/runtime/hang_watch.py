"""A step that hangs: the rank whose main thread has stopped is named, and the launch ends.

The process of such a rank runs, so it gives signs of life, and no connection closes. All ranks of
a step wait for each other, so one of them soon finds that its step is late. The threads that watch
for failed peers then look at the main thread of every rank for a few seconds. No rank ends if one
of them reads, measures, computes, advances or does not answer, nor where all wait: a link, a device
or a machine may be slow, and the limits of collectives and heartbeats are for these.
"""

from __future__ import annotations

import json
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Final

import torch
import torch.distributed as dist

from megatron_distill.runtime.heartbeats import SILENT_SECONDS
from megatron_distill.runtime.main_thread import Activity, MainThread, Progress, place_of
from megatron_distill.runtime.roles import Roles
from megatron_distill.runtime.termination import was_interrupted

__all__ = [
    "Answer",
    "Hang",
    "HangWatch",
    "News",
    "Seen",
    "State",
    "count_failure",
    "hang_of",
    "late_after",
    "news",
    "state_of",
]

FLOOR_SECONDS: Final = 30.0
_FACTOR: Final = 3.0  # of the longest step before
_WAIT_SHARE: Final = 0.8  # of `runtime.timeout_seconds`: what a wait for an answer may take
_INQUIRY_SECONDS: Final = 30.0
# A rank that has begun or ended a part of its step this long before is slow, and does not hang.
_QUIET_SECONDS: Final = 10.0
_LOOK_SECONDS: Final = 1.0
_LOOKS: Final = 5  # at the main thread, for an answer
_OUTCOME_LOOKS: Final = 8  # after an answer, until ranks look as rarely as usual
_REST_LOOKS: Final = 4  # of the usual ones, until the next inquiry
_SHOWN: Final = 4  # stacks
_STACK_BYTES: Final = 8192

_NEWS: Final = "news"
# In one number, so that a look takes one request.
_INQUIRY: Final = 1
_FREE: Final = 1 << 20
_FAILURE: Final = 1 << 44


@dataclass(frozen=True)
class News:
    """What a look at the store finds: inquiries so far, and answers of ranks that were free."""

    has_failed: bool
    inquiries: int
    free: int


def count_failure(store: dist.Store) -> None:
    """Let all ranks know that a rank has failed."""
    store.add(_NEWS, _FAILURE)


def news(store: dist.Store) -> News:
    """Look at the store, with one request."""
    found = store.add(_NEWS, 0)
    return News(found >= _FAILURE, found % _FREE, found % _FAILURE // _FREE)


class State(Enum):
    """What a rank's main thread does during an inquiry."""

    FREE = "free"  # it reads, measures, saves, is in a debugger: for any time
    MOVES = "moves"
    WAITS = "waits"  # for other ranks, or for its device
    STUCK = "stuck"


@dataclass(frozen=True)
class Seen:
    """Signs of a main thread from looks over some seconds.

    is_free: at a look it was outside of a step, read data, or was in a debugger.
    has_marked: a part of its step began or ended in these seconds, or shortly before.
    has_advanced: it was at another instruction.
    has_computed: it used the processor.
    waits: it is in a collective, or waits for a message of another role.
    has_device: it may wait for a GPU, which uses the processor.
    runs_backward: it is in the backward pass, whose kernels another thread launches on a GPU.
    """

    is_free: bool = False
    has_marked: bool = False
    has_advanced: bool = False
    has_computed: bool = False
    waits: bool = False
    has_device: bool = False
    runs_backward: bool = False


def state_of(seen: Seen) -> State:
    """Return what a main thread does; only one that stays in a call without work is stuck."""
    if seen.is_free:
        return State.FREE
    if seen.has_marked or seen.has_advanced:
        return State.MOVES
    if seen.waits:
        return State.WAITS
    if seen.has_computed:
        return State.WAITS if seen.has_device else State.MOVES
    return State.WAITS if seen.has_device and seen.runs_backward else State.STUCK


@dataclass(frozen=True)
class Answer:
    """What a rank saw of itself; `stack` only where it is stuck."""

    state: State
    place: str
    host: str
    step: int | None
    unit: int | None
    stack: str = ""

    def to_json(self) -> str:
        """Return the text that `of_json` reads."""
        return json.dumps(asdict(self) | {"state": self.state.value})

    @classmethod
    def of_json(cls, text: str) -> Answer:
        """Return the answer of a text."""
        values = json.loads(text)
        return cls(**(values | {"state": State(values["state"])}))


@dataclass(frozen=True)
class Hang:
    """The ranks of a step that hangs."""

    answers: Mapping[int, Answer]

    @property
    def stuck(self) -> dict[int, Answer]:
        """The ranks that stand still outside of collectives and waits."""
        return {one: found for one, found in self.answers.items() if found.state is State.STUCK}

    @property
    def culprit(self) -> int:
        """The rank that the others end for."""
        return min(self.stuck)

    def stacks(self, roles: Roles) -> str:
        """Return the calls of the first stuck ranks."""
        shown = list(self.stuck.items())[:_SHOWN]
        return "".join(
            f"Main thread of {roles.name(rank)} (most recent call last):\n{one.stack}"
            for rank, one in shown
        )

    def sentence(self, roles: Roles, *, seconds: float, longest: float) -> str:
        """Return the root cause in one line."""
        groups: dict[str, list[int]] = defaultdict(list)
        for rank, one in self.answers.items():
            if one.state is State.WAITS:
                groups[one.place].append(rank)
        waits = "; ".join(f"{roles.names(ranks)} in {place}" for place, ranks in groups.items())
        waits = f". Waiting: {waits}" if waits else ""
        before = f"the longest step before took {longest:.2g} s"
        before = before if longest else "these are the first steps of this launch"
        late = f"{seconds:g} s without progress, and {before}"
        stuck, causes = self.stuck, []
        for rank, one in list(stuck.items())[:_SHOWN]:
            name = f"{roles.name(rank)} on {one.host}{_at(one)}"
            causes.append(f"{name} hangs in {one.place}")
        if len(stuck) > _SHOWN:
            causes.append(f"and {len(stuck) - _SHOWN} more hang")
        return f"error: {'; '.join(causes)}: {late}; calls are above{waits}"


def _at(one: Answer | None) -> str:
    if one is None or one.step is None:
        return ""
    return f" at step {one.step}" if one.unit is None else f" at step {one.step}, unit {one.unit}"


def hang_of(answers: Mapping[int, Answer]) -> Hang | None:
    """Return the hang of a step, None while it may only be slow."""
    if any(one.state in (State.FREE, State.MOVES) for one in answers.values()):
        return None
    found = Hang(answers)
    return found if found.stuck else None


def late_after(progress: Progress, *, patience_seconds: float) -> float | None:
    """Return the seconds without progress after which a step is late; None: no inquiry.

    Where `runtime.timeout_seconds` ends waits sooner or at the same time, they have the reason.
    """
    limit = max(FLOOR_SECONDS, _FACTOR * progress.longest_seconds)
    return limit if limit + _INQUIRY_SECONDS <= _WAIT_SHARE * patience_seconds else None


class HangWatch:
    """Looks whether this rank's step is late, asks all ranks then, and answers their inquiries.

    Time is counted in looks: a process that was stopped has not looked. Ranks of teachers wait for
    commands without limit; they only answer. The step of the student that waits for them is late.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        roles: Roles,
        progress: Progress,
        main_thread: MainThread,
        *,
        patience_seconds: float,
        ended: threading.Event,
        give_sign: Callable[[], None],
    ) -> None:
        self._store = store
        self._rank = rank
        self._roles = roles
        self._progress = progress
        self._main_thread = main_thread
        self._patience = patience_seconds
        self._ended = ended
        self._give_sign = give_sign
        self._marks = 0
        self._answered = 0
        self._free = 0
        self._rest = 0
        self.quiet_seconds = 0.0

    def look(self, found: News, *, seconds: float) -> Hang | None:
        """Look after some seconds; return a hang if this rank is the one to report it."""
        self._note_free(found)
        asked = found.inquiries
        self._rest = max(self._rest - 1, 0)
        self._count(seconds)
        if asked > self._answered:
            if self._answer(asked) is not None:
                self._await_outcome()
            return None
        if self._rest or not self._is_late():
            return None
        number = asked + 1
        if self._store.add(f"hang/{number}", 1) > 1:  # another rank is about to ask
            return None
        self._store.delete_key(f"hang/{number - 1}")
        self._store.add(_NEWS, _INQUIRY)
        marks = self._progress.marks
        if self._answer(number) is None:
            return None
        hang = self._collected(number)
        self._note_free(news(self._store))
        return hang if self._progress.marks == marks else None

    def _note_free(self, found: News) -> None:
        """Note that this step was held up by a rank outside of it: its time is no measure."""
        if found.free != self._free:
            self._free, self._progress.is_held_up = found.free, True

    def _count(self, seconds: float) -> None:
        """Count the seconds since a part of the step has begun or ended."""
        marks = self._progress.marks
        is_quiet = marks == self._marks and self._is_in_step()
        self.quiet_seconds = self.quiet_seconds + seconds if is_quiet else 0.0
        self._marks = marks

    def _is_in_step(self) -> bool:
        return self._progress.activity in (Activity.COMPUTES, Activity.WAITS)

    def _is_late(self) -> bool:
        limit = late_after(self._progress, patience_seconds=self._patience)
        is_student = self._rank in self._roles.student.ranks
        return is_student and limit is not None and self.quiet_seconds >= limit

    def _answer(self, number: int) -> Answer | None:
        """Look at the main thread for some seconds, and answer; None: this block has ended."""
        self._store.delete_key(f"hang/{number - 1}/{self._rank}")
        self._answered, self._rest = number, _REST_LOOKS
        found = self._observed()
        if found is not None:
            if found.state is State.FREE:
                self._store.add(_NEWS, _FREE)
            self._store.set(f"hang/{number}/{self._rank}", found.to_json())
        return found

    def _observed(self) -> Answer | None:
        main, progress = self._main_thread, self._progress
        was_quiet = self.quiet_seconds >= _QUIET_SECONDS
        is_free = has_advanced = False
        seconds, marks, position = main.processor_seconds(), progress.marks, main.position()
        for _ in range(_LOOKS):
            is_free |= not self._is_in_step() or main.is_at_leisure() or was_interrupted()
            if self._pauses():
                return None
            has_advanced |= main.position() != position
        stack = main.stack()
        seen = Seen(
            is_free=is_free,
            has_marked=progress.marks != marks or not was_quiet,
            has_advanced=has_advanced,
            has_computed=main.processor_seconds() != seconds,
            waits=progress.activity is Activity.WAITS or main.waits_for_ranks(),
            has_device=torch.cuda.is_initialized(),
            runs_backward=stack[-1].name == "_engine_run_backward",
        )
        self.quiet_seconds += _LOOKS * _LOOK_SECONDS
        state = state_of(seen)
        calls = "".join(stack.format())[-_STACK_BYTES:] if state is State.STUCK else ""
        where = place_of(stack), socket.gethostname()
        return Answer(state, *where, progress.step, progress.unit, calls)

    def _pauses(self) -> bool:
        """Wait until the next look, and give a sign of life; return whether the block has ended."""
        if self._ended.wait(_LOOK_SECONDS):
            return True
        self._give_sign()
        return False

    def _await_outcome(self) -> None:
        """Let this rank's next usual look come soon after a decision."""
        for _ in range(_OUTCOME_LOOKS):
            found = news(self._store)
            self._note_free(found)
            if found.has_failed or self._pauses():
                return

    def _collected(self, number: int) -> Hang | None:
        """Return the decision from all answers, those of ranks without one after a while."""
        ranks = range(self._roles.size)
        keys = {rank: f"hang/{number}/{rank}" for rank in ranks}
        looks = 0
        # A rank that leaves does not answer, nor one whose interpreter an extension keeps, as where
        # a trace is written. One that is stopped or lost has a limit of its own.
        while not self._store.check(list(keys.values())):
            looks += 1
            if looks * _LOOK_SECONDS > SILENT_SECONDS:
                break
            if self._pauses() or news(self._store).has_failed:
                return None
        if not self._store.check(list(keys.values())):
            return None
        found = self._store.multi_get(list(keys.values()))
        answers = {
            rank: Answer.of_json(text.decode()) for rank, text in zip(ranks, found, strict=True)
        }
        return hang_of(answers)

"""Steps that hang: late or slow, stuck or waiting, and the one line that names the rank."""

from __future__ import annotations

import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import cast

import pytest
import torch.distributed as dist

from megatron_distill.runtime import hang_watch
from megatron_distill.runtime.hang_watch import (
    Answer,
    HangWatch,
    News,
    Seen,
    State,
    count_failure,
    hang_of,
    late_after,
    news,
    state_of,
)
from megatron_distill.runtime.main_thread import (
    Activity,
    MainThread,
    Progress,
    awake_until,
    place_of,
)
from megatron_distill.runtime.roles import Roles

# Seconds of the steps that are measured, `runtime.timeout_seconds`; those after which it is late.
LATE = {
    "the first steps": ((), 600.0, 30.0),
    "short steps": ((0.1, 0.2), 600.0, 30.0),
    "long steps": ((20.0, 0.1), 600.0, 60.0),
    "a long step long ago": ((20.0, *[0.1] * 32), 600.0, 30.0),
    "the timeout comes as soon": ((151.0,), 600.0, None),
    "a short timeout": ((0.1,), 60.0, None),
}


def after(*seconds: float) -> Progress:
    """A rank in the step after some measured ones."""
    progress = Progress(step=3 + len(seconds), activity=Activity.COMPUTES)
    progress._measured.extend(seconds)
    return progress


@pytest.mark.parametrize("case", LATE)
def test_a_step_is_late_after_three_times_the_longest_before(case: str) -> None:
    seconds, patience, expected = LATE[case]
    assert late_after(after(*seconds), patience_seconds=patience) == expected


def test_the_longest_step_is_without_reading_and_without_the_first_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    progress, longest = Progress(), []
    steps = [(1, 50, 1), (0, 40, 1), (30, 2, 1), (0, 1, 1), (0, 9, 1)]
    for step, (reads, computes, waits) in enumerate(steps, start=1):
        progress.start_step(step)
        progress.is_held_up = step == 5
        for activity, seconds in (
            (Activity.READS, reads), (Activity.COMPUTES, computes), (Activity.WAITS, waits),
        ):  # fmt: skip
            progress.change(activity)
            now += seconds
        progress.end_step()
        now += 100  # a save
        longest.append(progress.longest_seconds)
    assert longest == [0.0, 0.0, 3.0, 3.0, 3.0]
    assert (progress.step, progress.steps, progress.activity) == (5, 5, Activity.BETWEEN)


STATES = {
    "a debugger, in a collective": (Seen(is_free=True, waits=True), State.FREE),
    "the next unit": (Seen(has_marked=True, waits=True), State.MOVES),
    "the next instruction": (Seen(has_advanced=True), State.MOVES),
    "a collective that polls": (Seen(waits=True, has_computed=True), State.WAITS),
    "a long product on the CPU": (Seen(has_computed=True), State.MOVES),
    "a wait for the GPU": (Seen(has_computed=True, has_device=True), State.WAITS),
    "kernels of a backward pass": (Seen(has_device=True, runs_backward=True), State.WAITS),
    "a backward pass on the CPU": (Seen(runs_backward=True), State.STUCK),
    "a lock": (Seen(), State.STUCK),
    "a lock beside a GPU": (Seen(has_device=True), State.STUCK),
}


@pytest.mark.parametrize("case", STATES)
def test_only_a_call_that_does_nothing_is_stuck(case: str) -> None:
    seen, expected = STATES[case]
    assert state_of(seen) is expected


ROLES = Roles(4, (("teacher", 2),))


def answers(*states: State) -> dict[int, Answer]:
    """Answers of the first ranks."""
    return {
        rank: Answer(state, f"f{rank % 2}, a.py:7", f"n{rank}", 4, 2 if rank > 1 else None, "f()\n")
        for rank, state in enumerate(states)
    }


W, S, M, F = State.WAITS, State.STUCK, State.MOVES, State.FREE
TAIL = "35 s without progress, and the longest step before took 0.21 s"
# Answers of the ranks, and the line of the report; None: no report.
HANGS = {
    "a teacher": (
        (W, W, S, W),
        f"teacher.0 on n2 at step 4, unit 2 hangs in f0, a.py:7: {TAIL}; calls are above. "
        "Waiting: student.0 in f0, a.py:7; student.1, teacher.1 in f1, a.py:7",
    ),
    "two of the student": (
        (S, S, W, W),
        f"student.0 on n0 at step 4 hangs in f0, a.py:7; student.1 on n1 at step 4 hangs in f1, "
        f"a.py:7: {TAIL}; calls are above. Waiting: teacher.0 in f0, a.py:7; teacher.1 in f1, "
        "a.py:7",
    ),
    "all wait": ((W, W, W, W), None),
    "one reads": ((W, S, F, W), None),
    "one advances": ((W, S, M, W), None),
}  # fmt: skip


@pytest.mark.parametrize("case", HANGS)
def test_a_hang_is_one_line_with_stuck_ranks_first(case: str) -> None:
    states, expected = HANGS[case]
    found = hang_of(answers(*states))
    if expected is None:
        assert found is None
        return
    assert found is not None
    text = found.sentence(ROLES, seconds=35.0, longest=0.2149)
    assert text == f"error: {expected}"
    stuck = [ROLES.name(rank) for rank, state in enumerate(states) if state is S]
    stacks = "".join(f"Main thread of {one} (most recent call last):\nf()\n" for one in stuck)
    assert found.stacks(ROLES) == stacks


def test_an_answer_survives_the_store() -> None:
    (found,) = answers(State.STUCK).values()
    assert Answer.of_json(found.to_json()) == found


def test_news_tell_failures_from_inquiries() -> None:
    store = dist.HashStore()
    assert news(store) == News(has_failed=False, inquiries=0, free=0)
    for number in (hang_watch._INQUIRY, hang_watch._FREE, hang_watch._FREE):
        store.add("news", number)
    assert news(store) == News(has_failed=False, inquiries=1, free=2)
    for _ in range(2):
        count_failure(store)
    assert news(store) == News(has_failed=True, inquiries=1, free=2)


@contextmanager
def looked(*, finds: Callable[[MainThread], object]) -> Iterator[Future[object]]:
    """Another thread looks at this one, once it has stayed where it is for a while."""
    found: Future[object] = Future()

    def look() -> None:
        main, same, position = MainThread(), 0, ()
        while same < 4:
            time.sleep(0.03)
            same = same + 1 if main.position() == position else 0
            position = main.position()
        found.set_result(finds(main))

    thread = threading.Thread(target=look)
    thread.start()
    yield found
    thread.join()


def test_a_wait_of_a_handle_is_one_for_ranks_and_that_of_a_lock_is_not() -> None:
    store, keys, limit, ended = dist.HashStore(), ["seen"], timedelta(minutes=4), threading.Event()

    def finds(main: MainThread) -> tuple[bool, bool, str]:
        seen = main.waits_for_ranks(), main.is_at_leisure(), place_of(main.stack())
        store.set("seen", "yes")
        ended.set()
        return seen

    with looked(finds=finds) as found:
        store.wait(keys, limit)  # as `Work.wait`, it has no frame of its own
    ended.clear()
    name, file = "test_a_wait_of_a_handle_is_one_for_ranks_and_that_of_a_lock_is_not", __file__
    line = traceback.extract_stack()[-1].lineno
    assert line is not None
    assert found.result()[:2] == (True, False)  # type: ignore[index]
    with looked(finds=finds) as found:
        ended.wait(240.0)
    leisure = found.result()
    assert leisure[:2] == (False, False)  # type: ignore[index]
    assert leisure[2].startswith(f"{name}, {file.rsplit('/', 1)[1]}:")  # type: ignore[index]


def test_a_wait_for_files_and_a_debugger_take_any_time() -> None:
    with looked(finds=MainThread.is_at_leisure) as found:
        awake_until(found)
    assert found.result()
    names: dict[str, object] = {"found": None}
    files = {
        "/usr/lib/python3.11/bdb.py": True,
        subprocess.__file__: True,
        "/x/site-packages/torch/_dynamo/convert_frame.py": True,
        "/x/site-packages/torch/_dynamo/eval_frame.py": False,  # of what is compiled already
        "/home/user/subprocess.py": False,
    }
    for file, expected in files.items():
        exec(compile("def prompt():\n    found.result()\n", file, "exec"), names)
        with looked(finds=MainThread.is_at_leisure) as found:
            names["found"] = found
            cast(Callable[[], None], names["prompt"])()
        assert found.result() is expected, file


class Standing:
    """A main thread that stays in a call, or computes, or is in a debugger."""

    def __init__(self, *, computes: bool = False, at_leisure: bool = False) -> None:
        self._seconds = count() if computes else None
        self._at_leisure = at_leisure
        self.waits = False

    def processor_seconds(self) -> float:
        return 0.0 if self._seconds is None else next(self._seconds)

    def position(self) -> tuple[tuple[int, int], ...]:
        return ((1, 2),)

    def is_at_leisure(self) -> bool:
        return self._at_leisure

    def waits_for_ranks(self) -> bool:
        return self.waits

    def stack(self) -> traceback.StackSummary:
        return traceback.extract_stack()


def advances(progress: Progress, thread: Standing) -> None:
    progress.change(Activity.COMPUTES)


def reads(progress: Progress, thread: Standing) -> None:
    progress.activity = Activity.READS


def waits(progress: Progress, thread: Standing) -> None:
    thread.waits = True


def stands(progress: Progress, thread: Standing) -> None:
    """It is in no collective."""


# The second rank; the look at which the first reports, and the ranks that it finds stuck. None:
# no report.
SECONDS = {
    "stuck": (Standing(), stands, (6, [1])),
    "computes": (Standing(computes=True), stands, None),
    "in a debugger": (Standing(at_leisure=True), stands, None),
    "reads": (Standing(), reads, None),
    "advances": (Standing(), advances, None),
    "no answer": (None, stands, None),
    "waits": (Standing(), waits, None),
}
LOOKS = 14  # of 5 s: at the sixth it is late, and it asks again at every fourth after that


def watched(store: dist.Store, ended: threading.Event, rank: int, thread: Standing) -> HangWatch:
    main = cast(MainThread, thread)
    return HangWatch(
        store, rank, Roles(2), after(0.1), main, patience_seconds=600.0, ended=ended,
        give_sign=lambda: None,
    )  # fmt: skip


@contextmanager
def second_rank(store: dist.Store, name: str) -> Iterator[threading.Event]:
    """The second rank answers meanwhile, unless it is silent."""
    (thread, does, _), ended = SECONDS[name], threading.Event()
    if thread is None:
        yield ended
        return

    def answer() -> None:
        watch = watched(store, ended, 1, thread)
        while not ended.wait(0.001):
            does(watch._progress, thread)
            assert watch.look(news(store), seconds=0.1) is None  # it is not late

    other = threading.Thread(target=answer)
    other.start()
    try:
        yield ended
    finally:
        ended.set()
        other.join()


@pytest.mark.parametrize("second", SECONDS)
def test_a_late_rank_asks_the_others_and_reports(
    second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, store, first = SECONDS[second][2], dist.HashStore(), Standing()
    silence = 0.1 if SECONDS[second][0] is None else 10.0
    quiet = 10.0 if second == "advances" else 0.0
    limits = {"_LOOK_SECONDS": 0.002, "SILENT_SECONDS": silence, "_QUIET_SECONDS": quiet}
    for name, seconds in limits.items():
        monkeypatch.setattr(hang_watch, name, seconds)
    first.waits, found = True, []
    with second_rank(store, second) as ended:
        watch = watched(store, ended, 0, first)
        for look in range(1, LOOKS + 1):
            hang = watch.look(news(store), seconds=5.0)
            if hang is not None:
                found.append((look, list(hang.stuck)))
                break
    assert found == ([] if expected is None else [expected])
    assert watch._progress.is_held_up == (second in ("reads", "in a debugger"))
    assert news(store).inquiries == (3 if expected is None or expected[0] == LOOKS else 1)

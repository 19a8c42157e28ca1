"""Steps that are read ahead: beside a running step, and two steps before a store needs them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext

import pytest
import torch

from megatron_distill.data.prefetch import Lookahead, PrefetchedSteps
from megatron_distill.errors import DataError, StoreError, TrainingError
from megatron_distill.runtime.batch import Batch
from tests.unit.data.test_loader import Numbers, loader_of, sample_ids

LAST = 6


def prefetched(source: Numbers) -> PrefetchedSteps:
    return PrefetchedSteps(
        loader_of(source), last_step=LAST, device=torch.device("cpu"), group=None
    )


def test_batches_and_states_are_those_of_the_loader() -> None:
    plain = loader_of(Numbers())
    with prefetched(Numbers()) as steps:
        assert steps.state_dict() == plain.state_dict()
        for step in range(1, LAST + 1):
            assert sample_ids(steps.take(step)) == sample_ids(plain.take(step))
            assert steps.state_dict() == plain.state_dict()


def test_a_state_loaded_between_two_steps_discards_the_one_ahead() -> None:
    with prefetched(Numbers()) as steps:
        beginning = steps.state_dict()
        first = sample_ids(steps.take(1))
        steps.load_state_dict(beginning)
        assert [sample_ids(steps.take(step)) for step in (1, 2)] == [first, [[4, 5], [6, 7]]]


def test_an_error_is_raised_by_its_own_step() -> None:
    with prefetched(Numbers(broken_at=4 * 3)) as steps:
        for step in (1, 2, 3):
            steps.take(step)
        with pytest.raises(DataError, match="sample 12 is broken"):
            steps.take(4)
        assert steps.state_dict()["samples"] == 12


def test_a_defect_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    source = Numbers()
    source.position = "no number"  # type: ignore[assignment]
    with pytest.raises(TypeError), prefetched(source) as steps:
        steps.take(1)


@pytest.mark.parametrize("error", [None, TrainingError("too many bad steps")])
def test_no_thread_stays_after_an_end_of_all_ranks(error: TrainingError | None) -> None:
    before = set(threading.enumerate())
    steps = prefetched(Numbers())
    steps.take(1)
    (thread,) = (one for one in set(threading.enumerate()) - before if one.name == "prefetch")
    steps.__exit__(None if error is None else type(error), error, None)
    thread.join(10.0)
    assert set(threading.enumerate()) <= before


STORES = ("0a", "0b")


def ahead_of(source: Numbers, text: list[Sequence[Batch]] | None = None) -> Lookahead:
    text = [] if text is None else text
    return Lookahead(loader_of(source), last_step=LAST, expect=text.append, stores=STORES)


def test_it_hands_out_the_loader_s_batches_and_announces_them_two_steps_before() -> None:
    plain, text = loader_of(Numbers()), []
    ahead = ahead_of(Numbers(), text)
    for step in range(1, LAST + 1):
        batches = ahead.take(step)
        assert sample_ids(batches) == sample_ids(plain.take(step))
        assert ahead.state_dict() == {**plain.state_dict(), "teacher_stores": list(STORES)}
        assert len(text) == min(step + 2, LAST)
        # The very object, by which a teacher knows what it was told about.
        assert text[step - 1] is batches.micro_batches


# Steps read one ahead by a thread, and two ahead.
MAKERS = {"thread": prefetched, "two ahead": lambda source: nullcontext(ahead_of(source))}


@pytest.mark.parametrize("kind", MAKERS)
def test_it_resumes_from_the_state_of_any_step(kind: str) -> None:
    with MAKERS[kind](Numbers()) as whole:
        states, batches = [], []
        for step in range(1, LAST + 1):
            states.append(whole.state_dict())
            batches.append(sample_ids(whole.take(step)))
    for done, state in enumerate(states):
        with MAKERS[kind](Numbers()) as again:
            again.load_state_dict(state)
            assert again.state_dict() == state
            found = [sample_ids(again.take(step)) for step in range(done + 1, LAST + 1)]
            assert found == batches[done:]


@pytest.mark.parametrize("kind", MAKERS)
def test_no_step_after_the_last_is_taken(kind: str) -> None:
    # The source is broken at the first sample of a further step.
    with MAKERS[kind](Numbers(broken_at=4 * LAST)) as steps:
        for step in range(1, LAST + 1):
            steps.take(step)


def test_it_goes_on_from_the_state_of_a_run_with_a_live_teacher() -> None:
    loader = loader_of(Numbers())
    for step in range(1, 4):
        loader.take(step)
    ahead = ahead_of(Numbers())
    ahead.load_state_dict(loader.state_dict())
    assert sample_ids(ahead.take(4))[0][0] == 12


@pytest.mark.parametrize("others", [["0b", "0a"], ["0a"], []])
def test_other_stores_than_those_of_the_steps_before_are_refused(others: list[str]) -> None:
    ahead = ahead_of(Numbers())
    ahead.take(1)
    state = {**ahead.state_dict(), "teacher_stores": others}
    with pytest.raises(StoreError, match="name the same stores in the same order"):
        ahead_of(Numbers()).load_state_dict(state)


def test_an_error_comes_at_most_two_steps_early() -> None:
    ahead = ahead_of(Numbers(broken_at=4 * 4))
    ahead.take(1)
    ahead.take(2)
    with pytest.raises(DataError, match="sample 16 is broken"):
        ahead.take(3)

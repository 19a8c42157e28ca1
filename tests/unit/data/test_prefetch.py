"""Steps taken in a thread, one ahead: the loader's batches and states, errors at their step."""

from __future__ import annotations

import threading

import pytest
import torch

from megatron_distill.data.prefetch import PrefetchedSteps
from megatron_distill.errors import DataError, TrainingError
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


def test_it_resumes_from_the_state_of_any_step() -> None:
    with prefetched(Numbers()) as whole:
        states, batches = [], []
        for step in range(1, LAST + 1):
            states.append(whole.state_dict())
            batches.append(sample_ids(whole.take(step)))
    for done, state in enumerate(states):
        with prefetched(Numbers()) as again:
            again.load_state_dict(state)
            assert again.state_dict() == state
            found = [sample_ids(again.take(step)) for step in range(done + 1, LAST + 1)]
            assert found == batches[done:]


def test_a_state_loaded_between_two_steps_discards_the_one_ahead() -> None:
    with prefetched(Numbers()) as steps:
        beginning = steps.state_dict()
        first = sample_ids(steps.take(1))
        steps.load_state_dict(beginning)
        assert [sample_ids(steps.take(step)) for step in (1, 2)] == [first, [[4, 5], [6, 7]]]


def test_an_error_is_raised_by_its_own_step_and_the_one_after_the_last_is_not_taken() -> None:
    with prefetched(Numbers(broken_at=4 * 3)) as steps:
        for step in (1, 2, 3):
            steps.take(step)
        with pytest.raises(DataError, match="sample 12 is broken"):
            steps.take(4)
        assert steps.state_dict()["samples"] == 12
    with prefetched(Numbers(broken_at=4 * LAST)) as steps:
        for step in range(1, LAST + 1):
            steps.take(step)


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

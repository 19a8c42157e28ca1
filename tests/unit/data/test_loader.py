"""The loader in one process: state without read-ahead, errors at their step, clean ends."""

import json
import threading

import numpy as np
import pytest

from megatron_distill.data.loader import StepLoader
from megatron_distill.data.samples import FULLY_TRAINED, Sample, SampleList, State
from megatron_distill.errors import DataError
from megatron_distill.runtime.batch import StepBatches

LENGTH = 8


def numbered_sample(number: int) -> Sample:
    tokens = np.arange(number * LENGTH, number * LENGTH + LENGTH + 1, dtype=np.int32)
    documents = (np.arange(LENGTH + 1) >= number % LENGTH).astype(np.int32)
    return Sample(tokens, documents, np.full(LENGTH + 1, FULLY_TRAINED, np.uint8), number)


class Numbers:
    """Sample n holds tokens from n * LENGTH on; from `broken_at` on there is an error instead."""

    def __init__(self, broken_at: int | None = None) -> None:
        self.position = 0
        self.broken_at = broken_at
        self.threads: set[str] = set()

    def next_sample(self) -> Sample:
        self.threads.add(threading.current_thread().name)
        if self.position == self.broken_at:
            raise DataError(f"corpus.txt: sample {self.position} is broken")
        self.position += 1
        return numbered_sample(self.position - 1)

    def state_dict(self) -> State:
        return {"position": self.position}

    def load_state_dict(self, state: State) -> None:
        self.position = state["position"]


def loader_of(source: Numbers | SampleList, **changes: int) -> StepLoader:
    settings = {"global_batch_size": 4, "micro_batch_size": 2, "prefetch": 2, **changes}
    return StepLoader(source, sequence_length=LENGTH, **settings)


def sample_ids(batches: StepBatches) -> list[list[int]]:
    return [batch.sample_ids_b.tolist() for batch in batches.micro_batches]


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_the_state_counts_samples_taken_and_not_those_read_ahead(prefetch: int) -> None:
    source = Numbers()
    with loader_of(source, prefetch=prefetch) as loader:
        assert loader.state_dict() == {"samples": 0, "source": None}
        for step in range(4):
            assert sample_ids(loader.take(step)) == [
                [4 * step, 4 * step + 1],
                [4 * step + 2, 4 * step + 3],
            ]
            expected = {"samples": 4 * step + 4, "source": {"position": 4 * step + 4}}
            assert json.loads(json.dumps(loader.state_dict())) == expected
    assert source.position <= 16 + 4 * prefetch


@pytest.mark.parametrize("prefetch", [0, 3])
def test_loading_a_state_drops_samples_read_ahead(prefetch: int) -> None:
    with loader_of(Numbers(), prefetch=prefetch) as loader:
        states = []
        for step in range(4):
            states.append(loader.state_dict())
            loader.take(step)
        for step in (2, 0, 3):
            loader.load_state_dict(states[step])
            assert loader.state_dict() == states[step]
            assert sample_ids(loader.take(step))[0] == [4 * step, 4 * step + 1]
            assert sample_ids(loader.take(step + 1))[0] == [4 * step + 4, 4 * step + 5]


def test_a_state_is_valid_for_another_batch_size() -> None:
    with loader_of(Numbers()) as loader:
        loader.take(0)
        state = loader.state_dict()
    with loader_of(Numbers(), global_batch_size=6, micro_batch_size=3) as loader:
        loader.load_state_dict(state)
        assert sample_ids(loader.take(0)) == [[4, 5, 6], [7, 8, 9]]


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_an_error_is_raised_at_its_own_step(prefetch: int) -> None:
    with loader_of(Numbers(broken_at=9), prefetch=prefetch) as loader:
        assert sample_ids(loader.take(0))[0] == [0, 1]
        assert sample_ids(loader.take(1))[0] == [4, 5]
        with pytest.raises(DataError, match=r"corpus\.txt: sample 9 is broken"):
            loader.take(2)
        assert loader.state_dict()["samples"] == 8


def test_a_defect_of_the_source_reaches_the_caller() -> None:
    source = Numbers()
    source.position = "no number"  # type: ignore[assignment]
    with loader_of(source) as loader, pytest.raises(TypeError):
        loader.take(0)


def test_one_thread_reads_and_ends_with_the_loader() -> None:
    source = Numbers()
    loader = loader_of(source, prefetch=3)
    loader.take(0)
    assert [name.startswith("data-reader") for name in source.threads] == [True]
    loader.close()
    loader.close()
    names = {thread.name for thread in threading.enumerate()}
    assert not names & source.threads


def test_masks_positions_and_counts_of_a_step() -> None:
    with loader_of(Numbers()) as loader:
        batches = loader.take(0)
    assert batches.positions == 4 * LENGTH
    # Sample n changes documents before position n, sample 0 does not: three boundaries.
    assert batches.ce_tokens == batches.kd_tokens == 4 * LENGTH - 3
    trained = sum(int(batch.ce_mask_bs.sum()) for batch in batches.micro_batches)
    assert trained == batches.ce_tokens
    assert batches.micro_batches[1].position_ids_bs[1].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]


def test_a_list_of_samples_is_filled_up_and_can_be_read_again() -> None:
    samples = SampleList([numbered_sample(number) for number in range(6)])
    assert samples.steps(4) == 2
    with loader_of(samples) as loader:
        beginning = loader.state_dict()
        for _ in range(2):
            first, last = loader.take(0), loader.take(1)
            assert sample_ids(first) == [[0, 1], [2, 3]]
            assert sample_ids(last) == [[4, 5], [6, 7]]
            assert not last.micro_batches[1].ce_mask_bs.any()
            assert last.ce_tokens == 2 * LENGTH - 2
            loader.load_state_dict(beginning)


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
def test_the_samples_of_a_step_are_those_that_were_read_row_by_row(rank: int, size: int) -> None:
    wanted = {"data_parallel_rank": rank, "data_parallel_size": size, "micro_batch_size": 1}
    with loader_of(Numbers(), **wanted) as loader:
        for step in range(3):
            batches = loader.take(step)
            taken = loader.taken_samples()
            assert [[one.sample_id for one in part] for part in taken] == sample_ids(batches)
            for (sample,), batch in zip(taken, batches.micro_batches, strict=True):
                expected = numbered_sample(sample.sample_id)
                for name in ("tokens_S1", "document_ids_S1", "flags_S1"):
                    found = getattr(sample, name)
                    assert found.dtype == getattr(expected, name).dtype
                    assert (found == getattr(expected, name)).all()
                assert (batch.tokens_bs[0].numpy() == sample.tokens_S1[:-1]).all()


def test_padding_comes_back_as_padding() -> None:
    with loader_of(SampleList([numbered_sample(3)]), global_batch_size=2) as loader:
        loader.take(0)
        ((first, second),) = loader.taken_samples()
    assert (first.document_ids_S1 >= 0).all()
    assert (second.document_ids_S1 == -1).all()
    assert (second.flags_S1 == 0).all()

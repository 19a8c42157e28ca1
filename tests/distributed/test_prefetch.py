"""Steps taken in a thread of each rank, in a group of their own, beside the steps' collectives."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron_distill.data.formats import SourceSpec
from megatron_distill.data.prefetch import PrefetchedSteps, PrefetchedUnits, exchange_group
from megatron_distill.errors import DataError
from megatron_distill.runtime.batch import Batch, StepBatches
from tests.distributed.pool import Pool
from tests.distributed.test_loader import ROWS, Layout, loader_for, open_source, take_until_error
from tests.support.data_fixtures import story, write_jsonl


@pytest.fixture
def spec(tmp_path: Path) -> SourceSpec:
    return SourceSpec(
        "jsonl", (str(write_jsonl(tmp_path / "corpus.jsonl", map(story, range(60)))),)
    )


def prefetched(spec: SourceSpec, rank: int, layout: Layout) -> PrefetchedSteps:
    """The steps of a training stream."""
    group = exchange_group(timeout_seconds=60.0)
    loader = loader_for(open_source(spec, rank), rank, layout, group=group)
    return PrefetchedSteps(loader, last_step=99, device=torch.device("cpu"), group=group)


def prefetch_until_error(
    rank: int, world_size: int, spec: SourceSpec, layout: Layout
) -> tuple[int, str]:
    """The step that raised a DataError on this rank, and its message."""
    with prefetched(spec, rank, layout) as steps:
        for step in range(1, 99):
            try:
                steps.take(step)
            except DataError as error:
                return step - 1, str(error)
            total = torch.ones(1)
            dist.all_reduce(total)  # the training's collectives meanwhile
            assert total == world_size
    raise AssertionError("no error")


@pytest.mark.parametrize("layout", [(2, 1, 2), (1, 2, 4)])
def test_an_error_is_raised_on_all_ranks_by_the_step_of_a_loader_without_prefetch(
    pool: Pool, spec: SourceSpec, layout: Layout
) -> None:
    with Path(spec.paths[0]).open("a") as corpus:
        corpus.write('{"text": 7}\n')
    plain = pool.run(2, take_until_error, spec, 0)
    assert pool.run(2, prefetch_until_error, spec, layout) == plain


def taken_meanwhile(rank: int, world_size: int, spec: SourceSpec) -> tuple[list[int], bool]:
    """The steps that the thread has taken during step 1, and whether the state is of that one."""
    second, finished = Event(), []
    with prefetched(spec, rank, (world_size, 1, 1)) as steps:
        take = steps._loader.take_on_host

        def noted(step: int) -> StepBatches:
            batches = take(step)
            finished.append(step)
            if step == 2:
                second.set()
            return batches

        with patch.object(steps._loader, "take_on_host", noted):
            steps.take(1)
            state = steps.state_dict()
            # While step 1 runs: `take(2)` is not called.
            assert second.wait(timeout=60.0)
            return finished, steps.state_dict() == state != steps._loader.state_dict()


def test_the_next_step_is_read_and_exchanged_while_a_step_runs(
    pool: Pool, spec: SourceSpec
) -> None:
    assert pool.run(2, taken_meanwhile, spec) == [([1, 2], True)] * 2


def units_taken_meanwhile(
    rank: int, world_size: int, spec: SourceSpec
) -> tuple[list[int], list[list[int]]]:
    """The steps whose units the thread has taken during step 1, and the samples of that step."""
    second, finished = Event(), []
    group = exchange_group(timeout_seconds=60.0)
    loader = loader_for(open_source(spec, rank), rank, (world_size, 1, 1), group=group)
    take = loader.take_units

    def noted(step: int, units: Sequence[int], *, replicas: int) -> list[Batch]:
        batches = take(step, units, replicas=replicas)
        finished.append(step)
        if step == 2:
            second.set()
        return batches

    own = [rank, world_size + rank]
    with (
        patch.object(loader, "take_units", noted),
        PrefetchedUnits(loader, units=own, replicas=world_size, last_step=99, group=group) as ahead,
    ):
        units = ahead.take(1)
        # While step 1 runs: `take(2)` is not called.
        assert second.wait(timeout=60.0)
        return list(finished), [unit.sample_ids_b.tolist() for unit in units]


def test_the_units_of_the_next_step_are_taken_while_a_step_runs(
    pool: Pool, spec: SourceSpec
) -> None:
    found = pool.run(2, units_taken_meanwhile, spec)
    assert [steps for steps, _ in found] == [[1, 2]] * 2
    samples = [sample for _, units in found for unit in units for sample in unit]
    assert len(set(samples)) == len(samples) == 4


def end_early(rank: int, world_size: int, spec: SourceSpec) -> list[list[int]]:
    """The samples of two steps, in each of two runs that end before the stream does."""
    found = []
    for _ in range(2):
        with prefetched(spec, rank, (world_size, 1, 1)) as steps:
            taken = [steps.take(step) for step in (1, 2)]
        dist.barrier()
        ids = [batch.sample_ids_b for step in taken for batch in step.micro_batches]
        found.append(torch.cat(ids).tolist())
    return found


def test_the_world_works_on_after_an_end_in_the_middle(pool: Pool, spec: SourceSpec) -> None:
    for first, second in pool.run(4, end_early, spec):
        assert first == second
        assert len(first) == 2 * ROWS // 4


def sockets_of_a_group(rank: int, world_size: int, lazily: bool) -> int:
    """Sockets that this process has opened for the group of the batches after two broadcasts."""

    def count() -> int:
        files = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        return sum(str(path.readlink()).startswith("socket:") for path in files)

    before = count()
    with patch.dict(os.environ, {"TORCH_GLOO_LAZY_INIT": str(int(lazily))}):
        group = exchange_group(timeout_seconds=60.0)
    for _ in range(2):
        dist.broadcast(torch.zeros(8), group=group, group_src=0)
    dist.barrier()
    opened = count() - before
    dist.barrier()
    dist.destroy_process_group(group)
    return opened


def test_ranks_connect_with_those_they_exchange_batches_with(pool: Pool) -> None:
    # On GPUs `prepare_collectives` sets the variable: a mesh has N * (N - 1) ends, a tree 2 * N.
    mesh, tree = (sum(pool.run(4, sockets_of_a_group, lazily)) for lazily in (False, True))
    assert mesh >= 12
    assert tree <= mesh - 4

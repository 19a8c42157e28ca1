"""The loader over ranks: one reader, the same data on every layout, errors on all ranks at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from megatron_distill.data.formats import SourceSpec
from megatron_distill.data.loader import StepLoader
from megatron_distill.data.samples import FULLY_TRAINED, Sample, SampleSource
from megatron_distill.data.sources import DataOptions, open_training
from megatron_distill.errors import DataError
from megatron_distill.runtime.batch import StepBatches
from megatron_distill.runtime.collectives import together
from tests.distributed.pool import Pool
from tests.support.data_fixtures import ByteTokenizer, story, write_jsonl

LENGTH = 16
ROWS = 8
Layout = tuple[int, int, int]  # data-parallel size, context-parallel size, micro-batch size


def open_source(spec: SourceSpec, rank: int) -> SampleSource | None:
    """The training stream on rank 0; an error there is raised on every rank."""
    source: SampleSource | None = None
    with together():
        if rank == 0:
            source = open_training(
                [spec],
                tokenizer=ByteTokenizer(),
                options=DataOptions(
                    sequence_length=LENGTH, validation_fraction=0.1, shuffle_samples=4
                ),
                seed=1,
            )
    return source


def loader_for(
    source: SampleSource | None,
    rank: int,
    layout: Layout,
    *,
    prefetch: int = 2,
    group: dist.ProcessGroup | None = None,
) -> StepLoader:
    """Ranks as (tensor fastest, then context, then data), as Megatron-Core orders them."""
    data, context, micro = layout
    replicas = dist.get_world_size() // (data * context)
    return StepLoader(
        source,
        sequence_length=LENGTH,
        global_batch_size=ROWS,
        micro_batch_size=micro,
        data_parallel_rank=rank // (replicas * context),
        data_parallel_size=data,
        context_parallel_rank=rank // replicas % context,
        context_parallel_size=context,
        group=group or dist.group.WORLD,
        prefetch=prefetch,
    )


def cells_of(batches: StepBatches) -> list[tuple[int, ...]]:
    """(sample, position, token, label, CE mask, KD mask, position id, document) held by a rank."""
    found = []
    for batch in batches.micro_batches:
        documents = batch.document_ids_bS[:, batch.sequence_index_s]
        for row, sample in enumerate(batch.sample_ids_b.tolist()):
            columns = zip(
                batch.sequence_index_s.tolist(),
                batch.tokens_bs[row].tolist(),
                batch.labels_bs[row].tolist(),
                batch.ce_mask_bs[row].int().tolist(),
                batch.kd_mask_bs[row].int().tolist(),
                batch.position_ids_bs[row].tolist(),
                documents[row].tolist(),
                strict=True,
            )
            found.extend((sample, *column) for column in columns)
    return found


def take_steps(
    rank: int,
    world_size: int,
    spec: SourceSpec,
    layout: Layout,
    state: str | None,
    steps: int,
) -> tuple[list[list[tuple[int, ...]]], list[tuple[int, int, int]], list[str]]:
    """This rank's rows in each step, the counts, and the state after each step."""
    with loader_for(open_source(spec, rank), rank, layout) as loader:
        if state is not None:
            loader.load_state_dict(json.loads(state))
        cells, counts, states = [], [], []
        for step in range(steps):
            batches = loader.take(step)
            cells.append(cells_of(batches))
            counts.append((batches.ce_tokens, batches.kd_tokens, batches.positions))
            states.append(json.dumps(loader.state_dict()))
        return cells, counts, states


@pytest.fixture
def spec(tmp_path: Path) -> SourceSpec:
    path = write_jsonl(tmp_path / "corpus.jsonl", map(story, range(60)))
    return SourceSpec("jsonl", (str(path),))


LAYOUTS = [
    (1, (1, 1, 2)),
    (2, (1, 1, 2)),
    (2, (2, 1, 1)),
    (2, (2, 1, 4)),
    (2, (1, 2, 2)),
    (4, (4, 1, 2)),
    (4, (2, 2, 1)),
    (4, (2, 1, 4)),
    (4, (1, 4, 8)),
]


def test_no_layout_changes_the_steps(pool: Pool, spec: SourceSpec) -> None:
    steps = 5
    expected: list[list[tuple[int, ...]]] | None = None
    for world_size, layout in LAYOUTS:
        results = pool.run(world_size, take_steps, spec, layout, None, steps)
        assert all(counts == results[0][1] for _, counts, _ in results)
        assert all(states == results[0][2] for _, _, states in results)
        replicas = world_size // (layout[0] * layout[1])
        joined = []
        for step in range(steps):
            held = sorted(cell for cells, _, _ in results for cell in cells[step])
            assert held[::replicas] == sorted(set(held)), "ranks share rows they should not"
            joined.append(held[::replicas])
            ce_tokens, kd_tokens, positions = results[0][1][step]
            assert ce_tokens == sum(cell[4] for cell in joined[step])
            assert kd_tokens == sum(cell[5] for cell in joined[step])
            assert positions == len(joined[step]) == ROWS * LENGTH
            assert 0 < ce_tokens < positions
        expected = expected or joined
        assert joined == expected, (world_size, layout)


def test_a_position_saved_by_two_ranks_is_continued_by_four(pool: Pool, spec: SourceSpec) -> None:
    whole = pool.run(1, take_steps, spec, (1, 1, 8), None, 6)
    _, _, states = pool.run(2, take_steps, spec, (2, 1, 2), None, 3)[1]
    assert states == whole[0][2][:3]
    resumed = pool.run(4, take_steps, spec, (4, 1, 1), states[-1], 3)
    for step in range(3):
        held = sorted(cell for cells, _, _ in resumed for cell in cells[step])
        assert held == sorted(whole[0][0][3 + step])
    assert resumed[3][2] == whole[0][2][3:]


def take_until_error(
    rank: int, world_size: int, spec: SourceSpec, prefetch: int
) -> tuple[int, str]:
    """The step at which this rank saw a DataError, and its message."""
    source = open_source(spec, rank)
    with loader_for(source, rank, (world_size, 1, 1), prefetch=prefetch) as loader:
        for step in range(100):
            try:
                loader.take(step)
            except DataError as error:
                dist.barrier()  # every rank is here, and the group still works
                return step, str(error)
    raise AssertionError("no error in 100 steps")


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("prefetch", [0, 3])
def test_an_error_of_the_reader_is_raised_on_all_ranks_at_its_step(
    pool: Pool, tmp_path: Path, world_size: int, prefetch: int
) -> None:
    path = tmp_path / "k\u00f6rper.jsonl"
    lines = [json.dumps({"text": story(index)}) for index in range(300)]
    path.write_text("\n".join([*lines, '{"text": 7}']))
    results = pool.run(world_size, take_until_error, SourceSpec("jsonl", (str(path),)), prefetch)
    assert len(set(results)) == 1
    step, message = results[0]
    assert step > 2
    assert f"{path}:301: the value of 'text' is not text but a number" in message


def load_and_say(rank: int, world_size: int, spec: SourceSpec, state: str) -> str:
    with loader_for(open_source(spec, rank), rank, (1, 1, 8)) as loader:
        loader.take(0)
        try:
            loader.load_state_dict(json.loads(state))
        except DataError as error:
            dist.barrier()
            return str(error)
    raise AssertionError("no error")


def test_a_state_of_other_data_is_refused_on_all_ranks(
    pool: Pool, spec: SourceSpec, tmp_path: Path
) -> None:
    other = SourceSpec("jsonl", (str(write_jsonl(tmp_path / "other.jsonl", ["a", "b"] * 9)),))
    _, _, states = pool.run(2, take_steps, other, (1, 1, 8), None, 1)[0]
    results = pool.run(2, load_and_say, spec, states[0])
    assert results[0] == results[1]
    assert "files differs from the checkpoint" in results[0]


class Distant:
    """Sample ids beyond 32 bits."""

    def next_sample(self) -> Sample:
        tokens = np.arange(LENGTH + 1, dtype=np.int32)
        flags = np.full(LENGTH + 1, FULLY_TRAINED, np.uint8)
        return Sample(tokens, np.zeros(LENGTH + 1, np.int32), flags, 2**40 + 7)

    def state_dict(self) -> dict[str, Any]:
        return {"word": "\u00fc" * 11}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("not asked for")


def take_distant(rank: int, world_size: int) -> tuple[list[int], dict[str, Any]]:
    with loader_for(Distant() if rank == 0 else None, rank, (2, 1, 2)) as loader:
        batches = loader.take(12)
        return batches.micro_batches[0].sample_ids_b.tolist(), loader.state_dict()


def test_large_sample_ids_and_any_text_travel_unchanged(pool: Pool) -> None:
    expected = ([2**40 + 7] * 2, {"samples": ROWS, "source": {"word": "\u00fc" * 11}})
    assert pool.run(2, take_distant) == [expected, expected]

"""A blend over ranks: the same samples of the same sources in every layout, resumed anywhere."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_distill.data.formats import SourceSpec
from megatron_distill.data.loader import StepLoader
from megatron_distill.data.sources import DataOptions, held_out_samples, open_training
from megatron_distill.runtime.batch import LabelCounts
from tests.distributed.pool import Pool
from tests.support.data_fixtures import ByteTokenizer, story, write_jsonl
from tests.support.indexed_corpus import numbered, write_indexed

LENGTH = 16
OPTIONS = DataOptions(sequence_length=LENGTH, validation_fraction=0.2, shuffle_samples=4)
WEIGHTS = (0.55, 0.3, 0.15)

Row = tuple[int, int, tuple[int, ...]]  # sample, source, tokens
Step = tuple[list[Row], tuple[LabelCounts, ...], tuple[int, int]]


@pytest.fixture
def specs(tmp_path: Path) -> list[SourceSpec]:
    """Texts that name their source, and an indexed corpus of two files."""
    capitals = [f"<{index}>" + "ABCDEFGHIJ" * (1 + index % 3) for index in range(50)]
    stories = write_jsonl(tmp_path / "stories.jsonl", map(story, range(60)))
    capital = write_jsonl(tmp_path / "capitals.jsonl", capitals)
    documents = [[token % 50 + 200 for token in one] for one in numbered(30)]
    prefixes = [write_indexed(tmp_path / name, documents) for name in ("one", "two")]
    return [
        SourceSpec("jsonl", (str(stories),), weight=WEIGHTS[0]),
        SourceSpec("jsonl", (str(capital),), weight=WEIGHTS[1]),
        SourceSpec("megatron", tuple(prefixes), weight=WEIGHTS[2]),
    ]


def take_rows(
    rank: int,
    world: int,
    specs: list[SourceSpec],
    batch: tuple[int, int],  # global and micro-batch size
    state: str | None,
    steps: int,
) -> tuple[list[Step], str]:
    """The rows of this rank, and the counts of the whole batch, step by step."""
    source = None
    if rank == 0:
        source = open_training(specs, tokenizer=ByteTokenizer(), options=OPTIONS, seed=1)
    loader = StepLoader(
        source,
        sequence_length=LENGTH,
        global_batch_size=batch[0],
        micro_batch_size=batch[1],
        data_parallel_rank=rank,
        data_parallel_size=world,
        group=dist.group.WORLD,
        sources=len(specs),
    )
    found: list[Step] = []
    with loader:
        if state is not None:
            loader.load_state_dict(json.loads(state))
        for step in range(steps):
            batches = loader.take(step)
            rows: list[Row] = []
            for one in batches.micro_batches:
                tokens = map(tuple, one.tokens_bs.tolist())
                ids, sources = one.sample_ids_b.tolist(), one.sources_b.tolist()
                rows.extend(zip(ids, sources, tokens, strict=True))
            found.append((rows, batches.by_source, (batches.ce_tokens, batches.kd_tokens)))
        return found, json.dumps(loader.state_dict())


def rows_of(results: list[tuple[list[Step], str]]) -> list[Row]:
    """The rows of all ranks and steps by their sample."""
    return sorted(row for steps, _ in results for rows, _, _ in steps for row in rows)


def source_of(tokens: tuple[int, ...]) -> int:
    """The only possible source of these tokens."""
    if max(tokens) >= 200:
        return 2
    return 1 if any(ord("A") <= token - 1 <= ord("J") for token in tokens) else 0


def test_no_layout_changes_the_order_and_every_row_knows_its_source(
    pool: Pool, specs: list[SourceSpec]
) -> None:
    expected = pool.run(1, take_rows, specs, (8, 8), None, 15)
    rows = rows_of(expected)
    assert [sample for sample, _, _ in rows] == list(range(120))
    for _, source, tokens in rows:
        assert source == source_of(tokens)
    for world, batch in ((1, (8, 2)), (2, (8, 1)), (4, (8, 2)), (2, (24, 3))):
        results = pool.run(world, take_rows, specs, batch, None, 120 // batch[0])
        assert rows_of(results) == rows, (world, batch)
        assert len({state for _, state in results}) == 1
        assert results[0][1] == expected[0][1]


def test_the_counts_of_the_sources_are_those_of_the_global_batch_on_every_rank(
    pool: Pool, specs: list[SourceSpec]
) -> None:
    alone = pool.run(1, take_rows, specs, (8, 8), None, 4)[0][0]
    for steps, _ in pool.run(4, take_rows, specs, (8, 1), None, 4):
        for (_, counts, totals), (_, expected, _) in zip(steps, alone, strict=True):
            assert counts == expected
            assert sum(one.ce for one in counts) == totals[0]
            assert sum(one.kd for one in counts) == totals[1]
    for rows, counts, _ in alone:
        held = Counter(source for _, source, _ in rows)
        for source, one in enumerate(counts):
            assert (one.ce > 0) == (held[source] > 0)
            assert one.ce <= held[source] * LENGTH


@pytest.mark.parametrize("place", [1, 4])
def test_a_blend_goes_on_in_the_middle_with_other_ranks(
    pool: Pool, specs: list[SourceSpec], place: int
) -> None:
    whole = pool.run(1, take_rows, specs, (8, 4), None, 8)
    _, state = pool.run(2, take_rows, specs, (8, 1), None, place)[1]
    resumed = pool.run(4, take_rows, specs, (8, 2), state, 8 - place)
    assert rows_of(resumed) == rows_of(whole)[8 * place :]
    assert resumed[0][1] == whole[0][1]


def test_held_out_samples_are_shared_by_weight_and_know_their_source(
    specs: list[SourceSpec],
) -> None:
    held_out = held_out_samples(specs, tokenizer=ByteTokenizer(), options=OPTIONS, samples=20)
    owners = Counter(sample.source for sample in held_out.samples)
    for index, weight in enumerate(WEIGHTS):
        assert abs(owners[index] - 20 * weight) < 1
    for sample in held_out.samples:
        words = sample.tokens_S1[sample.document_ids_S1 >= 0].tolist()
        assert sample.source == source_of(tuple(words))

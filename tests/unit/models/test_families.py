"""Rows that share a beginning, and the batches they are in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from operator import add

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_distill.models.generation.batches import RowSize, batches_of, deal_rows, plan_batches
from megatron_distill.models.generation.families import deal, families_of
from megatron_distill.train.evaluation.scoring import _shared_beginning

rows_of_ids = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=7).map(tuple), max_size=9)
Rows = Sequence[tuple[int, ...]]


def _most_saved(rows: Rows, copies: int, members: Sequence[int], depth: int) -> int:
    """The largest saving among rows that share `depth` ids, by trying every division."""
    own = (len(members) - copies) * depth
    if own < 0.2 * sum(len(rows[row]) for row in members):
        own = 0
    parts = defaultdict(list)
    for row in members:
        if len(rows[row]) > depth + 1:
            parts[rows[row][depth]].append(row)
    return max(own, sum(_most_saved(rows, copies, one, depth + 1) for one in parts.values()))


@pytest.mark.parametrize(
    ("length", "limit", "is_shared"),
    [(1, 20, False), (5, 20, False), (40, 20, True), (40, 800, False)],
    ids=str,
)
def test_a_short_beginning_is_written_with_each_row(
    length: int, limit: int, is_shared: bool
) -> None:
    beginning = tuple(range(length))
    prompts = [(*beginning, 90 + row, *range(50, 60)) for row in range(4)]
    assert _shared_beginning(prompts, limit) == (beginning if is_shared else ())
    assert _shared_beginning(prompts[:1], limit) == ()


@given(rows_of_ids, st.integers(1, 3))
def test_every_row_is_in_one_family_and_no_division_saves_more(rows: Rows, copies: int) -> None:
    found = families_of(rows, copies=copies)
    assert sorted(row for one in found for row in one.rows) == list(range(len(rows)))
    for one in found:
        for row in one.rows:
            assert rows[row][: len(one.prefix)] == one.prefix
            assert len(rows[row]) > len(one.prefix)
    saved = sum((len(one.rows) - copies) * len(one.prefix) for one in found if one.prefix)
    assert saved == max(0, _most_saved(rows, copies, range(len(rows)), 0))


def test_a_short_beginning_of_long_rows_is_not_shared() -> None:
    rows = [(1, *[row] * 30) for row in range(8)]
    assert families_of(rows)[0].prefix == ()


@given(rows_of_ids, st.integers(2, 4))
def test_ranks_share_all_rows_and_whole_families(rows: Rows, ranks: int) -> None:
    found = families_of(rows)
    lengths = [len(row) for row in rows]
    dealt = deal(found, lengths, ranks)
    assert len(dealt) == ranks
    assert sorted(row for own in dealt for one in own for row in one.rows) == list(range(len(rows)))
    for own in dealt:
        assert len({one.prefix for one in own}) == len(own)


def test_subjects_stay_whole_where_each_rank_has_some_and_a_single_one_is_divided() -> None:
    rows = [(subject, 7, 7, 7, 7, question) for subject in range(12) for question in range(20)]
    found = families_of(rows)
    assert [len(one.rows) for one in found] == [20] * 12
    for own in deal(found, [1] * len(rows), 4):
        assert [len(one.rows) for one in own] == [20] * 3
    for own in deal(found[:1], [1] * len(rows), 4):
        assert [len(one.rows) for one in own] == [5]


sizes_of_rows = st.lists(
    st.builds(RowSize, st.integers(1, 9), st.integers(0, 5), st.integers(0, 30)), max_size=12
)


@given(sizes_of_rows, st.integers(1, 40), st.integers(1, 60))
def test_a_batch_of_several_rows_is_within_every_bound(
    sizes: list[RowSize], positions: int, cache_bytes: int
) -> None:
    batches = batches_of(
        sizes,
        range(len(sizes)),
        row_bytes=add,
        cache_bytes=cache_bytes,
        positions=positions,
    )
    assert [row for batch in batches for row in batch] == list(range(len(sizes)))
    for batch in batches:
        if len(batch) > 1:
            own = [sizes[row] for row in batch]
            assert sum(size.given for size in own) <= positions
            assert sum(size.continued for size in own) <= positions
            capacity = max(size.given for size in own) + max(size.added for size in own)
            assert len(own) * capacity <= cache_bytes


def test_ranks_in_step_bound_the_positions_of_copies_too() -> None:
    sizes = [RowSize(2, 5, 20) for _ in range(4)]
    plan = plan_batches(
        sizes,
        rank=0,
        ranks=1,
        groups=1,
        in_step=True,
        row_bytes=lambda *_: 0,
        cache_bytes=0,
        positions=40,
    )
    assert [batch[0] for batch in plan.mine] == [[0, 1], [2, 3]]


@pytest.mark.parametrize(("copies", "others"), [(500, 32), (8, 256), (64, 0), (3, 0)], ids=str)
def test_groups_of_rows_are_alike_however_often_a_prompt_is_there(copies: int, others: int) -> None:
    parts = 8
    sizes = [RowSize(9, 4, kind=0)] * copies + [RowSize(9, 4, kind=1 + n) for n in range(others)]
    rows = range(len(sizes))
    found = deal_rows(rows, sizes, parts)
    assert sorted(row for group in found for row in group) == list(rows)
    counts = [len(group) for group in found]
    assert max(counts) - min(counts) <= max(1, len(sizes) // (4 * parts))

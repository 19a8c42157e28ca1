"""Batches of rows: the bounds on the positions of a pass and on the memory of caches."""

from __future__ import annotations

from operator import add

from hypothesis import given
from hypothesis import strategies as st

from megatron_distill.models.generation.batches import RowSize, batches_of, plan_batches

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

"""Layers of the stages: none lost, none empty; no other table has a cheaper costliest stage."""

from __future__ import annotations

from itertools import combinations

import pytest

from megatron_distill.models.pipeline_stages import balanced_layers, even_layers, ranks_of_layers


def tables(layers: int, stages: int) -> list[tuple[int, ...]]:
    """Every way to cut layers into stages of one or more."""
    found = []
    for cuts in combinations(range(1, layers), stages - 1):
        edges = (0, *cuts, layers)
        found.append(tuple(stop - start for start, stop in zip(edges, edges[1:], strict=False)))
    return found


def cost(table: tuple[int, ...], heads: float) -> float:
    return max(*table[:-1], table[-1] + heads)


@pytest.mark.parametrize(("layers", "stages"), [(4, 2), (5, 2), (4, 4), (9, 3), (12, 4), (11, 5)])
def test_no_table_has_a_cheaper_costliest_stage(layers: int, stages: int) -> None:
    every = tables(layers, stages)
    for heads in (0.0, 0.4, 1.0, 1.7, 4.0, 30.0):
        found = balanced_layers(layers, stages, heads=heads)
        assert found in every
        assert cost(found, heads) == min(cost(table, heads) for table in every), heads
        # Of two tables that cost the same, the one with more layers on the last stage.
        same = [table for table in every if cost(table, heads) == cost(found, heads)]
        assert found[-1] >= max(table[-1] for table in same if table[-1] <= layers // stages)


def test_heads_without_work_leave_the_layers_even() -> None:
    for layers, stages in ((4, 1), (32, 4), (7, 3)):
        assert balanced_layers(layers, stages, heads=0.0) == even_layers(layers, stages)
    assert even_layers(7, 3) == (3, 2, 2)
    # 32 layers of 1.3 GF and heads of 5.3 GF per token, as of an 8B student of a 70B teacher.
    assert balanced_layers(32, 4, heads=5.3 / 1.3) == (9, 9, 9, 5)
    assert balanced_layers(32, 8, heads=5.3 / 1.3) == (5, 5, 5, 4, 4, 4, 4, 1)


def test_chunks_of_a_rank_are_a_round_apart() -> None:
    assert ranks_of_layers((2, 1, 1, 3), 2) == (0, 0, 1, 0, 1, 1, 1)
    assert ranks_of_layers((1, 3), 2) == (0, 1, 1, 1)

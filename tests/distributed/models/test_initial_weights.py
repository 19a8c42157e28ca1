"""Random weights are drawn where they are needed, and are the same bits in every layout."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.distributed.megatron_world import build, megatron_groups, small_architecture
from tests.distributed.pool import Pool

SIZES = {"hidden_size": 512, "ffn_hidden_size": 512, "head_size": 128, "num_layers": 2}
SHAPE = {**SIZES, "vocab_size": 2500, "init_std": 0.5}


def _windows(rank: int, world: int) -> bool:
    from megatron_distill.models.weights import _fill_random

    whole = torch.empty(700, 600)
    _fill_random(whole, "7/w/0", 0, 0, std=2.0, end=None)
    parts = ((0, 0, 700, 600), (3, 5, 250, 251), (255, 256, 2, 300), (512, 511, 100, 89))
    for row, column, rows, columns in parts:
        part = torch.empty(rows, columns)
        _fill_random(part, "7/w/0", row, column, std=2.0, end=690)
        expected = whole[row : row + rows, column : column + columns].clone()
        expected[max(690 - row, 0) :] = 0.0
        assert torch.equal(part, expected)
    other = torch.empty(700, 600)
    _fill_random(other, "8/w/0", 0, 0, std=2.0, end=None)
    tiles = [whole[:256, :256], whole[256:512, :256], whole[:256, 256:512], other[:256, :256]]
    assert len({tile.sum().item() for tile in tiles}) == len(tiles)
    return abs(whole.mean().item()) < 0.02 and abs(whole.std().item() - 2.0) < 0.02


def test_a_window_holds_the_same_numbers_wherever_it_is_cut(pool: Pool) -> None:
    assert pool.run(1, _windows) == [True]


Parts = dict[tuple[str, tuple[int, ...]], torch.Tensor]


def _drawn(
    rank: int, world: int, layout: dict[str, Any], changes: dict[str, Any], seed: int = 3
) -> tuple[int, int, Parts]:
    """Numbers drawn by this rank, numbers that it holds, and its tensors by name and place."""
    drawn = 0
    randn = torch.randn

    def counted(*shape: int, **named: Any) -> torch.Tensor:
        nonlocal drawn
        found = randn(*shape, **named)
        drawn += found.numel()
        return found

    with megatron_groups(**layout) as groups, patch.object(torch, "randn", counted):
        from megatron_distill.models.weights import sharded_tensors

        chunks = build(small_architecture(**SHAPE, **changes), groups, seed=seed)
        held = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
        parts = {
            (part.key, part.global_offset): part.data.detach().clone()
            for part in sharded_tensors(chunks, groups)
        }
        return drawn, held, parts


MOE = {"moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 256}}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "TP2xPP2": (4, {"tensor": 2, "pipeline": 2}, {}),
    "experts EP2xPP2": (4, {"expert": 2, "pipeline": 2}, MOE),
    "experts TP2xEP2": (4, {"tensor": 2, "sequence": True, "expert": 2}, MOE),
}


@pytest.mark.parametrize("case", CASES)
def test_no_rank_draws_weights_that_others_hold(pool: Pool, case: str) -> None:
    world, layout, changes = CASES[case]
    ((_, _, whole),) = pool.run(1, _drawn, {}, changes)
    for drawn, held, parts in pool.run(world, _drawn, layout, changes):
        assert drawn < 1.25 * held  # tiles at the end of the vocabulary are cut
        for (key, offset), part in parts.items():
            assert torch.equal(part, _window(whole, key, offset, part)), (key, offset)


def test_another_seed_draws_other_weights(pool: Pool) -> None:
    (one, other) = (pool.run(1, _drawn, {}, {}, seed)[0][2] for seed in (3, 4))
    drawn = [place for place, tensor in one.items() if tensor.std() > 0]
    assert len(drawn) > 8
    assert not any(torch.equal(one[place], other[place]) for place in drawn)
    # No two tensors of one model are drawn from one stream either.
    assert len({tuple(one[place].flatten()[:4].tolist()) for place in drawn}) == len(drawn)


def _window(whole: Parts, key: str, offset: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """The same window of the single rank's tensors, zero in rows that it does not have."""
    layers = len(offset) - like.dim()
    found = torch.zeros_like(like)
    for (name, start), part in whole.items():
        if name != key or start[:layers] != offset[:layers]:
            continue
        first, begin = offset[layers], start[layers]  # both halves of a gated matrix have rows
        stop = min(first + like.shape[0], begin + part.shape[0])
        rows = part[max(first, begin) - begin : max(stop - begin, 0)]
        if like.dim() == 2:
            rows = rows[:, offset[-1] : offset[-1] + like.shape[1]]
        if rows.numel():
            found[max(first, begin) - first :][: rows.shape[0]] = rows
    return found

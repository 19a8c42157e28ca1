"""Comparisons of two models on vocabulary shards against float64 NumPy.

Of two ranks, whose last shard has padding, and of four, whose last shard is padding alone.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_distill.losses.comparison import compare_with_ids, compare_with_logits
from megatron_distill.ops import VocabShard, vocab_parallel_topk
from megatron_distill.signals import DenseLogits
from tests.distributed.pool import Pool
from tests.unit.losses.test_comparison import _SIZE, _TOKENS, _logits, _reference, _softmax

PADDED = {1: 28, 2: 28, 4: 32}
TOP = 5


def _compared(rank: int, world: int) -> dict[str, torch.Tensor]:
    """The figures of a rank, from its columns of both models; padding has the largest logits."""
    padded = PADDED[world]
    shard = VocabShard.for_rank(_SIZE, padded, rank, world)
    student, teacher = (
        torch.nn.functional.pad(_logits(seed), (0, padded - _SIZE), value=50.0)[
            :, shard.start : shard.stop
        ]
        for seed in (1, 2)
    )
    labels, rows = torch.arange(_TOKENS) * 3, torch.tensor([0, 1, 3, 6])
    group = dist.group.WORLD
    split = {"shard": shard, "group": group}
    whole = compare_with_logits(
        DenseLogits(student), DenseLogits(teacher), labels, rows, chunk_tokens=3, **split
    )
    stored = vocab_parallel_topk(teacher, TOP, **split)
    few = compare_with_ids(DenseLogits(student), stored, labels, rows, **split)
    found = {name: value for name, value in vars(whole).items() if value is not None}
    assert few.overlap is not None
    assert few.overlap_most is not None
    return {**found, "stored_overlap": few.overlap, "stored_overlap_most": few.overlap_most}


@pytest.mark.parametrize("world", [2, 4])
def test_figures_of_shards_are_those_of_the_whole_softmaxes(pool: Pool, world: int) -> None:
    """Divergences both ways, entropies, Brier score, tops and acceptance, on every rank."""
    rows, labels = [0, 1, 3, 6], np.array([0, 1, 3, 6]) * 3
    q, p = _softmax(_logits(1))[rows], _softmax(_logits(2))[rows]
    wanted = _reference(q, p, labels)
    for found in pool.run(world, _compared):
        for name, value in wanted.items():
            np.testing.assert_allclose(found[name], value, atol=1e-6, rtol=0, err_msg=name)
        total_variation = np.abs(p - q).sum(1) / 2
        np.testing.assert_allclose(found["overlap"], 1 - total_variation, atol=1e-6, rtol=0)
        # Of a store's few ids, an interval that has the whole value.
        assert (found["stored_overlap"].numpy() <= wanted["overlap"] + 1e-6).all()
        assert (found["stored_overlap_most"].numpy() >= wanted["overlap"] - 1e-6).all()
        assert (found["stored_overlap"] < found["stored_overlap_most"]).any()

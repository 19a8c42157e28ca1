"""Scores of ids against a float64 log-softmax: ids of a row, ties, padding, chunks and shards."""

import pytest
import torch
import torch.distributed as dist

from megatron_distill.ops import VocabShard
from megatron_distill.ops.target_scores import TargetScores, target_scores
from megatron_distill.signals import HiddenState
from tests.distributed.pool import Pool


def _state(rows: int, *, softcap: float | None = None, dtype=torch.float32) -> HiddenState:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(rows, 8, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(24, 8, generator=generator, dtype=torch.float64).to(dtype)
    weight[21:] = 50.0  # padding that would take all the probability
    return HiddenState(hidden, weight, logit_softcap=softcap, logit_scale=0.5)


@pytest.mark.parametrize(
    ("softcap", "chunk_tokens"), [(None, 1), (2.0, 2), (None, 100), (2.0, 100)]
)
def test_scores_are_those_of_the_real_columns(softcap: float | None, chunk_tokens: int) -> None:
    state = _state(5, softcap=softcap)
    rows, ids = [0, 0, 1, 3, 4, 4], torch.tensor([3, 20, 0, 7, 7, 23])
    found = target_scores(
        state, VocabShard(21, 0, 24), None, rows=rows, ids=ids, chunk_tokens=chunk_tokens
    )
    logits = 0.5 * state.hidden.double() @ state.weight[:21].double().T
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    expected = logits.log_softmax(1)[rows[:5], ids[:5]]
    torch.testing.assert_close(found.log_prob[:5], expected, rtol=0, atol=1e-5)
    assert found.log_prob[5] == -torch.inf, "a padded column has no probability"
    assert found.is_greedy.tolist() == [*(logits.argmax(1)[rows[:5]] == ids[:5]).tolist(), False]


def test_the_lowest_of_equal_ids_is_greedy() -> None:
    weight = torch.zeros(6, 2)
    weight[[2, 4]] = 1.0
    state = HiddenState(torch.ones(1, 2), weight)
    ids = torch.tensor([2, 4])
    found = target_scores(state, VocabShard(6, 0, 6), None, rows=[0, 0], ids=ids)
    assert found.log_prob[0] == found.log_prob[1]
    assert found.is_greedy.tolist() == [True, False]


# Row 0 has equal logits at 2 and 5, row 1 at 5 and 6, and row 2 the largest at 1; 7 is padding.
ROWS = [0, 0, 1, 1, 2, 2]
IDS = torch.tensor([2, 5, 5, 6, 1, 7])


def _between_shards(rank: int, world: int) -> TargetScores:
    """Rows whose likeliest ids are on both ranks, on the second one, and beside padding."""
    weight = torch.zeros(8, 3)
    weight[[2, 5], 0] = weight[[5, 6], 1] = weight[1, 2] = 1.0
    weight[7] = 9.0
    width = len(weight) // world
    shard = VocabShard(7, rank * width, (rank + 1) * width)
    state = HiddenState(torch.eye(3), weight[shard.start : shard.stop])
    return target_scores(state, shard, dist.group.WORLD, rows=ROWS, ids=IDS)


def test_the_lowest_of_equal_ids_on_two_shards_is_greedy(pool: Pool) -> None:
    (alone,) = pool.run(1, _between_shards)
    assert alone.log_prob[0] == alone.log_prob[1]
    for found in pool.run(2, _between_shards):
        assert found.is_greedy.tolist() == [True, False, True, False, True, False]
        torch.testing.assert_close(found.log_prob, alone.log_prob, rtol=0, atol=1e-6)
        assert found.log_prob[0] == found.log_prob[1], "ids of two ranks"
        assert found.log_prob[5] == -torch.inf, "padding"


def test_no_row_and_a_row_that_is_not_finite() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    empty = HiddenState(torch.zeros(0, 2), torch.ones(4, 2))
    found = target_scores(empty, VocabShard(4, 0, 4), None, rows=[], ids=nothing)
    assert found.log_prob.shape == (0,)
    broken = HiddenState(torch.full((1, 2), torch.nan), torch.ones(4, 2))
    one = torch.zeros(1, dtype=torch.int64)
    found = target_scores(broken, VocabShard(4, 0, 4), None, rows=[0], ids=one)
    assert found.log_prob.isnan().all()
    assert not found.is_greedy.any()

"""Statistics of logits on shards: merges, log-softmax, scores of targets."""

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_distill.ops import VocabShard, vocab_parallel_log_softmax
from megatron_distill.ops.chunk import Chunk
from megatron_distill.ops.divergences import WeightedDivergence, divergence_named
from megatron_distill.ops.normalizers import Normalizers
from megatron_distill.ops.row_math import row_sums, row_top
from megatron_distill.ops.statistics import GlobalStatistics, LocalStatistics, StatisticsSpec
from megatron_distill.ops.target_scores import TargetScores, target_scores
from megatron_distill.ops.workspace import Scratch
from megatron_distill.signals import HiddenState, LogitRule
from tests.distributed.pool import Pool
from tests.reference.distillation import cross_entropy, entropy, forward_kl

KL = divergence_named("forward_kl")
CPU = torch.device("cpu")


def split_statistics(
    student: Tensor, teacher: Tensor, labels: Tensor, bounds: Sequence[int], temperature: float
) -> tuple[GlobalStatistics, list[LocalStatistics]]:
    """Statistics of column ranges, merged as an all-gather of their packets would be."""
    spec = StatisticsSpec(
        ("student", "teacher"), (WeightedDivergence(KL, temperature, 1.0),), full=True
    )
    parts = []
    for start, stop in zip(bounds, bounds[1:], strict=False):
        shard = VocabShard(student.shape[1], start, stop)
        columns = slice(start, start + shard.real_width)
        chunk = Chunk(
            spec,
            {"student": student[:, columns], "teacher": teacher[:, columns]},
            {"student": LogitRule(), "teacher": LogitRule()},
            shard,
            Scratch(len(student), shard.real_width, student.dtype, CPU),
            labels,
        )
        local = LocalStatistics.empty(spec, len(student), student.dtype, CPU)
        chunk.measure(local)
        parts.append(local)
    return GlobalStatistics(spec, torch.stack([p.values for p in parts])), parts


@settings(max_examples=20, deadline=None)
@given(data=st.data(), temperature=st.sampled_from([0.5, 1.0, 2.0, 4.0]))
def test_merge_of_any_split_equals_the_whole(data: st.DataObject, temperature: float) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    tokens, vocab = 5, data.draw(st.integers(1, 300))
    inner = data.draw(st.lists(st.integers(0, vocab + 20), max_size=3))
    bounds = sorted([0, *inner, vocab + 20])
    student, teacher = torch.randn(2, tokens, vocab, generator=generator) * 3
    labels = torch.randint(vocab, (tokens,), generator=generator)
    merged, parts = split_statistics(student, teacher, labels, bounds, temperature)
    pairs = [
        (merged.forward_kl(temperature), forward_kl(student, teacher, temperature)),
        (merged.cross_entropy("student"), cross_entropy(student, labels)),
        (merged.cross_entropy("teacher"), cross_entropy(teacher, labels)),
        (merged.entropy("student"), entropy(student)),
        (merged.entropy("teacher"), entropy(teacher)),
        (merged.agreement(), (student.argmax(1) == teacher.argmax(1)).double()),
    ]
    for ours, oracle in pairs:
        torch.testing.assert_close(ours, oracle, rtol=2e-6, atol=2e-6)
    mass = sum(
        Normalizers.of(local, merged).factors[local.spec.softmaxes.index(("teacher", temperature))]
        * local.rows[f"teacher_mass@{temperature}"]
        for local in parts
    )
    torch.testing.assert_close(mass, torch.ones_like(mass), rtol=1e-7, atol=0)


def test_divergence_does_not_suffer_from_large_common_offsets() -> None:
    student, teacher = torch.randn(2, 4, 500, generator=torch.Generator().manual_seed(1))
    offset = torch.tensor([[0.0], [64.0], [-1024.0], [4096.0]])
    student, teacher = student + offset, teacher + offset
    merged, _ = split_statistics(
        student, teacher, torch.zeros(4, dtype=torch.long), [0, 100, 500], 1.0
    )
    torch.testing.assert_close(
        merged.forward_kl(1.0),
        forward_kl(student, teacher),
        rtol=1e-6,
        atol=0,
    )


@pytest.mark.parametrize(
    ("vocab", "values"), [(1, 2), (127, 10**6), (128, 2), (129, 2), (129, 10**6), (1000, 2)]
)
def test_top_is_the_lowest_column_of_the_largest_value(vocab: int, values: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randint(values, (50, vocab), generator=generator).float()
    value, column = row_top(logits)
    lowest = [row.tolist().index(row.max().item()) for row in logits]
    assert torch.equal(value, logits.amax(1))
    assert column.tolist() == lowest


@pytest.mark.parametrize(
    ("columns", "dtype"),
    [
        *((columns, torch.float32) for columns in (0, 1, 255, 256, 5000, 151_936)),
        (5000, torch.float64),
    ],
)
def test_sums_lose_less_than_their_last_rounding_in_fp32(columns: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(columns)
    values = torch.rand(7, columns + 3, generator=generator).to(dtype)[:, :columns]
    expected = values.double().sum(1)
    found = row_sums(values)
    assert found.dtype == torch.float64
    assert bool(((found - expected).abs() <= 2e-8 * expected).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_value_and_gradient_equal_torch_on_the_real_columns(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = (torch.randn(6, 40, generator=generator, dtype=torch.float64) * 4).to(dtype)
    logits[:, 33:] = 1e4  # padding that would take all the probability
    before = logits.clone()
    upstream = torch.randn(6, 40, generator=generator, dtype=torch.float64)
    leaf = logits.requires_grad_()
    ours = vocab_parallel_log_softmax(leaf, VocabShard(33, 0, 40))
    assert ours.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    oracle_leaf = before[:, :33].double().requires_grad_()
    oracle = oracle_leaf.log_softmax(1)
    torch.testing.assert_close(ours[:, :33].double(), oracle, rtol=1e-6, atol=1e-6)
    assert (ours[:, 33:] == -torch.inf).all()
    (gradient,) = torch.autograd.grad(ours, leaf, upstream.to(ours.dtype))
    (expected,) = torch.autograd.grad(oracle, oracle_leaf, upstream[:, :33])
    tolerance = 2**-7 if dtype is torch.bfloat16 else 1e-6
    torch.testing.assert_close(gradient[:, :33].double(), expected, rtol=tolerance, atol=tolerance)
    assert not gradient[:, 33:].any()
    assert torch.equal(leaf.detach(), before)


def test_no_tokens_and_wrong_width() -> None:
    assert vocab_parallel_log_softmax(torch.zeros(0, 4), VocabShard(3, 0, 4)).shape == (0, 4)
    with pytest.raises(ValueError, match="the shard has 5 columns"):
        vocab_parallel_log_softmax(torch.zeros(2, 4), VocabShard(5, 0, 5))


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

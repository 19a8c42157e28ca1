"""Every divergence on every support, on vocabulary shards: values and gradients of the whole, the
same bits on every rank, the collectives that are promised; and the choice of a top-k."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.losses import token_divergence
from megatron_distill.ops import (
    VocabShard,
    vocab_parallel_gather,
    vocab_parallel_log_softmax,
    vocab_parallel_topk,
)
from megatron_distill.signals import DenseLogits, Sampled, TopK
from tests.distributed.pool import Pool
from tests.reference import divergences as oracles
from tests.reference.distillation import GRADIENT_TOLERANCE, VALUE_TOLERANCE, row_error
from tests.reference.logits import logit_pair, neighbours
from tests.reference.tracing import Trace
from tests.support.divergence_runs import expected, solved

WORLDS = [1, 2, 4]
TEMPERATURES = [0.5, 1.0, 2.0, 4.0]
SUPPORTS = ["dense", "tail", "renormalized", "raw"]
# A raw sum has terms of both signs, and may be anything, zero included.
LEAST = {"dense": 0.0, "tail": 0.0, "renormalized": 0.0, "raw": 1.0}
# Real and padded sizes: the last shard of four is partly padding; wholly.
SIZES = [(203, 224), (129, 256)]
KEPT = 9

ALL = slice(None)

Case = tuple[str, str, float]
CASES: list[Case] = [
    (name, support, temperature)
    for name in oracles.ORACLES
    for support in SUPPORTS
    for temperature in TEMPERATURES
]


def signal_of(support: str, teacher: Tensor, columns: slice, temperature: float) -> Any:
    if support == "dense":
        return DenseLogits(padded(teacher, columns))
    ids, log_probs, log_tail = oracles.topk(teacher, KEPT, temperature)
    return TopK(ids, log_probs.float(), log_tail.float())


def padded(whole: Tensor, columns: slice) -> Tensor:
    """The columns of a shard; those past the vocabulary are NaN."""
    extra = torch.full((len(whole), 300), torch.nan, dtype=whole.dtype)
    return torch.cat([whole, extra], 1)[:, columns]


def all_cases(
    rank: int, world: int, sizes: tuple[int, int], dtype: torch.dtype, cases: list[Case]
) -> list[tuple[Tensor, Tensor, list[str], list[str]]]:
    shard = VocabShard.for_rank(*sizes, rank, world)
    columns = slice(shard.start, shard.stop)
    student, teacher = logit_pair(6, sizes[0], 7, dtype)
    upstream = torch.linspace(0.1, 1.0, 6)
    answers = []
    for name, support, temperature in cases:
        leaf = padded(student, columns).requires_grad_()
        signal = signal_of(support, teacher, columns, temperature)
        with Trace() as forward:
            value = token_divergence(
                leaf,
                signal,
                divergence=name,
                temperature=temperature,
                support="tail" if support == "dense" else support,  # type: ignore[arg-type]
                shard=shard,
                group=dist.group.WORLD,
            )
        with Trace() as backward:
            value.backward(upstream)
        assert leaf.grad is not None
        answers.append((value.detach(), leaf.grad, forward.collectives, backward.collectives))
    return answers


def expected_of(case: Case, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    name, support, temperature = case
    is_dense = support == "dense"
    signal = DenseLogits(teacher) if is_dense else signal_of(support, teacher, ALL, temperature)
    upstream, given = torch.linspace(0.1, 1.0, len(student)), {"temperature": temperature}
    return expected(student, signal, upstream, divergence=name, support=support, **given)


def promised(case: Case, world: int) -> int:
    """All-gathers of one call, as documented in the docstrings."""
    name, support, _ = case
    if world == 1:
        return 0
    if support != "dense" or name == "forward_kl":
        return 1
    return 8 if name == "adaptive_kl" else 2


# Every number of ranks in both dtypes; the sizes by turns, so that four ranks have both.
QUICK = (2, torch.float32, SIZES[0])
RUNS = [
    (1, torch.float32, SIZES[0]), (1, torch.bfloat16, SIZES[1]), QUICK,
    (2, torch.bfloat16, SIZES[1]), (4, torch.float32, SIZES[1]), (4, torch.bfloat16, SIZES[0]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("world", "dtype", "sizes"),
    [pytest.param(*one, marks=() if one == QUICK else pytest.mark.slow) for one in RUNS],
)
def test_defect_17_tensor_parallel_1_2_4_equals_dense_for_each_divergence_and_support(
    pool: Pool, world: int, dtype: torch.dtype, sizes: tuple[int, int]
) -> None:
    # Two temperatures are enough for each run of the fast tests.
    cases = CASES[::2] if (world, dtype, sizes) == QUICK else CASES
    ranks = pool.run(world, all_cases, sizes, dtype, cases)
    student, teacher = logit_pair(6, sizes[0], 7, dtype)
    for number, case in enumerate(cases):
        answers = [rank[number] for rank in ranks]
        value, gradient = expected_of(case, student, teacher)
        for answer in answers:
            assert torch.equal(answer[0], answers[0][0]), case
            assert len(answer[2]) == promised(case, world), (case, answer[2])
            assert not answer[3], case
        found = torch.cat([answer[1] for answer in answers], 1)
        assert not found[:, sizes[0] :].any(), case
        error = (answers[0][0] - value).abs() / value.abs().clamp(min=LEAST[case[1]])
        assert float(error.max()) < VALUE_TOLERANCE[dtype], (case, float(error.max()))
        error_of_gradient = row_error(found[:, : sizes[0]], gradient)
        assert error_of_gradient < GRADIENT_TOLERANCE[dtype], (case, error_of_gradient)


def near_cases(rank: int, world: int, noise: float) -> list[tuple[Tensor, Tensor]]:
    shard = VocabShard.for_rank(203, 224, rank, world)
    columns = slice(shard.start, shard.stop)
    student, teacher = neighbours(9, 203, noise)
    student[::3] = student[::3].flip(1)
    own, signal = padded(student, columns), DenseLogits(padded(teacher, columns))
    upstream, given = torch.linspace(0.1, 1.0, 9), {"shard": shard, "group": dist.group.WORLD}
    return [solved(own, signal, upstream, divergence=name, **given) for name in oracles.ORACLES]


# On one rank: tests/unit/losses/test_precision.py.
@pytest.mark.parametrize(("world", "noise"), [(2, 0.1), (4, 0.001)])
def test_a_student_near_its_teacher_in_some_tokens(pool: Pool, world: int, noise: float) -> None:
    ranks = pool.run(world, near_cases, noise)
    student, teacher = neighbours(9, 203, noise)
    student[::3] = student[::3].flip(1)
    for number, name in enumerate(oracles.ORACLES):
        answers = [rank[number] for rank in ranks]
        value, gradient = expected_of((name, "dense", 1.0), student, teacher)
        assert all(torch.equal(answer[0], answers[0][0]) for answer in answers), name
        found = torch.cat([answer[1] for answer in answers], 1)[:, :203]
        assert float(((answers[0][0] - value).abs() / value).max()) < 1e-6, name
        assert row_error(found, gradient) < 1e-6, name


def sampled_on_shard(rank: int, world: int) -> tuple[Tensor, Tensor]:
    shard = VocabShard.for_rank(203, 224, rank, world)
    columns = slice(shard.start, shard.stop)
    student, teacher = logit_pair(6, 203, 7, torch.float32)
    generator = torch.Generator().manual_seed(2)
    ids = torch.multinomial(teacher.softmax(1), 30, replacement=True, generator=generator)
    given = {"divergence": "forward_kl", "shard": shard, "group": dist.group.WORLD}
    signal = Sampled(ids, torch.ones_like(ids))
    return solved(padded(student, columns), signal, torch.ones(6), **given)


@pytest.mark.parametrize("world", WORLDS)
def test_sampled_ids_on_shards(pool: Pool, world: int) -> None:
    answers = pool.run(world, sampled_on_shard)
    student, teacher = logit_pair(6, 203, 7, torch.float32)
    generator = torch.Generator().manual_seed(2)
    ids = torch.multinomial(teacher.softmax(1), 30, replacement=True, generator=generator)
    weights = torch.zeros(6, 203).scatter_add_(1, ids, torch.ones(6, 30)).double() / 30
    leaf = student.double().requires_grad_()
    value = -(weights * leaf.log_softmax(1)).sum(1)
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    found = torch.cat([answer[1] for answer in answers], 1)[:, :203]
    torch.testing.assert_close(answers[0][0].double(), value.detach(), rtol=1e-6, atol=0)
    assert row_error(found, gradient) < 1e-6


def chosen_on_shard(
    rank: int, world: int, sizes: tuple[int, int], dtype: torch.dtype, k: int
) -> tuple[Any, Tensor, list[str]]:
    shard = VocabShard.for_rank(*sizes, rank, world)
    _, teacher = logit_pair(6, sizes[0], 7, dtype)
    local = padded(teacher, slice(shard.start, shard.stop))
    with Trace() as trace:
        kept = vocab_parallel_topk(local, k, shard, dist.group.WORLD)
    there = vocab_parallel_gather(local, kept.ids, shard, dist.group.WORLD)
    return kept, there, trace.collectives


@pytest.mark.parametrize(
    ("dtype", "sizes", "k"),
    [
        (torch.float32, SIZES[0], 1), (torch.float32, SIZES[1], 120),
        (torch.bfloat16, SIZES[0], 120), (torch.bfloat16, SIZES[1], 9),
    ],
)  # fmt: skip
def test_a_top_k_is_the_same_for_every_split(
    pool: Pool, dtype: torch.dtype, sizes: tuple[int, int], k: int
) -> None:
    _, teacher = logit_pair(6, sizes[0], 7, dtype)
    ids, log_probs, log_tail = oracles.topk(teacher, k, 1.0)
    assert dtype is torch.float32 or any(len(row.unique()) < sizes[0] for row in teacher)
    for world in WORLDS:
        for kept, there, collectives in pool.run(world, chosen_on_shard, sizes, dtype, k):
            assert torch.equal(kept.ids, ids)
            assert torch.equal(there, teacher.float().gather(1, ids))
            torch.testing.assert_close(kept.log_probs.double(), log_probs, rtol=2e-7, atol=1e-6)
            torch.testing.assert_close(kept.log_tail.double(), log_tail, rtol=2e-6, atol=1e-6)
            assert len(collectives) == (0 if world == 1 else 1)


def two_columns_each(rank: int, world: int) -> tuple[Tensor, Any, Any]:
    logits = torch.tensor([[2.0, 1.0, 0.0, 3.0]])[:, 2 * rank : 2 * rank + 2]
    shard = VocabShard(4, 2 * rank, 2 * rank + 2)
    group = dist.group.WORLD
    log_probs = vocab_parallel_log_softmax(logits, shard, group)
    # The rank's own candidates: without a group, the best of its columns and no other.
    return (
        log_probs,
        vocab_parallel_topk(logits, 2, shard, group),
        vocab_parallel_topk(logits, 2, shard, None),
    )


def test_log_softmax_and_top_k_of_four_tokens_by_hand(pool: Pool) -> None:
    """[2, 1 | 0, 3]: ln Z is 3.440190, and the two best tokens are on different ranks."""
    expected = [-1.440190, -2.440190, -3.440190, -0.440190]
    answers = pool.run(2, two_columns_each)
    assert torch.cat([one for one, _, _ in answers], 1)[0].tolist() == pytest.approx(
        expected, abs=1e-6
    )
    # Sums of exp(z - 3) over the columns of each rank: ln Z is 3 + ln(0.503215 + 1.049787).
    sums = [float(one.exp().sum()) * math.exp(0.440190) for one, _, _ in answers]
    assert sums == pytest.approx([0.503215, 1.049787], abs=2e-6)
    assert [own.ids.tolist() for _, _, own in answers] == [[[0, 1]], [[3, 2]]]
    for _, kept, _ in answers:
        assert kept.ids.tolist() == [[3, 0]]
        assert kept.log_probs[0].tolist() == pytest.approx([-0.440190, -1.440190], abs=1e-6)


def few_ids(teacher: Tensor, ids: str) -> TopK:
    """More ids than a shard of four has columns, or none but those of the first."""
    if ids == "many":
        kept = oracles.topk(teacher, KEPT, 1.0)
    else:
        log_p = teacher.double().log_softmax(1)
        kept = (
            torch.tensor([[0, 3, 5]] * 6),
            log_p[:, [0, 3, 5]],
            log_p[:, [*range(1, 3), 4, *range(6, 20)]].logsumexp(1),
        )
    return TopK(kept[0], kept[1].float(), kept[2].float())


def few_columns(rank: int, world: int, ids: str) -> list[tuple[Tensor, Tensor]]:
    shard = VocabShard.for_rank(20, 24, rank, world)
    assert shard.width < KEPT
    student, teacher = logit_pair(6, 20, 7)
    own, signal = padded(student, slice(shard.start, shard.stop)), few_ids(teacher, ids)
    upstream, given = torch.linspace(0.1, 1.0, 6), {"shard": shard, "group": dist.group.WORLD}
    return [
        solved(own, signal, upstream, divergence=name, support=support, **given)
        for name, support in ON_IDS
    ]


ON_IDS = [(name, support) for name in oracles.ORACLES for support in SUPPORTS[1:]]


@pytest.mark.parametrize("ids", ["many", "first shard's"])
def test_defect_15_more_ids_than_a_shard_has_columns_or_none(pool: Pool, ids: str) -> None:
    ranks = pool.run(4, few_columns, ids)
    student, teacher = logit_pair(6, 20, 7)
    kept = few_ids(teacher, ids)
    upstream = torch.linspace(0.1, 1.0, len(student))
    for number, (name, support) in enumerate(ON_IDS):
        value, gradient = expected(student, kept, upstream, divergence=name, support=support)
        answers = [rank[number] for rank in ranks]
        error = (answers[0][0] - value).abs() / value.abs().clamp(min=LEAST[support])
        assert float(error.max()) < 1e-6, (name, support)
        found = torch.cat([answer[1] for answer in answers], 1)
        assert row_error(found[:, :20], gradient) < 1e-6, (name, support)
        assert not found[:, 20:].any()

"""Losses on chunk means on vocabulary shards equal the float64 oracle for every number of ranks:
two vocabularies with sizes and padding of their own, per chunk and from hidden states."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.losses import (
    AlignedSide,
    ChunkTerm,
    SharedVocabularies,
    cross_tokenizer_divergence,
)
from megatron_distill.losses.cross_tokenizer import _projected
from megatron_distill.ops import VocabShard
from megatron_distill.ops.aligned.executor import (
    AlignedLinear,
    AlignedRows,
    WeightedTerm,
    aligned_linear,
)
from megatron_distill.ops.aligned.plan import TilePlan
from megatron_distill.signals import DenseLogits, HiddenState
from tests.distributed.pool import Pool
from tests.reference.cross_tokenizer import AlignedProblem
from tests.reference.distillation import row_error
from tests.support.aligned_losses import PADDED, SIZES, WORLDS, padded, shards_for
from tests.unit.losses.test_chunk_means import FORMS, Loss, UldLoss, loss_named, map_rows, oracle


def loss_of(form: str, problem: AlignedProblem) -> Loss:
    loss = loss_named(form, problem, "reverse_kl")
    return replace(loss, temperature=2.0)


def divergence_on_shard(
    rank: int, world: int, form: str, problem: AlignedProblem, sizes: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    shards = shards_for(rank, world, sizes)
    logits = [
        padded(values.t(), size)[shard.start : shard.stop].t().contiguous()
        for values, size, shard in zip(problem.logits, sizes, shards, strict=True)
    ]
    leaf, at = logits[0].requires_grad_(), problem.at
    values = cross_tokenizer_divergence(
        leaf,
        DenseLogits(logits[1]),
        **loss_of(form, problem).arguments,
        student=AlignedSide(at.student_chunks, shard=shards[0]),
        teacher_side=AlignedSide(at.teacher_chunks, shard=shards[1]),
        chunks=at.count,
        group=dist.group.WORLD,
        tile_tokens=9,
    )
    values.sum().backward()
    assert leaf.grad is not None
    return values.detach(), leaf.grad


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", PADDED)
@pytest.mark.parametrize("world", WORLDS)
def test_values_per_chunk(pool: Pool, world: int, sizes: tuple[int, int], form: str) -> None:
    problem = AlignedProblem.random(seed=2)
    answers = pool.run(world, divergence_on_shard, form, problem, sizes)
    for values, _ in answers[1:]:
        assert torch.equal(values, answers[0][0])
    student, teacher = problem.logits
    student = student.double().requires_grad_()
    expected = oracle(student, teacher, problem.at, loss_of(form, problem))
    (answer,) = torch.autograd.grad(expected.sum(), student)
    torch.testing.assert_close(answers[0][0].double(), expected.detach(), rtol=1e-6, atol=0)
    found = torch.cat([one for _, one in answers], 1)
    assert row_error(found[:, : SIZES[0]], answer) < 1e-6
    assert not found[:, SIZES[0] :].any()


def equal_models_on_shard(
    rank: int, world: int, form: str, problem: AlignedProblem
) -> tuple[float, float]:
    """Largest value and gradient between equal models of one vocabulary, split in two ways."""
    size, at = SIZES[0], problem.at
    whole = problem.logits[0]
    shards = [VocabShard.for_rank(size, padding, rank, world) for padding in (84, 96)]
    leaf, teacher = (
        padded(whole.t(), width)[one.start : one.stop].t().contiguous()
        for one, width in zip(shards, (84, 96), strict=True)
    )
    leaf.requires_grad_()
    loss: Loss
    if form == "projection":
        rows = torch.arange(size + 1), torch.arange(size), torch.ones(size)
        loss = replace(loss_named(form, problem), **dict(zip(MAP_ROWS, rows, strict=True)))
    elif form == "gold":
        ids = problem.ids[0].sort().values
        loss = replace(loss_named(form, problem), student_ids=ids, teacher_ids=ids)
    else:
        loss = UldLoss()
    values = cross_tokenizer_divergence(
        leaf,
        DenseLogits(teacher),
        **loss.arguments,
        student=AlignedSide(at.student_chunks, shard=shards[0]),
        teacher_side=AlignedSide(at.student_chunks, shard=shards[1]),
        chunks=at.count,
        group=dist.group.WORLD,
    )
    values.sum().backward()
    assert leaf.grad is not None
    return float(values.detach().abs().max()), float(leaf.grad.abs().max())


MAP_ROWS = ("row_offsets", "row_teacher_ids", "row_weights")


@pytest.mark.parametrize("form", ["projection", "gold", "uld"])
def test_equal_models_have_no_loss_however_they_are_split(pool: Pool, form: str) -> None:
    problem = AlignedProblem.random(seed=5)
    for value, gradient in pool.run(2, equal_models_on_shard, form, problem):
        assert value == 0
        assert gradient < 1e-6


def objective_on_shard(
    rank: int, world: int, problem: AlignedProblem, sizes: tuple[int, int], tile_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    shard, teacher_shard = shards_for(rank, world, sizes)
    group = None if world == 1 else dist.group.WORLD
    at = problem.at
    hidden = problem.hidden.clone().requires_grad_()
    weight = padded(problem.weight, sizes[0])[shard.start : shard.stop].requires_grad_()
    teacher_weight = padded(problem.teacher_weight, sizes[1])
    teacher_weight = teacher_weight[teacher_shard.start : teacher_shard.stop]
    rows = AlignedRows(
        TilePlan.of_chunks(
            at.student_chunks, at.teacher_chunks, at.count, tile_tokens=tile_tokens, band_tokens=9
        ),
        HiddenState(problem.teacher_hidden, teacher_weight),
        at.student_labels,
        at.teacher_labels,
        shard,
        teacher_shard,
        group,
    )
    projected = _projected(map_rows(SIZES), shard, teacher_shard)
    vocabularies = SharedVocabularies(shard, teacher_shard, None, None, group, projected=projected)
    terms = (
        ChunkTerm("projection", "js_divergence", top_k=7),
        ChunkTerm("projection", top_k=20, published=True),
        ChunkTerm("uld", uncommon_top_k=9),
    )
    weights = torch.linspace(0, 1, at.count)
    work = AlignedLinear(
        rows,
        tuple(
            WeightedTerm(term.on(vocabularies, rows), 0.5 + i, weights)
            for i, term in enumerate(terms)
        ),
    )
    total, sums = aligned_linear(HiddenState(hidden, weight), work)
    total.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return sums, hidden.grad, weight.grad


@pytest.mark.parametrize("tile_tokens", [1, 100])
@pytest.mark.parametrize("world", WORLDS)
def test_objective_from_hidden_states(pool: Pool, world: int, tile_tokens: int) -> None:
    problem, sizes = AlignedProblem.random(seed=3), PADDED[tile_tokens % 2]
    answers = pool.run(world, objective_on_shard, problem, sizes, tile_tokens)
    for sums, _, _ in answers[1:]:
        assert torch.equal(sums, answers[0][0])
    hidden, weight = (one.double().requires_grad_() for one in (problem.hidden, problem.weight))
    student = hidden @ weight.t()
    teacher = problem.teacher_hidden.double() @ problem.teacher_weight.double().t()
    weights = torch.linspace(0, 1, problem.at.count).double()
    losses = (
        loss_named("projection", problem, "js_divergence"),
        loss_named("published", problem),
        loss_named("uld", problem),
    )
    expected = [(weights * oracle(student, teacher, problem.at, one)).sum() for one in losses]
    total = expected[0] * 0.5 + expected[1] * 1.5 + expected[2] * 2.5
    of_hidden, of_weight = torch.autograd.grad(total, (hidden, weight))
    torch.testing.assert_close(
        answers[0][0].double(), torch.stack(expected).detach(), rtol=2e-6, atol=0
    )
    of_ranks = torch.stack([one for _, one, _ in answers]).sum(0)
    found = torch.cat([one for _, _, one in answers])
    for ours, answer in ((of_ranks, of_hidden), (found[: SIZES[0]], of_weight)):
        assert float((ours - answer).abs().max() / answer.abs().max()) < 2e-6
    assert not found[SIZES[0] :].any()

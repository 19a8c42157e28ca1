"""Losses between tokenizers on vocabulary shards equal the float64 oracle for every number of
ranks: two vocabularies with sizes and padding of their own, per chunk and in training."""

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
from megatron_distill.ops.aligned.columns import CommonColumns, TeacherLayout, shards_of
from megatron_distill.ops.aligned.executor import (
    AlignedLinear,
    AlignedRows,
    LabelLoss,
    WeightedTerm,
    aligned_linear,
)
from megatron_distill.ops.aligned.plan import TilePlan
from megatron_distill.signals import DenseLogits, HiddenState
from tests.distributed.pool import Pool
from tests.reference.cross_tokenizer import AlignedProblem
from tests.reference.distillation import cross_entropy, row_error
from tests.reference.tracing import traced
from tests.support.aligned_losses import (
    FORMS,
    PADDED,
    SIZES,
    Loss,
    identity_rows,
    loss_of,
    map_rows,
    oracle,
    padded,
    shards_for,
)

Found = tuple[Tensor, Tensor, list[str]]


def on_shard(
    loss: Loss, logits: tuple[Tensor, Tensor], sides: tuple[AlignedSide, AlignedSide], chunks: int
) -> Found:
    """Values per chunk, the gradient of their sum on own columns, and the collectives."""
    shards = [side.shard for side in sides if side.shard is not None]
    own, teacher = (
        padded(values.t(), 200)[shard.start : shard.stop].t().contiguous()
        for values, shard in zip(logits, shards, strict=True)
    )
    own.requires_grad_()
    results: list[Tensor] = []
    trace = traced(
        lambda: results.append(
            cross_tokenizer_divergence(
                own,
                DenseLogits(teacher),
                **loss,
                student=sides[0],
                teacher_side=sides[1],
                chunks=chunks,
                group=dist.group.WORLD,
                tile_tokens=9,
            )
        )
    )
    results[0].sum().backward()
    assert own.grad is not None
    return results[0].detach(), own.grad, trace.collectives


def losses_on_shard(
    rank: int, world: int, problem: AlignedProblem, sizes: tuple[int, int]
) -> list[Found]:
    shards, at = shards_for(rank, world, sizes), problem.at
    sides = (
        AlignedSide(at.student_chunks, at.student_labels, shards[0]),
        AlignedSide(at.teacher_chunks, at.teacher_labels, shards[1]),
    )
    return [on_shard(loss, problem.logits, sides, at.count) for loss in losses(problem)]


def losses(problem: AlignedProblem) -> list[Loss]:
    each = [loss_of(form, problem, "reverse_kl", temperature=2.0) for form in FORMS]
    # The class of further tokens is in the head, and in the tail of some chunks.
    return each + [
        loss_of("common", problem, "adaptive_kl", temperature=2.0, adaptive_alpha=alpha)
        for alpha in (0.3, 0.8)
    ]


@pytest.mark.parametrize(
    ("world", "sizes"), [(2, PADDED[0]), pytest.param(4, PADDED[1], marks=pytest.mark.slow)]
)
def test_values_per_chunk(pool: Pool, world: int, sizes: tuple[int, int]) -> None:
    problem = AlignedProblem.random(seed=2)
    ranks = pool.run(world, losses_on_shard, problem, sizes)
    _, teacher = problem.logits
    for number, loss in enumerate(losses(problem)):
        answers = [rank[number] for rank in ranks]
        for values, _, _ in answers[1:]:
            assert torch.equal(values, answers[0][0]), loss
        student = problem.logits[0].double().requires_grad_()
        expected = oracle(student, teacher, problem.at, loss)
        (answer,) = torch.autograd.grad(expected.sum(), student)
        torch.testing.assert_close(answers[0][0].double(), expected.detach(), rtol=1e-6, atol=0)
        gradient = torch.cat([one for _, one, _ in answers], 1)
        assert row_error(gradient[:, : SIZES[0]], answer) < 1e-6, loss
        assert not gradient[:, SIZES[0] :].any(), loss
        collectives = answers[0][2]
        assert bool(collectives) is (world > 1), loss
        if loss["alignment"] == "likelihood":
            assert set(collectives) <= {"_allgather_base_"}


def ties_on_shard(rank: int, world: int, ties: AlignedProblem, loss: Loss) -> list[Found]:
    """Both models have whole numbers as logits: those of the hidden states themselves."""
    shards, at = shards_for(rank, world, PADDED[0]), ties.at
    sides = (
        AlignedSide(at.student_chunks, at.student_labels, shards[0]),
        AlignedSide(at.teacher_chunks, at.teacher_labels, shards[1]),
    )
    return [on_shard(loss, (ties.hidden, ties.teacher_hidden), sides, at.count)]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_rest_is_the_last_of_equally_probable_classes(pool: Pool, world: int) -> None:
    """One token of the teacher is no common one; its level has a third of all tokens."""
    problem, generator = AlignedProblem.random(seed=6), torch.Generator().manual_seed(1)
    hidden, teacher = (
        torch.randint(3, (len(rows), size), generator=generator).float()
        for rows, size in zip((problem.hidden, problem.teacher_hidden), SIZES, strict=True)
    )
    teacher[:, -1] = 1.0
    student_ids = torch.randperm(SIZES[0], generator=generator)[:60].sort().values
    ids = student_ids, torch.randperm(60, generator=generator)
    ties = replace(problem, hidden=hidden, teacher_hidden=teacher, ids=ids)
    # The boundary is in that level, of e over 1 + e + e^2.
    loss = loss_of("common", ties, "adaptive_kl", adaptive_alpha=0.25)
    expected = oracle(hidden, teacher, problem.at, loss)
    assert int((expected > 0).sum()) > 3
    for ((values, _, _),) in pool.run(world, ties_on_shard, ties, loss):
        torch.testing.assert_close(values.double(), expected, rtol=1e-6, atol=0)


def equal_models_on_shard(
    rank: int, world: int, problem: AlignedProblem, sizes: tuple[int, int]
) -> dict[str, Found]:
    """Between equal models of one vocabulary, each padded to a size of its own."""
    at, whole, ids = problem.at, problem.logits[0], problem.ids[0].sort().values
    shards = [VocabShard.for_rank(SIZES[0], size, rank, world) for size in sizes]
    sides = tuple(AlignedSide(at.student_chunks, at.student_labels, shard) for shard in shards)
    every = torch.arange(SIZES[0])
    losses = {"likelihood": loss_of("likelihood", problem)}
    losses |= {form: loss_of(form, problem, common_ids=(ids, ids)) for form in ("common", "top_k")}
    losses["common, ordered"] = loss_of("common", problem, "adaptive_kl", common_ids=(ids, ids))
    losses["common, all"] = loss_of("common", problem, common_ids=(every, every))
    losses["projection"] = loss_of("projection", problem, map_rows=identity_rows(SIZES[0]))
    losses["gold"] = loss_of("gold", problem, common_ids=(ids, ids))
    losses["uld"] = loss_of("uld", problem, uncommon_top_k=256)
    return {
        form: on_shard(loss, (whole, whole), (sides[0], sides[1]), at.count)
        for form, loss in losses.items()
    }


# The last is one in which the sums over further tokens differ by rounding.
@pytest.mark.parametrize(("world", "sizes", "seed"), [(2, (84, 84), 5), (4, (84, 96), 14)])
def test_equal_models_have_no_loss_however_they_are_split(
    pool: Pool, world: int, sizes: tuple[int, int], seed: int
) -> None:
    problem = AlignedProblem.random(seed=seed)
    for answers in pool.run(world, equal_models_on_shard, problem, sizes):
        for form, (values, gradient, _) in answers.items():
            assert not values.any(), form
            assert float(gradient.abs().max()) < 1e-6, form


# On common ids and labels, which a rearranged head of the teacher brings to the student's ranks,
# and on its columns as they are; each with its oracle's form.
TERMS = {
    "ids": {
        "likelihood": ChunkTerm("likelihood", "js_divergence", temperature=2.0),
        "common": ChunkTerm("common", "reverse_kl", temperature=2.0),
        "top_k": ChunkTerm("common", "reverse_kl", temperature=2.0, top_k=5),
        "common, ordered": ChunkTerm("common", "adaptive_kl", temperature=2.0),
    },
    "columns": {
        "projection": ChunkTerm("projection", "js_divergence", top_k=7),
        "published": ChunkTerm("projection", top_k=20, published=True),
        "uld": ChunkTerm("uld", uncommon_top_k=9),
    },
}


def objective_on_shard(
    rank: int,
    world: int,
    kind: str,
    problem: AlignedProblem,
    sizes: tuple[int, int],
    tile: int,
    ranked: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Total, sums, and the gradients on hidden states and own rows of the weight.

    ranked: the term whose mass of the top-k is the last sum.
    """
    shard, teacher_shard = shards_for(rank, world, sizes)
    group = None if world == 1 else dist.group.WORLD
    at, ids = problem.at, problem.ids
    hidden = problem.hidden.clone().requires_grad_()
    weight = padded(problem.weight, sizes[0])[shard.start : shard.stop].requires_grad_()
    head = padded(problem.teacher_weight, sizes[1])[teacher_shard.start : teacher_shard.stop]
    labels = at.teacher_labels
    if kind == "ids":
        shards = shards_of(shard, group)
        layout = TeacherLayout.of(*ids, shards, shards_of(teacher_shard, group), group)
        head, teacher_shard, new_ids = layout.rows(head), layout.shard, layout.new_ids
        columns = CommonColumns.of(ids[0], new_ids[ids[1]], shards, layout.shards, rank)
        vocabularies = SharedVocabularies(shard, teacher_shard, columns, new_ids, group)
        labels = new_ids[labels]
    else:
        rows_of_map = _projected(map_rows(SIZES), shard, teacher_shard)
        vocabularies = SharedVocabularies(
            shard, teacher_shard, None, None, group, projected=rows_of_map
        )
    label_weights = (torch.arange(len(hidden)) % 3).float() / 10
    plan = TilePlan.of_chunks(
        at.student_chunks,
        at.teacher_chunks,
        at.count,
        tile_tokens=tile,
        band_tokens=9,
        has_label=label_weights > 0,
    )
    rows = AlignedRows(
        plan,
        HiddenState(problem.teacher_hidden, head),
        at.student_labels,
        labels,
        shard,
        teacher_shard,
        group,
    )
    weights = torch.linspace(0, 1, at.count)
    terms = tuple(
        WeightedTerm(term.on(vocabularies, rows), 0.5 + i, weights)
        for i, term in enumerate(TERMS[kind].values())
    )
    name = None if ranked is None else TERMS[kind][ranked].name
    work = AlignedLinear(rows, terms, LabelLoss(label_weights, 0.3), ranked=name)
    total, sums = aligned_linear(HiddenState(hidden, weight), work)
    total.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return total.detach(), sums, hidden.grad, weight.grad


# On one rank: tests/unit/ops/test_aligned_linear.py.
@pytest.mark.parametrize(
    ("world", "tile_tokens", "kind"),
    [(2, 100, "ids"), (4, 1, "ids"), (2, 1, "columns"), (4, 8, "columns")],
)
def test_objective_from_hidden_states(pool: Pool, world: int, tile_tokens: int, kind: str) -> None:
    problem, sizes = AlignedProblem.random(seed=3), PADDED[tile_tokens % 2]
    answers = pool.run(world, objective_on_shard, kind, problem, sizes, tile_tokens)
    for answer in answers[1:]:
        assert torch.equal(answer[0], answers[0][0])
        assert torch.equal(answer[1], answers[0][1])
    hidden, weight = (one.double().requires_grad_() for one in (problem.hidden, problem.weight))
    student = hidden @ weight.t()
    teacher = problem.teacher_hidden.double() @ problem.teacher_weight.double().t()
    label_weights = (torch.arange(len(hidden)) % 3).double() / 10
    sums = [(label_weights * cross_entropy(student, problem.at.student_labels)).sum()]
    weights = torch.linspace(0, 1, problem.at.count).double()
    for form, term in TERMS[kind].items():
        form = form.removesuffix(", ordered")
        loss = loss_of(form, problem, term.divergence, temperature=term.temperature)
        sums.append((weights * oracle(student, teacher, problem.at, loss)).sum())
    factors = [0.3, *(0.5 + i for i in range(len(TERMS[kind])))]
    total = sum(factor * one for factor, one in zip(factors, sums, strict=True))
    assert isinstance(total, Tensor)
    of_hidden, of_weight = torch.autograd.grad(total, (hidden, weight))
    found_total, found_sums, _, _ = answers[0]
    torch.testing.assert_close(found_sums.double(), torch.stack(sums).detach(), rtol=2e-6, atol=0)
    assert float(found_total) == pytest.approx(float(total.detach()), rel=2e-6)
    # The products of the heads round in fp32 too, so that errors are of the largest entry of all.
    of_ranks = torch.stack([one[2] for one in answers]).sum(0)
    assert bool((of_ranks[(of_hidden == 0).all(1)] == 0).all())
    found = torch.cat([one[3] for one in answers])
    for ours, answer in ((of_ranks, of_hidden), (found[: SIZES[0]], of_weight)):
        assert float((ours - answer).abs().max() / answer.abs().max()) < 2e-6
    assert not found[SIZES[0] :].any()


@pytest.mark.parametrize(
    ("form", "world", "tile_tokens"),
    [("top_k", 1, 1), ("top_k", 4, 8), ("projection", 2, 8), ("published", 2, 1)],
)
def test_the_mass_of_a_top_k_is_the_teachers_probability_of_it(
    pool: Pool, form: str, world: int, tile_tokens: int
) -> None:
    problem, sizes = AlignedProblem.random(seed=3), PADDED[tile_tokens % 2]
    kind = next(kind for kind, terms in TERMS.items() if form in terms)
    answers = pool.run(world, objective_on_shard, kind, problem, sizes, tile_tokens, form)
    plain = pool.run(world, objective_on_shard, kind, problem, sizes, tile_tokens)
    for answer in answers:
        assert torch.equal(answer[1], answers[0][1])
        assert torch.equal(answer[1][:-1], plain[0][1])  # the losses are as without it
    teacher = problem.teacher_hidden.double() @ problem.teacher_weight.double().t()
    of_chunks = mass_of(form, problem, teacher, TERMS[kind][form])
    assert 0.05 < float(of_chunks.max()) < 0.999
    expected = (torch.linspace(0, 1, problem.at.count).double() * of_chunks).sum()
    assert float(answers[0][1][-1]) == pytest.approx(float(expected), rel=1e-6)


def mass_of(form: str, problem: AlignedProblem, teacher: Tensor, term: ChunkTerm) -> Tensor:
    """The teacher's probability of the term's ids, a mean over the rows of each chunk."""
    at, k = problem.at, term.top_k
    assert k is not None
    probabilities = (teacher / term.temperature).softmax(1)
    candidates = torch.arange(SIZES[1])
    if form == "top_k":
        candidates = problem.ids[1]
    elif form == "projection":
        candidates = map_rows(SIZES)[1].unique()
    largest = teacher[at.teacher_chunks >= 0].amax(0).topk(k).indices  # of all rows
    found = torch.zeros(at.count, dtype=torch.float64)
    for chunk in range(at.count):
        mean = probabilities[at.teacher_chunks == chunk].mean(0)
        is_pair = (at.teacher_chunks == chunk).sum() == (at.student_chunks == chunk).sum() == 1
        if form == "published":
            found[chunk] = mean[largest].sum()
        elif is_pair or form != "top_k":
            found[chunk] = mean[candidates].topk(k).values.sum()
    return found

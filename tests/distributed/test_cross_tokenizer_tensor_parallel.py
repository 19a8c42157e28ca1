"""Losses between tokenizers on vocabulary shards equal the float64 oracle for every number of
ranks: two vocabularies with sizes and padding of their own, per chunk and in training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.losses import AlignedSide, cross_tokenizer_divergence
from megatron_distill.ops.aligned.columns import CommonColumns, TeacherLayout, shards_of
from megatron_distill.ops.aligned.executor import (
    AlignedLinear,
    AlignedRows,
    LabelLoss,
    WeightedTerm,
    aligned_linear,
)
from megatron_distill.ops.aligned.likelihood import LikelihoodTerm
from megatron_distill.ops.aligned.merged_vocabulary import CommonTerm
from megatron_distill.ops.aligned.plan import TilePlan
from megatron_distill.ops.divergences import WeightedDivergence, divergence_named
from megatron_distill.signals import DenseLogits, HiddenState
from tests.distributed.pool import Pool
from tests.reference import cross_tokenizer as oracles
from tests.reference.cross_tokenizer import AlignedProblem
from tests.reference.distillation import cross_entropy, row_error
from tests.reference.tracing import traced
from tests.support.aligned_losses import PADDED, SIZES, WORLDS, padded, shards_for


def arguments(name: str, problem: AlignedProblem) -> dict[str, Any]:
    if name == "likelihood":
        return {"alignment": name, "divergence": "js_divergence", "temperature": 2.0}
    top_k = 5 if name == "top_k" else None
    return {
        "alignment": "common",
        "divergence": "reverse_kl",
        "temperature": 2.0,
        "top_k": top_k,
        "common_ids": problem.ids,
    }


def oracle(name: str, problem: AlignedProblem, student: Tensor, teacher: Tensor) -> Tensor:
    at, given = problem.at, arguments(name, problem)
    if name == "likelihood":
        return oracles.likelihood(student, teacher, at, given["divergence"], 2.0)
    top_k = given["top_k"]
    return oracles.common(student, teacher, at, problem.ids, given["divergence"], 2.0, top_k)


def divergence_on_shard(
    rank: int, world: int, name: str, problem: AlignedProblem, sizes: tuple[int, int]
) -> tuple[Tensor, Tensor, list[str]]:
    shards = shards_for(rank, world, sizes)
    logits = [
        padded(values.t(), size)[shard.start : shard.stop].t().contiguous()
        for values, size, shard in zip(problem.logits, sizes, shards, strict=True)
    ]
    leaf, at = logits[0].requires_grad_(), problem.at
    results: list[Tensor] = []
    trace = traced(
        lambda: results.append(
            cross_tokenizer_divergence(
                leaf,
                DenseLogits(logits[1]),
                **arguments(name, problem),
                student=AlignedSide(at.student_chunks, at.student_labels, shards[0]),
                teacher_side=AlignedSide(at.teacher_chunks, at.teacher_labels, shards[1]),
                chunks=at.count,
                group=dist.group.WORLD,
                tile_tokens=9,
            )
        )
    )
    results[0].sum().backward()
    assert leaf.grad is not None
    return results[0].detach(), leaf.grad, trace.collectives


@pytest.mark.parametrize("name", ["likelihood", "common", "top_k"])
@pytest.mark.parametrize("sizes", PADDED)
@pytest.mark.parametrize("world", WORLDS)
def test_values_per_chunk(pool: Pool, world: int, sizes: tuple[int, int], name: str) -> None:
    problem = AlignedProblem.random(seed=2)
    answers = pool.run(world, divergence_on_shard, name, problem, sizes)
    for values, _, _ in answers[1:]:
        assert torch.equal(values, answers[0][0])
    student, teacher = problem.logits
    student = student.double().requires_grad_()
    expected = oracle(name, problem, student, teacher)
    (answer,) = torch.autograd.grad(expected.sum(), student)
    torch.testing.assert_close(answers[0][0].double(), expected.detach(), rtol=1e-6, atol=0)
    gradient = torch.cat([one for _, one, _ in answers], 1)
    assert row_error(gradient[:, : SIZES[0]], answer) < 1e-6
    assert not gradient[:, SIZES[0] :].any()
    # Messages of one call: none with one rank, and no more than one per merge and tile.
    collectives = answers[0][2]
    if world == 1:
        assert not collectives
    elif name == "likelihood":
        assert set(collectives) == {"_allgather_base_"}


@dataclass(frozen=True)
class Answer:
    """The result of one rank."""

    total: Tensor
    sums: Tensor
    hidden: Tensor
    weight: Tensor


def objective_on_shard(
    rank: int, world: int, problem: AlignedProblem, sizes: tuple[int, int], tile_tokens: int
) -> Answer:
    shard, teacher_shard = shards_for(rank, world, sizes)
    group = None if world == 1 else dist.group.WORLD
    at, ids = problem.at, problem.ids
    hidden = problem.hidden.clone().requires_grad_()
    weight = padded(problem.weight, sizes[0])[shard.start : shard.stop].requires_grad_()
    teacher_weight = padded(problem.teacher_weight, sizes[1])
    teacher_weight = teacher_weight[teacher_shard.start : teacher_shard.stop]
    # The frozen head is rearranged once; labels and common tokens take its new ids.
    student_shards = shards_of(shard, group)
    layout = TeacherLayout.of(*ids, student_shards, shards_of(teacher_shard, group), group)
    teacher = HiddenState(problem.teacher_hidden, layout.rows(teacher_weight))
    new_ids = layout.new_ids[ids[1]]
    columns = CommonColumns.of(ids[0], new_ids, student_shards, layout.shards, rank)
    label_weights = (torch.arange(len(hidden)) % 3).float() / 10
    plan = TilePlan.of_chunks(
        at.student_chunks,
        at.teacher_chunks,
        at.count,
        tile_tokens=tile_tokens,
        has_label=label_weights > 0,
    )
    rows = AlignedRows(
        plan,
        teacher,
        at.student_labels,
        layout.new_ids[at.teacher_labels],
        shard,
        layout.shard,
        group,
    )
    kl = WeightedDivergence(divergence_named("reverse_kl"), 2.0, 1.0)
    weights = torch.linspace(0, 1, at.count)
    terms = (
        LikelihoodTerm("likelihood", divergence_named("js_divergence"), 2.0),
        CommonTerm("common", columns, kl),
        CommonTerm("top_k", columns, kl, 5),
    )
    work = AlignedLinear(
        rows,
        tuple(WeightedTerm(term, 0.5 + i, weights) for i, term in enumerate(terms)),
        LabelLoss(label_weights, 0.3),
    )
    total, sums = aligned_linear(HiddenState(hidden, weight), work)
    total.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return Answer(total.detach(), sums, hidden.grad, weight.grad)


@pytest.mark.parametrize("tile_tokens", [1, 8, 100])
@pytest.mark.parametrize("world", WORLDS)
def test_objective_from_hidden_states(pool: Pool, world: int, tile_tokens: int) -> None:
    problem, sizes = AlignedProblem.random(seed=3), PADDED[tile_tokens % 2]
    answers: list[Answer] = pool.run(world, objective_on_shard, problem, sizes, tile_tokens)
    for answer in answers[1:]:
        assert torch.equal(answer.total, answers[0].total)
        assert torch.equal(answer.sums, answers[0].sums)
    hidden, weight = (one.double().requires_grad_() for one in (problem.hidden, problem.weight))
    student = hidden @ weight.t()
    teacher = problem.teacher_hidden.double() @ problem.teacher_weight.double().t()
    label_weights = (torch.arange(len(hidden)) % 3).double() / 10
    sums = [(label_weights * cross_entropy(student, problem.at.student_labels)).sum()]
    weights = torch.linspace(0, 1, problem.at.count).double()
    for name in ("likelihood", "common", "top_k"):
        sums.append((weights * oracle(name, problem, student, teacher)).sum())
    total = sum(factor * one for factor, one in zip((0.3, 0.5, 1.5, 2.5), sums, strict=True))
    assert isinstance(total, Tensor)
    of_hidden, of_weight = torch.autograd.grad(total, (hidden, weight))
    expected = torch.stack(sums).detach()
    torch.testing.assert_close(answers[0].sums.double(), expected, rtol=2e-6, atol=0)
    assert float(answers[0].total) == pytest.approx(float(total.detach()), rel=2e-6)
    # The products of the heads round in fp32 too, so that errors are of the largest entry of all.
    of_ranks = torch.stack([one.hidden for one in answers]).sum(0)
    assert bool((of_ranks[(of_hidden == 0).all(1)] == 0).all())
    found = torch.cat([one.weight for one in answers])
    for ours, answer in ((of_ranks, of_hidden), (found[: SIZES[0]], of_weight)):
        assert float((ours - answer).abs().max() / answer.abs().max()) < 2e-6
    assert not found[SIZES[0] :].any()

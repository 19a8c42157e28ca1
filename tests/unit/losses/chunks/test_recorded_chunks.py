"""Losses between tokenizers from a teacher's records: the oracles of whole logits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_distill.losses import ChunkTerm, SharedVocabularies
from megatron_distill.ops import VocabShard
from megatron_distill.ops.aligned.columns import CommonColumns
from megatron_distill.ops.aligned.executor import AlignedRows, aligned_divergence
from megatron_distill.ops.aligned.merged_vocabulary import common_top_k
from megatron_distill.ops.aligned.plan import TilePlan
from megatron_distill.signals import DenseLogits, IdTarget, TopK
from tests.reference import cross_tokenizer as oracles
from tests.reference.cross_tokenizer import AlignedProblem
from tests.reference.distillation import row_error

K = 24


def top_k_of(logits: Tensor, k: int, temperature: float = 1.0) -> TopK:
    """The most probable ids of each row at a temperature, in fp32 as in a record."""
    log_probs = (logits.double() / temperature).log_softmax(1)
    chosen = log_probs.topk(k, 1)
    rest = log_probs.scatter(1, chosen.indices, -math.inf).logsumexp(1)
    return TopK(chosen.indices, chosen.values.float(), rest.float(), temperature)


def labels_of(problem: AlignedProblem) -> TopK:
    """The label of each of the teacher's rows, with all further ids as the tail."""
    labels = problem.at.teacher_labels[:, None]
    log_probs = problem.logits[1].double().log_softmax(1).gather(1, labels)
    return TopK(labels, log_probs.float(), torch.expm1(log_probs).neg().log().squeeze(1).float())


def vocabularies_of(problem: AlignedProblem, sizes: tuple[int, int]) -> SharedVocabularies:
    student, teacher = (VocabShard(size, 0, size) for size in sizes)
    ids, teacher_ids = problem.ids
    columns = CommonColumns.of(ids, teacher_ids, [student], [teacher], 0)
    places = columns.places_of(teacher_ids[ids.argsort()], sizes[1])
    return SharedVocabularies(student, teacher, columns, None, None, places=places)


def found_and_gradient(
    problem: AlignedProblem, term: ChunkTerm, target: IdTarget
) -> tuple[Tensor, Tensor]:
    """The term's value per chunk from records alone, and the gradient of their weighted sum."""
    student = problem.logits[0].detach().requires_grad_()
    at, sizes = problem.at, (problem.weight.shape[0], problem.teacher_weight.shape[0])
    vocabularies = vocabularies_of(problem, sizes)
    rows = AlignedRows(
        TilePlan.of_chunks(at.student_chunks, at.teacher_chunks, at.count, tile_tokens=7),
        None,
        at.student_labels,
        at.teacher_labels,
        vocabularies.student_shard,
        vocabularies.teacher_shard,
        None,
    )
    values = aligned_divergence(DenseLogits(student), rows, term.on(vocabularies, rows, target))
    return values.detach(), _gradient(values, student)


def _gradient(values: Tensor, student: Tensor) -> Tensor:
    weights = torch.arange(1, len(values) + 1, dtype=values.dtype)
    (found,) = torch.autograd.grad(values, student, weights)
    return found


TERMS = [
    ChunkTerm("likelihood", "js_divergence", temperature=6.0),
    ChunkTerm("common", "forward_kl", top_k=5),
    ChunkTerm("common", "reverse_kl", top_k=3, temperature=2.0),
    ChunkTerm("common", "total_variation", top_k=1),
]


@pytest.mark.parametrize("term", TERMS, ids=lambda term: term.name)
def test_a_record_gives_the_loss_of_whole_logits(term: ChunkTerm) -> None:
    problem = AlignedProblem.random()
    student = problem.logits[0].double().detach().requires_grad_()
    teacher, at, given = problem.logits[1], problem.at, (term.divergence, term.temperature)
    if term.alignment == "likelihood":
        target = labels_of(problem)
        expected = oracles.likelihood(student, teacher, at, *given, beta=0.5)
    else:
        target = top_k_of(teacher, K, term.temperature).target(term)
        expected = oracles.common(student, teacher, at, problem.ids, *given, term.top_k)
    values, gradient = found_and_gradient(problem, term, target)
    assert float(values.max()) > 0.01
    torch.testing.assert_close(values.double(), expected.detach(), rtol=2e-6, atol=1e-8)
    assert row_error(gradient, _gradient(expected, student)) < 2e-6


def test_too_few_common_ids_of_a_record_leave_the_rest_to_the_tail() -> None:
    recorded = TopK(
        torch.tensor([[4, 1, 3], [0, 2, 1]]),
        torch.tensor([[0.5, 0.2, 0.1], [0.4, 0.3, 0.2]]).log(),
        torch.tensor([0.2, 0.1]).log(),
    )
    places = torch.tensor([-1, 7, -1, 5, 6])  # of the teacher's ids 0 to 4
    found = common_top_k(recorded, places, 2)
    assert found.ids[0].tolist() == [6, 7]
    assert found.ids[1, 0] == 7
    torch.testing.assert_close(found.log_probs[0].exp(), torch.tensor([0.5, 0.2]))
    torch.testing.assert_close(found.log_probs[1].exp(), torch.tensor([0.2, 0.0]))
    torch.testing.assert_close(found.log_tail.exp(), torch.tensor([0.3, 0.8]))


@pytest.mark.parametrize("term", [ChunkTerm("uld"), ChunkTerm("gold"), ChunkTerm("common")])
def test_a_term_that_needs_whole_distributions_is_refused(term: ChunkTerm) -> None:
    problem = AlignedProblem.random()
    with pytest.raises(ValueError, match=f"{term.name} needs the teacher's logits"):
        found_and_gradient(problem, term, top_k_of(problem.logits[1], K))

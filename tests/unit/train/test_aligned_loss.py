"""The objective on chunks: context ranks share the rows, and each chunk and label counts once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_distill.data.aligned.documents import AlignedDocument, Side
from megatron_distill.data.aligned.packing import AlignedPacker, Window
from megatron_distill.data.aligned.rows import ChunkPlanner
from megatron_distill.data.collation import count_labels, micro_batch, pack_samples
from megatron_distill.data.samples import weight_flag
from megatron_distill.losses import ChunkTerm, SharedVocabularies, TermTeachers
from megatron_distill.ops.aligned.columns import CommonColumns
from megatron_distill.ops.vocab import VocabShard
from megatron_distill.runtime.batch import Batch, StepBatches, zigzag_index
from megatron_distill.signals import HiddenState, SignalsByTeacher
from megatron_distill.train.aligned_loss import AlignedLoss
from megatron_distill.train.loss_sizes import batches_in
from tests.reference.cross_tokenizer import Alignment, common, likelihood

STUDENT, TEACHER, HIDDEN, LENGTH = 23, 31, 6, 16
TERMS = (ChunkTerm("likelihood"), ChunkTerm("common", divergence="js_divergence", weight=0.7))


def two_sided_batch(*, weighted: bool = False) -> tuple[Batch, StepBatches]:
    """A micro-batch of two samples in tokens of both models, chunks of one to three tokens.

    weighted: the labels of every third chunk count a quarter.
    """
    rng = np.random.default_rng(5)
    packer = AlignedPacker[int](Window(LENGTH + 1, 0), Window(LENGTH + 1, 0))
    samples = []
    number = 0
    while len(samples) < 2:
        packer.add(AlignedDocument(*(_side(rng, size) for size in (STUDENT, TEACHER))), number)
        number += 1
        while packer.is_ready and len(samples) < 2:
            samples.append(packer.take(len(samples)))
    if weighted:
        for sample in samples:
            lighter = sample.teacher.student_chunks_S1 % 3 == 1
            sample.flags_S1[lighter] |= weight_flag(0.25)
    packed = pack_samples(samples)
    (counts,) = count_labels(packed, isolate_documents=True)
    assert counts.chunks > counts.pairs > 0
    batch = micro_batch(packed, slice(0, 2), isolate_documents=True)
    step = StepBatches(
        (batch,), counts.ce, counts.kd, 2 * LENGTH, chunks=counts.chunks, pairs=counts.pairs,
        chunk_ends=counts.chunk_ends,
    )  # fmt: skip
    return batch, step


def _side(rng: np.random.Generator, vocabulary: int) -> Side:
    sizes = rng.choice([1, 1, 1, 2, 3], 7)
    stops = sizes.cumsum()
    tokens = rng.integers(0, vocabulary, int(stops[-1])).astype(np.int32)
    return Side.of_chunks(tokens, np.repeat(np.arange(len(sizes)), sizes).astype(np.int32))


# The teacher's ids of the student's tokens 4 to 14.
COMMON = torch.randperm(TEACHER, generator=torch.Generator().manual_seed(2))[:11]


def some_leaves() -> list[Tensor]:
    """Hidden states and heads of both models."""
    torch.manual_seed(1)
    shapes = [(2, LENGTH, HIDDEN), (STUDENT, HIDDEN), (2, LENGTH, HIDDEN), (TEACHER, HIDDEN)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def vocabularies() -> SharedVocabularies:
    shards = VocabShard(STUDENT, 0, STUDENT), VocabShard(TEACHER, 0, TEACHER)
    columns = CommonColumns.of(torch.arange(4, 15), COMMON, [shards[0]], [shards[1]], 0)
    return SharedVocabularies(*shards, columns, None, None)


def loss_of(
    batch: Batch, step: StepBatches, rank: int, size: int, leaves: list[Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one context rank from hidden states [b, S, H] of both models."""
    student_bSH, weight, teacher_bSH, teacher_weight = leaves
    order = torch.cat([zigzag_index(LENGTH, rank=one, size=size) for one in range(size)])

    def rows(hidden_bSH: Tensor) -> Tensor:
        return hidden_bSH[:, order].reshape(-1, HIDDEN)

    # Two bands of two tiles and more.
    aligned = AlignedLoss(vocabularies(), ChunkPlanner(4, 9, rank, size))
    return aligned(
        HiddenState(rows(student_bSH), weight),
        HiddenState(rows(teacher_bSH), teacher_weight),
        aligned.planner.planned(batch),
        step,
        ce_weight=0.5,
        terms=TERMS,
        sources=0,
        weight_gradient_sum=None,
    )


@pytest.mark.parametrize("size", [2, 4])
def test_context_ranks_add_up_to_the_loss_of_one_rank(size: int) -> None:
    batch, step = two_sided_batch()
    leaves = some_leaves()
    whole, report = loss_of(batch, step, 0, 1, leaves)
    expected = torch.autograd.grad(whole, leaves[:2])
    parts = [loss_of(batch, step, rank, size, leaves) for rank in range(size)]
    total = sum(part for part, _ in parts)
    torch.testing.assert_close(total, whole, rtol=1e-12, atol=0)
    for name, value in report.items():
        summed = torch.stack([part[name] for _, part in parts]).sum()
        torch.testing.assert_close(summed, value, rtol=1e-12, atol=0)
    for found, gradient in zip(torch.autograd.grad(total, leaves[:2]), expected, strict=True):
        torch.testing.assert_close(found, gradient, rtol=1e-10, atol=1e-14)
    names = {"ce", "kd", "likelihood_forward_kl", "common_js_divergence"}
    assert set(report) == names
    assert min(float(report[name]) for name in names) > 0


@pytest.mark.parametrize("size", [1, 2, 4])
def test_local_means_are_over_the_chunks_of_a_rank(size: int) -> None:
    """A chunk is of the last rank that has a part of it; weights of its labels count.

    Its end is of the rank that has the student's last token, if both models read that token.
    """
    batch, step = two_sided_batch(weighted=True)
    rank_S = torch.empty(LENGTH, dtype=torch.int64)
    for rank in range(size):
        rank_S[zigzag_index(LENGTH, rank=rank, size=size)] = rank
    chunks, pairs, ends = torch.zeros(3, size, dtype=torch.float64)
    for chunk in range(batch.chunk_count):
        is_here = batch.chunks_bs == chunk
        owner = int(rank_S.expand_as(is_here)[is_here].max())
        weight = float(batch.label_weights_bs[is_here].max())
        chunks[owner] += weight
        is_pair = int(is_here.sum()) == int((batch.teacher.chunks_bs == chunk).sum()) == 1
        pairs[owner] += weight * is_pair
        sides = is_here, batch.teacher.chunks_bs == chunk
        stops = [int(side.nonzero()[-1, 1]) + 1 for side in sides]
        if max(stops) < LENGTH:
            ends[rank_S[stops[0]]] += weight
    assert 0 < float(ends.sum()) == step.chunk_ends < step.chunks
    assert float(chunks.sum()) == step.chunks
    assert float(pairs.sum()) == step.pairs
    for rank in range(size):
        planned = ChunkPlanner(4, 9, rank, size, has_ends=True).planned(batch)
        found = batches_in(planned, step, TERMS, losses=4)
        expected = [step.ce_tokens / float(planned.ce_weights_bs.sum())]
        expected += [
            step.chunks / float(chunks[rank]),
            step.pairs / float(pairs[rank] or step.pairs),
        ]
        expected.append(step.chunk_ends / float(ends[rank]))
        assert found.tolist() == pytest.approx(expected, rel=1e-6)


def test_rows_without_a_chunk_or_label_change_nothing() -> None:
    batch, step = two_sided_batch()
    leaves = [leaf.detach() for leaf in some_leaves()]
    expected, _ = loss_of(batch, step, 0, 1, leaves)
    for hidden, used in (
        (leaves[0], batch.ce_mask_bs),
        (leaves[2], batch.teacher.kd_mask_bs),
    ):
        assert not used.all()
        hidden[~used] = torch.nan
    changed, _ = loss_of(batch, step, 0, 1, leaves)
    assert torch.equal(changed, expected)


@pytest.mark.parametrize("weighted", [False, True])
def test_loss_and_gradients_are_those_of_whole_logits(weighted: bool) -> None:
    batch, step = two_sided_batch(weighted=weighted)
    leaves = some_leaves()
    total, _ = loss_of(batch, step, 0, 1, leaves)
    student, teacher = ((leaves[at] @ leaves[at + 1].t()).reshape(2 * LENGTH, -1) for at in (0, 2))
    labels = batch.labels_bs.reshape(-1)
    at = Alignment(
        batch.chunks_bs.reshape(-1),
        batch.teacher.chunks_bs.reshape(-1),
        labels,
        batch.teacher.labels_bs.reshape(-1),
        batch.chunk_count,
    )
    of_labels = -student.log_softmax(1).gather(1, labels.unsqueeze(1)).squeeze(1)
    of_chunks = likelihood(student, teacher, at, "forward_kl")
    of_pairs = common(student, teacher, at, (torch.arange(4, 15), COMMON), "js_divergence")
    counted = torch.ones(2 * LENGTH)
    if batch.label_weights_bs is not None:
        counted = batch.label_weights_bs.reshape(-1)
    assert bool((counted < 1).any()) is weighted
    per_chunk = torch.tensor([counted[at.student_chunks == one][0] for one in range(at.count)])
    is_pair = of_pairs != 0
    assert float(per_chunk.sum()) == step.chunks
    assert float(per_chunk[is_pair].sum()) == step.pairs
    inside = batch.ce_mask_bs.reshape(-1)
    assert float(counted[inside].sum()) == step.ce_tokens
    expected = (
        0.5 * (counted * of_labels)[inside].sum() / step.ce_tokens
        + (per_chunk * of_chunks).sum() / step.chunks
        + 0.7 * (per_chunk * of_pairs).sum() / step.pairs
    )
    # The weights of chunks and labels are of fp32.
    torch.testing.assert_close(total, expected, rtol=2e-7, atol=0)
    gradients = torch.autograd.grad(expected, leaves[:2])
    for found, gradient in zip(torch.autograd.grad(total, leaves[:2]), gradients, strict=True):
        torch.testing.assert_close(found, gradient, rtol=1e-6, atol=1e-8)


def chunks_of_one_token(count: int, number: int) -> AlignedDocument:
    """A document with so many labels, each a chunk of one token on both sides."""
    tokens = np.arange(count + 1, dtype=np.int32) + number
    numbers = np.arange(count + 1, dtype=np.int32)
    return AlignedDocument(Side.of_chunks(tokens, numbers), Side.of_chunks(tokens, numbers))


def test_a_term_is_a_mean_over_the_chunks_of_all_micro_batches() -> None:
    """Three chunks with a loss of 2 and one with a loss of 1: 1.75, not the 3.0 or 1.5 of means."""
    samples = []
    for number, count in enumerate((3, 1)):
        packer = AlignedPacker[int](Window(LENGTH + 1, 0), Window(LENGTH + 1, 0))
        packer.add(chunks_of_one_token(count, number), number)
        sample = packer.flush(number)
        samples.append(sample)
    packed = pack_samples(samples)
    (counts,) = count_labels(packed, isolate_documents=True)
    assert (counts.chunks, counts.pairs) == (4, 4)
    shared = vocabularies()
    micro_batches = [micro_batch(packed, slice(at, at + 1), isolate_documents=True)
                     for at in range(2)]  # fmt: skip
    step = StepBatches(tuple(micro_batches), counts.ce, counts.kd, 2 * LENGTH, chunks=4, pairs=4)
    # The teacher is sure of a common token, and the student gives it e^-2, then e^-1.
    certain = torch.full((1, TEACHER), -600.0, dtype=torch.float64)
    certain[0, COMMON[0]] = 0.0
    means = []
    for batch, loss in zip(micro_batches, (2.0, 1.0), strict=True):
        p = torch.tensor(-loss, dtype=torch.float64).exp()
        row = torch.full((1, STUDENT), float((1 - p) / (STUDENT - 1)), dtype=torch.float64)
        row[0, 4] = p
        aligned = AlignedLoss(shared, ChunkPlanner(4, 9))
        total, report = aligned(
            HiddenState(row.log().repeat(LENGTH, 1), torch.eye(STUDENT, dtype=torch.float64)),
            HiddenState(certain.repeat(LENGTH, 1), torch.eye(TEACHER, dtype=torch.float64)),
            aligned.planner.planned(batch),
            step,
            ce_weight=0.0,
            terms=(ChunkTerm("common"),),
            sources=0,
            weight_gradient_sum=None,
        )
        assert float(total) == pytest.approx(float(report["kd"]))
        means.append(float(report["common_forward_kl"]))
    assert means == pytest.approx([6 / 4, 1 / 4])
    assert sum(means) == pytest.approx(1.75)
    # Each micro-batch over its own chunks: their sum and their mean are other numbers.
    own = [4 * mean / count for mean, count in zip(means, (3, 1), strict=True)]
    assert sum(own) == pytest.approx(3.0)
    assert sum(own) / 2 == pytest.approx(1.5)


def test_a_routed_term_has_the_chunks_of_its_teachers_samples_alone() -> None:
    batch, step = two_sided_batch()
    batch = replace(batch, teacher_numbers=(1, 0))
    leaves = some_leaves()
    named = ChunkTerm("likelihood", teachers=TermTeachers.of({"far": 1.0}))
    ranked = ChunkTerm("common", top_k=3)
    _, report = loss_of(batch, step, 0, 1, leaves)
    aligned = AlignedLoss(vocabularies(), ChunkPlanner(4, 9, has_labels=False), teacher=("far", 1))
    other = replace(aligned, teacher=("far", 0))
    zero = torch.zeros((), dtype=torch.float64)
    signals = {"far": HiddenState(leaves[2].reshape(-1, HIDDEN), leaves[3])}

    def added(
        loss: AlignedLoss, by_teacher: dict[str, HiddenState]
    ) -> tuple[Tensor, dict[str, Tensor], Any]:
        return loss.added_to(
            (zero, {"ce": zero, "kd": zero}, {}),
            HiddenState(leaves[0].reshape(-1, HIDDEN), leaves[1]),
            SignalsByTeacher(2 * LENGTH, by_teacher),
            loss.planner.planned(batch),
            step,
            terms=[*TERMS, named, ranked],
            sources=0,
            weight_gradient_sum=None,
        )

    more, found, shares = added(aligned, signals)
    assert float(found["ce"]) == 0.0
    torch.testing.assert_close(found[named.name], report["likelihood_forward_kl"])
    chunks_bS = batch.chunks_bs
    own = len(chunks_bS[0][chunks_bS[0] >= 0].unique())
    assert float(shares["far#chunks"]) == pytest.approx(own / step.chunks)
    # The other sample's terms, of the same loss with the other number, make up the whole.
    _, rest, _ = added(other, signals)
    for term in TERMS:
        assert 0 < float(found[term.name]) < float(report[term.name])
        torch.testing.assert_close(found[term.name] + rest[term.name], report[term.name])
    (gradient,) = torch.autograd.grad(more, leaves[0])
    assert gradient[1].abs().max() > 0  # of the term that names the teacher
    nothing, unchanged, none = added(aligned, {})
    assert (nothing, unchanged["kd"]) == (zero, zero)
    assert none == {"far#chunks": zero, "far#pairs": zero, "far#topk_mass": zero}
    figures = aligned.take_figures(
        {name: float(value) for name, value in (found | shares).items()},
        [*TERMS, named, ranked], chunks=step.chunks, pairs=step.pairs,
    )["far"]  # fmt: skip
    assert figures["chunks"] == step.chunks  # a term names the teacher
    assert figures["pairs"] < step.pairs
    expected = sum(
        term.weight * float(found[term.name]) / float(shares[f"far#{share}"])
        for term, share in zip((*TERMS, ranked), ("chunks", "pairs", "pairs"), strict=True)
    ) + float(found[named.name])
    assert figures["kd_loss"] == pytest.approx(expected)
    assert figures["topk_mass"] == pytest.approx(own_mass(batch, leaves), rel=1e-6)


def own_mass(batch: Batch, leaves: list[Tensor]) -> float:
    """The teacher's mean probability of its three likeliest common tokens, on the first sample."""
    probabilities = (leaves[2][0] @ leaves[3].t()).detach().softmax(1)[:, COMMON]
    chunks, teacher_chunks = batch.chunks_bs[0], batch.teacher.chunks_bs[0]
    masses = [
        float(probabilities[teacher_chunks == one].topk(3).values.sum())
        for one in chunks[chunks >= 0].unique().tolist()
        if (chunks == one).sum() == (teacher_chunks == one).sum() == 1
    ]
    assert len(masses) > 1
    return sum(masses) / len(masses)

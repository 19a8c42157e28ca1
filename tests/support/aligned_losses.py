"""Divergences per chunk between tokenizers with their oracles, and shards of their models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_distill.losses import (
    AlignedSide,
    ChunkTerm,
    SharedVocabularies,
    cross_tokenizer_divergence,
)
from megatron_distill.losses.cross_tokenizer import _projected
from megatron_distill.ops import VocabShard
from megatron_distill.ops.aligned.columns import CommonColumns
from megatron_distill.ops.aligned.executor import (
    AlignedLinear,
    AlignedRows,
    LabelLoss,
    WeightedTerm,
    aligned_linear,
)
from megatron_distill.ops.aligned.gold import GoldColumns
from megatron_distill.ops.aligned.plan import TilePlan
from megatron_distill.signals import DenseLogits, HiddenState
from tests.reference import cross_tokenizer as oracles
from tests.reference.cross_tokenizer import AlignedProblem, Alignment

DIVERGENCES: list[tuple[str, dict[str, float]]] = [
    ("forward_kl", {}),
    ("reverse_kl", {}),
    ("js_divergence", {}),
    ("total_variation", {}),
    ("squared_hellinger", {}),
    ("skewed_forward_kl", {"skew_lambda": 0.2}),
    ("skewed_reverse_kl", {"skew_lambda": 0.2}),
]
# Every loss, as arguments of `cross_tokenizer_divergence`.
FORMS: dict[str, dict[str, Any]] = {
    "likelihood": {"alignment": "likelihood"},
    "common": {"alignment": "common"},
    "top_k": {"alignment": "common", "top_k": 5},
    "projection": {"alignment": "projection", "top_k": 7},
    "published": {"alignment": "projection", "top_k": 20, "published": True},
    "gold": {"alignment": "gold", "uncommon_top_k": 5},
    "uld": {"alignment": "uld", "uncommon_top_k": 9},
}
Loss = dict[str, Any]
SIZES = (83, 61)
# Padded sizes of student and teacher: even shards, and last shards of padding alone.
PADDED = [(84, 64), (128, 112)]


def loss_of(form: str, problem: AlignedProblem, name: str = "forward_kl", **given: Any) -> Loss:
    """The arguments that select a loss between the vocabularies of a problem."""
    loss = {**FORMS[form], "divergence": name, **given}
    if loss["alignment"] in ("common", "gold"):
        return {"common_ids": problem.ids, **loss}
    if loss["alignment"] == "projection":
        sizes = len(problem.weight), len(problem.teacher_weight)
        return {"map_rows": map_rows(sizes), **loss}
    return loss


def oracle(student: Tensor, teacher: Tensor, at: Alignment, loss: Loss) -> Tensor:
    """The loss per chunk by its definition, in float64."""
    given = dict(loss)
    alignment, name = given.pop("alignment"), given.pop("divergence")
    temperature = given.pop("temperature", 1.0)
    if alignment == "likelihood":
        return oracles.likelihood(student, teacher, at, name, temperature, **given)
    if alignment == "uld":
        return oracles.uld(student, teacher, at, temperature, **given)
    if alignment == "projection":
        matrix = _matrix(given.pop("map_rows"), student.shape[1], teacher.shape[1])
        if not given.pop("published", False):
            return oracles.projection(student, teacher, at, matrix, name, temperature, **given)
        # The ids are of the largest logits in rows of chunks.
        teacher = teacher.double().where((at.teacher_chunks >= 0).unsqueeze(1), -1e3)
        reverse = name == "reverse_kl"
        return oracles.published_projection(
            student, teacher, at, matrix, reverse=reverse, temperature=temperature, **given
        )
    of_ids = oracles.common if alignment == "common" else oracles.gold
    ids = given.pop("common_ids")
    return of_ids(student, teacher, at, ids, name, temperature, **given)


def map_rows(sizes: tuple[int, int], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of one to three teacher ids in CSR form; a tenth has none, and some ids no row."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 4, sizes[:1], generator=generator)
    lengths[torch.rand(sizes[0], generator=generator) < 0.1] = 0
    reached = torch.randperm(sizes[1], generator=generator)[: sizes[1] * 3 // 4]
    ids = [reached[torch.randperm(len(reached), generator=generator)[:n]] for n in lengths.tolist()]
    weights = [0.9 * 0.1 ** torch.arange(n) for n in lengths.tolist()]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return offsets, torch.cat(ids), torch.cat([w / w.sum() for w in weights])


def identity_rows(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The map between one vocabulary and itself."""
    return torch.arange(size + 1), torch.arange(size), torch.ones(size)


def _matrix(rows: tuple[Tensor, Tensor, Tensor], height: int, width: int) -> Tensor:
    offsets, ids, weights = rows
    matrix = torch.zeros(height, width, dtype=torch.float64)
    matrix[torch.arange(height).repeat_interleave(offsets.diff()), ids] = weights.double()
    return matrix


def divergence(
    student: Tensor,
    teacher: Tensor,
    at: Alignment,
    loss: Loss,
    *,
    tile_tokens: int = 7,
    shards: tuple[VocabShard | None, VocabShard | None] = (None, None),
) -> Tensor:
    """The loss per chunk of whole logits."""
    return cross_tokenizer_divergence(
        student,
        DenseLogits(teacher),
        **loss,
        student=AlignedSide(at.student_chunks, at.student_labels, shards[0]),
        teacher_side=AlignedSide(at.teacher_chunks, at.teacher_labels, shards[1]),
        chunks=at.count,
        tile_tokens=tile_tokens,
    )


def gradient_of(values: Tensor, leaf: Tensor) -> Tensor:
    """The gradient of the sum of values per chunk with weights 1, 2, 3..."""
    weights = torch.arange(1, len(values) + 1, dtype=values.dtype)
    (found,) = torch.autograd.grad(values, leaf, weights)
    return found


def padded(values: Tensor, size: int) -> Tensor:
    """Append rows of NaN, so that reading them shows in the result."""
    return torch.nn.functional.pad(values, (0, 0, 0, size - len(values)), value=torch.nan)


def shards_for(rank: int, world: int, sizes: tuple[int, int]) -> tuple[VocabShard, VocabShard]:
    """The shards of student and teacher on one rank, of these padded sizes."""
    return (
        VocabShard.for_rank(SIZES[0], sizes[0], rank, world),
        VocabShard.for_rank(SIZES[1], sizes[1], rank, world),
    )


def aligned_rows(
    problem: AlignedProblem, label_weights: Tensor, *, tile_tokens: int
) -> AlignedRows:
    """The rows of a problem in tiles of so many tokens, with both vocabularies whole."""
    at = problem.at
    plan = TilePlan.of_chunks(
        at.student_chunks,
        at.teacher_chunks,
        at.count,
        tile_tokens=tile_tokens,
        has_label=label_weights > 0,
    )
    sizes = len(problem.weight), len(problem.teacher_weight)
    shard, teacher_shard = (VocabShard(size, 0, size) for size in sizes)
    return AlignedRows(
        plan,
        HiddenState(problem.teacher_hidden, problem.teacher_weight),
        at.student_labels,
        at.teacher_labels,
        shard,
        teacher_shard,
        None,
    )


def aligned_step(
    sizes: tuple[int, int], term: ChunkTerm, *, chunks: int, tile_tokens: int
) -> tuple[Callable[[], None], tuple[Tensor, ...]]:
    """Both passes of a loss and of cross-entropy from hidden states, and the tensors before them.

    sizes: of both vocabularies, two thirds of the smaller one in common. Two heads and the sum of
    gradients are there before.
    """
    problem = AlignedProblem.random(chunks, sizes=sizes, common_tokens=min(sizes) * 2 // 3)
    shard, teacher_shard = (VocabShard(size, 0, size) for size in sizes)
    columns = CommonColumns.of(*problem.ids, [shard], [teacher_shard], 0)
    shared = SharedVocabularies(
        shard,
        teacher_shard,
        columns,
        None,
        None,
        projected=_projected(map_rows(sizes), shard, teacher_shard),
        gold={"strict": GoldColumns.of(columns, (shard, teacher_shard))},
    )
    label_weights = torch.full((len(problem.hidden),), 0.01)
    rows = aligned_rows(problem, label_weights, tile_tokens=tile_tokens)
    weight = problem.weight.requires_grad_()
    student = HiddenState(problem.hidden.requires_grad_(), weight)
    weighted = WeightedTerm(term.on(shared, rows), 1.0, torch.ones(problem.at.count))
    total = torch.zeros(weight.shape)
    work = AlignedLinear(
        rows, (weighted,), LabelLoss(label_weights, 0.5), weight_gradient_sum=total
    )
    before = (problem.hidden, problem.teacher_hidden, weight, problem.teacher_weight, total)
    return lambda: aligned_linear(student, work)[0].backward(), before

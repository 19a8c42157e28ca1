"""Losses per chunk between models with different tokenizers, from logits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.losses.checks import check_per_token, resolve_shard
from megatron_distill.ops.aligned.columns import CommonColumns, TeacherLayout, shards_of
from megatron_distill.ops.aligned.executor import AlignedRows, aligned_divergence
from megatron_distill.ops.aligned.likelihood import LikelihoodTerm
from megatron_distill.ops.aligned.merged_vocabulary import CommonTerm
from megatron_distill.ops.aligned.plan import TilePlan
from megatron_distill.ops.aligned.tile import AlignedTerm
from megatron_distill.ops.divergences import Divergence, WeightedDivergence, divergence_named
from megatron_distill.ops.vocab import VocabShard
from megatron_distill.ops.workspace import chunk_tokens_for
from megatron_distill.signals import DenseLogits, HiddenState

__all__ = ["AlignedSide", "CommonLoss", "LikelihoodLoss", "cross_tokenizer_divergence"]


@dataclass(frozen=True)
class AlignedSide:
    """One model's rows: each predicts a label, and belongs to the chunk of text of that label.

    Attributes:
        chunks: ``[N]`` int64, the number of the row's chunk; -1 for none.
        labels: ``[N]`` int64, the label that the row predicts; needed for likelihood alone.
        shard: this rank's columns of the model's vocabulary; None if it holds all of them.
    """

    chunks: Tensor
    labels: Tensor | None = None
    shard: VocabShard | None = None


@dataclass(frozen=True)
class LikelihoodLoss:
    """A binary divergence between both models' probabilities of each chunk's text.

    The probability of a text is the product over its tokens, to the power ``1 / tau`` (approximate
    likelihood matching, Minixhofer et al., arXiv 2503.20083). Defined on every chunk.

    Raises:
        ValueError: an unknown divergence or parameter, or one that is not defined on two classes.
    """

    divergence: str = "forward_kl"
    tau: float = 1.0
    parameters: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require_positive("tau", self.tau)
        _f_divergence(self.divergence, self.parameters)


@dataclass(frozen=True)
class CommonLoss:
    """A divergence over the tokens of both vocabularies, and one class of all further tokens.

    Defined on chunks of one token on each side. Where one of the vocabularies has no further token,
    both models are normalised over the common ones. With ``top_k`` the classes are the teacher's
    k most probable common tokens, and one of all others.

    Attributes:
        student_ids: ``[P]`` int64, the student's id of each common token.
        teacher_ids: ``[P]`` int64, the teacher's id of the same token.
        divergence: an f-divergence of the table.
        temperature: of both softmaxes.
        top_k: None for all common tokens.
        parameters: of the divergence.

    Raises:
        ValueError: an unknown divergence or parameter, or one that is no f-divergence.
    """

    student_ids: Tensor
    teacher_ids: Tensor
    divergence: str = "forward_kl"
    temperature: float = 1.0
    top_k: int | None = None
    parameters: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require_positive("temperature", self.temperature)
        _f_divergence(self.divergence, self.parameters)
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; it must be at least 1")


def cross_tokenizer_divergence(
    student_logits: Tensor,
    teacher: DenseLogits | HiddenState,
    loss: LikelihoodLoss | CommonLoss,
    *,
    student: AlignedSide,
    teacher_side: AlignedSide,
    chunks: int,
    group: dist.ProcessGroup | None = None,
    tile_tokens: int | None = None,
) -> Tensor:
    """Divergence of the student from a teacher with a different tokenizer, for each chunk of text.

    Shapes: student logits ``[N, S]`` and the teacher's M rows over this rank's columns ->
    ``[chunks]`` fp32 in nats (fp64 for fp64 logits), differentiable in the student's logits. Zero
    for chunks on which the loss is not defined. Inputs are not modified. The gradient is complete
    on every rank; rows of no chunk and padded columns have none. Logits in fp32 exist for
    ``tile_tokens`` rows at once.

    Collective, forward only: over ``group`` for likelihood one all-gather of 24 bytes per row of
    each model. For common tokens per chunk of one token on each side: one of 32 bytes (48 with
    ``top_k``), and those of `token_divergence`. Without ``top_k`` also one all-to-all of the
    teacher's logits (or head), which brings common tokens to the rank of the student's column.

    Raises:
        ValueError: shapes, chunk numbers, shards, group or token ids do not fit.
    """
    source = DenseLogits(student_logits)
    shard, ranks = resolve_shard(source.width, student.shard, group)
    teacher_shard = _teacher_shard(teacher.width, teacher_side.shard, ranks)
    check_per_token(source.tokens, student_chunks=student.chunks)
    check_per_token(teacher.tokens, teacher_chunks=teacher_side.chunks)
    if tile_tokens is None:
        tile_tokens = chunk_tokens_for(max(shard.width, teacher_shard.width), student_logits.device)
    plan = TilePlan.of_chunks(student.chunks, teacher_side.chunks, chunks, tile_tokens=tile_tokens)
    labels = _labels("student", student, loss, shard)
    teacher_labels = _labels("teacher", teacher_side, loss, teacher_shard)
    term: AlignedTerm
    if isinstance(loss, LikelihoodLoss):
        term = LikelihoodTerm(
            "likelihood", _f_divergence(loss.divergence, loss.parameters), loss.tau
        )
    else:
        term, teacher, teacher_shard = _common(loss, teacher, shard, teacher_shard, ranks)
    rows = AlignedRows(
        plan.to(student_logits.device),
        teacher,
        labels.to(student_logits.device),
        teacher_labels.to(student_logits.device),
        shard,
        teacher_shard,
        ranks,
    )
    return aligned_divergence(source, rows, term)


def _common(
    loss: CommonLoss,
    teacher: DenseLogits | HiddenState,
    shard: VocabShard,
    teacher_shard: VocabShard,
    group: dist.ProcessGroup | None,
) -> tuple[CommonTerm, DenseLogits | HiddenState, VocabShard]:
    """The term, and the teacher in the layout that it needs."""
    student_ids, teacher_ids = loss.student_ids.cpu(), loss.teacher_ids.cpu()
    student_shards, teacher_shards = shards_of(shard, group), shards_of(teacher_shard, group)
    if group is not None and loss.top_k is None:
        layout = TeacherLayout.of(student_ids, teacher_ids, student_shards, teacher_shards, group)
        teacher_ids, teacher_shards = layout.new_ids[teacher_ids], list(layout.shards)
        teacher, teacher_shard = _rearranged(teacher, layout), layout.shard
    rank = 0 if group is None else dist.get_rank(group)
    columns = CommonColumns.of(student_ids, teacher_ids, student_shards, teacher_shards, rank)
    weighted = WeightedDivergence(
        _f_divergence(loss.divergence, loss.parameters), loss.temperature, 1.0
    )
    device = teacher.logits.device if isinstance(teacher, DenseLogits) else teacher.weight.device
    term = CommonTerm("common", columns.to(device), weighted, loss.top_k)
    return term, teacher, teacher_shard


def _rearranged(
    teacher: DenseLogits | HiddenState, layout: TeacherLayout
) -> DenseLogits | HiddenState:
    if isinstance(teacher, DenseLogits):
        return DenseLogits(layout.rows(teacher.logits.detach().t()).t().contiguous())
    bias = None if teacher.bias is None else layout.rows(teacher.bias)
    return replace(teacher, weight=layout.rows(teacher.weight), bias=bias)


def _teacher_shard(
    width: int, shard: VocabShard | None, group: dist.ProcessGroup | None
) -> VocabShard:
    if shard is None and group is not None:
        raise ValueError(
            "teacher_side.shard is not given; the ranks of the group hold a part of the teacher's "
            "vocabulary each, with its own real and padded size"
        )
    shard = shard or VocabShard(width, 0, width)
    if width != shard.width:
        raise ValueError(
            f"the teacher has {width} vocabulary columns on this rank, "
            f"its shard [{shard.start}, {shard.stop}) has {shard.width}"
        )
    if group is None and (shard.start > 0 or shard.stop < shard.size):
        raise ValueError(
            f"the teacher's shard [{shard.start}, {shard.stop}) is part of a vocabulary of "
            f"{shard.size}; pass the tensor-parallel group that holds the rest"
        )
    return shard


def _labels(
    name: str, side: AlignedSide, loss: LikelihoodLoss | CommonLoss, shard: VocabShard
) -> Tensor:
    """The side's labels, zeros if the loss needs none."""
    if side.labels is None:
        if isinstance(loss, LikelihoodLoss):
            raise ValueError(f"likelihood needs the labels of the {name}'s rows; labels is None")
        return torch.zeros_like(side.chunks)
    check_per_token(len(side.chunks), **{f"{name}_labels": side.labels})
    counts = side.labels[side.chunks >= 0]
    if counts.numel() and not (int(counts.min()) >= 0 and int(counts.max()) < shard.size):
        raise ValueError(
            f"labels of the {name} in chunks are from {int(counts.min())} to "
            f"{int(counts.max())}; its vocabulary has {shard.size}"
        )
    return side.labels


def _f_divergence(name: str, parameters: Mapping[str, float]) -> Divergence:
    """The divergence of that name.

    Raises:
        ValueError: unknown, or its value changes where a class is split.
    """
    found = divergence_named(name, **parameters)
    if found.head_mass is not None:
        raise ValueError(
            f"{name} is not defined between tokenizers: it divides the tokens by the teacher's "
            "probability of each, and here a class may be many tokens; use forward_kl, reverse_kl "
            "or js_divergence"
        )
    return found


def _require_positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} is {value}; it must be positive and finite")

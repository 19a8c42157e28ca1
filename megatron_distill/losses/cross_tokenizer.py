"""Losses per chunk between models with different tokenizers, from logits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.align.vocabulary_map import CommonTokenRule
from megatron_distill.losses.checks import check_per_token, resolve_shard
from megatron_distill.losses.chunk_terms import Alignment, ChunkTerm, SharedVocabularies
from megatron_distill.ops.aligned.columns import CommonColumns, TeacherLayout, shards_of
from megatron_distill.ops.aligned.executor import AlignedRows, aligned_divergence
from megatron_distill.ops.aligned.gold import GoldColumns
from megatron_distill.ops.aligned.plan import TilePlan
from megatron_distill.ops.aligned.projected_rows import ProjectedRows
from megatron_distill.ops.vocab import VocabShard
from megatron_distill.ops.workspace import tile_tokens_for
from megatron_distill.signals import DenseLogits, HiddenState

__all__ = ["AlignedSide", "cross_tokenizer_divergence"]


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


def cross_tokenizer_divergence(
    student_logits: Tensor,
    teacher: DenseLogits | HiddenState,
    *,
    alignment: Alignment,
    divergence: str,
    student: AlignedSide,
    teacher_side: AlignedSide,
    chunks: int,
    common_ids: tuple[Tensor, Tensor] | None = None,
    map_rows: tuple[Tensor, Tensor, Tensor] | None = None,
    temperature: float = 1.0,
    scale_by_temperature_squared: bool = False,
    top_k: int | None = None,
    uncommon_top_k: int = 256,
    published: bool = False,
    group: dist.ProcessGroup | None = None,
    tile_tokens: int | None = None,
    **parameters: float,
) -> Tensor:
    """Divergence of the student from a teacher with a different tokenizer, for each chunk of text.

    Shapes: student logits ``[N, S]`` and the teacher's M rows over this rank's columns ->
    ``[chunks]`` fp32 in nats (fp64 for fp64 logits). Differentiable in the student's logits. Zero
    for chunks on which the loss is not defined. Inputs are not modified. The gradient is complete
    on every rank; rows of no chunk and padded columns have none. ``alignment``, ``divergence``,
    ``temperature``, ``top_k``, ``uncommon_top_k``, ``published`` and ``parameters`` are those of
    `ChunkTerm`. ``common_ids``, for common and gold, are the student's and the teacher's id ``[P]``
    int64 of each token that both have. Where one vocabulary has no further token, both models are
    normalised over the common ones. ``map_rows``, for projection, are the rows of a vocabulary map.
    Offsets ``[S + 1]`` int64, teacher ids ``[E]`` int64, weights ``[E]`` of sum one in each row.
    Copies of logits exist for ``tile_tokens`` rows at once.

    Likelihood: approximate likelihood matching, Minixhofer et al., arXiv 2503.20083.

    Collective, forward only: over ``group`` for likelihood one all-gather of 24 bytes per row of
    each model. For common tokens per chunk of one token on each side: one of 32 bytes (48 with
    ``top_k``), and those of `token_divergence`. Without ``top_k`` also one all-to-all of the
    teacher's logits (or head), which brings common tokens to the rank of the student's column; for
    gold too. For losses on chunk means 16 bytes per row of each model, 8 more of the student for
    the gradient. Also per chunk those of `ProjectionTerm`, `GoldTerm` or `UldTerm`.

    Raises:
        ValueError: shapes, chunk numbers, shards, group or token ids do not fit; an unknown
            divergence or parameter, or one that is not defined between tokenizers.
    """
    term = ChunkTerm(
        alignment,
        divergence,
        temperature=temperature,
        scale_by_temperature_squared=scale_by_temperature_squared,
        top_k=top_k,
        parameters=parameters,
        uncommon_top_k=uncommon_top_k,
        published=published,
    )
    source = DenseLogits(student_logits)
    shard, ranks = resolve_shard(source.width, student.shard, group)
    teacher_shard = _teacher_shard(teacher.width, teacher_side.shard, ranks)
    check_per_token(source.tokens, student_chunks=student.chunks)
    check_per_token(teacher.tokens, teacher_chunks=teacher_side.chunks)
    if tile_tokens is None:
        tile_tokens = tile_tokens_for(max(shard.width, teacher_shard.width), student_logits.device)
    plan = TilePlan.of_chunks(student.chunks, teacher_side.chunks, chunks, tile_tokens=tile_tokens)
    labels = _labels("student", student, alignment, shard)
    teacher_labels = _labels("teacher", teacher_side, alignment, teacher_shard)
    vocabularies = SharedVocabularies(shard, teacher_shard, None, None, ranks)
    device = student_logits.device
    if alignment in ("common", "gold"):
        given = _checked_ids(alignment, common_ids)
        k = top_k if alignment == "common" else None
        vocabularies, teacher = _with_common(vocabularies, teacher, given, k)
    if alignment == "projection":
        projected = _projected(map_rows, shard, teacher_shard).to(device)
        vocabularies = replace(vocabularies, projected=projected)
    rows = AlignedRows(
        plan.to(device),
        teacher,
        labels.to(device),
        teacher_labels.to(device),
        shard,
        vocabularies.teacher_shard,
        ranks,
    )
    values = aligned_divergence(source, rows, term.on(vocabularies, rows))
    return values if term.temperature_factor == 1 else values * term.temperature_factor


def _checked_ids(
    alignment: Alignment, common_ids: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    if common_ids is None:
        raise ValueError(
            f"alignment {alignment!r} needs common_ids, the student's and the teacher's id of each "
            "token that both have"
        )
    return common_ids


def _projected(
    map_rows: tuple[Tensor, Tensor, Tensor] | None, shard: VocabShard, teacher_shard: VocabShard
) -> ProjectedRows:
    """The rows of this rank's student columns."""
    if map_rows is None:
        raise ValueError(
            "alignment 'projection' needs map_rows: offsets, teacher ids and weights of the rows "
            "of a vocabulary map"
        )
    offsets, ids, weights = (values.cpu() for values in map_rows)
    if len(offsets) != shard.size + 1:
        raise ValueError(
            f"the offsets of map_rows have {len(offsets)} entries; the student's vocabulary of "
            f"{shard.size} needs {shard.size + 1}"
        )
    is_reached = torch.zeros(teacher_shard.size, dtype=torch.bool)
    is_reached[ids[ids < teacher_shard.size]] = True
    first = min(shard.start, shard.size)
    own = offsets[first : first + shard.real_width + 1]
    part = slice(int(own[0]), int(own[-1]))
    return ProjectedRows.of(
        own - own[0],
        ids[part],
        weights[part],
        unreached_ids=(~is_reached).nonzero().squeeze(1),
        shards=(shard, teacher_shard),
    )


def _with_common(
    vocabularies: SharedVocabularies,
    teacher: DenseLogits | HiddenState,
    common_ids: tuple[Tensor, Tensor],
    top_k: int | None,
) -> tuple[SharedVocabularies, DenseLogits | HiddenState]:
    """Both vocabularies with their common tokens, and the teacher in the layout that is needed."""
    student_ids, teacher_ids = (ids.cpu() for ids in common_ids)
    shard, group = vocabularies.teacher_shard, vocabularies.group
    student_shards = shards_of(vocabularies.student_shard, group)
    teacher_shards = shards_of(shard, group)
    new_ids = None
    if group is not None and top_k is None:
        layout = TeacherLayout.of(student_ids, teacher_ids, student_shards, teacher_shards, group)
        new_ids, teacher_shards, shard = layout.new_ids, list(layout.shards), layout.shard
        teacher_ids, teacher = new_ids[teacher_ids], teacher.with_columns(layout.rows)
    rank = 0 if group is None else dist.get_rank(group)
    columns = CommonColumns.of(student_ids, teacher_ids, student_shards, teacher_shards, rank)
    columns, own = columns.to(teacher.device), vocabularies.student_shard
    gold: dict[CommonTokenRule, GoldColumns] = {}
    if columns.is_aligned:
        gold["strict"] = GoldColumns.of(columns, (own, shard))
    return SharedVocabularies(own, shard, columns, new_ids, group, gold=gold), teacher


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


def _labels(name: str, side: AlignedSide, alignment: Alignment, shard: VocabShard) -> Tensor:
    """The side's labels, zeros if the loss needs none."""
    if side.labels is None:
        if alignment == "likelihood":
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

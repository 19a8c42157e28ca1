"""The objective of a micro-batch whose teacher reads the same texts in tokens of its own.

All rows of a chunk must be on one rank. Under context parallelism the hidden states of both models
are gathered over the context group, and each rank takes chunks of which it has a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_distill.losses import ChunkTerm, SharedVocabularies, token_weights
from megatron_distill.ops.aligned.executor import (
    AlignedLinear,
    AlignedRows,
    LabelLoss,
    WeightedTerm,
    aligned_linear,
)
from megatron_distill.ops.aligned.plan import TilePlan
from megatron_distill.ops.fused_linear import Partition
from megatron_distill.runtime.batch import Batch, StepBatches, zigzag_index
from megatron_distill.signals import HiddenState, IdTarget, LogitSource

__all__ = ["AlignedLoss", "HostRows"]


@dataclass(frozen=True)
class HostRows:
    """The rows of both models that a rank's loss may use, on the host.

    Under context parallelism they are those of all context ranks, one rank's after the other's.

    Attributes:
        student_labels: int64 ``[N]``, ids that the student's rows predict.
        teacher_labels: int64 ``[M]``, ids of the teacher's tokenizer.
        student_chunks: int64 ``[N]``, the chunk of each label; -1 for none, or one of another rank.
        teacher_chunks: int64 ``[M]`` likewise.
        ce_weights: fp32 ``[N]``, zero in the parts of other ranks.
        row_sources: int64 ``[N]``, index of the blended source.
        chunk_sources: int64 ``[C]`` likewise.
    """

    student_labels: Tensor
    teacher_labels: Tensor
    student_chunks: Tensor
    teacher_chunks: Tensor
    ce_weights: Tensor
    row_sources: Tensor
    chunk_sources: Tensor

    @classmethod
    def of(cls, batch: Batch, *, rank: int, size: int) -> HostRows:
        """The rows of a micro-batch for context-parallel rank `rank` of `size`."""
        whole = batch.on_host if size == 1 else batch.on_host.unsharded
        assert whole is not None, "a sharded batch remembers the whole one"
        teacher, chunks_bS = whole.teacher, whole.chunks_bs
        assert teacher is not None
        assert teacher.chunks_bs is not None
        assert chunks_bS is not None
        student_chunks, teacher_chunks = (
            _by_rank(chunks_bS, size),
            _by_rank(teacher.chunks_bs, size),
        )
        ranks = torch.arange(size).repeat_interleave(chunks_bS.shape[1] // size)
        ranks = ranks.expand_as(chunks_bS).reshape(-1)
        sources = torch.zeros_like(ranks)
        if whole.sources_b is not None:
            sources = whole.sources_b.unsqueeze(1).expand_as(chunks_bS).reshape(-1)
        count = whole.chunk_count
        owner = _per_chunk(student_chunks, ranks, count)
        ce_weights = _by_rank(whole.ce_weights_bs, size).float()
        return cls(
            student_labels=_by_rank(whole.labels_bs, size),
            teacher_labels=_by_rank(teacher.labels_bs, size),
            student_chunks=_owned(student_chunks, owner == rank),
            teacher_chunks=_owned(teacher_chunks, owner == rank),
            ce_weights=torch.where(ranks == rank, ce_weights, 0.0),
            row_sources=sources,
            chunk_sources=_per_chunk(student_chunks, sources, count),
        )


def _by_rank(values_bS: Tensor, size: int) -> Tensor:
    """``[b * S]``: in each sequence the positions of one context rank after those of another."""
    if size == 1:
        return values_bS.reshape(-1)
    length = values_bS.shape[1]
    order = torch.cat([zigzag_index(length, rank=rank, size=size) for rank in range(size)])
    return values_bS[:, order].reshape(-1)


def _per_chunk(chunks: Tensor, values: Tensor, count: int) -> Tensor:
    """The largest value among the rows of each chunk."""
    inside = chunks >= 0
    return values.new_zeros(count).scatter_reduce_(0, chunks[inside], values[inside], "amax")


def _owned(chunks: Tensor, is_owned: Tensor) -> Tensor:
    if not len(is_owned):
        return chunks
    return chunks.where((chunks >= 0) & is_owned[chunks.clamp(min=0)], -1)


@dataclass(frozen=True)
class AlignedLoss:
    """Cross-entropy and terms on chunks, from the final hidden states of both models.

    Attributes:
        vocabularies: both vocabularies on this rank.
        tile_tokens: rows of each model whose logits are in memory at once, the same on all ranks.
        context_rank: this rank among the context-parallel ranks.
        context_size: their number.
    """

    vocabularies: SharedVocabularies
    tile_tokens: int
    context_rank: int
    context_size: int

    def __call__(
        self,
        student: HiddenState,
        teacher: LogitSource | None,
        batch: Batch,
        step: StepBatches,
        *,
        ce_weight: float,
        terms: Sequence[ChunkTerm],
        sources: int,
        weight_gradient_sum: Tensor | None,
        targets: Sequence[IdTarget] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """This micro-batch's share of the objective, and of the report: scalars, or per source.

        Chunks and labels are divided by their numbers in the global batch. `targets`: of each term,
        in the order of `HostRows`, for a teacher without logits.

        Collective: those of `aligned_linear`.
        """
        device, vocabularies = student.hidden.device, self.vocabularies
        rows = HostRows.of(batch, rank=self.context_rank, size=self.context_size)
        plan = TilePlan.of_chunks(
            rows.student_chunks,
            rows.teacher_chunks,
            len(rows.chunk_sources),
            tile_tokens=self.tile_tokens,
            has_label=rows.ce_weights != 0,
        ).to(device)
        is_pair = plan.pair_chunks()
        of_chunks = token_weights(plan.used_chunks(), step.chunks)
        of_pairs = token_weights(is_pair, step.pairs)
        has_parts = sources > 1
        aligned = AlignedRows(
            plan=plan,
            teacher=teacher,
            student_labels=_moved(rows.student_labels, device),
            teacher_labels=vocabularies.teacher_numbers(_moved(rows.teacher_labels, device)),
            student_shard=vocabularies.student_shard,
            teacher_shard=vocabularies.teacher_shard,
            group=vocabularies.group,
        )
        given: Sequence[IdTarget | None] = targets or [None] * len(terms)
        work = AlignedLinear(
            rows=aligned,
            terms=tuple(
                WeightedTerm(
                    term.on(vocabularies, aligned, target),
                    term.weight * term.temperature_factor,
                    of_pairs if term.is_of_pairs else of_chunks,
                )
                for term, target in zip(terms, given, strict=True)
            ),
            label_loss=LabelLoss(
                token_weights(_moved(rows.ce_weights, device), step.ce_tokens), ce_weight
            ),
            chunk_parts=_parts(rows.chunk_sources, sources, device) if has_parts else None,
            row_parts=_parts(rows.row_sources, sources, device) if has_parts else None,
            weight_gradient_sum=weight_gradient_sum,
        )
        total, sums = aligned_linear(student, work)
        report = dict(zip(work.sum_names, sums.unbind(), strict=True))
        kd = torch.zeros_like(report["ce"])
        for term in terms:
            report[term.name] = report[term.name] * term.temperature_factor
            kd = kd + term.weight * report[term.name]
        return total, report | {"kd": kd}


def _parts(sources: Tensor, count: int, device: torch.device) -> Partition:
    return Partition(_moved(sources, device), count)


def _moved(values: Tensor, device: torch.device) -> Tensor:
    """On the device; from pinned memory, so that the host does not wait."""
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)

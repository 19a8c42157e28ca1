"""The objective of a micro-batch whose teacher reads the same texts in tokens of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_distill.data.aligned.rows import ChunkPlanner, ChunkRows
from megatron_distill.losses import ChunkTerm, SharedVocabularies, token_weights
from megatron_distill.ops.aligned.executor import (
    AlignedLinear,
    AlignedRows,
    LabelLoss,
    WeightedTerm,
    aligned_linear,
)
from megatron_distill.ops.fused_linear import Partition
from megatron_distill.runtime.batch import Batch, StepBatches
from megatron_distill.signals import HiddenState, IdTarget, LogitSource

__all__ = ["AlignedLoss"]


@dataclass(frozen=True)
class AlignedLoss:
    """Cross-entropy and terms on chunks, from the final hidden states of both models.

    Attributes:
        vocabularies: both vocabularies on this rank.
        planner: plans the rows of each micro-batch, before the step.
    """

    vocabularies: SharedVocabularies
    planner: ChunkPlanner

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

        The batch is planned by the planner. Chunks and labels are divided by their numbers in the
        global batch. `targets`: of each term, in the order of `ChunkRows`, for a teacher without
        logits.

        Collective: those of `aligned_linear`.
        """
        vocabularies, rows = self.vocabularies, batch.planned
        assert isinstance(rows, ChunkRows), "the loader plans the rows of every batch"
        plan = rows.plan
        is_pair = plan.pair_chunks()
        of_chunks = token_weights(plan.used_chunks(), step.chunks)
        of_pairs = token_weights(is_pair, step.pairs)
        has_parts = sources > 1
        aligned = AlignedRows(
            plan=plan,
            teacher=teacher,
            student_labels=rows.student_labels,
            teacher_labels=vocabularies.teacher_numbers(rows.teacher_labels),
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
            label_loss=LabelLoss(token_weights(rows.ce_weights, step.ce_tokens), ce_weight),
            chunk_parts=Partition(rows.chunk_sources, sources) if has_parts else None,
            row_parts=Partition(rows.row_sources, sources) if has_parts else None,
            weight_gradient_sum=weight_gradient_sum,
        )
        total, sums = aligned_linear(student, work)
        report = dict(zip(work.sum_names, sums.unbind(), strict=True))
        kd = torch.zeros_like(report["ce"])
        for term in terms:
            report[term.name] = report[term.name] * term.temperature_factor
            kd = kd + term.weight * report[term.name]
        return total, report | {"kd": kd}

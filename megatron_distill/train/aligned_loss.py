"""The objective of a micro-batch whose teacher reads the same texts in tokens of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_distill.data.aligned.rows import ChunkPlanner, ChunkRows
from megatron_distill.data.samples import WEIGHT_UNITS
from megatron_distill.losses import ChunkTerm, SharedVocabularies, ranked_term, token_weights
from megatron_distill.ops.aligned.executor import (
    AlignedLinear,
    AlignedRows,
    LabelLoss,
    WeightedTerm,
    aligned_linear,
)
from megatron_distill.ops.factors import scaled
from megatron_distill.ops.fused_linear import Partition
from megatron_distill.runtime.batch import Batch, StepBatches
from megatron_distill.signals import HiddenState, IdTarget, LogitSource, SignalsByTeacher
from megatron_distill.train.metrics import part_of
from megatron_distill.train.several_loss import TeacherFigures

__all__ = ["AlignedLoss", "chunk_share", "end_share"]

_OF = "#"


@dataclass(frozen=True)
class AlignedLoss:
    """Cross-entropy and terms on chunks, from the final hidden states of both models.

    Attributes:
        vocabularies: both vocabularies on this rank.
        planner: plans the rows of each micro-batch, before the step.
        teacher: name and number of the teacher among several; None with one.
    """

    vocabularies: SharedVocabularies
    planner: ChunkPlanner
    teacher: tuple[str, int] | None = None

    def report_names(self, terms: Sequence[ChunkTerm]) -> tuple[str, ...]:
        """Entries that one of several teachers adds to a report: its shares of chunks and pairs,
        and with a top-k its mass."""
        if self.teacher is None:
            return ()
        kinds = ("chunks", "pairs", *(("topk_mass",) if ranked_term(terms) else ()))
        return tuple(f"{self.teacher[0]}{_OF}{kind}" for kind in kinds)

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
        has_parts, ranked = sources > 1, ranked_term(terms)
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
                    self._chunk_weights(rows, term, step),
                )
                for term, target in zip(terms, given, strict=True)
            ),
            label_loss=LabelLoss(token_weights(rows.ce_weights, step.ce_tokens), ce_weight),
            chunk_parts=Partition(rows.chunk_sources, sources) if has_parts else None,
            row_parts=Partition(rows.row_sources, sources) if has_parts else None,
            weight_gradient_sum=weight_gradient_sum,
            ranked=None if ranked is None else ranked.name,
        )
        total, sums = aligned_linear(student, work)
        report = dict(zip(work.sum_names, sums.unbind(), strict=True))
        kd = torch.zeros_like(report["ce"])
        for term in terms:
            report[term.name] = report[term.name] * term.temperature_factor
            kd = kd + scaled(report[term.name], term.weight)
        return total, report | {"kd": kd}

    def _chunk_weights(self, rows: ChunkRows, term: ChunkTerm, step: StepBatches) -> Tensor:
        """The weight of each chunk in the mean of a term, fp32 ``[C]``.

        A term without teachers of its own has chunks of the teacher's samples alone, divided by the
        number of all. So samples count alike for every teacher.
        """
        weights = _shares(rows, step, of_pairs=term.is_of_pairs)
        if self.teacher is None or term.teachers is not None:
            return weights
        return torch.where(rows.chunk_teachers == self.teacher[1], weights, 0.0)

    def added_to(
        self,
        given: tuple[Tensor, dict[str, Tensor], dict[str, Tensor]],
        student: HiddenState,
        signal: SignalsByTeacher,
        batch: Batch,
        step: StepBatches,
        *,
        terms: Sequence[ChunkTerm],
        sources: int,
        weight_gradient_sum: Tensor | None,
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Add the terms of this teacher to the total, report and entries of several teachers.

        A micro-batch for which the teacher did not run has none of them.

        Collective: those of `aligned_linear`.
        """
        total, report, entries = given
        assert self.teacher is not None, "the teacher is one of several"
        name = self.teacher[0]
        names = self.report_names(terms)
        entries = entries | dict.fromkeys(names, total.detach().new_zeros(()))
        own = signal.by_teacher.get(name)
        if own is None:
            return total, report, entries
        source = own.logit_source()
        more, of_chunks = self(
            student,
            source,
            batch,
            step,
            ce_weight=0.0,
            terms=terms,
            sources=sources,
            weight_gradient_sum=weight_gradient_sum,
            targets=own.targets(terms) if source is None else None,
        )
        shares = {term.name: of_chunks[term.name] for term in terms}
        report = report | shares | {"kd": report["kd"] + of_chunks["kd"]}
        rows = batch.planned
        assert isinstance(rows, ChunkRows), "the loader plans the rows of every batch"
        is_own = rows.chunk_teachers == self.teacher[1]
        weights = (_shares(rows, step, of_pairs=of_pairs) for of_pairs in (False, True))
        own_shares = [torch.where(is_own, of_chunks, 0.0).sum() for of_chunks in weights]
        if ranked_term(terms) is not None:
            mass = of_chunks["topk_mass"]
            own_shares.append(mass[0] if sources > 1 else mass)
        entries = entries | dict(zip(names, own_shares, strict=True))
        return total + more, report, entries

    def take_figures(
        self, values: dict[str, float], terms: Sequence[ChunkTerm], *, chunks: float, pairs: float
    ) -> TeacherFigures:
        """Take the entries of `report_names` out of a step's values; return the teacher's figures.

        Its numbers of chunks, the weighted sum of its terms' means over its own chunks, and its
        mass of the first top-k. `chunks`, `pairs`: the divisors of the values.
        """
        assert self.teacher is not None, "the teacher is one of several"
        own = [values.pop(name) for name in self.report_names(terms)]
        loss, trained = 0.0, [0.0, 0.0]
        for term in terms:
            kind = int(term.is_of_pairs)
            share = 1.0 if term.teachers is not None else own[kind]
            trained[kind] = max(trained[kind], share)
            loss += float(term.weight) * part_of(values[term.name], share)
        found = {"chunks": _in_units(trained[0] * chunks)}
        if any(term.is_of_pairs for term in terms):
            found["pairs"] = _in_units(trained[1] * pairs)
        if any(trained):
            found["kd_loss"] = loss
        ranked = ranked_term(terms)
        if ranked is not None and any(trained):
            share = 1.0 if ranked.teachers is not None else own[int(ranked.is_of_pairs)]
            found["topk_mass"] = part_of(own[2], share)
        return {self.teacher[0]: found}


def chunk_share(batch: Batch, step: StepBatches, *, of_pairs: bool) -> Tensor:
    """Return a micro-batch's share of the step's chunks, or of those of one token on each side.

    A scalar; of the chunks of this context rank.
    """
    rows = batch.planned
    assert isinstance(rows, ChunkRows), "the loader plans the rows of every batch"
    return _shares(rows, step, of_pairs=of_pairs).sum()


def end_share(batch: Batch, step: StepBatches) -> Tensor:
    """Return a micro-batch's share of the step's chunk ends, a scalar; of this context rank."""
    rows = batch.planned
    assert isinstance(rows, ChunkRows), "the loader plans the rows of every batch"
    assert rows.ends is not None, "with losses between layers the loader finds the ends"
    return token_weights(rows.ends.weights_sb, step.chunk_ends).sum()


def _in_units(count: float) -> float:
    """A count without the rounding of its share; weights are multiples of a unit."""
    return round(count * WEIGHT_UNITS) / WEIGHT_UNITS


def _shares(rows: ChunkRows, step: StepBatches, *, of_pairs: bool) -> Tensor:
    """The share of each chunk in the mean of the global batch, zero for those of other ranks."""
    plan = rows.plan
    mask, count = (
        (plan.pair_chunks(), step.pairs) if of_pairs else (plan.used_chunks(), step.chunks)
    )
    return token_weights(mask * rows.chunk_weights, count)

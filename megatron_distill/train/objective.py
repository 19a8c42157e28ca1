"""The objective as a Megatron loss function: a hidden state to a loss and a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from megatron_distill.data.aligned.rows import ChunkPlanner
from megatron_distill.losses import (
    ChunkTerm,
    LossWeights,
    Term,
    fused_linear_objective,
    ranked_term,
    token_weights,
)
from megatron_distill.models.gpt import hidden_for_head
from megatron_distill.ops import LogitRule, VocabShard
from megatron_distill.ops.factors import Factor
from megatron_distill.ops.fused_linear import Partition
from megatron_distill.runtime.batch import Batch, LabelCounts, StepBatches
from megatron_distill.runtime.groups import Groups
from megatron_distill.signals import HiddenState, Signal, SignalsByTeacher
from megatron_distill.train.aligned_loss import AlignedLoss
from megatron_distill.train.features import FeatureLosses
from megatron_distill.train.metrics import BY_SOURCE, OnChunks, source_keys, split_report
from megatron_distill.train.several_loss import (
    SeveralLoss,
    TeacherFigures,
    take_teacher_figures,
)


class Head(Protocol):
    """The output head of the last stage."""

    def head_weight(self) -> Tensor:
        """This rank's rows of the head [V, H]."""
        ...

    def weight_gradient_sum(self) -> Tensor | None:
        """The buffer for this rank's gradient [V, H]; None where autograd returns the gradient."""
        ...


class MicroBatchObjective(Protocol):
    """Interface between the student's schedule and the objective of a micro-batch."""

    @property
    def features(self) -> FeatureLosses | None:
        """The losses between hidden states, the same for all micro-batches."""
        ...

    @property
    def feature_weights(self) -> tuple[Factor, ...]:
        """The weight of each feature pair's mean loss."""
        ...

    @property
    def report_names(self) -> tuple[str, ...]:
        """The entries of every report, in one order on all ranks."""
        ...

    @property
    def source_report_names(self) -> tuple[str, ...]:
        """The entries of a report per source, in one order on all ranks."""
        ...

    def __call__(
        self,
        hidden_sbh: Tensor,
        head: Head,
        batch: Batch,
        signal: Signal | None,
        step: StepBatches,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss to back-propagate and a report, fp32 scalars."""
        ...


@dataclass(frozen=True)
class TokenObjective:
    """Cross-entropy and divergences of one student over its sharded head, and feature losses.

    Every sum is divided by a count over the whole global batch, known before the schedule starts.
    The result therefore does not depend on the number of micro-batches or data-parallel ranks.
    """

    ce_weight: float
    terms: Sequence[Term | ChunkTerm]
    metrics: tuple[str, ...]  # entries of a report besides the losses; empty without a teacher
    chunk_tokens: int | None
    shard: VocabShard
    logit_rule: LogitRule
    groups: Groups
    source_names: tuple[str, ...] = ()  # sources of a blend; each has entries in the report
    features: FeatureLosses | None = None
    # Weights of the feature pairs in the gradient; replaced in each step whose weights change.
    feature_weights: tuple[Factor, ...] = ()
    # The loss of terms between two tokenizers; None where the teacher has the student's.
    aligned: AlignedLoss | None = None
    # The loss with several teachers; None with one. With both, `aligned` adds the terms of one.
    several: SeveralLoss | None = None

    @property
    def report_names(self) -> tuple[str, ...]:
        """The entries of every report, in one order on all ranks."""
        if self.several is None:
            return ("total", *self._token_names)
        return ("total", *self._token_names, *self.several.report_names, *self._chunk_shares)

    @property
    def source_report_names(self) -> tuple[str, ...]:
        """The entries of a report per source, in one order on all ranks."""
        return source_keys(self._token_names, self.source_names)

    @property
    def _chunk_shares(self) -> tuple[str, ...]:
        return () if self.aligned is None else self.aligned.report_names(self._chunk_terms)

    @property
    def _chunk_terms(self) -> list[ChunkTerm]:
        return [term for term in self.terms if isinstance(term, ChunkTerm)]

    @property
    def _token_names(self) -> tuple[str, ...]:
        if not self.metrics and not self.terms:
            return ("ce",)
        return ("ce", "kd", *(term.name for term in self.terms), *self.metrics)

    @property
    def planner(self) -> ChunkPlanner | None:
        """Of the rows of terms between two tokenizers; None without such terms."""
        if self.aligned is None:
            return None
        return replace(self.aligned.planner, has_ends=self.features is not None)

    @property
    def on_chunks(self) -> OnChunks | None:
        """The counts of terms between two tokenizers; None without such terms."""
        terms = self._chunk_terms
        if not terms:
            return None
        shares, ranked = self._chunk_shares, ranked_term(terms)
        masses = shares[2:] if self.several is not None else ("topk_mass",)
        of_pairs = (*shares[1:2], *(masses if ranked is not None and ranked.is_of_pairs else ()))
        return OnChunks(
            {term.name: float(term.weight) for term in self.terms},
            frozenset((*shares, *masses, *(term.name for term in terms))),
            frozenset((*of_pairs, *(term.name for term in terms if term.is_of_pairs))),
            frozenset(() if self.features is None else self.features.report_names),
        )

    def take_teacher_figures(self, values: dict[str, float], counts: LabelCounts) -> TeacherFigures:
        """Take the figures of several teachers out of the values of steps with these counts."""
        if self.several is None:
            return {}
        found = take_teacher_figures(values, counts.kd)
        if self.aligned is None:
            return found
        return found | self.aligned.take_figures(
            values, self._chunk_terms, chunks=counts.chunks, pairs=counts.pairs
        )

    def at(self, weights: LossWeights, temperatures: Sequence[float]) -> TokenObjective:
        """The same objective with different weights and temperatures, its only varying parts."""
        terms = tuple(
            replace(term, weight=weight, temperature=temperature)
            for term, weight, temperature in zip(
                self.terms, weights.terms, temperatures, strict=True
            )
        )
        return replace(self, ce_weight=weights.ce, terms=terms, feature_weights=weights.features)

    def of_labels(self) -> TokenObjective:
        """The same objective without a teacher."""
        return replace(self, terms=(), metrics=(), features=None, feature_weights=(), several=None)

    def __call__(
        self,
        hidden_sbh: Tensor,
        head: Head,
        batch: Batch,
        signal: Signal | None,
        step: StepBatches,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the micro-batch's share of the objective and of the report, fp32 scalars.

        Summed over micro-batches, data-parallel and context-parallel ranks, both are means over
        the trained tokens of the global batch. A source's entries have the same divisor; tokens of
        the remaining sources add zero to them.

        Collective: those of `hidden_for_head`, and of `fused_linear_objective` or `AlignedLoss`.
        """
        of_teachers: dict[str, Tensor] = {}
        if self.several is not None and self.terms:
            total, report, of_teachers = self._of_several(
                self.several, hidden_sbh, head, batch, signal, step
            )
        elif self.aligned is not None and self.terms:
            total, report = self._on_chunks(self.aligned, hidden_sbh, head, batch, signal, step)
        else:
            total, report = self._on_tokens(hidden_sbh, head, batch, signal, step)
        if self.source_names:
            report = split_report(report, self._token_names)
        return total, report | of_teachers

    def _of_several(
        self,
        several: SeveralLoss,
        hidden_sbh: Tensor,
        head: Head,
        batch: Batch,
        signal: Signal | None,
        step: StepBatches,
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """The objective with several teachers, and the entries of each of them.

        Terms of a teacher with a tokenizer of its own are computed last, in a pass of their own.
        """
        rule, weight = self.logit_rule, head.head_weight()
        hidden_NH = hidden_for_head(hidden_sbh, groups=self.groups)
        total, report, entries = several(
            HiddenState(hidden_NH, weight, rule.softcap, rule.scale),
            signal,
            batch,
            names=self._token_names,
            partition=self._partition(batch),
            ce_weights=token_weights(batch.ce_weights_bs.reshape(-1), step.ce_tokens),
            kd_weights=token_weights(batch.kd_weights_bs.reshape(-1), step.kd_tokens),
            ce_coefficient=self.ce_weight,
            terms=[term for term in self.terms if isinstance(term, Term)],
            chunk_tokens=self.chunk_tokens,
            shard=self.shard,
            group=self.groups.tensor,
            weight_gradient_sum=head.weight_gradient_sum(),
        )
        if self.aligned is None:
            return total, report, entries
        assert isinstance(signal, SignalsByTeacher), "several teachers were asked"
        hidden_NH = hidden_for_head(hidden_sbh, groups=self.groups, whole_context=True)
        return self.aligned.added_to(
            (total, report, entries),
            HiddenState(hidden_NH, weight, rule.softcap, rule.scale),
            signal,
            batch,
            step,
            terms=self._chunk_terms,
            sources=len(self.source_names),
            weight_gradient_sum=head.weight_gradient_sum(),
        )

    def _on_chunks(
        self,
        aligned: AlignedLoss,
        hidden_sbh: Tensor,
        head: Head,
        batch: Batch,
        signal: Signal | None,
        step: StepBatches,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The objective with a teacher whose tokenizer differs from the student's."""
        assert signal is not None, "a teacher was asked"
        hidden_NH = hidden_for_head(hidden_sbh, groups=self.groups, whole_context=True)
        rule = self.logit_rule
        terms, source = self._chunk_terms, signal.logit_source()
        return aligned(
            HiddenState(hidden_NH, head.head_weight(), rule.softcap, rule.scale),
            source,
            batch,
            step,
            ce_weight=self.ce_weight,
            terms=terms,
            sources=len(self.source_names),
            weight_gradient_sum=head.weight_gradient_sum(),
            targets=signal.targets(terms) if source is None else None,
        )

    def _on_tokens(
        self,
        hidden_sbh: Tensor,
        head: Head,
        batch: Batch,
        signal: Signal | None,
        step: StepBatches,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The objective with a teacher of the same tokens, or without one."""
        return fused_linear_objective(
            hidden_for_head(hidden_sbh, groups=self.groups),
            head.head_weight(),
            signal,
            batch.labels_bs.reshape(-1),
            ce_weights=token_weights(batch.ce_weights_bs.reshape(-1), step.ce_tokens),
            kd_weights=token_weights(batch.kd_weights_bs.reshape(-1), step.kd_tokens),
            ce_coefficient=self.ce_weight,
            terms=[term for term in self.terms if isinstance(term, Term)],
            chunk_tokens=self.chunk_tokens,
            shard=self.shard,
            group=self.groups.tensor,
            student_softcap=self.logit_rule.softcap,
            student_scale=self.logit_rule.scale,
            rows=batch.trained_rows_n,
            partition=self._partition(batch),
            weight_gradient_sum=head.weight_gradient_sum(),
        )

    def _partition(self, batch: Batch) -> Partition | None:
        if not self.source_names:
            return None
        assert batch.sources_b is not None
        ids_bs = batch.sources_b.unsqueeze(1).expand_as(batch.labels_bs)
        return Partition(ids_bs.reshape(-1), len(self.source_names))


def reduce_report(
    reports: Sequence[dict[str, Tensor]],
    *,
    names: Sequence[str],
    groups: Groups,
    device: torch.device,
    source_names: Sequence[str] = (),
) -> dict[str, Tensor]:
    """Sum the reports of all micro-batches and ranks; every rank gets the same fp32 scalars.

    `source_names` are the names of the entries of the vector under `BY_SOURCE`, if there is one.

    Collective: one all-reduce of a float per name in the data x context group, one in the
    pipeline group. Stages other than the last add zero.
    """
    every = [*names, *source_names]
    totals = torch.zeros(len(every), dtype=torch.float32, device=device)
    for report in reports:
        scalars = torch.stack([report[name] for name in names])
        totals += torch.cat([scalars, report[BY_SOURCE]]) if source_names else scalars
    for group in (groups.data_context, groups.pipeline):
        if group.size() > 1:
            torch.distributed.all_reduce(totals, group=group)
    return dict(zip(every, totals.unbind(), strict=True))

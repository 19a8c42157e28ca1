"""The objective as a Megatron loss function: a hidden state to a loss and a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_distill.losses import Term, fused_linear_objective, token_weights
from megatron_distill.models.gpt import HiddenStateGPT, hidden_for_head
from megatron_distill.ops import LogitRule, VocabShard
from megatron_distill.runtime.batch import Batch, StepBatches
from megatron_distill.runtime.groups import Groups
from megatron_distill.signals import Signal


@dataclass(frozen=True)
class TokenObjective:
    """Cross-entropy and divergences of one student over its sharded head.

    Every sum is divided by a count over the whole global batch that was known before the schedule
    started, so that neither micro-batches nor data-parallel ranks appear in the result.
    """

    ce_weight: float
    terms: Sequence[Term]
    metrics: tuple[str, ...]  # what a report says beyond losses; empty without a teacher
    chunk_tokens: int | None
    shard: VocabShard
    logit_rule: LogitRule
    groups: Groups

    @property
    def report_names(self) -> tuple[str, ...]:
        """The entries of every report, in one order on all ranks."""
        if not self.metrics:
            return ("total", "ce")
        return ("total", "ce", "kd", *(term.name for term in self.terms), *self.metrics)

    def of_labels(self) -> TokenObjective:
        """The same objective without a teacher."""
        return replace(self, terms=(), metrics=())

    def __call__(
        self,
        hidden_sbh: Tensor,
        head: HiddenStateGPT,
        batch: Batch,
        signal: Signal | None,
        step: StepBatches,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the micro-batch's share of the objective and of the report, fp32 scalars.

        Summed over micro-batches, data-parallel and context-parallel ranks, both are means over
        the trained tokens of the global batch.

        Collective: those of `hidden_for_head` and of `fused_linear_objective`.
        """
        return fused_linear_objective(
            hidden_for_head(hidden_sbh, groups=self.groups),
            head.head_weight(),
            signal,
            batch.labels_bs.reshape(-1),
            ce_weights=token_weights(batch.ce_weights_bs.reshape(-1), step.ce_tokens),
            kd_weights=token_weights(batch.kd_weights_bs.reshape(-1), step.kd_tokens),
            ce_coefficient=self.ce_weight,
            terms=self.terms,
            chunk_tokens=self.chunk_tokens,
            shard=self.shard,
            group=self.groups.tensor,
            student_softcap=self.logit_rule.softcap,
            student_scale=self.logit_rule.scale,
            rows=batch.trained_rows_n,
        )


def reduce_report(
    reports: Sequence[dict[str, Tensor]],
    *,
    names: Sequence[str],
    groups: Groups,
    device: torch.device,
) -> dict[str, Tensor]:
    """Add up the reports of all micro-batches and ranks; every rank gets the same fp32 scalars.

    Collective: one all-reduce of `len(names)` floats in the data x context group, one in the
    pipeline group (stages other than the last add zero).
    """
    totals = torch.zeros(len(names), dtype=torch.float32, device=device)
    for report in reports:
        totals += torch.stack([report[name] for name in names])
    for group in (groups.data_context, groups.pipeline):
        if group.size() > 1:
            torch.distributed.all_reduce(totals, group=group)
    return dict(zip(names, totals.unbind(), strict=True))

"""Held-out comparison of a student and its teacher: agreement, calibration, draft acceptance."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.losses import Term
from megatron_distill.losses.comparison import (
    TokenComparison,
    compare_student,
    compare_with_ids,
    compare_with_logits,
)
from megatron_distill.models.gpt import hidden_for_head
from megatron_distill.ops import LogitRule, VocabShard
from megatron_distill.runtime.batch import Batch, StepBatches, zigzag_index
from megatron_distill.runtime.groups import Groups
from megatron_distill.signals import HiddenState, Signal, TopK
from megatron_distill.train.calibration import token_figures
from megatron_distill.train.evaluation.text_hash import hash_of_held_out
from megatron_distill.train.evaluation.text_sums import (
    Measured,
    block_sums,
    figures_of,
    table_of,
    token_sums,
)
from megatron_distill.train.features import FeatureLosses
from megatron_distill.train.objective import Head
from megatron_distill.train.step import Student, run_student
from megatron_distill.train.validation import HeldOut, evaluating

__all__ = ["compare_held_out"]

_AT_ONE = Term(divergence="forward_kl", support="tail")


@torch.no_grad()
def compare_held_out(student: Student, held_out: HeldOut) -> dict[str, object]:
    """Return the figures of the student against labels and teacher, the same on every rank.

    A teacher with another tokenizer, several teachers, and a store without top-k at temperature one
    leave out what needs the teacher's probabilities. A top-k store bounds the acceptance. The texts
    of the standard errors are the held-out samples; `text_hash` is their digest.

    Collective: per held-out batch, those of the teacher's pass and of `run_student`; at the end
    those of `figures_of` and `hash_of_held_out`.
    """
    objective = _Comparison(
        held_out.objective.shard, held_out.objective.logit_rule, held_out.objective.groups
    )
    beside = held_out.objective.aligned is None and held_out.objective.several is None
    teacher = held_out.teacher if beside else None
    with evaluating(student):
        for step in held_out.steps:
            batches = step.micro_batches
            signals = teacher.signals(batches) if teacher else [None] * len(batches)
            run_student(student, signals, [objective] * len(batches), step, forward_only=True)
    figures = figures_of(objective.measured, objective.groups)
    if figures:
        figures["text_hash"] = hash_of_held_out(held_out.steps, objective.groups)
    return figures


@dataclass(frozen=True)
class _Comparison:
    """A `MicroBatchObjective` without a loss; `measured` gets the figures of each micro-batch."""

    shard: VocabShard
    logit_rule: LogitRule
    groups: Groups
    features: FeatureLosses | None = None
    feature_weights: tuple[float, ...] = ()
    report_names: tuple[str, ...] = ("total",)
    source_report_names: tuple[str, ...] = ()
    measured: list[Measured] = field(default_factory=list)

    def __call__(
        self,
        hidden_sbh: Tensor,
        head: Head,
        batch: Batch,
        signal: Signal | None,
        step: StepBatches,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `MicroBatchObjective`.

        Collective: those of `hidden_for_head` and of the comparison; context group, one all-gather
        of 24 bytes per token.
        """
        del step  # sums are not divided
        rows = batch.trained_rows_n
        if rows is None:
            rows = (batch.ce_mask_bs | batch.kd_mask_bs).reshape(-1).nonzero().squeeze(1)
        rule = self.logit_rule
        own = HiddenState(
            hidden_for_head(hidden_sbh, groups=self.groups),
            head.head_weight(),
            rule.softcap,
            rule.scale,
        )
        found = self._compare(own, signal, batch.labels_bs.reshape(-1), rows)
        weights = batch.kd_weights_bs.reshape(-1)[rows].double()
        texts_n = rows.div(batch.tokens_bs.shape[1], rounding_mode="floor")
        sums = token_sums(found, weights, texts_n, len(batch.sample_ids_b))
        sums |= self._block_sums(found, weights, rows, batch)
        samples = batch.on_host.sample_ids_b.tolist()
        self.measured.append(Measured(samples, table_of(sums), token_figures(found, weights)))
        return hidden_sbh.new_zeros((), dtype=torch.float32), {}

    def _compare(
        self, own: HiddenState, signal: Signal | None, labels: Tensor, rows: Tensor
    ) -> TokenComparison:
        shard, group = self.shard, self.groups.tensor
        source = None if signal is None else signal.logit_source()
        if source is not None:
            return compare_with_logits(own, source, labels, rows, shard=shard, group=group)
        ids = None if signal is None else _topk(signal)
        if ids is not None:
            return compare_with_ids(own, ids, labels, rows, shard=shard, group=group)
        return compare_student(own, labels, rows, shard=shard, group=group)

    def _block_sums(
        self, found: TokenComparison, weights: Tensor, rows: Tensor, batch: Batch
    ) -> dict[str, Tensor]:
        """Sums over each text's blocks that begin at this rank's positions, by their length."""
        if found.overlap is None or found.overlap_most is None:
            return {}
        shape = batch.tokens_bs.shape
        local = weights.new_zeros(3, shape[0] * shape[1])
        local[:, rows] = torch.stack(
            [(weights > 0).to(weights.dtype), found.overlap, found.overlap_most]
        )
        fields = self._whole(local.view(3, *shape))
        begins_bS = torch.zeros_like(fields[0], dtype=torch.bool)
        begins_bS.index_fill_(1, batch.sequence_index_s, True)
        return block_sums(fields[0] > 0, begins_bS, batch.document_ids_bS, fields[1], fields[2])

    def _whole(self, local_fbs: Tensor) -> Tensor:
        """Fields ``[f, b, S]`` of the whole sequence from those of each context rank."""
        size = self.groups.context.size()
        if size == 1:
            return local_fbs
        parts = [torch.empty_like(local_fbs) for _ in range(size)]
        dist.all_gather(parts, local_fbs.contiguous(), group=self.groups.context)
        length = local_fbs.shape[2] * size
        whole = local_fbs.new_empty(*local_fbs.shape[:2], length)
        for rank, part in enumerate(parts):
            index = zigzag_index(length, rank=rank, size=size, device=local_fbs.device)
            whole[:, :, index] = part
        return whole


def _topk(signal: Signal) -> TopK | None:
    try:
        targets = signal.targets([_AT_ONE])
    except ValueError:  # draws, or a top-k at another temperature
        return None
    (target,) = targets or (None,)
    return target if isinstance(target, TopK) else None

"""Scores of several teachers on each sample, and their weights in a mixture.

The score of a teacher p is the mean over a sample's distilled labels, at temperature one, of

    cross_entropy      log p(label)
    entropy            sum_j p_j log p_j
    top_probability    max_j p_j

Teacher i with the share ``w_i`` of its term has on the sample the weight

    w_i e^(alpha s_i) / sum_k w_k e^(alpha s_k),

for equal shares the softmax of ``alpha s``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.losses.terms import TeacherScore, TermTeachers
from megatron_distill.ops.frozen_head import row_statistics
from megatron_distill.ops.fused_linear import Partition, sum_tokens, weighted_rows
from megatron_distill.ops.topk import gather_ranks
from megatron_distill.ops.vocab import VocabShard
from megatron_distill.ops.workspace import equal_chunks
from megatron_distill.signals import LogitSource, Signal

__all__ = ["TeacherScores"]


@dataclass(frozen=True)
class TeacherScores:
    """Scores of the teachers on the samples of a micro-batch, each computed at its first use.

    Attributes:
        signals: of the teachers, of all N tokens.
        labels: ``[N]`` int64 global ids.
        weights: ``[N]`` of the labels in the mean; only their ratios within a sample matter.
        rows: ``[n]`` int64, the tokens with a weight.
        samples: of all N tokens.
        context: the ranks with further tokens of the same samples; None for none.
        shard: this rank's columns.
        group: the ranks that share the vocabulary; None if this rank holds all of it.
        chunk_tokens: tokens whose logits exist at a time.
    """

    signals: Mapping[str, Signal]
    labels: Tensor
    weights: Tensor
    rows: Tensor
    samples: Partition
    context: dist.ProcessGroup | None
    shard: VocabShard
    group: dist.ProcessGroup | None
    chunk_tokens: int
    _known: dict[str, Mapping[TeacherScore, Tensor]] = field(default_factory=dict)

    @torch.no_grad()
    def shares(self, teachers: TermTeachers) -> Tensor:
        """The weight of each token's sample for each teacher, ``[N, M]`` fp64 of sum one.

        Those of a sample without labels are the shares of the term.

        Collective: for each teacher, at its first use, those of `row_statistics` per chunk, and
        one all-gather over ``context`` of 32 bytes per sample.

        Raises:
            ValueError: the record of a teacher lacks the score.
        """
        assert teachers.score is not None, "the term has fixed shares"
        # The shares stay numbers of the host: a tensor of them would be a copy that it waits for.
        weights_Mb = torch.stack(
            [
                self._of(name, teachers.score).mul(teachers.alpha).add(math.log(share))
                for name, share in teachers.weights
            ]
        ).softmax(0)
        return weights_Mb.t().index_select(0, self.samples.ids)

    def _of(self, name: str, score: TeacherScore) -> Tensor:
        """The teacher's mean score on each sample, ``[b]`` fp64."""
        if name not in self._known:
            signal = self.signals[name]
            source = signal.logit_source()
            self._known[name] = self._means(
                self._recorded(signal) if source is None else self._measured(source)
            )
        if score not in self._known[name]:
            raise ValueError(
                f"teacher {name!r} has recorded ids without its {score.replace('_', ' ')} of each "
                "token; use another score, or the teacher itself"
            )
        return self._known[name][score]

    def _measured(self, source: LogitSource) -> dict[TeacherScore, Tensor]:
        parts = []
        for chunk in equal_chunks(len(self.rows), self.chunk_tokens):
            take = partial(_selected, self.rows[chunk])
            found = row_statistics(
                source.outputs(take, self.shard.real_width),
                source.rule,
                self.shard,
                self.group,
                labels=take(self.labels),
                infinite=source.formed is not None,
            )
            top = found.top_log_prob.exp()
            parts.append(torch.stack([found.label_log_prob, -found.entropy, top]))
        none = torch.zeros(3, 0, dtype=torch.float64, device=self.rows.device)
        label, entropy, top = torch.cat([none, *parts], 1).unbind()
        return {"cross_entropy": label, "entropy": entropy, "top_probability": top}

    def _recorded(self, signal: Signal) -> dict[TeacherScore, Tensor]:
        known = signal.token_statistics()
        found: dict[TeacherScore, Tensor] = {}
        if "label_log_prob" in known:
            found["cross_entropy"] = known["label_log_prob"].index_select(0, self.rows)
        if "entropy" in known:
            found["entropy"] = -known["entropy"].index_select(0, self.rows)
        return found

    def _means(self, scores: Mapping[TeacherScore, Tensor]) -> dict[TeacherScore, Tensor]:
        """Means ``[b]`` over the labels of each sample, zero for one without labels."""
        weights = self.weights.index_select(0, self.rows)
        by_sample = Partition(self.samples.ids.index_select(0, self.rows), self.samples.parts)
        values = [torch.ones_like(weights), *scores.values()]
        sums = sum_tokens([weighted_rows(weights, value) for value in values], by_sample)[:, 1:]
        # In the order of ranks: equal bits on all ranks of the vocabulary.
        count, *totals = gather_ranks(sums, self.context).sum(0).unbind()
        return {
            score: torch.where(count == 0, 0.0, total / count)
            for score, total in zip(scores, totals, strict=True)
        }


def _selected(rows: Tensor, values: Tensor) -> Tensor:
    return values.index_select(0, rows)

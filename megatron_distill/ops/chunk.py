"""One chunk of logits: partial statistics, their merge over ranks, and the gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.ops.divergences import Model
from megatron_distill.ops.normalizers import Normalizers
from megatron_distill.ops.rows import RowExecutor, choose_rows
from megatron_distill.ops.softmax_gradient import SoftmaxWeights
from megatron_distill.ops.statistics import GlobalStatistics, LocalStatistics, StatisticsSpec
from megatron_distill.ops.topk import gather_ranks
from megatron_distill.ops.vocab import VocabShard
from megatron_distill.ops.workspace import Scratch
from megatron_distill.signals import LogitRule

__all__ = ["Chunk"]


@dataclass(frozen=True)
class Chunk:
    """Raw outputs ``[N, V]`` of the models over this shard's real columns, with their logit rules.

    ``labels [N]`` are global ids, given if the spec is full.
    """

    spec: StatisticsSpec
    raw: Mapping[Model, Tensor]
    rules: Mapping[Model, LogitRule]
    shard: VocabShard
    scratch: Scratch
    labels: Tensor | None = None

    @cached_property
    def rows(self) -> RowExecutor:
        """The implementation of the passes over the logits, chosen once."""
        return choose_rows(self.spec, self.raw, self.rules, self.scratch)

    def process(
        self,
        local: LocalStatistics,
        weights: Sequence[SoftmaxWeights] | None,
        group: dist.ProcessGroup | None,
        out: Tensor,
    ) -> tuple[GlobalStatistics, Mapping[str, Tensor]]:
        """Merged statistics and the values of all terms; with weights, also the gradient.

        The gradient on the student's raw outputs is written to ``out``, which may alias these
        outputs.

        Collective: those of `solve`.
        """
        all_passes = self.rows.all_passes
        if weights is not None and group is None and all_passes is not None:
            # Without a merge between the passes, a block stays in the cache for all of them.
            self._measure_labels(local)
            values, blends = all_passes(local, weights, out)
            merged = local.merge(None)
            whole = Normalizers(local.values[:0], blends=blends)
            for term in self.spec.terms:
                whole.set_value(term, merged, values.get(term.key))
            return merged, whole.values
        merged, normalizers = self.solve(local, group)
        if weights is not None:
            self.write_gradient(local, normalizers, weights, out)
        return merged, normalizers.values

    def solve(
        self,
        local: LocalStatistics,
        group: dist.ProcessGroup | None,
        *,
        shared_class: Tensor | None = None,
    ) -> tuple[GlobalStatistics, Normalizers]:
        """Fill the local statistics; compute values of all terms and normalisers of gradients.

        ``shared_class``: see `head_share`.

        Collective: over ``group`` that of `LocalStatistics.merge`. One all-gather of 24 bytes per
        token and term with slopes, if there is one; those of `head_share` for each blend.
        """
        self.measure(local)
        merged = local.merge(group)
        normalizers = Normalizers.of(local, merged)
        normalizers.blends.update(self.rows.blends(local, normalizers, group, shared_class))
        of_slopes = self._sum_slopes(local, merged, normalizers, group)
        for term in self.spec.terms:
            normalizers.set_value(term, merged, of_slopes.get(term.key))
        return merged, normalizers

    def measure(self, local: LocalStatistics) -> None:
        """Fill the local statistics of the whole chunk."""
        self._measure_labels(local)
        self.rows.measure(local)

    def write_gradient(
        self,
        local: LocalStatistics,
        normalizers: Normalizers,
        weights: Sequence[SoftmaxWeights],
        out: Tensor,
    ) -> None:
        """Write the gradient on the student's raw outputs to ``out``, which may alias these.

        Reads from the local statistics the peaks and the statistics that compare both models.
        """
        slopes, blends = normalizers.slopes, normalizers.blends
        known = [softmax.with_slopes(slopes).blended(blends) for softmax in weights]
        self.rows.write_gradient(local, normalizers, known, out)

    def _sum_slopes(
        self,
        local: LocalStatistics,
        merged: GlobalStatistics,
        normalizers: Normalizers,
        group: dist.ProcessGroup | None,
    ) -> dict[str, Tensor]:
        """Values ``[N]`` of terms with slopes; stores reference and average in ``normalizers``."""
        terms = self.spec.nonlinear
        if not terms:
            return {}
        gathered = gather_ranks(self.rows.sum_slopes(local, normalizers), group)
        values = {}
        for number, term in enumerate(terms):
            value, average, reference = gathered[:, 3 * number : 3 * number + 3].unbind(1)
            values[term.key] = value.sum(0)
            chosen = merged.at_top(reference)
            # Each rank's sum is relative to the slope at its shard's top token.
            shares = merged.shares(term.temperature)
            total = (average + shares * (reference - chosen)).sum(0)
            normalizers.slopes[term.key] = (
                chosen.to(local.dtype).unsqueeze(1),
                total.to(local.dtype).unsqueeze(1),
            )
        return values

    def _measure_labels(self, local: LocalStatistics) -> None:
        if self.labels is None or self.shard.real_width == 0:
            return
        owned, columns = self.shard.owns(self.labels), self.shard.local(self.labels).unsqueeze(1)
        for model, raw in self.raw.items():
            label = local.rows[f"{model}_label"]
            label.copy_(raw.gather(1, columns).squeeze(1))
            label.copy_(torch.where(owned, self.rules[model].apply_(label), -math.inf))

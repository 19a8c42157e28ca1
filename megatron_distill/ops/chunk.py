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
from megatron_distill.ops.statistics import MergedStatistics, Packet, Sweep
from megatron_distill.ops.topk import gather_ranks
from megatron_distill.ops.torch_rows import TorchRows
from megatron_distill.ops.vocab import VocabShard
from megatron_distill.ops.workspace import Scratch
from megatron_distill.signals import LogitRule

__all__ = ["Chunk"]


@dataclass(frozen=True)
class Chunk:
    """Raw outputs ``[N, V]`` of the models over this shard's real columns, with their logit rules.

    ``labels [N]`` are global ids, given if the sweep is full.
    """

    sweep: Sweep
    raw: Mapping[Model, Tensor]
    rules: Mapping[Model, LogitRule]
    shard: VocabShard
    scratch: Scratch
    labels: Tensor | None = None

    @cached_property
    def rows(self) -> RowExecutor:
        """The implementation of the passes over the logits, chosen once."""
        return choose_rows(self.sweep, self.raw, self.rules, self.scratch)

    def process(
        self,
        packet: Packet,
        weights: Sequence[SoftmaxWeights] | None,
        group: dist.ProcessGroup | None,
        out: Tensor,
    ) -> tuple[MergedStatistics, Mapping[str, Tensor]]:
        """Merged statistics and the values of all terms; with weights, also the gradient.

        The gradient on the student's raw outputs is written to ``out``, which may alias these
        outputs.

        Collective: those of `solve`.
        """
        if weights is not None and group is None and isinstance(self.rows, TorchRows):
            # Without a merge between the sweeps, a block stays in the cache for all of them.
            self._measure_labels(packet)
            values, blends = self.rows.all_sweeps(packet, weights, out)
            merged = packet.merge(None)
            whole = Normalizers(packet.values[:0], blends=blends)
            for term in self.sweep.terms:
                whole.set_value(term, merged, values.get(term.key))
            return merged, whole.values
        merged, normalizers = self.solve(packet, group)
        if weights is not None:
            self.write_gradient(packet, normalizers, weights, out)
        return merged, normalizers.values

    def solve(
        self, packet: Packet, group: dist.ProcessGroup | None
    ) -> tuple[MergedStatistics, Normalizers]:
        """Fill the packet; compute the values of all terms and the normalisers of their gradients.

        Collective: over ``group`` that of `Packet.merge`; one all-gather of 24 bytes per token and
        term with slopes, if there is one; those of `head_share` for each term that blends.
        """
        self.measure(packet)
        merged = packet.merge(group)
        normalizers = Normalizers.of(packet, merged)
        normalizers.blends.update(self.rows.blends(packet, normalizers, group))
        of_slopes = self._sum_slopes(packet, merged, normalizers, group)
        for term in self.sweep.terms:
            normalizers.set_value(term, merged, of_slopes.get(term.key))
        return merged, normalizers

    def measure(self, packet: Packet) -> None:
        """Fill the packet of the whole chunk."""
        self._measure_labels(packet)
        self.rows.measure(packet)

    def write_gradient(
        self,
        packet: Packet,
        normalizers: Normalizers,
        weights: Sequence[SoftmaxWeights],
        out: Tensor,
    ) -> None:
        """Write the gradient on the student's raw outputs to ``out``, which may alias these.

        Reads from the packet the peaks and the statistics that compare both models.
        """
        slopes, blends = normalizers.slopes, normalizers.blends
        known = [softmax.with_slopes(slopes).blended(blends) for softmax in weights]
        self.rows.write_gradient(packet, normalizers, known, out)

    def _sum_slopes(
        self,
        packet: Packet,
        merged: MergedStatistics,
        normalizers: Normalizers,
        group: dist.ProcessGroup | None,
    ) -> dict[str, Tensor]:
        """Values ``[N]`` of terms with slopes; stores reference and average in ``normalizers``."""
        terms = self.sweep.curved
        if not terms:
            return {}
        gathered = gather_ranks(self.rows.sum_slopes(packet, normalizers), group)
        values = {}
        for number, term in enumerate(terms):
            value, average, reference = gathered[:, 3 * number : 3 * number + 3].unbind(1)
            values[term.key] = value.sum(0)
            chosen = merged.at_top(reference)
            # Each rank's sum is relative to the slope at its shard's top token.
            shares = merged.shares(term.temperature)
            total = (average + shares * (reference - chosen)).sum(0)
            normalizers.slopes[term.key] = (
                chosen.to(packet.dtype).unsqueeze(1),
                total.to(packet.dtype).unsqueeze(1),
            )
        return values

    def _measure_labels(self, packet: Packet) -> None:
        if self.labels is None or self.shard.real_width == 0:
            return
        owned, columns = self.shard.owns(self.labels), self.shard.local(self.labels).unsqueeze(1)
        for model, raw in self.raw.items():
            label = packet.rows[f"{model}_label"]
            label.copy_(raw.gather(1, columns).squeeze(1))
            label.copy_(torch.where(owned, self.rules[model].apply_(label), -math.inf))

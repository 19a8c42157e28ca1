"""One chunk of logits: measured, merged over ranks, and turned into its own gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.ops.blocks import Scratch, row_blocks
from megatron_distill.ops.divergence import Model
from megatron_distill.ops.logits import LogitRule
from megatron_distill.ops.pushforward import SoftmaxWeights, push_forward_
from megatron_distill.ops.statistics import (
    MergedStatistics,
    Packet,
    Sweep,
    exponentiate,
    measure_block,
)
from megatron_distill.ops.vocab import VocabShard

__all__ = ["Chunk", "Factors", "shard_factors"]

# What turns a shard's exponentials into global probabilities: ``[N, 1]`` per softmax.
Factors = Mapping[tuple[Model, float], Tensor]


def shard_factors(packet: Packet, merged: MergedStatistics) -> dict[tuple[Model, float], Tensor]:
    """The factors of this rank's shard."""
    return {
        softmax: merged.shard_factor(packet, *softmax).unsqueeze(1)
        for softmax in packet.sweep.softmaxes
    }


@dataclass(frozen=True)
class Chunk:
    """Raw outputs ``[N, V]`` of both models over this shard's real columns, and how to read them.

    ``labels [N]`` are global ids, given if the sweep is a full one.
    """

    sweep: Sweep
    raw: Mapping[Model, Tensor]
    rules: Mapping[Model, LogitRule]
    shard: VocabShard
    scratch: Scratch
    labels: Tensor | None = None

    def process(
        self,
        packet: Packet,
        weights: Sequence[SoftmaxWeights] | None,
        group: dist.ProcessGroup | None,
    ) -> MergedStatistics:
        """Merged statistics; with weights, the gradient replaces the student's outputs as well.

        Collective: that of `Packet.merge`, once.
        """
        if weights is None or group is not None:
            self.measure(packet)
            merged = packet.merge(group)
            if weights is not None:
                self.push(packet, shard_factors(packet, merged), weights, self.raw["student"])
            return merged
        # Nothing to wait for between the two sweeps: a block stays in the cache for both.
        self._measure_labels(packet)
        for rows in self._blocks():
            logits, statistics = self._load(rows), packet.rows(rows)
            measure_block(self.sweep, statistics, logits, self.scratch)
            factors = {
                (model, temperature): statistics[f"{model}_mass@{temperature}"]
                .reciprocal()
                .unsqueeze(1)
                for model, temperature in self.sweep.softmaxes
            }
            block_weights = [softmax.rows(rows) for softmax in weights]
            gradient = self._gradient(logits, factors, block_weights)
            self.raw["student"][rows].copy_(gradient)
        return packet.merge(None)

    def measure(self, packet: Packet) -> None:
        """Fill the packet of the whole chunk."""
        self._measure_labels(packet)
        for rows in self._blocks():
            measure_block(self.sweep, packet.rows(rows), self._load(rows), self.scratch)

    def push(
        self, packet: Packet, factors: Factors, weights: Sequence[SoftmaxWeights], out: Tensor
    ) -> None:
        """Write the gradient on the student's raw outputs to ``out``, which may be these outputs.

        Of the packet only the peaks are read.
        """
        for rows in self._blocks():
            logits, statistics = self._load(rows), packet.rows(rows)
            for model, temperature in self.sweep.softmaxes:
                peak = statistics[f"{model}_peak"]
                buffer = self.scratch.take(f"{model}@{temperature}", peak.shape[0])
                exponentiate(logits[model], peak, temperature, buffer)
            block_factors = {softmax: factor[rows] for softmax, factor in factors.items()}
            block_weights = [softmax.rows(rows) for softmax in weights]
            out[rows].copy_(self._gradient(logits, block_factors, block_weights))

    def _blocks(self) -> list[slice]:
        student = self.raw["student"]
        if student.shape[1] == 0:
            return []
        return list(row_blocks(student.shape[0], student.shape[1], student.device))

    def _load(self, rows: slice) -> dict[Model, Tensor]:
        return {
            model: self.rules[model].load(raw[rows], self.scratch, f"{model}_logits")
            for model, raw in self.raw.items()
        }

    def _measure_labels(self, packet: Packet) -> None:
        if self.labels is None or self.shard.real_width == 0:
            return
        owned, columns = self.shard.owns(self.labels), self.shard.local(self.labels).unsqueeze(1)
        statistics = packet.rows()
        for model, raw in self.raw.items():
            label = statistics[f"{model}_label"]
            label.copy_(raw.gather(1, columns).squeeze(1))
            label.copy_(torch.where(owned, self.rules[model].apply_(label), -math.inf))

    def _gradient(
        self,
        logits: Mapping[Model, Tensor],
        factors: Factors,
        weights: Sequence[SoftmaxWeights],
    ) -> Tensor:
        """Gradient of a block from the exponentials in scratch, its factors and its weights."""
        size = logits["student"].shape[0]
        spare = self.scratch.take("spare", size)
        gradients = [self._softmax_gradient(softmax, factors, size) for softmax in weights]
        if not gradients:
            return spare.zero_()
        total = gradients[0]
        for gradient in gradients[1:]:
            total.add_(gradient)
        return self.rules["student"].chain_(total, logits["student"], spare)

    def _softmax_gradient(self, weights: SoftmaxWeights, factors: Factors, size: int) -> Tensor:
        """What the terms at one temperature add to the gradient on logits."""
        temperature = weights.temperature
        student = self.scratch.take(f"student@{temperature}", size)
        pulls: list[tuple[Tensor, Tensor, Tensor]] = []
        for term, weight in weights.pulls:
            teacher = self.scratch.take(f"teacher@{temperature}", size)
            factor = factors[term.divergence.expectation, temperature]
            pulls.append((term.divergence.pull(student, teacher), weight, factor))
        gradient = push_forward_(
            student,
            weights.student,
            factors["student", temperature],
            pulls,
            sparse=weights.sparse,
        )
        if weights.label is not None:
            columns, label = weights.label
            gradient.scatter_add_(1, columns, -label)
        return gradient

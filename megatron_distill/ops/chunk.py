"""One chunk of logits: measured, merged over ranks, and turned into its own gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.ops.block import Block
from megatron_distill.ops.blocks import Scratch, row_blocks
from megatron_distill.ops.classes import Model
from megatron_distill.ops.divergence import WeightedDivergence
from megatron_distill.ops.head_tail import TeacherBlock, head_share
from megatron_distill.ops.kernels import kernels_run
from megatron_distill.ops.logits import LogitRule
from megatron_distill.ops.pushforward import SoftmaxWeights
from megatron_distill.ops.statistics import MergedStatistics, Packet, measure_block
from megatron_distill.ops.sweep import Sweep
from megatron_distill.ops.topk import gather_ranks
from megatron_distill.ops.vocab import VocabShard

if TYPE_CHECKING:
    from megatron_distill.ops.kernels.executor import RowKernels, TemperatureRow

__all__ = ["Chunk", "Solved"]


@dataclass(frozen=True)
class Solved:
    """What is known of each token of a chunk once the ranks have spoken.

    Attributes:
        factors: ``[S, N]`` fp64 of the softmaxes in order: what makes this shard's exponentials,
            relative to its peak, probabilities.
        top: ``[N, 1]`` each model's logit of the student's top token.
        top_ratios: ``[N, 1]`` fp64 per temperature: ``log p - log q`` of that token.
        values: ``[N]`` fp64 per term.
        slopes: ``[N, 1]`` per term with slopes: reference and average, see `Curved`.
        blends: ``[N, 1]`` per term that blends: the part of forward KL.
    """

    factors: Tensor
    top: Mapping[Model, Tensor] = field(default_factory=dict)
    top_ratios: Mapping[float, Tensor] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    slopes: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    blends: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, packet: Packet, merged: MergedStatistics) -> Solved:
        """What follows from the first sweep."""
        sweep, dtype = packet.sweep, packet.dtype
        factors = torch.empty_like(packet.values[: len(sweep.softmaxes)])
        for factor, softmax in zip(factors, sweep.softmaxes, strict=True):
            factor.copy_(merged.shard_factor(packet, *softmax))
        if not sweep.curved:
            return cls(factors)
        top = {model: logit.to(dtype).unsqueeze(1) for model, logit in merged.top.items()}
        top_ratios = {
            temperature: merged.top_ratio(temperature).unsqueeze(1)
            for temperature in {term.temperature for term in sweep.curved}
        }
        return cls(factors, top, top_ratios)

    @classmethod
    def alone(cls, packet: Packet) -> Solved:
        """`of` for one rank alone, which a block of rows cannot afford to ask for in full."""
        sweep, rows = packet.sweep, packet.rows
        factors = packet.sums[: len(sweep.softmaxes)].reciprocal()
        if not sweep.curved:
            return cls(factors)
        logits = dict(zip(sweep.extremes, packet.extremes.unsqueeze(2).unbind(), strict=True))
        top: dict[Model, Tensor] = {
            "student": logits["student_peak"],
            "teacher": logits["teacher_at_top"],
        }
        below_peak = rows["teacher_at_top"] - rows["teacher_peak"]
        top_ratios = {}
        for temperature in {term.temperature for term in sweep.curved}:
            odds = rows[f"student_mass@{temperature}"] / rows[f"teacher_mass@{temperature}"]
            ratio = odds.log_().add_(below_peak, alpha=1 / temperature)
            top_ratios[temperature] = ratio.unsqueeze(1)
        return cls(factors, top, top_ratios)

    def made_whole(self, value: Tensor, term: WeightedDivergence, dtype: torch.dtype) -> Tensor:
        """``[N]`` the value of a term whose summands had the top ratio rounded to ``dtype``."""
        if term.divergence.of_top_ratio == 0:
            return value
        ratio = self.top_ratios[term.temperature].squeeze(1)
        lost = (ratio - ratio.to(dtype)).nan_to_num_(0.0, 0.0, 0.0)
        return value + lost.mul_(term.divergence.of_top_ratio)

    def set_value(
        self, term: WeightedDivergence, merged: MergedStatistics, of_slopes: Tensor | None
    ) -> None:
        """Keep the value of a term, given the part that its slopes' sweep found."""
        row = term.divergence
        value = of_slopes
        if row.has_forward_kl:
            value = merged.forward_kl(term.temperature)
        if row.head_mass is not None:
            assert value is not None
            assert of_slopes is not None
            blend = self.blends[term.key].double().squeeze(1)
            value = blend * value + (1 - blend) * of_slopes
        assert value is not None
        self.values[term.key] = value


@dataclass(frozen=True)
class Chunk:
    """Raw outputs ``[N, V]`` of the models over this shard's real columns, and how to read them.

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
        out: Tensor,
    ) -> tuple[MergedStatistics, Mapping[str, Tensor]]:
        """Merged statistics and the values of all terms; with weights, also the gradient on the
        student's raw outputs, in ``out``, which may be these outputs.

        Collective: those of `solve`.
        """
        if weights is not None and group is None and self._kernels() is None:
            # Nothing to wait for between the sweeps: a block stays in the cache for all of them.
            return self._process_blocks(packet, weights, out)
        merged, solved = self.solve(packet, group)
        if weights is not None:
            self.push(packet, solved, weights, out)
        return merged, solved.values

    def solve(
        self, packet: Packet, group: dist.ProcessGroup | None
    ) -> tuple[MergedStatistics, Solved]:
        """Fill the packet, and find the values of all terms and what their gradients need.

        Collective: over ``group`` that of `Packet.merge`; one all-gather of 24 bytes per token and
        term with slopes, if there is one; those of `head_share` for each term that blends.
        """
        self.measure(packet)
        merged = packet.merge(group)
        solved = Solved.of(packet, merged)
        for term in self.sweep.curved:
            if term.divergence.head_mass is not None:
                blend = head_share(
                    partial(self._teacher_blocks, packet, solved, term.temperature),
                    packet.values.shape[1],
                    head_mass=term.divergence.head_mass,
                    group=group,
                    device=packet.values.device,
                )
                solved.blends[term.key] = blend.to(packet.dtype)
        of_slopes = self._sum_slopes(packet, merged, solved, group)
        for term in self.sweep.terms:
            solved.set_value(term, merged, of_slopes.get(term.key))
        return merged, solved

    def measure(self, packet: Packet) -> None:
        """Fill the packet of the whole chunk."""
        self._measure_labels(packet)
        kernels = self._kernels()
        if kernels is not None:
            kernels.measure(packet)
            return
        for rows in self._rows():
            measure_block(packet.part(rows), self._load(rows), self.scratch)

    def push(
        self, packet: Packet, solved: Solved, weights: Sequence[SoftmaxWeights], out: Tensor
    ) -> None:
        """Write the gradient on the student's raw outputs to ``out``, which may be these outputs.

        Of the packet only the peaks are read.
        """
        known = [softmax.with_slopes(solved.slopes).blended(solved.blends) for softmax in weights]
        kernels = self._kernels()
        if kernels is not None and kernels.can_push(known):
            at = [self._temperature_row(packet, solved, one.temperature) for one in known]
            kernels.push(packet, at, known, out)
            return
        for rows in self._rows():
            block = self._block(packet, solved, rows)
            block.exponentiate(self.sweep.softmaxes)
            block.gradient([softmax.rows(rows) for softmax in known], out[rows])

    def _process_blocks(
        self, packet: Packet, weights: Sequence[SoftmaxWeights], out: Tensor
    ) -> tuple[MergedStatistics, Mapping[str, Tensor]]:
        """All sweeps of one block after another, as one rank alone can."""
        self._measure_labels(packet)
        # There may be no tokens at all, and so no block to add to these.
        none = packet.values.new_zeros(0)
        found = {term.key: [none.double()] for term in self.sweep.curved}
        blends = {
            term.key: [none.unsqueeze(1)]
            for term in self.sweep.curved
            if term.divergence.head_mass is not None
        }
        for rows in self._rows():
            own, logits = packet.part(rows), self._load(rows)
            measure_block(own, logits, self.scratch)
            solved = Solved.alone(own)
            block = Block(self.sweep, logits, self.rules["student"], own, solved, self.scratch)
            for term in self.sweep.curved:
                if term.divergence.head_mass is not None:
                    solved.blends[term.key] = block.blend(term)
                    blends[term.key].append(solved.blends[term.key])
            pushed = [softmax.rows(rows).blended(solved.blends) for softmax in weights]
            values = block.gradient(pushed, out[rows])
            for term in self.sweep.curved:
                value = solved.made_whole(values[term.key], term, packet.dtype)
                found[term.key].append(value)
        merged = packet.merge(None)
        joined = {key: torch.cat(parts) for key, parts in blends.items()}
        whole = Solved(packet.values[:0], blends=joined)
        for term in self.sweep.terms:
            parts = found.get(term.key)
            whole.set_value(term, merged, torch.cat(parts) if parts else None)
        return merged, whole.values

    def _sum_slopes(
        self,
        packet: Packet,
        merged: MergedStatistics,
        solved: Solved,
        group: dist.ProcessGroup | None,
    ) -> dict[str, Tensor]:
        """Add up values and slopes of the terms that have some; returns their values."""
        terms = self.sweep.curved
        if not terms:
            return {}
        sums = packet.values.new_zeros(3 * len(terms), packet.values.shape[1])
        temperatures = list(dict.fromkeys(term.temperature for term in terms))
        softmaxes = [softmax for softmax in self.sweep.softmaxes if softmax[1] in temperatures]
        kernels = self._kernels()
        if kernels is not None:
            for number, term in enumerate(terms):
                at = self._temperature_row(packet, solved, term.temperature)
                sums[3 * number : 3 * number + 3] = kernels.sum_slopes(packet, term, at)
        for rows in self._rows() if kernels is None else ():
            block = self._block(packet, solved, rows)
            block.exponentiate(softmaxes)
            for number, term in enumerate(terms):
                value, average, reference = block.sum_slopes(term)
                sums[3 * number : 3 * number + 3, rows] = torch.stack((value, average, reference))
        gathered = gather_ranks(sums, group)
        values = {}
        for number, term in enumerate(terms):
            value, average, reference = gathered[:, 3 * number : 3 * number + 3].unbind(1)
            values[term.key] = solved.made_whole(value.sum(0), term, packet.dtype)
            chosen = merged.at_top(reference)
            # Each rank summed relative to the slope at its own top token.
            shares = merged.shares(term.temperature)
            total = (average + shares * (reference - chosen)).sum(0)
            solved.slopes[term.key] = (
                chosen.to(packet.dtype).unsqueeze(1),
                total.to(packet.dtype).unsqueeze(1),
            )
        return values

    def _teacher_blocks(
        self, packet: Packet, solved: Solved, temperature: float
    ) -> Iterator[TeacherBlock]:
        softmaxes = [softmax for softmax in self.sweep.softmaxes if softmax[1] == temperature]
        for rows in self._rows():
            block = self._block(packet, solved, rows)
            block.exponentiate(softmaxes)
            yield block.for_head(rows, temperature)

    def _rows(self) -> list[slice]:
        student = self.raw["student"]
        if student.shape[1] == 0:
            return []
        return list(row_blocks(student.shape[0], student.shape[1], student.device))

    def _block(self, packet: Packet, solved: Solved, rows: slice) -> Block:
        part = Solved(
            solved.factors[:, rows],
            {model: logit[rows] for model, logit in solved.top.items()},
            {temperature: ratio[rows] for temperature, ratio in solved.top_ratios.items()},
        )
        student = self.rules["student"]
        own = packet.part(rows)
        return Block(self.sweep, self._load(rows), student, own, part, self.scratch)

    def _load(self, rows: slice) -> dict[Model, Tensor]:
        return {
            model: self.rules[model].load(raw[rows], self.scratch, f"{model}_logits")
            for model, raw in self.raw.items()
        }

    def _kernels(self) -> RowKernels | None:
        """The kernels for these rows, where there are any and the device is theirs."""
        student = self.raw["student"]
        rows = [term.divergence for term in self.sweep.curved]
        if student.numel() == 0 or any(row.kernel is None for row in rows):
            return None
        for raw in self.raw.values():
            # A kernel reads a row as it lies; columns apart from each other are for the chunks.
            if raw.stride(1) != 1 or not kernels_run(raw.device, raw.dtype):
                return None
        # Not before it is sure that Triton is there.
        from megatron_distill.ops.kernels.executor import RowKernels

        return RowKernels(self.raw, self.rules)

    def _temperature_row(
        self, packet: Packet, solved: Solved, temperature: float
    ) -> TemperatureRow:
        from megatron_distill.ops.kernels.executor import TemperatureRow

        nothing = packet.values.new_zeros(packet.values.shape[1], 1, dtype=packet.dtype)
        models: tuple[Model, Model] = ("student", "teacher")
        by_softmax = dict(zip(self.sweep.softmaxes, solved.factors.unsqueeze(2), strict=True))
        factors = (by_softmax.get((model, temperature), nothing) for model in models)
        tops = (solved.top.get(model, nothing) for model in models)
        ratio = solved.top_ratios.get(temperature, nothing)
        known = (one.to(packet.dtype).squeeze(1) for one in (*factors, *tops, ratio))
        return TemperatureRow(*known)

    def _measure_labels(self, packet: Packet) -> None:
        if self.labels is None or self.shard.real_width == 0:
            return
        owned, columns = self.shard.owns(self.labels), self.shard.local(self.labels).unsqueeze(1)
        for model, raw in self.raw.items():
            label = packet.rows[f"{model}_label"]
            label.copy_(raw.gather(1, columns).squeeze(1))
            label.copy_(torch.where(owned, self.rules[model].apply_(label), -math.inf))

"""One chunk of logits: measured, merged over ranks, and turned into its own gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.ops.adaptive_kl import TeacherBlock, head_share
from megatron_distill.ops.divergences import Model, WeightedDivergence
from megatron_distill.ops.kernels import kernels_run
from megatron_distill.ops.softmax_gradient import SoftmaxWeights
from megatron_distill.ops.statistics import (
    NEAR_KL,
    MergedStatistics,
    Packet,
    Sweep,
    measure_block,
)
from megatron_distill.ops.topk import gather_ranks
from megatron_distill.ops.torch_rows import Block
from megatron_distill.ops.vocab import VocabShard
from megatron_distill.ops.workspace import Scratch, load_logits, row_blocks
from megatron_distill.signals import LogitRule

if TYPE_CHECKING:
    from megatron_distill.ops.kernels.launch import RowKernels, TemperatureRow

__all__ = ["Chunk", "Solved"]


@dataclass(frozen=True)
class Solved:
    """What is known of each token of a chunk once the ranks have spoken.

    Attributes:
        factors: ``[S, N]`` fp64 of the softmaxes in order: what makes this shard's exponentials,
            relative to its peak, probabilities.
        top: ``[N, 1]`` each model's logit of the student's top token.
        top_ratios: ``[N, 1]`` fp64 per temperature: ``log p - log q`` of that token.
        shifts: ``[N, 1]`` fp64 per temperature of a term: what is to go from the teacher's logits
            less the student's, to make them log ratios times the temperature.
        near: bool ``[N, 1]`` per temperature of a term: the tokens near their teacher.
        values: ``[N]`` fp64 per term.
        slopes: ``[N, 1]`` per term with slopes: reference and average, see `Curved`.
        blends: ``[N, 1]`` per term that blends: the part of forward KL.
    """

    factors: Tensor
    top: Mapping[Model, Tensor] = field(default_factory=dict)
    top_ratios: Mapping[float, Tensor] = field(default_factory=dict)
    shifts: Mapping[float, Tensor] = field(default_factory=dict)
    near: Mapping[float, Tensor] = field(default_factory=dict)
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
        shifts, near = {}, {}
        for temperature in sweep.ratio_temperatures:
            shifts[temperature] = merged.shift(temperature).mul_(temperature).unsqueeze(1)
            near[temperature] = (merged.forward_kl(temperature) < NEAR_KL).unsqueeze(1)
        if not sweep.curved:
            return cls(factors, shifts=shifts, near=near)
        top = {model: logit.to(dtype).unsqueeze(1) for model, logit in merged.top.items()}
        top_ratios = {
            temperature: merged.top_ratio(temperature).unsqueeze(1)
            for temperature in {term.temperature for term in sweep.curved}
        }
        return cls(factors, top, top_ratios, shifts, near)

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

    def part(self, tokens: slice | Tensor, dtype: torch.dtype) -> Solved:
        """What a block of some tokens is made with."""
        return Solved(
            self.factors[:, tokens],
            {model: logit[tokens].to(dtype) for model, logit in self.top.items()},
            {temperature: ratio[tokens] for temperature, ratio in self.top_ratios.items()},
        )

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
            own = packet.part(rows)
            measure_block(own, self._load(rows), self.scratch)
            near = own.near_tokens()
            if near is not None:
                self._measure_near(own, near, self._load(_at(rows, near), self._double))

    def push(
        self, packet: Packet, solved: Solved, weights: Sequence[SoftmaxWeights], out: Tensor
    ) -> None:
        """Write the gradient on the student's raw outputs to ``out``, which may be these outputs.

        Of the packet the statistics between both models are read, and the peaks.
        """
        known = [softmax.with_slopes(solved.slopes).blended(solved.blends) for softmax in weights]
        kernels = self._kernels()
        if kernels is not None and kernels.can_push(known):
            at = [self._temperature_row(packet, solved, one.temperature) for one in known]
            kernels.push(packet, at, known, out)
            return
        for block, tokens in self._blocks(packet, solved):
            block.exponentiate(self.sweep.softmaxes)
            self._write_gradient(block, known, out, tokens)

    def _process_blocks(
        self, packet: Packet, weights: Sequence[SoftmaxWeights], out: Tensor
    ) -> tuple[MergedStatistics, Mapping[str, Tensor]]:
        """All sweeps of one block after another, as one rank alone can."""
        self._measure_labels(packet)
        count = packet.values.shape[1]
        values = {term.key: packet.values.new_zeros(count) for term in self.sweep.curved}
        blends = {
            term.key: packet.values.new_zeros(count, 1)
            for term in self.sweep.curved
            if term.divergence.head_mass is not None
        }
        for rows in self._rows():
            own, logits = packet.part(rows), self._load(rows)
            measure_block(own, logits, self.scratch)
            parts: list[tuple[Packet, dict[Model, Tensor], slice | Tensor, Scratch]]
            parts = [(own, logits, rows, self.scratch)]
            near = own.near_tokens()
            if near is not None:
                tokens = _at(rows, near)
                # Before a gradient takes the place of these logits.
                near_logits = self._load(tokens, self._double)
                part = self._measure_near(own, near, near_logits)
                parts.append((part, near_logits, tokens, self._double))
            for part, given, tokens, scratch in parts[isinstance(near, slice) :]:
                solved = Solved.alone(part)
                block = Block(self.sweep, given, self.rules["student"], part, solved, scratch)
                for key, blend in blends.items():
                    solved.blends[key] = block.blend(self._term(key))
                    blend[tokens] = solved.blends[key].double()
                found = self._write_gradient(block, weights, out, tokens, solved.blends)
                for key, value in found.items():
                    values[key][tokens] = value
        merged = packet.merge(None)
        whole = Solved(packet.values[:0], blends=blends)
        for term in self.sweep.terms:
            whole.set_value(term, merged, values.get(term.key))
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
                found = kernels.sum_slopes(packet, term, at)
                top_ratio = solved.top_ratios[term.temperature].squeeze(1)
                whole = packet.made_whole(found[0], term, top_ratio, at.student_factor)
                # The sums of tokens near their teacher do not have it.
                found[0] = torch.where(at.is_near > 0, found[0], whole)
                sums[3 * number : 3 * number + 3] = found
        for block, tokens in self._blocks(packet, solved) if kernels is None else ():
            block.exponentiate(softmaxes)
            for number, term in enumerate(terms):
                value, average, reference = block.sum_slopes(term)
                found = torch.stack((value, average, reference.double()))
                sums[3 * number : 3 * number + 3, tokens] = found
        gathered = gather_ranks(sums, group)
        values = {}
        for number, term in enumerate(terms):
            value, average, reference = gathered[:, 3 * number : 3 * number + 3].unbind(1)
            values[term.key] = value.sum(0)
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
            block = self._block(packet, solved, rows, self.scratch)
            block.exponentiate(softmaxes)
            yield block.for_head(rows, temperature)

    def _blocks(self, packet: Packet, solved: Solved) -> Iterator[tuple[Block, slice | Tensor]]:
        """Blocks, and where their tokens stand. Those near their teacher come in one of their own,
        in fp64, after one that they may be in as well."""
        for rows in self._rows():
            near, apart = packet.part(rows).near_tokens(), None
            if near is not None:
                tokens = _at(rows, near)
                # Before a gradient takes the place of these logits.
                apart = self._block(packet, solved, tokens, self._double)
            if not isinstance(near, slice):
                yield self._block(packet, solved, rows, self.scratch), rows
            if apart is not None:
                yield apart, tokens

    def _measure_near(
        self, packet: Packet, near: slice | Tensor, logits: Mapping[Model, Tensor]
    ) -> Packet:
        """Measure the tokens of a block that are near their teacher once more, in fp64: what is
        between alike models is small beside what fp32 rounds off."""
        part = packet.in_double(near)
        measure_block(part, logits, self._double)
        packet.values[:, near] = part.values
        return part

    def _write_gradient(
        self,
        block: Block,
        weights: Sequence[SoftmaxWeights],
        out: Tensor,
        tokens: slice | Tensor,
        blends: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> dict[str, Tensor]:
        """`Block.gradient` of the tokens that stand there in ``out [N, V]``."""
        dtype = block.scratch.dtype
        given = [softmax.rows(tokens, dtype).blended(blends) for softmax in weights]
        if isinstance(tokens, slice):
            return block.gradient(given, out[tokens])
        found = out.new_empty(len(tokens), out.shape[1])
        values = block.gradient(given, found)
        out.index_copy_(0, tokens, found)
        return values

    @cached_property
    def _double(self) -> Scratch:
        return self.scratch.in_double()

    def _term(self, key: str) -> WeightedDivergence:
        return next(term for term in self.sweep.terms if term.key == key)

    def _rows(self) -> list[slice]:
        student = self.raw["student"]
        if student.shape[1] == 0:
            return []
        return list(row_blocks(student.shape[0], student.shape[1], student.device))

    def _block(
        self, packet: Packet, solved: Solved, tokens: slice | Tensor, scratch: Scratch
    ) -> Block:
        if scratch is self.scratch:
            assert isinstance(tokens, slice)
            own = packet.part(tokens)
        else:
            own = packet.in_double(tokens)
        part, rule = solved.part(tokens, scratch.dtype), self.rules["student"]
        return Block(self.sweep, self._load(tokens, scratch), rule, own, part, scratch)

    def _load(self, tokens: slice | Tensor, scratch: Scratch | None = None) -> dict[Model, Tensor]:
        scratch = self.scratch if scratch is None else scratch
        return {
            model: load_logits(self.rules[model], raw[tokens], scratch, f"{model}_logits")
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
        from megatron_distill.ops.kernels.launch import RowKernels

        return RowKernels(self.raw, self.rules)

    def _temperature_row(
        self, packet: Packet, solved: Solved, temperature: float
    ) -> TemperatureRow:
        from megatron_distill.ops.kernels.launch import TemperatureRow

        nothing = packet.values.new_zeros(packet.values.shape[1], 1, dtype=packet.dtype)
        models: tuple[Model, Model] = ("student", "teacher")
        by_softmax = dict(zip(self.sweep.softmaxes, solved.factors.unsqueeze(2), strict=True))
        factors = (by_softmax.get((model, temperature), nothing) for model in models)
        tops = (solved.top.get(model, nothing) for model in models)
        ratio = solved.top_ratios.get(temperature, nothing)
        shift = solved.shifts.get(temperature, nothing.double())
        high = shift.to(packet.dtype)
        near = solved.near.get(temperature, nothing)
        known = (*factors, *tops, ratio, high, shift - high, near)
        return TemperatureRow(*(one.to(packet.dtype).squeeze(1) for one in known))

    def _measure_labels(self, packet: Packet) -> None:
        if self.labels is None or self.shard.real_width == 0:
            return
        owned, columns = self.shard.owns(self.labels), self.shard.local(self.labels).unsqueeze(1)
        for model, raw in self.raw.items():
            label = packet.rows[f"{model}_label"]
            label.copy_(raw.gather(1, columns).squeeze(1))
            label.copy_(torch.where(owned, self.rules[model].apply_(label), -math.inf))


def _at(rows: slice, tokens: slice | Tensor) -> slice | Tensor:
    """Where tokens of these rows stand in the chunk."""
    return rows if isinstance(tokens, slice) else tokens + rows.start

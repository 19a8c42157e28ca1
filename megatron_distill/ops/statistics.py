"""Row statistics of a vocabulary shard, and their exact merge over tensor-parallel ranks.

A rank describes each token by a few numbers about its own columns: the peak logit, the sum of
``e^((z - peak)/T)`` and sums weighted by these exponentials. One all-gather of this packet, and
every rank computes the same global values from the same numbers in the same order: identical bits.
The expectation of the log ratio is summed as ``e^(z_t - peak) (z_t - z_s)``, so that equal models
have a divergence of exactly zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.ops.blocks import Scratch
from megatron_distill.ops.divergence import Model, WeightedDivergence

__all__ = ["MergedStatistics", "Packet", "Sweep", "exponentiate", "measure_block", "row_top"]

_SEGMENT = 128
# Exponentials are taken to base two: twice as fast on a CPU, and any temperature costs the same.
_LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Sweep:
    """What one pass over the logits measures.

    Attributes:
        models: whose logits there are.
        terms: the divergences between them.
        full: also softmaxes at temperature one, label logits, entropies and the top token.
        infinite: whether logits may be -inf. Such an id has no probability, and where that is so on
            both sides it counts for nothing.
    """

    models: tuple[Model, ...]
    terms: tuple[WeightedDivergence, ...]
    full: bool
    infinite: bool = False

    @cached_property
    def temperatures(self) -> tuple[float, ...]:
        """Temperatures of the softmaxes, each once; one comes first in a full sweep."""
        wanted = [1.0] if self.full else []
        return tuple(dict.fromkeys(wanted + [term.temperature for term in self.terms]))

    @cached_property
    def softmaxes(self) -> tuple[tuple[Model, float], ...]:
        """Every model at every temperature."""
        return tuple((model, value) for model in self.models for value in self.temperatures)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Rows of the packet, in order: floats per token that a rank sends."""
        names = [f"{model}_peak" for model in self.models]
        names += [f"{model}_mass@{temperature}" for model, temperature in self.softmaxes]
        if self.full:
            names += [f"{model}_{what}" for model in self.models for what in ("label", "log")]
            names += ["teacher_at_top"] if "teacher" in self.models else []
        return tuple(names + [term.key for term in self.terms])


@dataclass(frozen=True)
class Packet:
    """This rank's statistics: one row of ``values [K, N]`` per name of the sweep."""

    sweep: Sweep
    values: Tensor

    @classmethod
    def empty(cls, sweep: Sweep, rows: int, dtype: torch.dtype, device: torch.device) -> Packet:
        """The packet of a shard without real columns: no mass, and no peak to speak of."""
        packet = cls(sweep, torch.zeros(len(sweep.names), rows, dtype=dtype, device=device))
        for name, values in packet.rows().items():
            if name.endswith("_peak"):
                values.fill_(_lowest(dtype))
            elif name.endswith("_label"):
                values.fill_(-math.inf)
        return packet

    def rows(self, rows: slice = slice(None)) -> dict[str, Tensor]:
        """The statistics ``[N]`` of some tokens by name, as views."""
        return dict(zip(self.sweep.names, self.values[:, rows].unbind(), strict=True))

    def merge(self, group: dist.ProcessGroup | None) -> MergedStatistics:
        """Exact statistics over the whole vocabulary, with identical bits on every rank.

        Collective: one all-gather over ``group`` of 4 bytes per name of the sweep and token (8 in
        fp64); none where ``group`` is None.
        """
        if group is None:
            return MergedStatistics(self.sweep, self.values.unsqueeze(0).double())
        world = dist.get_world_size(group)
        gathered = self.values.new_empty(world * self.values.shape[0], self.values.shape[1])
        dist.all_gather_into_tensor(gathered, self.values, group=group)
        return MergedStatistics(self.sweep, gathered.view(world, *self.values.shape).double())


@dataclass(frozen=True)
class MergedStatistics:
    """Packets of all ranks, ``gathered [ranks, K, N]`` in fp64, and what follows from them."""

    sweep: Sweep
    gathered: Tensor

    def __getitem__(self, name: str) -> Tensor:
        """The row of that name of every rank: ``[ranks, N]``."""
        return self.gathered[:, self.sweep.names.index(name)]

    def _shard_log_mass(self, model: Model, temperature: float) -> Tensor:
        peak, mass = self[f"{model}_peak"], self[f"{model}_mass@{temperature}"]
        return peak / temperature + mass.log()

    def log_normalizer(self, model: Model, temperature: float) -> Tensor:
        """``[N]`` log of the sum of ``e^(z/T)`` over the vocabulary."""
        return self._shard_log_mass(model, temperature).logsumexp(0)

    def _average(self, model: Model, temperature: float, summed: Tensor) -> Tensor:
        """Combine the ranks' ``summed [ranks, N]``, each by its share of the probability."""
        mass = self[f"{model}_mass@{temperature}"]
        log_mass = self._shard_log_mass(model, temperature)
        share = (log_mass - log_mass.logsumexp(0)).exp()
        return torch.where(mass == 0, 0.0, share * summed / mass).sum(0)

    def divergence(self, term: WeightedDivergence) -> Tensor:
        """``[N]`` value of a term, without its coefficient."""
        row, temperature = term.divergence, term.temperature
        ratio = self._average(row.expectation, temperature, self[term.key]) / temperature
        student = self.log_normalizer("student", temperature)
        return ratio - (self.log_normalizer("teacher", temperature) - student)

    def cross_entropy(self, model: Model) -> Tensor:
        """``[N]`` negative log probability of the label; infinite if no rank owns the label."""
        return self.log_normalizer(model, 1.0) - self[f"{model}_label"].amax(0)

    def entropy(self, model: Model) -> Tensor:
        """``[N]`` entropy at temperature one, in nats."""
        # log q = (z - peak) + (peak - L), and the packet has the average of the first bracket.
        log_sum = self[f"{model}_log"] + self[f"{model}_mass@1.0"] * self[f"{model}_peak"]
        return self.log_normalizer(model, 1.0) - self._average(model, 1.0, log_sum)

    def agreement(self) -> Tensor:
        """``[N]`` whether the student's most probable token is one of the teacher's, as 0 or 1."""
        owner = self["student_peak"].argmax(0, keepdim=True)
        teacher = self["teacher_at_top"].gather(0, owner).squeeze(0)
        return (teacher == self["teacher_peak"].amax(0)).double()

    def shard_factor(self, packet: Packet, model: Model, temperature: float) -> Tensor:
        """``[N]`` what turns this rank's exponentials into global probabilities."""
        peak = packet.rows()[f"{model}_peak"].double()
        factor = (peak / temperature - self.log_normalizer(model, temperature)).exp()
        return factor.to(packet.values.dtype)


def exponentiate(logits: Tensor, peak: Tensor, temperature: float, out: Tensor) -> Tensor:
    """``e^((logits - peak) / temperature)`` of ``[N, V]`` and ``[N]`` into ``out``."""
    torch.sub(logits, peak.unsqueeze(1), out=out)
    return out.mul_(_LOG2_E / temperature).exp2_()


def row_top(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Largest value and its lowest column per row of ``[N, V]``, V > 0."""
    segments = logits.shape[1] // _SEGMENT
    if logits.device.type != "cpu" or segments == 0:
        values, columns = logits.max(1)
        return values, columns
    # torch's max with index is not vectorised on a CPU: find the segment first.
    parts = logits[:, : segments * _SEGMENT].unfold(1, _SEGMENT, _SEGMENT)
    value, segment = parts.amax(2).max(1)
    within = parts[torch.arange(logits.shape[0]), segment].argmax(1)
    column = within.add_(segment, alpha=_SEGMENT)
    if logits.shape[1] == segments * _SEGMENT:
        return value, column
    last_value, last_column = logits[:, segments * _SEGMENT :].max(1)
    later = last_value > value
    return (
        torch.where(later, last_value, value),
        torch.where(later, last_column + segments * _SEGMENT, column),
    )


def measure_block(
    sweep: Sweep,
    statistics: Mapping[str, Tensor],
    logits: Mapping[Model, Tensor],
    scratch: Scratch,
) -> None:
    """Fill the statistics ``[N]`` of a row block, all but the label logits.

    ``logits [N, V]`` are those of this shard's real columns, V > 0, in the dtype of statistics.
    Leaves every softmax's exponentials in the scratch buffers ``MODEL@T``.
    """
    _measure_peaks(sweep, statistics, logits)
    rows = logits["student"].shape[0]
    spare = scratch.take("spare", rows)
    for model, temperature in sweep.softmaxes:
        peak, buffer = statistics[f"{model}_peak"], scratch.take(f"{model}@{temperature}", rows)
        mass = statistics[f"{model}_mass@{temperature}"]
        if sweep.full and temperature == 1.0:
            torch.sub(logits[model], peak.unsqueeze(1), out=spare)
            torch.mul(spare, _LOG2_E, out=buffer).exp2_()
            torch.sum(buffer, 1, out=mass)
            if sweep.infinite:
                spare.clamp_(min=_lowest(spare.dtype))
            torch.sum(spare.mul_(buffer), 1, out=statistics[f"{model}_log"])
        else:
            exponentiate(logits[model], peak, temperature, buffer)
            torch.sum(buffer, 1, out=mass)
    for term in sweep.terms:
        torch.sub(logits["teacher"], logits["student"], out=spare)
        if sweep.infinite:
            lowest = _lowest(spare.dtype)
            spare.nan_to_num_(nan=0.0, posinf=-lowest, neginf=lowest)
        student = scratch.take(f"student@{term.temperature}", rows)
        teacher = scratch.take(f"teacher@{term.temperature}", rows)
        summands = term.divergence.weighted_log_ratio(student, teacher, spare)
        torch.sum(summands, 1, out=statistics[term.key])


def _measure_peaks(
    sweep: Sweep, statistics: Mapping[str, Tensor], logits: Mapping[Model, Tensor]
) -> None:
    if sweep.full and "teacher" in sweep.models:
        peak, column = row_top(logits["student"])
        statistics["student_peak"].copy_(peak)
        torch.amax(logits["teacher"], 1, out=statistics["teacher_peak"])
        at_top = statistics["teacher_at_top"].unsqueeze(1)
        torch.gather(logits["teacher"], 1, column.unsqueeze(1), out=at_top)
    else:
        for model in sweep.models:
            torch.amax(logits[model], 1, out=statistics[f"{model}_peak"])
    if sweep.infinite:
        for model in sweep.models:
            peak = statistics[f"{model}_peak"]
            peak.clamp_(min=_lowest(peak.dtype))


def _lowest(dtype: torch.dtype) -> float:
    """What stands for -inf; differences of two are finite, at temperatures down to 1/2."""
    return torch.finfo(dtype).min / 4

"""Row statistics of a vocabulary shard, and their exact merge over tensor-parallel ranks.

A rank describes each token by a few numbers about its own columns: the peak logit, the sum of
``e^((z - peak)/T)`` and sums weighted by these exponentials. One all-gather of this packet, and
every rank computes the same global values from the same numbers in the same order: identical bits.
The expectation of the log ratio under the teacher is summed as ``e^(z_t - peak) (z_t - z_s)``, so
that equal models have a divergence of exactly zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.ops.blocks import Scratch
from megatron_distill.ops.classes import Model
from megatron_distill.ops.divergence import WeightedDivergence
from megatron_distill.ops.exponentials import Origin, exponentiate
from megatron_distill.ops.reductions import row_sums, row_top

__all__ = [
    "MergedStatistics",
    "Packet",
    "Sweep",
    "gap_beyond_top",
    "measure_block",
]


@dataclass(frozen=True)
class Sweep:
    """What one pass over the logits measures.

    Attributes:
        models: whose logits there are.
        terms: the divergences between them.
        student_temperatures: further ones of the student's softmax, for what is not between logits.
        full: also softmaxes at temperature one, label logits, entropies and the top token.
        infinite: whether logits may be -inf. Such an id has no probability, and where that is so on
            both sides it counts for nothing.
    """

    models: tuple[Model, ...]
    terms: tuple[WeightedDivergence, ...]
    full: bool
    infinite: bool = False
    student_temperatures: tuple[float, ...] = ()

    @cached_property
    def temperatures(self) -> tuple[float, ...]:
        """Temperatures at which both models have a softmax; one comes first in a full sweep."""
        wanted = [1.0] if self.full else []
        return tuple(dict.fromkeys(wanted + [term.temperature for term in self.terms]))

    @cached_property
    def softmaxes(self) -> tuple[tuple[Model, float], ...]:
        """Every model at every temperature, and the student at those of its own."""
        shared = [(model, value) for model in self.models for value in self.temperatures]
        own: list[tuple[Model, float]] = [("student", value) for value in self.student_temperatures]
        return tuple(dict.fromkeys(shared + own))

    @cached_property
    def ratio_temperatures(self) -> tuple[float, ...]:
        """Temperatures at which the average of the log ratio is measured: those of forward KL."""
        return tuple(
            dict.fromkeys(term.temperature for term in self.terms if term.divergence.has_forward_kl)
        )

    @cached_property
    def curved(self) -> tuple[WeightedDivergence, ...]:
        """The terms whose gradients need slopes."""
        return tuple(term for term in self.terms if not term.divergence.is_linear)

    @property
    def exact(self) -> bool:
        """Whether exponentials are wanted to the last bit: slopes compare those of both models."""
        return bool(self.curved)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Rows of the packet, in order: floats per token that a rank sends."""
        names = [f"{model}_peak" for model in self.models]
        names += [f"{model}_mass@{temperature}" for model, temperature in self.softmaxes]
        if self.full:
            names += [f"{model}_{what}" for model in self.models for what in ("label", "log")]
        if self.curved or (self.full and "teacher" in self.models):
            names.append("teacher_at_top")
        return (*names, *(f"ratio@{temperature}" for temperature in self.ratio_temperatures))


@dataclass(frozen=True)
class Packet:
    """This rank's statistics: one row of ``values [K, N]`` fp64 per name of the sweep.

    Masses are sent as they were added up: where models are much alike, what fp32 would round off
    is a part of how far they are apart.

    Attributes:
        sweep: what was measured.
        values: the statistics.
        dtype: of the logits and their exponentials.
        top: ``[N]`` the column of the student's largest logit here, where a term needs slopes. Not
            sent.
    """

    sweep: Sweep
    values: Tensor
    dtype: torch.dtype
    top: Tensor | None = None
    # A block asks again and again, and it takes a dozen small operations.
    _origins: dict[tuple[Model, float], Origin] = field(default_factory=dict, compare=False)

    @classmethod
    def empty(cls, sweep: Sweep, rows: int, dtype: torch.dtype, device: torch.device) -> Packet:
        """The packet of a shard without real columns: no mass, and no peak to speak of."""
        values = torch.zeros(len(sweep.names), rows, dtype=torch.float64, device=device)
        top = torch.zeros(rows, dtype=torch.int64, device=device) if sweep.curved else None
        packet = cls(sweep, values, dtype, top)
        for name, values in packet.rows().items():
            if name.endswith("_peak"):
                values.fill_(_lowest(dtype))
            elif name.endswith("_label"):
                values.fill_(-math.inf)
        return packet

    def rows(self, rows: slice = slice(None)) -> dict[str, Tensor]:
        """The statistics ``[N]`` of some tokens by name, as views."""
        return dict(zip(self.sweep.names, self.values[:, rows].unbind(), strict=True))

    def origin(self, model: Model, temperature: float) -> Origin:
        """What the exponentials of a softmax are relative to, once the peaks are there."""
        if (model, temperature) not in self._origins:
            rows = self.rows()
            peak = rows[f"{model}_peak"].to(self.dtype)
            origin = Origin(peak)
            if self.sweep.exact:
                differ = rows["teacher_at_top"] < rows["teacher_peak"]
                origin = Origin.of(peak, temperature, differ=differ)
            self._origins[model, temperature] = origin
        return self._origins[model, temperature]

    def part(self, rows: slice) -> Packet:
        """The packet of some tokens, as views."""
        top = None if self.top is None else self.top[rows]
        return Packet(self.sweep, self.values[:, rows], self.dtype, top)

    def merge(self, group: dist.ProcessGroup | None) -> MergedStatistics:
        """Exact statistics over the whole vocabulary, with identical bits on every rank.

        Collective: one all-gather over ``group`` of 8 bytes per name of the sweep and token; none
        where ``group`` is None.
        """
        if group is None:
            return MergedStatistics(self.sweep, self.values.unsqueeze(0))
        world = dist.get_world_size(group)
        gathered = self.values.new_empty(world * self.values.shape[0], self.values.shape[1])
        dist.all_gather_into_tensor(gathered, self.values, group=group)
        return MergedStatistics(self.sweep, gathered.view(world, *self.values.shape))


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

    def shift(self, temperature: float) -> Tensor:
        """``[N]`` log normaliser of the teacher less that of the student."""
        student = self.log_normalizer("student", temperature)
        return self.log_normalizer("teacher", temperature) - student

    def forward_kl(self, temperature: float) -> Tensor:
        """``[N]`` forward KL."""
        summed = self[f"ratio@{temperature}"]
        average = self._average("teacher", temperature, summed) / temperature
        return average - self.shift(temperature)

    @property
    def top(self) -> dict[Model, Tensor]:
        """``[N]`` each model's logit of the student's top token."""
        teacher = self.at_top(self["teacher_at_top"])
        return {"student": self["student_peak"].amax(0), "teacher": teacher}

    def top_ratio(self, temperature: float) -> Tensor:
        """``[N]`` ``log p - log q`` of the student's top token."""
        gap = self.top["teacher"] - self.top["student"]
        return gap / temperature - self.shift(temperature)

    def shares(self, temperature: float) -> Tensor:
        """``[ranks, N]`` the student's mass on each rank's columns."""
        log_mass = self._shard_log_mass("student", temperature)
        return (log_mass - log_mass.logsumexp(0)).exp()

    def at_top(self, gathered: Tensor) -> Tensor:
        """Of ``[ranks, N]`` the entries of the rank that holds the student's top token: ``[N]``."""
        owner = self["student_peak"].argmax(0, keepdim=True)
        return gathered.gather(0, owner).squeeze(0)

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
        teacher = self.at_top(self["teacher_at_top"])
        return (teacher == self["teacher_peak"].amax(0)).double()

    def agreement_at(self, logit: Tensor) -> Tensor:
        """``[N]`` whether these logits are the student's largest, as 0 or 1."""
        return (logit == self["student_peak"].amax(0)).double()

    def shard_factor(self, packet: Packet, model: Model, temperature: float) -> Tensor:
        """``[N]`` what turns this rank's exponentials into global probabilities."""
        peak = packet.rows()[f"{model}_peak"]
        factor = (peak / temperature - self.log_normalizer(model, temperature)).exp()
        return factor.to(packet.dtype)


def measure_block(packet: Packet, logits: Mapping[Model, Tensor], scratch: Scratch) -> None:
    """Fill the packet of a row block, all but the label logits.

    ``logits [N, V]`` are those of this shard's real columns, V > 0, in the dtype of statistics.
    Leaves every softmax's exponentials in the scratch buffers ``MODEL@T``.
    """
    sweep, statistics = packet.sweep, packet.rows()
    _measure_peaks(packet, statistics, logits)
    rows = logits["student"].shape[0]
    spare, exact = scratch.take("spare", rows), sweep.exact
    origins = {}
    for model, temperature in sweep.softmaxes:
        buffer = scratch.take(f"{model}@{temperature}", rows)
        origin = origins[model, temperature] = packet.origin(model, temperature)
        point = origin.point
        exponentiate(logits[model], point, temperature, buffer, spare=spare if exact else None)
        mass = origin.relative_to_peak(row_sums(buffer))
        statistics[f"{model}_mass@{temperature}"].copy_(mass)
        if sweep.full and temperature == 1.0:
            peak = statistics[f"{model}_peak"].to(packet.dtype).unsqueeze(1)
            torch.sub(logits[model], peak, out=spare)
            if sweep.infinite:
                spare.clamp_(min=_lowest(spare.dtype))
            log = origin.relative_to_peak(row_sums(spare.mul_(buffer)))
            statistics[f"{model}_log"].copy_(log)
    for temperature in sweep.ratio_temperatures:
        _logit_gap(logits, spare, infinite=sweep.infinite)
        spare.mul_(scratch.take(f"teacher@{temperature}", rows))
        ratio = origins["teacher", temperature].relative_to_peak(row_sums(spare))
        # Where the student has no probability, a product may not have fitted.
        most = -_lowest(packet.dtype) if sweep.infinite else math.inf
        torch.clamp(ratio, max=most, out=statistics[f"ratio@{temperature}"])


def _logit_gap(logits: Mapping[Model, Tensor], out: Tensor, *, infinite: bool) -> Tensor:
    """The teacher's logits less the student's, finite where one of them is -inf."""
    torch.sub(logits["teacher"], logits["student"], out=out)
    if infinite:
        lowest = _lowest(out.dtype)
        out.nan_to_num_(nan=0.0, posinf=-lowest, neginf=lowest)
    return out


def gap_beyond_top(
    logits: Mapping[Model, Tensor],
    top: Mapping[Model, Tensor],
    out: Tensor,
    *,
    spare: Tensor,
    infinite: bool,
) -> Tensor:
    """The teacher's logits ``[N, V]`` less the student's, less what is between them at ``top``.

    That ``[N, 1]`` goes from each model first: what is rounded then is no larger than the result,
    or belongs to a token far below the student's top one.
    """
    buffers: dict[Model, Tensor] = {"teacher": out, "student": spare}
    for model, buffer in buffers.items():
        if infinite:
            torch.clamp(logits[model], min=_lowest(out.dtype), out=buffer).sub_(top[model])
        else:
            torch.sub(logits[model], top[model], out=buffer)
    return out.sub_(spare)


def _measure_peaks(
    packet: Packet, statistics: Mapping[str, Tensor], logits: Mapping[Model, Tensor]
) -> None:
    sweep, compares = packet.sweep, "teacher_at_top" in statistics
    if compares or packet.top is not None:
        peak, column = row_top(logits["student"])
        statistics["student_peak"].copy_(peak)
        statistics["teacher_peak"].copy_(logits["teacher"].amax(1))
        if compares:
            at_top = logits["teacher"].gather(1, column.unsqueeze(1)).squeeze(1)
            statistics["teacher_at_top"].copy_(at_top)
        if packet.top is not None:
            packet.top.copy_(column)
    else:
        for model in sweep.models:
            statistics[f"{model}_peak"].copy_(logits[model].amax(1))
    if sweep.infinite:
        lowest = _lowest(packet.dtype)
        for name in ("student_peak", "teacher_peak", "teacher_at_top"):
            if name in statistics:
                statistics[name].clamp_(min=lowest)


def _lowest(dtype: torch.dtype) -> float:
    """What stands for -inf; differences of two are finite, at temperatures down to 1/2."""
    return torch.finfo(dtype).min / 4

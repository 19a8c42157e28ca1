"""Partial softmax statistics of a vocabulary shard, and their exact merge over ranks.

A rank computes a few numbers per token over its columns. These are the peak logit, the sum of
``e^((z - peak)/T)``, and sums weighted by these exponentials. One all-gather exchanges these
packets. Every rank then computes the global values from the same numbers in the same order:
identical bits. The expectation of the log ratio under the teacher is summed as ``e^(z_t - peak)
(z_t - z_s)``. So equal models have a divergence of exactly zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.ops.divergences import Model, WeightedDivergence
from megatron_distill.ops.row_math import LOG_2, ExponentShifts, row_sums, row_top
from megatron_distill.ops.workspace import Scratch

__all__ = [
    "GlobalStatistics",
    "NEAR_KL",
    "LocalStatistics",
    "Softmax",
    "StatisticsSpec",
    "gap_beyond_top",
    "measure_block",
]


# Replaces -inf in log ratios: negligible times the smallest normal probability, large times any
# probability that counts.
_FAR = 1e20
# Forward KL in nats below which a token is near its teacher: below it fp32 has few digits.
NEAR_KL = 2.0**-4


@dataclass(frozen=True)
class LocalStatistics:
    """This rank's partial statistics: one row of ``values [K, N]`` fp64 per name of the spec.

    Masses stay fp64: for similar models, fp32 rounding would be a part of their divergence.

    Attributes:
        spec: names and order of the statistics.
        values: the statistics.
        dtype: of the logits and their exponentials.
        top: ``[N]`` column of the student's largest logit in this shard, if a term needs slopes.
            Local to the rank.
    """

    spec: StatisticsSpec
    values: Tensor
    dtype: torch.dtype
    top: Tensor | None = None

    @classmethod
    def empty(
        cls, spec: StatisticsSpec, rows: int, dtype: torch.dtype, device: torch.device
    ) -> LocalStatistics:
        """The statistics of a shard without real columns: zero mass, and the lowest peak."""
        values = torch.zeros(len(spec.names), rows, dtype=torch.float64, device=device)
        top = torch.zeros(rows, dtype=torch.int64, device=device) if spec.nonlinear else None
        local = cls(spec, values, dtype, top)
        for name, values in local.rows.items():
            if name.endswith("_peak"):
                values.fill_(_lowest(dtype))
            elif name.endswith("_label"):
                values.fill_(-math.inf)
        return local

    @cached_property
    def rows(self) -> dict[str, Tensor]:
        """The statistics ``[N]`` by name, as views."""
        return dict(zip(self.spec.names, self.values.unbind(), strict=True))

    @property
    def sums(self) -> Tensor:
        """``[K, N]`` the statistics that are sums, the masses of the softmaxes first, as views."""
        first = len(self.spec.extremes)
        return self.values[first : first + len(self.spec.sums)]

    # Cached for all softmaxes at once: every block reads these, and small operations add up.
    @cached_property
    def extremes(self) -> Tensor:
        """``[E, N]`` the statistics that are logits, in their dtype; valid once measured."""
        return self.values[: len(self.spec.extremes)].to(self.dtype)

    @cached_property
    def exponent_shifts(self) -> ExponentShifts:
        """Shift of the exponentials of each softmax; valid once peaks have been measured."""
        models, softmaxes, logits = self.spec.models, self.spec.softmaxes, self.extremes
        temperatures = tuple(temperature for _, temperature in softmaxes)
        peaks = logits[: len(models)]
        if [model for model, _ in softmaxes] != list(models):
            peaks = torch.stack([logits[models.index(model)] for model, _ in softmaxes])
        if not self.spec.terms:
            return ExponentShifts(temperatures, peaks, None, exact=False)
        if not self.spec.exact:
            return ExponentShifts.offsets(peaks, temperatures)
        teacher, at_top = models.index("teacher"), self.spec.extremes.index("teacher_at_top")
        differ = logits[at_top] < logits[teacher]
        return ExponentShifts.exactly(peaks, temperatures, differ=differ)

    def made_whole(
        self, value: Tensor, term: WeightedDivergence, top_ratio: Tensor, factor: Tensor
    ) -> Tensor:
        """``value [N]`` plus the part lost when its summands rounded the top ratio, fp64 ``[N]``.

        The factor ``[N]`` turns this shard's mass into the student's probability of the shard.
        """
        if term.divergence.of_top_ratio == 0:
            return value
        lost = (top_ratio - top_ratio.to(self.dtype)).nan_to_num_(0.0, 0.0, 0.0)
        mass = self.rows[f"student_mass@{term.temperature}"] * factor
        return value + lost.mul_(mass).mul_(term.divergence.of_top_ratio)

    def near_tokens(self) -> Tensor | slice | None:
        """Numbers of the tokens whose models are too similar on this shard for fp32, or None.

        Too similar at one temperature of the terms is enough. On a GPU all tokens, without a test:
        it would synchronise the host.
        """
        if self.dtype == torch.float64 or not self.spec.ratio_temperatures:
            return None
        if self.values.device.type != "cpu":
            return slice(None)
        rows, near = self.rows, []
        peaks = rows["teacher_peak"] - rows["student_peak"]
        for temperature in self.spec.ratio_temperatures:
            teacher, student = (
                rows[f"{model}_mass@{temperature}"] for model in ("teacher", "student")
            )
            # The KL between both models' softmaxes over this shard's columns alone.
            gap = (rows[f"ratio@{temperature}"] / teacher).sub_(peaks).div_(temperature)
            near.append(gap.sub_((teacher / student).log_()) < NEAR_KL)
        any_near = near[0] if len(near) == 1 else torch.stack(near).any(0)
        if bool(any_near.all()):
            return slice(None)
        return any_near.nonzero().squeeze(1) if bool(any_near.any()) else None

    def in_double(self, tokens: Tensor | slice) -> LocalStatistics:
        """A copy for some tokens, with fp64 logits and exponentials."""
        top = None if self.top is None else self.top[tokens]
        return LocalStatistics(self.spec, self.values[:, tokens].clone(), torch.float64, top)

    def part(self, rows: slice) -> LocalStatistics:
        """The statistics of some tokens, as views."""
        top = None if self.top is None else self.top[rows]
        return LocalStatistics(self.spec, self.values[:, rows], self.dtype, top)

    def merge(self, group: dist.ProcessGroup | None) -> GlobalStatistics:
        """Exact statistics over the whole vocabulary, with identical bits on every rank.

        Collective: one all-gather over ``group`` of 8 bytes per name of the spec and token; none
        where ``group`` is None.
        """
        if group is None:
            return GlobalStatistics(self.spec, self.values.unsqueeze(0))
        world = dist.get_world_size(group)
        gathered = self.values.new_empty(world * self.values.shape[0], self.values.shape[1])
        dist.all_gather_into_tensor(gathered, self.values, group=group)
        return GlobalStatistics(self.spec, gathered.view(world, *self.values.shape))


@dataclass(frozen=True)
class GlobalStatistics:
    """Statistics over the whole vocabulary, from ``gathered [ranks, K, N]`` fp64 of all ranks."""

    spec: StatisticsSpec
    gathered: Tensor

    def __getitem__(self, name: str) -> Tensor:
        """The statistic of that name on every rank: ``[ranks, N]``."""
        return self.gathered[:, self.spec.names.index(name)]

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
        """The entries ``[N]`` of ``[ranks, N]`` from the rank that owns the student's top token."""
        owner = self["student_peak"].argmax(0, keepdim=True)
        return gathered.gather(0, owner).squeeze(0)

    def cross_entropy(self, model: Model) -> Tensor:
        """``[N]`` negative log probability of the label; infinite if no rank owns the label."""
        return self.log_normalizer(model, 1.0) - self[f"{model}_label"].amax(0)

    def entropy(self, model: Model) -> Tensor:
        """``[N]`` entropy at temperature one, in nats."""
        # log q = (z - peak) + (peak - L); the local statistics hold the sum of the first bracket.
        log_sum = self[f"{model}_log"] + self[f"{model}_mass@1.0"] * self[f"{model}_peak"]
        return self.log_normalizer(model, 1.0) - self._average(model, 1.0, log_sum)

    def agreement(self) -> Tensor:
        """``[N]`` whether the student's most probable token is one of the teacher's, as 0 or 1."""
        teacher = self.at_top(self["teacher_at_top"])
        return (teacher == self["teacher_peak"].amax(0)).double()

    def agreement_at(self, logit: Tensor) -> Tensor:
        """``[N]`` whether these logits are the student's largest, as 0 or 1."""
        return (logit == self["student_peak"].amax(0)).double()

    def shard_factor(self, local: LocalStatistics, model: Model, temperature: float) -> Tensor:
        """``[N]`` factor from this rank's exponentials, relative to the peak, to probabilities."""
        peak = local.rows[f"{model}_peak"]
        return (peak / temperature - self.log_normalizer(model, temperature)).exp_()


def measure_block(local: LocalStatistics, logits: Mapping[Model, Tensor], scratch: Scratch) -> None:
    """Fill the local statistics of a row block, except the label logits.

    ``logits [N, V]`` cover this shard's real columns, V > 0, in the dtype of statistics. Leaves
    every softmax's exponentials in the scratch buffers ``MODEL@T``.
    """
    spec, statistics = local.spec, local.rows
    _measure_extremes(local, logits)
    shifts = local.exponent_shifts
    rows = logits["student"].shape[0]
    workspace = scratch.take("workspace", rows)
    for number, (model, temperature) in enumerate(spec.softmaxes):
        buffer = scratch.take(f"{model}@{temperature}", rows)
        mass = statistics[f"{model}_mass@{temperature}"]
        shifts.exponentiate(number, logits[model], buffer, workspace=workspace, sums=mass)
        if spec.full and temperature == 1.0:
            if spec.exact:
                peak = local.extremes[spec.extremes.index(f"{model}_peak")].unsqueeze(1)
                torch.sub(logits[model], peak, out=workspace)
            if spec.infinite:
                workspace.clamp_(min=_lowest(workspace.dtype))
            log = row_sums(workspace.mul_(buffer), out=statistics[f"{model}_log"])
            if not spec.exact:
                # The workspace held logarithms to base two of the exponentials.
                if shifts.log2_scale is not None:
                    log.addcmul_(mass, shifts.log2_scale[number], value=-1)
                log.mul_(LOG_2)
    for temperature in spec.ratio_temperatures:
        teacher = scratch.take(f"teacher@{temperature}", rows)
        _sum_gaps(teacher, logits, workspace, statistics[f"ratio@{temperature}"], spec.infinite)
    sums = shifts.relative_to_peaks_(local.sums, spec.summed_softmaxes)
    ratios = len(spec.ratio_temperatures)
    if spec.infinite and ratios:
        # Products may overflow where the student has no probability.
        sums[-ratios:].clamp_(max=-_lowest(local.dtype))


def _sum_gaps(
    weights: Tensor, logits: Mapping[Model, Tensor], workspace: Tensor, out: Tensor, infinite: bool
) -> None:
    """``[N]`` sums of the teacher's logits less the student's, finite where one of them is -inf."""
    most = -_lowest(weights.dtype)
    torch.sub(logits["teacher"], logits["student"], out=workspace)
    if infinite:
        workspace.nan_to_num_(nan=0.0, posinf=most, neginf=-most)
    row_sums(workspace.mul_(weights), out=out)


def gap_beyond_top(
    logits: Mapping[Model, Tensor],
    top: Mapping[Model, Tensor],
    out: Tensor,
    *,
    workspace: Tensor,
    infinite: bool,
) -> Tensor:
    """``(z_t - z_t[top]) - (z_s - z_s[top])`` of logits ``[N, V]``; ``top [N, 1]`` per model.

    Subtracting each model's logit at ``top`` first limits the rounding. It is no larger than the
    result, or belongs to a token far below the student's top one.
    """
    buffers: dict[Model, Tensor] = {"teacher": out, "student": workspace}
    for model, buffer in buffers.items():
        if infinite:
            torch.clamp(logits[model], min=-_FAR, out=buffer).sub_(top[model].clamp(min=-_FAR))
        else:
            torch.sub(logits[model], top[model], out=buffer)
    return out.sub_(workspace)


def _measure_extremes(local: LocalStatistics, logits: Mapping[Model, Tensor]) -> None:
    names = local.spec.extremes
    if "teacher_at_top" in names:
        peak, column = row_top(logits["student"])
        at_top = logits["teacher"].gather(1, column.unsqueeze(1)).squeeze(1)
        found = [peak, logits["teacher"].amax(1), at_top]
        if local.top is not None:
            local.top.copy_(column)
    else:
        found = [logits[model].amax(1) for model in local.spec.models]
    measured = torch.stack(found)
    if local.spec.infinite:
        measured.clamp_(min=_lowest(local.dtype))
    local.values[: len(names)].copy_(measured)


def _lowest(dtype: torch.dtype) -> float:
    """Replaces -inf; differences of two are finite, at temperatures down to 1/2."""
    return torch.finfo(dtype).min / 4


# A model and a temperature.
Softmax = tuple[Model, float]


@dataclass(frozen=True)
class StatisticsSpec:
    """The specification of one pass over the logits: which statistics it measures.

    Attributes:
        models: the models that have logits.
        terms: the divergences between them.
        student_temperatures: further temperatures of the student's softmax, for terms on few ids
            and for statistics.
        full: also softmaxes at temperature one, label logits, entropies and the top token.
        infinite: whether logits may be -inf. Such an id has no probability; it adds zero where both
            models exclude it.
    """

    models: tuple[Model, ...]
    terms: tuple[WeightedDivergence, ...]
    full: bool
    infinite: bool = False
    student_temperatures: tuple[float, ...] = ()

    @cached_property
    def temperatures(self) -> tuple[float, ...]:
        """Temperatures at which both models have a softmax; one comes first in a full spec."""
        wanted = [1.0] if self.full else []
        return tuple(dict.fromkeys(wanted + [term.temperature for term in self.terms]))

    @cached_property
    def softmaxes(self) -> tuple[Softmax, ...]:
        """Every model at every temperature, then the student at ``student_temperatures``."""
        shared = [(model, value) for value in self.temperatures for model in self.models]
        own: list[Softmax] = [("student", value) for value in self.student_temperatures]
        return tuple(dict.fromkeys(shared + own))

    @cached_property
    def ratio_temperatures(self) -> tuple[float, ...]:
        """Temperatures at which the average of the log ratio is measured: those of the terms."""
        return tuple(dict.fromkeys(term.temperature for term in self.terms))

    @cached_property
    def nonlinear(self) -> tuple[WeightedDivergence, ...]:
        """The terms whose gradients need slopes."""
        return tuple(term for term in self.terms if not term.divergence.is_linear)

    @property
    def exact(self) -> bool:
        """Whether exponentials must be exact to the last bit, as for slopes."""
        return bool(self.nonlinear)

    @cached_property
    def extremes(self) -> tuple[str, ...]:
        """Statistics that are logits: each model's peak, and the teacher's at the student's top."""
        names = tuple(f"{model}_peak" for model in self.models)
        compares = bool(self.nonlinear) or (self.full and "teacher" in self.models)
        return (*names, "teacher_at_top") if compares else names

    @cached_property
    def sums(self) -> Mapping[str, Softmax]:
        """Statistics that are sums, with the softmax whose exponentials each sums.

        Masses come first, in the order of softmaxes, then weighted sums.
        """
        sums = {"{}_mass@{}".format(*softmax): softmax for softmax in self.softmaxes}
        if self.full:
            sums |= {f"{model}_log": (model, 1.0) for model in self.models}
        for temperature in self.ratio_temperatures:
            sums[f"ratio@{temperature}"] = ("teacher", temperature)
        return sums

    @cached_property
    def summed_softmaxes(self) -> tuple[int, ...]:
        """The number of each sum's softmax."""
        return tuple(self.softmaxes.index(softmax) for softmax in self.sums.values())

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Rows of the local statistics, in order: numbers per token that a rank sends."""
        labels = [f"{model}_label" for model in self.models] if self.full else []
        return (*self.extremes, *self.sums, *labels)

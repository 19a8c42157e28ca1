"""Global statistics of a chunk's tokens: the factors that make exponentials probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_distill.ops.divergences import Model, WeightedDivergence
from megatron_distill.ops.statistics import NEAR_KL, GlobalStatistics, LocalStatistics

__all__ = ["Normalizers"]


@dataclass(frozen=True)
class Normalizers:
    """Statistics of each token of a chunk over the whole vocabulary, and the values of its terms.

    Attributes:
        factors: ``[S, N]`` fp64 of the softmaxes in order: from this shard's exponentials, relative
            to its peak, to probabilities.
        top: ``[N, 1]`` each model's logit of the student's top token.
        top_ratios: ``[N, 1]`` fp64 per temperature: ``log p - log q`` of that token.
        shifts: ``[N, 1]`` fp64 per temperature of a term: difference of the log normalisers times
            the temperature. Subtracted from ``z_t - z_s`` it leaves the log ratio times the
            temperature.
        near: bool ``[N, 1]`` per temperature of a term: the tokens near their teacher.
        values: ``[N]`` fp64 per term.
        slopes: ``[N, 1]`` per term with slopes: reference and average, see `NonlinearTerm`.
        blends: ``[N, 1]`` per term that blends: the share of forward KL.
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
    def of(cls, local: LocalStatistics, merged: GlobalStatistics) -> Normalizers:
        """The normalisers after the first pass; terms with slopes still lack their slopes."""
        spec, dtype = local.spec, local.dtype
        factors = torch.empty_like(local.values[: len(spec.softmaxes)])
        for factor, softmax in zip(factors, spec.softmaxes, strict=True):
            factor.copy_(merged.shard_factor(local, *softmax))
        shifts, near = {}, {}
        for temperature in spec.ratio_temperatures:
            shifts[temperature] = merged.shift(temperature).mul_(temperature).unsqueeze(1)
            near[temperature] = (merged.forward_kl(temperature) < NEAR_KL).unsqueeze(1)
        if not spec.nonlinear:
            return cls(factors, shifts=shifts, near=near)
        top = {model: logit.to(dtype).unsqueeze(1) for model, logit in merged.top.items()}
        top_ratios = {
            temperature: merged.top_ratio(temperature).unsqueeze(1)
            for temperature in {term.temperature for term in spec.nonlinear}
        }
        return cls(factors, top, top_ratios, shifts, near)

    @classmethod
    def alone(cls, local: LocalStatistics) -> Normalizers:
        """A cheaper `of` for one rank alone, called per block of tokens."""
        spec, rows = local.spec, local.rows
        factors = local.sums[: len(spec.softmaxes)].reciprocal()
        if not spec.nonlinear:
            return cls(factors)
        logits = dict(zip(spec.extremes, local.extremes.unsqueeze(2).unbind(), strict=True))
        top: dict[Model, Tensor] = {
            "student": logits["student_peak"],
            "teacher": logits["teacher_at_top"],
        }
        below_peak = rows["teacher_at_top"] - rows["teacher_peak"]
        top_ratios = {}
        for temperature in {term.temperature for term in spec.nonlinear}:
            odds = rows[f"student_mass@{temperature}"] / rows[f"teacher_mass@{temperature}"]
            ratio = odds.log_().add_(below_peak, alpha=1 / temperature)
            top_ratios[temperature] = ratio.unsqueeze(1)
        return cls(factors, top, top_ratios)

    def part(self, tokens: slice | Tensor, dtype: torch.dtype) -> Normalizers:
        """The normalisers of some tokens that a `Block` reads."""
        return Normalizers(
            self.factors[:, tokens],
            {model: logit[tokens].to(dtype) for model, logit in self.top.items()},
            {temperature: ratio[tokens] for temperature, ratio in self.top_ratios.items()},
        )

    def set_value(
        self, term: WeightedDivergence, merged: GlobalStatistics, of_slopes: Tensor | None
    ) -> None:
        """Store the value of a term, given the part from the pass over slopes."""
        divergence = term.divergence
        value = of_slopes
        if divergence.has_forward_kl:
            value = merged.forward_kl(term.temperature)
        if divergence.head_mass is not None:
            assert value is not None
            assert of_slopes is not None
            blend = self.blends[term.key].double().squeeze(1)
            value = blend * value + (1 - blend) * of_slopes
        assert value is not None
        self.values[term.key] = value

"""Exponentials of blocks of logits, and what they are relative to.

Rows in order on a CPU and elsewhere: by value, and equal values by their place.

On a CPU numpy sorts integers twenty times as fast as torch sorts numbers and their places: the
upper half of an integer is the value's key, the lower one its place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

__all__ = [
    "Origins",
    "descending",
    "exponentiate",
    "keys_of",
    "packed",
    "places_by",
    "places_of",
    "row_sums",
    "row_top",
]


_LOG_2 = math.log(2)
# To base two exponentials take a fifth of the time on a CPU, and any temperature costs the same.
_LOG2_E = math.log2(math.e)
# Two to the power of less is nothing in fp32.
_UNDERFLOW = 150
# A row's largest exponential may be a power of two so far from this one: sums with weights stay far
# from the ends of fp32, and what is nothing beside them would be nothing beside one.
_MIDDLE, _REACH = 22, 42


@dataclass(frozen=True)
class Origins:
    """The logits whose exponentials are one, for S softmaxes of n rows.

    Relative to a row's peak, its top token is exact and all fit in fp32. But a logit far below is
    rounded when the peak is subtracted, by 1e-6 of a probability of e^-16, and where models agree
    on no more than such tokens these make the gradient. Relative to zero all are as exact.

    Attributes:
        points: ``[S, n]`` in the dtype of the logits.
        lifts: ``[S, n]`` fp64, how much larger exponentials are than relative to the peak; None if
            all are relative to it.
    """

    points: Tensor
    lifts: Tensor | None = None

    @classmethod
    def of(cls, peaks: Tensor, temperatures: Sequence[float], *, differ: Tensor) -> Origins:
        """For exact exponentials of rows with these ``peaks [S, n]``: zero where the models
        ``differ``, bool ``[n]``, about the top token, and fp32 holds what comes of it."""
        on_cpu = peaks.device.type == "cpu" and peaks.dtype == torch.float32
        if not (on_cpu and _differences_are_fused()):
            return cls(peaks)
        scale: Tensor | float = 1 / temperatures[0]
        if len(set(temperatures)) > 1:
            scale = torch.tensor(temperatures, dtype=torch.float64).reciprocal_().unsqueeze(1)
        beside = (peaks * (scale * _LOG2_E)).sub_(_MIDDLE).abs_()
        points = peaks.masked_fill((beside <= _REACH).logical_and_(differ), 0.0)
        return cls(points, (peaks - points).double().mul_(scale).exp_())

    def relative_to_peaks_(self, sums: Tensor, softmaxes: tuple[int, ...]) -> Tensor:
        """Sums ``[K, n]`` fp64 of exponentials of these softmaxes, as they would be if relative to
        the peak, in place."""
        if self.lifts is None:
            return sums
        in_order = softmaxes == tuple(range(self.lifts.shape[0]))
        return sums.div_(self.lifts if in_order else self.lifts[list(softmaxes)])

    def normalisers(self, factors: Tensor) -> Tensor:
        """Of ``factors [S, n]`` fp64 on exponentials relative to the peak those on these, in their
        dtype."""
        return (factors if self.lifts is None else factors / self.lifts).to(self.points.dtype)


def exponentiate(
    logits: Tensor,
    point: Tensor,
    temperature: float,
    out: Tensor,
    *,
    spare: Tensor | None = None,
    sums: Tensor | None = None,
) -> Tensor:
    """``e^((logits - point) / temperature)`` of ``[n, V]`` and ``[n]`` into ``out``, and its sums
    ``[n]`` in fp64 if they are wanted.

    Without a ``spare`` to overwrite, shaped like ``out``, to half an ulp of the exponent only.
    """
    slope = _LOG2_E / temperature
    exact = spare is not None and logits.device.type == "cpu" and logits.dtype == torch.float32
    if not exact or bool(point.any()):
        logits = torch.sub(logits, point.unsqueeze(1), out=out)
    if spare is None:
        logits.mul_(slope).exp2_()
    elif not exact:
        (logits if temperature == 1.0 else logits.mul_(1 / temperature)).exp_()
    else:
        gap = torch.clamp(logits, min=-_UNDERFLOW / slope, out=out)
        product = torch.mul(gap, slope, out=spare)
        # A fused multiply-add, which the difference is, finds what rounding added to the product.
        added = torch.sub(product, gap, alpha=slope, out=gap)
        product.exp2_()
        torch.addcmul(product, product, added, value=-_LOG_2, out=out)
    if sums is not None:
        row_sums(out, out=sums)
    return out


@cache
def _differences_are_fused() -> bool:
    """Whether this CPU's difference with a product rounds once, in vectors and in what is left."""
    factor = 1 + 2.0**-12
    numbers = torch.full((67,), factor)
    # The product is 1 + 2^-11 + 2^-24, whose last bit fp32 rounds off.
    return bool((torch.sub(numbers * factor, numbers, alpha=factor) == -(2.0**-24)).all())


_SEGMENT = 128
_LANES = 128


def row_sums(values: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Sums of the rows ``[N, V]`` in fp64, ``[N]``, in hardly more time than in their own dtype.

    Columns that are a multiple of the lanes apart are added first: what rounding does to the lanes
    averages out.
    """
    rows, columns = values.shape
    lanes = min(columns, _LANES)
    if lanes == 0:
        return torch.sum(values, 1, dtype=torch.float64, out=out)
    rest = columns % lanes
    inside = values[:, : columns - rest] if rest else values
    sums = inside.view(rows, -1, lanes).sum(1)
    if rest:
        sums[:, :rest].add_(values[:, columns - rest :])
    return torch.sum(sums, 1, dtype=torch.float64, out=out)


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


def keys_of(values: Tensor) -> Tensor:
    """int32 keys in the order of fp32 values; minus zero is zero."""
    bits = (values.float() + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def packed(keys: Tensor, places: Tensor) -> Tensor:
    """int64 numbers in the order of int32 keys, and equal ones in that of their places."""
    return keys.long().bitwise_left_shift_(32).bitwise_or_(places)


def places_of(both: Tensor) -> Tensor:
    """The places of packed numbers, which are overwritten."""
    return both.bitwise_and_(0xFFFFFFFF)


def places_by(keys: Tensor) -> Tensor:
    """On a CPU the places ``[N, C]`` of int32 keys from the least up, equal ones in their order."""
    both = packed(keys, torch.arange(keys.shape[1]))
    both.numpy().sort(axis=1)
    return places_of(both)


def descending(values: Tensor) -> tuple[Tensor, Tensor]:
    """Rows ``[N, C]`` from the largest value down, and the places; equal ones keep their order.

    What is not a number comes first, as in torch.
    """
    if values.device.type != "cpu" or values.dtype == torch.float64:
        return values.sort(dim=1, descending=True, stable=True)
    # torch gives it a sign in narrowing to bf16, by which its key would be the least.
    keys = keys_of(values).masked_fill_(values.isnan(), torch.iinfo(torch.int32).max)
    places = places_by(keys.bitwise_not_())
    return values.gather(1, places), places

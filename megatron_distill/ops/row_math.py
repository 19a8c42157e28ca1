"""Exponentials, row sums, maxima and stable sorts of blocks of logits.

Sorts are by value, with ties in order of position. On a CPU numpy sorts integers twenty times as
fast as torch sorts floats with indices. So value and position are packed into one integer: the key
in the upper half, the position in the lower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

__all__ = [
    "ExponentShifts",
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
# exp2 takes a fifth of the time of exp on a CPU, and any temperature costs the same.
_LOG2_E = math.log2(math.e)
# Below this exponent a power of two is zero in fp32.
_UNDERFLOW = 150
# Exponent of a row's largest exponential: middle and reach. Weighted sums stay far from the limits
# of fp32, and an exponential that underflows is negligible in them.
_MIDDLE, _REACH = 22, 42


@dataclass(frozen=True)
class ExponentShifts:
    """The shift of the exponentials, for S softmaxes of n tokens.

    Relative to a token's peak, its top logit is exact and all exponentials fit in fp32. But
    subtracting the peak rounds a logit far below it, by 1e-6 of a probability of e^-16. Where the
    models agree on no more probable id, such ids make the gradient. Relative to zero all are
    equally exact.

    Attributes:
        exp_shift: ``[S, n]`` the logits whose exponentials are one, in the dtype of the logits.
        shift_scale: ``[S, n]`` fp64, ratio of these exponentials to those relative to the peak;
            None if all are relative to it.
    """

    exp_shift: Tensor
    shift_scale: Tensor | None = None

    @classmethod
    def of(cls, peaks: Tensor, temperatures: Sequence[float], *, differ: Tensor) -> ExponentShifts:
        """Shifts for tokens with ``peaks [S, n]``: zero if safe and useful, else the peak.

        Zero where the models ``differ``, bool ``[n]``, in their top token and fp32 holds the
        exponentials.
        """
        on_cpu = peaks.device.type == "cpu" and peaks.dtype == torch.float32
        if not (on_cpu and _differences_are_fused()):
            return cls(peaks)
        scale: Tensor | float = 1 / temperatures[0]
        if len(set(temperatures)) > 1:
            scale = torch.tensor(temperatures, dtype=torch.float64).reciprocal_().unsqueeze(1)
        beside = (peaks * (scale * _LOG2_E)).sub_(_MIDDLE).abs_()
        exp_shift = peaks.masked_fill((beside <= _REACH).logical_and_(differ), 0.0)
        return cls(exp_shift, (peaks - exp_shift).double().mul_(scale).exp_())

    def relative_to_peaks_(self, sums: Tensor, softmaxes: tuple[int, ...]) -> Tensor:
        """Rescale sums ``[K, n]`` fp64 of exponentials to be relative to the peak, in place."""
        if self.shift_scale is None:
            return sums
        in_order = softmaxes == tuple(range(self.shift_scale.shape[0]))
        return sums.div_(self.shift_scale if in_order else self.shift_scale[list(softmaxes)])

    def normalisers(self, factors: Tensor) -> Tensor:
        """Convert ``factors [S, n]`` fp64, for exponentials relative to the peak, to these shifts.

        The result is in the dtype of the logits.
        """
        return (factors if self.shift_scale is None else factors / self.shift_scale).to(
            self.exp_shift.dtype
        )


def exponentiate(
    logits: Tensor,
    exp_shift: Tensor,
    temperature: float,
    out: Tensor,
    *,
    workspace: Tensor | None = None,
    sums: Tensor | None = None,
) -> Tensor:
    """``e^((logits - exp_shift) / temperature)`` of ``[n, V]`` and ``[n]`` into ``out``.

    Row sums go to ``sums [n]`` fp64 if given. Without a ``workspace`` shaped like ``out``, the
    accuracy is half an ulp of the exponent.
    """
    slope = _LOG2_E / temperature
    exact = workspace is not None and logits.device.type == "cpu" and logits.dtype == torch.float32
    if not exact or bool(exp_shift.any()):
        logits = torch.sub(logits, exp_shift.unsqueeze(1), out=out)
    if workspace is None:
        logits.mul_(slope).exp2_()
    elif not exact:
        (logits if temperature == 1.0 else logits.mul_(1 / temperature)).exp_()
    else:
        gap = torch.clamp(logits, min=-_UNDERFLOW / slope, out=out)
        product = torch.mul(gap, slope, out=workspace)
        # torch.sub with alpha is a fused multiply-add here: it gives the rounding error of the
        # product.
        added = torch.sub(product, gap, alpha=slope, out=gap)
        product.exp2_()
        torch.addcmul(product, product, added, value=-_LOG_2, out=out)
    if sums is not None:
        row_sums(out, out=sums)
    return out


@cache
def _differences_are_fused() -> bool:
    """Whether torch.sub with alpha is a fused multiply-add here, in vector body and scalar tail."""
    factor = 1 + 2.0**-12
    numbers = torch.full((67,), factor)
    # The product is 1 + 2^-11 + 2^-24, whose last bit fp32 rounds off.
    return bool((torch.sub(numbers * factor, numbers, alpha=factor) == -(2.0**-24)).all())


_SEGMENT = 128
_LANES = 128


def row_sums(values: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Row sums ``[N]`` fp64 of ``[N, V]``, in hardly more time than in the dtype of the values.

    Columns a multiple of the lanes apart are added first, in the dtype of the values; the lanes are
    then added in fp64, where their rounding errors average out.
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
    # torch's max with index is not vectorised on a CPU: the segment is found first.
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
    """int64 numbers in the order of int32 keys, with ties in the order of positions."""
    return keys.long().bitwise_left_shift_(32).bitwise_or_(places)


def places_of(both: Tensor) -> Tensor:
    """The positions in packed numbers; overwrites these."""
    return both.bitwise_and_(0xFFFFFFFF)


def places_by(keys: Tensor) -> Tensor:
    """CPU only: stable ascending argsort ``[N, C]`` of int32 keys."""
    both = packed(keys, torch.arange(keys.shape[1]))
    both.numpy().sort(axis=1)
    return places_of(both)


def descending(values: Tensor) -> tuple[Tensor, Tensor]:
    """Stable descending sort of rows ``[N, C]``: values and indices.

    NaN comes first, as in torch.
    """
    if values.device.type != "cpu" or values.dtype == torch.float64:
        return values.sort(dim=1, descending=True, stable=True)
    # Narrowing to bf16 may set the sign of a NaN, and its key would be the smallest.
    keys = keys_of(values).masked_fill_(values.isnan(), torch.iinfo(torch.int32).max)
    places = places_by(keys.bitwise_not_())
    return values.gather(1, places), places

"""Exponentials, row sums, maxima and stable sorts of blocks of logits.

Sorts are by value, with ties in order of position. On a CPU numpy sorts integers twenty times as
fast as torch sorts floats with indices. So value and position are packed into one integer: the key
in the upper half, the position in the lower.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

__all__ = [
    "ExponentShifts",
    "LOG2_E",
    "LOG_2",
    "descending",
    "exponentiate",
    "keys_of",
    "nearness",
    "packed",
    "places_by",
    "places_of",
    "row_sums",
    "row_top",
]


LOG_2 = math.log(2)
# exp2 takes a fifth of the time of exp on a CPU, and any temperature costs the same.
LOG2_E = math.log2(math.e)
# Values that differ by so many units of rounding are taken as equal.
_RESOLUTION = 4.0
# Below this exponent a power of two is zero in fp32.
_UNDERFLOW = 150
# Exponent of a row's largest exponential: middle and reach. Weighted sums stay far from the limits
# of fp32, and an exponential that underflows is negligible in them.
_MIDDLE, _REACH = 22, 42


def nearness(dtype: torch.dtype) -> float:
    """Return the relative distance within which numbers of a type are taken as equal.

    Equal models differ by that much where ranks share their vocabularies in different ways, or
    where one of two is stored.
    """
    return _RESOLUTION * torch.finfo(dtype).eps


@dataclass(frozen=True)
class ExponentShifts:
    """The shift of the exponentials ``e^((z - shift) / temperature)``, for S softmaxes of n tokens.

    Relative to a token's peak, its top logit is exact and all exponentials fit in fp32. But
    subtracting the peak rounds a logit far below it, by 1e-6 of a probability of e^-16. Where the
    models agree on no more probable id, such ids make the gradient. Relative to zero all are
    equally exact. An offset near the peak takes one pass instead of two: exponentials are
    ``2^(slope z + offset)``, of slope ``log2(e) / temperature``.

    Attributes:
        temperatures: of the softmaxes.
        shift: ``[S, n]`` the logits whose exponentials are one, or offsets, in the dtype of the
            logits.
        log2_scale: ``[S, n]`` fp64, logarithm of the ratio of these exponentials to those relative
            to the peak; None if all are relative to it.
        exact: whether exponentials are exact to the last bit. Without it, ``log2_scale`` means that
            shifts are offsets.
    """

    temperatures: tuple[float, ...]
    shift: Tensor
    log2_scale: Tensor | None
    exact: bool

    @classmethod
    def offsets(cls, peaks: Tensor, temperatures: tuple[float, ...]) -> ExponentShifts:
        """Offsets for tokens with ``peaks [S, n]``; the peaks where sums are not fused."""
        if not _is_fused(peaks):
            return cls(temperatures, peaks, None, exact=False)
        exponents = peaks.double() * _slopes(temperatures)
        offset = exponents.float().neg_()
        return cls(temperatures, offset, exponents.add_(offset), exact=False)

    @classmethod
    def exactly(
        cls, peaks: Tensor, temperatures: tuple[float, ...], *, differ: Tensor
    ) -> ExponentShifts:
        """Shifts for tokens with ``peaks [S, n]``: zero if safe and useful, else the peak.

        Zero where the models ``differ``, bool ``[n]``, in their top token and fp32 holds the
        exponentials.
        """
        if not _is_fused(peaks):
            return cls(temperatures, peaks, None, exact=True)
        slopes = _slopes(temperatures)
        beside = (peaks * slopes).sub_(_MIDDLE).abs_()
        shift = peaks.masked_fill((beside <= _REACH).logical_and_(differ), 0.0)
        return cls(temperatures, shift, (peaks - shift).double().mul_(slopes), exact=True)

    @cached_property
    def _scale(self) -> Tensor | None:
        return None if self.log2_scale is None else self.log2_scale.exp2()

    def exponentiate(
        self,
        number: int,
        logits: Tensor,
        out: Tensor,
        *,
        workspace: Tensor,
        sums: Tensor | None = None,
    ) -> Tensor:
        """Exponentials of softmax ``number`` of ``logits [n, V]`` into ``out``.

        Row sums go to ``sums [n]`` fp64 if given. Leaves the exponents of two in ``workspace``,
        shaped like ``out``, unless exact.
        """
        temperature, shift = self.temperatures[number], self.shift[number]
        if self.exact:
            exponentiate(logits, shift, temperature, out, workspace=workspace)
        else:
            slope = LOG2_E / temperature
            if self.log2_scale is None:
                torch.sub(logits, shift.unsqueeze(1), out=workspace).mul_(slope)
            else:
                torch.add(shift.unsqueeze(1), logits, alpha=slope, out=workspace)
            torch.exp2(workspace, out=out)
        if sums is not None:
            row_sums(out, out=sums)
        return out

    def relative_to_peaks_(self, sums: Tensor, softmaxes: tuple[int, ...]) -> Tensor:
        """Rescale sums ``[K, n]`` fp64 of exponentials to be relative to the peak, in place."""
        if self._scale is None:
            return sums
        in_order = softmaxes == tuple(range(len(self.temperatures)))
        return sums.div_(self._scale if in_order else self._scale[list(softmaxes)])

    def normalisers(self, factors: Tensor) -> Tensor:
        """Convert ``factors [S, n]`` fp64, for exponentials relative to the peak, to these shifts.

        The result is in the dtype of the logits.
        """
        return (factors if self._scale is None else factors / self._scale).to(self.shift.dtype)


def exponentiate(
    logits: Tensor, shift: Tensor, temperature: float, out: Tensor, *, workspace: Tensor
) -> None:
    """Exact ``e^((logits - shift) / temperature)`` of ``[n, V]`` and ``[n]`` into ``out``.

    Overwrites ``workspace``, shaped like ``out``.
    """
    slope = LOG2_E / temperature
    with_rounding = logits.device.type == "cpu" and logits.dtype == torch.float32
    if not with_rounding or bool(shift.any()):
        logits = torch.sub(logits, shift.unsqueeze(1), out=out)
    if not with_rounding:
        (logits if temperature == 1.0 else logits.mul_(1 / temperature)).exp_()
        return
    gap = torch.clamp(logits, min=-_UNDERFLOW / slope, out=out)
    product = torch.mul(gap, slope, out=workspace)
    # torch.sub with alpha is a fused multiply-add here: it gives the rounding error of the product.
    added = torch.sub(product, gap, alpha=slope, out=gap)
    product.exp2_()
    torch.addcmul(product, product, added, value=-LOG_2, out=out)


@cache
def _slopes(temperatures: tuple[float, ...]) -> Tensor | float:
    """Slopes as rounded to fp32, in fp64: one for all softmaxes, or ``[S, 1]``."""
    slopes = torch.tensor([LOG2_E / one for one in temperatures]).double().unsqueeze(1)
    return float(slopes[0]) if len(set(temperatures)) == 1 else slopes


def _is_fused(logits: Tensor) -> bool:
    """Whether torch.add and torch.sub with alpha are fused multiply-adds on these logits."""
    on_cpu = logits.device.type == "cpu" and logits.dtype == torch.float32
    return on_cpu and _differences_are_fused()


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

    Columns a multiple of the lanes apart are added first, in the dtype of the values. The lanes are
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

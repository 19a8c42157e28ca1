"""Exponentials of blocks of logits, and what they are relative to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

__all__ = ["Origin", "exponentiate"]

# To base two exponentials take a fifth of the time on a CPU, and any temperature costs the same.
_LOG2_E = math.log2(math.e)
_LOG_2 = math.log(2)
# Two to the power of less is nothing in fp32.
_UNDERFLOW = 150
# Powers of two that a row's largest exponential may be: their sums with weights stay far from the
# ends of fp32, and what is nothing beside them would be nothing beside one.
_LEAST, _MOST = -20, 64


@dataclass(frozen=True)
class Origin:
    """The logits ``[n]`` whose exponentials are one, of a block of rows.

    Relative to a row's peak, its top token is exact and all fit in fp32. But a logit far below is
    rounded when the peak is subtracted, by 1e-6 of a probability of e^-16, and where models agree
    on no more than such tokens these make the gradient. Relative to zero all are as exact.

    Attributes:
        point: ``[n]`` in the dtype of the logits.
        lift: ``[n]`` fp64, how much larger exponentials are than relative to the peak; None if all
            are relative to it.
    """

    point: Tensor
    lift: Tensor | None = None

    @classmethod
    def of(cls, peak: Tensor, temperature: float, *, differ: Tensor) -> Origin:
        """For exact exponentials of rows whose largest logit is ``peak [n]``: zero where the models
        ``differ``, bool ``[n]``, about the top token, and fp32 holds what comes of it."""
        on_cpu = peak.device.type == "cpu" and peak.dtype == torch.float32
        if not (on_cpu and _differences_are_fused()):
            return cls(peak)
        power = peak * (_LOG2_E / temperature)
        point = peak.masked_fill(differ & (power >= _LEAST) & (power <= _MOST), 0.0)
        return cls(point, ((peak - point).double() / temperature).exp_())

    def relative_to_peak(self, sums: Tensor) -> Tensor:
        """``[n]`` fp64 sums of exponentials, as they would be if relative to the peak."""
        return sums if self.lift is None else sums / self.lift

    def normaliser(self, factor: Tensor) -> Tensor:
        """Of a ``factor [n, 1]`` on exponentials relative to the peak that on these."""
        if self.lift is None:
            return factor
        return (factor / self.lift.unsqueeze(1)).to(factor.dtype)


def exponentiate(
    logits: Tensor, point: Tensor, temperature: float, out: Tensor, *, spare: Tensor | None = None
) -> Tensor:
    """``e^((logits - point) / temperature)`` of ``[n, V]`` and ``[n]`` into ``out``.

    Without a ``spare`` to overwrite, shaped like ``out``, to half an ulp of the exponent only.
    """
    slope = _LOG2_E / temperature
    exact = spare is not None and logits.device.type == "cpu" and logits.dtype == torch.float32
    if not exact or bool(point.any()):
        logits = torch.sub(logits, point.unsqueeze(1), out=out)
    if spare is None:
        return logits.mul_(slope).exp2_()
    if not exact:
        return (logits if temperature == 1.0 else logits.mul_(1 / temperature)).exp_()
    gap = torch.clamp(logits, min=-_UNDERFLOW / slope, out=out)
    product = torch.mul(gap, slope, out=spare)
    # What rounding added to the product: a fused multiply-add, which the difference is, finds it.
    added = torch.sub(product, gap, alpha=slope, out=gap)
    product.exp2_()
    return torch.addcmul(product, product, added, value=-_LOG_2, out=out)


@cache
def _differences_are_fused() -> bool:
    """Whether this CPU's difference with a product rounds once, in vectors and in what is left."""
    factor = 1 + 2.0**-12
    numbers = torch.full((67,), factor)
    # The product is 1 + 2^-11 + 2^-24, whose last bit fp32 rounds off.
    return bool((torch.sub(numbers * factor, numbers, alpha=factor) == -(2.0**-24)).all())

"""Rows of the table of divergences that compare models with a mixture of both.

They start from ``p - q``, which is exact where the two are close, not from the logarithm of a ratio
near one; and of both shares of a mixture they use the one that has its digits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_distill.ops.classes import Classes

__all__ = ["js_divergence", "skewed_forward_kl", "skewed_reverse_kl"]

# 2/3 + 2/5 w + 2/7 w^2 + ..., the highest first: to 1e-7 of what it adds to, up to w = 1/9.
_ATANH = (0.2685149802278186, 0.28236619805320796, 0.4000756064491075, 0.6666664033669923)


def _mixture(of: Tensor, other: Tensor, share: float, out: Tensor) -> Tensor:
    """``share other + (1 - share) of``; the weight that fp32 rounds is the lesser of the two."""
    if share <= 0.5:
        return torch.lerp(of, other, share, out=out)
    return torch.lerp(other, of, 1 - share, out=out)


def _surprise(of: Tensor, other: Tensor, share: float, classes: Classes, out: Tensor) -> Tensor:
    """``log(m/of)`` in ``m = share other + (1 - share) of``.

    It is ``log(1 + share gap/of)`` with ``gap = other - of``, and where the gap is negative also
    ``-log(1 - share gap/m)``. The difference of neighbours is exact, so both have all their digits
    where the two are close. ``out`` may be neither of the two.
    """
    gap = torch.sub(other, of, out=out)
    if share <= 0.5:
        return gap.div_(of).mul_(share).log1p_()
    # A sum with something near minus one would have few digits.
    least = _mixture(of, other, share, classes.spare("mixture"))
    torch.minimum(least, of, out=least)
    size = torch.abs(gap, out=classes.spare("size")).div_(least).mul_(share).log1p_()
    return torch.copysign(size, gap, out=out)


def _anchored(surprise: Tensor, classes: Classes, teacher_share: float) -> Tensor:
    """``log(m/q)``, a constant apart; where p is small and the anchor false, to more digits."""
    if classes.anchor is True:
        return surprise
    p, q = classes.teacher, classes.student
    exact = classes.spare("exact")
    odds = teacher_share / (1 - teacher_share)
    if odds <= 1:
        # m/q is 1 - share times 1 + odds p/q.
        torch.div(p, q, out=exact)
        if odds != 1:
            exact.mul_(odds)
        exact.log1p_()
    else:
        # q/m is near its bound, and share p/m its distance from that: up to one half from that
        # alone, beyond it the logarithm adds the rest.
        excess = math.log1p(-teacher_share) - math.log(0.5)
        beyond = torch.sub(surprise, excess, out=classes.spare("beyond")).clamp_(min=0.0)
        mixture = _mixture(q, p, teacher_share, exact)
        distance = torch.div(p, mixture, out=mixture).mul_(-teacher_share)
        torch.sub(beyond, distance.clamp_(min=-0.5).log1p_(), out=exact)
    if classes.anchor is False:
        return exact
    return torch.where(classes.anchor, surprise, exact, out=exact)


def _share(gap: Tensor, classes: Classes, teacher_share: float) -> Tensor:
    """``p/m``, and one less where slopes are exact near ``p == q``; overwrites ``p - q``."""
    p, q = classes.teacher, classes.student
    mixture = _mixture(q, p, teacher_share, classes.spare("mixture"))
    if classes.anchor is False:
        return torch.div(p, mixture, out=mixture)
    # p - m = (1 - share) (p - q)
    beyond = gap.div_(mixture).mul_(1 - teacher_share)
    if classes.anchor is True:
        return beyond
    return torch.where(classes.anchor, beyond, torch.div(p, mixture, out=mixture), out=beyond)


def _log1p_beyond(log1p: Tensor, share: Tensor, out: Tensor, classes: Classes) -> Tensor:
    """``log(1 + x) - x/(1 + x)`` to all digits, given the logarithm and the share ``x/(1 + x)``.

    Near zero that is ``x^2 / 2``, of which the difference leaves little. Of the share y it is
    ``-log(1 - y) - y``, which with ``s = y/(2 - y)`` is

        2 atanh(s) - 2 s/(1 + s) = s (y + 2 s^2 (1/3 + s^2/5 + s^4/7 + ...)).

    Overwrites the logarithm. The series is for fp32; in fp64 the difference has more digits.
    """
    if share.dtype == torch.float64:
        return torch.sub(log1p, share, out=out)
    near = torch.clamp(share, min=-1.0, max=0.5, out=classes.spare("size"))
    is_far = near != share
    ratio = torch.sub(2.0, near, out=out)
    torch.div(near, ratio, out=ratio)
    square = torch.square(ratio, out=classes.spare("square"))
    series = torch.mul(square, _ATANH[0], out=classes.spare("series"))
    for coefficient in _ATANH[1:]:
        series.add_(coefficient).mul_(square)
    series.add_(near)
    ratio.mul_(series)
    return torch.where(is_far, log1p.sub_(share), ratio, out=out)


# sum beta p log(p/m) + (1 - beta) q log(q/m), m = beta p + (1 - beta) q: slope (1 - beta) log(q/m).
def js_divergence(classes: Classes, *, beta: float) -> tuple[Tensor, Tensor]:
    """Summands and slopes of the Jensen-Shannon divergence, but for their scales."""
    p, q = classes.teacher, classes.student
    rest = 1 - beta
    value = _surprise(p, q, rest, classes, classes.spare("value")).mul_(p)
    surprise = _surprise(q, p, beta, classes, classes.spare("surprise"))
    value.addcmul_(surprise, q, value=rest / beta)
    return value, _anchored(surprise, classes, beta)


# sum p log(p/m), m = lam p + (1 - lam) q: slope -(1 - lam) p/m.
def skewed_forward_kl(classes: Classes, *, skew_lambda: float) -> tuple[Tensor, Tensor]:
    """Summands and slopes of forward KL to a mixture, but for their scales."""
    rest = 1 - skew_lambda
    p, q = classes.teacher, classes.student
    gap = torch.sub(q, p, out=classes.spare("gap"))
    value = _surprise(p, q, rest, classes, classes.spare("value")).mul_(p)
    return value.add_(gap, alpha=-rest), _share(gap.neg_(), classes, skew_lambda)


# sum q log(q/m), m = lam q + (1 - lam) p: slope log(q/m) + 1 - lam q/m. A constant apart, that is
# log(1 - y) + lam y with y = (1 - lam) (p - q)/m, and log(1 - y) + y with y = (1 - lam) p/m.
def skewed_reverse_kl(classes: Classes, *, skew_lambda: float) -> tuple[Tensor, Tensor]:
    """Summands and slopes of reverse KL from a mixture, but for their scales."""
    rest = 1 - skew_lambda
    p, q = classes.teacher, classes.student
    gap = torch.sub(p, q, out=classes.spare("gap"))
    surprise = _surprise(q, p, rest, classes, classes.spare("surprise"))
    value = torch.addcmul(gap, surprise, q, value=-1 / rest, out=classes.spare("value"))
    mixture = _mixture(q, p, rest, classes.spare("mixture"))
    if classes.anchor is False:
        gap.copy_(p)
        surprise.sub_(math.log(skew_lambda))
    elif classes.anchor is not True:
        torch.where(classes.anchor, gap, p, out=gap)
        surprise.sub_(torch.where(classes.anchor, 0.0, math.log(skew_lambda)))
    share = torch.div(gap, mixture, out=mixture).mul_(rest)
    slope = _log1p_beyond(surprise, share, gap, classes).mul_(-1 / rest)
    if classes.anchor is False:
        return value, slope
    return value, slope.sub_(share if classes.anchor is True else share.mul_(classes.anchor))

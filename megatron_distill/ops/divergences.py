"""The table of divergences between a teacher p and a student q over the same classes.

An entry gives the summand ``l(p, q)`` of each class, and its slope ``dl/dq`` up to a constant.
Gradients of every support follow from the slope alone (see `softmax_gradient`). The classes are a
vocabulary, a shard of it, or top-k ids with their tail.

Entries are written so that ``p == q`` gives exactly zero in both. Those that compare the models
with a mixture of both start from ``p - q``, which is exact where the two are close. The logarithm
of a ratio near one is not. Of both shares of a mixture they use the one without cancellation.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megatron_distill.ops.factors import Factor
from megatron_distill.ops.kernels import KernelForm

__all__ = [
    "Classes",
    "DIVERGENCES",
    "Divergence",
    "Model",
    "Scales",
    "WeightedDivergence",
    "divergence_named",
    "forward_kl_summands",
    "js_divergence",
    "skewed_forward_kl",
    "skewed_reverse_kl",
]


class Scales(NamedTuple):
    """Factors of a divergence, applied where its results are used: cheaper than a separate pass."""

    value: float = 1.0
    slope: float = 1.0


@dataclass(frozen=True)
class Divergence:
    """One entry of the table.

    Attributes:
        name: name in configurations, with parameters that are not the defaults.
        evaluate: classes -> summands of the value, and slopes ``dl/dq - constant``. Both lack their
            scales and are finite even where a class has no probability. Forward KL, linear in p,
            returns the value alone.
        constant: part of the slope that is the same in every class; it cancels where q sums to one.
        scales: factors still to be applied to summands and slopes.
        balance: coefficient of ``p - q`` in the value. Its sum is zero where both sum to one, so
            that a common rounding of p or q cancels.
        of_top_ratio: coefficient of the top ratio (see `Classes`) in the value; the ratio may be
            large and is rounded in the summands.
        head_mass: most mass of the tail, if the divergence blends forward and reverse KL by the
            teacher's head and tail. ``evaluate`` and ``constant`` are those of reverse KL then.
        kernel: the Triton form. Without it the torch path runs on a GPU too.
    """

    name: str
    evaluate: Callable[[Classes], tuple[Tensor, Tensor | None]]
    constant: float
    scales: Scales = Scales()
    balance: float = 0.0
    of_top_ratio: float = 0.0
    head_mass: float | None = None
    kernel: KernelForm | None = None

    @property
    def has_forward_kl(self) -> bool:
        """Whether forward KL is part of it."""
        return self.is_linear or self.head_mass is not None

    @property
    def is_linear(self) -> bool:
        """Whether it is forward KL, whose gradient ``q - p`` needs no slope."""
        return self.evaluate is forward_kl_summands


@dataclass(frozen=True)
class WeightedDivergence:
    """A divergence of both models at one temperature, and its constant factor in the objective."""

    divergence: Divergence
    temperature: float
    coefficient: Factor

    @property
    def key(self) -> str:
        """Identifies the term within one objective."""
        return f"{self.divergence.name}@{self.temperature}"


# sum p log(p/q): slope -p/q.
def forward_kl_summands(classes: Classes) -> tuple[Tensor, None]:
    """Summands of forward KL."""
    return classes.log_ratio().add_(classes.top_ratio).mul_(classes.teacher), None


# sum q log(q/p): slope log(q/p) + 1.
def _reverse_kl(classes: Classes) -> tuple[Tensor, Tensor]:
    ratio = classes.log_ratio()
    value = torch.add(ratio, classes.top_ratio, out=classes.workspace("value"))
    return value.mul_(classes.student), ratio


# sum |p - q| / 2: slope sign(q - p) / 2.
def _total_variation(classes: Classes) -> tuple[Tensor, Tensor]:
    gap = torch.sub(classes.student, classes.teacher, out=classes.workspace("gap"))
    return torch.abs(gap, out=classes.workspace("value")), gap.sign_()


# sum (sqrt p - sqrt q)^2 / 2: slope (1 - sqrt(p/q)) / 2.
def _squared_hellinger(classes: Classes) -> tuple[Tensor, Tensor]:
    root = torch.sqrt(classes.student, out=classes.workspace("root"))
    of_teacher = torch.sqrt(classes.teacher, out=classes.workspace("teacher"))
    value = torch.sub(root, of_teacher, out=classes.workspace("value")).square_()
    return value, of_teacher.div_(root).sub_(classes.share_offset)


_REVERSE = KernelForm("reverse_kl")


def _forward_entry() -> Divergence:
    return Divergence("forward_kl", forward_kl_summands, -1.0)


def _reverse_entry() -> Divergence:
    return _reverse_named("reverse_kl")


def _reverse_named(name: str, head_mass: float | None = None) -> Divergence:
    scales = Scales(value=-1.0, slope=-1.0)
    return Divergence(
        name,
        _reverse_kl,
        1.0,
        scales,
        of_top_ratio=-1.0,
        head_mass=head_mass,
        kernel=_REVERSE,
    )


# At beta 0 and 1 JSD is zero. As in TRL and Liger these stand for the KLs that are its limits when
# divided by beta or 1 - beta.
def _js_entry(beta: float = 0.5) -> Divergence:
    _require("beta", beta, 0 <= beta <= 1, "between 0 and 1")
    name = _named("js_divergence", beta=(beta, 0.5))
    if beta == 0:
        return Divergence(name, forward_kl_summands, -1.0)
    if beta == 1:
        return _reverse_named(name)
    form = KernelForm("js_divergence", beta)
    evaluate = partial(js_divergence, beta=beta)
    return Divergence(name, evaluate, 0.0, Scales(value=-beta, slope=beta - 1), kernel=form)


def _skewed_forward_entry(skew_lambda: float = 0.1) -> Divergence:
    _require("skew_lambda", skew_lambda, 0 <= skew_lambda < 1, "at least 0 and less than 1")
    name = _named("skewed_forward_kl", skew_lambda=(skew_lambda, 0.1))
    if skew_lambda == 0:
        return Divergence(name, forward_kl_summands, -1.0)
    evaluate = partial(skewed_forward_kl, skew_lambda=skew_lambda)
    form = KernelForm("skewed_forward_kl", skew_lambda)
    of_gap = skew_lambda - 1
    return Divergence(name, evaluate, of_gap, Scales(-1.0, of_gap), balance=of_gap, kernel=form)


def _skewed_reverse_entry(skew_lambda: float = 0.1) -> Divergence:
    _require("skew_lambda", skew_lambda, 0 <= skew_lambda < 1, "at least 0 and less than 1")
    name = _named("skewed_reverse_kl", skew_lambda=(skew_lambda, 0.1))
    if skew_lambda == 0:
        return _reverse_named(name)
    evaluate = partial(skewed_reverse_kl, skew_lambda=skew_lambda)
    form = KernelForm("skewed_reverse_kl", skew_lambda)
    rest = 1 - skew_lambda
    return Divergence(name, evaluate, rest, Scales(rest, rest), balance=rest, kernel=form)


# A blend of forward and reverse KL, by the models' distance on the teacher's head and tail. Wu et
# al., arXiv 2404.02657, section 4.
def _adaptive_entry(adaptive_alpha: float = 0.5) -> Divergence:
    _require("adaptive_alpha", adaptive_alpha, 0 < adaptive_alpha < 1, "between 0 and 1")
    name = _named("adaptive_kl", adaptive_alpha=(adaptive_alpha, 0.5))
    return _reverse_named(name, adaptive_alpha)


def _total_variation_entry() -> Divergence:
    form = KernelForm("total_variation")
    return Divergence("total_variation", _total_variation, 0.0, Scales(0.5, 0.5), kernel=form)


def _squared_hellinger_entry() -> Divergence:
    form = KernelForm("squared_hellinger")
    scales = Scales(value=0.5, slope=-0.5)
    return Divergence("squared_hellinger", _squared_hellinger, 0.0, scales, kernel=form)


# Each function takes the divergence's parameters and returns its entry.
DIVERGENCES: Mapping[str, Callable[..., Divergence]] = MappingProxyType(
    {
        "forward_kl": _forward_entry,
        "reverse_kl": _reverse_entry,
        "js_divergence": _js_entry,
        "skewed_forward_kl": _skewed_forward_entry,
        "skewed_reverse_kl": _skewed_reverse_entry,
        "adaptive_kl": _adaptive_entry,
        "total_variation": _total_variation_entry,
        "squared_hellinger": _squared_hellinger_entry,
    }
)


def divergence_named(name: str, **parameters: float) -> Divergence:
    """The entry of that name with these parameters; further parameters keep their defaults.

    Raises:
        ValueError: unknown name, unknown parameter, or a value out of range; the message lists the
            valid ones.
    """
    if name not in DIVERGENCES:
        known = ", ".join(sorted(DIVERGENCES))
        raise ValueError(f"unknown divergence {name!r}; known: {known}")
    make = DIVERGENCES[name]
    taken = list(inspect.signature(make).parameters)
    for parameter in parameters:
        if parameter not in taken:
            what = f"takes {', '.join(taken)}" if taken else "takes no parameter"
            raise ValueError(f"{name} {what}, not {parameter!r}")
    return make(**parameters)


def _require(name: str, value: float, holds: bool, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {value}; it must be {wanted}")


def _named(name: str, **parameters: tuple[float, float]) -> str:
    """The name, with the parameters that are not the default."""
    changed = [
        f"{key}{value:g}" for key, (value, default) in parameters.items() if value != default
    ]
    return "_".join([name, *changed])


# 2/3 + 2/5 w + 2/7 w^2 + ..., highest power first; relative error 1e-7 of the sum, up to w = 1/9.
_ATANH = (0.2685149802278186, 0.28236619805320796, 0.4000756064491075, 0.6666664033669923)


def _mixture(of: Tensor, other: Tensor, share: float, out: Tensor) -> Tensor:
    """``share other + (1 - share) of``, so that rounding affects the smaller weight."""
    if share <= 0.5:
        return torch.lerp(of, other, share, out=out)
    return torch.lerp(other, of, 1 - share, out=out)


def _log_mixture_ratio(
    of: Tensor, other: Tensor, share: float, classes: Classes, out: Tensor
) -> Tensor:
    """``log(m/of)`` in ``m = share other + (1 - share) of``.

    It is ``log(1 + share gap/of)`` with ``gap = other - of``, and where the gap is negative also
    ``-log(1 - share gap/m)``. The difference of neighbouring floats is exact, so both forms are
    accurate where the two are close. ``out`` must not alias either.
    """
    gap = torch.sub(other, of, out=out)
    if share <= 0.5:
        return gap.div_(of).mul_(share).log1p_()
    # One plus a number near minus one would lose digits.
    least = _mixture(of, other, share, classes.workspace("mixture"))
    torch.minimum(least, of, out=least)
    size = torch.abs(gap, out=classes.workspace("size")).div_(least).mul_(share).log1p_()
    return torch.copysign(size, gap, out=out)


def _shifted_log_ratio(log_mixture_ratio: Tensor, classes: Classes, teacher_share: float) -> Tensor:
    """``log(m/q)`` up to a constant; more accurate where p is small and `near_equal` false."""
    if classes.near_equal is True:
        return log_mixture_ratio
    p, q = classes.teacher, classes.student
    exact = classes.workspace("exact")
    odds = teacher_share / (1 - teacher_share)
    if odds <= 1:
        # m/q is 1 - share times 1 + odds p/q.
        torch.div(p, q, out=exact)
        if odds != 1:
            exact.mul_(odds)
        exact.log1p_()
    else:
        # q/m is near its bound, at distance share p/m. Up to one half that distance gives the
        # result; beyond it the logarithm adds the rest.
        excess = math.log1p(-teacher_share) - math.log(0.5)
        beyond = torch.sub(log_mixture_ratio, excess, out=classes.workspace("beyond")).clamp_(
            min=0.0
        )
        mixture = _mixture(q, p, teacher_share, exact)
        distance = torch.div(p, mixture, out=mixture).mul_(-teacher_share)
        torch.sub(beyond, distance.clamp_(min=-0.5).log1p_(), out=exact)
    if classes.near_equal is False:
        return exact
    return torch.where(classes.near_equal, log_mixture_ratio, exact, out=exact)


def _share(gap: Tensor, classes: Classes, teacher_share: float) -> Tensor:
    """``p/m``, or ``p/m - 1`` where slopes are exact near ``p == q``; overwrites ``p - q``."""
    p, q = classes.teacher, classes.student
    mixture = _mixture(q, p, teacher_share, classes.workspace("mixture"))
    if classes.near_equal is False:
        return torch.div(p, mixture, out=mixture)
    # p - m = (1 - share) (p - q)
    beyond = gap.div_(mixture).mul_(1 - teacher_share)
    if classes.near_equal is True:
        return beyond
    return torch.where(classes.near_equal, beyond, torch.div(p, mixture, out=mixture), out=beyond)


def _log1p_beyond(log1p: Tensor, share: Tensor, out: Tensor, classes: Classes) -> Tensor:
    """``log(1 + x) - x/(1 + x)`` without cancellation, from both of its terms.

    Near zero that is ``x^2 / 2``, which the difference would cancel. In terms of the share y it is
    ``-log(1 - y) - y``, which with ``s = y/(2 - y)`` is

        2 atanh(s) - 2 s/(1 + s) = s (y + 2 s^2 (1/3 + s^2/5 + s^4/7 + ...)).

    Overwrites the logarithm. The series is for fp32; in fp64 the difference is more accurate.
    """
    if share.dtype == torch.float64:
        return torch.sub(log1p, share, out=out)
    near = torch.clamp(share, min=-1.0, max=0.5, out=classes.workspace("size"))
    is_far = near != share
    ratio = torch.sub(2.0, near, out=out)
    torch.div(near, ratio, out=ratio)
    square = torch.square(ratio, out=classes.workspace("square"))
    series = torch.mul(square, _ATANH[0], out=classes.workspace("series"))
    for coefficient in _ATANH[1:]:
        series.add_(coefficient).mul_(square)
    series.add_(near)
    ratio.mul_(series)
    return torch.where(is_far, log1p.sub_(share), ratio, out=out)


# sum beta p log(p/m) + (1 - beta) q log(q/m), m = beta p + (1 - beta) q: slope (1 - beta) log(q/m).
def js_divergence(classes: Classes, *, beta: float) -> tuple[Tensor, Tensor]:
    """Summands and slopes of the Jensen-Shannon divergence, without their scales."""
    p, q = classes.teacher, classes.student
    rest = 1 - beta
    value = _log_mixture_ratio(p, q, rest, classes, classes.workspace("value")).mul_(p)
    log_mixture_ratio = _log_mixture_ratio(
        q, p, beta, classes, classes.workspace("log_mixture_ratio")
    )
    value.addcmul_(log_mixture_ratio, q, value=rest / beta)
    return value, _shifted_log_ratio(log_mixture_ratio, classes, beta)


# sum p log(p/m), m = lam p + (1 - lam) q: slope -(1 - lam) p/m.
def skewed_forward_kl(classes: Classes, *, skew_lambda: float) -> tuple[Tensor, Tensor]:
    """Summands and slopes of forward KL to a mixture, without their scales."""
    rest = 1 - skew_lambda
    p, q = classes.teacher, classes.student
    gap = torch.sub(q, p, out=classes.workspace("gap"))
    value = _log_mixture_ratio(p, q, rest, classes, classes.workspace("value")).mul_(p)
    return value.add_(gap, alpha=-rest), _share(gap.neg_(), classes, skew_lambda)


# sum q log(q/m), m = lam q + (1 - lam) p: slope log(q/m) + 1 - lam q/m. Up to a constant, that is
# log(1 - y) + lam y with y = (1 - lam) (p - q)/m, and log(1 - y) + y with y = (1 - lam) p/m.
def skewed_reverse_kl(classes: Classes, *, skew_lambda: float) -> tuple[Tensor, Tensor]:
    """Summands and slopes of reverse KL from a mixture, without their scales."""
    rest = 1 - skew_lambda
    p, q = classes.teacher, classes.student
    gap = torch.sub(p, q, out=classes.workspace("gap"))
    log_mixture_ratio = _log_mixture_ratio(
        q, p, rest, classes, classes.workspace("log_mixture_ratio")
    )
    value = torch.addcmul(
        gap, log_mixture_ratio, q, value=-1 / rest, out=classes.workspace("value")
    )
    mixture = _mixture(q, p, rest, classes.workspace("mixture"))
    if classes.near_equal is False:
        gap.copy_(p)
        log_mixture_ratio.sub_(math.log(skew_lambda))
    elif classes.near_equal is not True:
        torch.where(classes.near_equal, gap, p, out=gap)
        log_mixture_ratio.sub_(torch.where(classes.near_equal, 0.0, math.log(skew_lambda)))
    share = torch.div(gap, mixture, out=mixture).mul_(rest)
    slope = _log1p_beyond(log_mixture_ratio, share, gap, classes).mul_(-1 / rest)
    if classes.near_equal is False:
        return value, slope
    return value, slope.sub_(
        share if classes.near_equal is True else share.mul_(classes.near_equal)
    )


Model = Literal["student", "teacher"]


@dataclass(frozen=True)
class Classes:
    """Probabilities ``[N, C]`` of the same classes under both models; read-only for divergences.

    No probability is zero: on underflow it is the smallest normal number.

    Attributes:
        teacher: p.
        student: q.
        log_ratio: returns ``log p - log q - top_ratio`` in memory that the caller may overwrite.
        top_ratio: ``[N, 1]``, or one for all tokens, ``log p - log q`` of the student's top token.
            Separate, because a large ratio would round off the rest.
        workspace: returns the caller's buffer ``[N, C]`` of that name.
        near_equal: bool ``[N, 1]``, or one for all tokens. False: slopes are exact near ``p == 0``;
            true: near ``p == q``.
    """

    teacher: Tensor
    student: Tensor
    log_ratio: Callable[[], Tensor]
    workspace: Callable[[str], Tensor]
    near_equal: Tensor | bool = True
    top_ratio: Tensor | float = 0.0

    @property
    def share_offset(self) -> Tensor | float:
        """p/m where slopes are exact: one at ``p == q``, zero at ``p == 0``."""
        if isinstance(self.near_equal, bool):
            return float(self.near_equal)
        return self.near_equal.to(self.teacher.dtype)

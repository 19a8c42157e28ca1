"""The table of divergences between a teacher p and a student q over the same classes.

A row says what a class adds to the value, ``l(p, q)``, and its slope ``dl/dq`` up to a constant.
Gradients of every support follow from the slope alone (see `pushforward`). The classes are a
vocabulary, a shard of it, or the kept ids of a top-k and what they leave.

Rows are written so that ``p == q`` gives exactly zero in both. Those that compare with a mixture of
both are in `mixture`.

Rows of the table of divergences that compare models with a mixture of both.

They start from ``p - q``, which is exact where the two are close, not from the logarithm of a ratio
near one; and of both shares of a mixture they use the one that has its digits.
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
    """Factors of a row that cost less where its results are used than in a pass of their own."""

    value: float = 1.0
    slope: float = 1.0


@dataclass(frozen=True)
class Divergence:
    """One row.

    Attributes:
        name: what configurations call it, with parameters that are not the defaults.
        evaluate: classes -> summands of the value, and slopes ``dl/dq - constant``, both but for
            their scales, finite even where a class has no probability. Of forward KL, which is
            linear in p, the value alone.
        constant: what the slope has in every class; it cancels where q sums to one.
        scales: what summands and slopes are still to be multiplied with.
        balance: what the value has of ``p - q``, whose sum is nothing where both sum to one: so it
            does not feel how they were rounded as a whole.
        of_top_ratio: what the value has of the top ratio (see `Classes`), which may be large and is
            rounded where summands are formed.
        head_mass: of the row that blends forward and reverse KL by the teacher's head and tail: the
            most mass of the tail. ``evaluate`` and ``constant`` are those of reverse KL.
        kernel: the same row in Triton. Without it the chunked executor runs on a GPU too.
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
    coefficient: float

    @property
    def key(self) -> str:
        """What tells this term from others of one objective."""
        return f"{self.divergence.name}@{self.temperature}"


# sum p log(p/q): slope -p/q.
def forward_kl_summands(classes: Classes) -> tuple[Tensor, None]:
    """Summands of forward KL."""
    return classes.log_ratio().add_(classes.top_ratio).mul_(classes.teacher), None


# sum q log(q/p): slope log(q/p) + 1.
def _reverse_kl(classes: Classes) -> tuple[Tensor, Tensor]:
    ratio = classes.log_ratio()
    value = torch.add(ratio, classes.top_ratio, out=classes.spare("value"))
    return value.mul_(classes.student), ratio


# sum |p - q| / 2: slope sign(q - p) / 2.
def _total_variation(classes: Classes) -> tuple[Tensor, Tensor]:
    gap = torch.sub(classes.student, classes.teacher, out=classes.spare("gap"))
    return torch.abs(gap, out=classes.spare("value")), gap.sign_()


# sum (sqrt p - sqrt q)^2 / 2: slope (1 - sqrt(p/q)) / 2.
def _squared_hellinger(classes: Classes) -> tuple[Tensor, Tensor]:
    root = torch.sqrt(classes.student, out=classes.spare("root"))
    of_teacher = torch.sqrt(classes.teacher, out=classes.spare("teacher"))
    value = torch.sub(root, of_teacher, out=classes.spare("value")).square_()
    return value, of_teacher.div_(root).sub_(classes.share_at_anchor)


_REVERSE = KernelForm("reverse_kl")


def _forward_row() -> Divergence:
    return Divergence("forward_kl", forward_kl_summands, -1.0)


def _reverse_row() -> Divergence:
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


# At its ends JSD is zero; as in TRL and Liger they stand for the KLs that it goes to when divided
# by beta or 1 - beta.
def _js_row(beta: float = 0.5) -> Divergence:
    _require("beta", beta, 0 <= beta <= 1, "between 0 and 1")
    name = _named("js_divergence", beta=(beta, 0.5))
    if beta == 0:
        return Divergence(name, forward_kl_summands, -1.0)
    if beta == 1:
        return _reverse_named(name)
    form = KernelForm("js_divergence", beta)
    row = partial(js_divergence, beta=beta)
    return Divergence(name, row, 0.0, Scales(value=-beta, slope=beta - 1), kernel=form)


def _skewed_forward_row(skew_lambda: float = 0.1) -> Divergence:
    _require("skew_lambda", skew_lambda, 0 <= skew_lambda < 1, "at least 0 and less than 1")
    name = _named("skewed_forward_kl", skew_lambda=(skew_lambda, 0.1))
    if skew_lambda == 0:
        return Divergence(name, forward_kl_summands, -1.0)
    row = partial(skewed_forward_kl, skew_lambda=skew_lambda)
    form = KernelForm("skewed_forward_kl", skew_lambda)
    of_gap = skew_lambda - 1
    return Divergence(name, row, of_gap, Scales(-1.0, of_gap), balance=of_gap, kernel=form)


def _skewed_reverse_row(skew_lambda: float = 0.1) -> Divergence:
    _require("skew_lambda", skew_lambda, 0 <= skew_lambda < 1, "at least 0 and less than 1")
    name = _named("skewed_reverse_kl", skew_lambda=(skew_lambda, 0.1))
    if skew_lambda == 0:
        return _reverse_named(name)
    row = partial(skewed_reverse_kl, skew_lambda=skew_lambda)
    form = KernelForm("skewed_reverse_kl", skew_lambda)
    rest = 1 - skew_lambda
    return Divergence(name, row, rest, Scales(rest, rest), balance=rest, kernel=form)


# A blend of forward and reverse KL by how far the models are apart on the teacher's head and tail.
# Wu et al., arXiv 2404.02657, section 4.
def _adaptive_row(adaptive_alpha: float = 0.5) -> Divergence:
    _require("adaptive_alpha", adaptive_alpha, 0 < adaptive_alpha < 1, "between 0 and 1")
    name = _named("adaptive_kl", adaptive_alpha=(adaptive_alpha, 0.5))
    return _reverse_named(name, adaptive_alpha)


def _total_variation_row() -> Divergence:
    form = KernelForm("total_variation")
    return Divergence("total_variation", _total_variation, 0.0, Scales(0.5, 0.5), kernel=form)


def _squared_hellinger_row() -> Divergence:
    form = KernelForm("squared_hellinger")
    scales = Scales(value=0.5, slope=-0.5)
    return Divergence("squared_hellinger", _squared_hellinger, 0.0, scales, kernel=form)


# Each makes its row from the parameters it takes.
DIVERGENCES: Mapping[str, Callable[..., Divergence]] = MappingProxyType(
    {
        "forward_kl": _forward_row,
        "reverse_kl": _reverse_row,
        "js_divergence": _js_row,
        "skewed_forward_kl": _skewed_forward_row,
        "skewed_reverse_kl": _skewed_reverse_row,
        "adaptive_kl": _adaptive_row,
        "total_variation": _total_variation_row,
        "squared_hellinger": _squared_hellinger_row,
    }
)


def divergence_named(name: str, **parameters: float) -> Divergence:
    """The row of that name with these parameters, the others at their defaults.

    Raises:
        ValueError: no such row, no such parameter, or a value out of range; the message says what
            there is.
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
    others = [f"{key}{value:g}" for key, (value, default) in parameters.items() if value != default]
    return "_".join([name, *others])


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


Model = Literal["student", "teacher"]


@dataclass(frozen=True)
class Classes:
    """Probabilities ``[N, C]`` of the same classes under both models; a row may overwrite neither.

    None is zero: what underflows counts as the smallest normal number.

    Attributes:
        teacher: p.
        student: q.
        log_ratio: makes ``log p - log q - top_ratio`` for the caller to overwrite.
        top_ratio: ``[N, 1]``, or one for all, ``log p - log q`` of the student's top token. Where
            that is large, the rest has digits which the whole would not.
        spare: names a buffer ``[N, C]`` of the caller's; the same name is the same buffer.
        anchor: bool ``[N, 1]``, or one for all, false where slopes are wanted exact near
            ``p == 0``; elsewhere they are exact near ``p == q``.
    """

    teacher: Tensor
    student: Tensor
    log_ratio: Callable[[], Tensor]
    spare: Callable[[str], Tensor]
    anchor: Tensor | bool = True
    top_ratio: Tensor | float = 0.0

    @property
    def share_at_anchor(self) -> Tensor | float:
        """p/m where slopes are exact: one at ``p == q``, nothing at ``p == 0``."""
        if isinstance(self.anchor, bool):
            return float(self.anchor)
        return self.anchor.to(self.teacher.dtype)

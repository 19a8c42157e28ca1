"""The table of divergences between a teacher p and a student q over the same classes.

A row says what a class adds to the value, ``l(p, q)``, and its slope ``dl/dq`` up to a constant.
Gradients of every support follow from the slope alone (see `pushforward`). The classes are a
vocabulary, a shard of it, or the kept ids of a top-k and what they leave.

Rows are written so that ``p == q`` gives exactly zero in both, and with many digits close to it:
from ``p - q``, which is exact there, not from the logarithm of a ratio near one.
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
    "DIVERGENCES",
    "Classes",
    "Divergence",
    "Model",
    "Scales",
    "WeightedDivergence",
    "divergence_named",
    "forward_kl_summands",
]

Model = Literal["student", "teacher"]


@dataclass(frozen=True)
class Classes:
    """Probabilities ``[N, C]`` of the same classes under both models; a row may overwrite neither.

    None is zero: what underflows counts as the smallest normal number.

    Attributes:
        teacher: p.
        student: q.
        log_ratio: makes ``log p - log q`` for the caller to overwrite.
        spare: names a buffer ``[N, C]`` of the caller's; the same name is the same buffer.
        anchor: bool ``[N, 1]``, or one for all, false where slopes are wanted exact near
            ``p == 0``; elsewhere they are exact near ``p == q``.
    """

    teacher: Tensor
    student: Tensor
    log_ratio: Callable[[], Tensor]
    spare: Callable[[str], Tensor]
    anchor: Tensor | bool = True

    @property
    def share_at_anchor(self) -> Tensor | float:
        """p/m where slopes are exact: one at ``p == q``, nothing at ``p == 0``."""
        if isinstance(self.anchor, bool):
            return float(self.anchor)
        return self.anchor.to(self.teacher.dtype)


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
        head_mass: of the row that blends forward and reverse KL by the teacher's head and tail: the
            most mass of the tail. ``evaluate`` and ``constant`` are those of reverse KL.
        kernel: the same row in Triton. Without it the chunked executor runs on a GPU too.
    """

    name: str
    evaluate: Callable[[Classes], tuple[Tensor, Tensor | None]]
    constant: float
    scales: Scales = Scales()
    balance: float = 0.0
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


def _mixture(of: Tensor, other: Tensor, share: float, out: Tensor) -> Tensor:
    """``share other + (1 - share) of``; the weight that fp32 rounds is the lesser of the two."""
    if share <= 0.5:
        return torch.lerp(of, other, share, out=out)
    return torch.lerp(other, of, 1 - share, out=out)


def _surprise(
    gap: Tensor, of: Tensor, other: Tensor, share: float, classes: Classes, out: Tensor
) -> Tensor:
    """``log(m/of)`` in ``m = share other + (1 - share) of``, given ``gap = other - of``.

    It is ``log(1 + share gap/of)``, and where the gap is negative also ``-log(1 - share gap/m)``.
    The difference of neighbours is exact, so both have all their digits where the two are close.
    ``out`` may be the gap.
    """
    if share <= 0.5:
        return torch.div(gap, of, out=out).mul_(share).log1p_()
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


# sum p log(p/q): slope -p/q.
def forward_kl_summands(classes: Classes) -> tuple[Tensor, None]:
    """Summands of forward KL."""
    return classes.log_ratio().mul_(classes.teacher), None


# sum q log(q/p): slope log(q/p) + 1.
def _reverse_kl(classes: Classes) -> tuple[Tensor, Tensor]:
    ratio = classes.log_ratio()
    return torch.mul(ratio, classes.student, out=classes.spare("value")), ratio


# sum beta p log(p/m) + (1 - beta) q log(q/m), m = beta p + (1 - beta) q: slope (1 - beta) log(q/m).
def _js_divergence(classes: Classes, *, beta: float) -> tuple[Tensor, Tensor]:
    p, q = classes.teacher, classes.student
    rest = 1 - beta
    gap, value = classes.spare("surprise"), classes.spare("value")
    _surprise(torch.sub(q, p, out=gap), p, q, rest, classes, value).mul_(p)
    surprise = _surprise(gap.neg_(), q, p, beta, classes, gap)
    value.addcmul_(surprise, q, value=rest / beta)
    return value, _anchored(surprise, classes, beta)


# sum p log(p/m), m = lam p + (1 - lam) q: slope -(1 - lam) p/m.
def _skewed_forward_kl(classes: Classes, *, skew_lambda: float) -> tuple[Tensor, Tensor]:
    rest = 1 - skew_lambda
    p, q = classes.teacher, classes.student
    gap = torch.sub(q, p, out=classes.spare("gap"))
    value = _surprise(gap, p, q, rest, classes, classes.spare("value")).mul_(p)
    return value.add_(gap, alpha=-rest), _share(gap.neg_(), classes, skew_lambda)


# sum q log(q/m), m = lam q + (1 - lam) p: slope log(q/m) + 1 - lam q/m, where lam q/m is
# 1 - rest p/m.
def _skewed_reverse_kl(classes: Classes, *, skew_lambda: float) -> tuple[Tensor, Tensor]:
    rest = 1 - skew_lambda
    p, q = classes.teacher, classes.student
    gap = torch.sub(p, q, out=classes.spare("gap"))
    surprise = _surprise(gap, q, p, rest, classes, classes.spare("surprise"))
    value = torch.addcmul(gap, surprise, q, value=-1 / rest, out=classes.spare("value"))
    return value, _share(gap, classes, rest).sub_(
        _anchored(surprise, classes, rest), alpha=1 / rest
    )


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
    return Divergence(name, _reverse_kl, 1.0, scales, head_mass=head_mass, kernel=_REVERSE)


def _js_row(beta: float = 0.5) -> Divergence:
    _require("beta", beta, 0 < beta < 1, "between 0 and 1, both excluded")
    name = _named("js_divergence", beta=(beta, 0.5))
    form = KernelForm("js_divergence", beta)
    row = partial(_js_divergence, beta=beta)
    return Divergence(name, row, 0.0, Scales(value=-beta, slope=beta - 1), kernel=form)


def _skewed_forward_row(skew_lambda: float = 0.1) -> Divergence:
    _require("skew_lambda", skew_lambda, 0 <= skew_lambda < 1, "at least 0 and less than 1")
    name = _named("skewed_forward_kl", skew_lambda=(skew_lambda, 0.1))
    if skew_lambda == 0:
        return Divergence(name, forward_kl_summands, -1.0)
    row = partial(_skewed_forward_kl, skew_lambda=skew_lambda)
    form = KernelForm("skewed_forward_kl", skew_lambda)
    of_gap = skew_lambda - 1
    return Divergence(name, row, of_gap, Scales(-1.0, of_gap), balance=of_gap, kernel=form)


def _skewed_reverse_row(skew_lambda: float = 0.1) -> Divergence:
    _require("skew_lambda", skew_lambda, 0 <= skew_lambda < 1, "at least 0 and less than 1")
    name = _named("skewed_reverse_kl", skew_lambda=(skew_lambda, 0.1))
    if skew_lambda == 0:
        return _reverse_named(name)
    row = partial(_skewed_reverse_kl, skew_lambda=skew_lambda)
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

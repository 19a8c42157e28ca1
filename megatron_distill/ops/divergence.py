"""The table of divergences between a teacher p and a student q over the same classes.

A row says what a class adds to the value, ``l(p, q)``, and its slope ``dl/dq`` up to a constant.
Gradients of every support follow from the slope alone (see `pushforward`). The classes are a
vocabulary, a shard of it, or the kept ids of a top-k and what they leave.

Rows are written so that ``p == q`` gives exactly zero in both, and never form p/q.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

__all__ = [
    "DIVERGENCES",
    "Classes",
    "Divergence",
    "Model",
    "WeightedDivergence",
    "divergence_named",
    "forward_kl_summands",
]

Model = Literal["student", "teacher"]


@dataclass(frozen=True)
class Classes:
    """Probabilities ``[N, C]`` of the same classes under both models; a row may overwrite neither.

    Attributes:
        teacher: p.
        student: q.
        log_ratio: makes ``log p - log q``, zero where both are zero, for the caller to overwrite.
        anchor: ``[N, 1]`` one where slopes are wanted exact near ``p == q``, zero where they are
            near ``p == 0``; a constant apart. None is one everywhere.
    """

    teacher: Tensor
    student: Tensor
    log_ratio: Callable[[], Tensor]
    anchor: Tensor | None = None


@dataclass(frozen=True)
class Divergence:
    """One row.

    Attributes:
        name: what configurations call it, with parameters that are not the defaults.
        evaluate: classes -> summands of the value, and slopes ``dl/dq - constant``, finite even
            where a class has no probability. Of forward KL, which is linear in p, the value alone.
        constant: what the slope has in every class; it cancels where q sums to one.
        balance: what the value has of ``p - q``, whose sum is nothing where both sum to one: so it
            does not feel how they were rounded as a whole.
        head_mass: of the row that blends forward and reverse KL by the teacher's head and tail: the
            most mass of the tail. ``evaluate`` and ``constant`` are those of reverse KL.
    """

    name: str
    evaluate: Callable[[Classes], tuple[Tensor, Tensor | None]]
    constant: float
    balance: float = 0.0
    head_mass: float | None = None

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


def _smallest(like: Tensor) -> float:
    return torch.finfo(like.dtype).tiny


def _log1p(ratio: Tensor) -> Tensor:
    """Log of ``1 + ratio`` in place; a class without probability counts as the smallest."""
    return ratio.clamp_(min=torch.finfo(ratio.dtype).eps / 2 - 1).log1p_()


@dataclass(frozen=True)
class _Mixture:
    """Of ``m = teacher_share p + (1 - teacher_share) q``, tensors that a row may overwrite.

    ``gap`` is ``p - q``, ``share`` the same over m, ``anchored`` is ``(p - anchor q) / m``.
    """

    gap: Tensor
    share: Tensor
    anchored: Tensor
    mixture: Tensor

    @classmethod
    def of(cls, classes: Classes, teacher_share: float) -> _Mixture:
        gap = classes.teacher - classes.student
        mixture = torch.add(classes.student, gap, alpha=teacher_share)
        mixture.clamp_(min=_smallest(mixture))
        share = gap / mixture
        if classes.anchor is None:
            return cls(gap, share, share.clone(), mixture)
        anchored = torch.addcmul(classes.teacher, classes.student, classes.anchor, value=-1)
        return cls(gap, share, anchored.div_(mixture), mixture)

    def log_student_share(self, classes: Classes, teacher_share: float) -> Tensor:
        """``log(q/m)``, less its bound where the anchor is zero."""
        less = self.anchored * -teacher_share
        bound = _blend_of(classes, 1 / (1 - teacher_share)) * (1 - teacher_share)
        far = (classes.student / self.mixture).mul_(bound)
        far.clamp_(min=_smallest(far)).log_()
        return torch.where(less < -0.5, far, _log1p(less))


def _blend_of(classes: Classes, near_equal: float) -> Tensor | float:
    """``near_equal`` where the anchor is one, and one where it is zero."""
    return near_equal if classes.anchor is None else 1 - (1 - near_equal) * classes.anchor


# sum p log(p/q): slope -p/q.
def forward_kl_summands(classes: Classes) -> tuple[Tensor, None]:
    """Summands of forward KL."""
    return classes.log_ratio().mul_(classes.teacher), None


# sum q log(q/p): slope log(q/p) + 1.
def _reverse_kl(classes: Classes) -> tuple[Tensor, Tensor]:
    slope = classes.log_ratio().neg_()
    return slope * classes.student, slope


# sum beta p log(p/m) + (1 - beta) q log(q/m), m = beta p + (1 - beta) q: slope (1 - beta) log(q/m).
def _js_divergence(classes: Classes, *, beta: float) -> tuple[Tensor, Tensor]:
    mixed = _Mixture.of(classes, beta)
    slope = mixed.log_student_share(classes, beta).mul_(1 - beta)
    value = _log1p(mixed.share * (1 - beta)).mul_(classes.teacher).mul_(beta)
    of_student = _log1p(mixed.share.mul_(-beta)).mul_(classes.student)
    return value.add_(of_student, alpha=1 - beta), slope


# sum p log(p/m), m = lam p + (1 - lam) q: slope -(1 - lam) p/m.
def _skewed_forward_kl(classes: Classes, *, skew_lambda: float) -> tuple[Tensor, Tensor]:
    rest = 1 - skew_lambda
    mixed = _Mixture.of(classes, skew_lambda)
    value = _log1p(mixed.share.mul_(rest)).mul_(classes.teacher).add_(mixed.gap, alpha=-rest)
    return value, mixed.anchored.mul_(-rest * _blend_of(classes, rest))


# sum q log(q/m), m = lam q + (1 - lam) p: slope log(q/m) + 1 - lam q/m.
def _skewed_reverse_kl(classes: Classes, *, skew_lambda: float) -> tuple[Tensor, Tensor]:
    rest = 1 - skew_lambda
    mixed = _Mixture.of(classes, rest)
    slope = mixed.log_student_share(classes, rest)
    slope.add_(mixed.anchored.mul_(rest * _blend_of(classes, skew_lambda)))
    value = _log1p(mixed.share.mul_(-rest)).mul_(classes.student).add_(mixed.gap, alpha=rest)
    return value, slope


# sum |p - q| / 2: slope sign(q - p) / 2.
def _total_variation(classes: Classes) -> tuple[Tensor, Tensor]:
    gap = classes.student - classes.teacher
    return gap.abs().mul_(0.5), gap.sign_().mul_(0.5)


# sum (sqrt p - sqrt q)^2 / 2: slope (1 - sqrt(p/q)) / 2.
def _squared_hellinger(classes: Classes) -> tuple[Tensor, Tensor]:
    root, of_teacher = classes.student.sqrt(), classes.teacher.sqrt()
    value = (root - of_teacher).square_().mul_(0.5)
    anchored = root if classes.anchor is None else root * classes.anchor
    floor = _smallest(root) ** 0.5
    return value, (anchored - of_teacher).div_(root.clamp_(min=floor)).mul_(0.5)


def _forward_row() -> Divergence:
    return Divergence("forward_kl", forward_kl_summands, -1.0)


def _reverse_row() -> Divergence:
    return Divergence("reverse_kl", _reverse_kl, 1.0)


def _js_row(beta: float = 0.5) -> Divergence:
    _require("beta", beta, 0 < beta < 1, "between 0 and 1, both excluded")
    name = _named("js_divergence", beta=(beta, 0.5))
    return Divergence(name, partial(_js_divergence, beta=beta), 0.0)


def _skewed_forward_row(skew_lambda: float = 0.1) -> Divergence:
    _require("skew_lambda", skew_lambda, 0 <= skew_lambda < 1, "at least 0 and less than 1")
    name = _named("skewed_forward_kl", skew_lambda=(skew_lambda, 0.1))
    if skew_lambda == 0:
        return Divergence(name, forward_kl_summands, -1.0)
    row = partial(_skewed_forward_kl, skew_lambda=skew_lambda)
    return Divergence(name, row, skew_lambda - 1, skew_lambda - 1)


def _skewed_reverse_row(skew_lambda: float = 0.1) -> Divergence:
    _require("skew_lambda", skew_lambda, 0 <= skew_lambda < 1, "at least 0 and less than 1")
    name = _named("skewed_reverse_kl", skew_lambda=(skew_lambda, 0.1))
    if skew_lambda == 0:
        return Divergence(name, _reverse_kl, 1.0)
    row = partial(_skewed_reverse_kl, skew_lambda=skew_lambda)
    return Divergence(name, row, 1 - skew_lambda, 1 - skew_lambda)


# A blend of forward and reverse KL by how far the models are apart on the teacher's head and tail.
# Wu et al., arXiv 2404.02657, section 4.
def _adaptive_row(adaptive_alpha: float = 0.5) -> Divergence:
    _require("adaptive_alpha", adaptive_alpha, 0 < adaptive_alpha < 1, "between 0 and 1")
    name = _named("adaptive_kl", adaptive_alpha=(adaptive_alpha, 0.5))
    return Divergence(name, _reverse_kl, 1.0, head_mass=adaptive_alpha)


def _total_variation_row() -> Divergence:
    return Divergence("total_variation", _total_variation, 0.0)


def _squared_hellinger_row() -> Divergence:
    return Divergence("squared_hellinger", _squared_hellinger, 0.0)


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

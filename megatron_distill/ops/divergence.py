"""The table of divergences between a teacher p and a student q over the same classes.

A row says what a class adds to the value, ``l(p, q)``, and its slope ``dl/dq`` up to a constant.
Gradients of every support follow from the slope alone (see `pushforward`). The classes are a
vocabulary, a shard of it, or the kept ids of a top-k and what they leave.

Rows are written so that ``p == q`` gives exactly zero in both. Those that compare with a mixture of
both are in `mixture`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_distill.ops.classes import Classes
from megatron_distill.ops.kernels import KernelForm
from megatron_distill.ops.mixture import js_divergence, skewed_forward_kl, skewed_reverse_kl

__all__ = [
    "DIVERGENCES",
    "Divergence",
    "Scales",
    "WeightedDivergence",
    "divergence_named",
    "forward_kl_summands",
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

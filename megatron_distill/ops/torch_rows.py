"""Some rows of a chunk in fast memory: probabilities, slopes and the gradient on the logits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from megatron_distill.ops.adaptive_kl import TeacherBlock, head_share
from megatron_distill.ops.divergences import Classes, Model, WeightedDivergence
from megatron_distill.ops.row_math import exponentiate, row_sums
from megatron_distill.ops.softmax_gradient import (
    SoftmaxWeights,
    clear_rows_,
    difference_of_rows,
    scale_rows_,
    scale_softmax_,
)
from megatron_distill.ops.statistics import Packet, Softmax, Sweep, gap_beyond_top
from megatron_distill.ops.workspace import Scratch
from megatron_distill.signals import LogitRule

__all__ = ["Block", "Normalisers"]


class Normalisers(Protocol):
    """What makes exponentials probabilities."""

    @property
    def factors(self) -> Tensor:
        """``[S, N]`` fp64 of the softmaxes in order, of exponentials relative to the peak."""
        ...

    @property
    def top(self) -> Mapping[Model, Tensor]:
        """``[N, 1]`` each model's logit of the student's top token."""
        ...

    @property
    def top_ratios(self) -> Mapping[float, Tensor]:
        """``[N, 1]`` fp64 per temperature: ``log p - log q`` of that token."""
        ...


@dataclass(frozen=True)
class Block:
    """Logits ``[n, V]`` of some tokens, with this rank's statistics and global normalisers of them.

    The scratch buffers ``MODEL@T`` hold exponentials, which become probabilities where slopes are
    asked for.
    """

    sweep: Sweep
    logits: Mapping[Model, Tensor]
    student_rule: LogitRule
    packet: Packet
    normalisers: Normalisers
    scratch: Scratch
    _normalised: set[float] = field(default_factory=set)

    @property
    def _size(self) -> int:
        return self.logits["student"].shape[0]

    def exponentiate(self, softmaxes: Sequence[Softmax]) -> None:
        """Fill the buffers, as `measure_block` does."""
        spare = self._buffer("spare") if self.sweep.exact else None
        points = dict(zip(self.sweep.softmaxes, self.packet.origins.points.unbind(), strict=True))
        for model, temperature in softmaxes:
            buffer = self.scratch.take(f"{model}@{temperature}", self._size)
            point = points[model, temperature]
            exponentiate(self.logits[model], point, temperature, buffer, spare=spare)

    def classes(self, temperature: float, *, spares: str = "") -> Classes:
        """Probabilities, where the exponentials were; ``spares`` tells sets of buffers apart."""
        size = self._size
        teacher, student = (
            self.scratch.take(f"{model}@{temperature}", size) for model in ("teacher", "student")
        )
        if temperature not in self._normalised:
            _normalise_(teacher, self._factors["teacher", temperature])
            _normalise_(student, self._factors["student", temperature])
            self._normalised.add(temperature)

        def spare(name: str) -> Tensor:
            return self.scratch.take(f"spare {spares}{name}@{temperature}", size)

        def log_ratio() -> Tensor:
            gap = gap_beyond_top(
                self.logits,
                self.normalisers.top,
                spare("ratio"),
                spare=spare("value"),
                infinite=self.sweep.infinite,
            )
            return gap if temperature == 1.0 else gap.mul_(1 / temperature)

        top_ratio = self.normalisers.top_ratios[temperature].to(self.scratch.dtype)
        anchor = _uniform(top_ratio > -math.log(2))
        return Classes(teacher, student, log_ratio, spare, anchor, top_ratio)

    def for_head(self, rows: slice, temperature: float) -> TeacherBlock:
        """What the head of the teacher is found from."""
        classes = self.classes(temperature)
        return TeacherBlock(rows, self.logits["teacher"], classes.teacher, classes.student)

    def blend(self, term: WeightedDivergence) -> Tensor:
        """The blend ``[n, 1]`` of a term, where this rank is alone with its vocabulary."""
        assert term.divergence.head_mass is not None
        whole = self.for_head(slice(0, self._size), term.temperature)
        share = head_share(
            lambda: [whole],
            self._size,
            head_mass=term.divergence.head_mass,
            group=None,
            device=whole.logits.device,
        )
        return share.to(self.scratch.dtype)

    def sum_slopes(self, term: WeightedDivergence) -> tuple[Tensor, Tensor, Tensor]:
        """Of a term ``[n]`` each: value and ``sum q (s - reference)``, both fp64, and the slope at
        the top."""
        classes, scales = self.classes(term.temperature), term.divergence.scales
        summands, slope = term.divergence.evaluate(classes)
        assert slope is not None
        value = self._value(term, summands)
        reference = self._at_top(slope).mul_(scales.slope)
        average = _pull(slope, scales.slope, reference, classes.student, slope)
        return value, average, reference.squeeze(1)

    def gradient(self, weights: Sequence[SoftmaxWeights], out: Tensor) -> dict[str, Tensor]:
        """Write the gradient on the raw outputs to ``out``, which may be these outputs.

        Returns the values ``[n]`` fp64 of terms with slopes.
        """
        values: dict[str, Tensor] = {}
        is_last = len(weights) == 1 and self.student_rule.is_identity
        direct = out if is_last and out.dtype == self.scratch.dtype else None
        gradients = [
            self._curved_gradient(softmax, values, direct)
            if softmax.curved
            else self._linear_gradient(softmax, direct)
            for softmax in weights
        ]
        if not gradients:
            out.zero_()
            return values
        total = gradients[0]
        for gradient in gradients[1:]:
            total.add_(gradient)
        if total is not direct:
            spare = self.scratch.take("spare", self._size)
            out.copy_(self.student_rule.chain_(total, self.logits["student"], spare))
        return values

    def _value(self, term: WeightedDivergence, summands: Tensor) -> Tensor:
        """``[n]`` fp64, what the summands of a term give over this shard."""
        value = row_sums(summands).mul_(term.divergence.scales.value)
        top_ratio = self.normalisers.top_ratios[term.temperature].squeeze(1)
        number = self.sweep.softmaxes.index(("student", term.temperature))
        factor = self.normalisers.factors[number]
        return self.packet.made_whole(value, term, top_ratio, factor)

    def _linear_gradient(self, weights: SoftmaxWeights, out: Tensor | None) -> Tensor:
        """What forward KL, labels and kept ids at one temperature add to the gradient.

        ``out`` takes it if that is the difference of both models' probabilities.
        """
        temperature = weights.temperature
        gradient = self.scratch.take(f"student@{temperature}", self._size)
        factor = self._factors.get(("student", temperature))
        if factor is None:
            gradient.zero_()  # nothing at this temperature but points
        elif weights.teacher is None:
            scale_softmax_(gradient, weights, self._buffer, factor=factor)
        else:
            place = gradient if out is None or weights.points else out
            gradient = self._difference(weights, weights.teacher, place)
        for columns, added in weights.points:
            gradient.scatter_add_(1, columns, added)
        return gradient

    def _difference(self, weights: SoftmaxWeights, of_teacher: Tensor, out: Tensor) -> Tensor:
        """What the teacher's softmax, weighted, leaves of the student's, into ``out``."""
        at = weights.temperature
        student, teacher = (self._buffer(f"{model}@{at}") for model in ("student", "teacher"))
        factors = self._factors["student", at], self._factors["teacher", at]
        if not weights.others and not weights.sparse:
            own, others = weights.student * factors[0], of_teacher * factors[1]
            return difference_of_rows(student, own, teacher, others, out)
        scale_softmax_(student, weights, self._buffer, factor=factors[0])
        scale_rows_(teacher, of_teacher, sparse=weights.sparse, factor=factors[1])
        return torch.sub(student, teacher, out=out)

    def _curved_gradient(
        self, weights: SoftmaxWeights, values: dict[str, Tensor], out: Tensor | None
    ) -> Tensor:
        """What all terms at one temperature add, some of them with slopes.

        It is ``q`` times slopes less their average; ``out`` takes it if that is all there is.
        """
        total: Tensor | None = None
        rest, sparse = weights.student, weights.sparse
        for curved in weights.curved:
            classes = self.classes(weights.temperature, spares="" if total is None else "further ")
            scales = curved.term.divergence.scales
            summands, slope = curved.term.divergence.evaluate(classes)
            assert slope is not None
            reference = curved.reference
            if reference is None:
                values[curved.term.key] = self._value(curved.term, summands)
                reference = self._at_top(slope).mul_(scales.slope)
            pull, average = summands, curved.average
            found = _pull(slope, scales.slope, reference, classes.student, pull)
            if average is None:
                average = found.to(pull.dtype).unsqueeze(1)
            if curved.is_one:
                rest = rest - average
            else:
                rest = rest - torch.where(curved.weight == 0, 0.0, curved.weight * average)
                scale_rows_(pull, curved.weight, sparse=sparse)
            total = pull if total is None else total.add_(pull)
        assert total is not None
        if weights.others or weights.teacher is not None or weights.points:
            out = None
        if weights.others:
            gradient = total.add_(
                scale_softmax_(classes.student, weights, self._buffer, student=rest)
            )
        else:
            gradient = torch.addcmul(
                total, classes.student, rest, out=total if out is None else out
            )
            if sparse:
                clear_rows_(gradient, weights.unused)
        if weights.teacher is not None:
            gradient.sub_(scale_rows_(classes.teacher, weights.teacher, sparse=sparse))
        for columns, added in weights.points:
            gradient.scatter_add_(1, columns, added)
        return gradient

    def _buffer(self, name: str) -> Tensor:
        return self.scratch.take(name, self._size)

    @cached_property
    def _factors(self) -> dict[Softmax, Tensor]:
        """What makes the exponentials of each buffer probabilities, ``[n, 1]``."""
        factors = self.packet.origins.normalisers(self.normalisers.factors).unsqueeze(2)
        return dict(zip(self.sweep.softmaxes, factors.unbind(), strict=True))

    def _at_top(self, slope: Tensor) -> Tensor:
        """The slope at the student's top token of this shard, ``[n, 1]``."""
        assert self.packet.top is not None
        return slope.gather(1, self.packet.top.unsqueeze(1))


def _normalise_(exponentials: Tensor, factor: Tensor) -> None:
    """Exponentials ``[n, V]`` to probabilities, in place; none is less than a normal number."""
    exponentials.mul_(factor).clamp_(min=torch.finfo(exponentials.dtype).tiny)


def _pull(slope: Tensor, scale: float, reference: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """``weight (scale slope - reference)`` of ``[n, V]`` and ``[n, 1]`` into ``out``, which may be
    the slope; its sums ``[n]`` fp64. Overwrites the slope."""
    relative = torch.add(reference.neg(), slope, alpha=scale, out=slope)
    return row_sums(torch.mul(relative, weight, out=out))


def _uniform(anchor: Tensor) -> Tensor | bool:
    """One value where all rows have the same; a GPU is not asked, which would be waited for."""
    if anchor.device.type != "cpu":
        return anchor
    if bool(anchor.all()):
        return True
    return anchor if bool(anchor.any()) else False

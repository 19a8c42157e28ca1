"""The torch implementation of `RowExecutor`, on row blocks that fit in fast memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.ops.adaptive_kl import TeacherBlock, head_share
from megatron_distill.ops.divergences import Classes, Model, WeightedDivergence
from megatron_distill.ops.normalizers import Normalizers
from megatron_distill.ops.row_math import row_sums
from megatron_distill.ops.softmax_gradient import (
    SoftmaxWeights,
    clear_rows_,
    difference_of_rows,
    scale_rows_,
    scale_softmax_,
)
from megatron_distill.ops.statistics import (
    LocalStatistics,
    Softmax,
    StatisticsSpec,
    gap_beyond_top,
    measure_block,
)
from megatron_distill.ops.workspace import Scratch, load_logits, row_blocks
from megatron_distill.signals import LogitRule

__all__ = ["Block", "TorchRows"]


@dataclass(frozen=True)
class Block:
    """Logits ``[n, V]`` of some tokens, with this rank's statistics and the global normalisers.

    The scratch buffers ``MODEL@T`` hold exponentials, which `classes` turns into probabilities.
    """

    spec: StatisticsSpec
    logits: Mapping[Model, Tensor]
    student_rule: LogitRule
    local: LocalStatistics
    normalizers: Normalizers
    scratch: Scratch
    _normalised: set[float] = field(default_factory=set)

    @property
    def _size(self) -> int:
        return self.logits["student"].shape[0]

    def exponentiate(self, softmaxes: Sequence[Softmax]) -> None:
        """Fill the buffers with exponentials, as `measure_block` does."""
        for softmax in softmaxes:
            model, temperature = softmax
            buffer, workspace = self._buffer(f"{model}@{temperature}"), self._buffer("workspace")
            number = self.spec.softmaxes.index(softmax)
            self.local.exponent_shifts.exponentiate(
                number, self.logits[model], buffer, workspace=workspace
            )

    def classes(self, temperature: float, *, prefix: str = "") -> Classes:
        """Probabilities, in place of the exponentials; ``prefix`` is of workspace names."""
        size = self._size
        teacher, student = (
            self.scratch.take(f"{model}@{temperature}", size) for model in ("teacher", "student")
        )
        if temperature not in self._normalised:
            _normalise_(teacher, self._factors["teacher", temperature])
            _normalise_(student, self._factors["student", temperature])
            self._normalised.add(temperature)

        def workspace(name: str) -> Tensor:
            return self.scratch.take(f"workspace {prefix}{name}@{temperature}", size)

        def log_ratio() -> Tensor:
            gap = gap_beyond_top(
                self.logits,
                self.normalizers.top,
                workspace("ratio"),
                workspace=workspace("value"),
                infinite=self.spec.infinite,
            )
            return gap if temperature == 1.0 else gap.mul_(1 / temperature)

        top_ratio = self.normalizers.top_ratios[temperature].to(self.scratch.dtype)
        near_equal = _uniform(top_ratio > -math.log(2))
        return Classes(teacher, student, log_ratio, workspace, near_equal, top_ratio)

    def for_head(self, rows: slice, temperature: float) -> TeacherBlock:
        """The input of `head_share` for these tokens."""
        classes = self.classes(temperature)
        return TeacherBlock(rows, self.logits["teacher"], classes.teacher, classes.student)

    def blend(self, term: WeightedDivergence) -> Tensor:
        """The blend ``[n, 1]`` of a term, where this rank holds the whole vocabulary."""
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
        """Value and ``sum q (s - reference)`` of a term, ``[n]`` fp64, and top slope ``[n]``."""
        classes, scales = self.classes(term.temperature), term.divergence.scales
        summands, slope = term.divergence.evaluate(classes)
        assert slope is not None
        value = self._value(term, summands)
        reference = self._at_top(slope).mul_(scales.slope)
        average = _q_times_slope(slope, scales.slope, reference, classes.student, slope)
        return value, average, reference.squeeze(1)

    def gradient(self, weights: Sequence[SoftmaxWeights], out: Tensor) -> dict[str, Tensor]:
        """Write the gradient on the raw outputs to ``out``, which may alias these outputs.

        Returns the values ``[n]`` fp64 of terms with slopes.
        """
        values: dict[str, Tensor] = {}
        is_last = len(weights) == 1 and self.student_rule.is_identity
        direct = out if is_last and out.dtype == self.scratch.dtype else None
        gradients = [
            self._nonlinear_gradient(softmax, values, direct)
            if softmax.nonlinear
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
            workspace = self.scratch.take("workspace", self._size)
            out.copy_(self.student_rule.chain_(total, self.logits["student"], workspace))
        return values

    def _value(self, term: WeightedDivergence, summands: Tensor) -> Tensor:
        """``[n]`` fp64, the sum of a term's summands over this shard."""
        value = row_sums(summands).mul_(term.divergence.scales.value)
        top_ratio = self.normalizers.top_ratios[term.temperature].squeeze(1)
        number = self.spec.softmaxes.index(("student", term.temperature))
        factor = self.normalizers.factors[number]
        return self.local.made_whole(value, term, top_ratio, factor)

    def _linear_gradient(self, weights: SoftmaxWeights, out: Tensor | None) -> Tensor:
        """Gradient of forward KL, labels and top-k ids at one temperature.

        It is written to ``out``, if given, with forward KL.
        """
        temperature = weights.temperature
        gradient = self.scratch.take(f"student@{temperature}", self._size)
        factor = self._factors.get(("student", temperature))
        if factor is None:
            gradient.zero_()  # only scattered values at this temperature
        elif weights.teacher is None:
            scale_softmax_(gradient, weights, self._buffer, factor=factor)
        else:
            gradient = self._difference(weights, weights.teacher, gradient if out is None else out)
        for columns, added in weights.scatter:
            gradient.scatter_add_(1, columns, added)
        return gradient

    def _difference(self, weights: SoftmaxWeights, of_teacher: Tensor, out: Tensor) -> Tensor:
        """The student's softmax less the teacher's, each times its weight, into ``out``."""
        at = weights.temperature
        student, teacher = (self._buffer(f"{model}@{at}") for model in ("student", "teacher"))
        factors = self._factors["student", at], self._factors["teacher", at]
        if not weights.tail_weights and not weights.sparse:
            left, right = weights.student * factors[0], of_teacher * factors[1]
            return difference_of_rows(student, left, teacher, right, out)
        scale_softmax_(student, weights, self._buffer, factor=factors[0])
        scale_rows_(teacher, of_teacher, sparse=weights.sparse, factor=factors[1])
        return torch.sub(student, teacher, out=out)

    def _nonlinear_gradient(
        self, weights: SoftmaxWeights, values: dict[str, Tensor], out: Tensor | None
    ) -> Tensor:
        """Gradient of all terms at one temperature, at least one of them with slopes.

        It is ``q`` times (slopes less their average); written to ``out`` if no further part is
        added.
        """
        total: Tensor | None = None
        rest, sparse = weights.student, weights.sparse
        for nonlinear in weights.nonlinear:
            classes = self.classes(weights.temperature, prefix="" if total is None else "further ")
            scales = nonlinear.term.divergence.scales
            summands, slope = nonlinear.term.divergence.evaluate(classes)
            assert slope is not None
            reference = nonlinear.reference
            if reference is None:
                values[nonlinear.term.key] = self._value(nonlinear.term, summands)
                reference = self._at_top(slope).mul_(scales.slope)
            q_times_slope, average = summands, nonlinear.average
            found = _q_times_slope(slope, scales.slope, reference, classes.student, q_times_slope)
            if average is None:
                average = found.to(q_times_slope.dtype).unsqueeze(1)
            if nonlinear.is_one:
                rest = rest - average
            else:
                rest = rest - torch.where(nonlinear.weight == 0, 0.0, nonlinear.weight * average)
                scale_rows_(q_times_slope, nonlinear.weight, sparse=sparse)
            total = q_times_slope if total is None else total.add_(q_times_slope)
        assert total is not None
        if weights.tail_weights:
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
        for columns, added in weights.scatter:
            gradient.scatter_add_(1, columns, added)
        return gradient

    def _buffer(self, name: str) -> Tensor:
        return self.scratch.take(name, self._size)

    @cached_property
    def _factors(self) -> dict[Softmax, Tensor]:
        """Factors from the exponentials of each buffer to probabilities, ``[n, 1]``."""
        factors = self.local.exponent_shifts.normalisers(self.normalizers.factors).unsqueeze(2)
        return dict(zip(self.spec.softmaxes, factors.unbind(), strict=True))

    def _at_top(self, slope: Tensor) -> Tensor:
        """The slope at the student's top token of this shard, ``[n, 1]``."""
        assert self.local.top is not None
        return slope.gather(1, self.local.top.unsqueeze(1))


@dataclass(frozen=True)
class TorchRows:
    """`RowExecutor` on torch operations, block by block, with shared buffers.

    Tokens near their teacher are measured a second time in fp64, in separate blocks.
    """

    spec: StatisticsSpec
    raw: Mapping[Model, Tensor]
    rules: Mapping[Model, LogitRule]
    scratch: Scratch

    def measure(self, local: LocalStatistics) -> None:
        """See `RowExecutor`."""
        for rows in self._rows():
            own = local.part(rows)
            measure_block(own, self._load(rows), self.scratch)
            near = own.near_tokens()
            if near is not None:
                self._measure_near(own, near, self._load(_at(rows, near), self._double))

    def blends(
        self,
        local: LocalStatistics,
        normalizers: Normalizers,
        group: dist.ProcessGroup | None,
        shared_class: Tensor | None,
    ) -> dict[str, Tensor]:
        """See `RowExecutor`."""
        found = {}
        for term in self.spec.nonlinear:
            if term.divergence.head_mass is not None:
                blend = head_share(
                    partial(self._teacher_blocks, local, normalizers, term.temperature),
                    local.values.shape[1],
                    head_mass=term.divergence.head_mass,
                    group=group,
                    device=local.values.device,
                    shared_class=shared_class,
                )
                found[term.key] = blend.to(local.dtype)
        return found

    def sum_slopes(self, local: LocalStatistics, normalizers: Normalizers) -> Tensor:
        """See `RowExecutor`."""
        terms = self.spec.nonlinear
        sums = local.values.new_zeros(3 * len(terms), local.values.shape[1])
        temperatures = {term.temperature for term in terms}
        softmaxes = [softmax for softmax in self.spec.softmaxes if softmax[1] in temperatures]
        for block, tokens in self._blocks(local, normalizers):
            block.exponentiate(softmaxes)
            for number, term in enumerate(terms):
                value, average, reference = block.sum_slopes(term)
                found = torch.stack((value, average, reference.double()))
                sums[3 * number : 3 * number + 3, tokens] = found
        return sums

    def write_gradient(
        self,
        local: LocalStatistics,
        normalizers: Normalizers,
        weights: Sequence[SoftmaxWeights],
        out: Tensor,
    ) -> None:
        """See `RowExecutor`."""
        for block, tokens in self._blocks(local, normalizers):
            block.exponentiate(self.spec.softmaxes)
            self._write_gradient(block, weights, out, tokens)

    def all_passes(
        self, local: LocalStatistics, weights: Sequence[SoftmaxWeights], out: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """See `AllPasses`."""
        count = local.values.shape[1]
        values = {term.key: local.values.new_zeros(count) for term in self.spec.nonlinear}
        blends = {
            term.key: local.values.new_zeros(count, 1)
            for term in self.spec.nonlinear
            if term.divergence.head_mass is not None
        }
        for rows in self._rows():
            own, logits = local.part(rows), self._load(rows)
            measure_block(own, logits, self.scratch)
            parts: list[tuple[LocalStatistics, dict[Model, Tensor], slice | Tensor, Scratch]]
            parts = [(own, logits, rows, self.scratch)]
            near = own.near_tokens()
            if near is not None:
                tokens = _at(rows, near)
                # Loaded before a gradient overwrites these logits.
                near_logits = self._load(tokens, self._double)
                part = self._measure_near(own, near, near_logits)
                parts.append((part, near_logits, tokens, self._double))
            for part, given, tokens, scratch in parts[isinstance(near, slice) :]:
                known = Normalizers.alone(part)
                block = Block(self.spec, given, self.rules["student"], part, known, scratch)
                for key, blend in blends.items():
                    known.blends[key] = block.blend(self._term(key))
                    blend[tokens] = known.blends[key].double()
                found = self._write_gradient(block, weights, out, tokens, known.blends)
                for key, value in found.items():
                    values[key][tokens] = value
        return values, blends

    def _teacher_blocks(
        self, local: LocalStatistics, normalizers: Normalizers, temperature: float
    ) -> Iterator[TeacherBlock]:
        softmaxes = [softmax for softmax in self.spec.softmaxes if softmax[1] == temperature]
        for rows in self._rows():
            block = self._block(local, normalizers, rows, self.scratch)
            block.exponentiate(softmaxes)
            yield block.for_head(rows, temperature)

    def _blocks(
        self, local: LocalStatistics, normalizers: Normalizers
    ) -> Iterator[tuple[Block, slice | Tensor]]:
        """Blocks, with the positions of their tokens in the chunk.

        Tokens near their teacher follow in an fp64 block, after a block that may contain them too.
        """
        for rows in self._rows():
            near, apart = local.part(rows).near_tokens(), None
            if near is not None:
                tokens = _at(rows, near)
                # Loaded before a gradient overwrites these logits.
                apart = self._block(local, normalizers, tokens, self._double)
            if not isinstance(near, slice):
                yield self._block(local, normalizers, rows, self.scratch), rows
            if apart is not None:
                yield apart, tokens

    def _measure_near(
        self, local: LocalStatistics, near: slice | Tensor, logits: Mapping[Model, Tensor]
    ) -> LocalStatistics:
        """Measure the tokens near their teacher a second time, in fp64.

        The difference between the models is too small for fp32 rounding.
        """
        part = local.in_double(near)
        measure_block(part, logits, self._double)
        local.values[:, near] = part.values
        return part

    def _write_gradient(
        self,
        block: Block,
        weights: Sequence[SoftmaxWeights],
        out: Tensor,
        tokens: slice | Tensor,
        blends: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> dict[str, Tensor]:
        """`Block.gradient` written to the given tokens of ``out [N, V]``."""
        dtype = block.scratch.dtype
        given = [softmax.rows(tokens, dtype).blended(blends) for softmax in weights]
        if isinstance(tokens, slice):
            return block.gradient(given, out[tokens])
        found = out.new_empty(len(tokens), out.shape[1])
        values = block.gradient(given, found)
        out.index_copy_(0, tokens, found)
        return values

    @cached_property
    def _double(self) -> Scratch:
        return self.scratch.in_double()

    def _term(self, key: str) -> WeightedDivergence:
        return next(term for term in self.spec.terms if term.key == key)

    def _rows(self) -> list[slice]:
        student = self.raw["student"]
        if student.shape[1] == 0:
            return []
        return list(row_blocks(student.shape[0], student.shape[1], student.device))

    def _block(
        self,
        local: LocalStatistics,
        normalizers: Normalizers,
        tokens: slice | Tensor,
        scratch: Scratch,
    ) -> Block:
        if scratch is self.scratch:
            assert isinstance(tokens, slice)
            own = local.part(tokens)
        else:
            own = local.in_double(tokens)
        part, rule = normalizers.part(tokens, scratch.dtype), self.rules["student"]
        return Block(self.spec, self._load(tokens, scratch), rule, own, part, scratch)

    def _load(self, tokens: slice | Tensor, scratch: Scratch | None = None) -> dict[Model, Tensor]:
        scratch = self.scratch if scratch is None else scratch
        return {
            model: load_logits(self.rules[model], raw[tokens], scratch, f"{model}_logits")
            for model, raw in self.raw.items()
        }


def _at(rows: slice, tokens: slice | Tensor) -> slice | Tensor:
    """Positions in the chunk of tokens numbered within ``rows``."""
    return rows if isinstance(tokens, slice) else tokens + rows.start


def _normalise_(exponentials: Tensor, factor: Tensor) -> None:
    """Exponentials ``[n, V]`` to probabilities, in place, at least the smallest normal number."""
    exponentials.mul_(factor).clamp_(min=torch.finfo(exponentials.dtype).tiny)


def _q_times_slope(
    slope: Tensor, scale: float, reference: Tensor, weight: Tensor, out: Tensor
) -> Tensor:
    """``weight (scale slope - reference)`` of ``[n, V]`` and ``[n, 1]`` into ``out``.

    Overwrites the slope, which may be ``out``. Returns the sums ``[n]`` fp64.
    """
    relative = torch.add(reference.neg(), slope, alpha=scale, out=slope)
    return row_sums(torch.mul(relative, weight, out=out))


def _uniform(near_equal: Tensor) -> Tensor | bool:
    """One bool if all tokens agree; CPU only: on a GPU the test would synchronise the host."""
    if near_equal.device.type != "cpu":
        return near_equal
    if bool(near_equal.all()):
        return True
    return near_equal if bool(near_equal.any()) else False

"""The executor of losses between tokenizers: logits, losses and gradients, tile by tile.

Logits of both models exist for one band of tiles at a time, and all that losses make of them for
one tile. `aligned_linear` trains: the weights of chunks
are known, and the gradient goes into the hidden states and the head's weight at once.
`aligned_divergence` takes logits and returns a value per chunk, with any upstream gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_distill.ops.aligned.plan import TilePlan, TileRange
from megatron_distill.ops.aligned.tile import (
    AlignedTerm,
    Pairs,
    Tile,
    TileGradient,
    TileSide,
)
from megatron_distill.ops.factors import Factor, is_zero, scaled
from megatron_distill.ops.fused_linear import (
    Partition,
    sum_tokens,
    weighted_rows,
)
from megatron_distill.ops.vocab import VocabShard
from megatron_distill.ops.weight_gradient import HeadGradients, differentiable_pass
from megatron_distill.ops.workspace import (
    Rows,
    Scratch,
    accumulation_dtype,
    allocate,
    allocate_logits,
)
from megatron_distill.signals import DenseLogits, HiddenState, LogitSource

__all__ = [
    "AlignedLinear",
    "AlignedRows",
    "LabelLoss",
    "WeightedTerm",
    "aligned_divergence",
    "aligned_linear",
]


@dataclass(frozen=True)
class AlignedRows:
    """Rows of both models, without the student's logits.

    Attributes:
        plan: order and tiles of the rows, on the device of the logits.
        teacher: logits of the M teacher rows; None if no term needs them.
        student_labels: ``[N]`` global ids that the student's rows predict.
        teacher_labels: ``[M]`` global ids of the teacher's tokenizer.
        student_shard: this rank's columns of the student's vocabulary.
        teacher_shard: this rank's columns of the teacher's vocabulary.
        group: the ranks that share both vocabularies; None if this rank holds all of them.
    """

    plan: TilePlan
    teacher: LogitSource | None
    student_labels: Tensor
    teacher_labels: Tensor
    student_shard: VocabShard
    teacher_shard: VocabShard
    group: dist.ProcessGroup | None

    def bands(self, student: LogitSource) -> Iterator[Band]:
        """The bands in order; logits are valid until the next one, and may be overwritten."""
        plan, group, labels = self.plan, self.group, self.student_labels
        own = _Side(student, self.student_shard, group, plan.student, labels, plan.student_bands)
        other = None
        if self.teacher is not None:
            shard, labels = self.teacher_shard, self.teacher_labels
            other = _Side(self.teacher, shard, group, plan.teacher, labels, plan.teacher_bands)
        parts = zip(plan.bands, plan.student_bands, plan.teacher_bands, strict=True)
        for band, rows, teacher_rows in parts:
            raw = own.form(rows)
            if other is not None and teacher_rows.stop > teacher_rows.start:
                other.form(teacher_rows)
            yield Band(rows, raw, self._tiles(own, other, plan.tiles[band]))

    def _tiles(
        self, own: _Side, other: _Side | None, parts: Sequence[TileRange]
    ) -> Iterator[tuple[TileRange, Tile]]:
        """The tiles of the band whose logits are formed."""
        plan = self.plan
        assert plan.teacher.indices is not None
        for part in parts:
            side = own.take(part.student, plan.student_lengths[part.chunks])
            lengths = plan.teacher_lengths[part.chunks]
            teacher = None
            if other is not None and part.chunks.stop > part.chunks.start:
                teacher = other.take(part.teacher, lengths)
            rows = plan.teacher.indices[part.teacher]
            chunk, row, teacher_row = plan.pairs[:, part.pairs].unbind()
            pairs = Pairs(
                chunk - part.chunks.start,
                row - part.student.start,
                teacher_row - part.teacher.start,
            )
            yield part, Tile(side, teacher, rows, lengths, pairs)


class Band(NamedTuple):
    """Consecutive tiles, and the student's logits of all of them.

    Attributes:
        student: the ordered student rows.
        raw: ``[n, V]`` their raw outputs, of which those of the tiles are parts.
        tiles: the tiles in order, with their parts of the plan.
    """

    student: slice
    raw: Tensor
    tiles: Iterator[tuple[TileRange, Tile]]


class _Side:
    """One model's rows, with the buffers that its bands and tiles share."""

    def __init__(
        self,
        source: LogitSource,
        shard: VocabShard,
        group: dist.ProcessGroup | None,
        rows: Rows,
        labels: Tensor,
        bands: Sequence[slice],
    ) -> None:
        assert rows.indices is not None
        self._source, self._shard, self._group = source, shard, group
        self._rows, self._indices, self._labels = rows, rows.indices, labels
        largest = max((band.stop - band.start for band in bands), default=1)
        columns, device = shard.real_width, rows.indices.device
        self._buffer = None
        if source.formed is None:
            self._buffer = allocate_logits(largest, columns, source.dtype, device)
        self._scratch = Scratch(largest, columns, accumulation_dtype(source.dtype), device)
        self._formed: tuple[int, Tensor] | None = None  # the band's first row, and its logits

    def form(self, part: slice) -> Tensor:
        """Raw outputs of a band's ordered rows."""
        memory = None if self._buffer is None else self._buffer[: part.stop - part.start]
        take = partial(self._rows.take, chunk=part)
        raw = self._source.outputs(take, self._shard.real_width, memory)
        self._formed = part.start, raw
        return raw

    def take(self, part: slice, lengths: Tensor) -> TileSide:
        """The ordered rows of a tile of the band."""
        assert self._formed is not None, "a band is formed before its tiles"
        first, raw = self._formed
        indices = self._indices[part]
        chunks = torch.arange(len(lengths), device=indices.device)
        return TileSide(
            raw=raw[part.start - first : part.stop - first],
            rule=self._source.rule,
            shard=self._shard,
            group=self._group,
            labels=self._labels.index_select(0, indices),
            rows=indices,
            chunks=chunks.repeat_interleave(lengths, output_size=_output(len(indices), lengths)),
            lengths=lengths,
            scratch=self._scratch,
        )


def _output(rows: int, lengths: Tensor) -> int:
    """Rows that belong to chunks: all or none."""
    return rows if len(lengths) else 0


@dataclass(frozen=True)
class WeightedTerm:
    """A term of the objective.

    Attributes:
        term: the loss.
        coefficient: its constant factor in the total.
        weights: ``[C]``, mask and normalisation of its chunks. A chunk without weight in any term
            is best left out of the plan (-1): its rows would enter the products of the head.
    """

    term: AlignedTerm
    coefficient: Factor
    weights: Tensor


@dataclass(frozen=True)
class LabelLoss:
    """The student's cross-entropy on its own labels, from the same logits.

    Attributes:
        weights: ``[N]``, mask and normalisation of the rows.
        coefficient: constant factor in the total.
    """

    weights: Tensor
    coefficient: float


@dataclass(frozen=True)
class AlignedLinear:
    """Arguments of `aligned_linear`, except the student's tensors.

    Attributes:
        rows: rows of both models.
        terms: the losses between both models.
        label_loss: None without one; else the plan has all rows with a weight.
        chunk_parts: a split of the chunks ``[C]``, for separate sums per part.
        row_parts: the same split of the student's rows ``[N]``, for the label loss.
        weight_gradient_sum: ``[V, H]`` fp32 (fp64), to which the gradient on the weight is added.
        ranked: key of the term whose teacher's mass of the top-k is summed; None for none.
    """

    rows: AlignedRows
    terms: tuple[WeightedTerm, ...]
    label_loss: LabelLoss | None = None
    chunk_parts: Partition | None = None
    row_parts: Partition | None = None
    weight_gradient_sum: Tensor | None = None
    ranked: str | None = None

    @property
    def sum_names(self) -> tuple[str, ...]:
        """Names of the weighted sums that `aligned_linear` returns, in order."""
        label = () if self.label_loss is None else ("ce",)
        mass = () if self.ranked is None else ("topk_mass",)
        return (*label, *(one.term.key for one in self.terms), *mass)


def aligned_linear(student: HiddenState, work: AlignedLinear) -> tuple[Tensor, Tensor]:
    """Total objective and weighted sums over all chunks and rows.

    Shapes: total is a scalar, differentiable in the student's hidden ``[N, H]``, weight ``[V, H]``
    and bias ``[V]``. Sums ``[K]`` follow ``work.sum_names``, detached and without coefficients;
    with parts they are ``[K, 1 + parts]``. Both are fp32 (fp64 for fp64 inputs). The hidden
    gradient is this shard's PARTIAL sum, and ``weight_gradient_sum`` is added to in the forward
    pass, as in `fused_linear`. Rows in no tile of the plan have no gradient.

    Memory above the inputs, in elements. Per row of one band: ``V`` logits of each model with a
    head. Per row of one tile: ``V`` fp32 of the student, except for losses on labels. On chunk
    means at most three times ``V`` fp32 of each model. The row blocks of `TileSide` are added.
    Gradients as in `fused_linear`.

    Collective: over ``group`` those of the terms and of `TileSide` for each tile; the label loss
    needs 24 bytes per row, shared with likelihood. None in backward.

    Raises:
        RuntimeError: in backward, if a sum was given and the upstream gradient is not one.
    """
    return differentiable_pass(
        student,
        lambda gradients: _TilePass(student, work, gradients).run(),
        rows=work.rows.plan.student,
        columns=work.rows.student_shard.real_width,
        chunks=len(work.rows.plan.bands),
        weight_sum=work.weight_gradient_sum,
    )


class _TilePass:
    """One pass over all tiles, with the gradients that it fills."""

    def __init__(self, student: HiddenState, work: AlignedLinear, gradients: HeadGradients) -> None:
        self._student, self._work, self._gradients = student, work, gradients
        self._dtype = accumulation_dtype(student.dtype)
        parts = work.row_parts or work.chunk_parts
        self._sums = torch.zeros(
            len(work.sum_names),
            1 + (0 if parts is None else parts.parts),
            dtype=torch.float64,
            device=student.weight.device,
        )

    def run(self) -> tuple[Tensor, Tensor]:
        """Total and sums; the wanted gradients are filled."""
        work = self._work
        wanted = self._gradients.are_wanted
        memory = _gradient_memory(self._student, work.rows)
        for band in work.rows.bands(self._student):
            for part, tile in band.tiles:
                gradient = TileGradient(tile.student, partial(memory, tile)) if wanted else None
                self._sums += self._run_tile(part, tile, gradient)
                if gradient is not None:
                    gradient.write(tile.student.raw)
            if wanted:
                self._gradients.add(band.student, band.raw)
        coefficients: list[Factor] = [one.coefficient for one in work.terms]
        if work.label_loss is not None:
            coefficients.insert(0, work.label_loss.coefficient)
        total = self._sums.new_zeros(())
        of_losses = self._sums[: len(coefficients), 0]
        for coefficient, value in zip(coefficients, of_losses, strict=True):
            total = total + coefficient * value
        sums = self._sums.to(self._dtype)
        return total.to(self._dtype), sums if sums.shape[1] > 1 else sums.squeeze(1)

    def _run_tile(self, part: TileRange, tile: Tile, gradient: TileGradient | None) -> Tensor:
        """The tile's share of the sums; adds to the gradient."""
        work, sums = self._work, []
        if work.label_loss is not None:
            rows = tile.student.rows
            weights = work.label_loss.weights.index_select(0, rows).double()
            values = -tile.student.label_statistics().log_prob
            sums.append(_summed(weights, values, work.row_parts, rows))
            if gradient is not None and work.label_loss.coefficient:
                gradient.add_label_slopes(weights * -work.label_loss.coefficient)
        chunks = work.rows.plan.chunks[part.chunks]
        mass = torch.zeros_like(self._sums[0])
        for one in work.terms:
            if not tile.count:
                sums.append(torch.zeros_like(self._sums[0]))
                continue
            solved = one.term.solve(tile, with_gradient=gradient is not None)
            weights = one.weights.index_select(0, chunks).double()
            sums.append(_summed(weights, solved.values, work.chunk_parts, chunks))
            if one.term.key == work.ranked:
                assert solved.mass is not None, "the ranked term has a top-k"
                mass = _summed(weights, solved.mass, work.chunk_parts, chunks)
            if gradient is not None and not is_zero(one.coefficient):
                solved.add_gradient(scaled(weights, one.coefficient), gradient)
        if work.ranked is not None:
            sums.append(mass)
        return torch.stack(sums) if sums else self._sums


def _summed(weights: Tensor, values: Tensor, parts: Partition | None, places: Tensor) -> Tensor:
    """Weighted sum of all values, then of each part, ``[1 + parts]``."""
    if parts is not None:
        parts = Partition(parts.ids.index_select(0, places), parts.parts)
    return sum_tokens([weighted_rows(weights, values)], parts).squeeze(0)


def _gradient_memory(student: LogitSource, rows: AlignedRows) -> Callable[[Tile], Tensor]:
    """A buffer for the gradient on one tile's logits, allocated at its first use."""
    dtype, buffers = accumulation_dtype(student.dtype), list[Tensor]()

    def take(tile: Tile) -> Tensor:
        raw = tile.student.raw
        if not buffers:
            most = rows.plan.most_student_rows
            buffers.append(allocate(most, raw.shape[1], dtype, raw.device))
        return buffers[0][: raw.shape[0]]

    return take


def aligned_divergence(student: DenseLogits, rows: AlignedRows, term: AlignedTerm) -> Tensor:
    """Value of the term per chunk, ``[C]`` fp32, differentiable in the student's logits ``[N, V]``.

    Inputs are not modified. The gradient is formed in forward, if one is wanted: one more matrix
    like the logits, and in backward the product. Chunks whose upstream gradient is zero have a zero
    gradient, even if their logits are not finite.

    Collective: over ``group`` those of the term; none in backward.
    """
    return cast(
        Tensor,
        _AlignedDivergenceFunction.apply(student.logits, student, rows, term),  # type: ignore[no-untyped-call]
    )


class _AlignedDivergenceFunction(torch.autograd.Function):
    """Forms the gradient of the sum of all values in forward, and scales its rows in backward."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, student: DenseLogits, rows: AlignedRows, term: AlignedTerm
    ) -> Tensor:
        plan, wanted = rows.plan, bool(ctx.needs_input_grad[0])
        found = torch.zeros(len(plan.chunks), dtype=torch.float64, device=logits.device)
        gradients = torch.zeros_like(logits) if wanted else None
        memory = _gradient_memory(student, rows)
        owners = []
        tiles = (tile for band in rows.bands(DenseLogits(logits.detach())) for tile in band.tiles)
        for part, tile in tiles:
            if not tile.count:
                continue
            solved = term.solve(tile, with_gradient=wanted)
            found[part.chunks] = solved.values
            if gradients is None:
                continue
            gradient = TileGradient(tile.student, partial(memory, tile))
            solved.add_gradient(torch.ones_like(solved.values), gradient)
            gradient.write(tile.student.raw)
            inside = gradients[:, : rows.student_shard.real_width]
            inside.index_copy_(0, tile.student.rows, tile.student.raw)
            owners.append(tile.student.chunks + part.chunks.start)
        ctx.gradients, ctx.plan, ctx.owners = gradients, plan, owners
        return plan.per_chunk(found).to(accumulation_dtype(logits.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        of_rows = _upstream_of_rows(upstream, ctx.plan, ctx.owners)
        gradient = ctx.gradients * of_rows
        return gradient.masked_fill_(of_rows == 0, 0.0).to(ctx.gradients.dtype), None, None, None


def _upstream_of_rows(upstream: Tensor, plan: TilePlan, owners: Sequence[Tensor]) -> Tensor:
    """``[N, 1]``: the upstream gradient of each row's chunk, zero for rows in none."""
    of_rows = upstream.new_zeros(plan.student.total)
    if owners:
        assert plan.student.indices is not None
        places = torch.cat(list(owners))
        of_rows[plan.student.indices[: len(places)]] = upstream[plan.chunks[places]]
    return of_rows.unsqueeze(1)

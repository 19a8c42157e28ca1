"""A tile of aligned rows, the statistics of its softmaxes, and the interface of the losses on it.

A loss implements `AlignedTerm`: from a tile it computes one value per chunk, and adds the gradient
on the student's logits to a `TileGradient`. Every row belongs to one chunk at most. So the gradient
of a row is that of its chunk's value, times the weight of the chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.ops.row_math import exponentiate, row_sums
from megatron_distill.ops.softmax_gradient import clear_rows_
from megatron_distill.ops.topk import gather_ranks
from megatron_distill.ops.vocab import VocabShard
from megatron_distill.ops.workspace import Scratch, load_logits, row_blocks
from megatron_distill.signals import LogitRule

__all__ = [
    "AlignedTerm",
    "LabelStatistics",
    "Pairs",
    "SolvedTerm",
    "Tile",
    "TileGradient",
    "TileSide",
]


class LabelStatistics(NamedTuple):
    """Of each row's label, at temperature one; ``[n]`` fp64, both exact where they are near zero.

    Attributes:
        log_prob: log of the label's probability.
        log_rest: log of the probability of all further tokens.
    """

    log_prob: Tensor
    log_rest: Tensor


class _Softmax(NamedTuple):
    """``[n]`` of the rows: the shard's largest logit, and the log normaliser in fp64."""

    peak: Tensor
    log_normalizer: Tensor


@dataclass(frozen=True)
class TileSide:
    """One model's n rows of a tile, in order of the tile's c chunks.

    Attributes:
        raw: ``[n, V]`` raw outputs over the shard's real columns.
        rule: turns raw outputs into logits.
        shard: this rank's columns of the model's vocabulary.
        group: the ranks that share the vocabulary; None if this rank holds all of it.
        labels: ``[n]`` global ids that the rows predict.
        rows: ``[n]`` int64, numbers of the rows in the whole input.
        chunks: ``[n]`` int64, number of each row's chunk within the tile; empty without chunks.
        lengths: ``[c]`` int64, rows of each chunk.
        scratch: buffers of a row block.
    """

    raw: Tensor
    rule: LogitRule
    shard: VocabShard
    group: dist.ProcessGroup | None
    labels: Tensor
    rows: Tensor
    chunks: Tensor
    lengths: Tensor
    scratch: Scratch
    _softmaxes: dict[float, _Softmax] = field(default_factory=dict)
    _labels: list[LabelStatistics] = field(default_factory=list)

    def blocks(self) -> Iterator[slice]:
        """Slices over the rows, as large as the scratch buffers."""
        return row_blocks(self.raw.shape[0], self.raw.shape[1], self.raw.device)

    def logits(self, block: slice) -> Tensor:
        """Logits ``[b, V]`` of a block in the dtype of statistics; not to be modified."""
        return load_logits(self.rule, self.raw[block], self.scratch, "logits")

    def log_normalizer(self, temperature: float) -> Tensor:
        """``[n]`` fp64, log of the sum of ``e^(z/T)`` over the vocabulary.

        Collective: at its first use for a temperature one all-gather of 16 bytes per row.
        """
        return self._softmax(temperature).log_normalizer

    def probabilities(self, block: slice, temperature: float) -> Tensor:
        """``softmax(z/T)`` of a block, ``[b, V]`` in a scratch buffer that the caller may change.

        Collective: that of `log_normalizer`.
        """
        peak, log_normalizer = (values[block] for values in self._softmax(temperature))
        size = peak.shape[0]
        out = self.scratch.take("probabilities", size)
        workspace = self.scratch.take("workspace", size)
        exponentiate(self.logits(block), peak, temperature, out, workspace=workspace)
        factor = (peak.double() / temperature - log_normalizer).exp()
        return out.mul_(factor.to(out.dtype).unsqueeze(1))

    def label_statistics(self) -> LabelStatistics:
        """Log-probabilities of the labels, and of all but the label.

        Collective: at its first use one all-gather of 24 bytes per row.
        """
        if not self._labels:
            self._labels.append(self._measure_labels())
        return self._labels[0]

    def clear_labels_(self, values: Tensor, block: slice) -> Tensor:
        """Set a block's ``[b, V]`` to zero at the labels that this shard owns."""
        return self._fill_labels_(values, block, 0.0)

    def add_to_labels_(self, values: Tensor, block: slice, added: Tensor) -> None:
        """Add ``[b]`` to a block's ``[b, V]`` at the labels that this shard owns."""
        if values.shape[1]:
            owned = self.shard.owns(self.labels[block])
            columns = self.shard.local(self.labels[block]).unsqueeze(1)
            added = torch.where(owned, added, 0.0).to(values.dtype)
            values.scatter_add_(1, columns, added.unsqueeze(1))

    def sum_rows(self, values: Tensor) -> Tensor:
        """Sums over the rows of each chunk: ``[n, ...]`` -> ``[c, ...]``."""
        return torch.segment_reduce(values, "sum", lengths=self.lengths, axis=0, unsafe=True)

    def mean_probabilities(self, temperature: float) -> Tensor:
        """``[c, V]``, the mean of ``softmax(z/T)`` over the rows of each chunk.

        Collective: that of `log_normalizer`.
        """
        total = self.raw.new_zeros(len(self.lengths), self.raw.shape[1], dtype=self.scratch.dtype)
        for block in self.blocks():
            part = self.probabilities(block, temperature)
            if part.device.type == "cpu":
                total.index_add_(0, self.chunks[block], part)
            else:  # index_add_ adds in any order there
                total.index_put_((self.chunks[block],), part, accumulate=True)
        return total.div_(self.lengths.unsqueeze(1))

    def _softmax(self, temperature: float) -> _Softmax:
        if temperature not in self._softmaxes:
            peak, mass = self._empty_peak(), self._zeros()
            if self.raw.shape[1]:
                for block in self.blocks():
                    self._measure(self.logits(block), temperature, peak[block], mass[block])
            gathered = gather_ranks(torch.stack([peak.double(), mass]), self.group)
            total = _log_sum(gathered[:, 0], gathered[:, 1], temperature)
            self._softmaxes[temperature] = _Softmax(peak, total)
        return self._softmaxes[temperature]

    def _measure_labels(self) -> LabelStatistics:
        peak, mass = self._empty_peak(), self._zeros()
        label = torch.full_like(peak, -math.inf)
        if self.raw.shape[1]:
            owned = self.shard.owns(self.labels)
            columns = self.shard.local(self.labels).unsqueeze(1)
            found = self.raw.gather(1, columns).squeeze(1).to(label.dtype)
            label = self.rule.apply_(found).masked_fill_(~owned, -math.inf)
            for block in self.blocks():
                logits = self.scratch.take("probabilities", len(peak[block]))
                logits.copy_(self.logits(block))
                self._fill_labels_(logits, block, -math.inf)
                self._measure(logits, 1.0, peak[block], mass[block])
        gathered = gather_ranks(torch.stack([label.double(), peak.double(), mass]), self.group)
        of_label = gathered[:, 0].amax(0)
        rest = _log_sum(gathered[:, 1], gathered[:, 2], 1.0)
        # The largest logit of the shard, the label included.
        peak = torch.maximum(peak, label)
        self._softmaxes.setdefault(1.0, _Softmax(peak, torch.logaddexp(of_label, rest)))
        ratio, zero = rest - of_label, torch.zeros_like(rest)
        return LabelStatistics(
            torch.logaddexp(zero, ratio).neg_(), torch.logaddexp(zero, -ratio).neg_()
        )

    def _measure(self, logits: Tensor, temperature: float, peak: Tensor, mass: Tensor) -> None:
        """Fill peak and mass ``[b]`` of a block of logits."""
        size = logits.shape[0]
        peak.copy_(logits.amax(1).clamp_(min=_lowest(peak.dtype)))
        out, workspace = (
            self.scratch.take("exponentials", size),
            self.scratch.take("workspace", size),
        )
        exponentiate(logits, peak, temperature, out, workspace=workspace)
        mass.copy_(row_sums(out))

    def _fill_labels_(self, values: Tensor, block: slice, value: float) -> Tensor:
        if values.shape[1]:
            columns = self.shard.local(self.labels[block]).unsqueeze(1)
            owned = self.shard.owns(self.labels[block]).unsqueeze(1)
            filled = values.gather(1, columns).masked_fill_(owned, value)
            values.scatter_(1, columns, filled)
        return values

    def _empty_peak(self) -> Tensor:
        dtype = self.scratch.dtype
        return self.raw.new_full((len(self.raw),), _lowest(dtype), dtype=dtype)

    def _zeros(self) -> Tensor:
        return self.raw.new_zeros(len(self.raw), dtype=torch.float64)


def _lowest(dtype: torch.dtype) -> float:
    """The peak of a row without any probability: finite, so that differences are no NaN."""
    return torch.finfo(dtype).min / 4


def _log_sum(peaks: Tensor, masses: Tensor, temperature: float) -> Tensor:
    """Log of the sum over ranks ``[ranks, n]`` of masses relative to peaks."""
    return (peaks / temperature + masses.log()).logsumexp(0)


class Pairs(NamedTuple):
    """The chunks of a tile with one row on each side: places in its chunks and rows, ``[P]``."""

    chunks: Tensor
    student: Tensor
    teacher: Tensor


@dataclass(frozen=True)
class Tile:
    """Aligned rows of both models, and the c chunks that they belong to.

    Attributes:
        student: the student's rows.
        teacher: the teacher's rows of the same chunks; None if its logits are not at hand.
        teacher_rows: ``[m]`` int64, numbers of the teacher's rows in the whole input.
        teacher_lengths: ``[c]`` int64, teacher rows of each chunk.
        pairs: the chunks with one row on each side.
    """

    student: TileSide
    teacher: TileSide | None
    teacher_rows: Tensor
    teacher_lengths: Tensor
    pairs: Pairs

    @property
    def count(self) -> int:
        """Number c of chunks."""
        return len(self.student.lengths)

    @property
    def with_teacher(self) -> TileSide:
        """The teacher's rows, for a term that needs its logits.

        Raises:
            ValueError: there are none.
        """
        if self.teacher is None:
            raise ValueError("this loss needs the teacher's logits, and there are none")
        return self.teacher


class TileGradient:
    """The gradient on the student's logits of one tile, a sum over terms.

    Attributes:
        side: the student's rows.
    """

    def __init__(self, side: TileSide, memory: Callable[[], Tensor]) -> None:
        """``memory`` returns ``[n, V]`` in the dtype of statistics, at most once."""
        self.side = side
        self._memory = memory
        self._logits: Tensor | None = None
        self._slopes: Tensor | None = None

    @property
    def logits(self) -> Tensor:
        """``[n, V]`` in the dtype of statistics, to be added to."""
        if self._logits is None:
            self._logits = self._memory().zero_()
        return self._logits

    def add_label_slopes(self, slopes: Tensor) -> None:
        """Add ``[n]`` fp64, the slope of the loss on the log-probability of each row's label."""
        self._slopes = slopes if self._slopes is None else self._slopes + slopes

    def write(self, out: Tensor) -> None:
        """Write the gradient on the raw outputs to ``out [n, V]``, which may alias these."""
        side = self.side
        for block in side.blocks():
            size = out[block].shape[0]
            if self._logits is None:
                total = side.scratch.take("gradient", size).zero_()
            else:
                total = self._logits[block]
            if self._slopes is not None:
                self._add_label_gradient(total, block, self._slopes[block])
            if not side.rule.is_identity:
                workspace = side.scratch.take("workspace", size)
                side.rule.chain_(total, side.logits(block), workspace)
            out[block].copy_(total)

    def _add_label_gradient(self, total: Tensor, block: slice, slopes: Tensor) -> None:
        """Add ``slope (onehot - q)``; a slope may be so large that ``1 - q`` must not round."""
        rest = self.side.label_statistics().log_rest[block].exp()
        others = self.side.clear_labels_(self.side.probabilities(block, 1.0), block)
        others.mul_(slopes.to(others.dtype).unsqueeze(1))
        total.sub_(clear_rows_(others, (slopes == 0).unsqueeze(1)))
        self.side.add_to_labels_(total, block, torch.where(slopes == 0, 0.0, slopes * rest))


class SolvedTerm(Protocol):
    """A term's values on one tile, and its gradient."""

    @property
    def values(self) -> Tensor:
        """``[c]`` fp64, zero for chunks on which the term is not defined."""
        ...

    @property
    def mass(self) -> Tensor | None:
        """``[c]`` fp64, the teacher's probability of its top-k; None for a term without a top-k."""
        ...

    def add_gradient(self, weights: Tensor, gradient: TileGradient) -> None:
        """Add the gradient of the weighted sum of the values; called once at most.

        Shapes: weights ``[c]`` fp64. A chunk of weight zero adds nothing, even if its logits are
        not finite. No collective.
        """
        ...


class AlignedTerm(Protocol):
    """A loss between two models' distributions on aligned chunks."""

    @property
    def key(self) -> str:
        """Name in reports, different from those of other terms."""
        ...

    def solve(self, tile: Tile, *, with_gradient: bool) -> SolvedTerm:
        """Values of a tile's chunks; with everything that its gradient needs, if there will be one.

        May communicate: every rank of the group calls it for the same tiles in the same order.
        """
        ...

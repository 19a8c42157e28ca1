"""A divergence over the tokens that both vocabularies have, and one class of all further tokens.

It is defined on chunks of one token on each side: both models then predict the next token of the
same text. The further tokens of each vocabulary are one class. Its logit is split evenly over the
ranks. An f-divergence has the same value and slope on equal parts of a class, since its summands
are homogeneous in (p, q). So each rank has one more column, and nothing else is sent. Adaptive KL
blends two f-divergences; only for the blend, which orders the classes, this one is whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.ops.aligned.columns import CommonColumns
from megatron_distill.ops.aligned.tile import SolvedTerm, Tile, TileGradient, TileSide
from megatron_distill.ops.chunk import Chunk
from megatron_distill.ops.divergences import WeightedDivergence
from megatron_distill.ops.normalizers import Normalizers
from megatron_distill.ops.row_math import nearness, row_sums
from megatron_distill.ops.softmax_gradient import clear_rows_, softmax_weights
from megatron_distill.ops.statistics import LocalStatistics, StatisticsSpec
from megatron_distill.ops.topk import gather_ranks, select
from megatron_distill.ops.topk_divergence import IdTerm, SolvedIdTerm, solve_id_term
from megatron_distill.ops.workspace import Scratch, allocate, row_blocks
from megatron_distill.signals import LogitRule, TopK

__all__ = ["CommonTerm", "common_top_k"]


@dataclass(frozen=True)
class CommonTerm:
    """Divergence over common tokens at chunks of one token on each side.

    Attributes:
        key: name in reports.
        columns: the columns of common tokens on this rank. Without ``top_k`` those of the teacher
            lie on the rank of the student's, see `TeacherLayout`.
        weighted: a divergence with its temperature; the coefficient must be one.
        top_k: number of common tokens, the teacher's most probable ones; None for all of them.
        recorded: those of the M teacher rows, if they are known without its logits: ids are numbers
            of the student's classes; see `common_top_k`.
    """

    key: str
    columns: CommonColumns
    weighted: WeightedDivergence
    top_k: int | None = None
    recorded: TopK | None = None

    def __post_init__(self) -> None:
        is_dense = self.top_k is None and self.recorded is None
        if is_dense and not self.columns.is_aligned:
            raise ValueError(
                "the teacher's common columns are not on the ranks of the student's: arrange them "
                "with TeacherLayout, or set top_k"
            )

    def solve(self, tile: Tile, *, with_gradient: bool) -> SolvedTerm:
        """See `AlignedTerm`.

        Collective: that of `_Rests.measure` if both vocabularies have further tokens. Then those of
        `Chunk.solve`, or with ``top_k`` those of `select`, unless it is recorded, and
        `solve_id_term`; per pair.
        """
        is_dense = self.top_k is None and self.recorded is None
        whole = torch.zeros(tile.count, dtype=torch.float64, device=tile.student.raw.device)
        if not len(tile.pairs.chunks):
            return _NoPairs(whole, None if is_dense else whole)
        group, columns, temperature = tile.student.group, self.columns, self.weighted.temperature
        has_rest = self.columns.has_rest
        student = _Compact.of(
            tile.student,
            tile.pairs.student,
            columns.student,
            columns.student_rest,
            temperature,
            has_class=has_rest,
            returns_shares=has_rest and with_gradient,
        )
        teacher = None
        if self.recorded is None:
            teacher = _Compact.of(
                tile.with_teacher,
                tile.pairs.teacher,
                columns.teacher,
                columns.teacher_rest,
                temperature,
                has_class=has_rest and is_dense,
            )
        rests = None
        if has_rest:
            rests = _Rests.measure(student, teacher, temperature, group, not is_dense)
            rests.fill_class_(student.logits, rests.student)
        mass = None
        if teacher is not None and is_dense:
            of_rest = None
            if rests is not None:
                assert rests.teacher is not None, "it was measured with the student's"
                rests.fill_class_(teacher.logits, rests.teacher)
                of_rest = rests.teacher * temperature
            values, write = self._between(student, teacher, of_rest, group)
        else:
            target = self._target(tile, teacher, rests, group)
            values, write = self._on_top_k(student, target, group)
            mass = torch.zeros_like(whole)
            mass[tile.pairs.chunks] = target.mass()
        whole[tile.pairs.chunks] = values.clamp(min=0.0)
        written = write if with_gradient else None
        return SolvedCommon(whole, self, tile, student, rests, written, mass)

    def _between(
        self, student: _Compact, teacher: _Compact, of_rest: Tensor | None, group: _Group
    ) -> tuple[Tensor, _Write]:
        """Values ``[P]`` and the gradient between the logits of all common tokens.

        ``of_rest``: the teacher's logit ``[P]`` fp64 of the whole class of further tokens.
        """
        of_student, of_teacher = student.logits, teacher.logits
        spec = StatisticsSpec(("student", "teacher"), (self.weighted,), full=False, infinite=True)
        raw = {"student": of_student, "teacher": of_teacher}
        rules = {"student": LogitRule(), "teacher": LogitRule()}
        rows, width = of_student.shape
        scratch = Scratch(max(rows, 1), width, of_student.dtype, of_student.device)
        shard = self.columns.student_shard
        chunk = Chunk(spec, raw, rules, shard, scratch)  # type: ignore[arg-type]
        local = LocalStatistics.empty(spec, rows, of_student.dtype, of_student.device)
        _, normalizers = chunk.solve(local, group, shared_class=of_rest)

        def write(weights: Tensor) -> Tensor:
            softmax = softmax_weights(spec, weights, None, None, shard)
            chunk.write_gradient(local, normalizers, softmax, of_student)
            return of_student

        return normalizers.values[self.weighted.key], write

    def _target(
        self, tile: Tile, teacher: _Compact | None, rests: _Rests | None, group: _Group
    ) -> TopK:
        """The teacher's most probable common tokens of the pairs, as the student's classes."""
        if teacher is None:
            assert self.recorded is not None, "without logits there is a record"
            rows = tile.teacher_rows.index_select(0, tile.pairs.teacher)
            return self.recorded.map(lambda values: values.index_select(0, rows))
        assert self.top_k is not None
        temperature, columns = self.weighted.temperature, self.columns
        (chosen,) = select(
            teacher.logits,
            LogitRule(),
            columns.teacher_shard,
            group,
            k=min(self.top_k, columns.count),
            temperatures=[temperature],
        )
        if rests is not None:
            chosen = rests.within(chosen)
        return TopK(columns.student_places[chosen.ids], chosen.log_probs, chosen.log_tail)

    def _on_top_k(self, student: _Compact, target: TopK, group: _Group) -> tuple[Tensor, _Write]:
        """Values ``[P]`` and the gradient on the teacher's most probable common tokens."""
        temperature, columns, of_student = self.weighted.temperature, self.columns, student.logits
        term = IdTerm(self.weighted, self.key, "tail", target)
        shard, rule = columns.student_shard, LogitRule()
        found = solve_id_term(term, of_student, rule, shard, group)

        def write(weights: Tensor) -> Tensor:
            rows, width = of_student.shape
            dtype, device = of_student.dtype, of_student.device
            spec = StatisticsSpec(("student",), (), False, student_temperatures=(temperature,))
            chunk = Chunk(
                spec,
                {"student": of_student},
                {"student": rule},
                shard,
                Scratch(max(rows, 1), width, dtype, device),
            )
            local = LocalStatistics.empty(spec, rows, dtype, device)
            local.rows["student_peak"].copy_(found.peak)
            assert found.log_normalizer is not None
            factor = (found.peak.double() / temperature - found.log_normalizer).exp()
            softmax = softmax_weights(spec, weights, None, None, shard, [SolvedIdTerm(term, found)])
            chunk.write_gradient(local, Normalizers(factor.unsqueeze(0)), softmax, of_student)
            return of_student

        return found.value, write


_Group = dist.ProcessGroup | None
# Takes weights [P], returns the gradient [P, columns] on the common tokens and the rest.
_Write = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _Compact:
    """Logits of the pairs' rows at common tokens, and what is needed of the further ones.

    Attributes:
        logits: ``[P, p]`` in the dtype of statistics; with a class one more column, for its logit.
        peak: ``[P]`` fp64, the largest logit of a further token, over temperature.
        mass: ``[P]`` fp64, the sum of ``e^((z - peak)/T)`` over the further tokens.
        shares: ``[P, U]``, these exponentials; None if there will be no gradient.
    """

    logits: Tensor
    peak: Tensor
    mass: Tensor
    shares: Tensor | None

    @classmethod
    def of(
        cls,
        side: TileSide,
        rows: Tensor,
        columns: Tensor,
        rest: Tensor,
        temperature: float,
        *,
        has_class: bool,
        returns_shares: bool = False,
    ) -> _Compact:
        """From a tile's rows and the local columns of common and of further tokens."""
        count, device, dtype = len(rows), side.raw.device, side.scratch.dtype
        logits = allocate(count, len(columns) + int(has_class), dtype, device)
        shares = allocate(count, len(rest), dtype, device) if returns_shares else None
        sums = torch.empty(2, count, dtype=torch.float64, device=device)
        # A block stays in the cache while its columns are picked out.
        for block in row_blocks(count, side.raw.shape[1], device):
            raw = side.raw.index_select(0, rows[block])
            picked = raw.index_select(1, columns).to(dtype)
            logits[block, : len(columns)] = side.rule.apply_(picked)
            further = side.rule.apply_(raw.index_select(1, rest).to(dtype))
            peak, mass, values = _exponentials(further, temperature)
            sums[0, block], sums[1, block] = peak, mass
            if shares is not None:
                shares[block] = values
        return cls(logits, sums[0], sums[1], shares)


@dataclass(frozen=True)
class _Rests:
    """The further tokens of both models at one temperature.

    Attributes:
        student: ``[P]`` fp64, log of the sum of ``e^(z/T)`` over the student's further tokens.
        teacher: likewise; None for a teacher without logits.
        teacher_common: likewise over the teacher's common tokens; None if not measured.
        shares: ``[P, U]`` of this rank's columns in the student's further tokens; sum to one over
            the ranks; None if there will be no gradient.
        temperature: T.
        ranks: number of ranks.
    """

    student: Tensor
    teacher: Tensor | None
    teacher_common: Tensor | None
    shares: Tensor | None
    temperature: float
    ranks: int

    @classmethod
    def measure(
        cls,
        student: _Compact,
        teacher: _Compact | None,
        temperature: float,
        group: _Group,
        all_of_teacher: bool,
    ) -> _Rests:
        """From the logits of all ranks.

        Collective: one all-gather over ``group`` of 32 bytes per pair, 48 with the teacher's common
        tokens, 16 without a teacher.
        """
        sums = [(student.peak, student.mass)]
        if teacher is not None:
            sums.append((teacher.peak, teacher.mass))
        if teacher is not None and all_of_teacher:
            sums.append(_exponentials(teacher.logits, temperature)[:2])
        local = torch.stack([torch.stack([peak, mass]) for peak, mass in sums])
        gathered = gather_ranks(local, group)
        log_sums = (gathered[:, :, 0] + gathered[:, :, 1].log()).logsumexp(0)
        if teacher is not None:
            # Ranks share the further tokens of both models in different ways. Without any mass a
            # window is infinite, and no difference is less.
            window = log_sums[0].abs().clamp(min=1.0)
            window.mul_(nearness(student.logits.dtype))
            is_close = (log_sums[1] - log_sums[0]).abs() < window
            log_sums[1] = torch.where(is_close, log_sums[0], log_sums[1])
        shares = student.shares
        if shares is not None:
            factor = (student.peak - log_sums[0]).exp().to(shares.dtype)
            shares.mul_(factor.unsqueeze(1))
        return cls(
            student=log_sums[0],
            teacher=None if teacher is None else log_sums[1],
            teacher_common=log_sums[2] if len(log_sums) > 2 else None,
            shares=shares,
            temperature=temperature,
            ranks=gathered.shape[0],
        )

    def fill_class_(self, logits: Tensor, log_sum: Tensor) -> None:
        """Write the logit of this rank's part of the class into the last column."""
        logits[:, -1] = (log_sum - math.log(self.ranks)) * self.temperature

    def within(self, chosen: TopK) -> TopK:
        """The top-k of common tokens, normalised over the whole vocabulary instead."""
        assert self.teacher is not None
        assert self.teacher_common is not None
        total = torch.logaddexp(self.teacher_common, self.teacher)
        log_common, log_rest = self.teacher_common - total, self.teacher - total
        log_probs = chosen.log_probs.double() + log_common.unsqueeze(1)
        log_tail = torch.logaddexp(chosen.log_tail.double() + log_common, log_rest)
        dtype = chosen.log_probs.dtype
        return TopK(chosen.ids, log_probs.to(dtype), log_tail.to(dtype))


def common_top_k(recorded: TopK, places: Tensor, k: int) -> TopK:
    """The k most probable common tokens of a top-k over the teacher's vocabulary.

    Shapes: a top-k ``[M, K]`` with ids of the teacher, and for each id of its vocabulary ``[V]``
    the number of its class among the student's (-1: none). Returns a top-k ``[M, min(k, K)]`` with
    these numbers as ids. The mass of all further tokens is the tail. Where fewer than k of the K
    ids are common, the remaining entries are -inf and so are not in the top-k.
    """
    own = places[recorded.ids]
    is_common = (own >= 0) & recorded.valid()
    is_chosen = is_common & (is_common.cumsum(1) <= k)
    rest = recorded.log_probs.masked_fill(is_chosen, -torch.inf)
    log_tail = torch.cat([rest, recorded.log_tail.unsqueeze(1)], 1).double().logsumexp(1)
    # The chosen ones first, in their order.
    columns = (~is_chosen).to(torch.int8).argsort(dim=1, stable=True)[:, :k]
    log_probs = recorded.log_probs.masked_fill(~is_chosen, -torch.inf)
    return TopK(
        own.clamp(min=0).gather(1, columns),
        log_probs.gather(1, columns),
        log_tail.to(log_probs.dtype),
    )


def _exponentials(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Peak over temperature and sum ``[P]`` fp64 of ``e^((z - peak)/T)``, and these ``[P, U]``."""
    lowest = torch.finfo(logits.dtype).min / 4
    if logits.shape[1] == 0:
        peak = torch.full((len(logits),), lowest, dtype=torch.float64, device=logits.device)
        return peak / temperature, torch.zeros_like(peak), torch.empty_like(logits)
    peak = logits.amax(1).clamp_(min=lowest)
    values = logits.sub(peak.unsqueeze(1)).div_(temperature).exp_()
    return peak.double() / temperature, row_sums(values), values


@dataclass(frozen=True)
class _NoPairs:
    """A tile without a chunk of one token on each side: zeros ``[c]``, without a gradient."""

    values: Tensor
    mass: Tensor | None

    def add_gradient(self, weights: Tensor, gradient: TileGradient) -> None:
        """Nothing."""


@dataclass(frozen=True)
class SolvedCommon:
    """See `SolvedTerm`; ``write`` returns the gradient on the student's classes."""

    values: Tensor
    term: CommonTerm
    tile: Tile
    student: _Compact
    rests: _Rests | None
    write: _Write | None
    mass: Tensor | None

    def add_gradient(self, weights: Tensor, gradient: TileGradient) -> None:
        """See `SolvedTerm`."""
        assert self.write is not None, "solved without a gradient"
        pairs, columns = self.tile.pairs, self.term.columns
        dtype = self.student.logits.dtype
        weight = weights.index_select(0, pairs.chunks).to(dtype)
        found = self.write(weight)
        out = gradient.logits
        for block in self.tile.student.blocks():
            rows = pairs.student[block]
            if not len(rows):
                break
            part = found[block]
            on_logits = part.index_select(1, columns.classes)
            if self.rests is not None:
                assert self.rests.shares is not None, "solved without a gradient"
                # The class is split over the ranks; its tokens share it by their probabilities.
                of_rest = self.rests.shares[block] * (part[:, -1:] * self.rests.ranks)
                on_logits[:, columns.student_rest] = of_rest
            elif len(columns.student_rest):
                on_logits.index_fill_(1, columns.student_rest, 0.0)
            # Zero times a number that is not finite is none either.
            clear_rows_(on_logits, (weight[block] == 0).unsqueeze(1))
            out.index_add_(0, rows, on_logits)

"""A divergence per token from logits that exist: statistics forward, gradient backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_distill.ops.chunk import Chunk
from megatron_distill.ops.divergences import Model, WeightedDivergence
from megatron_distill.ops.factors import scaled
from megatron_distill.ops.normalizers import Normalizers
from megatron_distill.ops.softmax_gradient import softmax_weights
from megatron_distill.ops.statistics import LocalStatistics, StatisticsSpec
from megatron_distill.ops.topk_divergence import IdTerm, SolvedIdTerm, solve_id_term
from megatron_distill.ops.vocab import VocabShard
from megatron_distill.ops.workspace import Scratch, accumulation_dtype, allocate
from megatron_distill.signals import DenseLogits, LogitRule

__all__ = ["LogitDivergence", "logit_divergence"]


@dataclass(frozen=True)
class LogitDivergence:
    """Arguments of `logit_divergence`: term, teacher or target, and vocabulary shard.

    Attributes:
        term: the divergence with its coefficient.
        teacher: logits ``[N, V]`` over the same columns; None for a term on few ids.
        id_term: the term on few ids, with its target; None for one between logits.
        shard: this rank's columns.
        group: the ranks that share the vocabulary; None if this rank holds all of it.
        overwrites: whether the gradient takes the place of the student's logits.
    """

    term: WeightedDivergence
    teacher: Tensor | None
    id_term: IdTerm | None
    shard: VocabShard
    group: dist.ProcessGroup | None
    overwrites: bool = False

    def chunk(self, student: DenseLogits) -> Chunk:
        """All tokens as one chunk."""
        columns = self.shard.real_width
        raw: dict[Model, Tensor] = {"student": student.logits.detach()[:, :columns]}
        rules: dict[Model, LogitRule] = {"student": student.rule}
        if self.teacher is not None:
            raw["teacher"] = self.teacher.detach()[:, :columns]
            rules["teacher"] = LogitRule()
            spec = StatisticsSpec(("student", "teacher"), (self.term,), full=False, infinite=True)
        else:
            assert self.id_term is not None
            temperatures = (self.term.temperature,) if self.id_term.needs_rest else ()
            spec = StatisticsSpec(("student",), (), False, student_temperatures=temperatures)
        rows = max(student.tokens, 1)
        dtype = accumulation_dtype(student.dtype)
        scratch = Scratch(rows, columns, dtype, student.logits.device)
        return Chunk(spec, raw, rules, self.shard, scratch)


def logit_divergence(student: DenseLogits, work: LogitDivergence) -> Tensor:
    """Value of the term per token, ``[N]`` fp32, differentiable in the student's logits ``[N, V]``.

    Logits are not modified unless ``work.overwrites``. Peak memory of forward KL on a CPU: the
    gradient ``[N, V]`` (none if it overwrites the logits), 92 bytes per token. Also three row
    blocks (`row_blocks`) in fp32, two more for narrower logits. Further divergences need a few more
    of both; tokens near their teacher as many blocks again in fp64; top-k ids a few numbers each.
    Nothing else has the size of the logits. A token whose upstream gradient is zero gets zeros,
    even if its logits are not finite.

    Collective: over ``group`` those of `Chunk.solve` between logits (one all-gather of 40 bytes per
    token for forward KL) or that of `solve_id_term`; none in backward.
    """
    return cast(
        Tensor,
        _LogitDivergenceFunction.apply(student.logits, student, work),  # type: ignore[no-untyped-call]
    )


class _LogitDivergenceFunction(torch.autograd.Function):
    """Forms the gradient in forward on a CPU, where a block is in the cache, else in backward.

    That of narrow logits is formed in backward too: scaled in fp32 and rounded once. The upstream
    gradient of a mean is not one, so that one formed in forward would be formed again.

    The first backward pass returns it, scaled in place; a further one recomputes it.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, student: DenseLogits, work: LogitDivergence) -> Tensor:
        state = _State.of(student, work)
        ctx.gradient = None
        is_wide = logits.dtype == state.chunk.scratch.dtype
        in_cache = logits.device.type == "cpu" and is_wide
        if ctx.needs_input_grad[0] and (work.overwrites or in_cache):
            ctx.gradient = logits.detach() if work.overwrites else state.room_for_gradient(logits)
            value = state.value_and_gradient(ctx.gradient)
        else:
            value = state.value()
        ctx.state = None
        if not work.overwrites:
            ctx.save_for_backward(logits, work.teacher)
            ctx.state = state
        return scaled(value, work.term.coefficient).to(state.chunk.scratch.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradient: Tensor | None = ctx.gradient
        state: _State | None = ctx.state
        ctx.gradient = None
        if gradient is None and state is None:
            raise RuntimeError(
                "the gradient took the place of the logits (overwrite_logits) and was given away "
                "by the first backward pass; there is nothing left for a second"
            )
        if state is not None and gradient is None:
            logits, _ = ctx.saved_tensors
            gradient = state.room_for_gradient(logits)
            if upstream.device.type != "cpu" or logits.dtype != upstream.dtype:
                state.push(upstream, gradient)
                return gradient, None, None
            state.form_again(gradient)
        assert gradient is not None
        # CPU only: on a GPU the test would synchronise the host.
        if upstream.device.type != "cpu" or not bool((upstream == 1).all()):
            gradient.mul_(upstream.unsqueeze(1))
            # Zero for a token without weight, even if its logits are not finite.
            gradient.masked_fill_((upstream == 0).unsqueeze(1), 0.0)
        return gradient, None, None


@dataclass
class _State:
    """One call, with the state that backward needs."""

    work: LogitDivergence
    chunk: Chunk
    local: LocalStatistics
    normalizers: Normalizers | None = None
    id_terms: tuple[SolvedIdTerm, ...] = ()

    @classmethod
    def of(cls, student: DenseLogits, work: LogitDivergence) -> _State:
        chunk = work.chunk(student)
        logits = student.logits
        local = LocalStatistics.empty(chunk.spec, len(logits), chunk.scratch.dtype, logits.device)
        return cls(work, chunk, local)

    @property
    def _only_scatters(self) -> bool:
        """Whether only the ids have a gradient."""
        return self.work.id_term is not None and not self.work.id_term.needs_rest

    @property
    def _is_one_pass(self) -> bool:
        """Whether the passes need no merge over ranks in between."""
        return self.work.group is None and self.work.teacher is not None

    def room_for_gradient(self, logits: Tensor) -> Tensor:
        """New memory for the gradient ``[N, V]``, uninitialised."""
        rows, columns = logits.shape
        return allocate(rows, columns, logits.dtype, logits.device)

    def value(self) -> Tensor:
        """``[N]`` fp64."""
        term, raw = self.work.id_term, self.chunk.raw["student"]
        if term is None:
            _, self.normalizers = self.chunk.solve(self.local, self.work.group)
            return self.normalizers.values[self.work.term.key]
        rule, shard, group = self.chunk.rules["student"], self.work.shard, self.work.group
        found = SolvedIdTerm(term, solve_id_term(term, raw, rule, shard, group))
        self.normalizers = _normalizers(found, self.local)
        self.id_terms = (found,)
        return found.gradient.value

    def value_and_gradient(self, out: Tensor) -> Tensor:
        """The value, and the gradient of its sum on the logits, padding included, in ``out``."""
        ones = out.new_ones(out.shape[0], dtype=self.chunk.scratch.dtype)
        if self._is_one_pass:
            weights = softmax_weights(self.chunk.spec, ones, None, None, self.work.shard)
            inside = self._without_padding(out)
            _, values = self.chunk.process(self.local, weights, None, inside)
            return values[self.work.term.key]
        value = self.value()
        self.push(ones, out)
        return value

    def form_again(self, out: Tensor) -> None:
        """Recompute the gradient, bit for bit, without a collective."""
        if self._is_one_pass:
            self.value_and_gradient(out)
        else:
            self.push(out.new_ones(out.shape[0], dtype=self.chunk.scratch.dtype), out)

    def push(self, upstream: Tensor, out: Tensor) -> None:
        """The gradient on the logits, padding included."""
        if self.normalizers is None:
            self.value()  # not stored in one pass; on one rank this needs no collective
        assert self.normalizers is not None
        inside = self._without_padding(out)
        if self._only_scatters:
            self._scatter_gradient(upstream, inside)
            return
        spec, shard = self.chunk.spec, self.work.shard
        weights = softmax_weights(spec, upstream, None, None, shard, self.id_terms)
        self.chunk.write_gradient(self.local, self.normalizers, weights, inside)

    def _without_padding(self, out: Tensor) -> Tensor:
        """The real columns, after setting the padding to zero."""
        real = self.work.shard.real_width
        out[:, real:].zero_()
        return out[:, :real]

    def _scatter_gradient(self, upstream: Tensor, out: Tensor) -> None:
        """The gradient where only the ids have one."""
        (found,) = self.id_terms
        coefficient = self.work.term.coefficient / self.work.term.temperature
        weight = scaled(upstream, coefficient).unsqueeze(1)
        excess, columns = found.gradient.excess, found.gradient.columns
        added = torch.where(weight == 0, 0.0, weight * excess.to(weight.dtype))
        out.zero_()
        if out.shape[1]:
            # Not scatter_add_, which converts the whole of a narrower matrix to fp32 and back.
            rows = torch.arange(len(out), device=out.device).unsqueeze(1)
            out.index_put_((rows, columns), added.to(out.dtype), accumulate=True)


def _normalizers(found: SolvedIdTerm, local: LocalStatistics) -> Normalizers:
    """The student's normaliser for the gradient of a term on few ids; sets the local peaks."""
    peak, log_normalizer = found.gradient.peak, found.gradient.log_normalizer
    local.rows["student_peak"].copy_(peak)
    if log_normalizer is None:
        return Normalizers(local.values[:0])
    factor = (peak.double() / found.term.term.temperature - log_normalizer).exp()
    return Normalizers(factor.unsqueeze(0))

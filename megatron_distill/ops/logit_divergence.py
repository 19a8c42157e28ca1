"""A divergence per token from logits that exist: statistics forward, gradient backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_distill.ops.blocks import Scratch, accumulation_dtype, allocate
from megatron_distill.ops.chunk import Chunk, Solved
from megatron_distill.ops.divergence import Model, WeightedDivergence
from megatron_distill.ops.kept_divergence import (
    KeptTerm,
    RowGradient,
    SampledTarget,
    TopKTarget,
    solve_kept,
)
from megatron_distill.ops.logits import GivenLogits, LogitRule
from megatron_distill.ops.pushforward import softmax_weights
from megatron_distill.ops.statistics import Packet, Sweep
from megatron_distill.ops.vocab import VocabShard

__all__ = ["LogitDivergence", "logit_divergence"]


@dataclass(frozen=True)
class LogitDivergence:
    """The term, the teacher's side of it, and where the columns stand in the vocabulary."""

    teacher: GivenLogits | TopKTarget | SampledTarget
    term: WeightedDivergence
    shard: VocabShard
    group: dist.ProcessGroup | None

    def chunk(self, student: GivenLogits) -> Chunk:
        """All tokens as one chunk."""
        columns = self.shard.real_width
        raw: dict[Model, Tensor] = {"student": student.logits.detach()[:, :columns]}
        rules: dict[Model, LogitRule] = {"student": student.rule}
        if isinstance(self.teacher, GivenLogits):
            raw["teacher"] = self.teacher.logits.detach()[:, :columns]
            rules["teacher"] = self.teacher.rule
            sweep = Sweep(("student", "teacher"), (self.term,), full=False, infinite=True)
        else:
            temperatures = (self.term.temperature,) if self.kept.needs_rest else ()
            sweep = Sweep(("student",), (), False, student_temperatures=temperatures)
        rows = max(student.logits.shape[0], 1)
        dtype = accumulation_dtype(student.dtype)
        scratch = Scratch(rows, columns, dtype, student.logits.device)
        return Chunk(sweep, raw, rules, self.shard, scratch)

    @property
    def kept(self) -> KeptTerm:
        """The term on kept ids."""
        assert not isinstance(self.teacher, GivenLogits)
        return KeptTerm(self.term, self.teacher)


def logit_divergence(student: GivenLogits, work: LogitDivergence) -> Tensor:
    """Value of the term per token, ``[N]`` fp32, differentiable in the student's logits ``[N, V]``.

    Neither logits are modified. Kept for backward: a few numbers per token (and kept id) and the
    logits themselves; backward makes the gradient ``[N, V]`` and a few row blocks, nothing else of
    that size. A token whose upstream gradient is zero gets zeros, whatever its logits hold.

    Collective: over ``group`` those of `Chunk.solve` between logits (one all-gather of 20 bytes per
    token for forward and reverse KL) or that of `solve_kept`; none in backward.
    """
    return cast(
        Tensor,
        _LogitDivergenceFunction.apply(student.logits, student, work),  # type: ignore[no-untyped-call]
    )


class _LogitDivergenceFunction(torch.autograd.Function):
    """Keeps row statistics and forms the gradient from the logits again in backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, student: GivenLogits, work: LogitDivergence) -> Tensor:
        chunk = work.chunk(student)
        dtype = accumulation_dtype(student.dtype)
        packet = Packet.empty(chunk.sweep, logits.shape[0], dtype, logits.device)
        ctx.kept = ()
        if isinstance(work.teacher, GivenLogits):
            merged, solved = chunk.solve(packet, work.group)
            value = solved.values[work.term.key]
            ctx.save_for_backward(logits, work.teacher.logits)
        else:
            raw = chunk.raw["student"]
            row = solve_kept(work.kept, raw, student.rule, work.shard, work.group)
            solved = _solved(row, packet, work.term.temperature)
            value = row.value
            ctx.kept = ((work.kept, row),)
            ctx.save_for_backward(logits)
        ctx.work, ctx.rule, ctx.packet, ctx.solved = work, student.rule, packet, solved
        return (value * work.term.coefficient).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        logits, *_ = ctx.saved_tensors
        work: LogitDivergence = ctx.work
        chunk = work.chunk(GivenLogits(logits, ctx.rule))
        gradient = allocate(logits.shape[0], logits.shape[1], logits.dtype, logits.device)
        columns = work.shard.real_width
        gradient[:, columns:].zero_()
        weights = softmax_weights(chunk.sweep, upstream, None, None, work.shard, ctx.kept)
        chunk.push(ctx.packet, ctx.solved, weights, gradient[:, :columns])
        return gradient, None, None


def _solved(row: RowGradient, packet: Packet, temperature: float) -> Solved:
    """What backward needs of a term on kept ids; sets the peaks of the packet."""
    packet.rows()["student_peak"].copy_(row.peak)
    if row.log_normalizer is None:
        return Solved({})
    factor = (row.peak.double() / temperature - row.log_normalizer).exp()
    return Solved({("student", temperature): factor.to(row.peak.dtype).unsqueeze(1)})

"""A divergence per token from logits that exist: statistics forward, gradient backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_distill.ops.blocks import Scratch, accumulation_dtype, allocate
from megatron_distill.ops.chunk import Chunk, shard_factors
from megatron_distill.ops.divergence import WeightedDivergence
from megatron_distill.ops.logits import GivenLogits
from megatron_distill.ops.pushforward import softmax_weights
from megatron_distill.ops.statistics import Packet, Sweep
from megatron_distill.ops.vocab import VocabShard

__all__ = ["LogitDivergence", "logit_divergence"]


@dataclass(frozen=True)
class LogitDivergence:
    """The term, the teacher's side of it, and where the columns stand in the vocabulary."""

    teacher: GivenLogits
    term: WeightedDivergence
    shard: VocabShard
    group: dist.ProcessGroup | None

    def chunk(self, student: GivenLogits) -> Chunk:
        """All tokens as one chunk."""
        columns = self.shard.real_width
        logits = student.logits.detach()[:, :columns]
        dtype = accumulation_dtype(student.dtype)
        return Chunk(
            sweep=Sweep(("student", "teacher"), (self.term,), full=False, infinite=True),
            raw={"student": logits, "teacher": self.teacher.logits.detach()[:, :columns]},
            rules={"student": student.rule, "teacher": self.teacher.rule},
            shard=self.shard,
            scratch=Scratch(max(logits.shape[0], 1), columns, dtype, logits.device),
        )


def logit_divergence(student: GivenLogits, work: LogitDivergence) -> Tensor:
    """Value of the term per token, ``[N]`` fp32, differentiable in the student's logits ``[N, V]``.

    Neither logits are modified. Kept for backward: seven numbers per token and the logits
    themselves; backward makes the gradient ``[N, V]`` and a few row blocks, nothing else of that
    size. A token whose upstream gradient is zero gets zeros, whatever its logits hold.

    Collective: one all-gather over ``group`` of 20 bytes per token forward (40 in fp64), none in
    backward.
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
        merged = chunk.process(packet, None, work.group)
        factors = shard_factors(packet, merged)
        ctx.save_for_backward(logits, work.teacher.logits, packet.values, *factors.values())
        ctx.work, ctx.rule = work, student.rule
        return (merged.divergence(work.term) * work.term.coefficient).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        logits, _, values, *factors = ctx.saved_tensors
        work: LogitDivergence = ctx.work
        chunk = work.chunk(GivenLogits(logits, ctx.rule))
        gradient = allocate(logits.shape[0], logits.shape[1], logits.dtype, logits.device)
        columns = work.shard.real_width
        gradient[:, columns:].zero_()
        chunk.push(
            Packet(chunk.sweep, values),
            dict(zip(chunk.sweep.softmaxes, factors, strict=True)),
            softmax_weights(chunk.sweep, upstream, None, None, work.shard),
            gradient[:, :columns],
        )
        return gradient, None, None

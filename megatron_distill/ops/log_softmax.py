"""Log-softmax over a vocabulary that is split over tensor-parallel ranks."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_distill.ops.vocab import VocabShard
from megatron_distill.ops.workspace import accumulation_dtype

__all__ = ["log_normalizer", "vocab_parallel_log_softmax"]


def vocab_parallel_log_softmax(
    logits: Tensor, shard: VocabShard, group: dist.ProcessGroup | None = None
) -> Tensor:
    """This rank's columns of the log-softmax over the whole vocabulary.

    Shapes: logits ``[N, V]`` -> ``[N, V]`` fp32 (fp64 for fp64 logits), -inf in padded columns;
    differentiable, and the input is not modified.

    Collective: over ``group`` one all-gather of 8 bytes per token forward and one all-reduce of 4
    bytes per token backward (twice that in fp64). None where ``group`` is None.

    Raises:
        ValueError: the logits do not have the shard's columns.
    """
    if logits.dim() != 2 or logits.shape[1] != shard.width:
        raise ValueError(f"logits are {tuple(logits.shape)}; the shard has {shard.width} columns")
    return cast(
        Tensor,
        _LogSoftmaxFunction.apply(logits, shard, group),  # type: ignore[no-untyped-call]
    )


class _LogSoftmaxFunction(torch.autograd.Function):
    """Log-softmax whose normaliser and gradient sum are merged over ranks."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, shard: VocabShard, group: dist.ProcessGroup | None
    ) -> Tensor:
        values = logits.to(accumulation_dtype(logits.dtype), copy=True)
        values[:, shard.real_width :] = -math.inf
        normalizer = log_normalizer(values[:, : shard.real_width], group)
        values.sub_(normalizer.unsqueeze(1))
        ctx.save_for_backward(values)
        ctx.group, ctx.dtype = group, logits.dtype
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        (log_probs,) = ctx.saved_tensors
        # A padded column is the constant -inf, without a gradient.
        upstream = upstream.masked_fill(log_probs == -math.inf, 0.0)
        total = upstream.sum(1)
        if ctx.group is not None:
            dist.all_reduce(total, group=ctx.group)
        gradient = upstream - log_probs.exp() * total.unsqueeze(1)
        return gradient.to(ctx.dtype), None, None


def log_normalizer(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Logarithm of the sum of exponentials over the whole vocabulary.

    Shapes: this rank's real columns ``[N, V]`` fp32 or fp64 -> ``[N]`` of the same dtype.

    Collective: over ``group`` one all-gather of 8 bytes per token (16 in fp64).
    """
    lowest = torch.finfo(values.dtype).min / 4
    peak = values.new_full((values.shape[0],), lowest)
    mass = torch.zeros_like(peak)
    if values.shape[1]:
        peak = values.amax(1).clamp_(min=lowest)
        mass = values.sub(peak.unsqueeze(1)).exp_().sum(1)
    local = torch.stack((peak, mass)).unsqueeze(0)
    if group is not None:
        world = dist.get_world_size(group)
        gathered = local.new_empty(world * 2, local.shape[2])
        dist.all_gather_into_tensor(gathered, local[0], group=group)
        local = gathered.view(world, 2, -1)
    peaks, masses = local.double().unbind(1)
    return (peaks + masses.log()).logsumexp(0).to(values.dtype)

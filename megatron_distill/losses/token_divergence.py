"""A divergence per token from logits."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from megatron_distill.losses.shards import check_columns, check_rows, resolve_shard
from megatron_distill.losses.terms import Term, weighted_divergences
from megatron_distill.ops.logit_divergence import LogitDivergence, logit_divergence
from megatron_distill.ops.logits import GivenLogits
from megatron_distill.ops.vocab import VocabShard
from megatron_distill.signals import DenseLogits

__all__ = ["token_divergence"]


def token_divergence(
    student_logits: Tensor,
    signal: DenseLogits,
    *,
    divergence: str,
    temperature: float = 1.0,
    scale_by_temperature_squared: bool = False,
    shard: VocabShard | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Divergence of the student from the teacher for each token.

    Shapes: student logits ``[N, V]`` over this rank's columns, the signal's logits likewise ->
    ``[N]`` fp32 in nats (fp64 for fp64 logits), differentiable in the student's logits. The two
    dtypes may differ. ``shard=None`` takes all columns as the whole vocabulary. Inputs are not
    modified. The gradient is complete on every rank: nothing is to be reduced.

    Collective: one all-gather over ``group`` of 20 bytes per token forward, none in backward.

    Raises:
        ValueError: shapes, shard and group do not fit, or an unknown divergence.
        TypeError: the signal does not carry logits.
    """
    if not isinstance(signal, DenseLogits):
        raise TypeError(
            f"token_divergence takes DenseLogits, not {type(signal).__name__}; "
            "fused_linear_objective takes a hidden state"
        )
    student = DenseLogits(student_logits).logits
    shard, group = resolve_shard(student.shape[1], shard, group)
    check_columns(signal.logits.shape[1], shard, group)
    check_rows(student.shape[0], teacher_logits=signal.logits)
    term = Term(
        divergence,
        temperature=temperature,
        scale_by_temperature_squared=scale_by_temperature_squared,
    )
    (weighted,) = weighted_divergences([term])
    work = LogitDivergence(GivenLogits(signal.logits), weighted, shard, group)
    return logit_divergence(GivenLogits(student), work)

"""A divergence per token from logits."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from megatron_distill.losses.checks import check_columns, check_rows, resolve_shard
from megatron_distill.losses.terms import Term, kept_target
from megatron_distill.ops.head import GivenLogits, LogitRule
from megatron_distill.ops.logit_divergence import LogitDivergence, logit_divergence
from megatron_distill.ops.topk import select
from megatron_distill.ops.topk_divergence import SampledTarget, Support, TopKTarget
from megatron_distill.ops.vocab import VocabShard
from megatron_distill.signals import DenseLogits, Sampled, TopK

__all__ = ["token_divergence"]


def token_divergence(
    student_logits: Tensor,
    signal: DenseLogits | TopK | Sampled,
    *,
    divergence: str,
    temperature: float = 1.0,
    scale_by_temperature_squared: bool = False,
    support: Support = "tail",
    top_k: int | None = None,
    shard: VocabShard | None = None,
    group: dist.ProcessGroup | None = None,
    overwrite_logits: bool = False,
    **parameters: float,
) -> Tensor:
    """Divergence of the student from the teacher for each token.

    Shapes: student logits ``[N, V]`` over this rank's columns; `DenseLogits` likewise, `TopK` and
    `Sampled` whole on every rank -> ``[N]`` fp32 in nats (fp64 for fp64 logits), differentiable in
    the student's logits. The dtypes may differ. ``shard=None`` takes all columns as the whole
    vocabulary. Inputs are not modified, unless ``overwrite_logits`` lets the gradient take the
    place of the student's logits, which nobody may read any more. The gradient is complete on every
    rank: nothing is to be reduced. ``top_k`` (of `DenseLogits`), ``support`` and ``parameters`` are
    those of `Term`. Samples give the cross-entropy ``-sum w log q``, of the gradient of forward KL
    in expectation.

    Collective, forward only: over ``group`` one all-gather of 40 bytes per token between logits;
    for any but forward KL 48, and one more of 24 (for adaptive KL those of `head_share` too); on K
    kept ids one of ``4 K + 8`` bytes (``4 K`` renormalised), and one of ``8 K + 8`` to choose.

    Raises:
        ValueError: shapes, shard and group do not fit, an unknown divergence, parameter or support,
            or one that is not defined on this signal.
        TypeError: the signal carries neither logits nor kept ids.
    """
    student = DenseLogits(student_logits).logits
    shard, group = resolve_shard(student.shape[1], shard, group)
    term = Term(
        divergence,
        temperature=temperature,
        scale_by_temperature_squared=scale_by_temperature_squared,
        support=support,
        top_k=top_k,
        parameters=parameters,
    )
    teacher: GivenLogits | TopKTarget | SampledTarget
    if isinstance(signal, DenseLogits):
        check_columns(signal.logits.shape[1], shard, group)
        check_rows(student.shape[0], teacher_logits=signal.logits)
        teacher = GivenLogits(signal.logits)
        if top_k is not None:
            teacher = _chosen(signal.logits, top_k, term, shard, group)
    elif isinstance(signal, TopK | Sampled):
        if top_k is not None:
            raise ValueError(
                f"top_k is {top_k}, but the signal is already a top-k or sampled one; remove top_k"
            )
        check_rows(student.shape[0], ids=signal.ids)
        teacher = kept_target(signal, term)
    else:
        advice = "fused_linear_objective takes a hidden state"
        if isinstance(signal, Tensor):
            advice = "wrap the teacher's logits: DenseLogits(logits)"
        raise TypeError(
            f"token_divergence takes DenseLogits, TopK or Sampled, not {type(signal).__name__}; "
            f"{advice}"
        )
    work = LogitDivergence(teacher, term.weighted, shard, group, overwrite_logits)
    return logit_divergence(GivenLogits(student), work)


def _chosen(
    logits: Tensor, k: int, term: Term, shard: VocabShard, group: dist.ProcessGroup | None
) -> TopKTarget:
    """The teacher's most probable ids, its tail only where the support needs one."""
    (kept,) = select(
        logits.detach()[:, : shard.real_width],
        LogitRule(),
        shard,
        group,
        k=k,
        temperatures=[term.temperature],
        normalised=term.support != "renormalized",
    )
    return TopKTarget(kept.ids, kept.log_probs, kept.log_tail, term.support)

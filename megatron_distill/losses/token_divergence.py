"""A divergence per token from logits."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from megatron_distill.losses.checks import check_columns, check_rows, resolve_shard
from megatron_distill.losses.terms import Term
from megatron_distill.ops.logit_divergence import LogitDivergence, logit_divergence
from megatron_distill.ops.topk import select
from megatron_distill.ops.topk_divergence import IdTerm
from megatron_distill.ops.vocab import VocabShard
from megatron_distill.signals import DenseLogits, LogitRule, Signal, Support, TopK

__all__ = ["token_divergence"]


def token_divergence(
    student_logits: Tensor,
    signal: Signal,
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
    `Sampled` complete on every rank. The result is ``[N]`` fp32 in nats (fp64 for fp64 logits),
    differentiable in the student's logits. The dtypes may differ. ``shard=None`` means that the
    columns are the whole vocabulary. Inputs are not modified, unless ``overwrite_logits`` lets the
    gradient overwrite the student's logits; their values are undefined afterwards. The gradient is
    complete on every rank and needs no reduction. ``top_k`` (of `DenseLogits`), ``support`` and
    ``parameters`` are those of `Term`. Samples give the cross-entropy ``-sum w log q``; its
    expected gradient is that of forward KL.

    Collective, forward only: over ``group`` one all-gather of 40 bytes per token between logits.
    For any but forward KL it has 48, and one more of 24; for adaptive KL those of `head_share` too.
    On top-k ids one of ``4 K + 8`` bytes (``4 K`` renormalised), and one of ``8 K + 8`` to choose.

    Raises:
        ValueError: shapes, shard and group do not fit, an unknown divergence, parameter or support,
            or one that is not defined on this signal.
        TypeError: the signal holds neither logits nor ids.
    """
    if isinstance(signal, Tensor):
        raise TypeError(
            "token_divergence takes a signal, not Tensor; wrap the teacher's logits: "
            "DenseLogits(logits)"
        )
    student = DenseLogits(student_logits)
    shard, group = resolve_shard(student.width, shard, group)
    check_rows(student.tokens, teacher_signal=signal)
    term = Term(
        divergence,
        temperature=temperature,
        scale_by_temperature_squared=scale_by_temperature_squared,
        support=support,
        top_k=top_k,
        parameters=parameters,
    )
    teacher, id_term = _teacher(signal, term, shard, group)
    work = LogitDivergence(term.weighted, teacher, id_term, shard, group, overwrite_logits)
    return logit_divergence(student, work)


def _teacher(
    signal: Signal, term: Term, shard: VocabShard, group: dist.ProcessGroup | None
) -> tuple[Tensor | None, IdTerm | None]:
    """The teacher's logits for a term between logits, else the term on few ids."""
    targets = signal.targets([term])
    if targets is not None:
        return None, IdTerm(term.weighted, term.name, term.support, targets[0])
    source = signal.logit_source()
    if source is None or source.formed is None:
        raise TypeError(
            f"token_divergence takes signals of logits or ids, not {type(signal).__name__}; "
            "fused_linear_objective takes a hidden state"
        )
    logits = source.formed
    check_columns(source.width, shard, group)
    if term.top_k is None:
        return logits, None
    chosen = _chosen(logits, term.top_k, term, shard, group)
    return None, IdTerm(term.weighted, term.name, term.support, chosen)


def _chosen(
    logits: Tensor, k: int, term: Term, shard: VocabShard, group: dist.ProcessGroup | None
) -> TopK:
    """The teacher's top-k, with a tail only if the support needs one."""
    (chosen,) = select(
        logits.detach()[:, : shard.real_width],
        LogitRule(),
        shard,
        group,
        k=k,
        temperatures=[term.temperature],
        normalised=term.support != "renormalized",
    )
    return chosen

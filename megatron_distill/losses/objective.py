"""The training objective: label loss and divergences from one pass over the hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.errors import counted
from megatron_distill.losses.checks import check_columns, check_per_token, check_rows, resolve_shard
from megatron_distill.losses.terms import Term, check_distinct
from megatron_distill.ops.divergences import WeightedDivergence
from megatron_distill.ops.factors import Factor, scaled
from megatron_distill.ops.fused_linear import (
    FusedLinear,
    Partition,
    fused_linear,
    sum_tokens,
    weighted_rows,
)
from megatron_distill.ops.topk_divergence import IdTerm
from megatron_distill.ops.vocab import VocabShard
from megatron_distill.ops.workspace import accumulation_dtype, chunk_tokens_for
from megatron_distill.signals import HiddenState, LogitSource, Signal

__all__ = ["fused_linear_objective", "token_weights"]


def fused_linear_objective(
    student_hidden: Tensor,
    student_weight: Tensor,
    signal: Signal | None,
    labels: Tensor,
    *,
    ce_weights: Tensor,
    kd_weights: Tensor,
    terms: Sequence[Term],
    chunk_tokens: int | None = None,
    shard: VocabShard | None = None,
    group: dist.ProcessGroup | None = None,
    ce_coefficient: float = 1.0,
    student_softcap: float | None = None,
    student_scale: float = 1.0,
    student_bias: Tensor | None = None,
    rows: Tensor | None = None,
    partition: Partition | None = None,
    weight_gradient_sum: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """``ce_coefficient sum(ce_weights CE) + sum over terms of weight sum(kd_weights D)``.

    Shapes: student hidden ``[N, H]``, its head shard ``[V, H]`` and bias ``[V]``, all of one dtype
    (soft-cap, scale and bias are those of `HiddenState`). Labels ``[N]`` int64 global ids (any
    value where ``ce_weights`` is zero); both weights ``[N]`` contain mask and normalisation. CE is
    at temperature one, each D at its term's temperature. Returns the total, an fp32 scalar
    differentiable in hidden, weight and bias. Also returns a report of detached fp32 scalars:
    ``ce`` and, with a teacher, ``teacher_ce`` (both weighted by ``ce_weights``); ``kd`` (the terms'
    share of the total); one entry per term under its name (without the term's weight);
    ``student_entropy``, ``teacher_entropy`` and ``top1_agreement`` (weighted by ``kd_weights``).
    With a ``partition`` each entry is ``[1 + parts]``: over all tokens, then per part.

    The gradient on the hidden states is this vocabulary shard's PARTIAL sum. The caller reduces it
    over ``group``, as the backward of copy-to or gather-to tensor-parallel regions does. Every rank
    of the group must have the same hidden states of all tokens.

    ``weight_gradient_sum`` (``[V, H]``, fp32, or fp64 for an fp64 weight) is a gradient buffer such
    as Megatron's ``main_grad``. This call adds the weight's gradient to it, chunk by chunk, and
    backward returns none: no further ``[V, H]`` is in memory. The total must be back-propagated
    with a factor of one. The buffer does not change if the weight needs no gradient.

    Tokens with both weights zero are left out, even if they hold NaN. ``rows`` (``[n]`` int64) are
    the ascending numbers of the remaining tokens; without it, one device synchronisation finds
    them. A label outside the vocabulary on a token with ``ce_weights`` makes the total infinite.
    Logits exist for ``chunk_tokens`` tokens at a time. None chooses chunks of the same memory for
    every vocabulary (2^25 logits of each model on a CPU, 2^28 on a GPU).

    Collective: one all-gather over ``group`` per chunk. It has 80 bytes per token with one term at
    temperature one, 24 more per further temperature, 32 without a teacher. None in backward.

    Raises:
        ValueError: shapes, dtypes, shard, group or terms do not fit together.
        RuntimeError: in backward, if ``weight_gradient_sum`` was given and the upstream gradient is
            not one.
    """
    student = HiddenState(
        student_hidden, student_weight, student_softcap, student_scale, student_bias
    )
    shard, group = resolve_shard(student_weight.shape[0], shard, group)
    check_per_token(
        student_hidden.shape[0], labels=labels, ce_weights=ce_weights, kd_weights=kd_weights
    )
    if weight_gradient_sum is not None:
        _check_sum(weight_gradient_sum, student_weight)
    if partition is not None:
        check_per_token(student_hidden.shape[0], partition=partition.ids)
    if chunk_tokens is None:
        chunk_tokens = chunk_tokens_for(shard.width, student_weight.device)
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}; it must be at least 1")
    if signal is None and terms:
        raise ValueError(f"{counted(len(terms), 'divergence term')} without a teacher signal")
    check_distinct(terms)
    between, id_terms = _split(signal, terms)
    work = FusedLinear(
        teacher=_teacher(signal, student.tokens, shard, group),
        labels=labels,
        ce_weights=ce_weights,
        kd_weights=kd_weights,
        ce_coefficient=ce_coefficient,
        terms=_merged(between),
        id_terms=tuple(one for _, one in id_terms),
        chunk_tokens=chunk_tokens,
        shard=shard,
        group=group,
        rows=rows,
        partition=partition,
        weight_gradient_sum=weight_gradient_sum,
    )
    total, sums = fused_linear(student, work)
    report = _report(work, between, id_terms, sums)
    if signal is not None:
        of_ce, of_kd = _at_rows(ce_weights, rows), _at_rows(kd_weights, rows)
        report |= _token_statistics(signal, of_ce, of_kd, partition)
    return total, report


def _check_sum(total: Tensor, weight: Tensor) -> None:
    found = (tuple(total.shape), total.dtype, total.device)
    wanted = (tuple(weight.shape), accumulation_dtype(weight.dtype), weight.device)
    if found != wanted:
        raise ValueError(
            "weight_gradient_sum is {} of {} on {}; it must be {} of {} on {}".format(
                *found, *wanted
            )
        )
    if total.requires_grad:
        raise ValueError("weight_gradient_sum requires a gradient; give a buffer that does not")


def _split(
    signal: Signal | None, terms: Sequence[Term]
) -> tuple[list[Term], list[tuple[Term, IdTerm]]]:
    """The terms between logits, and the terms on few ids with their targets, if known."""
    targets = None if signal is None else signal.targets(terms)
    if targets is not None:
        return [], [
            (term, IdTerm(term.weighted, term.name, term.support, target))
            for term, target in zip(terms, targets, strict=True)
        ]
    return [term for term in terms if term.top_k is None], [
        (term, IdTerm(term.weighted, term.name, term.support, None, term.top_k))
        for term in terms
        if term.top_k is not None
    ]


def _merged(terms: Sequence[Term]) -> tuple[WeightedDivergence, ...]:
    """The terms without repeats: scheduled temperatures may coincide."""
    merged: dict[str, WeightedDivergence] = {}
    for own in (term.weighted for term in terms):
        met = merged.get(own.key)
        more: Factor = 0.0 if met is None else met.coefficient
        merged[own.key] = replace(own, coefficient=own.coefficient + more)
    return tuple(merged.values())


def _teacher(
    signal: Signal | None, tokens: int, shard: VocabShard, group: dist.ProcessGroup | None
) -> LogitSource | None:
    if signal is None:
        return None
    check_rows(tokens, teacher_signal=signal)
    source = signal.logit_source()
    if source is not None:
        check_columns(source.width, shard, group)
    return source


def _report(
    work: FusedLinear,
    between: Sequence[Term],
    id_terms: Sequence[tuple[Term, IdTerm]],
    sums: Tensor,
) -> dict[str, Tensor]:
    by_name = dict(zip(work.sum_names, sums.unbind(), strict=True))
    keys = {term.name: term.weighted.key for term in between}
    keys |= {term.name: one.key for term, one in id_terms}
    divergences = {name: by_name[key] for name, key in keys.items()}
    for key in set(keys.values()):
        del by_name[key]
    masses = [by_name.pop(one.mass_key) for _, one in id_terms if one.has_mass]
    if not divergences and work.teacher is None:
        return by_name
    if masses:
        by_name["topk_mass"] = masses[0]
    kd = sums.new_zeros(sums.shape[1:])
    for term in (*between, *(term for term, _ in id_terms)):
        value = divergences[term.name] * term.temperature_factor
        by_name[term.name] = value
        kd = kd + scaled(value, term.weight)
    return by_name | {"kd": kd}


def _token_statistics(
    signal: Signal, ce_weights: Tensor, kd_weights: Tensor, partition: Partition | None
) -> dict[str, Tensor]:
    """Reports from a signal's token statistics, with the names of those from logits."""
    known, report = signal.token_statistics(), {}
    if "label_log_prob" in known:
        report["teacher_ce"] = _weighted_sum(ce_weights, -known["label_log_prob"], partition)
    if "entropy" in known:
        report["teacher_entropy"] = _weighted_sum(kd_weights, known["entropy"], partition)
    return report


def _at_rows(weights: Tensor, rows: Tensor | None) -> Tensor:
    """The weights of the rows, and zero elsewhere."""
    if rows is None:
        return weights
    return torch.zeros_like(weights).index_copy_(0, rows, weights.index_select(0, rows))


def _weighted_sum(weights: Tensor, values: Tensor, partition: Partition | None) -> Tensor:
    sums = sum_tokens([weighted_rows(weights, values)], partition).squeeze(0).to(weights.dtype)
    return sums.squeeze(0) if partition is None else sums


def token_weights(mask_N: Tensor, global_count: float) -> Tensor:
    """``mask / global_count`` as fp32 ``[N]``; zeros if the global count is zero.

    The mask is bool, or holds weights of tokens. ``global_count`` is its sum over the whole global
    batch, known before any forward pass. This makes loss and gradient independent of the split into
    micro-batches and ranks.

    Raises:
        ValueError: the count is negative.
    """
    if global_count < 0:
        raise ValueError(f"global token count is {global_count}; it cannot be negative")
    weights = mask_N.to(torch.float32)
    return weights / global_count if global_count else torch.zeros_like(weights)

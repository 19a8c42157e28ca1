"""Divergences on few ids of each token: a top-k, renormalised or with its tail, or drawn ids.

One all-gather gives the student's probabilities of the ids, and of all further ids together. The
rest is small ``[N, K]`` mathematics in fp64, the same on every rank. The gradient on the logits is
the softmax times one number per token, except at the ids.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.ops.divergences import (
    Classes,
    Divergence,
    Model,
    WeightedDivergence,
    forward_kl_summands,
)
from megatron_distill.ops.row_math import nearness
from megatron_distill.ops.topk import Outside, gather_ranks, local_values, select
from megatron_distill.ops.vocab import VocabShard
from megatron_distill.ops.workspace import Rows
from megatron_distill.signals import IdGradient, IdTarget, LogitRule, Support, TopK

__all__ = [
    "IdTerm",
    "IdTermGradient",
    "OnClasses",
    "SolvedIdTerm",
    "solve_id_term",
    "solve_id_terms",
    "values_and_slopes",
]


_STEEPEST = 1e32


@dataclass(frozen=True)
class IdTerm:
    """A term of the objective on few ids of each token.

    Attributes:
        term: the divergence with its coefficient.
        key: its name among the terms of one objective.
        support: the classes that the divergence is between.
        target: of all tokens, or of a chunk; None to choose a top-k from the teacher's logits.
        top_k: number of ids to choose.
    """

    term: WeightedDivergence
    key: str
    support: Support
    target: IdTarget | None
    top_k: int | None = None

    @property
    def needs_rest(self) -> bool:
        """Whether the student's probability outside of the ids enters the term."""
        if self.target is None:
            return self.support != "renormalized"
        return self.target.needs_rest(self.support)

    @property
    def has_mass(self) -> bool:
        """Whether the teacher's probabilities of the ids are known."""
        return self.target is None or self.target.has_mass

    @property
    def mass_key(self) -> str:
        """Name in reports of the teacher's probability of the ids."""
        return f"{self.key}/mass"

    def of_rows(self, rows: Rows, chunk: slice) -> IdTerm:
        """The term for the counted tokens of a chunk."""
        if self.target is None:
            return self
        return replace(self, target=self.target.map(lambda values: rows.take(values, chunk)))


@dataclass(frozen=True)
class IdTermGradient:
    """Value per token and gradient on the logits, before weights and the factor 1/T.

    Attributes:
        value: ``[N]`` fp64.
        slope: ``[N]``, the gradient is ``slope * q_j`` outside of the ids. Bounded so that fp32
            holds it with weights: too small where the student's tail is below 1e-32.
        columns: ``[N, K]`` local columns of the ids, any column where another rank owns the id.
        excess: ``[N, K]``, the gradient on an id beyond ``slope * q_j``, or all of it; zero where
            another rank owns the id.
        log_normalizer: ``[N]`` fp64 of the student at the term's temperature; None where nothing
            outside of the ids enters.
        peak: ``[N]`` largest logit of the shard, in the dtype of statistics.
        first_logit: ``[N]`` fp64, the student's logit at the first id.
        topk_mask: bool ``[N, K]``, this rank's ids, excluded from the slope, so that ``excess``
            is their whole gradient; None where the slope includes them.
    """

    value: Tensor
    slope: Tensor
    columns: Tensor
    excess: Tensor
    log_normalizer: Tensor | None
    peak: Tensor
    first_logit: Tensor
    topk_mask: Tensor | None = None


def solve_id_term(
    term: IdTerm,
    raw: Tensor,
    rule: LogitRule,
    shard: VocabShard,
    group: dist.ProcessGroup | None,
) -> IdTermGradient:
    """Value and gradient of a term from the student's raw outputs over the shard's real columns.

    Collective: one all-gather over ``group`` of ``4 K + 8`` bytes per token (8 less where the
    support is renormalised, twice that in fp64).
    """
    target = term.target
    assert target is not None, "a top-k is chosen first"
    ids, temperature = target.ids, term.term.temperature
    owned = shard.owns(ids) & target.valid()
    columns = shard.local(ids)
    values = local_values(raw, rule, shard, ids)
    values.masked_fill_(~owned, -torch.inf)
    parts, peak = [values], values.amax(1)
    if term.needs_rest:
        repeated = _is_repeated(ids)
        rest = Outside.measure(raw, rule, columns, owned & ~repeated, [temperature])
        parts.append(torch.stack([rest.peak, *rest.masses], 1))
        peak = torch.maximum(peak, rest.peak)
    gathered = gather_ranks(torch.cat(parts, 1), group).double()
    logits = gathered[:, :, : ids.shape[1]].amax(0)
    scaled = logits / temperature
    log_normalizer, log_tail = None, None
    if term.needs_rest:
        peaks, masses = gathered[:, :, -2], gathered[:, :, -1]
        log_rest = (peaks / temperature + masses.log()).t()
        log_tail = log_rest.logsumexp(1)
        counted = scaled.masked_fill(repeated, -torch.inf)
        log_normalizer = torch.cat([counted, log_tail.unsqueeze(1)], 1).logsumexp(1)
        log_tail = log_tail - log_normalizer
        log_q = scaled - log_normalizer.unsqueeze(1)
    else:
        total = scaled.logsumexp(1, keepdim=True)
        # Without any probability the difference would be NaN; it becomes -inf.
        log_q = scaled - total.masked_fill(total == -torch.inf, 0.0)
    found = target.gradient(log_q, log_tail, OnClasses(term.term.divergence, term.support))
    # The slope of a tail grows as the student's tail shrinks. In fp32 its part at the ids could not
    # be subtracted again, so the ids are excluded from it.
    is_steep, slope = found.is_steep, found.slope
    excess = found.inside if is_steep else found.inside - slope.unsqueeze(1) * log_q.exp()
    return IdTermGradient(
        value=found.value,
        slope=slope,
        columns=columns,
        excess=excess.masked_fill(~owned, 0.0),
        log_normalizer=log_normalizer,
        peak=peak,
        first_logit=logits[:, 0],
        topk_mask=owned if is_steep else None,
    )


def _is_repeated(ids: Tensor) -> Tensor:
    """Whether an id is in an earlier column too; bool ``[N, K]``."""
    ordered, order = ids.sort(dim=1, stable=True)
    again = torch.zeros_like(ids, dtype=torch.bool)
    again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return torch.zeros_like(again).scatter_(1, order, again)


@dataclass(frozen=True)
class OnClasses:
    """A divergence between a teacher's and the student's distributions over few ids."""

    divergence: Divergence
    support: Support

    def __call__(
        self,
        log_probs: Tensor,
        log_tail: Tensor,
        valid: Tensor,
        student: Tensor,
        student_tail: Tensor | None,
    ) -> IdGradient:
        """See `ClassDivergence`."""
        divergence, has_tail = self.divergence, self.support == "tail"
        log_p, log_q, counts = log_probs.double(), student, valid
        if self.support == "renormalized":
            log_p = log_p - log_p.logsumexp(1, keepdim=True)
        elif has_tail:
            assert student_tail is not None
            log_p = torch.cat([log_p, log_tail.double().unsqueeze(1)], 1)
            log_q = torch.cat([log_q, student_tail.unsqueeze(1)], 1)
            counts = torch.cat([valid, torch.ones_like(valid[:, :1])], 1)
        log_p = log_p.masked_fill(~counts, -torch.inf)
        log_q = log_q.masked_fill(~counts, -torch.inf)
        log_q = _same_where_close(log_q, log_p, log_probs.dtype)
        least = math.log(torch.finfo(log_p.dtype).tiny)
        log_p, log_q = log_p.clamp(min=least), log_q.clamp(min=least)
        classes = Classes(
            log_p.exp(), log_q.exp(), lambda: log_p - log_q, lambda _: torch.empty_like(log_p)
        )
        values, q_times_slope, constant = values_and_slopes(
            divergence, classes, sums_to_one=self.support != "raw"
        )
        q, total = classes.student, q_times_slope.sum(1, keepdim=True)
        gradient = q_times_slope - q * total
        if has_tail:
            of_tail, tail = gradient[:, -1], q[:, -1]
            slope = (of_tail / tail).clamp(-_STEEPEST, _STEEPEST)
            return IdGradient(values.sum(1), slope, gradient[:, :-1], True)
        slope = torch.zeros_like(total).squeeze(1)
        if self.support == "raw":
            mass = q.sum(1, keepdim=True)
            values = values - divergence.balance * (classes.teacher - q)
            gradient = gradient + constant * q * (1 - mass)
            slope = -(total + constant * mass).squeeze(1)
        return IdGradient(values.sum(1), slope, gradient, False)


def values_and_slopes(
    divergence: Divergence, classes: Classes, *, sums_to_one: bool
) -> tuple[Tensor, Tensor, Tensor | float]:
    """Summands of the value, ``q (dl/dq - constant)``, and the constant.

    Where both models' classes sum to one, the summands of both KLs are of second order in the log
    ratio. So the value for similar models does not subtract larger numbers.
    """
    p, q = classes.teacher, classes.student
    value, slope = divergence.evaluate(classes)
    gap: Tensor | float = p - q if sums_to_one else 0.0
    if slope is None:
        return value - gap, q - p, divergence.constant
    value, slope = value * divergence.scales.value, slope * divergence.scales.slope
    if divergence.of_top_ratio != 0:
        value = value + gap
    if divergence.head_mass is None:
        return value, q * slope, divergence.constant
    forward, _ = forward_kl_summands(classes)
    blend = _blend(classes, divergence.head_mass)
    value = blend * (forward - gap) + (1 - blend) * value
    return value, blend * (q - p) + (1 - blend) * q * slope, (1 - 2 * blend) * divergence.constant


def _same_where_close(log_q: Tensor, log_p: Tensor, stored: torch.dtype) -> Tensor:
    """The student's log-probs, replaced by the teacher's where both agree in the stored dtype.

    That of a live teacher is fp32, as in a store, so that both give the same loss.
    """
    window = nearness(stored) * log_p.abs().clamp(min=1.0)
    is_close = ((log_q - log_p).abs() <= window) & (log_p > -torch.inf)
    return torch.where(is_close, log_p, log_q)


def _blend(classes: Classes, head_mass: float) -> Tensor:
    """Share ``[N, 1]`` of the forward KL: the head's part of the distance between p and q."""
    ordered, order = classes.teacher.sort(dim=1, stable=True)
    gaps = (classes.teacher - classes.student).abs().gather(1, order)
    is_tail = ordered.cumsum(1) <= head_mass
    tail = torch.where(is_tail, gaps, 0.0).sum(1, keepdim=True)
    head = torch.where(is_tail, 0.0, gaps).sum(1, keepdim=True)
    return torch.where(head + tail > 0, head / (head + tail).clamp_min(1e-300), 0.5)


@dataclass(frozen=True)
class SolvedIdTerm:
    """A term with its target, value and gradient."""

    term: IdTerm
    gradient: IdTermGradient

    @property
    def mass(self) -> Tensor:
        """The teacher's probability of the ids, ``[N]`` fp64."""
        assert self.term.target is not None
        return self.term.target.mass()


def solve_id_terms(
    terms: Sequence[IdTerm],
    raw: Mapping[Model, Tensor],
    rules: Mapping[Model, LogitRule],
    shard: VocabShard,
    group: dist.ProcessGroup | None,
) -> list[SolvedIdTerm]:
    """Value and gradient of each term from raw outputs over the shard's real columns.

    Collective: that of `solve_id_term` for each term, and that of `select` once if a term chooses
    its ids.
    """
    chosen = _choose([term for term in terms if term.target is None], raw, rules, shard, group)
    solved = []
    for term in terms:
        if term.target is None:
            assert term.top_k is not None
            term = replace(term, target=chosen[term.term.temperature].first(term.top_k))
        found = solve_id_term(term, raw["student"], rules["student"], shard, group)
        solved.append(SolvedIdTerm(term, found))
    return solved


def _choose(
    terms: Sequence[IdTerm],
    raw: Mapping[Model, Tensor],
    rules: Mapping[Model, LogitRule],
    shard: VocabShard,
    group: dist.ProcessGroup | None,
) -> dict[float, TopK]:
    """The top-k of the largest k among the terms, at each of their temperatures."""
    if not terms:
        return {}
    k = max(term.top_k or 0 for term in terms)
    temperatures = list(dict.fromkeys(term.term.temperature for term in terms))
    found = select(raw["teacher"], rules["teacher"], shard, group, k=k, temperatures=temperatures)
    return dict(zip(temperatures, found, strict=True))

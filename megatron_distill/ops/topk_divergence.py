"""Divergences on the kept ids of a top-k, and unbiased ones on sampled ids.

The student's probabilities of a few ids, and of all others together, are found with one packet per
token; what follows is small ``[N, K]`` mathematics in fp64, the same on every rank. The gradient on
the logits is the softmax times one number per token, but for the kept ids.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

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
from megatron_distill.ops.head import LogitRule, Rows
from megatron_distill.ops.topk import Kept, Outside, gather_ranks, local_values, select
from megatron_distill.ops.vocab import VocabShard

__all__ = [
    "KeptPlan",
    "KeptTerm",
    "RowGradient",
    "SampledTarget",
    "SolvedPlan",
    "Support",
    "TopKTarget",
    "solve_kept",
    "solve_plans",
]


Support = Literal["tail", "renormalized", "raw"]
# Log-probabilities are fp32, stored or of a live teacher, so that a store replays its loss: what
# differs by less than that holds is the same.
_RESOLUTION = 4.0
_STEEPEST = 1e32


@dataclass(frozen=True)
class TopKTarget:
    """The teacher's log-probs ``[N, K]`` of ids ``[N, K]``, and ``[N]`` of the rest.

    An entry of -inf is not kept: its id belongs to the rest.
    """

    ids: Tensor
    log_probs: Tensor
    log_tail: Tensor
    support: Support


@dataclass(frozen=True)
class SampledTarget:
    """Weights ``[N, K]`` of ids ``[N, K]``, drawn so that their expectation is the teacher."""

    ids: Tensor
    weights: Tensor


@dataclass(frozen=True)
class KeptTerm:
    """A term on kept ids, and what it is held against."""

    term: WeightedDivergence
    target: TopKTarget | SampledTarget

    @property
    def needs_rest(self) -> bool:
        """Whether the student's mass outside the ids matters."""
        return not (isinstance(self.target, TopKTarget) and self.target.support == "renormalized")


@dataclass(frozen=True)
class RowGradient:
    """Value per token and gradient on the logits, before weights and the factor 1/T.

    Attributes:
        value: ``[N]`` fp64.
        slope: ``[N]`` the gradient is ``slope * q_j`` on ids that are not kept. No larger than fp32
            holds with weights: where the student leaves them less than 1e-32, they get too little.
        columns: ``[N, K]`` local columns of the kept ids, any column where another rank owns it.
        excess: ``[N, K]`` what the gradient on a kept id is beyond ``slope * q_j``, or all of it;
            zero where another rank owns it.
        log_normalizer: ``[N]`` fp64 of the student at the term's temperature; None where nothing
            outside the ids counts.
        peak: ``[N]`` largest logit of the shard, in the dtype of statistics.
        first_logit: ``[N]`` fp64, the student's logit at the first kept id.
        cut: bool ``[N, K]``, the kept ids of this rank that the slope does not reach, so that
            ``excess`` is all they get; None where it reaches them too.
    """

    value: Tensor
    slope: Tensor
    columns: Tensor
    excess: Tensor
    log_normalizer: Tensor | None
    peak: Tensor
    first_logit: Tensor
    cut: Tensor | None = None


def solve_kept(
    kept: KeptTerm,
    raw: Tensor,
    rule: LogitRule,
    shard: VocabShard,
    group: dist.ProcessGroup | None,
) -> RowGradient:
    """Value and gradient of a term from the student's raw outputs over the shard's real columns.

    Collective: one all-gather over ``group`` of ``4 K + 8`` bytes per token (8 less where the
    support is renormalised, twice that in fp64).
    """
    ids, temperature = kept.target.ids, kept.term.temperature
    is_kept = _is_kept(kept.target)
    owned = shard.owns(ids) & is_kept
    columns = shard.local(ids)
    values = local_values(raw, rule, shard, ids)
    values.masked_fill_(~owned, -torch.inf)
    parts, peak = [values], values.amax(1)
    if kept.needs_rest:
        repeated = _is_repeated(ids)
        rest = Outside.measure(raw, rule, columns, owned & ~repeated, [temperature])
        parts.append(torch.stack([rest.peak, *rest.masses], 1))
        peak = torch.maximum(peak, rest.peak)
    gathered = gather_ranks(torch.cat(parts, 1), group).double()
    logits = gathered[:, :, : ids.shape[1]].amax(0)
    scaled = logits / temperature
    log_normalizer, log_tail = None, None
    if kept.needs_rest:
        peaks, masses = gathered[:, :, -2], gathered[:, :, -1]
        log_rest = (peaks / temperature + masses.log()).t()
        log_tail = log_rest.logsumexp(1)
        counted = scaled.masked_fill(repeated, -torch.inf)
        log_normalizer = torch.cat([counted, log_tail.unsqueeze(1)], 1).logsumexp(1)
        log_tail = log_tail - log_normalizer
        log_q = scaled - log_normalizer.unsqueeze(1)
    else:
        total = scaled.logsumexp(1, keepdim=True)
        # Without any probability there is nothing to share out: -inf, where the difference is NaN.
        log_q = scaled - total.masked_fill(total == -torch.inf, 0.0)
    if isinstance(kept.target, SampledTarget):
        value, slope, inside = _on_samples(kept.target.weights.double(), log_q)
    else:
        value, slope, inside = _on_classes(
            kept.term.divergence, kept.target, is_kept, log_q, log_tail
        )
    # The slope of a tail is as steep as the student's tail is small. In fp32 what it gives the kept
    # ids could not be taken away again: they are left out instead.
    has_tail = isinstance(kept.target, TopKTarget) and kept.target.support == "tail"
    excess = inside if has_tail else inside - slope.unsqueeze(1) * log_q.exp()
    return RowGradient(
        value=value,
        slope=slope,
        columns=columns,
        excess=excess.masked_fill(~owned, 0.0),
        log_normalizer=log_normalizer,
        peak=peak,
        first_logit=logits[:, 0],
        cut=owned if has_tail else None,
    )


def _is_repeated(ids: Tensor) -> Tensor:
    """Whether an id stands in an earlier column too; ``[N, K]``."""
    ordered, order = ids.sort(dim=1, stable=True)
    again = torch.zeros_like(ids, dtype=torch.bool)
    again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return torch.zeros_like(again).scatter_(1, order, again)


def _is_kept(target: TopKTarget | SampledTarget) -> Tensor:
    if isinstance(target, TopKTarget):
        return target.log_probs > -torch.inf
    return target.weights != 0


def _on_samples(weights: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy ``-sum w log q``: gradient ``(sum w) q - w``."""
    # Source: Anshumann et al., arXiv 2503.16870, section 3: unbiased because it is linear in w.
    value = -torch.where(weights == 0, 0.0, weights * log_q).sum(1)
    slope = weights.sum(1)
    return value, slope, slope.unsqueeze(1) * log_q.exp() - weights


def _on_classes(
    row: Divergence,
    target: TopKTarget,
    is_kept: Tensor,
    log_q: Tensor,
    log_tail: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Value, slope outside the kept ids, and gradient on them."""
    log_p = target.log_probs.double()
    counts = is_kept
    if target.support == "renormalized":
        log_p = log_p - log_p.logsumexp(1, keepdim=True)
    elif target.support == "tail":
        assert log_tail is not None
        log_p = torch.cat([log_p, target.log_tail.double().unsqueeze(1)], 1)
        log_q = torch.cat([log_q, log_tail.unsqueeze(1)], 1)
        counts = torch.cat([is_kept, torch.ones_like(is_kept[:, :1])], 1)
    log_p = log_p.masked_fill(~counts, -torch.inf)
    log_q = log_q.masked_fill(~counts, -torch.inf)
    log_q = _same_where_close(log_q, log_p, target.log_probs.dtype)
    least = math.log(torch.finfo(log_p.dtype).tiny)
    log_p, log_q = log_p.clamp(min=least), log_q.clamp(min=least)
    classes = Classes(
        log_p.exp(), log_q.exp(), lambda: log_p - log_q, lambda _: torch.empty_like(log_p)
    )
    values, pulls, constant = _pulls(row, classes, sums_to_one=target.support != "raw")
    q, total = classes.student, pulls.sum(1, keepdim=True)
    gradient = pulls - q * total
    if target.support == "tail":
        of_tail, tail = gradient[:, -1], q[:, -1]
        slope = (of_tail / tail).clamp(-_STEEPEST, _STEEPEST)
        return values.sum(1), slope, gradient[:, :-1]
    slope = torch.zeros_like(total).squeeze(1)
    if target.support == "raw":
        mass = q.sum(1, keepdim=True)
        values = values - row.balance * (classes.teacher - q)
        gradient = gradient + constant * q * (1 - mass)
        slope = -(total + constant * mass).squeeze(1)
    return values.sum(1), slope, gradient


def _pulls(
    row: Divergence, classes: Classes, *, sums_to_one: bool
) -> tuple[Tensor, Tensor, Tensor | float]:
    """Summands of the value, ``q (dl/dq - constant)``, and the constant.

    Where both models' classes sum to one, the summands of both KLs are of second order in the log
    ratio: the value of alike models is no difference of larger numbers.
    """
    p, q = classes.teacher, classes.student
    value, slope = row.evaluate(classes)
    gap: Tensor | float = p - q if sums_to_one else 0.0
    if slope is None:
        return value - gap, q - p, row.constant
    value, slope = value * row.scales.value, slope * row.scales.slope
    if row.of_top_ratio != 0:
        value = value + gap
    if row.head_mass is None:
        return value, q * slope, row.constant
    forward, _ = forward_kl_summands(classes)
    blend = _blend(classes, row.head_mass)
    value = blend * (forward - gap) + (1 - blend) * value
    return value, blend * (q - p) + (1 - blend) * q * slope, (1 - 2 * blend) * row.constant


def _same_where_close(log_q: Tensor, log_p: Tensor, stored: torch.dtype) -> Tensor:
    """The student's log-probs, the teacher's own where both are the same in the stored dtype."""
    window = _RESOLUTION * torch.finfo(stored).eps * log_p.abs().clamp(min=1.0)
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
class KeptPlan:
    """A term on kept ids.

    Attributes:
        term: with its coefficient.
        key: what tells it from others of one objective.
        support: of a top-k.
        target: of all tokens (of a chunk's, once cut); None to choose it from the teacher.
        top_k: how many ids to choose.
    """

    term: WeightedDivergence
    key: str
    support: Support
    target: TopKTarget | SampledTarget | None
    top_k: int | None

    @property
    def needs_rest(self) -> bool:
        """Whether the student's softmax over the whole vocabulary matters."""
        return isinstance(self.target, SampledTarget) or self.support != "renormalized"

    @property
    def has_mass(self) -> bool:
        """Whether the kept ids have a mass of the teacher's."""
        return not isinstance(self.target, SampledTarget)

    @property
    def mass_key(self) -> str:
        """Name of that mass."""
        return f"{self.key}/mass"

    def of_rows(self, rows: Rows, chunk: slice) -> KeptPlan:
        """The plan for the counted tokens of a chunk."""
        target = self.target
        if isinstance(target, TopKTarget):
            target = replace(
                target,
                ids=rows.take(target.ids, chunk),
                log_probs=rows.take(target.log_probs, chunk),
                log_tail=rows.take(target.log_tail, chunk),
            )
        elif isinstance(target, SampledTarget):
            target = replace(
                target, ids=rows.take(target.ids, chunk), weights=rows.take(target.weights, chunk)
            )
        return replace(self, target=target)


@dataclass(frozen=True)
class SolvedPlan:
    """A plan with its target, value and gradient."""

    kept: KeptTerm
    row: RowGradient

    @property
    def kept_mass(self) -> Tensor:
        """The teacher's mass on the kept ids, ``[N]`` fp64."""
        assert isinstance(self.kept.target, TopKTarget)
        return self.kept.target.log_probs.double().exp().sum(1)


def solve_plans(
    plans: Sequence[KeptPlan],
    raw: Mapping[Model, Tensor],
    rules: Mapping[Model, LogitRule],
    shard: VocabShard,
    group: dist.ProcessGroup | None,
) -> list[SolvedPlan]:
    """Value and gradient of each plan from raw outputs over the shard's real columns.

    Collective: that of `solve_kept` for each plan, and that of `select` once if one is to choose.
    """
    chosen = _choose([plan for plan in plans if plan.target is None], raw, rules, shard, group)
    solved = []
    for plan in plans:
        target = plan.target
        if target is None:
            assert plan.top_k is not None
            kept = _first(chosen[plan.term.temperature], plan.top_k)
            target = TopKTarget(kept.ids, kept.log_probs, kept.log_tail, plan.support)
        term = KeptTerm(plan.term, target)
        row = solve_kept(term, raw["student"], rules["student"], shard, group)
        solved.append(SolvedPlan(term, row))
    return solved


def _choose(
    plans: Sequence[KeptPlan],
    raw: Mapping[Model, Tensor],
    rules: Mapping[Model, LogitRule],
    shard: VocabShard,
    group: dist.ProcessGroup | None,
) -> dict[float, Kept]:
    """The largest top-k that any plan asks for, at each of their temperatures."""
    if not plans:
        return {}
    k = max(plan.top_k or 0 for plan in plans)
    temperatures = list(dict.fromkeys(plan.term.temperature for plan in plans))
    found = select(raw["teacher"], rules["teacher"], shard, group, k=k, temperatures=temperatures)
    return dict(zip(temperatures, found, strict=True))


def _first(kept: Kept, k: int) -> Kept:
    """The first of more kept ids; the others count with the tail."""
    if k >= kept.ids.shape[1]:
        return kept
    rest = torch.cat([kept.log_probs[:, k:], kept.log_tail.unsqueeze(1)], 1)
    return Kept(kept.ids[:, :k], kept.log_probs[:, :k], rest.logsumexp(1))

"""Terms on kept ids in the chunked executor: given beforehand, or chosen from a live teacher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.ops.classes import Model
from megatron_distill.ops.divergence import WeightedDivergence
from megatron_distill.ops.kept_divergence import (
    KeptTerm,
    RowGradient,
    SampledTarget,
    Support,
    TopKTarget,
    solve_kept,
)
from megatron_distill.ops.logits import LogitRule, Rows
from megatron_distill.ops.topk import Kept, select
from megatron_distill.ops.vocab import VocabShard

__all__ = ["KeptPlan", "SolvedPlan", "solve_plans"]


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

"""A micro-batch of four samples with three teachers, its float64 oracle, and runs on shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.losses import (
    SampleTeachers,
    Term,
    TermTeachers,
    several_teachers_objective,
)
from megatron_distill.losses.several_teachers import TeacherSums
from megatron_distill.ops import VocabShard
from megatron_distill.signals import HiddenState, Recorded, Signal, TopK
from tests.reference import divergences
from tests.reference.distillation import cross_entropy

SAMPLES, LENGTH, VOCABULARY, HIDDEN = 4, 6, 53, 8
TOKENS = SAMPLES * LENGTH
SIZES = {"code": 10, "law": 6, "math": 12}


@dataclass(frozen=True)
class Inputs:
    """Tensors of the student and the teachers, fp64; some tokens have no label."""

    hidden_NH: Tensor
    weight_GH: Tensor
    teachers: dict[str, tuple[Tensor, Tensor]]
    labels_N: Tensor
    ce_weights_N: Tensor
    kd_weights_N: Tensor

    @classmethod
    def random(cls, seed: int = 0) -> Inputs:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        ce_weights = torch.rand(TOKENS, generator=generator) / TOKENS
        kd_weights = torch.rand(TOKENS, generator=generator) / TOKENS
        ce_weights[::5] = 0
        kd_weights[::7] = 0
        return cls(
            normal(TOKENS, HIDDEN),
            normal(VOCABULARY, HIDDEN) * 0.7,
            {
                name: (normal(TOKENS, size), normal(VOCABULARY, size) * 0.7)
                for name, size in SIZES.items()
            },
            torch.randint(VOCABULARY, (TOKENS,), generator=generator),
            ce_weights,
            kd_weights,
        )

    def logits(self, name: str) -> Tensor:
        hidden, weight = self.teachers[name]
        return hidden @ weight.t()

    def samples(
        self, names: Sequence[str | None], elsewhere: frozenset[str] = frozenset()
    ) -> SampleTeachers:
        trained = (self.ce_weights_N != 0) | (self.kd_weights_N != 0)
        rows = trained.nonzero().squeeze(1)
        ends = torch.searchsorted(rows, torch.arange(1, SAMPLES + 1) * LENGTH).tolist()
        return SampleTeachers(
            tuple(names),
            torch.arange(SAMPLES).repeat_interleave(LENGTH),
            tuple(ends),
            rows,
            elsewhere=elsewhere,
        )


@dataclass(frozen=True)
class Result:
    total: Tensor
    report: Mapping[str, Tensor]
    sums: Mapping[str, TeacherSums]
    hidden_gradient: Tensor
    weight_gradient: Tensor


def recorded(inputs: Inputs, name: str, k: int, terms: Sequence[Term]) -> Recorded:
    """The signal of a store with k ids of a teacher, for each term at its temperature."""
    by_term = []
    for term in terms:
        log_probs = (inputs.logits(name) / term.temperature).log_softmax(1)
        first = log_probs.topk(min(k, term.top_k or k), 1)
        rest = log_probs.scatter(1, first.indices, -torch.inf).logsumexp(1)
        by_term.append(TopK(first.indices, first.values, rest))
    whole = inputs.logits(name).log_softmax(1)
    return Recorded(
        tuple(by_term),
        -(whole.exp() * whole).sum(1),
        whole.gather(1, inputs.labels_N.unsqueeze(1)).squeeze(1),
        names=tuple(term.name for term in terms),
    )


def on_ids(log_probs: Tensor, ids: Tensor, term: Term) -> Tensor:
    """Log-probabilities of the classes of a term on K ids: with their tail, or renormalised."""
    inside = log_probs.gather(1, ids)
    if term.support == "renormalized":
        return inside.log_softmax(1)
    rest = log_probs.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)
    return torch.cat([inside, rest], 1)


def target(inputs: Inputs, term: Term, names: Sequence[str | None]) -> Tensor:
    """Log-probabilities ``[N, G]`` of a term's target at its temperature, by its definition."""

    def tempered(name: str) -> Tensor:
        return (inputs.logits(name) / term.temperature).log_softmax(1)

    sample_N = torch.arange(SAMPLES).repeat_interleave(LENGTH)
    teachers = term.teachers
    if teachers is None:
        own = [names[sample] for sample in sample_N.tolist()]
        rows = [tempered(name)[row] for row, name in enumerate(own) if name is not None]
        return torch.stack(rows)
    members = torch.stack([tempered(name) for name in teachers.names])
    if len(teachers.names) == 1:
        return members[0]
    weights = shares(inputs, teachers).t()[:, sample_N, None]
    if teachers.mixture == "arithmetic":
        return (weights * members.exp()).sum(0).log()
    if teachers.mixture == "geometric":
        return (weights * members).sum(0).log_softmax(1)
    log_q = (inputs.hidden_NH @ inputs.weight_GH.t() / term.temperature).log_softmax(1)
    losses = torch.stack([_divergence(term, member, log_q) for member in members])
    weighted = losses * inputs.kd_weights_N.double()
    choice = weighted.view(len(members), SAMPLES, LENGTH).sum(2).argmin(0)
    return members[choice[sample_N], torch.arange(TOKENS)]


def shares(inputs: Inputs, teachers: TermTeachers) -> Tensor:
    """The share of each teacher on each sample, ``[b, M]``, by its definition."""
    fixed = torch.tensor([weight for _, weight in teachers.weights], dtype=torch.float64)
    found = []
    for sample in range(SAMPLES):
        own = slice(sample * LENGTH, (sample + 1) * LENGTH)
        kd_weights = inputs.kd_weights_N[own].double()
        scores = []
        for name in teachers.names if teachers.score else ():
            log_p = inputs.logits(name)[own].log_softmax(1)
            of_tokens = {
                "cross_entropy": log_p[torch.arange(LENGTH), inputs.labels_N[own]],
                "entropy": (log_p.exp() * log_p).sum(1),
                "top_probability": log_p.exp().amax(1),
            }[teachers.score or ""]
            scores.append((kd_weights * of_tokens).sum() / kd_weights.sum())
        scaled = fixed * (teachers.alpha * torch.stack(scores)).exp() if scores else fixed
        found.append(scaled / scaled.sum())
    return torch.stack(found)


def _divergence(term: Term, log_p: Tensor, log_q: Tensor) -> Tensor:
    oracle = getattr(divergences, term.divergence)
    value: Tensor = oracle(log_p, log_q, **term.parameters)
    return value


def solve(inputs: Inputs, terms: Sequence[Term], names: Sequence[str | None]) -> Result:
    """The oracle: whole matrices, autograd."""
    hidden = inputs.hidden_NH.clone().requires_grad_()
    weight = inputs.weight_GH.clone().requires_grad_()
    logits = hidden @ weight.t()
    ce = (inputs.ce_weights_N.double() * cross_entropy(logits, inputs.labels_N)).sum()
    report = {"ce": ce}
    total = ce
    for term in terms:
        log_q = (logits / term.temperature).log_softmax(1)
        values = _divergence(term, target(inputs, term, names), log_q)
        report[term.name] = (inputs.kd_weights_N.double() * values).sum() * term.temperature_factor
        total = total + term.weight * report[term.name]
    gradients = torch.autograd.grad(total, (hidden, weight), retain_graph=True)
    report["kd"] = total - ce
    report = {name: value.detach() for name, value in report.items()}
    return Result(total.detach(), report, {}, *gradients)


def on_shard(
    rank: int,
    world: int,
    inputs: Inputs,
    terms: Sequence[Term],
    names: Sequence[str | None],
    dtype: torch.dtype = torch.float64,
    stored: Mapping[str, int] | None = None,
    *,
    elsewhere: frozenset[str] = frozenset(),
) -> Result:
    """The objective on this rank's columns; the gradient on the weight is that of the shard.

    stored: ids per token of the teachers that are recorded.
    """
    shard = VocabShard.for_rank(VOCABULARY, -(-VOCABULARY // (4 * world)) * 4 * world, rank, world)
    padded = torch.full((shard.width * world - VOCABULARY, 1), torch.nan, dtype=torch.float64)

    def own(matrix: Tensor) -> Tensor:
        rows = torch.cat([matrix, padded.expand(-1, matrix.shape[1])])
        return rows[shard.start : shard.stop].to(dtype)

    hidden = inputs.hidden_NH.to(dtype).requires_grad_()
    weight = own(inputs.weight_GH).requires_grad_()
    signals: dict[str, Signal] = {
        name: HiddenState(states.to(dtype), own(head))
        for name, (states, head) in inputs.teachers.items()
    }
    for name, k in (stored or {}).items():
        served = [term for term in terms if not term.teachers or name in term.teachers.names]
        signals[name] = recorded(inputs, name, k, served)
    total, report, sums = several_teachers_objective(
        HiddenState(hidden, weight),
        signals,
        inputs.labels_N,
        samples=inputs.samples(names, elsewhere),
        ce_weights=inputs.ce_weights_N,
        kd_weights=inputs.kd_weights_N,
        terms=terms,
        chunk_tokens=5,
        shard=shard,
        group=dist.group.WORLD if world > 1 else None,
    )
    gradients = torch.autograd.grad(total, (hidden, weight))
    return Result(total.detach(), report, sums, *gradients)

"""One balanced step of small whole models, and the formula of its total by autograd."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_distill.losses import (
    BalanceMode,
    BalanceState,
    RatioBalance,
    Term,
    ValueSchedule,
)
from megatron_distill.runtime.batch import Batch, StepBatches
from tests.distributed.megatron_world import (
    megatron_groups,
    objective_of,
    parts_of,
    rows_of,
    small_architecture,
    student_of,
    teacher_of,
)
from tests.reference.balancing import balanced_total
from tests.reference.distillation import cross_entropy, forward_kl

if TYPE_CHECKING:
    from megatron_distill.models.gpt import HiddenStateGPT
    from megatron_distill.runtime.groups import Groups
    from megatron_distill.train.balancing import Balancing
    from megatron_distill.train.objective import TokenObjective
    from megatron_distill.train.step import Student
    from megatron_distill.train.teachers.live import OnlineTeacher

LENGTH, SAMPLES, VOCABULARY = 32, 4, 208
CE_WEIGHT, ALPHA = 0.8, 0.6
WEIGHTS, TEMPERATURES = (0.5, 1.5), (1.0, 2.0)
TERMS = (
    Term(weight=WEIGHTS[0]),
    Term(weight=WEIGHTS[1], temperature=2.0, scale_by_temperature_squared=True),
)
RATIOS = RatioBalance()
Parts = dict[tuple[str, tuple[int, ...]], Tensor]


@dataclass(frozen=True)
class Case:
    """The balancing mode of a step, its layout and its models."""

    mode: BalanceMode = "magnitude"
    per_micro_batch: bool = False
    layout: tuple[tuple[str, Any], ...] = ()
    micro_batch: int = 1
    recompute: str = "none"
    dropout: float = 0.0
    same_teacher: bool = False
    labels: bool = True
    overlap: bool = False
    tied: bool = False
    ratios: RatioBalance = RATIOS


def whole_batch(case: Case) -> Batch:
    """Four sequences; some positions train one loss only, and one sequence has no trained label."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 200, (SAMPLES, LENGTH), generator=generator)
    ce_mask, kd_mask = (
        torch.rand(SAMPLES, LENGTH, generator=generator) < share for share in (0.7, 0.5)
    )
    ce_mask[1] = False
    kd_mask[3] = False
    return Batch(
        tokens_bs=tokens,
        labels_bs=tokens.roll(-1, 1),
        ce_mask_bs=ce_mask & case.labels,
        kd_mask_bs=kd_mask,
        position_ids_bs=torch.arange(LENGTH).repeat(SAMPLES, 1),
        document_ids_bS=torch.zeros(SAMPLES, LENGTH, dtype=torch.int64),
        sequence_index_s=torch.arange(LENGTH),
        sample_ids_b=torch.arange(SAMPLES),
        isolate_documents=False,
    )


def step_batches(case: Case, *, rank: int, ranks: int, context: tuple[int, int]) -> StepBatches:
    """The part of the whole batch on one data-parallel rank."""
    whole = whole_batch(case)
    share = SAMPLES // ranks
    starts = range(rank * share, (rank + 1) * share, case.micro_batch)
    return StepBatches(
        tuple(
            rows_of(whole, slice(start, start + case.micro_batch)).context_shard(*context)
            for start in starts
        ),
        ce_tokens=int(whole.ce_mask_bs.sum()),
        kd_tokens=int(whole.kd_mask_bs.sum()),
        positions=SAMPLES * LENGTH,
    )


def build(case: Case, groups: Groups) -> tuple[Student, OnlineTeacher, TokenObjective, Balancing]:
    """Student with Megatron's gradient buffers, teacher, objective and balancing of a case."""
    from megatron_distill.train.balancing import Balancing, Schedules

    shape = {"init_std": 0.2, "vocab_size": VOCABULARY}
    own = small_architecture(
        **shape,
        hidden_dropout=case.dropout,
        attention_dropout=case.dropout,
        tied_embeddings=case.tied,
    )
    student = student_of(
        own,
        groups,
        length=LENGTH,
        positions=SAMPLES * LENGTH,
        recompute=case.recompute,
        overlap=case.overlap,
    )
    other, seed = (
        (own, 11) if case.same_teacher else (small_architecture(**shape, num_layers=2), 12)
    )
    teacher = teacher_of(other, groups, length=LENGTH, seed=seed)
    objective = objective_of(
        own, groups, ce_weight=CE_WEIGHT, terms=TERMS, metrics=("student_entropy",), chunk_tokens=24
    )
    balancing = Balancing(
        mode=case.mode,
        schedules=Schedules(
            ce=ValueSchedule.unchanging(CE_WEIGHT),
            terms=tuple(map(ValueSchedule.unchanging, WEIGHTS)),
            temperatures=tuple(map(ValueSchedule.unchanging, TEMPERATURES)),
            alpha=ValueSchedule.unchanging(ALPHA),
        ),
        ratios=case.ratios,
        per_micro_batch=case.per_micro_batch,
    )
    return student, teacher, objective, balancing


@dataclass(frozen=True)
class Found:
    """One rank's result of a step."""

    report: dict[str, float]
    raw: tuple[float, ...] | None
    logged: dict[str, float]
    gradients: Parts


def balanced(rank: int, world: int, case: Case) -> Found:
    """Run the step as training does, without the optimizer."""
    with megatron_groups(**dict(case.layout)) as groups:
        from megatron_distill.train.step import run_student

        student, teacher, objective, balancing = build(case, groups)
        step = step_batches(
            case,
            rank=groups.data.rank(),
            ranks=groups.data.size(),
            context=(groups.context.rank(), groups.context.size()),
        )
        signals = teacher.signals(step.micro_batches)
        prepared = balancing.prepare(
            student, signals, objective, step, steps_done=0, state=BalanceState()
        )
        means = run_student(student, signals, prepared.objectives, step)
        raw, _, logged = prepared.read([float(one) for one in prepared.tensors(means)])
        return Found(
            report={name: float(value) for name, value in means.items()},
            raw=None if raw is None else raw.sizes,
            logged=logged,
            gradients=_gradients(student.chunks, groups),
        )


def _gradients(chunks: Any, groups: Groups) -> Parts:
    """Every gradient by its place in the model, reduced by Megatron at the end of the schedule."""
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data = parameter.main_grad
    return parts_of(chunks, groups)


@dataclass(frozen=True)
class Oracle:
    """The losses and gradients of the whole batch in one process, by autograd."""

    total: float
    losses: tuple[float, ...]
    gradients: Parts


def formula(rank: int, world: int, case: Case, parts: list[slice] | None) -> Oracle:
    """The balanced total of the whole batch, or of its parts separately, with autograd."""
    with megatron_groups() as groups:
        student, teacher, _, _ = build(case, groups)
        batch = whole_batch(case)
        counts = [int(mask.sum()) for mask in (batch.ce_mask_bs, batch.kd_mask_bs)]
        hidden = _hidden(student.chunks[0], batch)
        logits = hidden.double() @ student.chunks[0].head_weight()[:VOCABULARY].double().t()
        with torch.no_grad():
            states = _hidden(teacher.model, batch).double()
            taught = states @ teacher.model.head_weight()[:VOCABULARY].double().t()
        ce_N = cross_entropy(logits, batch.labels_bs.flatten())
        terms_N = [forward_kl(logits, taught, term.temperature) for term in TERMS]
        masks = [mask.flatten() for mask in (batch.ce_mask_bs, batch.kd_mask_bs)]
        factors = [term.temperature_factor for term in TERMS]

        def losses(kept: Tensor, ce_count: float, kd_count: float) -> list[Tensor]:
            ce = ce_N[masks[0] & kept].sum() / max(ce_count, 1)
            return [ce] + [
                factor * term_N[masks[1] & kept].sum() / max(kd_count, 1)
                for term_N, factor in zip(terms_N, factors, strict=True)
            ]

        everything = torch.ones_like(masks[0])
        ce, *terms = losses(everything, *counts)
        if parts is not None:
            total = torch.zeros((), dtype=torch.float64)
            for rows in parts:
                total = total + _part_of_total(rows, masks, counts, losses)
        elif case.mode == "gradient_norm":
            total = _by_gradients(ce, terms, hidden)
        else:
            clamp = case.ratios.clamp or float("inf")
            total = balanced_total(
                ce, terms, ce_weight=CE_WEIGHT, term_weights=WEIGHTS, alpha=ALPHA, clamp=clamp
            )
        total.backward()
        found = tuple(float(loss.detach()) for loss in (ce, *terms))
        return Oracle(float(total.detach()), found, _gradients(student.chunks, groups))


def _hidden(model: HiddenStateGPT, batch: Batch) -> Tensor:
    from megatron_distill.models.gpt import run_model

    hidden_sbh = run_model(model, batch, context_size=1)
    return hidden_sbh.transpose(0, 1).reshape(-1, hidden_sbh.shape[-1])


def _part_of_total(rows: slice, masks: list[Tensor], counts: list[int], losses: Any) -> Tensor:
    """A micro-batch's total as published, its losses means over its own tokens.

    Its share of each global mean is its share of that mask's tokens, which takes the place of an
    average over micro-batches.
    """
    kept = torch.zeros(SAMPLES, LENGTH, dtype=torch.bool)
    kept[rows] = True
    kept = kept.flatten()
    own = [int((mask & kept).sum()) for mask in masks]
    ce, *terms = losses(kept, *own)
    kd = sum(weight * term for weight, term in zip(WEIGHTS, terms, strict=True))
    task = CE_WEIGHT * ce
    ratio = float((task / kd).detach()) if own[0] and own[1] else 1.0
    shares = [local / all_ for local, all_ in zip(own, counts, strict=True)]
    total: Tensor = task * shares[0] + ALPHA * ratio * kd * shares[1]
    return total


def _by_gradients(ce: Tensor, terms: list[Tensor], hidden: Tensor) -> Tensor:
    """The total with norms of gradients in place of values."""
    kd = sum(weight * term for weight, term in zip(WEIGHTS, terms, strict=True))
    norms = [torch.autograd.grad(loss, hidden, retain_graph=True)[0].norm() for loss in (ce, kd)]
    total: Tensor = CE_WEIGHT * ce + ALPHA * float(CE_WEIGHT * norms[0] / norms[1]) * kd
    return total

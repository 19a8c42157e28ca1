"""The training objective with several teachers: each term has one, a mean of them, or a choice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.losses.checks import resolve_shard
from megatron_distill.losses.mean_on_records import MeanOnRecords
from megatron_distill.losses.objective import fused_linear_objective
from megatron_distill.losses.teacher_scores import TeacherScores
from megatron_distill.losses.terms import Term, TermTeachers, check_distinct
from megatron_distill.ops.fused_linear import Partition
from megatron_distill.ops.joint_logits import ArithmeticMean, ChosenLogits, GeometricMean
from megatron_distill.ops.vocab import VocabShard
from megatron_distill.ops.workspace import chunk_tokens_for
from megatron_distill.signals import (
    HiddenState,
    IdTarget,
    LogitSource,
    Signal,
    TermView,
)

__all__ = ["SampleTeachers", "TeacherSums", "several_teachers_objective"]


@dataclass(frozen=True)
class SampleTeachers:
    """The samples of a micro-batch of one rank, and the teacher of each.

    Attributes:
        names: the teacher of each sample, None for one without labels; ``()``: no term needs it.
        sample_N: ``[N]`` int64, the sample of each token.
        ends: number of trained tokens up to the end of each sample, in the order of ``rows``.
        rows: ``[n]`` int64, the trained tokens, ascending; those of a sample are neighbours.
        context: the ranks with further tokens of the same samples; None for none.
        elsewhere: teachers whose terms are none of these, such as one with another tokenizer.
    """

    names: tuple[str | None, ...]
    sample_N: Tensor
    ends: tuple[int, ...]
    rows: Tensor
    context: dist.ProcessGroup | None = None
    elsewhere: frozenset[str] = frozenset()

    def parts(self) -> Iterator[tuple[str | None, Tensor]]:
        """Each teacher in the order of names, with the trained tokens of its samples."""
        present = sorted({name for name in self.names if name is not None})
        if len(present) < 2:
            yield (present[0] if present else None), self.rows
            return
        starts = (0, *self.ends[:-1])
        for name in present:
            slices = [
                self.rows[start:end]
                for own, start, end in zip(self.names, starts, self.ends, strict=True)
                if own == name
            ]
            yield name, torch.cat(slices)


@dataclass(frozen=True)
class TeacherSums:
    """Sums of one teacher, or of one mixture, detached scalars.

    A label counts once for each target of the objective that it is trained on.

    Attributes:
        kd: its share of the distillation loss.
        labels: sum of ``kd_weights`` of its labels.
        agreement: sum of these weights where its top token is the student's; None if unknown.
        shares: of a mixture, for each of its teachers the sum of these weights times its share.
    """

    kd: Tensor
    labels: Tensor
    agreement: Tensor | None
    shares: Mapping[str, Tensor] = field(default_factory=dict)

    def __add__(self, other: TeacherSums) -> TeacherSums:
        is_known = self.agreement is not None and other.agreement is not None
        return TeacherSums(
            self.kd + other.kd,
            self.labels + other.labels,
            self.agreement + other.agreement if is_known else None,  # type: ignore[operator]
            {name: share + other.shares[name] for name, share in self.shares.items()},
        )


def several_teachers_objective(
    student: HiddenState,
    signals: Mapping[str, Signal],
    labels: Tensor,
    *,
    samples: SampleTeachers,
    ce_weights: Tensor,
    kd_weights: Tensor,
    terms: Sequence[Term],
    ce_coefficient: float = 1.0,
    partition: Partition | None = None,
    group: dist.ProcessGroup | None = None,
    **given: Any,
) -> tuple[Tensor, dict[str, Tensor], dict[str, TeacherSums]]:
    """`fused_linear_objective` where each term has a teacher, or several, of its own.

    A term without `Term.teachers` is trained on the teacher of each sample, and on none of a sample
    whose teacher is ``samples.elsewhere``. ``signals`` holds a
    signal of all N tokens for each teacher that a term or a sample of this micro-batch needs.
    Returns the total, the report and the sums of each teacher. Metrics of the teacher, such as
    ``teacher_ce``, are those of the first term's target. ``given`` are further arguments of
    `fused_linear_objective`, among them the vocabulary shard.

    The tokens are divided by the teacher of their sample. Within each part every target has a fused
    pass, with the label loss in the first one. With a single target this is the pass of
    `fused_linear_objective` itself. No logits of a mean or choice exist but those of a chunk.
    `lowest_loss` takes one pass without gradient for each teacher, then one with the choice.

    A teacher may have recorded ids instead of logits. Its signal then has the targets of its terms
    by their names, see `Recorded.names`. A mean with one of them is a target on its ids, see
    `MeanOnRecords`; `lowest_loss` then takes a pass with gradient for each teacher.

    A mean with a score has shares of each sample, see `TeacherScores`. Each teacher of such means
    takes one more product of its hidden states with its head, without gradient.

    Collective: those of `fused_linear_objective` in each pass, over ``group``, and of
    `ArithmeticMean` or `MeanOnRecords`; for scores those of `TeacherScores`. For `lowest_loss`
    also one all-reduce over ``samples.context`` of 8 bytes per sample and teacher, and one
    broadcast over ``group`` of 8 bytes per sample.

    Raises:
        ValueError: as `fused_linear_objective`, `MeanOnRecords` and `TeacherScores`.
    """
    check_distinct(terms)
    # Once: under sequence parallelism a teacher's hidden states are gathered here.
    signals = {name: _with_logits(signals[name]) for name in sorted(signals)}
    passes = _FusedPasses(
        student,
        labels,
        {"ce_weights": ce_weights, "kd_weights": kd_weights, "group": group, **given},
        partition,
    )
    passes = replace(passes, shares=passes.scored(terms, signals, samples))
    total: Tensor | None = None
    report: dict[str, Tensor] = {}
    found: dict[str, TeacherSums] = {}
    is_routed = any(term.teachers is None for term in terms)
    for name, rows in samples.parts() if is_routed else [(None, samples.rows)]:
        coefficient = ce_coefficient
        reported: set[str] = set()
        for number, (target, own) in enumerate(
            _targets(terms, None if name in samples.elsewhere else name).items()
        ):
            if target is not None and target[0].mixture == "lowest_loss":
                one, entries, sums = passes.of_choice(
                    target[0], own[0], signals, rows, samples, coefficient
                )
            else:
                one, entries, sums = passes.of_target(target, own, signals, rows, coefficient)
            total = one if total is None else total + one
            if number:  # the label loss and the metrics are in the first pass that has them
                wanted = {"kd", *(term.name for term in own)}
                entries = {
                    key: value
                    for key, value in entries.items()
                    if key in wanted or key not in reported
                }
            reported |= entries.keys()
            coefficient = 0.0
            for key, value in entries.items():
                report[key] = report[key] + value if key in report else value
            for key, teacher in sums.items():
                found[key] = found[key] + teacher if key in found else teacher
    assert total is not None
    return total, report, found


# A target with the temperature at which it is defined; None without a term.
_Target = tuple[TermTeachers, float | str | None]


def _targets(terms: Sequence[Term], name: str | None) -> dict[_Target | None, list[Term]]:
    """The terms by target, for tokens whose sample has the teacher ``name``.

    Terms at different temperatures have different arithmetic means, and different choices.
    """
    found: dict[_Target | None, list[Term]] = {}
    for term in terms:
        teachers = term.teachers
        if teachers is None:
            if name is None:
                continue  # these tokens have no labels, or a teacher of other terms
            teachers = TermTeachers.of({name: 1.0})
        at: float | str | None = None
        if len(teachers.names) > 1 and teachers.mixture == "arithmetic":
            at = term.temperature
        elif teachers.mixture == "lowest_loss":
            at = term.name
        found.setdefault((teachers, at), []).append(term)
    return found or {None: []}


@dataclass(frozen=True)
class _FusedPasses:
    """Fused passes over some tokens of one micro-batch."""

    student: HiddenState
    labels: Tensor
    given: Mapping[str, Any]
    partition: Partition | None
    shares: Mapping[TermTeachers, Tensor] = field(default_factory=dict)

    def scored(
        self, terms: Sequence[Term], signals: Mapping[str, Signal], samples: SampleTeachers
    ) -> dict[TermTeachers, Tensor]:
        """The shares ``[N, M]`` of the teachers of each mean that has a score."""
        wanted = {term.teachers for term in terms if term.teachers and term.teachers.score}
        if not wanted:
            return {}
        shard, group, chunk_tokens = self._columns
        scores = TeacherScores(
            signals,
            self.labels,
            self.given["kd_weights"],
            samples.rows,
            Partition(samples.sample_N, len(samples.ends)),
            samples.context,
            shard,
            group,
            chunk_tokens,
        )
        # In the order of terms: all ranks communicate alike.
        found: dict[TermTeachers, Tensor] = {}
        for term in terms:
            if term.teachers in wanted and term.teachers not in found:
                found[term.teachers] = scores.shares(term.teachers)
        return found

    def of_target(
        self,
        target: _Target | None,
        terms: Sequence[Term],
        signals: Mapping[str, Signal],
        rows: Tensor,
        ce_coefficient: float,
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, TeacherSums]]:
        """Total, report and sums of the terms with one teacher or one mean of teachers."""
        signal = None if target is None else self._signal(target, terms, signals, rows)
        total, report = self._run(self.student, signal, terms, rows, ce_coefficient, self.partition)
        if target is None:
            return total, report, {}
        whole = {key: _overall(value, self.partition) for key, value in report.items()}
        weights = self.given["kd_weights"].index_select(0, rows)
        teachers, labels = target[0], weights.sum()
        shares: dict[str, Tensor] = {}
        if len(teachers.names) > 1:
            shares = {name: labels * share for name, share in teachers.weights}
        if teachers.score is not None:
            of_rows = weights.double() @ self.shares[teachers].index_select(0, rows)
            shares = dict(zip(teachers.names, of_rows.to(labels.dtype).unbind(), strict=True))
        sums = TeacherSums(whole["kd"], labels, whole.get("top1_agreement"), shares)
        return total, report, {"+".join(teachers.names): sums}

    def of_choice(
        self,
        teachers: TermTeachers,
        term: Term,
        signals: Mapping[str, Signal],
        rows: Tensor,
        samples: SampleTeachers,
        ce_coefficient: float,
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, TeacherSums]]:
        """Total, report and sums of a term with the teacher of the lowest loss on each sample."""
        members = [signals[name] for name in teachers.names]
        choice_b = self._lowest(term, members, rows, samples)
        choice_N = choice_b.index_select(0, samples.sample_N)
        sources = [member.logit_source() for member in members]
        if None in sources:
            return self._of_each(teachers, term, members, choice_N, rows, ce_coefficient)
        source = ChosenLogits(tuple(one for one in sources if one is not None), choice_N)
        count, outer = len(members), self.partition
        ids = choice_N if outer is None else outer.ids * count + choice_N
        parts = count * (1 if outer is None else outer.parts)
        total, split = self._run(
            self.student, _JointSignal(source), [term], rows, ce_coefficient, Partition(ids, parts)
        )
        by_part = {key: value[1:].view(-1, count) for key, value in split.items()}
        report = {
            key: value[0] if outer is None else torch.cat([value[:1], by_part[key].sum(1)])
            for key, value in split.items()
        }
        weights = self.given["kd_weights"].index_select(0, rows)
        chosen = choice_N.index_select(0, rows)
        sums = {
            name: TeacherSums(
                by_part["kd"][:, number].sum(),
                torch.where(chosen == number, weights, 0.0).sum(),
                by_part["top1_agreement"][:, number].sum(),
            )
            for number, name in enumerate(teachers.names)
        }
        return total, report, sums

    def _of_each(
        self,
        teachers: TermTeachers,
        term: Term,
        members: Sequence[Signal],
        choice_N: Tensor,
        rows: Tensor,
        ce_coefficient: float,
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, TeacherSums]]:
        """`of_choice` with a pass per teacher, where the tokens of all others have no weight."""
        total: Tensor | None = None
        report: dict[str, Tensor] = {}
        sums: dict[str, TeacherSums] = {}
        for number, (name, member) in enumerate(zip(teachers.names, members, strict=True)):
            weights = {
                key: torch.where(choice_N == number, self.given[key], 0.0)
                for key in ("ce_weights", "kd_weights")
            }
            own = replace(self, given={**self.given, **weights})
            target = TermTeachers.of({name: 1.0}), None
            one, entries, of_teacher = own.of_target(
                target, [term], {name: member}, rows, ce_coefficient
            )
            total = one if total is None else total + one
            # A metric that one teacher lacks would be that of a part of the tokens.
            report = {key: report[key] + entries[key] for key in report if key in entries}
            report = report or entries
            sums |= of_teacher
        assert total is not None
        return total, report, sums

    @torch.no_grad()
    def _lowest(
        self, term: Term, members: Sequence[Signal], rows: Tensor, samples: SampleTeachers
    ) -> Tensor:
        """The number of the member with the lowest loss of each sample, the first of equal ones."""
        detached = replace(
            self.student,
            hidden=self.student.hidden.detach(),
            weight=self.student.weight.detach(),
        )
        by_sample = Partition(samples.sample_N, len(samples.ends))
        losses_Mb = torch.stack(
            [
                self._run(detached, member, [term], rows, 0.0, by_sample)[1][term.name][1:]
                for member in members
            ]
        ).double()
        if samples.context is not None:
            dist.all_reduce(losses_Mb, group=samples.context)
        choice_b = losses_Mb.nan_to_num(nan=torch.inf).argmin(0)
        group = self.given["group"]
        if group is not None and group.size() > 1:
            # Sums over context ranks may be rounded in another order on each tensor rank.
            dist.broadcast(choice_b, group=group, group_src=0)
        return choice_b

    def _run(
        self,
        student: HiddenState,
        signal: Signal | None,
        terms: Sequence[Term],
        rows: Tensor,
        ce_coefficient: float,
        partition: Partition | None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        given = dict(self.given)
        if not student.hidden.requires_grad:
            given["weight_gradient_sum"] = None
        return fused_linear_objective(
            student.hidden,
            student.weight,
            signal,
            self.labels,
            terms=terms,
            ce_coefficient=ce_coefficient,
            student_softcap=student.logit_softcap,
            student_scale=student.logit_scale,
            rows=rows,
            partition=partition,
            **given,
        )

    def _signal(
        self,
        target: _Target,
        terms: Sequence[Term],
        signals: Mapping[str, Signal],
        rows: Tensor,
    ) -> Signal:
        teachers, temperature = target
        if len(teachers.names) == 1:
            return signals[teachers.names[0]]
        sources = [signals[name].logit_source() for name in teachers.names]
        if None in sources:
            return self._on_records(signals, rows).signal(teachers, terms)
        members = tuple(source for source in sources if source is not None)
        weights: tuple[float, ...] | Tensor = tuple(weight for _, weight in teachers.weights)
        if teachers.score is not None:
            weights = self.shares[teachers]
        if teachers.mixture == "geometric":
            return _JointSignal(GeometricMean(members, weights))
        assert isinstance(temperature, float)
        group: dist.ProcessGroup | None = self.given["group"]
        if group is not None and group.size() == 1:
            group = None
        return _JointSignal(ArithmeticMean(members, weights, temperature, group))

    def _on_records(self, signals: Mapping[str, Signal], rows: Tensor) -> MeanOnRecords:
        return MeanOnRecords(signals, rows, *self._columns, self.shares)

    @property
    def _columns(self) -> tuple[VocabShard, dist.ProcessGroup | None, int]:
        """This rank's columns, the ranks that share them, and the tokens of a chunk."""
        weight, chunk = self.student.weight, self.given.get("chunk_tokens")
        shard, group = resolve_shard(weight.shape[0], self.given.get("shard"), self.given["group"])
        return shard, group, chunk or chunk_tokens_for(shard.width, weight.device)


def _with_logits(signal: Signal) -> Signal:
    source = signal.logit_source()
    return signal if source is None else _JointSignal(source)


def _overall(value: Tensor, partition: Partition | None) -> Tensor:
    return value if partition is None else value[0]


@dataclass(frozen=True)
class _JointSignal:
    """Logits of one teacher or of several as a `Signal`."""

    source: LogitSource

    @property
    def tokens(self) -> int:
        """Number of tokens N."""
        return self.source.tokens

    def logit_source(self) -> LogitSource:
        """See `Signal`."""
        return self.source

    def targets(self, terms: Sequence[TermView]) -> Sequence[IdTarget] | None:  # noqa: ARG002
        """None: terms are between logits, or on ids chosen from them."""
        return None

    def token_statistics(self) -> Mapping[str, Tensor]:
        """Empty: all follow from the logits."""
        return {}

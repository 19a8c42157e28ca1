"""The loss of a micro-batch with several teachers, and the figures of each of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.losses import SampleTeachers, Term, several_teachers_objective
from megatron_distill.losses.several_teachers import TeacherSums
from megatron_distill.ops.fused_linear import Partition
from megatron_distill.runtime.batch import Batch
from megatron_distill.signals import HiddenState, Signal, SignalsByTeacher
from megatron_distill.train.metrics import part_of

__all__ = ["SeveralLoss", "TeacherFigures", "take_teacher_figures"]

_OF: Final = "|"
_KINDS: Final = ("kd", "labels", "agreement")
_SHARES: Final = {"kd": "kd_loss", "agreement": "top1_agreement"}
_SHARE: Final = "weight_"  # and the name of a teacher: its mean weight in a mixture
_UNITS: Final = 64  # weights of labels are multiples of 1/64

TeacherFigures = dict[str, dict[str, float]]


@dataclass(frozen=True)
class SeveralLoss:
    """The token losses of a run with several teachers.

    Attributes:
        names: of the teachers, in the order of their numbers in a batch.
        targets: names of the teachers and means that have figures of their own, and whether the
            most probable token of each is known.
        scored: the means whose shares follow scores, and their teachers.
        context: the ranks that share each sample; None for none.
        elsewhere: teachers whose terms are none of these: with a tokenizer of their own.
    """

    names: tuple[str, ...]
    targets: Mapping[str, bool]
    scored: Mapping[str, tuple[str, ...]]
    context: dist.ProcessGroup | None
    elsewhere: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        terms: Sequence[Term],
        names: Sequence[str],
        context: dist.ProcessGroup,
        *,
        elsewhere: frozenset[str] = frozenset(),
        drawn: Collection[str] = (),
    ) -> SeveralLoss:
        """The loss of these terms; a mean has figures under its teachers' names, joined by +.

        drawn: the teachers of whose ids the most probable one is unknown.
        """
        targets: dict[str, bool] = {}
        scored: dict[str, tuple[str, ...]] = {}
        for term in terms:
            routed = tuple(name for name in names if name not in elsewhere)
            own = routed if term.teachers is None else term.teachers.names
            if term.teachers is None or term.teachers.mixture == "lowest_loss":
                targets |= {name: name not in drawn for name in own}
            else:
                targets["+".join(own)] = not set(own) & set(drawn)
                if term.teachers.score is not None:
                    scored["+".join(own)] = own
        shared = context if context.size() > 1 else None
        return cls(tuple(names), targets, scored, shared, elsewhere)

    @property
    def report_names(self) -> tuple[str, ...]:
        """The entries that this loss adds to a report."""
        return tuple(
            f"{target}{_OF}{kind}"
            for target, is_known in self.targets.items()
            for kind in (
                *(_KINDS if is_known else _KINDS[:-1]),
                *(f"{_SHARE}{name}" for name in self.scored.get(target, ())),
            )
        )

    def __call__(
        self,
        student: HiddenState,
        signal: Signal | None,
        batch: Batch,
        *,
        names: Sequence[str],
        partition: Partition | None,
        **given: Any,
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Return the total, the report with the entries `names`, and those of `report_names`.

        Collective: those of `several_teachers_objective`.
        """
        assert isinstance(signal, SignalsByTeacher), "several teachers were asked"
        total, report, sums = several_teachers_objective(
            student,
            signal.by_teacher,
            batch.labels_bs.reshape(-1),
            samples=self._samples(batch),
            partition=partition,
            **given,
        )
        nothing = torch.zeros_like(report["ce"])
        report = {name: report.get(name, nothing) for name in names}
        return total, report, self._entries(sums, total)

    def _samples(self, batch: Batch) -> SampleTeachers:
        """The samples of a batch; the counts are read from its copy on the host."""
        size, length = batch.tokens_bs.shape
        host = batch.on_host.trained_rows_n
        assert host is not None, "the loader has looked for the trained rows"
        assert batch.trained_rows_n is not None
        ends = torch.searchsorted(host, torch.arange(1, size + 1) * length).tolist()
        sample_b = torch.arange(size, device=batch.tokens_bs.device)
        return SampleTeachers(
            tuple(self.names[number] if number >= 0 else None for number in batch.teacher_numbers),
            sample_b.repeat_interleave(length, output_size=size * length),
            tuple(ends),
            batch.trained_rows_n,
            self.context,
            self.elsewhere,
        )

    def _entries(self, sums: Mapping[str, TeacherSums], total: Tensor) -> dict[str, Tensor]:
        zero = total.detach().new_zeros(())
        entries = dict.fromkeys(self.report_names, zero)
        for target, one in sums.items():
            agreement = zero if one.agreement is None else one.agreement
            for kind, value in zip(_KINDS, (one.kd, one.labels, agreement), strict=True):
                entries[f"{target}{_OF}{kind}"] = value
            for name, value in one.shares.items():
                entries[f"{target}{_OF}{_SHARE}{name}"] = value
        return {name: entries[name] for name in self.report_names}


def take_teacher_figures(values: dict[str, float], kd_tokens: float) -> TeacherFigures:
    """Take the figures of the teachers out of a step's values.

    A teacher has the mean loss over its labels and their weighted number. It also has the share of
    them where its most probable token is the student's, if known. A mixture by scores has the mean
    weight of each of its teachers. `kd_tokens`: the divisor of the values. A teacher without
    labels has the number alone.
    """
    found: dict[str, dict[str, float]] = {}
    for key in [key for key in values if _OF in key]:
        target, _, kind = key.partition(_OF)
        found.setdefault(target, {})[kind] = values.pop(key)
    return {
        target: {"kd_tokens": round(own["labels"] * kd_tokens * _UNITS) / _UNITS}
        | (
            {
                _SHARES.get(kind, kind): part_of(value, own["labels"])
                for kind, value in own.items()
                if kind != "labels"
            }
            if own["labels"]
            else {}
        )
        for target, own in found.items()
    }

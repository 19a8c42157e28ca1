"""Several teachers: each runs in the micro-batches whose terms or samples need it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from megatron_distill.runtime.batch import Batch
from megatron_distill.signals import (
    OnDemand,
    Signal,
    Signals,
    SignalsByTeacher,
    Teacher,
    WithFeatures,
)
from megatron_distill.train.teachers.own_layout import OwnLayout
from megatron_distill.train.teachers.own_ranks import HeldOutAnswers, OwnRanksTeacher
from megatron_distill.train.teachers.resting import RestingTeacher
from megatron_distill.train.teachers.stored import StoredTeacher

__all__ = ["SeveralTeachers", "on_own_ranks"]


_ELSEWHERE: Final = (OwnRanksTeacher, HeldOutAnswers)
_ASKED_ALWAYS: Final = (StoredTeacher, *_ELSEWHERE)


@dataclass(frozen=True)
class SeveralTeachers:
    """Teachers by name, in the order of their numbers in a batch.

    A micro-batch has the signals of the teachers that a term names, and of those of its samples. A
    teacher that no sample of a step needs does not run in that step. A stored one, and one on ranks
    of its own, is called in every step, by all ranks together. It reads the records of its samples
    alone, or runs on them alone.

    Attributes:
        teachers: by name.
        named: the teachers that a term names; they run on every sample.
        has_routed_terms: whether a term is trained on the teacher of each sample.
        joint: the teachers that data-parallel ranks run together, as those with experts on several
            of them or with their own layout. Each rank then runs one where one of them needs it.
        own_tokens: the teachers with a tokenizer of their own, which read a batch's `teacher`.
    """

    teachers: Mapping[str, Teacher]
    named: frozenset[str]
    has_routed_terms: bool
    joint: frozenset[str] = frozenset()
    own_tokens: frozenset[str] = frozenset()

    def signals(self, batches: Sequence[Batch]) -> Signals:
        """One `SignalsByTeacher` per micro-batch; None on ranks whose stage needs none.

        Collective: those of the teachers that run, one after the other. First those on ranks of
        their own, stores, and then the live ones, each in the order of names. Which of them run
        follows from the samples, the same on all ranks that run a teacher together.
        """
        taken: dict[str, tuple[Mapping[int, int], Signals]] = {}
        wanted = [self.needed(batch) for batch in batches]
        running = sorted(self._always_asked.union(*wanted), key=self._turn)
        for place, name in enumerate(running):
            # The weights of the next teacher arrive while this one runs; two at most are there.
            for coming in (self.teachers[name] for name in running[place : place + 2]):
                if isinstance(coming, RestingTeacher):
                    coming.begin()
            own = [number for number, names in enumerate(wanted) if name in names]
            taken[name] = self._taken(name, batches, own)

        def at(micro_batch: int) -> Signal | WithFeatures | None:
            found: dict[str, Signal] = {}
            for name in sorted(wanted[micro_batch]):
                places, signals = taken[name]
                signal = signals[places[micro_batch]]
                assert not isinstance(signal, WithFeatures), "features have one teacher"
                if signal is not None:
                    found[name] = signal
            if not found and wanted[micro_batch]:
                return None
            return SignalsByTeacher(batches[micro_batch].tokens_bs.numel(), found)

        return OnDemand(len(batches), at)

    def _taken(
        self, name: str, batches: Sequence[Batch], wanted: Sequence[int]
    ) -> tuple[Mapping[int, int], Signals]:
        """Return the signals of the wanted micro-batches, and the place of each among them."""
        teacher = self.teachers[name]
        if isinstance(teacher, _ASKED_ALWAYS):  # it was told of these very batches
            return {number: number for number in wanted}, teacher.signals(batches)
        if isinstance(teacher, OwnLayout):  # its units are those of all micro-batches
            return {number: number for number in wanted}, teacher.signals_of(batches, wanted)
        given = [batches[number] for number in wanted]
        if name not in self.own_tokens:
            # A live teacher prefers the tokens of another tokenizer to the student's.
            given = [replace(batch, teacher=None) if batch.teacher else batch for batch in given]
        return {number: place for place, number in enumerate(wanted)}, teacher.signals(given)

    @property
    def _always_asked(self) -> frozenset[str]:
        named = self.teachers.items()
        return frozenset(name for name, one in named if isinstance(one, _ASKED_ALWAYS))

    def _turn(self, name: str) -> tuple[bool, bool, str]:
        """Order a teacher elsewhere before those whose work it may do its own beside.

        Stores are next: the host waits for the vote on their records, not behind a live pass.
        """
        teacher = self.teachers[name]
        return not isinstance(teacher, _ELSEWHERE), not isinstance(teacher, StoredTeacher), name

    def held_out(self, batches: int) -> SeveralTeachers:
        """Return the teachers of so many held-out batches."""
        own = {name: one.held_out(batches) for name, one in on_own_ranks(self).items()}
        return replace(self, teachers={**self.teachers, **own})

    def needed(self, batch: Batch) -> frozenset[str]:
        """The teachers that run on a micro-batch."""
        if not self.has_routed_terms:
            return self.named
        names = list(self.teachers)
        own, of_all = (
            {names[number] for number in numbers if number >= 0}
            for numbers in (batch.teacher_numbers, batch.teachers_of_all)
        )
        return self.named | own | (of_all & self.joint)


def on_own_ranks(teacher: Teacher | None) -> dict[str, OwnRanksTeacher]:
    """Return the teachers on ranks of their own by name; a single one has the name `teacher`."""
    named = teacher.teachers if isinstance(teacher, SeveralTeachers) else {"teacher": teacher}
    return {name: one for name, one in named.items() if isinstance(one, OwnRanksTeacher)}

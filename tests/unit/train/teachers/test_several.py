"""The order in which several teachers are asked for a step."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_distill.runtime.batch import Batch
from megatron_distill.train.teachers.several import SeveralTeachers
from megatron_distill.train.teachers.stored import StoredTeacher
from tests.support.batches import batch_of


class Live:
    """A teacher that notes its turn."""

    def __init__(self, name: str, turns: list[str]) -> None:
        self._name = name
        self._turns = turns

    def signals(self, batches: Sequence[Batch]) -> Sequence[None]:
        """Note the turn."""
        self._turns.append(self._name)
        return [None] * len(batches)


class Stored(Live, StoredTeacher):
    """A store that notes its turn."""


def test_stores_have_their_turn_before_every_live_teacher() -> None:
    turns: list[str] = []
    teachers = {
        "a": Live("a", turns), "b": Stored("b", turns), "c": Live("c", turns),
        "d": Stored("d", turns),
    }  # fmt: skip
    named = frozenset({"a", "c", "d"})  # a store is asked in every step
    several = SeveralTeachers(teachers, named=named, has_routed_terms=False)
    batch = batch_of(2, 8)
    signals = several.signals([batch, batch])
    assert turns == ["b", "d", "a", "c"]
    assert len(signals) == 2

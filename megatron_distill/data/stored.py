"""The samples of teacher stores as a data source: the store is the corpus."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from megatron_distill.data.blending import next_source, warn_of_pauses
from megatron_distill.data.samples import Sample, SampleList, State, TeacherTokens, shuffled
from megatron_distill.errors import DataError, counted
from megatron_distill.store import StoreSet

__all__ = ["HELD_OUT_SEED", "Share", "StoredSamples", "held_out_numbers", "read_held_out_numbers"]

HELD_OUT_SEED: Final = 0  # the held-out samples do not depend on the run's seed


@dataclass(frozen=True)
class Share:
    """Samples of a `StoreSet` that are blended with the samples of other shares.

    Attributes:
        numbers: the samples' numbers in the set.
        weight: blending weight, relative to the other shares.
    """

    numbers: range
    weight: float


class StoredSamples:
    """An endless stream of the samples of stores, reshuffled in every epoch; a `SampleSource`.

    `sample_id` is the number of the sample in the set and locates its record. Each share counts
    its epochs separately. Samples `held_out` are left out. Use it on the one rank that reads.
    Raises DataError: a share has held-out samples only.
    """

    def __init__(
        self,
        stores: StoreSet,
        shares: Sequence[Share],
        *,
        seed: int,
        held_out: Iterable[int] = (),
    ) -> None:
        self._stores = stores
        self._shares = tuple(shares)
        self._seed = seed
        self._held_out = frozenset(held_out)
        for share in shares:
            if self._held_out.issuperset(share.numbers):
                raise DataError(
                    "validation.samples: it would hold out "
                    f"{counted(len(share.numbers), 'sample')}, all that a store has; lower it, or "
                    "capture more samples"
                )
        # Per share: samples returned, and positions passed in its shuffled epochs.
        self._taken = [0] * len(shares)
        self._places = [0] * len(shares)

    def next_sample(self) -> Sample:
        """The next sample. Raises StoreError: its record is missing or damaged."""
        weights = [share.weight for share in self._shares]
        chosen = next_source(self._taken, weights)
        number = self._next_number(chosen)
        self._taken[chosen] += 1
        return _read(self._stores, number, chosen)

    def _next_number(self, chosen: int) -> int:
        numbers = self._shares[chosen].numbers
        while True:
            epoch, place = divmod(self._places[chosen], len(numbers))
            self._places[chosen] += 1
            number = numbers[shuffled(place, len(numbers), self._seed, chosen, epoch)]
            if number not in self._held_out:
                return number

    def state_dict(self) -> State:
        """Samples taken from each share, and the identities of the stores."""
        return {
            "taken": list(self._taken),
            "places": list(self._places),
            "stores": self._identities(),
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from a state. Raises DataError if it belongs to other stores or a corpus."""
        if state.get("stores") != self._identities():
            folders = ", ".join(str(store.folder) for store in self._stores.stores)
            raise DataError(
                f"teacher.store: {folders} differ from the stores in the checkpoint; restore "
                "those, or start a new run with another output"
            )
        self._taken, self._places = list(state["taken"]), list(state["places"])
        weights = [share.weight for share in self._shares]
        warn_of_pauses(self._taken, weights, range(len(weights)), key="teacher.store")

    def _identities(self) -> list[str]:
        return [store.plan.uid.hex() for store in self._stores.stores]


def held_out_numbers(samples: int, count: int) -> list[int]:
    """`count` numbers out of range(samples), the same for every seed of a run.

    Raises DataError: `count` is not below `samples`.
    """
    if count >= samples:
        raise DataError(
            f"validation.samples is {count}, but the stores contain only "
            f"{counted(samples, 'sample')} for training and validation together; lower it, or "
            "capture more samples"
        )
    return [shuffled(place, samples, HELD_OUT_SEED) for place in range(count)]


def read_held_out_numbers(
    stores: StoreSet, shares: Sequence[Share], numbers: Sequence[int]
) -> SampleList:
    """The samples with these numbers. Raises StoreError: a record is missing or damaged."""
    owners = [
        next(i for i, share in enumerate(shares) if number in share.numbers) for number in numbers
    ]
    return SampleList(
        [_read(stores, number, owner) for number, owner in zip(numbers, owners, strict=True)]
    )


def _read(stores: StoreSet, number: int, share: int) -> Sample:
    """A sample whose `source` is its share."""
    _, found = stores.packed_with_tokens(number)
    student = found.student
    if student is None:
        return Sample(found.tokens_S1, found.document_ids_S1, found.flags_S1, number, share)
    return Sample(
        student.tokens_W1,
        student.document_ids_W1,
        student.flags_W1,
        number,
        share,
        TeacherTokens(
            found.tokens_S1, found.document_ids_S1, student.teacher_chunks_S1, student.chunks_W1
        ),
    )

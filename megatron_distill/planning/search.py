"""All layouts of a number of devices for a run, those that fit ranked by the time of a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from math import inf
from typing import Final

from megatron_distill.models.flops import step_flops_per_token
from megatron_distill.planning.device import DeviceProfile
from megatron_distill.planning.memory import (
    USABLE,
    MemoryNeed,
    memory_need,
    teacher_rank_need,
)
from megatron_distill.planning.missing import Missing, Reasons, way_out
from megatron_distill.planning.parameters import RankNumbers, stage_numbers
from megatron_distill.planning.run import Choice, PlannedRun, TeacherPlace
from megatron_distill.planning.step_time import StepTime, step_time, teacher_seconds
from megatron_distill.planning.tries.bounds import order_of
from megatron_distill.planning.tries.candidates import Candidates
from megatron_distill.planning.tries.choices import MICRO_BATCHES, Choices, ShapeRule, Tries
from megatron_distill.runtime.layout import Layout

__all__ = ["Capture", "Planned", "Ranking", "Search", "layout_name", "planned"]

# Of the fastest layouts larger ones are tried, twice as large each time.
_MOST_AT_ONCE: Final = 128
_CAPTURED: Final = (1, 2, 4, 8, 16, 32, 64, _MOST_AT_ONCE)
# Student layouts beside which a teacher's own layouts and ranks are tried, by their own time.
_PARTNERS: Final = 12


@dataclass(frozen=True)
class Planned:
    """A choice with its predicted time and memory."""

    choice: Choice
    time: StepTime
    memory: MemoryNeed

    def fits(self, device: DeviceProfile) -> bool:
        """Whether the fullest rank stays within the usable share of the device's memory."""
        return self.memory.total <= USABLE * device.memory_bytes


@dataclass(frozen=True)
class Capture:
    """The time to capture the answers to a step's tokens, and the layout that takes it."""

    seconds_per_step: float
    name: str


@dataclass(frozen=True)
class Ranking:
    """The layouts that fit, fastest first; `tried` choices in all."""

    fitting: tuple[Planned, ...]
    missing: tuple[Missing, ...]
    tried: int

    def best(self, place: TeacherPlace) -> Planned | None:
        """Return the fastest with the teacher in this place."""
        return next((one for one in self.fitting if one.choice.place == place), None)


@dataclass
class Search:
    """The search of one run on `devices` such devices.

    shape_rule: of the configuration, for the student's and the teacher's layout. configured: the
    configuration's own choice, which is ranked with the others; None: it does not run.
    """

    run: PlannedRun
    device: DeviceProfile
    devices: int
    shape_rule: ShapeRule
    places: Sequence[TeacherPlace]
    configured: Choice | None = None
    _tried: int = 0
    _reasons: Reasons = field(default_factory=Reasons)

    @cached_property
    def _choices(self) -> Choices:
        return Choices(self.run, self.device, self.devices, self.shape_rule, self._reasons)

    def ranking(self, *, shown: int) -> Ranking:
        """Return all that fit, and reasons for popular layouts that are not among the first."""
        found: list[Planned] = []
        for place in self.places:
            if place == "own ranks":
                of_place = self._own_ranks()
            else:
                tries = self._choices.of_student(self.devices, place)
                of_place = self._fastest(tries, is_noted=True)
                # Weights that rest on the host are those of a teacher in the student's layout.
                if place == "shared" and not (self.run.several or self.run.rests):
                    of_place += self._own_layouts()
            found += self._with_larger(of_place)
        if self.configured is not None:
            found += self._fitting(self.configured)
        found = _best_of_each(found)
        times = [(one.choice.layout, one.time.total) for one in found]
        missing = self._reasons.missing(self.run, self.device, self.devices, times, shown=shown)
        return Ranking(tuple(found), tuple(missing), self._tried)

    def _fastest(
        self, tries: Iterable[Tries], *, most: int | None = None, is_noted: bool = False
    ) -> list[Planned]:
        """Return choices that fit, the fastest of each layout or of the `most` fastest ones.

        is_noted: the needs of popular layouts that do not fit are reasons.
        """
        candidates = Candidates(self.run, self.device, tries, most=most)
        found: dict[int, Planned] = {}
        too_large: list[tuple[int, Choice, MemoryNeed]] = []
        while (one := candidates.next()) is not None:
            # The whole need is shown of popular layouts alone.
            is_shown = is_noted and self._reasons.names(self.run, one.choice.layout)
            need = self._need(one.choice, is_whole=is_shown)
            if self._fits(need):
                found[one.number] = self._timed(one.choice, need)
                candidates.fits(one, order_of(found[one.number].time))
                continue
            candidates.does_not_fit(one)
            if is_shown:
                too_large.append((one.number, one.choice, need))
        for _, choice, need in sorted(too_large, key=lambda one: one[0]):
            self._reasons.note_memory(choice, need)
        return [found[number] for number in sorted(found)]

    def fits(self) -> bool:
        """Whether a layout fits, with a teacher on the student's ranks and in its layout."""
        places = [place for place in self.places if place != "own ranks"]
        return any(
            self._fits(self._need(choice))
            for place in places
            for tries in self._choices.of_student(self.devices, place)
            for choice in chain([tries.first], tries.others)
        )

    def way_out(self) -> str:
        """Return what makes a run fit, of which the ranking found no layout that does."""

        def fits(size: int) -> bool:
            return replace(self, devices=size).fits()

        return way_out(self.run, self.device, self._reasons, fits, self.devices)

    def _with_larger(self, found: Sequence[Planned]) -> list[Planned]:
        """Return the fastest choice of each layout, of the first ones also with more at once."""
        best = _best_of_each(found)
        return [*best, *(one for first in best[:_PARTNERS] for one in self._larger(first))]

    def _larger(self, one: Planned) -> Iterator[Planned]:
        """Yield a choice with larger micro-batches, while they fit and take less time."""
        size, layout = one.choice.micro_batch_size, one.choice.layout
        if size < MICRO_BATCHES[-1]:
            return  # a smaller one than those that were tried is the fastest
        while (size := 2 * size) <= _MOST_AT_ONCE:
            choice = replace(one.choice, micro_batch_size=size)
            micro_batches, rest = divmod(self.run.global_batch_size, choice.data * size)
            if rest or (layout.virtual_pipeline and micro_batches % layout.pipeline):
                return
            larger = next(self._fitting(choice), None)
            if larger is None or larger.time.total >= one.time.total:
                return
            one = larger
            yield one

    def _fitting(self, choice: Choice) -> Iterator[Planned]:
        """Yield the choice with its time and memory if it fits."""
        need = self._need(choice)
        if self._fits(need):
            yield self._timed(choice, need)

    def _need(self, choice: Choice, *, is_whole: bool = False) -> MemoryNeed:
        """Return the need of memory, of which one that does not fit is whole only if asked for."""
        self._tried += 1
        enough = inf if is_whole else USABLE * self.device.memory_bytes
        numbers = _student_numbers(self.run, choice)
        return memory_need(self.run, choice, self.device, numbers, enough=enough)

    def _fits(self, need: MemoryNeed) -> bool:
        return need.total <= USABLE * self.device.memory_bytes

    def _timed(self, choice: Choice, need: MemoryNeed) -> Planned:
        numbers = _student_numbers(self.run, choice)
        return Planned(choice, step_time(self.run, choice, self.device, numbers), need)

    def _partners(self, ranks: int, alone: Sequence[Planned]) -> Iterator[tuple[Layout, Planned]]:
        """Yield the teacher's layouts, each beside the student's fastest ones that it fits."""
        for layout in self._choices.teacher_layouts(ranks):
            for one in alone[:_PARTNERS]:
                few, many = sorted((layout.tensor, one.choice.layout.tensor))
                if not self.run.sends_heads or many % few == 0:
                    yield layout, one

    def _own_partners(
        self, ranks: int, alone: Sequence[Planned]
    ) -> Iterator[tuple[Layout, Planned]]:
        """Yield `_partners` that a teacher on the student's ranks may have there."""
        for layout, one in self._partners(ranks, alone):
            # A process has user buffers for one tensor-parallel size.
            sizes = {layout.tensor, one.choice.layout.tensor} - {1}
            if layout != one.choice.layout.without_virtual_stages() and not (
                self.run.overlaps_tensor and len(sizes) > 1
            ):
                yield layout, one

    def _own_layouts(self) -> list[Planned]:
        """Return choices whose teacher has a layout of its own on the student's ranks."""
        tries = self._choices.of_student(self.devices, "none")
        alone = _best_of_each(self._fastest(tries, most=_PARTNERS))
        choices = (
            self._choices.moved(one.choice, "shared", layout, 0)
            for layout, one in self._own_partners(self.devices, alone)
        )
        return self._fastest(map(_alone, choices))

    def _own_ranks(self) -> list[Planned]:
        """Return choices whose teacher has ranks of its own, near the balance of both sides."""
        run, unit = self.run, min(self.device.node.devices, max(1, self.devices // 8))
        assert run.teacher is not None
        flops = step_flops_per_token(
            run.student,
            run.teacher,
            sequence_length=run.sequence_length,
            teacher_length=run.teacher_length,
        )
        wanted = flops.teacher_share * self.devices
        choices: list[Choice] = []
        for size in _near(wanted, self.devices, unit):
            tries = self._choices.of_student(self.devices - size, "none")
            alone = _best_of_each(self._fastest(tries, most=_PARTNERS))
            choices += [
                self._choices.moved(one.choice, "own ranks", layout, size)
                for layout, one in self._partners(size, alone)
            ]
        return self._fastest(map(_alone, choices))

    def with_store(self) -> Planned | None:
        """Return the fastest choice that reads a store instead of running the teacher."""
        tries = self._choices.of_student(self.devices, "store")
        found = self._fastest(tries, most=_PARTNERS)
        return min(self._with_larger(found), key=lambda one: one.time.total, default=None)

    def capture(self) -> Capture | None:
        """Return the fastest capture of the teacher on all devices, None if it does not fit."""
        if self.run.teacher is None:
            return None
        run = replace(self.run, sent_ids=self.run.store_ids)
        best: Capture | None = None
        for layout in self._choices.teacher_layouts(self.devices):
            for size in _CAPTURED:
                choice = self._choices.with_teacher(
                    Choice(
                        layout=layout,
                        ranks=self.devices,
                        micro_batch_size=size,
                        layers=(),
                        place="own ranks",
                    ),
                    layout,
                    self.devices,
                )
                if run.global_batch_size < choice.teacher_data * size:
                    continue
                need = teacher_rank_need(run, choice, self.device)
                if need.total > USABLE * self.device.memory_bytes:
                    continue
                seconds = sum(teacher_seconds(run, choice, self.device))
                if best is None or seconds < best.seconds_per_step:
                    name = f"{layout_name(layout, choice.teacher_data)}, micro-batch {size}"
                    best = Capture(seconds, name)
        return best


def _near(wanted: float, devices: int, unit: int) -> list[int]:
    """Return numbers of a teacher's ranks near the wanted one, multiples of `unit`.

    The two nearest, and the two nearest quarters of the devices: these have more divisors, so that
    replicas share a batch evenly.
    """

    def nearest_of(step: int) -> list[int]:
        return sorted(range(step, devices, step), key=lambda size: abs(size - wanted))

    quarter = max(1, devices // 4 // unit) * unit
    return sorted({*nearest_of(unit)[:2], *nearest_of(quarter)[:2]})


def _best_of_each(found: Iterator[Planned] | Sequence[Planned]) -> list[Planned]:
    """Keep the fastest choice of each layout of the student and place of the teacher, sorted."""
    kept: dict[object, Planned] = {}
    for one in sorted(found, key=lambda one: order_of(one.time)):
        choice = one.choice
        has_own = choice.place == "shared" and not choice.is_same_layout
        kept.setdefault((choice.layout, choice.place, has_own), one)
    return list(kept.values())


def _alone(choice: Choice) -> Tries:
    """Return a choice as the only one of its family."""
    return Tries(choice.layout, (choice,), iter((choice,)))


def _student_numbers(run: PlannedRun, choice: Choice) -> tuple[RankNumbers, ...]:
    return stage_numbers(run.student, choice.layout, choice.layers, width=run.width)


def planned(run: PlannedRun, choice: Choice, device: DeviceProfile) -> Planned:
    """Predict the time and the memory of one choice."""
    numbers = _student_numbers(run, choice)
    return Planned(
        choice,
        step_time(run, choice, device, numbers),
        memory_need(run, choice, device, numbers),
    )


def layout_name(layout: Layout, data: int) -> str:
    """Return the sizes of a layout in the usual abbreviations, those of one left out."""
    parts = [f"TP{layout.tensor}", f"PP{layout.pipeline}"]
    parts += [f"VPP{layout.virtual_pipeline}"] if layout.virtual_pipeline else []
    parts += [f"CP{layout.context}"] if layout.context > 1 else []
    parts += [f"EP{layout.expert}"] if layout.expert > 1 else []
    return " ".join([*parts, f"DP{data}"])

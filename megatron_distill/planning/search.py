"""All layouts of a number of devices for a run, those that fit ranked by the time of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush, nsmallest
from itertools import islice
from math import inf
from typing import Final

from megatron_distill.models.flops import balanced_stages, step_flops_per_token
from megatron_distill.models.pipeline_stages import even_layers
from megatron_distill.planning.device import DeviceProfile
from megatron_distill.planning.memory import (
    USABLE,
    MemoryNeed,
    memory_need,
    teacher_rank_need,
)
from megatron_distill.planning.missing import LONG, Missing, Reasons, way_out
from megatron_distill.planning.operations import Recomputed
from megatron_distill.planning.parameters import RankNumbers, stage_numbers
from megatron_distill.planning.run import Choice, PlannedRun, TeacherPlace
from megatron_distill.planning.step_time import (
    StepTime,
    least_seconds,
    step_time,
    teacher_seconds,
)
from megatron_distill.runtime.layout import Layout

__all__ = ["Capture", "Planned", "Ranking", "Search", "layout_name", "planned"]

_VIRTUAL: Final = (None, 2, 4)
_CONTEXT: Final = (1, 2, 4, 8)
_MICRO_BATCHES: Final = (1, 2, 4, 8)
# Of the fastest layouts larger ones are tried, twice as large each time.
_MOST_AT_ONCE: Final = 128
_CAPTURED: Final = (1, 2, 4, 8, 16, 32, 64, _MOST_AT_ONCE)
# Stages, up to so many devices and beyond.
_MOST_STAGES: Final = (16, 32)
_MANY_DEVICES: Final = 1024
_RECOMPUTED: Final[tuple[tuple[Recomputed, tuple[str, ...]], ...]] = (
    ("none", ()),
    ("selective", ("mlp",)),
    ("full", ()),
)
# Student layouts beside which a teacher's own layouts and ranks are tried, by their own time.
_PARTNERS: Final = 12
_TIE: Final = 1e-8  # seconds by which times that rank alike differ at most
# The reason why the rules of the configuration refuse a layout of a role, or None.
ShapeRule = Callable[[str, Layout], str | None]


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
    _layers: dict[tuple[int, bool, bool], tuple[int, ...]] = field(default_factory=dict)
    _reasons: Reasons = field(default_factory=Reasons)

    def ranking(self, *, shown: int) -> Ranking:
        """Return all that fit, and reasons for popular layouts that are not among the first."""
        found: list[Planned] = []
        for place in self.places:
            if place == "own ranks":
                of_place = self._own_ranks()
            else:
                of_place = [*self._fitting(self._choices(self.devices, place))]
                if place == "shared" and not self.run.several:
                    of_place += self._own_layouts()
            found += self._with_larger(of_place)
        if self.configured is not None:
            found += self._all_fitting([self.configured])
        found = _best_of_each(found)
        times = [(one.choice.layout, one.time.total) for one in found]
        missing = self._reasons.missing(self.run, self.device, self.devices, times, shown=shown)
        return Ranking(tuple(found), tuple(missing), self._tried)

    def _fitting(self, sizes: Iterator[Iterator[Choice]]) -> Iterator[Planned]:
        """Evaluate the first choice of each layout and micro-batch that fits."""
        for choice, need in self._that_fit(sizes, is_noted=True):
            yield self._timed(choice, need)

    def _that_fit(
        self, sizes: Iterator[Iterator[Choice]], *, is_noted: bool
    ) -> Iterator[tuple[Choice, MemoryNeed]]:
        """Yield the first choice of each that fits; is_noted: others' need is a reason."""
        for choices in sizes:
            for choice in choices:
                # The whole need is shown of popular layouts alone.
                is_shown = is_noted and self._reasons.names(self.run, choice.layout)
                need = self._need(choice, is_whole=is_shown)
                if self._fits(need):
                    yield choice, need
                    break
                if is_shown:
                    self._reasons.note_memory(choice, need)

    def _fastest(self, sizes: Iterator[Iterator[Choice]]) -> list[Planned]:
        """Evaluate choices whose teacher is still to be added, or a store, the fastest alone.

        These are all of the `_PARTNERS` fastest layouts, and some more.
        """
        waiting = []
        for number, choices in enumerate(sizes):
            first = next(choices)
            least = least_seconds(self.run, first, self.device)
            waiting.append((least, number, first, choices))
        heapify(waiting)
        found: dict[int, Planned] = {}
        times: dict[Layout, float] = {}
        enough = inf
        while waiting:
            least, number, choice, others = heappop(waiting)
            if least > enough:
                break
            need = self._need(choice)
            if not self._fits(need):
                # With more recomputation it takes longer.
                for more in islice(others, 1):
                    least = least_seconds(self.run, more, self.device)
                    heappush(waiting, (least, number, more, others))
                continue
            found[number] = self._timed(choice, need)
            known = times.get(choice.layout, inf)
            times[choice.layout] = min(known, found[number].time.total)
            if len(times) >= _PARTNERS:
                enough = nsmallest(_PARTNERS, times.values())[-1] + _TIE
        return [found[number] for number in sorted(found)]

    def fits(self) -> bool:
        """Whether a layout fits, with a teacher on the student's ranks and in its layout."""
        places = [place for place in self.places if place != "own ranks"]
        return any(
            next(self._that_fit(self._choices(self.devices, place), is_noted=False), None)
            for place in places
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
        if size < _MICRO_BATCHES[-1]:
            return  # a smaller one than those that were tried is the fastest
        while (size := 2 * size) <= _MOST_AT_ONCE:
            choice = replace(one.choice, micro_batch_size=size)
            micro_batches, rest = divmod(self.run.global_batch_size, choice.data * size)
            if rest or (layout.virtual_pipeline and micro_batches % layout.pipeline):
                return
            found = self._all_fitting([choice])
            if not found or found[0].time.total >= one.time.total:
                return
            one = found[0]
            yield one

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

    def _choices(self, ranks: int, place: TeacherPlace) -> Iterator[Iterator[Choice]]:
        """Yield the student's choices of each layout and micro-batch."""
        for layout in self._layouts(ranks):
            problem = self._problem(layout, place)
            if problem is not None:
                self._reasons.note_rule(layout, problem)
                continue
            replicas = ranks // layout.model_ranks
            for size in _MICRO_BATCHES:
                if self.run.global_batch_size % (replicas * size):
                    continue
                micro_batches = self.run.global_batch_size // (replicas * size)
                if layout.virtual_pipeline and micro_batches % layout.pipeline:
                    continue
                yield self._choices_of(layout, ranks, size, place)

    def _choices_of(
        self, layout: Layout, ranks: int, size: int, place: TeacherPlace
    ) -> Iterator[Choice]:
        """Yield the choices with the least recomputation first: more only where memory asks."""
        for recompute, modules in _RECOMPUTED:
            choice = Choice(
                layout=layout,
                ranks=ranks,
                micro_batch_size=size,
                layers=(),
                recompute=recompute,
                modules=modules,
                place=place,
            )
            if place == "shared":
                choice = self._with_teacher(choice, layout.without_virtual_stages(), 0)
            yield self._with_stages(choice)

    def _with_stages(self, choice: Choice) -> Choice:
        """Return the choice with the layers of the student's stages that a run has then."""
        run, full = self.run, choice.recompute == "full"
        key = (choice.layout.stages, choice.keeps_head(run), full)
        if key not in self._layers:
            self._layers[key] = balanced_stages(
                run.student,
                choice.head_in_stages(run),
                sequence_length=run.sequence_length,
                teacher_length=run.teacher_length,
                stages=choice.layout.stages,
                is_recomputed=full,
            )
        return replace(choice, layers=self._layers[key])

    def _moved(self, choice: Choice, place: TeacherPlace, layout: Layout, ranks: int) -> Choice:
        """Return the choice with the teacher elsewhere, on `ranks` of its own if there are any."""
        return self._with_stages(self._with_teacher(replace(choice, place=place), layout, ranks))

    def _with_teacher(self, choice: Choice, layout: Layout, ranks: int) -> Choice:
        assert self.run.teacher is not None
        layers = even_layers(self.run.teacher.num_layers, layout.pipeline)
        return replace(choice, teacher_layout=layout, teacher_layers=layers, teacher_ranks=ranks)

    def _layouts(self, ranks: int) -> Iterator[Layout]:
        """Yield all layouts that divide the ranks."""
        moe, length = self.run.student.moe, self.run.sequence_length
        most = min(self.device.node.devices, ranks)
        for tensor in (size for size in range(1, most + 1) if not ranks % size):
            if tensor & (tensor - 1) and tensor != most:
                continue
            for context in _CONTEXT:
                if ranks % (tensor * context) or (context > 1 and length % (2 * context)):
                    continue
                if context > 1 and tensor * context > most and length <= LONG:
                    continue
                sequence = tensor > 1 and not length % (tensor * context)
                for pipeline in range(1, self._most_stages + 1):
                    if ranks % (tensor * context * pipeline):
                        continue
                    replicas = ranks // (tensor * pipeline)
                    most_experts = 1 if moe is None else min(moe.num_experts, replicas)
                    experts = [
                        size
                        for size in range(1, most_experts + 1)
                        if not replicas % size and (moe is None or not moe.num_experts % size)
                    ]
                    for expert in experts:
                        for virtual in _VIRTUAL if pipeline > 1 else (None,):
                            stages = pipeline * (virtual or 1)
                            if stages > self.run.student.num_layers:
                                continue
                            yield Layout(tensor, pipeline, virtual, context, expert, sequence)

    @property
    def _most_stages(self) -> int:
        most = _MOST_STAGES[self.devices > _MANY_DEVICES]
        return min(most, self.run.student.num_layers)

    def _problem(self, layout: Layout, place: TeacherPlace) -> str | None:
        problem = self.shape_rule("student", layout)
        if problem is None and place == "shared":
            problem = self.shape_rule("teacher", layout.without_virtual_stages())
        return problem

    def teacher_layouts(self, ranks: int) -> Iterator[Layout]:
        """Yield layouts of a teacher that runs alone on so many ranks."""
        assert self.run.teacher is not None
        most = min(self.device.node.devices, ranks)
        moe = self.run.teacher.moe
        for tensor in (1, 2, 4, 8, 16):
            for pipeline in (1, 2, 4, 8, 16):
                if tensor > most or ranks % (tensor * pipeline):
                    continue
                expert = 1
                if moe is not None:
                    replicas = ranks // (tensor * pipeline)
                    sizes = range(1, min(moe.num_experts, replicas) + 1)
                    expert = max(e for e in sizes if not replicas % e and not moe.num_experts % e)
                length = self.run.teacher_length or self.run.sequence_length
                sequence = tensor > 1 and not length % tensor
                layout = Layout(tensor, pipeline, None, 1, expert, sequence)
                if self.shape_rule("teacher", layout) is None:
                    yield layout

    def _partners(self, ranks: int, alone: Sequence[Planned]) -> Iterator[tuple[Layout, Planned]]:
        """Yield the teacher's layouts, each beside the student's fastest ones that it fits."""
        for layout in self.teacher_layouts(ranks):
            for one in alone[:_PARTNERS]:
                few, many = sorted((layout.tensor, one.choice.layout.tensor))
                if not self.run.sends_heads or many % few == 0:
                    yield layout, one

    def _own_layouts(self) -> list[Planned]:
        """Return choices whose teacher has a layout of its own on the student's ranks."""
        alone = _best_of_each(self._fastest(self._choices(self.devices, "none")))
        choices = (
            self._moved(one.choice, "shared", layout, 0)
            for layout, one in self._partners(self.devices, alone)
            if layout != one.choice.layout.without_virtual_stages()
        )
        return self._all_fitting(choices)

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
            choices_alone = self._choices(self.devices - size, "none")
            alone = _best_of_each(self._fastest(choices_alone))
            choices += [
                self._moved(one.choice, "own ranks", layout, size)
                for layout, one in self._partners(size, alone)
            ]
        return self._all_fitting(choices)

    def _all_fitting(self, choices: Iterable[Choice]) -> list[Planned]:
        found = []
        for choice in choices:
            need = self._need(choice)
            if self._fits(need):
                found.append(self._timed(choice, need))
        return found

    def with_store(self) -> Planned | None:
        """Return the fastest choice that reads a store instead of running the teacher."""
        found = self._fastest(self._choices(self.devices, "store"))
        return min(self._with_larger([*found]), key=lambda one: one.time.total, default=None)

    def capture(self) -> Capture | None:
        """Return the fastest capture of the teacher on all devices, None if it does not fit."""
        if self.run.teacher is None:
            return None
        run = replace(self.run, sent_ids=self.run.store_ids)
        best: Capture | None = None
        for layout in self.teacher_layouts(self.devices):
            for size in _CAPTURED:
                choice = self._with_teacher(
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
    for one in sorted(found, key=_order):
        choice = one.choice
        has_own = choice.place == "shared" and not choice.is_same_layout
        kept.setdefault((choice.layout, choice.place, has_own), one)
    return list(kept.values())


def _order(one: Planned) -> tuple[float, float]:
    """Return the key of a ranking: where data decides all times, the shortest rest comes first."""
    return round(one.time.total, 9), one.time.total - one.time.data


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

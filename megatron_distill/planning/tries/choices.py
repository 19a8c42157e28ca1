"""All choices of a number of devices for a run: layouts, micro-batches, recomputation, teachers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

from megatron_distill.models.flops import balanced_stages
from megatron_distill.models.pipeline_stages import even_layers
from megatron_distill.planning.device import DeviceProfile
from megatron_distill.planning.missing import LONG, Reasons
from megatron_distill.planning.operations import Recomputed
from megatron_distill.planning.run import Choice, PlannedRun, TeacherPlace
from megatron_distill.runtime.layout import Layout

__all__ = ["MICRO_BATCHES", "Choices", "ShapeRule", "Tries"]

# Samples of the micro-batches that each layout is tried with.
MICRO_BATCHES: Final = (1, 2, 4, 8)
_VIRTUAL: Final = (None, 2, 4)
_CONTEXT: Final = (1, 2, 4, 8)
# Stages, up to so many devices and beyond.
_MOST_STAGES: Final = (16, 32)
_MANY_DEVICES: Final = 1024
_RECOMPUTED: Final[tuple[tuple[Recomputed, tuple[str, ...]], ...]] = (
    ("none", ()),
    ("selective", ("mlp",)),
    ("full", ()),
)
# The reason why the rules of the configuration refuse a layout of a role, or None.
ShapeRule = Callable[[str, Layout], str | None]


@dataclass
class Tries:
    """The choices of one layout and micro-batch, the first one and others that are made when asked.

    Those with the least recomputation come first: more of it only where memory asks.
    family: all sizes that decide the student's work beside the number of its stages.
    """

    layout: Layout
    family: tuple[object, ...]
    others: Iterator[Choice]

    @cached_property
    def first(self) -> Choice:
        """The first choice."""
        return next(self.others)


@dataclass
class Choices:
    """The choices of a run on parts of `devices` such devices.

    shape_rule: of the configuration, for the student's and the teacher's layout. reasons: to which
    the layouts that it refuses are added.
    """

    run: PlannedRun
    device: DeviceProfile
    devices: int
    shape_rule: ShapeRule
    reasons: Reasons = field(default_factory=Reasons)
    _layers: dict[tuple[int, bool, bool], tuple[int, ...]] = field(default_factory=dict)

    def of_student(self, ranks: int, place: TeacherPlace) -> Iterator[Tries]:
        """Yield the student's choices of each layout and micro-batch."""
        for layout in self._layouts(ranks):
            problem = self._problem(layout, place)
            if problem is not None:
                self.reasons.note_rule(layout, problem)
                continue
            replicas = ranks // layout.model_ranks
            for size in MICRO_BATCHES:
                if self.run.global_batch_size % (replicas * size):
                    continue
                micro_batches = self.run.global_batch_size // (replicas * size)
                if layout.virtual_pipeline and micro_batches % layout.pipeline:
                    continue
                family = layout.tensor, layout.context, layout.expert, size
                yield Tries(layout, family, self._of_layout(layout, ranks, size, place))

    def _of_layout(
        self, layout: Layout, ranks: int, size: int, place: TeacherPlace
    ) -> Iterator[Choice]:
        """Yield the choices with the least recomputation first."""
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
                choice = self.with_teacher(choice, layout.without_virtual_stages(), 0)
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

    def moved(self, choice: Choice, place: TeacherPlace, layout: Layout, ranks: int) -> Choice:
        """Return the choice with the teacher elsewhere, on `ranks` of its own if there are any."""
        return self._with_stages(self.with_teacher(replace(choice, place=place), layout, ranks))

    def with_teacher(self, choice: Choice, layout: Layout, ranks: int) -> Choice:
        """Return the choice with the teacher in this layout, on `ranks` of its own or on none."""
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

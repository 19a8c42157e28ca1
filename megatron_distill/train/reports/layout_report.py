"""The division of a launch in words: ranks, bytes between them, memory, balance. Needs no GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from megatron_distill.config import (
    ModelConfig,
    ParallelConfig,
    RunConfig,
    TeacherRanks,
    is_divisible,
    named_teachers,
    own_layouts,
    teacher_parallel,
)
from megatron_distill.errors import counted
from megatron_distill.models.architecture import Architecture
from megatron_distill.models.flops import (
    StepFlops,
    head_flops_per_token,
    step_flops_per_token,
)
from megatron_distill.models.parameters import weights_of_rank
from megatron_distill.runtime.progress import shortened, size
from megatron_distill.runtime.roles import Role, Roles
from megatron_distill.train.assemble.shapes import layout_of
from megatron_distill.train.reports.planned_run import open_shapes, vocabulary_note

__all__ = ["layout_report"]

_BYTES: Final = {"fp32": 4, "bf16": 2}
_BALANCED: Final = 1.25  # a side that is busy for less than this part of the other's time waits


def layout_report(config: RunConfig, *, ranks: int, teachers: TeacherRanks) -> str:
    """Return which rank does which part, and with teachers' own ranks what they exchange.

    `teachers`: how many of the ranks run one teacher alone, by role. Raises ConfigError or
    CheckpointError: a model does not exist or does not fit.
    """
    roles = Roles(ranks, teachers)
    every = open_shapes(config)
    _check_files(config.models)
    student = every["student"]
    shapes = {
        role: every[role]
        for role, model in sorted(config.models.items())
        if role != "student" and model.store is None and model.has_model
    }
    apart = {role.name: role for role in roles.teachers}
    lines = [f"layout of {counted(ranks, 'rank')}", *_ranks(roles.student, config.parallel)]
    for role in roles.teachers:
        lines += _ranks(role, teacher_parallel(config, role.name))
    moving = [name for name, _ in own_layouts(config) if name in shapes and name not in apart]
    if roles.teachers or moving:
        # Imported here: it loads Megatron-Core, which takes seconds, and no other layout needs it.
        from megatron_distill.runtime.mcore_patches import prepare_megatron_core

        prepare_megatron_core(on_cuda=False)
        from megatron_distill.train.reports.exchange_report import exchange_report, movement_report

        lines += exchange_report(config, roles, {"student": student, **shapes})
        for name in moving:
            lines += movement_report(config, name, roles, {"student": student, **shapes})
    every_flops = {}
    for name, shape in shapes.items():
        lines.append(_teacher_weights(config, name, shape, apart.get(name, roles.student).size))
        flops = every_flops[name] = step_flops_per_token(
            student,
            shape,
            sequence_length=config.data.sequence_length,
            teacher_length=config.models[name].sequence_length,
        )
        lines += _balance(flops, roles, shape, config) if name == "teacher" else _share(flops)
    if config.teachers and roles.teachers:
        lines += _balance_of_several(every_flops, shapes, roles, config)
    note = vocabulary_note(config.models, config.data.tokenizer, every)
    return "\n".join([*lines, *([note] if note else [])]) + "\n"


def _check_files(models: Mapping[str, ModelConfig]) -> None:
    """Check the headers of the files of each Hugging Face model."""
    for model in models.values():
        if model.hf is not None:
            from megatron_distill.models.hugging_face.model import describe_checked  # loads torch

            describe_checked(Path(model.hf).expanduser())


def _ranks(role: Role, parallel: ParallelConfig) -> Iterator[str]:
    """Yield one line per pipeline stage of each replica."""
    per_replica = parallel.tensor * parallel.context
    replicas = role.size // (per_replica * parallel.pipeline)
    yield (
        f"{role.name}: {counted(role.size, 'rank')} = tensor {parallel.tensor} x context "
        f"{parallel.context} x pipeline {parallel.pipeline} x data {replicas}"
        + (", sequence parallel" if parallel.sequence else "")
    )
    yield from shortened(
        [
            _place_of(role, replica, stage, replicas=replicas, ranks=per_replica)
            for replica in range(replicas)
            for stage in range(parallel.pipeline)
        ]
    )


def _place_of(role: Role, replica: int, stage: int, *, replicas: int, ranks: int) -> str:
    """Return the line of one stage of a replica, which has so many ranks."""
    first = ranks * (replica + replicas * stage)
    last = first + ranks - 1
    names, launched = f"{role.name}.{first}", f"{role.first + first}"
    if last != first:
        names, launched = f"{names} to {role.name}.{last}", f"{launched} to {role.first + last}"
    return f"  {names:<28} (rank {launched}): replica {replica}, stage {stage}"


def _teacher_weights(config: RunConfig, role: str, shape: Architecture, ranks: int) -> str:
    """Return the bytes of a teacher's weights on the rank that has most of them."""
    layout = layout_of(teacher_parallel(config, role))
    is_sharded = config.models[role].shard_weights
    counts = weights_of_rank(shape, layout, ranks=ranks, is_sharded=is_sharded)
    width = _BYTES[config.train.precision]
    name = "teacher's weights" if role == "teacher" else f"weights of {role}"
    text = f"{name}: {size(width * counts.resident)} of a rank"
    if not counts.buffers:
        return text
    return (
        f"{text} = shards {size(width * counts.layers)}, two layers "
        f"{size(width * counts.buffers)}, embedding and head {size(width * counts.whole)}; "
        f"{size(width * counts.gathered)} received in each forward pass"
    )


def _share(flops: StepFlops) -> Iterator[str]:
    """Yield the work of one of several teachers; the samples decide how often it runs."""
    wanted = flops.teacher_forward / (flops.student_forward + flops.student_backward)
    yield (
        f"  on a sample its forward pass takes {wanted:.2f} times the operations of the student's "
        "forward and backward pass"
    )


def _balance(
    flops: StepFlops, roles: Roles, teacher: Architecture, config: RunConfig
) -> Iterator[str]:
    """Yield the ranks that the teacher would need for both sides to take the same time."""
    wanted = flops.teacher_forward / (flops.student_forward + flops.student_backward)
    sides = _Sides.of(flops, teacher, config)
    yield (
        f"balance: a step's forward pass of the teacher ({counted(teacher.num_layers, 'layer')}) "
        f"takes {wanted:.2f} times the operations of the student's forward and backward pass"
    )
    if sides.has_moved_head:
        yield "  on ranks of its own the teacher's head runs on the student's, in the losses"
    yield _best_division(sides, roles, config)
    for role in roles.teachers:
        yield f"  here: {_verdict(sides, role, roles, 'the teacher')}"


def _verdict(sides: _Sides, role: Role, roles: Roles, name: str) -> str:
    """Return which of the student and a teacher, by its name, waits for the other."""
    of_teacher, own = sides.teacher / role.size, sides.student / roles.student.size
    slower, waits = (name, "the student") if of_teacher > own else ("the student", name)
    ratio = max(of_teacher, own) / min(of_teacher, own)
    verdict = f"{waits} waits for {slower}" if ratio > _BALANCED else "the sides are balanced"
    return (
        f"{role.size} of {name} and {roles.student.size} of the student; {slower}'s step takes "
        f"{ratio:.2f} times the other's: {verdict}"
    )


def _balance_of_several(
    flops: Mapping[str, StepFlops],
    shapes: Mapping[str, Architecture],
    roles: Roles,
    config: RunConfig,
) -> Iterator[str]:
    """Yield for each of several teachers with ranks of its own who waits, and its best ranks."""
    named = {f"teachers.{name}" for name in named_teachers(config.objective.terms)}
    sides = {name: _Sides.of(one, shapes[name], config, name) for name, one in flops.items()}
    apart = {role.name for role in roles.teachers}
    # Of each teacher the student's ranks run the head, or all of it.
    beside = sum(
        side.student - flops[name].student_forward - flops[name].student_backward
        if name in apart
        else flops[name].teacher_forward
        for name, side in sides.items()
    )
    yield "balance, with every teacher on every sample:"
    for role in roles.teachers:
        name, own = role.name, flops[role.name]
        side = replace(sides[name], student=own.student_forward + own.student_backward + beside)
        wanted = side.teacher / side.student * roles.student.size
        text = f"  {_verdict(side, role, roles, name)}; balanced on {wanted:.1f} ranks"
        if name not in named and wanted > role.size:
            text += f", or here with {role.size / wanted:.0%} of the samples"
        yield text


@dataclass(frozen=True)
class _Sides:
    """Operations of a token on the ranks of each side, where the teacher has ranks of its own.

    has_moved_head: the losses run the teacher's head, since hidden states are sent.
    """

    student: float
    teacher: float
    has_moved_head: bool

    @classmethod
    def of(
        cls, flops: StepFlops, teacher: Architecture, config: RunConfig, role: str = "teacher"
    ) -> _Sides:
        """Divide the work of a step with one teacher."""
        section, own = config.models[role], config.data.sequence_length
        student, teacher_side = (
            flops.student_forward + flops.student_backward,
            flops.teacher_forward,
        )
        if section.transfer.what == "top_k":
            return cls(student, teacher_side, has_moved_head=False)
        head = head_flops_per_token(teacher) * (section.sequence_length or own) / own
        is_needed = bool(config.objective.terms)  # not by losses between layers alone
        return cls(student + head * is_needed, teacher_side - head, has_moved_head=is_needed)

    def time(self, students: int, teachers: int) -> float:
        """Return the time of the slower side at equal efficiency."""
        return max(self.student / students, self.teacher / teachers)

    @property
    def total(self) -> float:
        """Operations of both sides."""
        return self.student + self.teacher


def _best_division(sides: _Sides, roles: Roles, config: RunConfig) -> str:
    """Return the fastest division of the ranks that layouts, machines and batch sizes allow."""
    total, section = roles.size, config.models["teacher"]
    node = 1 if section.nodes is None else roles.teacher("teacher").size // section.nodes
    unit = math.lcm(_ranks_of_copy(teacher_parallel(config)), node)
    allowed = [
        ranks
        for ranks in range(unit, total, unit)
        if is_divisible(config, total, teachers=(("teacher", ranks),))
    ]
    if not allowed:
        return f"  these layouts and batch sizes leave no division of {counted(total, 'rank')}"
    best = min(allowed, key=lambda ranks: sides.time(total - ranks, ranks))
    alone = sides.time(total - best, best) / sides.total * total
    key = f"ranks={best}" if section.nodes is None else f"nodes={best // node}"
    return (
        f"  of {counted(total, 'rank')} the teacher's share is "
        f"{sides.teacher / sides.total * total:.1f}; best division: teacher.{key}, "
        f"{alone:.2f} times the time of shared ranks at equal efficiency"
    )


def _ranks_of_copy(parallel: ParallelConfig) -> int:
    return parallel.tensor * parallel.context * parallel.pipeline

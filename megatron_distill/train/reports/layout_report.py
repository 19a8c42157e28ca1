"""The division of a launch in words: ranks, bytes between them, memory, balance. Needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from megatron_distill.config import (
    ParallelConfig,
    RunConfig,
    TeacherRanks,
    teacher_parallel,
)
from megatron_distill.errors import counted
from megatron_distill.models.architecture import Architecture
from megatron_distill.models.flops import StepFlops, step_flops_per_token
from megatron_distill.models.rank_weights import weights_of_rank
from megatron_distill.runtime.progress import size
from megatron_distill.runtime.roles import Role, Roles
from megatron_distill.train.assemble.shapes import layout_of, read_shape

__all__ = ["layout_report"]

_BYTES: Final = {"fp32": 4, "bf16": 2}
_BALANCED: Final = 1.25  # a side that is busy for less than this part of the other's time waits


def layout_report(config: RunConfig, *, ranks: int, teachers: TeacherRanks) -> str:
    """Return which rank does which part, and with teachers' own ranks what they exchange.

    `teachers`: how many of the ranks run one teacher alone, by role. Raises ConfigError or
    CheckpointError: a model does not exist or does not fit.
    """
    roles = Roles(ranks, teachers)
    student = _checked_shape(config, "student")
    shapes = {
        role: _checked_shape(config, role)
        for role, model in sorted(config.models.items())
        if role != "student" and model.store is None and model.has_model
    }
    apart = {role.name: role for role in roles.teachers}
    lines = [f"layout of {counted(ranks, 'rank')}", *_ranks(roles.student, config.parallel)]
    for role in roles.teachers:
        lines += _ranks(role, teacher_parallel(config, role.name))
    if roles.teachers:
        # Imported here: it loads Megatron-Core, which takes seconds, and no other layout needs it.
        from megatron_distill.runtime.mcore_patches import prepare_megatron_core

        prepare_megatron_core(on_cuda=False)
        from megatron_distill.train.reports.exchange_report import exchange_report

        lines += exchange_report(config, roles, {"student": student, **shapes})
    for name, shape in shapes.items():
        lines.append(_teacher_weights(config, name, shape, apart.get(name, roles.student).size))
        flops = step_flops_per_token(
            student,
            shape,
            sequence_length=config.data.sequence_length,
            teacher_length=config.models[name].sequence_length,
        )
        lines += _balance(flops, roles, shape, config) if name == "teacher" else _share(flops)
    return "\n".join(lines) + "\n"


def _checked_shape(config: RunConfig, role: str) -> Architecture:
    """Return a model's shape; the headers of a Hugging Face model's files are checked as well."""
    described, path = None, config.models[role].hf
    if path is not None:
        from megatron_distill.models.hugging_face.model import describe_checked  # loads torch

        described = describe_checked(Path(path).expanduser())
    return read_shape(config, role, None, described).architecture


def _ranks(role: Role, parallel: ParallelConfig) -> Iterator[str]:
    """Yield one line per pipeline stage of each replica."""
    per_replica = parallel.tensor * parallel.context
    replicas = role.size // (per_replica * parallel.pipeline)
    yield (
        f"{role.name}: {counted(role.size, 'rank')} = tensor {parallel.tensor} x context "
        f"{parallel.context} x pipeline {parallel.pipeline} x data {replicas}"
        + (", sequence parallel" if parallel.sequence else "")
    )
    for replica in range(replicas):
        for stage in range(parallel.pipeline):
            first = per_replica * (replica + replicas * stage)
            last = first + per_replica - 1
            names = f"{role.name}.{first}"
            names += "" if last == first else f" to {role.name}.{last}"
            launched = f"{role.first + first}" + (
                "" if last == first else f" to {role.first + last}"
            )
            yield f"  {names:<28} (rank {launched}): replica {replica}, stage {stage}"


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
    share = wanted / (1 + wanted)
    yield (
        f"balance: a step's forward pass of the teacher ({counted(teacher.num_layers, 'layer')}) "
        f"takes {wanted:.2f} times the operations of the student's forward and backward pass"
    )
    total = roles.size
    unit = _ranks_of_copy(teacher_parallel(config))
    of_student = _ranks_of_copy(config.parallel)
    best = min(
        range(unit, total, unit),
        key=lambda ranks: (
            _slower(wanted, total - ranks, ranks)
            if (total - ranks) % of_student == 0
            else float("inf")
        ),
        default=0,
    )
    if not best or (total - best) % of_student:
        yield f"  these layouts leave no division of {counted(total, 'rank')}"
        return
    alone = _slower(wanted, total - best, best) / (1 + wanted) * total
    yield (
        f"  of {counted(total, 'rank')} the teacher's share is {share * total:.1f}; best division: "
        f"teacher.ranks={best}, {alone:.2f} times the time of shared ranks at equal efficiency"
    )
    for role in roles.teachers:
        of_teacher, own = wanted / role.size, 1 / roles.student.size
        slower = "teacher" if of_teacher > own else "student"
        ratio = max(of_teacher, own) / min(of_teacher, own)
        waits = "student" if slower == "teacher" else "teacher"
        verdict = (
            f"the {waits} waits for the {slower}" if ratio > _BALANCED else "the sides are balanced"
        )
        yield (
            f"  here: {role.size} of the teacher and {roles.student.size} of the "
            f"student; the {slower}'s step takes {ratio:.2f} times the other's: {verdict}"
        )


def _ranks_of_copy(parallel: ParallelConfig) -> int:
    return parallel.tensor * parallel.context * parallel.pipeline


def _slower(wanted: float, students: int, teachers: int) -> float:
    """Return the time of the slower side, in student steps on one rank."""
    return max(1 / students, wanted / teachers)

"""Rules on a teacher with ranks of its own, and the numbers of ranks of both roles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from megatron_distill.config.messages import Problem, without_effect
from megatron_distill.config.schema import (
    CaptureConfig,
    JobConfig,
    ModelConfig,
    RunConfig,
    TermConfig,
    TransferConfig,
)
from megatron_distill.errors import counted

__all__ = [
    "has_own_ranks",
    "role_problems",
    "teacher_ranks",
    "teacher_ranks_problems",
]

_KEYS: Final = ("teacher.ranks", "teacher.nodes")


def has_own_ranks(config: JobConfig) -> bool:
    """Return whether the last ranks of the launch run the teacher alone."""
    teacher = config.teacher
    return teacher is not None and (teacher.ranks is not None or teacher.nodes is not None)


def teacher_ranks(config: JobConfig, *, ranks_per_node: int) -> int:
    """Return the number of ranks that run the teacher alone; 0: all ranks run both models."""
    teacher = config.teacher
    if teacher is None or isinstance(config, CaptureConfig):
        return 0
    if teacher.nodes is not None:
        return teacher.nodes * ranks_per_node
    return teacher.ranks or 0


def role_problems(config: JobConfig, world_size: int, teachers: int) -> Iterator[Problem]:
    """Find reasons why a launch cannot be divided into the student's and the teacher's ranks."""
    if teachers >= world_size:
        key = "teacher.nodes" if config.models["teacher"].nodes is not None else "teacher.ranks"
        yield Problem(
            (key,),
            f"{key} gives the teacher {counted(teachers, 'rank')}, but the launch has "
            f"{counted(world_size, 'process', 'processes')} in all, and the student needs at least "
            "one; start more processes or lower it",
        )


def teacher_ranks_problems(config: RunConfig) -> Iterator[Problem]:
    """Find settings of a teacher on ranks of its own that contradict the run."""
    yield from _of_student(config.student)
    teacher = config.teacher
    if teacher is None:
        return
    if not has_own_ranks(config):
        yield from _without_ranks(teacher)
        return
    if teacher.ranks is not None and teacher.nodes is not None:
        yield Problem(
            _KEYS,
            f"teacher.ranks = {teacher.ranks} and teacher.nodes = {teacher.nodes}: give only one "
            "of the two",
        )
    if teacher.store is not None:
        for key in _KEYS:
            value = getattr(teacher, key.removeprefix("teacher."))
            if value is not None:
                yield without_effect(key, value, "with teacher.store", instead=None)
        return
    yield from _refused(config)
    yield from _transfer(config, teacher.transfer)


def _of_student(student: ModelConfig) -> Iterator[Problem]:
    for name in ("ranks", "nodes"):
        if getattr(student, name) is not None:
            yield Problem(
                (f"student.{name}", f"teacher.{name}"),
                f"student.{name}: of a teacher only; remove it",
            )


def _without_ranks(teacher: ModelConfig) -> Iterator[Problem]:
    reason = "without teacher.ranks or teacher.nodes"
    if teacher.steps_ahead != 1:
        yield without_effect("teacher.steps_ahead", teacher.steps_ahead, reason, instead=1)
    for name, value in teacher.transfer.model_dump(exclude_defaults=True).items():
        default = TransferConfig.model_fields[name].default
        yield without_effect(f"teacher.transfer.{name}", value, reason, instead=default)


def _refused(config: RunConfig) -> Iterator[Problem]:
    """Name what only a teacher on the student's ranks can do."""
    for index, entry in enumerate(config.objective.features):
        if entry.loss == "attention":
            name = f"objective.features.{index}.loss"
            yield Problem(
                (name, *_KEYS),
                f"{name} = 'attention': needs queries and keys of the same heads on each rank of "
                "both models, and this teacher has ranks of its own; use a loss of hidden states, "
                "or remove teacher.ranks and teacher.nodes",
            )
    teacher = config.models["teacher"]
    if teacher.offload_hidden:
        reason = "with teacher.ranks or teacher.nodes, which sends its hidden states away"
        yield without_effect("teacher.offload_hidden", value=True, reason=reason, instead=False)
    if teacher.offload:
        reason = "with teacher.ranks or teacher.nodes, whose GPUs have no student"
        yield without_effect("teacher.offload", value=True, reason=reason, instead=False)
    if not config.objective.terms and not config.objective.features:
        yield Problem(
            ("objective.terms", *_KEYS),
            "objective.terms = []: no loss asks the teacher, and it would have ranks of its own; "
            "add a term, or remove teacher.ranks and teacher.nodes",
        )


def _transfer(config: RunConfig, transfer: TransferConfig) -> Iterator[Problem]:
    key = "teacher.transfer.k"
    if transfer.what == "hidden":
        if transfer.k is not None:
            reason = "with teacher.transfer.what = 'hidden'"
            yield without_effect(key, transfer.k, reason, instead=None)
    elif transfer.k is None:
        yield Problem(
            (key, "teacher.transfer.what"),
            "teacher.transfer.k is required with teacher.transfer.what = 'top_k'; set the number "
            "of ids per token",
        )
    elif not config.objective.terms:
        yield Problem(
            ("teacher.transfer.what", "objective.terms"),
            "teacher.transfer.what = 'top_k': objective.terms = [], so that no loss uses the ids; "
            "set it to hidden, or add a term",
        )
    else:
        for index, term in enumerate(config.objective.terms):
            yield from _term(f"objective.terms.{index}", term, transfer.k)
    if transfer.backend == "nccl" and config.runtime.device == "cpu":
        yield Problem(
            ("teacher.transfer.backend", "runtime.device"),
            "teacher.transfer.backend = 'nccl' needs GPUs, and runtime.device = 'cpu'; set it to "
            "auto, gloo or ipc",
        )
    if transfer.backend == "ipc" and config.runtime.device == "cuda":
        yield Problem(
            ("teacher.transfer.backend", "runtime.device"),
            "teacher.transfer.backend = 'ipc' is shared memory between processes on a CPU, and "
            "runtime.device = 'cuda'; set it to nccl or gloo",
        )


def _term(key: str, term: TermConfig, k: int) -> Iterator[Problem]:
    """A term must choose its ids among those that are sent."""
    what = f"teacher.transfer.what = 'top_k' with k = {k}"
    if term.alignment is not None:
        yield Problem(
            (f"{key}.alignment", "teacher.transfer.what"),
            f"{key}.alignment = {term.alignment!r}: {what} sends the teacher's ids for the "
            "student's positions, and an alignment needs the teacher's own; set "
            "teacher.transfer.what to hidden",
        )
        return
    if term.top_k is None:
        yield Problem(
            (f"{key}.top_k", "teacher.transfer.what"),
            f"{key} compares the whole vocabulary, and {what} sends few ids; set {key}.top_k to "
            f"{k} or less, or teacher.transfer.what to hidden",
        )
    elif term.top_k > k:
        yield Problem(
            (f"{key}.top_k", "teacher.transfer.k"),
            f"{key}.top_k = {term.top_k}: more than the {k} ids of teacher.transfer.k; raise that "
            "or lower this",
        )
    schedule = term.temperature_schedule
    if schedule is not None and schedule.to != term.temperature and term.support != "renormalized":
        yield Problem(
            (f"{key}.temperature_schedule", f"{key}.support", "teacher.transfer.what"),
            f"{key}.temperature_schedule: {what} sends normalisers at fixed temperatures only; set "
            f"{key}.support to renormalized, or teacher.transfer.what to hidden",
        )

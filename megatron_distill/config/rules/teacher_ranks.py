"""Rules on teachers with ranks of their own, and the numbers of ranks of all roles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from megatron_distill.config.messages import Problem, without_effect
from megatron_distill.config.rules.teacher_parallel import teacher_parallel
from megatron_distill.config.rules.teacher_tokenizers import own_tokenizers
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
    "TeacherRanks",
    "has_own_ranks",
    "own_rank_roles",
    "ranks_key",
    "role_problems",
    "sends_top_k",
    "teacher_ranks",
    "teacher_ranks_problems",
]

# Role and number of ranks of each teacher with ranks of its own, in the order of the ranks.
TeacherRanks = tuple[tuple[str, int], ...]

_KEYS: Final = ("ranks", "nodes")


def has_own_ranks(config: JobConfig, role: str = "teacher") -> bool:
    """Return whether ranks of the launch run this teacher alone."""
    teacher = config.models.get(role)
    if teacher is None or role == "student":
        return False
    return teacher.ranks is not None or teacher.nodes is not None


def sends_top_k(config: JobConfig, role: str = "teacher") -> bool:
    """Return whether a live teacher sends a top-k, from its own ranks or its own layout."""
    if config.models[role].transfer.what != "top_k":
        return False
    return has_own_ranks(config, role) or _has_other_layout(config, role)


def _has_other_layout(config: JobConfig, role: str) -> bool:
    """Return whether a live teacher on the student's ranks has another layout than the student."""
    model = config.models[role]
    if model.parallel is None or model.store is not None:
        return False
    left_out = {"virtual_pipeline", "layers_per_stage"}
    own, of_student = teacher_parallel(config, role), config.parallel
    return own.model_dump(exclude=left_out) != of_student.model_dump(exclude=left_out)


def own_rank_roles(config: JobConfig) -> list[str]:
    """Return the roles of the teachers with ranks of their own, in the order of these ranks."""
    if isinstance(config, CaptureConfig):
        return []
    return [role for role in sorted(config.models) if has_own_ranks(config, role)]


def teacher_ranks(config: JobConfig, *, ranks_per_node: int) -> TeacherRanks:
    """Return the ranks that run one teacher alone; empty: all ranks run all models."""
    found = []
    for role in own_rank_roles(config):
        model = config.models[role]
        ranks = model.ranks or 0
        found.append((role, ranks if model.nodes is None else model.nodes * ranks_per_node))
    return tuple(found)


def ranks_key(config: JobConfig, role: str) -> str:
    """Return the key that gives a teacher its ranks."""
    return f"{role}.{'ranks' if config.models[role].nodes is None else 'nodes'}"


def role_problems(config: JobConfig, world_size: int, teachers: TeacherRanks) -> Iterator[Problem]:
    """Find reasons why a launch cannot be divided among the student and the teachers."""
    total = sum(ranks for _, ranks in teachers)
    if total >= world_size:
        keys = tuple(ranks_key(config, role) for role, _ in teachers)
        gives = "gives the teacher" if len(keys) == 1 else "give the teachers"
        yield Problem(
            keys,
            f"{' and '.join(keys)} {gives} {counted(total, 'rank')}, but the launch has "
            f"{counted(world_size, 'process', 'processes')} in all, and the student needs at least "
            f"one; start more processes or lower {'it' if len(keys) == 1 else 'one of them'}",
        )


def teacher_ranks_problems(config: RunConfig) -> Iterator[Problem]:
    """Find settings of teachers on ranks of their own that contradict the run."""
    yield from _of_student(config.student)
    for role, model in config.models.items():
        if role != "student":
            yield from _of_teacher(config, role, model)


def _of_student(student: ModelConfig) -> Iterator[Problem]:
    for name in _KEYS:
        if getattr(student, name) is not None:
            yield Problem(
                (f"student.{name}", f"teacher.{name}"),
                f"student.{name}: of a teacher only; remove it",
            )


def _of_teacher(config: RunConfig, role: str, teacher: ModelConfig) -> Iterator[Problem]:
    if not has_own_ranks(config, role):
        yield from _without_ranks(config, role, teacher)
        return
    if teacher.ranks is not None and teacher.nodes is not None:
        yield Problem(
            _keys(role),
            f"{role}.ranks = {teacher.ranks} and {role}.nodes = {teacher.nodes}: give only one of "
            "the two",
        )
    if teacher.store is not None:
        for name in _KEYS:
            value = getattr(teacher, name)
            if value is not None:
                yield without_effect(f"{role}.{name}", value, f"with {role}.store", instead=None)
        return
    yield from _resting(role, teacher)
    if role == "teacher":
        yield from _alone(config)
    yield from _transfer(config, role, teacher.transfer)
    yield from _backend(config, role, teacher.transfer)


def _keys(role: str) -> tuple[str, str]:
    return f"{role}.ranks", f"{role}.nodes"


def _without_ranks(config: RunConfig, role: str, teacher: ModelConfig) -> Iterator[Problem]:
    reason = f"without {role}.ranks or {role}.nodes"
    if teacher.steps_ahead != 1:
        yield without_effect(f"{role}.steps_ahead", teacher.steps_ahead, reason, instead=1)
    has_effect = _has_other_layout(config, role)
    for name, value in teacher.transfer.model_dump(exclude_defaults=True).items():
        default = TransferConfig.model_fields[name].default
        if name == "backend":
            yield without_effect(f"{role}.transfer.{name}", value, reason, instead=default)
        elif not has_effect:
            further = f"without {role}.ranks, {role}.nodes or another layout in {role}.parallel"
            yield without_effect(f"{role}.transfer.{name}", value, further, instead=default)
    if has_effect:
        yield from _transfer(config, role, teacher.transfer)


def _resting(role: str, teacher: ModelConfig) -> Iterator[Problem]:
    """Find keys of memory that the teacher shares with a student."""
    own = f"with {role}.ranks or {role}.nodes"
    if teacher.offload_hidden:
        reason = f"{own}, which sends its hidden states away"
        yield without_effect(f"{role}.offload_hidden", value=True, reason=reason, instead=False)
    if teacher.offload:
        reason = f"{own}, whose GPUs have no student"
        yield without_effect(f"{role}.offload", value=True, reason=reason, instead=False)


def _alone(config: RunConfig) -> Iterator[Problem]:
    """Name what a single teacher cannot do on ranks of its own."""
    if not config.objective.terms and not config.objective.features:
        yield Problem(
            ("objective.terms", *_keys("teacher")),
            "objective.terms = []: no loss needs the teacher, and it would have ranks of its own; "
            "add a term, or remove teacher.ranks and teacher.nodes",
        )


def _transfer(config: RunConfig, role: str, transfer: TransferConfig) -> Iterator[Problem]:
    key, what = f"{role}.transfer.k", f"{role}.transfer.what"
    if transfer.what == "hidden":
        if transfer.k is not None:
            yield without_effect(key, transfer.k, f"with {what} = 'hidden'", instead=None)
    elif transfer.k is None:
        yield Problem(
            (key, what),
            f"{key} is required with {what} = 'top_k'; set the number of ids per token",
        )
    elif not config.objective.terms:
        yield Problem(
            (what, "objective.terms"),
            f"{what} = 'top_k': objective.terms = [], so that no loss uses the ids; set it to "
            "hidden, or add a term",
        )
    else:
        for index, term in enumerate(config.objective.terms):
            if _serves(config, role, term):
                yield from _term(f"objective.terms.{index}", term, role, transfer.k)


def _serves(config: RunConfig, role: str, term: TermConfig) -> bool:
    """Return whether a teacher is one of a term's, or that of some sample in it."""
    name = role.removeprefix("teachers.")
    has_own_tokenizer = name in own_tokenizers(config)
    if config.teachers and has_own_tokenizer != (term.alignment is not None):
        return False
    names = {term.teacher: 1.0} if term.teacher else term.teachers
    return not names or bool(names.get(name))


def _backend(config: RunConfig, role: str, transfer: TransferConfig) -> Iterator[Problem]:
    key = f"{role}.transfer.backend"
    if transfer.backend == "nccl" and config.runtime.device == "cpu":
        yield Problem(
            (key, "runtime.device"),
            f"{key} = 'nccl' needs GPUs, and runtime.device = 'cpu'; set it to auto, gloo or ipc",
        )
    elif transfer.backend == "nccl" and transfer.what == "top_k":
        reason = f"with {role}.transfer.what = 'top_k', which goes through host memory by gloo"
        yield without_effect(key, "nccl", reason, instead="gloo")


def _term(key: str, term: TermConfig, role: str, k: int) -> Iterator[Problem]:
    """A term must choose its ids among those that are sent, as among those of a store."""
    what, is_plain = f"{role}.transfer.what", term.alignment is None
    given = f"{what} = 'top_k' with k = {k}"
    if term.alignment == "likelihood":
        return  # its log-probabilities of labels are sent too
    if not is_plain and term.alignment != "common":
        yield Problem(
            (f"{key}.alignment", what),
            f"{key}.alignment = {term.alignment!r}: needs whole distributions, and "
            f"{given} sends a part of them; use 'likelihood' or 'common' with top_k, or set {what} "
            "to hidden",
        )
        return
    if term.top_k is None:
        compared = "the whole vocabulary" if is_plain else "all common tokens"
        yield Problem(
            (f"{key}.top_k", what),
            f"{key} compares {compared}, and {given} sends few ids; set {key}.top_k to {k} or "
            f"less, or {what} to hidden",
        )
    elif term.top_k > k:
        yield Problem(
            (f"{key}.top_k", f"{role}.transfer.k"),
            f"{key}.top_k = {term.top_k}: more than the {k} ids of {role}.transfer.k; raise that "
            "or lower this",
        )
    schedule = term.temperature_schedule
    needs_normaliser = term.support != "renormalized" or not is_plain
    if schedule is not None and schedule.to != term.temperature and needs_normaliser:
        remedy = f"set {key}.support to renormalized" if is_plain else "remove the schedule"
        yield Problem(
            (f"{key}.temperature_schedule", f"{key}.support", what),
            f"{key}.temperature_schedule: {given} sends normalisers at fixed temperatures only; "
            f"{remedy}, or set {what} to hidden",
        )

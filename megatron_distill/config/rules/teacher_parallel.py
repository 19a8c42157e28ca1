"""Rules on a teacher with its own layout, and the keys of that layout."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from megatron_distill.config.messages import Problem, without_effect
from megatron_distill.config.schema import (
    CaptureConfig,
    JobConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    TeacherParallelConfig,
)
from megatron_distill.config.schema.training import StageLayersConfig

__all__ = [
    "own_layouts",
    "parallel_key",
    "teacher_parallel",
    "teacher_parallel_problems",
    "under_key",
]

_SIZE = re.compile(r"(?<![\w.])parallel\.(?=tensor|pipeline|context|expert|sequence)")


def teacher_parallel(config: JobConfig, role: str = "teacher") -> ParallelConfig:
    """Return the layout of a teacher: its `parallel`, else that of the student without chunks."""
    given = config.parallel.layers_per_stage.teacher if role == "teacher" else None
    layers = StageLayersConfig(teacher=given)
    own = _own(config, role)
    if own is None:
        update = {"virtual_pipeline": None, "layers_per_stage": layers}
        return config.parallel.model_copy(update=update)
    sizes = own.model_dump(exclude={"virtual_pipeline"})
    return ParallelConfig(**sizes, layers_per_stage=layers)


def parallel_key(config: JobConfig, role: str) -> str:
    """Return the section with the layout of a role."""
    return "parallel" if _own(config, role) is None else f"{role}.parallel"


def own_layouts(config: JobConfig) -> Iterator[tuple[str, ParallelConfig]]:
    """Yield role and layout of each teacher with a layout of its own."""
    for role in config.models:
        if _own(config, role) is not None:
            yield role, teacher_parallel(config, role)


def _own(config: JobConfig, role: str) -> TeacherParallelConfig | None:
    model = None if role == "student" else config.models.get(role)
    return None if model is None else model.parallel


def under_key(problems: Iterable[Problem], key: str) -> Iterator[Problem]:
    """Yield problems of a layout under the keys of its section, which is `parallel_key`."""
    prefix = f"{key}."
    for problem in problems:
        keys = tuple(_SIZE.sub(prefix, key) for key in problem.keys)
        yield replace(problem, keys=keys, text=_SIZE.sub(prefix, problem.text))


def teacher_parallel_problems(config: JobConfig) -> Iterator[Problem]:
    """Find what a teacher with its own layout cannot do, and layouts without a live teacher."""
    if "student" in config.models and config.models["student"].parallel is not None:
        yield Problem(
            ("student.parallel",), "student.parallel: the student's layout is parallel; set that"
        )
    for role, _ in own_layouts(config):
        yield from _own_layout(config, role, config.models[role])


def _own_layout(config: JobConfig, role: str, teacher: ModelConfig) -> Iterator[Problem]:
    key = f"{role}.parallel"
    assert teacher.parallel is not None
    if isinstance(config, CaptureConfig):
        yield Problem(
            (key, "parallel"), f"{key}: a capture has one model; set parallel instead, remove {key}"
        )
        return
    if teacher.store is not None:
        value = teacher.parallel.model_dump(exclude_defaults=True)
        yield without_effect(key, value, f"with {role}.store", instead=None)
        return
    if teacher.parallel.virtual_pipeline is not None:
        yield Problem(
            (f"{key}.virtual_pipeline",),
            f"{key}.virtual_pipeline = {teacher.parallel.virtual_pipeline}: a teacher runs forward "
            "only, which virtual stages do not shorten; remove it",
        )
    assert isinstance(config, RunConfig)
    if role == "teacher":  # several have no features
        yield from _attention_maps(config, teacher.parallel)


def _attention_maps(config: RunConfig, own: TeacherParallelConfig) -> Iterator[Problem]:
    few, many = sorted((config.parallel.tensor, own.tensor))
    if many % few == 0:
        return
    for index, entry in enumerate(config.objective.features):
        if entry.loss == "attention":
            name = f"objective.features.{index}.loss"
            yield Problem(
                (name, "parallel.tensor", "teacher.parallel.tensor"),
                f"{name} = 'attention': sends heads between tensor ranks, and of {few} and {many} "
                "ranks neither number divides the other. Change parallel.tensor or "
                "teacher.parallel.tensor, or use a loss of hidden states",
            )

"""A run's tokenizer, teacher and samples, opened from its configuration."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from megatron_distill.config import (
    RunConfig,
)
from megatron_distill.models.architecture import Execution
from megatron_distill.runtime.groups import Groups
from megatron_distill.train.assemble.data import RunSamples
from megatron_distill.train.assemble.distillation import (
    Distillation,
    assemble_distillation,
    open_teacher,
)
from megatron_distill.train.assemble.models import (
    Origin,
    build_terms,
    find_origin,
)
from megatron_distill.train.assemble.sources import data_options
from megatron_distill.train.assemble.stages import heads_in_layers, student_layers
from megatron_distill.train.assemble.tokenizer import Vocabulary, open_tokenizer
from megatron_distill.train.teachers.live import OnlineTeacher


@dataclass(frozen=True)
class OpenRun:
    """The models and samples of a run, except its student, whose origin is known."""

    vocabulary: Vocabulary
    origin: Origin
    layers: tuple[int, ...]  # of each stage of the student
    execution: Execution
    distillation: Distillation
    samples: RunSamples


def open_run(
    config: RunConfig, execution: Execution, groups: Groups, resources: ExitStack
) -> OpenRun:
    """Open the tokenizer and the teacher; all checks run before the teacher's weights are read.

    Raises a MegatronDistillError on all ranks.
    """
    data, parallel = config.data, config.parallel
    options = data_options(data, Path(config.output), shows_progress=config.logging.progress)
    tokenizer, vocabulary = open_tokenizer(data, config.models, config.output, options)
    length = data.sequence_length
    origin = find_origin(
        config.student, "student", vocabulary, parallel=parallel, sequence_length=length
    )
    student = origin.architecture
    terms = build_terms(config.objective.terms, vocabulary.size)
    teacher = open_teacher(
        config.teacher,
        terms,
        student=student,
        vocabulary=vocabulary,
        data=data,
        parallel=parallel,
        seed=config.seed,
        groups=groups,
        execution=execution,
        resources=resources,
    )
    heads = heads_in_layers(
        student,
        teacher.architecture if isinstance(teacher, OnlineTeacher) else None,
        sequence_length=length,
        is_recomputed=execution.recompute.layers is None,
    )
    layers = student_layers(
        parallel.layers_per_stage.student, student, heads=heads, layout=groups.layout
    )
    distillation = assemble_distillation(
        config.objective,
        terms,
        teacher,
        student=student,
        layers=layers,
        vocabulary=vocabulary,
        optimizer=config.optimizer,
        seed=config.seed,
        groups=groups,
        device=execution.device,
    )
    samples = RunSamples(
        data=data,
        options=options,
        tokenizer=tokenizer,
        stored=distillation.stored,
        seed=config.seed,
        held_out=config.validation.samples,
    )
    return OpenRun(vocabulary, origin, layers, execution, distillation, samples)

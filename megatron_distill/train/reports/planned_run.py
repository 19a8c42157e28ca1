"""From a configuration to the planner's values, its layout as a choice, and the layout rules."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Final

from megatron_distill.config import (
    ArchitectureConfig,
    ModelConfig,
    ObjectiveConfig,
    RunConfig,
    TokenizerConfig,
    check_architecture,
    parallel_key,
    teacher_parallel,
)
from megatron_distill.errors import ConfigError
from megatron_distill.models.architecture import Architecture
from megatron_distill.models.flops import balanced_stages
from megatron_distill.models.hugging_face.model import describe
from megatron_distill.models.pipeline_stages import even_layers
from megatron_distill.planning.run import Choice, PlannedRun, TeacherPlace
from megatron_distill.planning.search import ShapeRule
from megatron_distill.runtime.groups import Layout
from megatron_distill.train.assemble.models import has_model, layout_of, read_model

__all__ = [
    "configured_choice",
    "open_shapes",
    "planned_run",
    "shape_rule",
    "teacher_places",
    "vocabulary_note",
]

_STORE_IDS: Final = 64


def open_shapes(config: RunConfig) -> tuple[Architecture, Architecture | None]:
    """Return the shapes of student and teacher; of a Hugging Face folder only config.json is read.

    A teacher that is only a store has none. Raises ConfigError or CheckpointError: several
    teachers, or a model that does not exist.
    """
    if config.teachers:
        raise ConfigError(
            f"teachers = {', '.join(config.teachers)}: a plan is of one teacher; give that of the "
            "largest as `teacher`, with `teachers=null` and terms without `teachers`"
        )

    def shape(role: str) -> Architecture:
        section = config.models[role]
        described = None if section.hf is None else describe(Path(section.hf).expanduser())
        found = read_model(config, role, None, described).architecture
        trained = _tokenizer(config, role).train_vocab_size
        if _has_rows_of_tokenizer(section) and trained is not None:
            return replace(found, vocab_size=trained)  # of the tokenizer that the run will train
        return found

    shapes = {role: shape(role) for role in _planned(config)}
    assumed = _assumed(config)
    for role in assumed:
        # A model with the same tokenizer has about as many rows.
        known = [
            other.vocab_size
            for name, other in shapes.items()
            if name not in assumed and _tokenizer(config, name) == _tokenizer(config, role)
        ]
        if known:
            shapes[role] = replace(shapes[role], vocab_size=known[0])
    return shapes["student"], shapes.get("teacher")


def vocabulary_note(
    config: RunConfig, student: Architecture, teacher: Architecture | None
) -> str | None:
    """Return a sentence on the vocabulary's size in `open_shapes` where it is assumed, or None."""
    keys = [f"{role}.architecture.vocab_size" for role in _assumed(config)]
    if not keys:
        return None
    shapes = {"student": student, "teacher": teacher}
    sizes = {shape.vocab_size for role in _assumed(config) if (shape := shapes[role]) is not None}
    (size,) = sizes
    return (
        f"Assumed: a vocabulary of {size:,} rows, since the tokenizer is not read for a plan; set "
        f"{' and '.join(keys)}"
    )


def _planned(config: RunConfig) -> list[str]:
    """Return the roles that have a model."""
    teacher = config.teacher
    return ["student", *(["teacher"] if teacher is not None and has_model(teacher) else [])]


def _assumed(config: RunConfig) -> list[str]:
    """Return the roles whose vocabulary has the size of a tokenizer that is not known yet."""
    return [
        role
        for role in _planned(config)
        if _has_rows_of_tokenizer(config.models[role])
        and _tokenizer(config, role).train_vocab_size is None
    ]


def _has_rows_of_tokenizer(section: ModelConfig) -> bool:
    shape = section.architecture
    return shape is not None and shape.vocab_size is None and section.checkpoint is None


def _tokenizer(config: RunConfig, role: str) -> TokenizerConfig:
    return config.models[role].tokenizer or config.data.tokenizer


def planned_run(
    config: RunConfig, student: Architecture, teacher: Architecture | None
) -> PlannedRun:
    """Return the run without its layout."""
    train, optimizer, section = config.train, config.optimizer, config.teacher
    transfer = None if section is None else section.transfer
    return PlannedRun(
        student=student,
        teacher=teacher,
        sequence_length=config.data.sequence_length,
        teacher_length=None if section is None else section.sequence_length,
        global_batch_size=train.global_batch_size,
        steps=train.steps,
        precision=train.precision,
        student_fp8=train.fp8 is not None,
        teacher_fp8=section is not None and section.fp8 is not None,
        chunk_tokens=config.objective.chunk_tokens,
        is_distributed=optimizer.distributed,
        overlaps_gradients=optimizer.overlap_grad_reduce,
        overlaps_parameters=optimizer.overlap_param_gather,
        bucket_size=optimizer.bucket_size,
        shards_teacher=section is not None and section.shard_weights,
        offloads_hidden=section is not None and section.offload_hidden,
        steps_ahead=1 if section is None else section.steps_ahead,
        sent_ids=transfer.k if transfer is not None and transfer.what == "top_k" else None,
        store_ids=max((term.top_k or 0 for term in config.objective.terms), default=0)
        or _STORE_IDS,
    )


def teacher_places(
    teacher: ModelConfig | None, objective: ObjectiveConfig
) -> tuple[TeacherPlace, ...]:
    """Return the places of the teacher that this configuration allows."""
    if teacher is None:
        return ("none",)
    if teacher.store is not None:
        return ("store",)
    attention = any(feature.loss == "attention" for feature in objective.features)
    asks = bool(objective.terms or objective.features)
    return ("shared",) if attention or not asks else ("shared", "own ranks")


def configured_choice(config: RunConfig, run: PlannedRun, *, ranks: int, teachers: int) -> Choice:
    """Return the layout that the configuration has on `ranks`, of which `teachers` are its own."""
    train, layout = config.train, layout_of(config.parallel)
    place: TeacherPlace = "none"
    if config.teacher is not None:
        place = "own ranks" if teachers else "shared"
        place = "store" if config.teacher.store is not None else place
    is_live = place in ("shared", "own ranks")
    given = config.parallel.layers_per_stage
    layers = given.student or balanced_stages(
        run.student,
        run.teacher if is_live else None,
        sequence_length=run.sequence_length,
        teacher_length=run.teacher_length,
        stages=layout.stages,
        is_recomputed=train.recompute == "full" and train.recompute_layers is None,
    )
    own = layout_of(teacher_parallel(config)) if is_live else None
    teacher_layers: tuple[int, ...] = ()
    if own is not None and run.teacher is not None:
        teacher_layers = given.teacher or even_layers(run.teacher.num_layers, own.pipeline)
    return Choice(
        layout=layout,
        ranks=ranks - teachers,
        micro_batch_size=train.micro_batch_size,
        layers=layers,
        recompute=train.recompute,
        modules=train.recompute_modules if train.recompute == "selective" else (),
        recomputed_layers=train.recompute_layers,
        place=place,
        teacher_layout=own,
        teacher_layers=teacher_layers,
        teacher_ranks=teachers,
    )


def shape_rule(config: RunConfig, student: Architecture, teacher: Architecture | None) -> ShapeRule:
    """Return the rules of the configuration on a shape and a layout, as the planner asks them."""
    shapes = {"student": student} | ({} if teacher is None else {"teacher": teacher})
    sections = {
        role: ArchitectureConfig.model_validate(shape.as_dict()) for role, shape in shapes.items()
    }
    lengths = {
        role: config.models[role].sequence_length or config.data.sequence_length for role in shapes
    }
    keys = {role: parallel_key(config, role) for role in shapes}
    base = config.parallel.model_copy(
        update={"layers_per_stage": type(config.parallel.layers_per_stage)()}
    )

    @lru_cache(maxsize=4096)
    def first_problem(role: str, layout: Layout) -> str | None:
        parallel = base.model_copy(update=vars(layout))
        found = check_architecture(sections[role], role, parallel, lengths[role], key=keys[role])
        return found[0] if found else None

    return first_problem

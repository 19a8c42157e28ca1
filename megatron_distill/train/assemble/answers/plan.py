"""From a configuration to the plan of the answers of a teacher on ranks of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch

from megatron_distill.config import (
    RunConfig,
    TransferConfig,
    check_features,
    has_own_tokenizer,
    matched_layers,
    teacher_parallel,
)
from megatron_distill.errors import ConfigError
from megatron_distill.losses import ChunkTerm, Term
from megatron_distill.models.architecture import Architecture
from megatron_distill.models.execution import Recompute
from megatron_distill.models.flops import balanced_stages
from megatron_distill.models.pipeline_stages import even_layers, ranks_of_layers
from megatron_distill.runtime.roles import Role, Roles
from megatron_distill.store import CaptureSettings
from megatron_distill.train.assemble.models import build_terms
from megatron_distill.train.assemble.routing import members
from megatron_distill.train.assemble.shapes import layout_of
from megatron_distill.train.assemble.stores.source import OneOfSeveral
from megatron_distill.train.teachers.answers import AnswerPlan, Column, Output
from megatron_distill.train.teachers.attention_heads import (
    FeatureKind,
    attention_parts,
    feature_kinds,
    sizes_per_position,
)
from megatron_distill.train.teachers.live import live_metrics
from megatron_distill.train.teachers.sent_topk import sent_settings, top_k_columns
from megatron_distill.train.teachers.stored import stored_metrics
from megatron_distill.train.teachers.transfer import head_messages
from megatron_distill.train.teachers.units import Grid, Message, Units

__all__ = [
    "answer_metrics",
    "answer_plan",
    "answer_settings",
    "head_parts",
    "sent_records",
    "terms_of",
]

_ANY_VOCABULARY: Final = 1 << 30


def answer_plan(
    config: RunConfig,
    role: Role,
    roles: Roles,
    teacher: Architecture,
    student: Architecture,
    dtype: torch.dtype,
    settings: CaptureSettings | None,
) -> AnswerPlan:
    """Return who sends which rows to whom; pure, and the same on all ranks.

    `role`: the ranks of the teacher, one of `roles`. `settings`: of sent top-k ids, which every
    tensor rank needs for all positions. With a tokenizer of the teacher's own every context rank
    needs them too. None: hidden states are sent, split along the sequence as the models leave them.
    Raises ConfigError: a feature loss names a layer that its model does not have.
    """
    student_grid = Grid.of(layout_of(config.parallel), roles.student.ranks)
    teacher_grid = Grid.of(layout_of(teacher_parallel(config, role.name)), role.ranks)
    train, section = config.train, config.models[role.name]
    units = Units(
        micro_batches=train.global_batch_size // (train.micro_batch_size * student_grid.replicas),
        student_replicas=student_grid.replicas,
        teacher_replicas=teacher_grid.replicas,
    )
    hidden = Column("hidden", dtype, (teacher.hidden_size,))
    last = Output(
        layer=None,
        source=teacher_grid.pipeline - 1,
        destination=student_grid.pipeline - 1,
        columns=(hidden,) if settings is None else top_k_columns(settings),
        splits=settings is None,
        is_whole=settings is not None and has_own_tokenizer(config, role.name),
    )
    return AnswerPlan(
        units,
        teacher_grid,
        student_grid,
        length=section.sequence_length or config.data.sequence_length,
        sequences=train.micro_batch_size,
        outputs=(last, *_layer_outputs(config, teacher, student, dtype, settings)),
        steps_ahead=section.steps_ahead,
        role=role.name,
    )


def _layer_outputs(
    config: RunConfig,
    teacher: Architecture,
    student: Architecture,
    dtype: torch.dtype,
    settings: CaptureSettings | None,
) -> Iterator[Output]:
    """Yield what feature losses need of layers, once for each stage of the student."""
    features = config.objective.features
    if not features:
        return
    check_features(features, student.num_layers, teacher.num_layers)
    own = config.parallel
    in_losses = teacher if settings is None else None
    of_student = ranks_of_layers(_student_layers(config, student, in_losses), own.pipeline)
    stages = teacher_parallel(config).pipeline
    layers = own.layers_per_stage.teacher or even_layers(teacher.num_layers, stages)
    of_teacher = ranks_of_layers(layers, stages)
    wanted = {
        (theirs, of_student[ours - 1], kind)
        for entry in features
        for ours, theirs in matched_layers(entry, student.num_layers, teacher.num_layers)
        for kind in feature_kinds(of_attention=entry.loss == "attention")
    }
    columns = _layer_columns(teacher, dtype, teacher_parallel(config).tensor, own.tensor)
    for layer, stage, kind in sorted(wanted):
        yield Output(
            layer,
            of_teacher[layer - 1],
            stage,
            columns[kind],
            splits=kind == "output",
            is_whole=kind == "key",
            kind=kind,
        )


def _layer_columns(
    teacher: Architecture, dtype: torch.dtype, tensor: int, student_tensor: int
) -> dict[FeatureKind, tuple[Column, ...]]:
    """Return the tensors of a layer by kind: a hidden state, or one for each part of the heads."""
    parts, _ = attention_parts(tensor, student_tensor)
    sizes = sizes_per_position(teacher, tensor)
    return {
        "output": (Column("hidden", dtype, sizes["output"]),),
        "query": (Column("query", dtype, sizes["query"]),) * parts,
        "key": (Column("key", dtype, sizes["key"]),) * parts,
    }


def _student_layers(
    config: RunConfig, student: Architecture, teacher: Architecture | None
) -> tuple[int, ...]:
    """Return the layers of each stage of the student, the same as on its own ranks.

    teacher: whose head runs in the student's losses; None: it sends top-k ids.
    """
    train, parallel = config.train, config.parallel
    recompute = Recompute.of(train.recompute, train.recompute_modules, train.recompute_layers)
    return parallel.layers_per_stage.student or balanced_stages(
        student,
        teacher,
        sequence_length=config.data.sequence_length,
        teacher_length=config.models["teacher"].sequence_length,
        stages=layout_of(parallel).stages,
        is_recomputed=recompute.layers is None,
    )


def answer_settings(
    config: RunConfig, role: str, terms: Sequence[Term | ChunkTerm], *, tokens: int
) -> CaptureSettings | None:
    """Return the settings of sent top-k ids; None where hidden states are sent.

    tokens: of the teacher's tokenizer. Raises ConfigError: the teacher has fewer than k.
    """
    section = config.models[role]
    k = section.transfer.k
    if section.transfer.what == "hidden":
        return None
    assert k is not None, "the rules ask for it"
    if k > tokens:
        whose = "its" if has_own_tokenizer(config, role) else "the"
        raise ConfigError(
            f"{role}.transfer.k = {k}: {whose} tokenizer has {tokens} tokens; lower it"
        )
    return sent_settings(
        terms_of(members(config).get(role), terms),
        k=k,
        vocab_size=tokens,
        sequence_length=section.sequence_length or config.data.sequence_length,
    )


def terms_of(
    teacher: OneOfSeveral | None, terms: Sequence[Term | ChunkTerm]
) -> tuple[Term | ChunkTerm, ...]:
    """Return the terms that a teacher serves: all, or of several those that may take it."""
    return tuple(terms) if teacher is None else teacher.terms(terms)


def sent_records(config: RunConfig, role: str) -> CaptureSettings | None:
    """Return the settings of sent top-k ids before the tokenizer is known."""
    terms = build_terms(config.objective.terms, _ANY_VOCABULARY)
    return answer_settings(config, role, terms, tokens=_ANY_VOCABULARY)


def answer_metrics(transfer: TransferConfig, terms: Sequence[Term | ChunkTerm]) -> tuple[str, ...]:
    """Return the names of the reported metrics: those of a live teacher, or of its store."""
    if transfer.what == "hidden":
        return live_metrics(terms)
    settings = sent_settings(terms, k=1, vocab_size=2, sequence_length=1)
    return stored_metrics(settings, terms)


def head_parts(
    plan: AnswerPlan, teacher: Architecture, head: Architecture, tokens: int
) -> tuple[Message, ...]:
    """Return the messages of the output head; `head`: the shape whose rows a receiver has."""
    sizes = ((teacher, plan.teacher.tensor), (head, plan.student.tensor))
    rows = [shape.padded_vocab_size(size) // size for shape, size in sizes]
    return head_messages(plan.teacher, plan.student, rows=(rows[0], rows[1]), size=tokens)

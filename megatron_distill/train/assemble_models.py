"""From a configuration to models: student, teacher, objective."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_distill.config import PARAMETERS, JobConfig, RunConfig, TermConfig
from megatron_distill.errors import ConfigError
from megatron_distill.losses import Term
from megatron_distill.models.architecture import Architecture, Execution
from megatron_distill.models.gpt import HiddenStateGPT, build_gpt, vocab_shard
from megatron_distill.models.head import align_head
from megatron_distill.ops import LogitRule, VocabShard
from megatron_distill.runtime.groups import Groups
from megatron_distill.signals.store import CaptureSettings
from megatron_distill.train.assemble_origin import Origin, find_origin
from megatron_distill.train.assemble_tokenizer import Vocabulary
from megatron_distill.train.objective import TokenObjective
from megatron_distill.train.teacher import OnlineTeacher

_TEACHER_SEED_OFFSET = 1


def build_student(
    config: RunConfig, origin: Origin, *, groups: Groups, execution: Execution
) -> list[HiddenStateGPT]:
    """Build the student's chunks with the weights of its origin, or random ones."""
    return _build(origin, groups=groups, execution=execution, seed=config.seed)


def find_teacher(config: RunConfig, student: Architecture, vocabulary: Vocabulary) -> Origin | None:
    """Return where the live teacher comes from; None without one, or where a store takes its place.

    Raises ConfigError or CheckpointError on all ranks, as `find_origin`, and where the vocabularies
    differ.

    Collective: world, short objects.
    """
    if config.teacher is None or config.teacher.store is not None:
        return None
    origin = find_origin(config.teacher, "teacher", config, vocabulary)
    check_vocabularies(config, student, origin.architecture)
    return origin


def check_vocabularies(config: RunConfig, student: Architecture, teacher: Architecture) -> None:
    """Raise ConfigError unless student and teacher have vocabularies of one size."""
    if student.vocab_size == teacher.vocab_size:
        return
    change = (
        f"set student.architecture.vocab_size to {teacher.vocab_size} and use the teacher's "
        "tokenizer"
    )
    if config.student.architecture is None:
        source = "hf" if config.student.hf is not None else "checkpoint"
        change = (
            f"choose a student.{source} with {teacher.vocab_size} tokens, or another teacher; a "
            "student that starts from random weights has student.architecture.vocab_size"
        )
    raise ConfigError(
        f"the teacher's vocabulary has {teacher.vocab_size} tokens and the student's "
        f"{student.vocab_size}; distillation on logits needs one vocabulary: {change}"
    )


def build_online_teacher(
    config: JobConfig,
    origin: Origin,
    *,
    groups: Groups,
    execution: Execution,
    shard: VocabShard | None = None,
) -> OnlineTeacher:
    """Build the frozen model, its head over the columns of `shard`, or else over its own."""
    (model,) = _build(
        origin,
        groups=groups,
        execution=execution,
        seed=teacher_seed(config),
        interleaved=False,
    )
    model.requires_grad_(False)
    model.eval()
    own = vocab_shard(origin.architecture, groups)
    head = None
    if groups.is_last_stage:
        weight = model.head_weight().detach()
        head = align_head(weight, own=own, wanted=shard or own, group=groups.tensor)
    return OnlineTeacher(
        model=model,
        architecture=origin.architecture,
        head_weight=head,
        groups=groups,
        sequence_length=config.data.sequence_length,
    )


def teacher_seed(config: JobConfig) -> int:
    """Return the seed of a teacher's random weights, which are not the student's."""
    return config.seed + _TEACHER_SEED_OFFSET


def build_objective(
    config: RunConfig,
    architecture: Architecture,
    terms: Sequence[Term],
    *,
    settings: CaptureSettings | None,
    groups: Groups,
) -> TokenObjective:
    """Translate the configured objective for a student of this architecture.

    `settings` are those of the stores, where the teacher is read from some.
    """
    metrics: tuple[str, ...] = ()
    if settings is not None:
        metrics = _stored_metrics(settings)
    elif config.teacher is not None:
        metrics = ("teacher_ce", "student_entropy", "teacher_entropy", "top1_agreement")
        metrics += ("topk_mass",) if any(term.top_k is not None for term in terms) else ()
    return TokenObjective(
        ce_weight=config.objective.ce_weight,
        terms=terms,
        metrics=metrics,
        chunk_tokens=config.objective.chunk_tokens,
        shard=vocab_shard(architecture, groups),
        logit_rule=LogitRule(architecture.logit_softcap, architecture.logit_scale),
        groups=groups,
    )


def _stored_metrics(settings: CaptureSettings) -> tuple[str, ...]:
    """Return what reports say of a teacher that was written down."""
    is_whole = settings.normalised_over == "vocabulary"
    scalars = ("teacher_ce", "teacher_entropy") if is_whole else ()
    ranked = () if settings.mode == "sampled" else ("top1_agreement", "topk_mass")
    return (*scalars, "student_entropy", *ranked)


def build_terms(config: RunConfig, architecture: Architecture) -> tuple[Term, ...]:
    """Translate the configured terms.

    Raises ConfigError, on all ranks, for a top-k larger than the vocabulary.
    """
    for index, term in enumerate(config.objective.terms):
        if term.top_k is not None and term.top_k > architecture.vocab_size:
            raise ConfigError(
                f"objective.terms.{index}.top_k is {term.top_k}, but the vocabulary has "
                f"{architecture.vocab_size} tokens; lower it, or leave it out to compare all"
            )
    schedules = {"weight_schedule", "temperature_schedule"}
    return tuple(
        Term(
            **term.model_dump(exclude={*PARAMETERS, *schedules}),
            parameters=term.parameters,
            temperatures=_temperatures(term),
        )
        for term in config.objective.terms
    )


def _temperatures(term: TermConfig) -> tuple[float, float] | None:
    schedule = term.temperature_schedule
    if schedule is None or schedule.to == term.temperature:
        return None
    return term.temperature, schedule.to


def _build(
    origin: Origin,
    *,
    groups: Groups,
    execution: Execution,
    seed: int,
    interleaved: bool = True,
) -> list[HiddenStateGPT]:
    chunks = build_gpt(
        origin.architecture,
        groups=groups,
        execution=execution,
        seed=seed if origin.open_weights is None else None,
        interleaved=interleaved,
    )
    if origin.open_weights is not None:
        origin.fill(chunks, groups)
    return chunks

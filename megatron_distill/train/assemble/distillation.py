"""From a configuration to an opened run: its teacher, objective, samples and validation."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron_distill.config import (
    FeatureConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ParallelConfig,
    ProjectorConfig,
    RunConfig,
    TrainConfig,
    ValueScheduleConfig,
    check_features,
    has_own_ranks,
    is_aligned,
    matched_layers,
    teacher_parallel,
)
from megatron_distill.data.collation import UnitRows
from megatron_distill.data.tokenizers.open import Vocabulary
from megatron_distill.errors import ConfigError
from megatron_distill.losses import (
    ChunkTerm,
    FeaturePair,
    RatioBalance,
    ScoreRule,
    Term,
    ValueSchedule,
)
from megatron_distill.models.architecture import Architecture, Execution
from megatron_distill.models.gpt import vocab_shard
from megatron_distill.models.layer_kinds import LayerKinds
from megatron_distill.models.pipeline_stages import (
    configured_layers,
    ranks_of_layers,
)
from megatron_distill.ops import LogitRule
from megatron_distill.runtime.groups import Groups, create_second_groups
from megatron_distill.runtime.launch import Device
from megatron_distill.signals import Teacher
from megatron_distill.train.assemble.alignment import TeacherTokens, open_teacher_tokens
from megatron_distill.train.assemble.data import RunSamples
from megatron_distill.train.assemble.models import (
    build_terms,
    layout_of,
    resolve_model,
    teacher_fp8,
    teacher_seed,
)
from megatron_distill.train.assemble.own_ranks import answer_metrics, open_own_ranks
from megatron_distill.train.assemble.sources import data_options, open_tokenizer
from megatron_distill.train.assemble.stored import Stored, open_stored
from megatron_distill.train.balancing import Balancing, Schedules
from megatron_distill.train.features import (
    FeatureLosses,
    ProjectorOptimization,
    Projectors,
    ProjectorShape,
    ScoreRules,
    projector_name,
)
from megatron_distill.train.model_source import ModelSource
from megatron_distill.train.objective import TokenObjective
from megatron_distill.train.teachers.live import (
    FeatureTeacher,
    OnlineTeacher,
    live_metrics,
    routes,
)
from megatron_distill.train.teachers.own_layout import OwnLayout
from megatron_distill.train.teachers.own_ranks import HeldOutAnswers, OwnRanksTeacher
from megatron_distill.train.teachers.stored import stored_metrics
from megatron_distill.train.throughput import stage_layers
from megatron_distill.train.validation import HeldOut, read_held_out


@dataclass(frozen=True)
class OpenRun:
    """A run's models and samples; its student is a source, which `execution` says how to build.

    Attributes:
        online: the live teacher, in the student's layout or its own; None without one.
        remote: the live teacher on ranks of its own, None without one.
        teacher: of the training samples: stored, live or with features; None without one.
    """

    vocabulary: Vocabulary
    student: ModelSource
    execution: Execution
    online: OnlineTeacher | OwnLayout | None
    remote: OwnRanksTeacher | None
    teacher: Teacher | None
    objective: TokenObjective
    samples: RunSamples

    @property
    def teacher_architecture(self) -> Architecture | None:
        """The shape of a live teacher."""
        live = self.online or self.remote
        return None if live is None else live.architecture

    @property
    def held_values(self) -> int:
        """Numbers that this rank holds for a teacher beside its model: a head, slots of answers."""
        if self.remote is not None:
            return self.remote.held_bytes // self.execution.dtype.itemsize
        return self.online.head_copy if isinstance(self.online, OwnLayout) else 0

    def objective_of(self, names: tuple[str, ...]) -> TokenObjective:
        """Return the objective with separate metrics of the sources, where they are several."""
        return replace(self.objective, source_names=names if len(names) > 1 else ())


def open_run(
    config: RunConfig, execution: Execution, groups: Groups, device: Device, resources: ExitStack
) -> OpenRun:
    """Open the tokenizer and the teacher; all checks run before the teacher's weights are read.

    A teacher behind `device.bridge` has ranks of its own.

    Raises a MegatronDistillError on all ranks.

    Collective: world, short objects.
    """
    section, chunk = config.objective, config.objective.chunk_tokens
    options = data_options(config.data, Path(config.output), shows_progress=config.logging.progress)
    tokenizer, vocabulary = open_tokenizer(config, options)
    source = resolve_model(config, "student", vocabulary)
    student = source.architecture
    terms = build_terms(section.terms, vocabulary.size)
    own: TeacherTokens | None = None
    if is_aligned(config):
        own = open_teacher_tokens(config, tokenizer, vocabulary, execution.device)
    of_teacher = vocabulary if own is None else own.vocabulary
    stored, online, remote = _open_teacher(
        config, terms, student, of_teacher, groups, execution, device, resources
    )
    length = config.data.sequence_length
    layers = _layers(config.parallel, student, online, groups, execution, sequence_length=length)
    aligned = None
    if own is not None:
        online, aligned = own.connect(online, student, vocabulary, groups, chunk_tokens=chunk)
    objective = TokenObjective(
        ce_weight=section.ce_weight,
        terms=terms,
        metrics=_metrics(config, terms, stored),
        chunk_tokens=chunk,
        shard=vocab_shard(student, groups, tokens=vocabulary.size),
        logit_rule=LogitRule(student.logit_softcap, student.logit_scale),
        groups=groups,
        aligned=aligned,
    )
    teacher: Teacher | None = stored.teacher if stored else online or remote
    if section.features:
        objective, teacher = _with_features(
            objective, section, config.optimizer, student, online, layers, config.seed
        )
    return OpenRun(
        vocabulary=vocabulary,
        student=source,
        execution=replace(execution, layers_per_stage=layers),
        online=online,
        remote=remote,
        teacher=teacher,
        objective=objective,
        samples=RunSamples(
            data=config.data,
            options=replace(options, teacher=own.reading) if own else options,
            tokenizer=tokenizer,
            stored=stored,
            seed=config.seed,
            held_out=config.validation.samples,
            teacher_length=None if own is None else own.sequence_length,
            units=_unit_rows(online, config.train, groups),
        ),
    )


def _layers(
    parallel: ParallelConfig,
    student: Architecture,
    online: OnlineTeacher | OwnLayout | None,
    groups: Groups,
    execution: Execution,
    *,
    sequence_length: int,
) -> tuple[int, ...]:
    """Return the layers of the student's stages; a teacher elsewhere is no work of theirs."""
    return stage_layers(
        groups.layout,
        student,
        online.architecture if online else None,
        given=parallel.layers_per_stage.student,
        sequence_length=sequence_length,
        is_recomputed=execution.recompute.layers is None,
    )


def _metrics(
    config: RunConfig, terms: Sequence[Term | ChunkTerm], stored: Stored | None
) -> tuple[str, ...]:
    """Return the names of the reported metrics besides the losses."""
    if stored is not None:
        return stored_metrics(stored.settings)
    if has_own_ranks(config):
        return answer_metrics(config.models["teacher"].transfer, terms)
    return () if config.teacher is None else live_metrics(terms)


def _unit_rows(
    online: OnlineTeacher | OwnLayout | None, train: TrainConfig, groups: Groups
) -> UnitRows | None:
    """Return the units of a step that a teacher with its own layout runs on this rank."""
    if not isinstance(online, OwnLayout):
        return None
    per_pass = train.micro_batch_size * groups.data.size()
    return online.unit_rows(train.global_batch_size // per_pass)


def _open_teacher(
    config: RunConfig,
    terms: Sequence[Term | ChunkTerm],
    student: Architecture,
    vocabulary: Vocabulary,
    groups: Groups,
    execution: Execution,
    device: Device,
    resources: ExitStack,
) -> tuple[Stored | None, OnlineTeacher | OwnLayout | None, OwnRanksTeacher | None]:
    """Open the stores, build the live teacher, or reach one elsewhere; at most one exists."""
    section = config.teacher
    if section is None:
        return None, None, None
    if device.bridge is not None:
        remote = open_own_ranks(
            config, student, terms, vocabulary, groups, execution, device, resources
        )
        return None, None, remote
    if section.store is not None:
        plain = [term for term in terms if isinstance(term, Term)]
        stored = open_stored(config, plain, student, vocabulary, groups, execution.device)
        resources.callback(stored.close)
        return stored, None, None
    layers = config.parallel.layers_per_stage.teacher
    source = resolve_model(config, "teacher", vocabulary)
    # The head's rows are those of the student's vocabulary, unless the teacher has another one.
    of_head = source.architecture if is_aligned(config) else student
    execution = replace(execution, fp8=teacher_fp8(section), layers_per_stage=layers)
    seed, length = teacher_seed(config.seed), section.sequence_length or config.data.sequence_length
    shard = vocab_shard(of_head, groups, tokens=vocabulary.size)
    own = layout_of(teacher_parallel(config))
    if own == groups.layout.without_virtual_stages():
        shared = OnlineTeacher.of_source(
            source,
            execution,
            seed=seed,
            sequence_length=length,
            shard=shard,
            groups=groups,
            offload_hidden=section.offload_hidden,
        )
        return None, shared, None
    apart = OwnLayout.of_source(
        source,
        execution,
        seed=seed,
        sequence_length=length,
        shard=shard,
        groups=groups,
        own_groups=create_second_groups(own, timeout_minutes=config.runtime.timeout_seconds / 60),
        offload_hidden=section.offload_hidden,
    )
    return None, apart, None


def open_held_out(
    train: TrainConfig, section: ObjectiveConfig, opened: OpenRun, groups: Groups
) -> HeldOut:
    """Read the held-out samples; all held-out losses use the weights at the end of the schedules.

    Raises DataError or StoreError on all ranks.
    """
    samples = opened.samples
    names = samples.names(held_out=True)
    steps = []
    if samples.held_out:
        steps = read_held_out(
            samples.loader(train, groups, opened.execution.device, held_out=True),
            samples=samples.held_out,
            global_batch_size=train.global_batch_size,
            names=names,
        )
    # A store has no records of a corpus's held-out samples.
    has_signals = samples.stored is None or not samples.data.sources
    objective = opened.objective_of(names)
    schedules = build_balancing(section, objective).schedules
    final = schedules.applied(objective, steps_done=sys.maxsize)
    teacher = opened.teacher if has_signals else None
    if opened.remote is not None:
        teacher = HeldOutAnswers(opened.remote, len(steps))
    return HeldOut.of(steps, teacher, final)


def build_balancing(config: ObjectiveConfig, objective: TokenObjective) -> Balancing:
    """Translate `objective.balance` and every schedule of the objective.

    The feature losses' weights come from `objective`, which has the pairs of layers.
    """
    balance = config.balance
    return Balancing(
        mode=balance.mode,
        schedules=Schedules(
            ce=_schedule(config.ce_weight, config.ce_weight_schedule),
            terms=tuple(_schedule(term.weight, term.weight_schedule) for term in config.terms),
            temperatures=tuple(
                _schedule(term.temperature, term.temperature_schedule) for term in config.terms
            ),
            features=tuple(map(ValueSchedule.unchanging, objective.feature_weights)),
            alpha=_schedule(balance.alpha, balance.alpha_schedule),
        ),
        ratios=RatioBalance(balance.epsilon, balance.clamp),
        decay=balance.ema,
        from_last_step=balance.raw_losses == "previous",
        per_micro_batch=balance.per_microbatch,
    )


def _schedule(value: float, schedule: ValueScheduleConfig | None) -> ValueSchedule:
    if schedule is None:
        return ValueSchedule.unchanging(value)
    return ValueSchedule(
        value, schedule.to, schedule.kind, schedule.steps or 0, schedule.start_step
    )


def _with_features(
    objective: TokenObjective,
    section: ObjectiveConfig,
    optimizer: OptimizerConfig,
    student: Architecture,
    online: OnlineTeacher | OwnLayout | None,
    layers: tuple[int, ...],
    seed: int,
) -> tuple[TokenObjective, Teacher]:
    """Add the feature losses to both sides; `layers` of each of the student's stages."""
    assert online is not None, "the rules ask for a live teacher"
    device = next(online.model.parameters()).device
    features = _build_features(section, optimizer, student, online, seed, device)
    ranks = online.groups.layout.pipeline
    of_student = ranks_of_layers(layers, ranks)
    weights = tuple(pair.weight for pair in features.pairs)
    with_features = replace(objective, features=features, feature_weights=weights)
    if isinstance(online, OwnLayout):
        return with_features, online.with_features(features.pairs, of_student)
    of_teacher = ranks_of_layers(configured_layers(online.model.config), ranks)
    ways = routes(features.pairs, of_student=of_student, of_teacher=of_teacher)
    return with_features, FeatureTeacher(online, ways)


def _build_features(
    section: ObjectiveConfig,
    optimizer: OptimizerConfig,
    student: Architecture,
    online: OnlineTeacher | OwnLayout,
    seed: int,
    device: torch.device,
) -> FeatureLosses:
    """Return the feature losses of a run.

    Raises ConfigError, on all ranks, for layers that a model does not have, and for attention maps
    of layers that see different keys.
    """
    teacher = online.architecture
    check_features(section.features, student.num_layers, teacher.num_layers)
    pairs = _pairs(section.features, student.num_layers, teacher.num_layers)
    _check_windows(pairs, student, teacher)
    return FeatureLosses(
        pairs,
        projectors=_projectors(
            section.projector,
            optimizer,
            [pair for pair in pairs if not pair.is_of_attention],
            (student.hidden_size, teacher.hidden_size),
            seed=seed,
            groups=online.groups,
            device=device,
        ),
        rules=ScoreRules(_score_rule(student), _score_rule(teacher)),
        groups=online.groups,
        device=device,
    )


def _pairs(
    entries: Sequence[FeatureConfig], student_layers: int, teacher_layers: int
) -> tuple[FeaturePair, ...]:
    found = []
    for entry in entries:
        layers = matched_layers(entry, student_layers, teacher_layers)
        weight = entry.weight / len(layers)
        found += [FeaturePair(*pair, entry.loss, weight) for pair in layers]
    return tuple(found)


def _check_windows(
    pairs: tuple[FeaturePair, ...], student: Architecture, teacher: Architecture
) -> None:
    """Raise ConfigError where teacher and student layers attend to different keys."""
    of_student, of_teacher = LayerKinds.of(student).layers, LayerKinds.of(teacher).layers
    problems = [
        f"layer {pair.student} of the student has a sliding_window of {own.window}, layer "
        f"{pair.teacher} of the teacher one of {other.window}"
        for pair in pairs
        if pair.is_of_attention
        for own, other in [(of_student[pair.student - 1], of_teacher[pair.teacher - 1])]
        if own.window != other.window
    ]
    if problems:
        raise ConfigError(
            "objective.features with loss = 'attention' need student and teacher layers with the "
            f"same attention window: {'; '.join(problems)}; pair such layers, or use another loss"
        )


def _score_rule(architecture: Architecture) -> ScoreRule:
    scalar = architecture.attention_scalar or architecture.head_size
    return ScoreRule(
        scale=scalar**-0.5,
        softcap=architecture.attention_softcap,
        heads=architecture.num_attention_heads,
    )


def _projectors(
    wanted: ProjectorConfig,
    optimizer: OptimizerConfig,
    pairs: Sequence[FeaturePair],
    hidden_sizes: tuple[int, int],
    *,
    seed: int,
    groups: Groups,
    device: torch.device,
) -> Projectors | None:
    """Return the projectors from the student's hidden size to the teacher's, where needed."""
    student_size, teacher_size = hidden_sizes
    if not pairs or (student_size == teacher_size and not wanted.always):
        return None
    within = (wanted.hidden_size or teacher_size,) if wanted.kind == "mlp" else ()
    decay = optimizer.weight_decay if wanted.weight_decay is None else wanted.weight_decay
    return Projectors(
        ProjectorShape(
            names=tuple(
                dict.fromkeys(projector_name(pair, shared=wanted.shared) for pair in pairs)
            ),
            sizes=(student_size, *within, teacher_size),
        ),
        ProjectorOptimization(
            learning_rate=wanted.learning_rate or optimizer.learning_rate,
            weight_decay=decay,
            betas=(optimizer.beta1, optimizer.beta2),
            epsilon=optimizer.epsilon,
            is_decoupled=optimizer.name == "adamw",
            clip_grad_norm=optimizer.clip_grad_norm,
        ),
        seed=seed,
        groups=groups,
        device=device,
    )

"""From a configuration to the teacher, the objective and the validation of a run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from megatron_distill.config import (
    DataConfig,
    FeatureConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ParallelConfig,
    ProjectorConfig,
    TrainConfig,
    ValueScheduleConfig,
    check_features,
    matched_layers,
)
from megatron_distill.errors import ConfigError
from megatron_distill.losses import FeaturePair, RatioBalance, ScoreRule, Term, ValueSchedule
from megatron_distill.models.architecture import Architecture, Execution
from megatron_distill.models.gpt import vocab_shard
from megatron_distill.models.layer_kinds import LayerKinds
from megatron_distill.models.pipeline_stages import configured_layers, ranks_of_layers
from megatron_distill.runtime.groups import Groups
from megatron_distill.signals import Teacher
from megatron_distill.train.assemble.data import RunSamples, read_validation
from megatron_distill.train.assemble.models import (
    build_objective,
    build_online_teacher,
    find_origin,
    live_metrics,
    stored_metrics,
)
from megatron_distill.train.assemble.stages import teacher_layers
from megatron_distill.train.assemble.stored import Stored, open_stored
from megatron_distill.train.assemble.tokenizer import Vocabulary
from megatron_distill.train.balancing import Balancing, Schedules
from megatron_distill.train.features import (
    FeatureLosses,
    ProjectorOptimization,
    Projectors,
    ProjectorShape,
    ScoreRules,
    projector_name,
)
from megatron_distill.train.objective import TokenObjective
from megatron_distill.train.teachers.live import FeatureTeacher, OnlineTeacher, routes
from megatron_distill.train.validation import HeldOut


@dataclass(frozen=True)
class Distillation:
    """The teacher of a run (live, stored or none), and the parts that depend on it."""

    stored: Stored | None
    online: OnlineTeacher | None
    features: Features | None
    objective: TokenObjective

    @property
    def teacher(self) -> Teacher | None:
        """The teacher of the training samples."""
        if self.features is not None:
            return self.features.teacher
        return self.stored.teacher if self.stored else self.online

    def objective_of(self, names: tuple[str, ...]) -> TokenObjective:
        """Return the objective with separate metrics of the sources, where they are several."""
        return replace(self.objective, source_names=names if len(names) > 1 else ())


def open_teacher(
    section: ModelConfig | None,
    terms: Sequence[Term],
    *,
    student: Architecture,
    vocabulary: Vocabulary,
    data: DataConfig,
    parallel: ParallelConfig,
    seed: int,
    groups: Groups,
    execution: Execution,
    resources: ExitStack,
) -> Stored | OnlineTeacher | None:
    """Open the stores, or build the live teacher; all checks run before its weights are read.

    Raises a MegatronDistillError on all ranks.

    Collective: world, short objects.
    """
    if section is None:
        return None
    if section.store is not None:
        stored = open_stored(
            section,
            student=student,
            terms=terms,
            vocabulary=vocabulary,
            data=data,
            parallel=parallel,
            seed=seed,
            groups=groups,
            device=execution.device,
        )
        resources.callback(stored.close)
        return stored
    length = data.sequence_length
    origin = find_origin(section, "teacher", vocabulary, parallel=parallel, sequence_length=length)
    given = parallel.layers_per_stage.teacher
    return build_online_teacher(
        origin,
        seed=seed,
        sequence_length=length,
        groups=groups,
        execution=execution,
        shard=vocab_shard(student, groups, tokens=vocabulary.size),
        layers=teacher_layers(given, origin.architecture, layout=groups.layout),
        offload_hidden=section.offload_hidden,
    )


def assemble_distillation(
    section: ObjectiveConfig,
    terms: Sequence[Term],
    opened: Stored | OnlineTeacher | None,
    *,
    student: Architecture,
    layers: tuple[int, ...],
    vocabulary: Vocabulary,
    optimizer: OptimizerConfig,
    seed: int,
    groups: Groups,
    device: torch.device,
) -> Distillation:
    """Build the objective of a student with this teacher.

    `layers` of each of the student's stages; `optimizer` has the defaults of the projectors of
    feature losses. Raises ConfigError on all ranks.
    """
    if isinstance(opened, Stored):
        stored, online, metrics = opened, None, stored_metrics(opened.settings)
    else:
        stored, online, metrics = None, opened, live_metrics(terms) if opened else ()
    shard = vocab_shard(student, groups, tokens=vocabulary.size)
    objective = build_objective(
        section, terms, student, metrics=metrics, shard=shard, groups=groups
    )
    features = None
    if section.features:
        assert online is not None, "the rules ask for a live teacher"
        features = build_features(
            section,
            optimizer,
            student,
            online,
            layers=layers,
            seed=seed,
            groups=groups,
            device=device,
        )
        objective = replace(objective, features=features.losses, feature_weights=features.weights)
    return Distillation(stored, online, features, objective)


def assemble_held_out(
    samples: RunSamples,
    train: TrainConfig,
    objective: ObjectiveConfig,
    distillation: Distillation,
    *,
    groups: Groups,
    device: torch.device,
) -> HeldOut:
    """Read the held-out samples. Raises DataError or StoreError on all ranks."""
    steps = read_validation(samples, train, groups=groups, device=device)
    listener = distillation.teacher
    if samples.stored is not None and samples.data.sources:
        listener = None  # a store has no records of a corpus's held-out samples
    measured = distillation.objective_of(samples.names(held_out=True))
    return HeldOut.of(steps, listener, final_objective(measured, objective))


@dataclass(frozen=True)
class Features:
    """Both sides of the feature losses of a run."""

    losses: FeatureLosses
    teacher: FeatureTeacher

    @property
    def weights(self) -> tuple[float, ...]:
        """The configured weight of each pair."""
        return tuple(pair.weight for pair in self.losses.pairs)


def build_features(
    section: ObjectiveConfig,
    optimizer: OptimizerConfig,
    student: Architecture,
    online: OnlineTeacher,
    *,
    layers: tuple[int, ...],
    seed: int,
    groups: Groups,
    device: torch.device,
) -> Features:
    """Return the feature losses of a run; `layers` of each of the student's stages.

    Raises ConfigError, on all ranks, for layers that a model does not have, and for attention maps
    of layers that see different keys.
    """
    teacher = online.architecture
    check_features(section.features, student.num_layers, teacher.num_layers)
    pairs = _pairs(section.features, student.num_layers, teacher.num_layers)
    _check_windows(pairs, student, teacher)
    losses = FeatureLosses(
        pairs,
        projectors=_projectors(
            section.projector,
            optimizer,
            [pair for pair in pairs if not pair.is_of_attention],
            (student.hidden_size, teacher.hidden_size),
            seed=seed,
            groups=groups,
            device=device,
        ),
        rules=ScoreRules(_score_rule(student), _score_rule(teacher)),
        groups=groups,
        device=device,
    )
    ranks = groups.layout.pipeline
    ways = routes(
        pairs,
        of_student=ranks_of_layers(layers, ranks),
        of_teacher=ranks_of_layers(configured_layers(online.model.config), ranks),
    )
    return Features(losses, FeatureTeacher(online, ways))


def _pairs(
    entries: Sequence[FeatureConfig], student_layers: int, teacher_layers: int
) -> tuple[FeaturePair, ...]:
    found = []
    for entry in entries:
        layers = matched_layers(entry, student_layers, teacher_layers)
        weight = entry.weight / len(layers)
        found += [FeaturePair(mine, theirs, entry.loss, weight) for mine, theirs in layers]
    return tuple(found)


def _check_windows(
    pairs: tuple[FeaturePair, ...], student: Architecture, teacher: Architecture
) -> None:
    """Raise ConfigError where teacher and student layers attend to different keys."""
    mine, theirs = LayerKinds.of(student).layers, LayerKinds.of(teacher).layers
    problems = [
        f"layer {pair.student} of the student has a sliding_window of {own.window}, layer "
        f"{pair.teacher} of the teacher one of {other.window}"
        for pair in pairs
        if pair.is_of_attention
        for own, other in [(mine[pair.student - 1], theirs[pair.teacher - 1])]
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
    mine, theirs = hidden_sizes
    if not pairs or (mine == theirs and not wanted.always):
        return None
    within = (wanted.hidden_size or theirs,) if wanted.kind == "mlp" else ()
    decay = optimizer.weight_decay if wanted.weight_decay is None else wanted.weight_decay
    return Projectors(
        ProjectorShape(
            names=tuple(
                dict.fromkeys(projector_name(pair, shared=wanted.shared) for pair in pairs)
            ),
            sizes=(mine, *within, theirs),
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


def final_objective(objective: TokenObjective, config: ObjectiveConfig) -> TokenObjective:
    """The objective with the weights and temperatures at the end of its schedules.

    All held-out losses of a run use this objective, so that they are comparable.
    """
    balancing = build_balancing(config, objective)
    return balancing.schedules.applied(objective, steps_done=sys.maxsize)


def _schedule(value: float, schedule: ValueScheduleConfig | None) -> ValueSchedule:
    if schedule is None:
        return ValueSchedule.unchanging(value)
    return ValueSchedule(
        value, schedule.to, schedule.kind, schedule.steps or 0, schedule.start_step
    )

"""From a configuration to the teacher, the objective and the validation of a run."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from megatron_distill.config import (
    ObjectiveConfig,
    RunConfig,
    ValueScheduleConfig,
    check_features,
    matched_layers,
)
from megatron_distill.data.tokenizers.open import Tokenizer
from megatron_distill.errors import ConfigError
from megatron_distill.losses import FeaturePair, RatioBalance, ScoreRule, ValueSchedule
from megatron_distill.models.architecture import Architecture, Execution
from megatron_distill.models.gpt import vocab_shard
from megatron_distill.models.layer_kinds import LayerKinds
from megatron_distill.models.pipeline_stages import ranks_of_layers
from megatron_distill.runtime.groups import Groups
from megatron_distill.signals import Teacher
from megatron_distill.train.assemble.data import read_validation
from megatron_distill.train.assemble.models import (
    build_objective,
    build_online_teacher,
    build_terms,
    find_teacher,
)
from megatron_distill.train.assemble.sources import source_names
from megatron_distill.train.assemble.stages import student_layers, teacher_layers
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


def assemble_distillation(
    config: RunConfig,
    vocabulary: Vocabulary,
    student: Architecture,
    *,
    execution: Execution,
    groups: Groups,
    device: torch.device,
    resources: ExitStack,
) -> Distillation:
    """Open or build the teacher; all checks run before its weights are read.
    Raises a MegatronDistillError on all ranks.
    """
    terms = build_terms(config, vocabulary.size)
    shard = vocab_shard(student, groups, tokens=vocabulary.size)
    origin = find_teacher(config, vocabulary)
    stored = open_stored(
        config, student=student, terms=terms, vocabulary=vocabulary, groups=groups, device=device
    )
    if stored is not None:
        resources.callback(stored.close)
    online = None
    if origin is not None:
        online = build_online_teacher(
            config, origin, groups=groups, execution=execution, shard=shard
        )
    settings = stored.settings if stored else None
    objective = build_objective(
        config, student, terms, settings=settings, shard=shard, groups=groups
    )
    features = build_features(config, student, online, groups=groups, device=device)
    if features is not None:
        objective = replace(objective, features=features.losses, feature_weights=features.weights)
    objective = replace(objective, source_names=_blended(source_names(config, held_out=False)))
    return Distillation(stored, online, features, objective)


def assemble_held_out(
    config: RunConfig,
    tokenizer: Tokenizer | None,
    distillation: Distillation,
    *,
    groups: Groups,
    device: torch.device,
) -> HeldOut:
    """Read the held-out samples. Raises DataError or StoreError on all ranks."""
    stored = distillation.stored
    steps = read_validation(config, tokenizer, stored, groups=groups, device=device)
    names = _blended(source_names(config, held_out=True))
    listener = distillation.teacher
    if stored is not None and config.data.sources:
        listener = None  # a store has no records of a corpus's held-out samples
    measured = replace(distillation.objective, source_names=names)
    return HeldOut.of(steps, listener, final_objective(measured, config.objective))


def _blended(names: tuple[str, ...]) -> tuple[str, ...]:
    """The names of sources with separate metrics; a single source has none."""
    return names if len(names) > 1 else ()


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
    config: RunConfig,
    student: Architecture,
    online: OnlineTeacher | None,
    *,
    groups: Groups,
    device: torch.device,
) -> Features | None:
    """Return the feature losses of a run, or None where it has none.

    Raises ConfigError, on all ranks, for layers that a model does not have, and for attention maps
    of layers that see different keys.
    """
    if not config.objective.features:
        return None
    assert online is not None, "the rules ask for a live teacher"
    teacher = online.architecture
    check_features(config.objective.features, student.num_layers, teacher.num_layers)
    pairs = _pairs(config, student, teacher)
    _check_windows(pairs, student, teacher)
    losses = FeatureLosses(
        pairs,
        projectors=_projectors(config, pairs, student, teacher, groups=groups, device=device),
        rules=ScoreRules(_score_rule(student), _score_rule(teacher)),
        groups=groups,
        device=device,
    )
    layout = groups.layout
    ways = routes(
        pairs,
        of_student=ranks_of_layers(
            student_layers(config, student, teacher, layout=layout), layout.pipeline
        ),
        of_teacher=ranks_of_layers(teacher_layers(config, teacher, layout=layout), layout.pipeline),
    )
    return Features(losses, FeatureTeacher(online, ways))


def _pairs(
    config: RunConfig, student: Architecture, teacher: Architecture
) -> tuple[FeaturePair, ...]:
    found = []
    for entry in config.objective.features:
        layers = matched_layers(entry, student.num_layers, teacher.num_layers)
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
    config: RunConfig,
    pairs: tuple[FeaturePair, ...],
    student: Architecture,
    teacher: Architecture,
    *,
    groups: Groups,
    device: torch.device,
) -> Projectors | None:
    wanted, optimizer = config.objective.projector, config.optimizer
    projected = [pair for pair in pairs if not pair.is_of_attention]
    is_needed = student.hidden_size != teacher.hidden_size or wanted.always
    if not (projected and is_needed):
        return None
    within = (wanted.hidden_size or teacher.hidden_size,) if wanted.kind == "mlp" else ()
    decay = optimizer.weight_decay if wanted.weight_decay is None else wanted.weight_decay
    return Projectors(
        ProjectorShape(
            names=tuple(
                dict.fromkeys(projector_name(pair, shared=wanted.shared) for pair in projected)
            ),
            sizes=(student.hidden_size, *within, teacher.hidden_size),
        ),
        ProjectorOptimization(
            learning_rate=wanted.learning_rate or optimizer.learning_rate,
            weight_decay=decay,
            betas=(optimizer.beta1, optimizer.beta2),
            epsilon=optimizer.epsilon,
            is_decoupled=optimizer.name == "adamw",
            clip_grad_norm=optimizer.clip_grad_norm,
        ),
        seed=config.seed,
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

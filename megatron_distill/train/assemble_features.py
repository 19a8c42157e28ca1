"""From a configuration to feature losses: which layers, what is between them, who speaks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_distill.config import RunConfig, check_features, matched_layers
from megatron_distill.errors import ConfigError
from megatron_distill.losses import FeaturePair, ScoreRule
from megatron_distill.models.architecture import Architecture
from megatron_distill.models.layer_kinds import LayerKinds
from megatron_distill.runtime.groups import Groups
from megatron_distill.train.feature_teacher import FeatureTeacher, routes
from megatron_distill.train.features import FeatureLosses, ScoreRules
from megatron_distill.train.projectors import (
    ProjectorOptimization,
    Projectors,
    ProjectorShape,
    projector_name,
)
from megatron_distill.train.teacher import OnlineTeacher


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
    ways = routes(
        pairs,
        student_layers=student.num_layers,
        teacher_layers=teacher.num_layers,
        layout=groups.layout,
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
    """Raise ConfigError where the teacher sees keys that the student does not, or fewer."""
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
            "objective.features with loss = 'attention' need layers that see the same keys: "
            f"{'; '.join(problems)}; pair layers of one window, or use another loss"
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

"""From a configuration to feature losses: which layers, what is between them, who speaks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_distill.config import RunConfig, check_features, matched_layers
from megatron_distill.losses import FeaturePair
from megatron_distill.models.architecture import Architecture
from megatron_distill.runtime.groups import Groups
from megatron_distill.train.feature_teacher import FeatureTeacher, routes
from megatron_distill.train.features import FeatureLosses
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

    Raises ConfigError, on all ranks, for layers that a model does not have.
    """
    if not config.objective.features:
        return None
    assert online is not None, "the rules ask for a live teacher"
    teacher = online.architecture
    check_features(config.objective.features, student.num_layers, teacher.num_layers)
    pairs = _pairs(config, student, teacher)
    losses = FeatureLosses(
        pairs,
        projectors=_projectors(config, pairs, student, teacher, groups=groups, device=device),
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
    if student.hidden_size == teacher.hidden_size and not wanted.always:
        return None
    within = (wanted.hidden_size or teacher.hidden_size,) if wanted.kind == "mlp" else ()
    decay = optimizer.weight_decay if wanted.weight_decay is None else wanted.weight_decay
    return Projectors(
        ProjectorShape(
            names=tuple(
                dict.fromkeys(projector_name(pair, shared=wanted.shared) for pair in pairs)
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

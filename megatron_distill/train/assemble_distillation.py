"""From a configuration to who teaches, what is learned from it, and on what it is measured."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from megatron_distill.config import RunConfig
from megatron_distill.data.tokenizer import Tokenizer
from megatron_distill.models.architecture import Architecture, Execution
from megatron_distill.models.gpt import vocab_shard
from megatron_distill.runtime.groups import Groups
from megatron_distill.signals import Teacher
from megatron_distill.train.assemble_balancing import final_objective
from megatron_distill.train.assemble_data import read_validation
from megatron_distill.train.assemble_features import Features, build_features
from megatron_distill.train.assemble_models import (
    build_objective,
    build_online_teacher,
    build_terms,
    find_teacher,
)
from megatron_distill.train.assemble_sources import source_names
from megatron_distill.train.assemble_store import Stored, open_stored
from megatron_distill.train.assemble_tokenizer import Vocabulary
from megatron_distill.train.objective import TokenObjective
from megatron_distill.train.teacher import OnlineTeacher
from megatron_distill.train.validation import HeldOut


@dataclass(frozen=True)
class Distillation:
    """The teacher of a run, live or stored or none, and what follows from it."""

    stored: Stored | None
    online: OnlineTeacher | None
    features: Features | None
    objective: TokenObjective

    @property
    def teacher(self) -> Teacher | None:
        """Who speaks about the training samples."""
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
    """Open or build the teacher; all checks first, so that they come before its weights are read.

    Raises a MegatronDistillError on all ranks.
    """
    terms = build_terms(config, student)
    origin = find_teacher(config, student, vocabulary)
    stored = open_stored(
        config, student=student, terms=terms, vocabulary=vocabulary, groups=groups, device=device
    )
    if stored is not None:
        resources.callback(stored.close)
    online = None
    if origin is not None:
        online = build_online_teacher(
            config, origin, groups=groups, execution=execution, shard=vocab_shard(student, groups)
        )
    settings = stored.settings if stored else None
    objective = build_objective(config, student, terms, settings=settings, groups=groups)
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
    """Read what is held out. Raises DataError or StoreError on all ranks."""
    stored = distillation.stored
    steps = read_validation(config, tokenizer, stored, groups=groups, device=device)
    names = _blended(source_names(config, held_out=True))
    listener = distillation.teacher
    if stored is not None and config.data.sources:
        listener = None  # a store knows its own samples and none of a corpus's held-out ones
    measured = replace(distillation.objective, source_names=names)
    return HeldOut.of(steps, listener, final_objective(measured, config.objective))


def _blended(names: tuple[str, ...]) -> tuple[str, ...]:
    """The sources that are told apart: one alone is the whole."""
    return names if len(names) > 1 else ()

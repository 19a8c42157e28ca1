"""From a configuration to who teaches, what is learned from it, and on what it is measured."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from megatron_distill.config import RunConfig
from megatron_distill.data.tokenizer import Tokenizer
from megatron_distill.models.architecture import Architecture, Execution
from megatron_distill.runtime.groups import Groups
from megatron_distill.signals import Teacher
from megatron_distill.train.assemble_balancing import final_objective
from megatron_distill.train.assemble_data import read_validation
from megatron_distill.train.assemble_features import Features, build_features
from megatron_distill.train.assemble_models import build_objective, build_teacher, build_terms
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
    held_out: HeldOut

    @property
    def teacher(self) -> Teacher | None:
        """Who speaks about the training samples."""
        if self.features is not None:
            return self.features.teacher
        return self.stored.teacher if self.stored else self.online


def assemble_distillation(
    config: RunConfig,
    tokenizer: Tokenizer | None,
    vocabulary: Vocabulary,
    student: Architecture,
    *,
    execution: Execution,
    groups: Groups,
    device: torch.device,
    resources: ExitStack,
) -> Distillation:
    """Open or build the teacher and read what is held out.

    Raises a MegatronDistillError on all ranks.
    """
    terms = build_terms(config, student)
    stored = open_stored(
        config, student=student, terms=terms, vocabulary=vocabulary, groups=groups, device=device
    )
    if stored is not None:
        resources.callback(stored.close)
    steps = read_validation(config, tokenizer, stored, groups=groups, device=device)
    online = build_teacher(
        config, student=student, groups=groups, execution=execution, vocabulary=vocabulary
    )
    settings = stored.settings if stored else None
    objective = build_objective(config, student, terms, settings=settings, groups=groups)
    features = build_features(config, student, online, groups=groups, device=device)
    if features is not None:
        objective = replace(objective, features=features.losses, feature_weights=features.weights)
    measured = replace(objective, source_names=_blended(source_names(config, held_out=True)))
    objective = replace(objective, source_names=_blended(source_names(config, held_out=False)))
    listener: Teacher | None = online
    if features is not None:
        listener = features.teacher
    if stored is not None:
        # A store knows its own samples and none of a corpus's held-out ones.
        listener = None if config.data.sources else stored.teacher
    held_out = HeldOut.of(steps, listener, final_objective(measured, config.objective))
    return Distillation(stored, online, features, objective, held_out)


def _blended(names: tuple[str, ...]) -> tuple[str, ...]:
    """The sources that are told apart: one alone is the whole."""
    return names if len(names) > 1 else ()

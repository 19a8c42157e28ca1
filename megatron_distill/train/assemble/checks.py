"""Checks of a job before any of its data is read: models, stores, files, an earlier run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_distill.config import (
    CheckpointConfig,
    JobConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    TermConfig,
)
from megatron_distill.errors import ConfigError
from megatron_distill.store import find_stores
from megatron_distill.train.assemble.identity import require_files
from megatron_distill.train.assemble.models import build_terms, read_origin
from megatron_distill.train.assemble.tokenizer import Vocabulary
from megatron_distill.train.checkpoint.folder import complete_checkpoints
from megatron_distill.train.metrics import require_installed

__all__ = ["check_models", "check_start", "newest_checkpoint"]


def check_start(config: JobConfig) -> None:
    """Raise a MegatronDistillError for errors that do not depend on tokenizer or data.

    Nothing is written, so a start that fails here changes no file. Needs no world; call on the
    rank that reads, inside `together`.
    """
    check_models(
        config.models,
        Vocabulary.unknown(),
        parallel=config.parallel,
        sequence_length=config.data.sequence_length,
    )
    for model in config.models.values():
        for entry in model.store or ():
            find_stores([entry.path])
    require_files(config.data)
    if isinstance(config, RunConfig):
        newest_checkpoint(config.output, config.checkpoint)
        require_installed(
            tensorboard=config.logging.tensorboard, wandb=config.logging.wandb is not None
        )


def check_models(
    models: Mapping[str, ModelConfig],
    vocabulary: Vocabulary,
    *,
    parallel: ParallelConfig,
    sequence_length: int,
    terms: Sequence[TermConfig] = (),
) -> None:
    """Raise ConfigError or CheckpointError unless the models exist and fit the job.

    models: by role. terms: of the objective. Reads configurations and the files' headers, no
    weights. Needs no world.
    """
    for role, model in models.items():
        if _is_named(model):
            read_origin(model, role, vocabulary, parallel=parallel, sequence_length=sequence_length)
    if vocabulary.is_known:
        build_terms(terms, vocabulary.size)


def _is_named(model: ModelConfig) -> bool:
    """Return whether a section names a model, and not only stores."""
    others = (model.hf, model.checkpoint, model.architecture)
    return model.store is None or any(source is not None for source in others)


def newest_checkpoint(output: str, section: CheckpointConfig) -> Path | None:
    """Return the newest complete checkpoint of an earlier start, to resume from.

    Raises ConfigError: there is one, and `checkpoint.resume` is off.
    """
    complete = complete_checkpoints(Path(output) / "checkpoints")
    newest = complete[-1] if complete else None
    if newest is not None and section.save and not section.resume:
        raise ConfigError(
            f"checkpoint.resume=false, but {newest} of an earlier run exists: remove it, change "
            "`output`, or set checkpoint.resume=true"
        )
    return newest if section.resume else None

"""A start: its checks before any data is read, its configuration, and the changes to it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import yaml
from pydantic import ValidationError

from megatron_distill.config import CheckpointConfig, JobConfig, RunConfig, aligned_role, to_yaml
from megatron_distill.data.tokenizers.open import Vocabulary
from megatron_distill.errors import ConfigError
from megatron_distill.log import get_logger
from megatron_distill.runtime.collectives import together
from megatron_distill.store import find_stores
from megatron_distill.train.assemble.models import read_model
from megatron_distill.train.assemble.sources import require_files
from megatron_distill.train.checkpoint.description import Description, complete_checkpoints
from megatron_distill.train.metrics import require_installed
from megatron_distill.train.run_folder import (
    SETTINGS_FILE,
    keep_settings,
    setting_changes,
    writing_settings,
)

__all__ = ["check_models", "check_start", "newest_checkpoint", "note_start"]

_LOGGER = get_logger(__name__)


def check_start(config: JobConfig) -> None:
    """Raise a MegatronDistillError for errors that do not depend on tokenizer or data.

    Nothing is written, so a start that fails here changes no file. Needs no world; call on the
    rank that reads, inside `together`.
    """
    check_models(config, None)
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
    config: JobConfig, vocabulary: Vocabulary | None, *, of_teacher: Vocabulary | None = None
) -> None:
    """Raise ConfigError or CheckpointError unless the models exist and fit the job.

    `vocabulary` None: not known yet. `of_teacher`: of a teacher with a tokenizer of its own. Reads
    configurations and the files' headers, no weights. Needs no world.
    """
    for role, model in config.models.items():
        if model.store is None or model.has_model:
            is_own = of_teacher is not None and role == aligned_role(config)
            read_model(config, role, of_teacher if is_own else vocabulary)


def newest_checkpoint(output: str, section: CheckpointConfig) -> Path | None:
    """Return the newest complete checkpoint of an earlier start, to resume from.

    Raises ConfigError: there is one, and `checkpoint.resume` is off.
    """
    complete = complete_checkpoints(Path(output) / "checkpoints")
    newest = complete[-1] if complete else None
    if newest is not None and not section.resume:  # the run's metrics and settings are there, too
        raise ConfigError(
            f"checkpoint.resume=false, but {newest} of an earlier run exists: remove it, change "
            "`output`, or set checkpoint.resume=true"
        )
    return newest if section.resume else None


def note_start(config: RunConfig, *, resumed: Path | None) -> None:
    """Log the settings that differ from the resumed checkpoint, and save those of this start.

    One line per key, by the first rank. Raises ConfigError on all ranks when the run's folder
    cannot be written.

    Collective: world, one all-gather of a short object per rank.
    """
    folder = Path(config.output)
    with together(), writing_settings(config.output):
        if dist.get_rank() == 0:
            if resumed is None:
                keep_settings(folder, to_yaml(config), resumed_step=None)
            else:
                _note_changes(config, folder, resumed)


def _note_changes(config: RunConfig, folder: Path, resumed: Path) -> None:
    description = Description.read(resumed)
    # Checkpoints of older versions have no settings; the newest start's file has them.
    before = description.configuration or _in_file(folder / SETTINGS_FILE)
    changes = setting_changes(_completed(before), config.model_dump(mode="json")) if before else ()
    previous = keep_settings(folder, to_yaml(config), resumed_step=description.step)
    if changes:
        _LOGGER.info(
            "settings that differ from %s: %d%s",
            resumed.name,
            len(changes),
            "" if previous is None else f"; {previous.name} has the previous ones",
        )
    for change in changes:
        _LOGGER.info("changed since %s: %s", resumed.name, change)


def _completed(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Give keys that came with a later version their defaults, which change nothing."""
    try:
        return RunConfig.model_validate(settings).model_dump(mode="json")
    except ValidationError:
        # A version with different keys: report these as changes.
        return settings


def _in_file(path: Path) -> Mapping[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}

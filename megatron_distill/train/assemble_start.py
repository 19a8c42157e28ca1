"""From a configuration to what is said and kept of a start: the changes since its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import yaml
from pydantic import ValidationError

from megatron_distill.config import RunConfig, to_yaml
from megatron_distill.errors import ConfigError
from megatron_distill.log import get_logger
from megatron_distill.runtime.collectives import together
from megatron_distill.train.checkpoint import Description
from megatron_distill.train.start_settings import CONFIG_FILE, keep_settings, setting_changes

_LOGGER = get_logger(__name__)


def note_start(config: RunConfig, *, resumed: Path | None) -> None:
    """Say which settings are others than the resumed checkpoint's, and keep those of this start.

    One line per key, by the first rank. Raises ConfigError on all ranks when the run's folder
    cannot be written.

    Collective: world, one all-gather of a short object per rank.
    """
    with together():
        if dist.get_rank() == 0:
            try:
                _note(config, resumed)
            except OSError as error:
                raise ConfigError(
                    f"output={config.output}: cannot keep {CONFIG_FILE} there ({error.strerror}); "
                    "name a folder that can be written, on a disk with space left"
                ) from error


def _note(config: RunConfig, resumed: Path | None) -> None:
    folder = Path(config.output)
    if resumed is None:
        keep_settings(folder, to_yaml(config), resumed_step=None)
        return
    description = Description.read(resumed)
    # Checkpoints of older versions do not say their settings; the newest start's file does.
    before = description.configuration or _in_file(folder / CONFIG_FILE)
    changes = setting_changes(_completed(before), plain_settings(config)) if before else ()
    kept = keep_settings(folder, to_yaml(config), resumed_step=description.step)
    if changes:
        _LOGGER.info(
            "settings that differ from %s: %d%s",
            resumed.name,
            len(changes),
            "" if kept is None else f"; {kept.name} keeps those of the start before",
        )
    for change in changes:
        _LOGGER.info("changed since %s: %s", resumed.name, change)


def plain_settings(config: RunConfig) -> dict[str, Any]:
    """Return a configuration as plain values, such as JSON has."""
    return config.model_dump(mode="json")


def _completed(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Give keys that came with a later version their defaults, which change nothing."""
    try:
        return plain_settings(RunConfig.model_validate(settings))
    except ValidationError:
        # Of a version with other keys: these are changes.
        return settings


def _in_file(path: Path) -> Mapping[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}

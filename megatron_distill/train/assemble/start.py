"""The log lines and files of a start: its configuration, and the changes since its checkpoint.

<output>/config.yaml                of the newest start
<output>/config.step_0000020.yaml   of the start before, if a start resumed at step 20 with changes
<output>/config.step_0000020.2.yaml of the start before, if a second one did so at that step
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
import yaml
from pydantic import ValidationError

from megatron_distill.config import RunConfig, to_yaml
from megatron_distill.errors import ConfigError
from megatron_distill.log import get_logger
from megatron_distill.runtime.atomic_files import replace_file
from megatron_distill.runtime.collectives import together
from megatron_distill.train.checkpoint.folder import Description

__all__ = [
    "CONFIG_FILE",
    "SettingChange",
    "keep_settings",
    "note_start",
    "plain_settings",
    "setting_changes",
]


_LOGGER = get_logger(__name__)


def note_start(config: RunConfig, *, resumed: Path | None) -> None:
    """Log the settings that differ from the resumed checkpoint, and save those of this start.

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
    # Checkpoints of older versions have no settings; the newest start's file has them.
    before = description.configuration or _in_file(folder / CONFIG_FILE)
    changes = setting_changes(_completed(before), plain_settings(config)) if before else ()
    kept = keep_settings(folder, to_yaml(config), resumed_step=description.step)
    if changes:
        _LOGGER.info(
            "settings that differ from %s: %d%s",
            resumed.name,
            len(changes),
            "" if kept is None else f"; {kept.name} has the previous ones",
        )
    for change in changes:
        _LOGGER.info("changed since %s: %s", resumed.name, change)


def plain_settings(config: RunConfig) -> dict[str, Any]:
    """Return a configuration as plain JSON values."""
    return config.model_dump(mode="json")


def _completed(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Give keys that came with a later version their defaults, which change nothing."""
    try:
        return plain_settings(RunConfig.model_validate(settings))
    except ValidationError:
        # A version with different keys: report these as changes.
        return settings


def _in_file(path: Path) -> Mapping[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


CONFIG_FILE: Final = "config.yaml"


class _Nothing:
    """Placeholder for a key that only one of two trees has."""


_NOTHING: Final = _Nothing()


@dataclass(frozen=True)
class SettingChange:
    """A key with a different value; one side may lack a whole section or entry."""

    key: str
    before: str  # JSON, or "nothing"
    now: str

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.now}"


def setting_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[SettingChange, ...]:
    """Return the differences between two plain configurations, in the order of the second.

    Entries of a list of sections are compared by their places (`data.sources.0.weight`).
    """
    return tuple(_changes("", before, now))


def _changes(key: str, before: Any, now: Any) -> Iterator[SettingChange]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for name in dict.fromkeys((*now, *before)):
            yield from _changes(
                f"{key}.{name}" if key else name,
                before.get(name, _NOTHING),
                now.get(name, _NOTHING),
            )
    elif _has_sections(before) and _has_sections(now):
        pairs = itertools.zip_longest(before, now, fillvalue=_NOTHING)
        for index, (old, new) in enumerate(pairs):
            yield from _changes(f"{key}.{index}", old, new)
    elif before != now:
        yield SettingChange(key, _shown(before), _shown(now))


def _has_sections(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(entry, Mapping) for entry in value)


def _shown(value: Any) -> str:
    return "nothing" if isinstance(value, _Nothing) else json.dumps(value)


def keep_settings(folder: Path, text: str, *, resumed_step: int | None) -> Path | None:
    """Write this start's `config.yaml`; return the path of the one before, if it was saved.

    It is saved if this start resumes with a different configuration. A start from the beginning
    replaces it, and an equal one writes nothing. Each file appears whole. If a start is killed
    between the two writes, the next one finds the first file. Raises OSError.
    """
    current, new = folder / CONFIG_FILE, text.encode()
    old = current.read_bytes() if current.exists() else None
    if old == new:
        return None
    kept = None
    if old is not None and resumed_step is not None:
        kept = _place(folder, resumed_step, old)
        if not kept.exists():
            replace_file(kept, old)
    replace_file(current, new)
    return kept


def _place(folder: Path, step: int, content: bytes) -> Path:
    """Return the first name for that step that is free or has the same content."""
    for number in itertools.count(1):
        suffix = "" if number == 1 else f".{number}"
        path = folder / f"config.step_{step:07d}{suffix}.yaml"
        if not path.exists() or path.read_bytes() == content:
            return path
    raise AssertionError("a count has no end")

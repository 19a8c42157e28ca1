"""The settings of a run's starts: how two differ, and the files that keep each.

<output>/config.yaml                of the newest start
<output>/config.step_0000020.yaml   of the start before, where one resumed at step 20 with others
<output>/config.step_0000020.2.yaml of the next one that another replaced at that step
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from megatron_distill.runtime.new_folder import flush_folder

__all__ = ["CONFIG_FILE", "SettingChange", "keep_settings", "setting_changes"]

CONFIG_FILE: Final = "config.yaml"
_PARTIAL: Final = ".partial"


class _Nothing:
    """Stands where only one of two trees has a key."""


_NOTHING: Final = _Nothing()


@dataclass(frozen=True)
class SettingChange:
    """A key whose value is another; a whole section or entry where one side has none."""

    key: str
    before: str  # JSON, or "nothing"
    now: str

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.now}"


def setting_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[SettingChange, ...]:
    """Return what differs between two configurations of plain values, in the order of the second.

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
    """Make `config.yaml` that of this start; return where the one before stays, if anywhere.

    It stays where this start resumes and its own is another; a start from the beginning replaces
    it, and an equal one writes nothing. Each file appears whole. Killed between the two, the next
    start finds the first written. Raises OSError.
    """
    current, new = folder / CONFIG_FILE, text.encode()
    old = current.read_bytes() if current.exists() else None
    if old == new:
        return None
    kept = None
    if old is not None and resumed_step is not None:
        kept = _place(folder, resumed_step, old)
        if not kept.exists():
            _write(kept, old)
    _write(current, new)
    return kept


def _place(folder: Path, step: int, content: bytes) -> Path:
    """The first name of that step that is free or has the content already."""
    for number in itertools.count(1):
        suffix = "" if number == 1 else f".{number}"
        path = folder / f"config.step_{step:07d}{suffix}.yaml"
        if not path.exists() or path.read_bytes() == content:
            return path
    raise AssertionError("a count has no end")


def _write(path: Path, content: bytes) -> None:
    partial = path.with_name(path.name + _PARTIAL)
    with partial.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(path)
    flush_folder(path.parent)

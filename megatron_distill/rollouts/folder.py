"""The folder of rollouts: its settings, and parts of rows that are written whole."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Final

from megatron_distill.errors import ConfigError
from megatron_distill.launching.records import ROLLOUTS, complete_parts
from megatron_distill.rollouts.check import LogProbCheck
from megatron_distill.runtime.atomic_files import replace_file, write_errors
from megatron_distill.runtime.folder_lock import LOCK_FILE, FolderLock, take_lock

__all__ = ["RolloutFolder", "Totals", "settings_of_parts"]

_SUMS: Final = "sums"
_CHECK: Final = "log_prob_check"
_VERSION: Final = 1
# Of settings that no option is named after.
_CAUSES: Final = {
    "rows": " (rows of --prompts, at most --limit)",
    "weights": " (of the model)",
    "precision": " (train.precision=fp32 or bf16; without it that of the device)",
}


@dataclass(frozen=True)
class Totals:
    """Sums over saved texts.

    truncated: texts that ended at their length, saved or not. left_out: prompts without a text,
    which could not be encoded or were too long. log_prob: of all tokens, in nats.
    """

    texts: int = 0
    tokens: int = 0
    truncated: int = 0
    left_out: int = 0
    log_prob: float = 0.0

    def __add__(self, other: Totals) -> Totals:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Totals(*(mine + theirs for mine, theirs in pairs))


def settings_of_parts(path: Path) -> dict[str, Any]:
    """Return the settings of the parts in a folder, none without a part; raises ConfigError."""
    file = path / ROLLOUTS
    if not complete_parts(path) or not file.is_file():
        return {}
    try:
        return dict(json.loads(file.read_text(encoding="utf-8"))["settings"])
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{file} is damaged; name another --output") from None


class RolloutFolder:
    """Parts of the rollouts of one file, model and sampling; finished ones are not written again.

    Holds a lock that ends with the process. Raises ConfigError: another process writes there, the
    folder has other settings, or it cannot be written.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self._settings: dict[str, Any] = {}
        with write_errors(path, ConfigError):
            (path / _SUMS).mkdir(parents=True, exist_ok=True)
            lock = take_lock(path / LOCK_FILE, named=f"--output {path}")
        self._lock: FolderLock | None = lock
        try:
            self.require(version=_VERSION, **settings)
        except ConfigError:
            self.close()
            raise

    def close(self) -> None:
        """Let another process have the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def require(self, **settings: Any) -> None:
        """Compare settings with those of the parts that are there, and record them.

        Without a part, a start that failed or was stopped binds nothing. Raises ConfigError.
        """
        has_parts = bool(complete_parts(self.path))
        file, there = self.path / ROLLOUTS, settings_of_parts(self.path)
        for key, value in settings.items():
            if key in there and there[key] != value:
                raise ConfigError(
                    f"--output {self.path}: its rollouts have {key} = {there[key]}, not {value}"
                    f"{_CAUSES.get(key, '')}; name another folder, or start with the same"
                )
        if has_parts and not settings.keys() <= there.keys():
            raise ConfigError(
                f"--output {self.path}: it has parts without their settings in {file}; "
                "name another folder"
            )
        self._settings |= {**there, **settings}
        if self._settings != there:
            with write_errors(self.path, ConfigError):
                self._write_record({})

    def _write_record(self, more: Mapping[str, Any]) -> None:
        text = json.dumps({"settings": self._settings, **more}, indent=1)
        replace_file(self.path / ROLLOUTS, text.encode())

    def part(self, number: int) -> Path:
        """Return the file of a part."""
        return self.path / f"part-{number:05d}.jsonl"

    def missing(self, count: int) -> list[int]:
        """Return the numbers of the parts that are not written."""
        return [number for number in range(count) if not self.part(number).is_file()]

    def write(self, number: int, rows: Sequence[Mapping[str, Any]], totals: Totals) -> None:
        """Write a part, whole or not at all. Raises ConfigError."""
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        content = "".join(f"{line}\n" for line in lines).encode()
        sums = json.dumps(vars(totals))
        with write_errors(self.path, ConfigError):
            # The sums first: a part with a name counts as written.
            replace_file(self._sums(number), sums.encode())
            replace_file(self.part(number), content)

    def finish(self, count: int, check: LogProbCheck | None) -> tuple[Totals, LogProbCheck | None]:
        """Record the sums of all parts and a check next to the settings, and return both.

        Without a check, that of the record is kept.
        """
        totals = sum((self.totals(number) for number in range(count)), start=Totals())
        check = check or self._former_check()
        more = {} if check is None else {_CHECK: vars(check)}
        with write_errors(self.path, ConfigError):
            self._write_record({"totals": vars(totals), **more})
        return totals, check

    def _former_check(self) -> LogProbCheck | None:
        """Return the check of an earlier start; None without one, or of another version."""
        found = json.loads((self.path / ROLLOUTS).read_text(encoding="utf-8")).get(_CHECK)
        try:
            return LogProbCheck(**found)
        except TypeError:
            return None

    def totals(self, number: int) -> Totals:
        """Return the sums of a written part. Raises ConfigError: their file is damaged."""
        file = self._sums(number)
        try:
            return Totals(**json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            raise ConfigError(
                f"{file} is missing or damaged; remove {self.part(number)} to write it again"
            ) from None

    def _sums(self, number: int) -> Path:
        return self.path / _SUMS / f"part-{number:05d}.json"

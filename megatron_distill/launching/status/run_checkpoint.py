"""The newest checkpoint of a run, and what follows from it for the run's end and next start."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_distill.launching.grace import save_seconds
from megatron_distill.launching.records import progress_of
from megatron_distill.runtime.atomic_files import PARTIAL
from megatron_distill.runtime.progress import duration

__all__ = ["Saved", "checkpoint_text", "read_saved"]


@dataclass(frozen=True)
class Saved:
    """What a run has saved.

    Attributes:
        name: the folder of the newest checkpoint; None: there is none. step: its step, or 0.
        age: in seconds; None: none, or its folder has no description that is JSON.
        seconds: of its save, where the description has them.
        is_begun: a save was begun and not completed.
        is_wanted: the run writes checkpoints at all.
    """

    name: str | None
    step: int
    age: float | None
    seconds: float | None
    is_begun: bool
    is_wanted: bool

    @property
    def _is_damaged(self) -> bool:
        return self.name is not None and self.age is None

    def is_done(self, step: int, steps: int | None) -> bool | None:
        """Return whether a run at `step` is done; None: only where no process writes any more.

        The log has the last step before the save of it. Where no checkpoint is left, a user may
        have removed them, as after an export.
        """
        if steps is None or step < steps:
            return False
        if not self.is_wanted or self.step >= steps:
            return True
        return None if self.name is None and not self.is_begun else False

    def explained(self, state: str, detail: str, *, step: int, steps: int | None) -> str:
        """Return the detail of a state, with what is saved where that is not as one expects."""
        words = ""
        if state == "done" and self.is_wanted:
            words = self._at_the_end(steps)
        elif state in ("stopped", "failed"):
            words = self._of_next_start(step)
            if words and "goes on from" in detail:  # the decision about the next launch
                words = ""
        return "; ".join(text for text in (detail, words) if text)

    def _at_the_end(self, steps: int | None) -> str:
        if self.name is None:
            return "no checkpoint is left"
        if self._is_damaged:
            return "its newest checkpoint is damaged"
        if steps is None or self.step >= steps:
            return ""
        return f"its last checkpoint is gone, the newest is of step {self.step}"

    def _of_next_start(self, step: int) -> str:
        if self._is_damaged:
            return f"{self.name} is damaged: remove it before the next start"
        if self.step >= step:
            return ""
        if self.name is None:
            return "nothing is saved: the next start begins at step 0"
        return f"the next start goes on from step {self.step}"


def read_saved(run: Path, settings: Mapping[str, Any]) -> Saved:
    """Return what a run has saved; as in training, a complete checkpoint has its final name."""
    root, step = run / "checkpoints", progress_of(run)
    folder, age = root / f"step_{step:07d}", None
    with suppress(OSError, ValueError):
        description = folder / "description.json"
        json.loads(description.read_text(encoding="utf-8"))
        changed = description.stat().st_mtime
        age = max(0.0, time.time() - changed)  # the clock of a file server may be ahead
    section = settings.get("checkpoint")
    return Saved(
        name=folder.name if folder.is_dir() else None,
        step=step,
        age=age,
        seconds=save_seconds(folder),
        is_begun=any(root.glob(f"step_*{PARTIAL}")),
        is_wanted=not isinstance(section, dict) or section.get("save") is not False,
    )


def checkpoint_text(name: str | None, age: float | None, seconds: float | None) -> str:
    """Return the newest checkpoint in words."""
    if name is None:
        return "none"
    if age is None:
        return f"{name}, without a sound description.json: no start can read it"
    text = f"{name}, {duration(age)} ago"
    return text + ("" if seconds is None else f", saved in {seconds:.1f} s")

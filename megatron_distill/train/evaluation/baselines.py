"""The teachers' items of a run's tasks: written once, and compared with each student."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_distill.errors import ConfigError
from megatron_distill.evaluation.tasks.paired import TaskItems, differences
from megatron_distill.runtime.atomic_files import replace_file
from megatron_distill.runtime.collectives import from_first_rank, together

__all__ = ["Baselines"]

Items = dict[str, TaskItems]


@dataclass(frozen=True)
class Baselines:
    """The items of the teachers by role, which a later start reads from the run's folder.

    Attributes:
        path: of their file.
    """

    path: Path
    known: dict[str, Items]

    @classmethod
    def of_run(cls, folder: Path) -> Baselines:
        """Read those of an earlier start, none from a file that is damaged.

        Collective: world, one broadcast of the items.
        """
        path = folder / "baselines.json"
        return cls(path, from_first_rank(lambda: _read(path)))

    def keep(self, role: str, items: Items) -> None:
        """Keep a teacher's items; raises ConfigError on all ranks where they cannot be written.

        Collective: world, as `together`.
        """
        self.known[role] = items
        plain = {
            role: {task: one.as_dict() for task, one in own.items()}
            for role, own in self.known.items()
        }
        with together():
            if dist.get_rank() == 0:
                try:
                    replace_file(self.path, json.dumps(plain).encode())
                except OSError as error:
                    raise ConfigError(
                        f"output: cannot write {self.path}: {error.strerror}; free space or set "
                        "`output` to a folder that can be written"
                    ) from error

    def compared(self, items: Items) -> dict[str, dict[str, Any]]:
        """Return a student's differences to each teacher, by task and role."""
        found: dict[str, dict[str, Any]] = {}
        for role, own in self.known.items():
            for task, measures in differences(items, own).items():
                found.setdefault(task, {})[role] = measures
        return found


def _read(path: Path) -> dict[str, Items]:
    try:
        found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return {
            role: {task: TaskItems.from_dict(one) for task, one in own.items()}
            for role, own in found.items()
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}

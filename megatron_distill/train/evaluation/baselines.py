"""Files of a run's evaluations: teachers' items, which students are compared to, and prompts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from megatron_distill.errors import ConfigError
from megatron_distill.evaluation.tasks.paired import TaskItems, differences
from megatron_distill.evaluation.tasks.prepared import PreparedTask
from megatron_distill.log import get_logger
from megatron_distill.runtime.atomic_files import replace_file
from megatron_distill.runtime.collectives import from_first_rank, together

__all__ = ["Baselines", "Origin", "keep_first_prompts"]

_LOGGER = get_logger(__name__)
_OTHER: Final = {
    "weights": "other weights",
    "tokenizer": "another tokenizer",
    "precision": "another precision",
    "tasks": "other tasks",
}

Items = dict[str, TaskItems]


@dataclass(frozen=True)
class Origin:
    """The model and the tasks that items are of.

    Attributes:
        weights: digest of the weights; tokenizer: of its files.
        precision: of the computation.
        tasks: digest of each task, by name.
    """

    weights: str
    tokenizer: str
    precision: str
    tasks: Mapping[str, str]

    def differences(self, other: Origin) -> list[str]:
        """Return the parts in which another origin differs."""
        return [
            text for name, text in _OTHER.items() if getattr(self, name) != getattr(other, name)
        ]


@dataclass(frozen=True)
class Baselines:
    """The items of the teachers by role, which a later start reads from the run's folder.

    Attributes:
        path: of their file.
        origins: of this start's teachers, by role.
        known: items of these origins.
    """

    path: Path
    origins: Mapping[str, Origin]
    known: dict[str, Items]

    @classmethod
    def of_run(cls, folder: Path, origins: Mapping[str, Origin]) -> Baselines:
        """Read those of an earlier start that are of the same origins, none from a damaged file.

        A line of the log tells of another origin. Collective: world, one broadcast of the items.
        """
        path = folder / "baselines.json"
        known: dict[str, Items] = {}
        for role, (origin, items) in from_first_rank(lambda: _read(path)).items():
            if role not in origins:
                continue
            others = origins[role].differences(origin)
            if not others:
                known[role] = items
                continue
            _LOGGER.info(
                "%s: its results in %s are of %s; it is evaluated again",
                *(role, path, " and ".join(others)),
            )
        return cls(path, origins, known)

    def keep(self, role: str, items: Items) -> None:
        """Keep a teacher's items; raises ConfigError on all ranks where they cannot be written.

        Collective: world, as `together`.
        """
        self.known[role] = items
        plain = {
            role: {
                "of": asdict(self.origins[role]),
                "tasks": {task: one.as_dict() for task, one in own.items()},
            }
            for role, own in self.known.items()
        }
        _keep(self.path, plain)

    def compared(self, items: Items) -> dict[str, dict[str, Any]]:
        """Return a student's differences to each teacher, by task and role."""
        found: dict[str, dict[str, Any]] = {}
        for role, own in self.known.items():
            for task, measures in differences(items, own).items():
                found.setdefault(task, {})[role] = measures
        return found


def keep_first_prompts(path: Path, tasks: Iterable[PreparedTask]) -> None:
    """Write the first prompt of each task to a file of the run, by task and digest of its prompts.

    The prompts of earlier starts stay, as results in the log name their digests. Raises ConfigError
    on all ranks where they cannot be written.

    Collective: world, as `together`.
    """
    found = _read_prompts(path) if dist.get_rank() == 0 else {}
    for task in tasks:
        found.setdefault(task.task.name, {})[task.prompt_hash] = task.first_prompt
    _keep(path, found)


def _keep(path: Path, content: object) -> None:
    """Write a file of the run from the first rank; raises ConfigError on all ranks."""
    with together():
        if dist.get_rank() == 0:
            try:
                replace_file(path, json.dumps(content).encode())
            except OSError as error:
                raise ConfigError(
                    f"output: cannot write {path}: {error.strerror}; free space or set `output` "
                    "to a folder that can be written"
                ) from error


def _read_prompts(path: Path) -> dict[str, dict[str, str]]:
    """Return the prompts of earlier starts, none from a damaged file."""
    try:
        found: Mapping[str, Mapping[str, str]] = json.loads(path.read_text(encoding="utf-8"))
        return {task: dict(own) for task, own in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _read(path: Path) -> dict[str, tuple[Origin, Items]]:
    try:
        found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return {
            role: (
                Origin(**own["of"]),
                {task: TaskItems.from_dict(one) for task, one in own["tasks"].items()},
            )
            for role, own in found.items()
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}

"""From a configuration to tasks, encoded for each model, and to the origin of its results.

All tasks are read before any model is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.distributed as dist

from megatron_distill.config import EvaluationConfig, KeepBestConfig, ModelConfig, RunConfig
from megatron_distill.data.tokenizers.open import Tokenizer, Vocabulary
from megatron_distill.errors import ConfigError
from megatron_distill.evaluation.tasks.encode import TextEncoder
from megatron_distill.evaluation.tasks.graders import opened_grader
from megatron_distill.evaluation.tasks.prepared import PreparedTask, prepare_task
from megatron_distill.evaluation.tasks.prompts import Item, read_task
from megatron_distill.evaluation.tasks.record import Task, load_task
from megatron_distill.log import get_logger
from megatron_distill.models.architecture import Architecture
from megatron_distill.runtime.collectives import from_first_rank, on_first_rank, together
from megatron_distill.train.assemble.models import resolve_model, teacher_seed
from megatron_distill.train.evaluation.baselines import Origin
from megatron_distill.train.model_source import teacher_digest

__all__ = [
    "NO_TASKS",
    "OpenTasks",
    "configured_tasks",
    "longest_input",
    "open_run_tasks",
    "open_tasks",
    "teacher_origin",
    "teacher_weights",
]

_LOGGER = get_logger(__name__)


@dataclass(frozen=True)
class OpenTasks:
    """Tasks whose files have been read; the first rank has the items of each, in their order.

    add_bos: as `data.add_bos`, so that prompts begin as the documents of training do.
    """

    tasks: tuple[Task, ...]
    items: tuple[tuple[Item, ...], ...] | None
    add_bos: bool | None = None

    def check_template(self, tokenizer: Tokenizer | None) -> None:
        """Raise DataError on all ranks for prompts in a chat template that does not exist.

        The first rank has the tokenizer. Collective: world, as `together`.
        """
        with together():
            if tokenizer is not None:
                for task in self.tasks:
                    TextEncoder.of(tokenizer, chat=task.chat, named=f"task {task.name}")

    def encoded(
        self,
        tokenizer: Tokenizer | None,
        positions: int,
        device: torch.device,
        *,
        most: int | None = None,
    ) -> tuple[PreparedTask, ...]:
        """Encode the tasks on the first rank, which has the tokenizer, and share them.

        most: positions of the model, where `evaluation.max_length` may take fewer. Raises
        ConfigError or DataError on all ranks. A warning tells of prompts that lose tokens.

        Collective: world, those of `on_first_rank`, and a broadcast of the tasks' tokens.
        """

        def prepared() -> tuple[PreparedTask, ...]:
            assert tokenizer is not None, "the first rank has it"
            assert self.items is not None, "the first rank has them"
            return tuple(
                prepare_task(
                    task, tokenizer, positions=positions, items=items, add_bos=self.add_bos
                )
                for task, items in zip(self.tasks, self.items, strict=True)
            )

        found = [on_first_rank(prepared, device=device)]
        dist.broadcast_object_list(found, src=0)
        assert found[0] is not None
        for task in found[0]:
            if task.truncated and dist.get_rank() == 0:
                _LOGGER.warning(
                    "task %s: longer than the model's %d positions, and cut on the left: %d of "
                    "%d prompts; %s",
                    *(task.task.name, positions, task.truncated, len(task.items)),
                    _longer(task.task, positions, most or positions),
                )
        return found[0]


def _longer(task: Task, positions: int, most: int) -> str:
    """Return what leaves more room for the prompts of a task that lost tokens."""
    found = []
    if task.shots and task.truncation == "tokens":  # otherwise the examples went first
        found.append("lower its shots")
    if task.kind == "generation":
        found.append("lower its max_new_tokens")
    if positions < most:
        found.append(f"raise evaluation.max_length, to {most:,} at most")
    else:
        found.append("take a model with more positions")
    return ", or ".join(found)


NO_TASKS: Final = OpenTasks((), ())


def open_tasks(tasks: Sequence[Task], device: torch.device, *, add_bos: bool | None) -> OpenTasks:
    """Read the tasks' files and build their prompts as text, on the first rank.

    Raises ConfigError or DataError on all ranks: a file, a column, an answer or a grader is
    missing, or a template is wrong.

    Collective: those of `on_first_rank`.
    """

    def read() -> tuple[tuple[Item, ...], ...]:
        for task in tasks:
            for grader in task.graders:
                opened_grader(grader)
        return tuple(tuple(read_task(task)) for task in tasks)

    return OpenTasks(tuple(tasks), on_first_rank(read, device=device), add_bos)


def open_run_tasks(config: RunConfig, device: torch.device) -> OpenTasks:
    """Return the tasks of a run; raises as `open_tasks`, and for a metric that none of them has.

    Collective: those of `open_tasks`, and world, one broadcast of the tasks' records.
    """
    tasks = from_first_rank(lambda: configured_tasks(config.evaluation))
    _check_metric(config.checkpoint.keep_best, tasks)
    return open_tasks(tasks, device, add_bos=config.data.add_bos)


def configured_tasks(section: EvaluationConfig) -> tuple[Task, ...]:
    """Read the tasks of the configuration; raises ConfigError."""
    found: list[Task] = []
    for index, entry in enumerate(section.tasks):
        task = load_task(entry.task, entry.changes)
        if task.limit is None:
            task = replace(task, limit=section.limit)
        if task.name in [one.name for one in found]:
            raise ConfigError(
                f"evaluation.tasks.{index}: a second task has the name {task.name!r}; give it "
                "another `name`"
            )
        found.append(task)
    return tuple(found)


def longest_input(shape: Architecture, section: EvaluationConfig) -> int:
    """Return the longest input of a model in tokens."""
    most = shape.max_position_embeddings
    return most if section.max_length is None else min(most, section.max_length)


def teacher_weights(
    config: RunConfig, role: str, vocabulary: Vocabulary, world: dist.ProcessGroup
) -> str:
    """Return the digest of a live teacher's weights, the same in every layout.

    vocabulary: of its tokenizer. Reads all weights once, each rank its share. Raises ConfigError or
    CheckpointError on all ranks.

    Collective: world, those of `resolve_model` and `teacher_digest`.
    """
    source = resolve_model(config, role, vocabulary)
    number = sorted(one for one in config.models if one != "student").index(role)
    return teacher_digest(source, seed=teacher_seed(config.seed) + number, group=world)


def teacher_origin(
    section: ModelConfig,
    precision: str,
    vocabulary: Vocabulary,
    tasks: Sequence[PreparedTask],
    weights: str,
) -> Origin:
    """Return the origin of a live teacher's results; `weights`: their digest."""
    return Origin(
        weights,
        vocabulary.identity,
        precision + (f", fp8 {section.fp8}" if section.fp8 else ""),
        {task.task.name: task.identity for task in tasks},
    )


def _check_metric(keep_best: KeepBestConfig | None, tasks: Sequence[Task]) -> None:
    """Raise ConfigError where the best checkpoint's metric is none of these tasks."""
    if keep_best is None:
        return
    name, _, measure = keep_best.metric.partition(".")
    measures = {task.name: task.measures for task in tasks}
    if name != "validation" and measure not in measures.get(name, ()):
        known = [f"{task}.{one}" for task, own in measures.items() for one in own]
        raise ConfigError(
            f"checkpoint.keep_best.metric = {keep_best.metric!r} is not a measure of this run; "
            f"give one of {', '.join([*known, 'validation.ce_loss'])}"
        )

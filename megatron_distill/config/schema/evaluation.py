"""The sections of text that a model writes, and of the evaluation of tasks during a run."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import Field, field_validator

from megatron_distill.config.schema.section import Section

__all__ = ["EvaluationConfig", "GenerationConfig", "KeepBestConfig", "TaskConfig"]


class GenerationConfig(Section):
    """Writing and scoring text."""

    cache_gib: float | None = Field(
        default=None,
        gt=0,
        description="GiB of keys and values on each rank; it bounds the rows written at once. "
        "null: 4 in training and on a CPU; in `generate`, `rollout` and `evaluate` half of the "
        "free memory of the GPU with the least. docs/generation.md",
    )


class TaskConfig(Section):
    """One task, and changes to its file. docs/evaluation.md has the keys of such a file."""

    task: str = Field(
        min_length=1,
        examples=["mmlu"],
        description="Name of a task of the package, or path of a YAML file.",
    )
    name: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$",
        description="Name in the results; null: that of the task.",
    )
    folder: str | None = Field(
        default=None, min_length=1, description="Folder of the data set; null: that of the task."
    )
    files: tuple[str, ...] | None = Field(
        default=None, strict=False, description="Files of the items; null: those of the task."
    )
    shot_files: tuple[str, ...] | None = Field(
        default=None, strict=False, description="Files of the examples; null: those of the task."
    )
    shots: int | None = Field(
        default=None, ge=0, description="Examples before an item; null: those of the task."
    )
    limit: int | None = Field(
        default=None, ge=1, description="Items, at even distances; null: `evaluation.limit`."
    )
    chat: bool | None = Field(
        default=None, description="Prompts in the chat template; null: as in the task."
    )

    @property
    def changes(self) -> dict[str, Any]:
        """The keys of the task that differ from its file."""
        given = self.model_dump(exclude={"task"})
        return {key: value for key, value in given.items() if value is not None}


class EvaluationConfig(Section):
    """Tasks that are evaluated during the run, on all ranks in the layout of training."""

    tasks: tuple[TaskConfig, ...] = Field(
        default=(),
        strict=False,
        examples=[[{"task": "mmlu", "folder": "data/mmlu", "limit": 1000}]],
        description="The tasks; a text stands for `{task: TEXT}`. Empty: none.",
    )
    interval: int = Field(
        default=0, ge=0, description="Steps between evaluations; 0: only at the end."
    )
    at_start: bool = Field(default=True, description="Evaluate the student before the first step.")
    teacher: bool = Field(
        default=True,
        description="Evaluate each live teacher once, before the first step, as the baseline of "
        "`minus`. false: results have no `minus`, also where the folder "
        "has the baselines of an earlier start.",
    )
    limit: int | None = Field(
        default=None,
        ge=1,
        description="Items of each task, at even distances over its files; null: all.",
    )
    max_length: int | None = Field(
        default=None,
        ge=2,
        description="Longest input in tokens; null: the model's positions. Longer prompts lose "
        "whole examples, then tokens on the left.",
    )
    batch_tokens: int = Field(
        default=8192, ge=1, description="Tokens of one micro-batch of one rank, at least one input."
    )

    @field_validator("tasks", mode="before")
    @classmethod
    def _named(cls, tasks: Any) -> Any:
        """A text is the name of a task."""
        if not isinstance(tasks, list | tuple):
            return tasks
        return [{"task": one} if isinstance(one, str) else one for one in tasks]


# Of a task, ends of the names of measures whose smallest value is the best; of a validation, parts
# of the names of figures whose largest value is: all others are losses, divergences or entropies.
_SMALL_IS_GOOD: Final = ("perplexity", "bits_per_byte", "calibration_error")
_LARGE_IS_GOOD: Final = ("agreement", "mass")


class KeepBestConfig(Section):
    """The checkpoint that is kept in addition to the newest ones."""

    metric: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*\.[A-Za-z0-9_]+$",
        examples=["mmlu.acc"],
        description="`TASK.MEASURE` of the student, or `validation.NAME`.",
    )
    mode: Literal["max", "min"] | None = Field(
        default=None,
        description="Whether the largest or the smallest value is the best. null: the smallest of "
        "a validation, except agreement and mass; the largest of a task, except perplexities, "
        "bits per byte and calibration errors.",
    )

    @property
    def best(self) -> Literal["max", "min"]:
        """Whether the largest or the smallest value is the best."""
        if self.mode is not None:
            return self.mode
        place, _, measure = self.metric.partition(".")
        if place == "validation":
            return "max" if any(part in measure for part in _LARGE_IS_GOOD) else "min"
        return "min" if measure.endswith(_SMALL_IS_GOOD) else "max"

"""Evaluation of tasks during a run: a phase that leaves the state of training as it was."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_distill.errors import counted
from megatron_distill.evaluation.requests import Interrupted, Scorer, Writer
from megatron_distill.evaluation.tasks.graders import opened_grader
from megatron_distill.evaluation.tasks.grading import grade_texts
from megatron_distill.evaluation.tasks.paired import TaskItems
from megatron_distill.evaluation.tasks.prepared import PreparedTask
from megatron_distill.evaluation.tasks.results import (
    scored_items,
    task_result,
    written_items,
    written_result,
)
from megatron_distill.log import get_logger
from megatron_distill.runtime.collectives import on_first_rank
from megatron_distill.runtime.groups import repeated_dropout
from megatron_distill.runtime.progress import duration
from megatron_distill.runtime.termination import is_requested
from megatron_distill.train.evaluation.baselines import Baselines, Origin, keep_first_prompts

__all__ = [
    "Evaluated",
    "EvaluatedModel",
    "ModelElsewhere",
    "RunEvaluation",
    "evaluate_model",
    "kept_random_states",
    "named_measures",
]

_LOGGER = get_logger(__name__)
_NOTE_SECONDS = 30.0

Results = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class EvaluatedModel:
    """A model, and the tasks in its tokens.

    Attributes:
        role: `student`, `teacher` or `teachers.NAME`.
        writer: of generated texts; None where no task needs one.
        tokenizer: digest of its files.
        origin: of a teacher in a run.
        digest: returns that of the weights as they are now, in use; of a student in a run.
        in_use: block in which the model is in evaluation mode and its weights are on the device.
        stop_requested: whether the first rank is to stop grading.
    """

    role: str
    scorer: Scorer
    tasks: Sequence[PreparedTask]
    in_use: Callable[[], AbstractContextManager[object]] = nullcontext
    writer: Writer | None = None
    tokenizer: str = ""
    origin: Origin | None = None
    digest: Callable[[], str] | None = None
    stop_requested: Callable[[], bool] = is_requested

    def results(self) -> tuple[Results, dict[str, TaskItems]]:
        """Return the results with the measures of each item, by task; see `evaluate_model`."""
        items: dict[str, TaskItems] = {}
        return evaluate_model(self, items=items), items


@dataclass(frozen=True)
class ModelElsewhere:
    """A teacher on ranks of its own, and the tasks in its tokens; as `EvaluatedModel`.

    Attributes:
        open_origin: the digest of the weights is known once the teacher's ranks have read them.
        results: asks its ranks; as `EvaluatedModel.results`, the same on every rank of the student.
    """

    role: str
    tasks: Sequence[PreparedTask]
    tokenizer: str
    open_origin: Callable[[], Origin]
    results: Callable[[], tuple[Results, dict[str, TaskItems]]]

    @cached_property
    def origin(self) -> Origin:
        """The origin of its results."""
        return self.open_origin()


def evaluate_model(model: EvaluatedModel, *, items: dict[str, TaskItems] | None = None) -> Results:
    """Return the results of a model by task, the same on every rank but for the seconds.

    items: is given the measures of each item, by task. Raises Interrupted on all ranks together,
    where a signal asked for it.

    Collective: those of the scorer.
    """
    found: Results = {}
    with model.in_use():
        for task in model.tasks:
            began = time.perf_counter()
            noted = _Noted(f"{model.role}: {task.task.name}", len(task.requests))
            if task.task.kind == "generation":
                result, own = _written(model, task, noted)
            else:
                scores = model.scorer.score(task.requests, advanced=noted.advanced)
                result, own = task_result(task, scores), scored_items(task, scores)
            if items is not None:
                items[task.task.name] = own
            found[task.task.name] = {**result, "seconds": time.perf_counter() - began}
    return found


def _written(
    model: EvaluatedModel, task: PreparedTask, noted: _Noted
) -> tuple[dict[str, Any], TaskItems]:
    """Generate a task's texts and grade them on the first rank.

    Raises Interrupted on all ranks together, where the first rank was asked to stop.

    Collective: those of the writer, of `on_first_rank`, and one broadcast of the result.
    """
    assert model.writer is not None, "a model with such a task has one"
    record = task.task
    texts = model.writer.write(
        [request.context.tolist() for request in task.requests],
        stop_ids=task.stop_ids,
        stops=record.stops,
        limit=record.max_new_tokens,
        advanced=noted.advanced,
    )
    pairs = [(one.text, item.target) for one, item in zip(texts, task.items, strict=True)]

    def graded() -> tuple[dict[str, Any], TaskItems] | None:
        graders = dict(zip(record.measures, map(opened_grader, record.graders), strict=True))
        try:
            grades = {
                name: grade_texts(grade, pairs, stop_requested=model.stop_requested)
                for name, grade in graders.items()
            }
        except Interrupted:
            return None  # all ranks raise it together, below
        return written_result(task, texts, grades), written_items(task, texts, grades)

    found = [on_first_rank(graded, device=torch.device(torch.cuda.current_device()))]
    dist.broadcast_object_list(found, src=0)
    if found[0] is None:
        raise Interrupted
    return found[0]


@dataclass
class _Noted:
    """Log lines of a long task, by the first rank."""

    name: str
    requests: int
    _began: float = field(default_factory=time.monotonic)
    _last: float = field(default_factory=time.monotonic)

    def advanced(self, done: int) -> None:
        """Tell how far the task is, every half a minute."""
        now = time.monotonic()
        if dist.get_rank() != 0 or now - self._last < _NOTE_SECONDS or not done:
            return
        self._last = now
        left = (now - self._began) * (self.requests - done) / done
        _LOGGER.info(
            "%s: %s of %s, about %s left",
            *(self.name, f"{done:,}", counted(self.requests, "request"), duration(left)),
        )


@dataclass(frozen=True)
class Evaluated:
    """The results by role, and the digests of the weights and the tokenizers that they are of."""

    results: dict[str, Results] = field(default_factory=dict)
    weights: dict[str, str] = field(default_factory=dict)
    tokenizers: dict[str, str] = field(default_factory=dict)

    def record(self, step: int) -> dict[str, object]:
        """Return the entry of the metrics log."""
        digests = {"weights": self.weights, "tokenizer": self.tokenizers}
        return {"step": step, "evaluation": self.results, **digests}


@contextmanager
def kept_random_states() -> Iterator[None]:
    """Restore every random state of this process after the block."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with repeated_dropout():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@dataclass(frozen=True)
class RunEvaluation:
    """The evaluations of a run: the student at some steps, its teachers once.

    Attributes:
        interval: steps between evaluations; 0: only at the end.
        at_start: whether the student is evaluated before the first step.
        teachers: evaluated once, before the first step or after a resume. The ranks of one
            elsewhere run only where a step is left.
        open_baselines: reads the teachers' items of earlier starts; once, before the first step.
        logged: roles with the steps of their results that the log of an earlier start has.
    """

    student: EvaluatedModel
    teachers: Sequence[EvaluatedModel | ModelElsewhere]
    interval: int
    at_start: bool
    open_baselines: Callable[[], Baselines]
    logged: frozenset[tuple[str, int]] = frozenset()

    @cached_property
    def baselines(self) -> Baselines:
        """The teachers' items, to which the student is compared under `minus`.

        Collective: world, where it is read first, that of `Baselines.of_run`.
        """
        return self.open_baselines()

    def is_due(self, step: int, *, is_last: bool) -> bool:
        """Whether the student is evaluated after a step."""
        return is_last or (self.interval > 0 and step % self.interval == 0)

    def before_training(self, step: int, *, last_step: int) -> Evaluated:
        """Return the results that the log lacks at a start at this step; often none.

        last_step: of the run; below the step where `train.steps` was lowered. The first prompts of
        all tasks are in `first_prompts.json` beside the baselines. Raises Interrupted as
        `evaluate_model`.
        """
        tasks = [task for model in (self.student, *self.teachers) for task in model.tasks]
        keep_first_prompts(self.baselines.path.with_name("first_prompts.json"), tasks)
        # A resumed run drops what an earlier start logged of later steps.
        roles = {role for role, logged in self.logged if logged <= step}
        models = [
            one
            for one in self.teachers
            if one.role not in roles & self.baselines.known.keys()
            and not (step >= last_step and _has_ended(one))
        ]
        # The student's results of this step are compared with another teacher, or with none.
        is_anew = any(teacher.role in roles for teacher in models)
        is_due = self.at_start if step == 0 else self.is_due(step, is_last=step == last_step)
        if is_due and (is_anew or ("student", step) not in self.logged):
            models.append(self.student)
        return self._evaluated(models)

    def after_step(self) -> Evaluated:
        """Return the student's results; raises Interrupted as `evaluate_model`."""
        return self._evaluated([self.student])

    def _evaluated(self, models: Sequence[EvaluatedModel | ModelElsewhere]) -> Evaluated:
        found = Evaluated()
        with kept_random_states():
            for model in models:
                results, items = model.results()
                found.results[model.role] = results
                found.weights[model.role] = _digest(model)
                found.tokenizers[model.role] = model.tokenizer
                if model is not self.student:
                    self.baselines.keep(model.role, items)
                    continue
                for task, minus in self.baselines.compared(items).items():
                    results[task]["minus"] = minus
        return found


def _has_ended(model: EvaluatedModel | ModelElsewhere) -> bool:
    """Whether a teacher's ranks have ended, as no step is left for them; a line of the log says so.

    The others of a run whose steps are done are evaluated late.
    """
    if not isinstance(model, ModelElsewhere):
        return False
    _LOGGER.info("no baseline of %s: no step is left, and its ranks have ended", model.role)
    return True


def _digest(model: EvaluatedModel | ModelElsewhere) -> str:
    """Return the digest of a model's weights: a teacher's is known, a student's changes."""
    if model.origin is not None:
        return model.origin.weights
    assert isinstance(model, EvaluatedModel), "a teacher has an origin"
    assert model.digest is not None, "a student in a run has one"
    with model.in_use():
        return model.digest()


def named_measures(results: Mapping[str, Results]) -> dict[str, float]:
    """Return the student's measures under `TASK.MEASURE`."""
    return {
        f"{task}.{name}": float(value)
        for task, result in results.get("student", {}).items()
        for name, value in result.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }

"""From a configuration to evaluated models: in a run, and from weights alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_distill import __version__
from megatron_distill.config import (
    EvaluationConfig,
    KeepBestConfig,
    RunConfig,
    aligned_role,
    has_own_tokenizer,
    teacher_parallel,
)
from megatron_distill.data.tokenizers.open import Tokenizer, Vocabulary
from megatron_distill.errors import ConfigError
from megatron_distill.evaluation.tasks.paired import TaskItems, differences
from megatron_distill.evaluation.tasks.prepared import PreparedTask
from megatron_distill.evaluation.tasks.record import Task
from megatron_distill.launching.grace import measured_looks
from megatron_distill.log import get_logger
from megatron_distill.models.execution import Execution
from megatron_distill.models.generation.memory import free_cache_gib
from megatron_distill.models.sharded_weights import has_sharded_weights
from megatron_distill.runtime.collectives import from_first_rank
from megatron_distill.runtime.groups import Groups
from megatron_distill.runtime.launch import PRECISIONS, Device
from megatron_distill.runtime.termination import is_requested
from megatron_distill.train.assemble.alignment import own_tokens
from megatron_distill.train.assemble.distillation import OpenRun
from megatron_distill.train.assemble.evaluated_model import evaluated_model, without_texts
from megatron_distill.train.assemble.models import (
    job_groups,
    resolve_model,
    teacher_execution,
    teacher_seed,
)
from megatron_distill.train.assemble.sources import data_options, open_tokenizer
from megatron_distill.train.assemble.tasks import (
    NO_TASKS,
    OpenTasks,
    longest_input,
    open_tasks,
    teacher_origin,
    teacher_weights,
)
from megatron_distill.train.checkpoint.best import BestRule
from megatron_distill.train.evaluation.baselines import Baselines, Origin
from megatron_distill.train.evaluation.elsewhere import AskedRanks
from megatron_distill.train.evaluation.phase import (
    EvaluatedModel,
    ModelElsewhere,
    Results,
    RunEvaluation,
    evaluate_model,
)
from megatron_distill.train.model_source import ModelSource, live_digest, teacher_digest
from megatron_distill.train.run_state import RunState
from megatron_distill.train.teachers.live import OnlineTeacher
from megatron_distill.train.teachers.own_layout import OwnLayout
from megatron_distill.train.teachers.resting import HostWeights, RestingTeacher
from megatron_distill.train.teachers.several import SeveralTeachers
from megatron_distill.train.validation import evaluating, logged_records

__all__ = [
    "ModelRole",
    "Resolved",
    "awake",
    "best_rule",
    "evaluate_weights",
    "open_evaluation",
]

_LOGGER = get_logger(__name__)


def best_rule(section: KeepBestConfig) -> BestRule:
    """Translate `checkpoint.keep_best`."""
    return BestRule(section.metric, section.best)


def open_evaluation(config: RunConfig, opened: OpenRun, state: RunState) -> RunEvaluation:
    """Encode the tasks for the teachers, and return the run's evaluation.

    Raises ConfigError or DataError on all ranks.

    Collective: world, one broadcast of the tasks' tokens per teacher, and its digest.
    """
    section, log = config.evaluation, Path(config.output) / "metrics.jsonl"
    groups, device = opened.site.groups, opened.site.execution.device
    student = state.student
    found = evaluated_model(
        "student",
        student.chunks,
        state.architecture,
        opened.tasks_of_student,
        section=section,
        cache_gib=config.generation.cache_gib,
        groups=groups,
        device=device,
        tokenizer=opened.samples.tokenizer,
        vocabulary=opened.vocabulary,
        in_use=partial(evaluating, student),
    )
    _warn_of_missing(config.checkpoint.keep_best, opened.tasks_of_student)
    teachers = list(_teachers(config, opened)) if section.teacher else []
    digest = partial(live_digest, student.chunks, state.architecture, groups=groups)
    return RunEvaluation(
        replace(found, digest=digest),
        teachers,
        interval=section.interval,
        at_start=section.at_start,
        open_baselines=lambda: Baselines.of_run(
            Path(config.output),
            {one.role: one.origin for one in teachers if one.origin is not None},
        ),
        logged=from_first_rank(lambda: _logged(log)),
    )


def _warn_of_missing(best: KeepBestConfig | None, tasks: Sequence[PreparedTask]) -> None:
    """Warn of a metric of the best checkpoint that its task does not have in these tokens."""
    given = [f"{task.task.name}.{one}" for task in tasks for one in task.measures]
    names = [task.task.name for task in tasks]
    missing = "" if best is None else best_rule(best).missing_measure(names, given)
    if missing and dist.get_rank() == 0:
        _LOGGER.warning("%s", missing)


def _logged(path: Path) -> frozenset[tuple[str, int]]:
    """Return the roles and steps of the evaluations in a log."""
    return frozenset(
        (role, record["step"])
        for record in logged_records(path, "evaluation")
        for role in record["evaluation"]
    )


def _teachers(config: RunConfig, opened: OpenRun) -> Iterator[EvaluatedModel | ModelElsewhere]:
    """Yield the teachers that have models; their weights are read for a digest.

    Those of a teacher on ranks of its own are read there.

    Collective: world, those of `OpenTasks.encoded` and of `teacher_weights`, per teacher.
    """
    section, teacher = config.evaluation, opened.teacher
    for role in teacher.stored_samples:
        name, measured = role, ""
        if role == "teacher":
            name, measured = "the teacher", "; `megatron-distill evaluate` measures it"
        _LOGGER.info("no baseline of %s: the run reads its store, not a model%s", name, measured)
    reading = opened.samples.options.teacher
    site, device = opened.site, opened.site.execution.device
    tasks, opened = opened.tasks, replace(opened, tasks=NO_TASKS)  # no text outlives its tokens
    for role in (*teacher.models, *teacher.remotes):
        tokenizer = opened.samples.tokenizer
        if reading is not None and role == aligned_role(config):
            tokenizer = reading.tokenizer
        positions = longest_input(teacher.shapes[role], section)
        most = teacher.shapes[role].max_position_embeddings
        prepared = tasks.encoded(tokenizer, positions, device, most=most)
        if role in teacher.remotes:
            is_sharded = _is_sharded(config, role, ranks=teacher.remotes[role].ranks)
        else:
            is_sharded = has_sharded_weights(teacher.models[role].model)
        prepared = without_texts(role, prepared, is_sharded=is_sharded)
        if not prepared:
            continue
        vocabulary = from_first_rank(partial(_facts, tokenizer))
        precision = config.train.precision
        origin = partial(teacher_origin, config.models[role], precision, vocabulary, prepared)
        if role in teacher.remotes:
            assert site.device.bridge is not None, "it leads to the teacher's ranks"
            asked = AskedRanks(role, teacher.remotes[role], site.device.bridge, device)
            yield ModelElsewhere(
                role,
                prepared,
                vocabulary.identity,
                open_origin=partial(_origin_elsewhere, origin, asked),
                results=partial(asked.results, prepared),
            )
            continue
        model = teacher.models[role]
        groups = model.own_groups if isinstance(model, OwnLayout) else model.groups
        found = evaluated_model(
            role,
            [model.model],
            model.architecture,
            prepared,
            section=section,
            cache_gib=config.generation.cache_gib,
            groups=groups,
            device=device,
            tokenizer=tokenizer,
            vocabulary=vocabulary,
            in_use=partial(awake, opened, role, model),
        )
        weights = teacher_weights(config, role, vocabulary, site.groups.world)
        yield replace(found, origin=origin(weights))


def _is_sharded(config: RunConfig, role: str, *, ranks: int) -> bool:
    """Return whether a teacher on so many ranks of its own has weights that are sharded there."""
    layout = teacher_parallel(config, role)
    return config.models[role].shard_weights and ranks > layout.tensor * layout.pipeline


def _origin_elsewhere(origin: Callable[[str], Origin], asked: AskedRanks) -> Origin:
    return origin(asked.weights())


def _facts(tokenizer: Tokenizer | None) -> Vocabulary:
    assert tokenizer is not None, "the first rank has it"
    return Vocabulary.of(tokenizer)


@contextmanager
def awake(opened: OpenRun, role: str, model: OnlineTeacher | OwnLayout) -> Iterator[None]:
    """A block with the teacher's weights on the device, and Megatron-Core in its layout."""
    weights = _resting_weights(opened, role)
    if weights is not None:
        weights.take()
    try:
        if isinstance(model, OwnLayout):
            with model.own_groups.in_use():
                yield
        else:
            yield
    finally:
        if weights is not None:
            weights.release()


def _resting_weights(opened: OpenRun, role: str) -> HostWeights | None:
    """Return the weights of a teacher that are in host memory between steps."""
    signals = opened.teacher.signals
    if isinstance(signals, SeveralTeachers):
        signals = signals.teachers[role.removeprefix("teachers.")]
    return signals.weights if isinstance(signals, RestingTeacher) else None


@dataclass(frozen=True)
class ModelRole:
    """A model of a configuration that is evaluated.

    Attributes:
        seed: of weights that are random.
        tokenizer: on the first rank; None elsewhere.
    """

    name: str
    seed: int
    execution: Execution
    tokenizer: Tokenizer | None
    vocabulary: Vocabulary


def _teacher_roles(config: RunConfig, student: ModelRole) -> Iterator[ModelRole]:
    """Yield the teachers in the tokens and with the computation that they have in the run.

    Raises ConfigError on all ranks where no teacher has a model.

    Collective: with a tokenizer of its own those of `own_tokens`.
    """
    roles = sorted(role for role in config.models if role != "student")
    live = [role for role in roles if config.models[role].has_model]
    if not live:
        stores = f"{' and '.join(roles)}: a store, which has no model"
        missing = "the run has no `teacher` or `teachers`"
        raise ConfigError(f"--teacher: {stores if roles else missing}; leave it out")
    for number, role in enumerate(roles):
        if role not in live:
            _LOGGER.info("%s: no results: it is a store, which has no model", role)
            continue
        layers = config.parallel.layers_per_stage.teacher if role == "teacher" else None
        found = replace(
            student,
            name=role,
            seed=teacher_seed(config.seed) + number,
            execution=teacher_execution(student.execution, config.models[role], layers, role),
        )
        if has_own_tokenizer(config, role):
            own = own_tokens(config, student.vocabulary)
            found = replace(found, tokenizer=own.tokenizer, vocabulary=own.vocabulary)
        yield found


@dataclass(frozen=True)
class Resolved:
    """A model that fits the layout and is not built yet, and the tasks in its tokens."""

    role: ModelRole
    source: ModelSource
    tasks: tuple[PreparedTask, ...]

    @classmethod
    def of(cls, config: RunConfig, role: ModelRole, tasks: OpenTasks) -> Resolved:
        """Find a model and encode the tasks for it; raises a MegatronDistillError on all ranks."""
        source = resolve_model(config, role.name, role.vocabulary)
        positions = longest_input(source.architecture, config.evaluation)
        device, most = role.execution.device, source.architecture.max_position_embeddings
        return cls(role, source, tasks.encoded(role.tokenizer, positions, device, most=most))

    def digest(self, groups: Groups) -> str:
        """Return the digest of the model's weights, the same in every layout and format.

        Reads them once more, each rank its share. Raises CheckpointError on all ranks.

        Collective: world, those of `teacher_digest`.
        """
        return teacher_digest(self.source, seed=self.role.seed, group=groups.world)

    def built(
        self,
        section: EvaluationConfig,
        groups: Groups,
        *,
        cache_gib: float | None,
        writes: bool = False,
    ) -> EvaluatedModel:
        """Read the weights; `writes`: the model writes text whatever its tasks are.

        cache_gib: None: that of `free_cache_gib`.
        """
        role, shape = self.role, self.source.architecture
        execution = role.execution
        (model,) = self.source.build(execution, groups=groups, seed=role.seed, interleaved=False)
        model.freeze()
        is_sharded = has_sharded_weights(model)
        tasks = without_texts(role.name, self.tasks, is_sharded=is_sharded)
        return evaluated_model(
            role.name,
            [model],
            shape,
            tasks,
            section=section,
            cache_gib=free_cache_gib(cache_gib, execution.device, groups.world),
            groups=groups,
            device=execution.device,
            tokenizer=role.tokenizer,
            vocabulary=role.vocabulary,
            writes=writes,
            stop_requested=measured_looks(is_requested),
        )


def evaluate_weights(
    config: RunConfig,
    device: Device,
    tasks: Sequence[Task],
    *,
    teacher: bool,
    against: Mapping[str, Mapping[str, TaskItems]] | None = None,
) -> dict[str, Any]:
    """Evaluate the student of a configuration, and its teachers if asked for, without training.

    Returns the results by role and the facts of the models. The student's differences to the other
    models are under `student_minus`, and under `items` the measures of each item by role and task.
    All tasks are read, and all models found, before the first one is built.

    against: items of earlier evaluations by name. Raises a MegatronDistillError on all ranks
    together; Interrupted on all ranks where a signal asked for it.
    """
    with (
        job_groups(config.parallel, config.runtime, seed=config.seed, trains=False) as groups,
        device.alone,
    ):
        read = open_tasks(tasks, device.torch_device, add_bos=config.data.add_bos)
        options = data_options(
            config.data, Path(config.output), shows_progress=config.logging.progress
        )
        tokenizer, vocabulary = open_tokenizer(config, options)
        execution = Execution(PRECISIONS[config.train.precision], device.torch_device)
        roles = [ModelRole("student", config.seed, execution, tokenizer, vocabulary)]
        if teacher:
            roles += _teacher_roles(config, roles[0])
        models = [Resolved.of(config, role, read) for role in roles]
        for named, earlier in (against or {}).items():
            _check_same_items(models[0].tasks, earlier, named)
        results: dict[str, Results] = {}
        items: dict[str, dict[str, TaskItems]] = {}
        weights = {model.role.name: model.digest(groups) for model in models}
        for model in models:
            own = items.setdefault(model.role.name, {})
            built = model.built(config.evaluation, groups, cache_gib=config.generation.cache_gib)
            results[model.role.name] = evaluate_model(built, items=own)
            del built  # before the next one has its weights
    others: dict[str, Mapping[str, TaskItems]] = {**items, **(against or {})}
    student = others.pop("student")
    found: dict[str, Any] = {
        "version": __version__,
        "precision": config.train.precision,
        "tokenizer": vocabulary.identity,
        "weights": weights,
        "results": results,
        "first_prompts": {task.task.name: task.first_prompt for task in models[0].tasks},
        "items": items,
    }
    if others:
        found["student_minus"] = {name: differences(student, one) for name, one in others.items()}
    for role in roles:
        if role.vocabulary != vocabulary:
            found["teacher_tokenizer"] = role.vocabulary.identity
    return found


def _check_same_items(
    tasks: Sequence[PreparedTask], others: Mapping[str, TaskItems], named: str
) -> None:
    """Raise ConfigError where a task is not there, or has other prompts."""
    for task in tasks:
        other = others.get(task.task.name)
        if other is None:
            raise ConfigError(
                f"{named}: it has no task {task.task.name}, only {', '.join(others)}; evaluate "
                "both models on the same tasks"
            )
        if other.prompt_hash != task.prompt_hash:
            raise ConfigError(
                f"{named}: its task {task.task.name} has other prompts or items; evaluate both "
                "models with the same files, shots, limit and longest input"
            )

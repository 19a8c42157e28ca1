"""From a configuration to evaluated models: in a run, and from weights alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_distill import __version__
from megatron_distill.config import (
    EvaluationConfig,
    KeepBestConfig,
    RunConfig,
    aligned_role,
    is_aligned,
)
from megatron_distill.data.tokenizers.open import Tokenizer, Vocabulary
from megatron_distill.errors import ConfigError
from megatron_distill.evaluation.tasks.encode import TextEncoder
from megatron_distill.evaluation.tasks.prepared import PreparedTask, prepare_task
from megatron_distill.evaluation.tasks.record import Task, load_task
from megatron_distill.log import get_logger
from megatron_distill.models.architecture import Architecture, Execution
from megatron_distill.models.generation.model import CachedGPT
from megatron_distill.models.gpt import HiddenStateGPT, vocab_shard
from megatron_distill.models.sharded_weights import has_sharded_weights
from megatron_distill.runtime.collectives import from_first_rank, on_first_rank
from megatron_distill.runtime.groups import Groups
from megatron_distill.runtime.launch import PRECISIONS, Device
from megatron_distill.runtime.termination import is_requested
from megatron_distill.train.assemble.alignment import own_tokens
from megatron_distill.train.assemble.distillation import OpenRun
from megatron_distill.train.assemble.models import (
    job_groups,
    resolve_model,
    teacher_execution,
    teacher_seed,
)
from megatron_distill.train.assemble.sources import data_options, open_tokenizer
from megatron_distill.train.checkpoint.best import BestRule
from megatron_distill.train.evaluation.phase import (
    EvaluatedModel,
    Results,
    RunEvaluation,
    evaluate_model,
)
from megatron_distill.train.evaluation.scoring import ModelScorer, ScoredModel
from megatron_distill.train.evaluation.writing import ModelWriter
from megatron_distill.train.run_state import RunState
from megatron_distill.train.teachers.live import OnlineTeacher
from megatron_distill.train.teachers.own_layout import OwnLayout
from megatron_distill.train.teachers.resting import HostWeights, RestingTeacher
from megatron_distill.train.teachers.several import SeveralTeachers
from megatron_distill.train.validation import evaluating

__all__ = [
    "best_rule",
    "configured_tasks",
    "evaluate_by_harness",
    "evaluate_weights",
    "open_evaluation",
]

_LOGGER = get_logger(__name__)


def best_rule(section: KeepBestConfig) -> BestRule:
    """Translate `checkpoint.keep_best`."""
    return BestRule(section.metric, section.mode)


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


def open_evaluation(config: RunConfig, opened: OpenRun, state: RunState) -> RunEvaluation:
    """Read the tasks, encode them for student and teachers, and return the run's evaluation.

    Raises ConfigError or DataError on all ranks.

    Collective: world, one broadcast of the tasks' tokens per model.
    """
    section, log = config.evaluation, Path(config.output) / "metrics.jsonl"
    tasks = from_first_rank(lambda: configured_tasks(section))
    _check_metric(config.checkpoint.keep_best, tasks)
    groups, device = opened.site.groups, opened.site.execution.device
    student = state.student
    shape = state.architecture
    scored = ScoredModel(
        student.wrapped,
        lambda: student.head.head_weight().detach(),
        shape,
        vocab_shard(shape, groups, tokens=opened.vocabulary.size),
        groups,
        device,
    )
    tokenizer = opened.samples.tokenizer
    prepared = _prepared(tasks, tokenizer, _positions(shape, section), device)
    found = EvaluatedModel(
        "student",
        _scorer(scored, section),
        prepared,
        partial(evaluating, student),
        _writer(scored, student.chunks, prepared, tokenizer, cache_gib=config.generation.cache_gib),
    )
    teachers = list(_teachers(config, tasks, opened)) if section.teacher else []
    return RunEvaluation(
        found,
        teachers,
        interval=section.interval,
        at_start=section.at_start,
        logged=from_first_rank(lambda: _logged(log)),
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
            f"checkpoint.keep_best.metric = {keep_best.metric!r} is no measure of this run; give "
            f"one of {', '.join([*known, 'validation.ce_loss'])}"
        )


def _logged(path: Path) -> frozenset[tuple[str, int]]:
    """Return the roles and steps of the evaluations in a log."""
    found = set()
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for line in lines:
        if '"evaluation"' in line:
            try:
                record = json.loads(line)
            except ValueError:
                continue  # torn by a kill; the log drops it
            found |= {(role, record["step"]) for role in record["evaluation"]}
    return frozenset(found)


def _teachers(
    config: RunConfig, tasks: Sequence[Task], opened: OpenRun
) -> Iterator[EvaluatedModel]:
    """Yield the teachers whose models are on these ranks."""
    section, teacher = config.evaluation, opened.teacher
    for role in (*teacher.stored_samples, *teacher.remotes):
        name, measured = role, ""
        if role == "teacher":
            name, measured = "the teacher", "; `megatron-distill evaluate` measures it"
        _LOGGER.info("no baseline of %s: its model is not on the student's ranks%s", name, measured)
    reading = opened.samples.options.teacher
    device = opened.site.execution.device
    for role, model in teacher.models.items():
        tokenizer = opened.samples.tokenizer
        if reading is not None and role == aligned_role(config):
            tokenizer = reading.tokenizer
        prepared = _prepared(tasks, tokenizer, _positions(model.architecture, section), device)
        prepared = _without_texts(role, model.model, prepared)
        if not prepared:
            continue
        size = from_first_rank(partial(_ids, tokenizer))
        groups = model.own_groups if isinstance(model, OwnLayout) else model.groups
        head = partial(_own_head, model)
        scored = ScoredModel(
            [model.model],
            head,
            model.architecture,
            vocab_shard(model.architecture, groups, tokens=size),
            groups,
            device,
        )
        yield EvaluatedModel(
            role,
            _scorer(scored, section),
            prepared,
            partial(_awake, opened, role, model),
            _writer(
                scored, [model.model], prepared, tokenizer, cache_gib=config.generation.cache_gib
            ),
        )


def _ids(tokenizer: Tokenizer | None) -> int:
    return 0 if tokenizer is None else tokenizer.vocab_size


def _own_head(model: OnlineTeacher | OwnLayout) -> torch.Tensor:
    return model.model.head_weight().detach()


@contextmanager
def _awake(opened: OpenRun, role: str, model: OnlineTeacher | OwnLayout) -> Iterator[None]:
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


def _without_texts(
    role: str, model: HiddenStateGPT, tasks: tuple[PreparedTask, ...]
) -> tuple[PreparedTask, ...]:
    """Return the tasks that a model can do; without those of generated text if it is sharded."""
    texts = [task.task.name for task in tasks if task.task.kind == "generation"]
    if not texts or not has_sharded_weights(model):
        return tasks
    _LOGGER.info(
        "%s: no results of %s: a model with sharded weights generates no text; set "
        "%s.shard_weights=false to evaluate it",
        *(role, ", ".join(texts), role),
    )
    return tuple(task for task in tasks if task.task.kind != "generation")


def _scorer(model: ScoredModel, section: EvaluationConfig) -> ModelScorer:
    positions = _positions(model.architecture, section)
    return ModelScorer(model, positions, section.batch_tokens, stop_requested=is_requested)


def _writer(
    model: ScoredModel,
    chunks: Sequence[HiddenStateGPT],
    tasks: Sequence[PreparedTask],
    tokenizer: Tokenizer | None,
    *,
    cache_gib: float,
    writes: bool = False,
) -> ModelWriter | None:
    """Return the writer of a model if one of its tasks generates text.

    Collective: that of `_shared`, since stop strings need the tokenizer on every rank.
    """
    if not writes and all(task.task.kind != "generation" for task in tasks):
        return None
    cached = CachedGPT(
        chunks,
        model.architecture,
        model.groups,
        model.device,
        vocab_size=model.shard.size,
        cache_gib=cache_gib,
        decode=_shared(tokenizer).decode,
    )
    return ModelWriter(cached, stop_requested=is_requested)


def _shared(tokenizer: Tokenizer | None) -> Tokenizer:
    """Return the first rank's tokenizer on every rank.

    Collective: world, one broadcast of the tokenizer.
    """
    shared = [tokenizer]
    dist.broadcast_object_list(shared, src=0)
    assert shared[0] is not None, "the first rank has it"
    return shared[0]


def _positions(shape: Architecture, section: EvaluationConfig) -> int:
    """The longest input of a model."""
    most = shape.max_position_embeddings
    return most if section.max_length is None else min(most, section.max_length)


def _prepared(
    tasks: Sequence[Task], tokenizer: Tokenizer | None, positions: int, device: torch.device
) -> tuple[PreparedTask, ...]:
    """Encode the tasks on the first rank, which has the tokenizer, and share them.

    Collective: world, those of `on_first_rank`, and a broadcast of the tasks' tokens.
    """

    def prepared() -> tuple[PreparedTask, ...]:
        assert tokenizer is not None, "the first rank has it"
        return tuple(prepare_task(task, tokenizer, positions=positions) for task in tasks)

    found = [on_first_rank(prepared, device=device)]
    dist.broadcast_object_list(found, src=0)
    assert found[0] is not None
    for task in found[0]:
        if task.truncated and dist.get_rank() == 0:
            _LOGGER.warning(
                "task %s: %d of %d prompts are longer than the %d positions of the model and lose "
                "tokens on the left; lower its shots, or raise evaluation.max_length",
                *(task.task.name, task.truncated, len(task.items), positions),
            )
    return found[0]


@dataclass(frozen=True)
class _Role:
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


def _teacher_role(config: RunConfig, student: _Role) -> _Role:
    """Return the teacher in the tokens and with the computation that it has in the run.

    Collective: with a tokenizer of its own those of `own_tokens`.
    """
    layers = config.parallel.layers_per_stage.teacher
    execution = teacher_execution(student.execution, config.models["teacher"], layers)
    role = replace(student, name="teacher", seed=teacher_seed(config.seed), execution=execution)
    if not is_aligned(config):
        return role
    own = own_tokens(config, student.vocabulary)
    tokenizer = None if own.reading is None else own.reading.tokenizer
    return replace(role, tokenizer=tokenizer, vocabulary=own.vocabulary)


def evaluate_weights(
    config: RunConfig, device: Device, tasks: Sequence[Task], *, teacher: bool
) -> dict[str, Any]:
    """Evaluate the student of a configuration, and its teacher if asked for, without training.

    Returns the results by role and the facts of the models. Raises a MegatronDistillError on all
    ranks together; Interrupted on all ranks where a signal asked for it.
    """
    if teacher and config.teacher is None:
        raise ConfigError("--teacher: the run has no `teacher` section; leave it out")
    with (
        job_groups(config.parallel, config.runtime, seed=config.seed, trains=False) as groups,
        device.alone,
    ):
        options = data_options(
            config.data, Path(config.output), shows_progress=config.logging.progress
        )
        tokenizer, vocabulary = open_tokenizer(config, options)
        execution = Execution(PRECISIONS[config.train.precision], device.torch_device)
        roles = [_Role("student", config.seed, execution, tokenizer, vocabulary)]
        if teacher:
            roles.append(_teacher_role(config, roles[0]))
        results: dict[str, Results] = {}
        prompts: dict[str, str] = {}
        for role in roles:
            model = _opened(config, role, tasks, groups)
            results[role.name] = evaluate_model(model)
            prompts = {task.task.name: task.first_prompt for task in model.tasks} | prompts
    found: dict[str, Any] = {
        "version": __version__,
        "precision": config.train.precision,
        "tokenizer": vocabulary.identity,
        "results": results,
        "first_prompts": prompts,
    }
    if roles[-1].vocabulary != vocabulary:
        found["teacher_tokenizer"] = roles[-1].vocabulary.identity
    return found


def evaluate_by_harness(
    config: RunConfig,
    device: Device,
    names: Sequence[str],
    *,
    include: str | None,
    limit: int | None,
) -> dict[str, Any] | None:
    """Evaluate the student of a configuration on tasks of lm-evaluation-harness.

    `include`: folder of further tasks of the harness. Returns the harness's results on the first
    rank of a node, None elsewhere. Raises a MegatronDistillError on all ranks together.
    """
    if find_spec("lm_eval") is None:
        raise ConfigError(
            "--lm-eval: lm-evaluation-harness is not installed; install the extra `lm-eval`, or "
            "give --tasks"
        )
    import lm_eval
    from lm_eval.tasks import TaskManager

    from megatron_distill.evaluation.lm_eval_model import ScorerLM

    with (
        job_groups(config.parallel, config.runtime, seed=config.seed, trains=False) as groups,
        device.alone,
    ):
        options = data_options(config.data, Path(config.output))
        tokenizer, vocabulary = open_tokenizer(config, options)
        execution = Execution(PRECISIONS[config.train.precision], device.torch_device)
        role = _Role("student", config.seed, execution, tokenizer, vocabulary)
        model = _opened(config, role, (), groups, writes=True)
        tokenizer = _shared(tokenizer)
        return lm_eval.simple_evaluate(
            model=ScorerLM(model.scorer, TextEncoder(tokenizer), model.writer),
            tasks=list(names),
            task_manager=TaskManager(include_path=include),
            limit=limit,
            bootstrap_iters=0,
            log_samples=False,
            random_seed=None,
            numpy_random_seed=None,
            torch_random_seed=None,
        )


def _opened(
    config: RunConfig,
    role: _Role,
    tasks: Sequence[Task],
    groups: Groups,
    *,
    writes: bool = False,
) -> EvaluatedModel:
    """Build the model of a role and encode the tasks for it; `writes`: it writes text anyway."""
    tokenizer, vocabulary, execution = role.tokenizer, role.vocabulary, role.execution
    source = resolve_model(config, role.name, vocabulary)
    shape, section = source.architecture, config.evaluation
    # Before the weights are read: a wrong task shows at once.
    prepared = _prepared(tasks, tokenizer, _positions(shape, section), execution.device)
    (model,) = source.build(execution, groups=groups, seed=role.seed, interleaved=False)
    model.requires_grad_(False)
    model.eval()
    prepared = _without_texts(role.name, model, prepared)
    scored = ScoredModel(
        [model],
        lambda: model.head_weight().detach(),
        shape,
        vocab_shard(shape, groups, tokens=vocabulary.size),
        groups,
        execution.device,
    )
    return EvaluatedModel(
        role.name,
        _scorer(scored, section),
        prepared,
        writer=_writer(
            scored,
            [model],
            prepared,
            tokenizer,
            cache_gib=config.generation.cache_gib,
            writes=writes,
        ),
    )

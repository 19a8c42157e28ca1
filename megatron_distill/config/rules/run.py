"""Rules over several keys, as named functions; every violation is reported."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megatron_distill.config.messages import (
    Problem,
    WithoutEffect,
    raise_problems,
    without_effect,
)
from megatron_distill.config.rules.alignment import alignment_problems
from megatron_distill.config.rules.job import (
    capture_problems,
    job_problems,
    layout_problems,
    store_problems,
)
from megatron_distill.config.rules.model import architecture_problems
from megatron_distill.config.rules.objective import (
    balance_problems,
    layer_problems,
    objective_problems,
)
from megatron_distill.config.rules.teacher_parallel import parallel_key, teacher_parallel, under_key
from megatron_distill.config.rules.teacher_ranks import (
    TeacherRanks,
    role_problems,
    teacher_ranks_problems,
)
from megatron_distill.config.rules.teachers import teacher_problems
from megatron_distill.config.schema import (
    ArchitectureConfig,
    CaptureConfig,
    FeatureConfig,
    JobConfig,
    KeepBestConfig,
    ParallelConfig,
    RunConfig,
)
from megatron_distill.errors import ConfigError, counted

__all__ = [
    "check_architecture",
    "check_features",
    "check_layout",
    "check_model",
    "is_divisible",
    "rule_problems",
    "with_steps",
]


def check_layout(config: JobConfig, world_size: int, *, teachers: TeacherRanks = ()) -> None:
    """Check every rule over several keys, including those on the number of processes.

    `teachers`: how many of these run one teacher alone, by role.

    Raises ConfigError: one message with all problems, each naming key, value and remedy. Settings
    without effect raise nothing; `load_config` replaces them.
    """
    problems = rule_problems(config)
    layout = list(role_problems(config, world_size, teachers))
    if not layout:
        students = world_size - sum(ranks for _, ranks in teachers)
        parallel = config.parallel
        layout += layout_problems(config, world_size, teachers=teachers)
        fits = students % (parallel.tensor * parallel.pipeline * parallel.context) == 0
        if isinstance(config, RunConfig) and fits:
            layout += _batch_problems(config, students, is_whole=not teachers)
    processes = counted(world_size, "process", "processes")
    raise_problems(f"this configuration on {processes}", problems + layout)


def is_divisible(config: RunConfig, world_size: int, *, teachers: TeacherRanks) -> bool:
    """Return whether layouts and batch fit a division of these processes, which the rules allow."""
    students = world_size - sum(ranks for _, ranks in teachers)
    if students < 1 or any(layout_problems(config, world_size, teachers=teachers)):
        return False
    return not any(_batch_problems(config, students, is_whole=not teachers))


def check_architecture(
    architecture: ArchitectureConfig,
    role: str,
    parallel: ParallelConfig,
    sequence_length: int,
    *,
    key: str = "parallel",
) -> list[str]:
    """List reasons why a shape does not fit this layout; `role`: 'student' or 'teacher'.

    For shapes read from an opened checkpoint. `check_layout` checks shapes given in the file.
    `key`: of the layout, from `parallel_key`.
    """
    found = under_key(architecture_problems(architecture, role, parallel, sequence_length), key)
    return [problem.text for problem in found if not isinstance(problem, WithoutEffect)]


def check_model(config: JobConfig, role: str, architecture: Mapping[str, Any]) -> None:
    """Check the shape of an opened model, as a mapping, against the layout and samples of its role.

    Raises ConfigError: one line per problem.
    """
    shape = ArchitectureConfig.model_validate(architecture)
    parallel = config.parallel if role == "student" else teacher_parallel(config, role)
    length = config.models[role].sequence_length or config.data.sequence_length
    problems = check_architecture(shape, role, parallel, length, key=parallel_key(config, role))
    if problems:
        raise ConfigError("\n".join(problems))


def check_features(
    features: tuple[FeatureConfig, ...], student_layers: int, teacher_layers: int
) -> None:
    """Check feature losses against the depths of two opened models.

    Raises ConfigError: one message with all problems.
    """
    subject = (
        f"feature losses between {counted(student_layers, 'student layer')} and "
        f"{counted(teacher_layers, 'teacher layer')}"
    )
    raise_problems(subject, list(layer_problems(features, student_layers, teacher_layers)))


def with_steps(config: RunConfig, steps: int) -> tuple[RunConfig, list[str]]:
    """Replace `train.epochs` by the steps computed from it; also return the rules' warnings.

    Raises ConfigError: the learning-rate schedule does not fit that many steps.
    """
    train = config.train.model_copy(update={"steps": steps, "epochs": None})
    resolved = config.model_copy(update={"train": train})
    found = list(_schedule(resolved))
    raise_problems(f"train.epochs = {config.train.epochs:g}, train.steps = {steps}", found)
    idle = [problem for problem in found if isinstance(problem, WithoutEffect)]
    changes = {problem.keys[0].removeprefix("schedule."): problem.instead for problem in idle}
    schedule = resolved.schedule.model_copy(update=changes)
    return resolved.model_copy(update={"schedule": schedule}), [problem.text for problem in idle]


def rule_problems(config: JobConfig) -> list[Problem]:
    """Collect the problems of the rules that hold for any number of processes."""
    if isinstance(config, CaptureConfig):
        return [*job_problems(config), *capture_problems(config)]
    assert isinstance(config, RunConfig)
    return [problem for rule in _RULES for problem in rule(config)]


def _length(config: RunConfig) -> Iterator[Problem]:
    train = config.train
    keys = ("train.steps", "train.epochs")
    if train.epochs is None and not train.steps:
        yield Problem(
            keys,
            f"train.steps = {train.steps}: set train.steps to the number of optimizer steps, or "
            "train.epochs to the passes over the data",
        )
    if train.epochs is None:
        return
    if train.steps:
        yield Problem(
            keys,
            f"train.steps = {train.steps} and train.epochs = {train.epochs:g}: give only one of "
            "the two",
        )
    store = None if config.teacher is None else config.teacher.store
    parts = {
        "data.sources": sum(
            len(source.paths) if source.is_tokenized else 1 for source in config.data.sources
        ),
        "teacher.store": 0 if config.data.sources or store is None else len(store),
    }
    for key, count in parts.items():
        if count > 1:
            yield Problem(
                ("train.epochs", key),
                f"train.epochs = {train.epochs:g}: {key} is a blend of {count} corpora, each with "
                "epochs of its own; set train.steps instead",
            )


def _schedule(config: RunConfig) -> Iterator[Problem]:
    schedule, train = config.schedule, config.train
    decay, wsd = f"schedule.decay = {schedule.decay!r}", schedule.wsd_decay_steps
    if schedule.decay == "wsd" and wsd is None:
        yield Problem(
            ("schedule.wsd_decay_steps", "schedule.decay"),
            f"schedule.wsd_decay_steps is required with {decay}; set it to the number of updates "
            "of the final decay",
        )
    if schedule.decay != "wsd" and wsd is not None:
        key = "schedule.wsd_decay_steps"
        yield without_effect(key, wsd, f"with {decay}", instead=None)
    if schedule.decay != "wsd" and schedule.wsd_decay_form != "linear":
        form = schedule.wsd_decay_form
        yield without_effect("schedule.wsd_decay_form", form, f"with {decay}", instead="linear")
    first = schedule.initial_learning_rate
    if first and not schedule.warmup_steps:
        yield without_effect(
            "schedule.initial_learning_rate", first, "with schedule.warmup_steps = 0", instead=0.0
        )
    if schedule.decay == "constant":
        unused: dict[str, object] = {"min_learning_rate": 0.0, "decay_steps": None}
        for name, nothing in unused.items():
            value = getattr(schedule, name)
            if value != nothing:
                yield without_effect(f"schedule.{name}", value, f"with {decay}", instead=nothing)
    for name in ("min_learning_rate", "initial_learning_rate"):
        rate = getattr(schedule, name)
        if rate > config.optimizer.learning_rate:
            yield Problem(
                (f"schedule.{name}", "optimizer.learning_rate"),
                f"schedule.{name} = {rate} is above "
                f"optimizer.learning_rate = {config.optimizer.learning_rate}; lower it",
            )
    if schedule.decay_steps is not None or train.epochs is None:
        yield from _warm_up(config)


def _warm_up(config: RunConfig) -> Iterator[Problem]:
    """Compare the warm-up with the known length of the schedule."""
    schedule, steps = config.schedule, config.train.steps
    end = schedule.decay_steps
    wsd = schedule.wsd_decay_steps if schedule.decay == "wsd" else None
    last, last_name = (steps, "train.steps") if end is None else (end, "schedule.decay_steps")
    left = last - schedule.warmup_steps
    if end is None and last > 0 and left <= 0:
        yield without_effect(
            "schedule.decay",
            schedule.decay,
            f"within train.steps = {steps}: the warm-up takes schedule.warmup_steps = "
            f"{schedule.warmup_steps}",
            instead=schedule.decay,
        )
    elif end is None and wsd is not None and wsd > left > 0:
        yield without_effect(
            "schedule.wsd_decay_steps",
            wsd,
            f"beyond the {counted(left, 'update')} that schedule.warmup_steps = "
            f"{schedule.warmup_steps} leaves of train.steps = {steps}: the decay is as short",
            instead=left,
        )
    elif schedule.warmup_steps + (wsd or 0) > last > 0:
        yield Problem(
            ("schedule.warmup_steps", "schedule.wsd_decay_steps", last_name),
            f"schedule.warmup_steps = {schedule.warmup_steps}"
            + (f" and schedule.wsd_decay_steps = {wsd} take" if wsd else " takes")
            + f" more than {last_name} = {last}; shorten the first or raise the second",
        )
    elif schedule.warmup_steps >= last > 0:
        yield Problem(
            ("schedule.warmup_steps", last_name),
            f"schedule.warmup_steps = {schedule.warmup_steps} leaves no update of {last_name} = "
            f"{last} for the decay; shorten the first or raise the second",
        )


def _optimizer(config: RunConfig) -> Iterator[Problem]:
    optimizer = config.optimizer
    needed = {
        "optimizer.distributed": optimizer.distributed,
        "optimizer.overlap_grad_reduce": optimizer.overlap_grad_reduce,
    }
    missing = [f"{key} = false" for key, is_on in needed.items() if not is_on]
    if optimizer.overlap_param_gather and missing:
        yield without_effect(
            "optimizer.overlap_param_gather",
            value=True,
            reason=f"with {' and '.join(missing)}",
            instead=False,
        )
    if optimizer.bucket_size is not None and not optimizer.overlap_grad_reduce:
        yield without_effect(
            "optimizer.bucket_size",
            optimizer.bucket_size,
            "with optimizer.overlap_grad_reduce = false",
            instead=None,
        )


def _recompute(config: RunConfig) -> Iterator[Problem]:
    train = config.train
    modules = train.recompute_modules
    if not modules or len(set(modules)) < len(modules):
        yield Problem(
            ("train.recompute_modules",),
            f"train.recompute_modules = {list(modules)}: name at least one module, and each once",
        )
    if train.recompute != "selective" and modules != ("attention",):
        yield without_effect(
            "train.recompute_modules",
            modules,
            f"with train.recompute = {train.recompute}",
            instead=("attention",),
        )
    if train.recompute != "full" and train.recompute_layers is not None:
        yield without_effect(
            "train.recompute_layers",
            train.recompute_layers,
            f"with train.recompute = {train.recompute}",
            instead=None,
        )


def _batch(config: RunConfig) -> Iterator[Problem]:
    train = config.train
    if train.global_batch_size % train.micro_batch_size:
        yield Problem(
            ("train.global_batch_size", "train.micro_batch_size"),
            f"train.global_batch_size = {train.global_batch_size}: not a multiple of "
            f"train.micro_batch_size = {train.micro_batch_size}; change one of the two",
        )


def _validation(config: RunConfig) -> Iterator[Problem]:
    validation, data = config.validation, config.data
    if validation.interval and not validation.samples:
        interval = validation.interval
        yield without_effect(
            "validation.interval", interval, "with validation.samples = 0", instead=0
        )
    held_out = data.validation_fraction or data.validation_sources
    if validation.samples and data.sources and not held_out:
        yield Problem(
            ("validation.samples", "data.validation_fraction", "data.validation_sources"),
            f"validation.samples = {validation.samples} but nothing is held out; raise "
            "data.validation_fraction or give data.validation_sources",
        )


def _checkpoint(config: RunConfig) -> Iterator[Problem]:
    checkpoint = config.checkpoint
    settings: dict[str, object] = {
        "interval": 0, "keep": 2, "keep_best": None, "asynchronous": False,
    }  # fmt: skip
    for name, nothing in settings.items():
        value = getattr(checkpoint, name)
        if not checkpoint.save and value != nothing:
            key = f"checkpoint.{name}"
            value = value.metric if isinstance(value, KeepBestConfig) else value
            yield without_effect(key, value, "with checkpoint.save = false", instead=nothing)


def _evaluation(config: RunConfig) -> Iterator[Problem]:
    evaluation, best = config.evaluation, config.checkpoint.keep_best
    if evaluation.interval and not evaluation.tasks:
        reason = "without evaluation.tasks"
        yield without_effect("evaluation.interval", evaluation.interval, reason, instead=0)
    if best is None:
        return
    key = "checkpoint.keep_best.metric"
    if best.metric.startswith("validation."):
        if not config.validation.samples:
            yield Problem(
                (key, "validation.samples"),
                f"{key} = {best.metric!r} but validation.samples = 0; set it to 1 or more",
            )
    elif not evaluation.tasks:
        yield Problem(
            (key, "evaluation.tasks"),
            f"{key} = {best.metric!r} but evaluation.tasks is empty; give the task, or a metric "
            "such as validation.ce_loss",
        )


def _profile(config: RunConfig) -> Iterator[Problem]:
    profile = config.profile
    for name, least, count in (("steps", 1, "counted from 1"), ("ranks", 0, "counted from 0")):
        key, values = f"profile.{name}", list(getattr(profile, name))
        if min(values, default=least) < least or len(set(values)) < len(values):
            yield Problem((key,), f"{key} = {values}: name each of the {name}, {count}, once")
    train, steps = config.train, profile.steps
    if train.epochs is None and steps and min(steps) > train.steps:
        steps_text = f"because train.steps = {train.steps}"
        yield without_effect("profile.steps", list(steps), steps_text, instead=())
    for name, default in (
        ("ranks", (0,)), ("memory_snapshot", False), ("shapes", False), ("stacks", False),
    ):  # fmt: skip
        value = getattr(profile, name)
        if not steps and value != default:
            key = f"profile.{name}"
            yield without_effect(key, value, "without profile.steps", instead=default)


_RULES: tuple[Callable[[RunConfig], Iterator[Problem]], ...] = (
    job_problems,
    store_problems,
    teacher_problems,
    objective_problems,
    alignment_problems,
    balance_problems,
    teacher_ranks_problems,
    _length,
    _schedule,
    _optimizer,
    _recompute,
    _batch,
    _validation,
    _checkpoint,
    _evaluation,
    _profile,
)


def _batch_problems(config: RunConfig, world_size: int, *, is_whole: bool) -> Iterator[Problem]:
    """Find batch sizes that do not divide over the student's processes in a valid layout.

    is_whole: whether these are all processes.
    """
    parallel, train = config.parallel, config.train
    data_ranks = world_size // (parallel.tensor * parallel.pipeline * parallel.context)
    per_pass = train.micro_batch_size * data_ranks
    processes = f"the {counted(world_size, 'rank')} of the student"
    if is_whole:
        processes = counted(world_size, "process", "processes")
    if train.global_batch_size % per_pass:
        yield Problem(
            ("train.global_batch_size", "train.micro_batch_size"),
            f"train.global_batch_size = {train.global_batch_size}: must be a multiple of "
            f"train.micro_batch_size * data-parallel size = {train.micro_batch_size} * "
            f"{data_ranks} on {processes}",
        )
    elif parallel.virtual_pipeline and train.global_batch_size // per_pass % parallel.pipeline:
        micro_batches = counted(train.global_batch_size // per_pass, "micro-batch", "micro-batches")
        yield Problem(
            ("train.global_batch_size", "parallel.virtual_pipeline", "parallel.pipeline"),
            f"train.global_batch_size = {train.global_batch_size} makes {micro_batches} on each "
            "data-parallel rank; parallel.virtual_pipeline needs a multiple of "
            f"parallel.pipeline = {parallel.pipeline}",
        )

"""Rules over several keys, as named functions; every broken one is reported."""

from collections.abc import Callable, Iterator

from megatron_distill.config.messages import Problem, raise_problems
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
from megatron_distill.config.schema import (
    ArchitectureConfig,
    CaptureConfig,
    FeatureConfig,
    JobConfig,
    ParallelConfig,
    RunConfig,
)

__all__ = ["check_architecture", "check_features", "check_layout", "rule_problems"]


def check_layout(config: JobConfig, world_size: int) -> None:
    """Check every rule over several keys, those on the number of processes included.

    Raises ConfigError: one message with all problems, each naming key, value and remedy.
    """
    problems = rule_problems(config)
    layout = list(layout_problems(config, world_size))
    parallel = config.parallel
    fits = world_size % (parallel.tensor * parallel.pipeline * parallel.context) == 0
    if isinstance(config, RunConfig) and fits:
        layout += _batch_problems(config, world_size)
    raise_problems(f"this configuration on {world_size} processes", problems + layout)


def check_architecture(
    architecture: ArchitectureConfig, role: str, parallel: ParallelConfig, sequence_length: int
) -> list[str]:
    """Say what keeps a model of this shape off this layout; `role` is 'student' or 'teacher'.

    For shapes that are known only after a checkpoint has been opened; shapes written in the file
    are checked by `check_layout`.
    """
    found = architecture_problems(architecture, role, parallel, sequence_length)
    return [problem.text for problem in found]


def check_features(
    features: tuple[FeatureConfig, ...], student_layers: int, teacher_layers: int
) -> None:
    """Check feature losses against the depths of two models that have been opened.

    Raises ConfigError: one message with all problems.
    """
    subject = f"feature losses between {student_layers} and {teacher_layers} layers"
    raise_problems(subject, list(layer_problems(features, student_layers, teacher_layers)))


def rule_problems(config: JobConfig) -> list[Problem]:
    """Collect what the rules that hold for any number of processes find."""
    if isinstance(config, CaptureConfig):
        return [*job_problems(config), *capture_problems(config)]
    assert isinstance(config, RunConfig)
    return [problem for rule in _RULES for problem in rule(config)]


def _schedule(config: RunConfig) -> Iterator[Problem]:
    schedule, steps = config.schedule, config.train.steps
    wsd, end = schedule.wsd_decay_steps, schedule.decay_steps
    if (schedule.decay == "wsd") != (wsd is not None):
        remedy = "is required by" if wsd is None else f"= {wsd} belongs only to"
        yield Problem(
            ("schedule.wsd_decay_steps", "schedule.decay"),
            f"schedule.wsd_decay_steps {remedy} schedule.decay = 'wsd', here "
            f"schedule.decay = {schedule.decay!r}",
        )
    last, last_name = (steps, "train.steps") if end is None else (end, "schedule.decay_steps")
    needed = schedule.warmup_steps + (wsd or 0)
    if needed > last:
        yield Problem(
            ("schedule.warmup_steps", "schedule.wsd_decay_steps", last_name),
            f"schedule.warmup_steps = {schedule.warmup_steps}"
            + (f" and schedule.wsd_decay_steps = {wsd} take" if wsd else " takes")
            + f" more than {last_name} = {last}; shorten the first or raise the second",
        )
    elif schedule.warmup_steps >= last:
        yield Problem(
            ("schedule.warmup_steps", last_name),
            f"schedule.warmup_steps = {schedule.warmup_steps} leaves nothing of {last_name} = "
            f"{last} for the decay; shorten the first or raise the second",
        )
    for name in ("min_learning_rate", "initial_learning_rate"):
        rate = getattr(schedule, name)
        if rate > config.optimizer.learning_rate:
            yield Problem(
                (f"schedule.{name}", "optimizer.learning_rate"),
                f"schedule.{name} = {rate} is above "
                f"optimizer.learning_rate = {config.optimizer.learning_rate}; lower it",
            )
    if schedule.initial_learning_rate and not schedule.warmup_steps:
        yield Problem(
            ("schedule.initial_learning_rate", "schedule.warmup_steps"),
            f"schedule.initial_learning_rate = {schedule.initial_learning_rate} begins a warm-up, "
            "and schedule.warmup_steps = 0; give that a number, or leave the first out",
        )
    if schedule.decay != "wsd" and schedule.wsd_decay_form != "linear":
        yield Problem(
            ("schedule.wsd_decay_form", "schedule.decay"),
            f"schedule.wsd_decay_form = {schedule.wsd_decay_form!r} belongs only to "
            f"schedule.decay = 'wsd', here schedule.decay = {schedule.decay!r}",
        )


def _optimizer(config: RunConfig) -> Iterator[Problem]:
    optimizer = config.optimizer
    if optimizer.overlap_param_gather and not (
        optimizer.distributed and optimizer.overlap_grad_reduce
    ):
        names = ("overlap_param_gather", "distributed", "overlap_grad_reduce")
        yield Problem(
            tuple(f"optimizer.{name}" for name in names),
            "optimizer.overlap_param_gather = true: needs optimizer.distributed = true and "
            "optimizer.overlap_grad_reduce = true",
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
        yield Problem(
            ("validation.interval", "validation.samples"),
            f"validation.interval = {validation.interval} but validation.samples = 0; give the "
            "number of held-out sequences or set validation.interval=0",
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
    if not checkpoint.save and (checkpoint.interval or checkpoint.asynchronous):
        yield Problem(
            ("checkpoint.save", "checkpoint.interval", "checkpoint.asynchronous"),
            "checkpoint.save = false: checkpoint.interval and checkpoint.asynchronous mean "
            "nothing then; leave them out or set checkpoint.save=true",
        )


_RULES: tuple[Callable[[RunConfig], Iterator[Problem]], ...] = (
    job_problems,
    store_problems,
    objective_problems,
    balance_problems,
    _schedule,
    _optimizer,
    _batch,
    _validation,
    _checkpoint,
)


def _batch_problems(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Find how the batch does not divide over the processes, whose layout is right."""
    parallel, train = config.parallel, config.train
    data_ranks = world_size // (parallel.tensor * parallel.pipeline * parallel.context)
    per_pass = train.micro_batch_size * data_ranks
    if train.global_batch_size % per_pass:
        yield Problem(
            ("train.global_batch_size", "train.micro_batch_size"),
            f"train.global_batch_size = {train.global_batch_size}: must be a multiple of "
            f"train.micro_batch_size * data-parallel size = {train.micro_batch_size} * "
            f"{data_ranks} on {world_size} processes",
        )
    elif parallel.virtual_pipeline and train.global_batch_size // per_pass % parallel.pipeline:
        yield Problem(
            ("train.global_batch_size", "parallel.virtual_pipeline", "parallel.pipeline"),
            f"train.global_batch_size = {train.global_batch_size}: makes "
            f"{train.global_batch_size // per_pass} micro-batches on each data-parallel rank, "
            "and parallel.virtual_pipeline needs a multiple of parallel.pipeline = "
            f"{parallel.pipeline}",
        )

"""Rules over several keys, as named functions; every broken one is reported."""

from collections.abc import Callable, Iterator

from megatron_distill.config.check_model import architecture_problems
from megatron_distill.config.check_model_source import source_problems
from megatron_distill.config.check_objective import objective_problems
from megatron_distill.config.problems import Problem, raise_problems
from megatron_distill.config.schema import (
    ArchitectureConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    SourceConfig,
)

__all__ = ["check_architecture", "check_layout", "rule_problems"]


def check_layout(config: RunConfig, world_size: int) -> None:
    """Check every rule over several keys, those on the number of processes included.

    Raises ConfigError: one message with all problems, each naming key, value and remedy.
    """
    problems = rule_problems(config) + list(_world_problems(config, world_size))
    raise_problems(f"this configuration on {world_size} processes", problems)


def check_architecture(
    architecture: ArchitectureConfig, role: str, parallel: ParallelConfig, sequence_length: int
) -> list[str]:
    """Say what keeps a model of this shape off this layout; `role` is 'student' or 'teacher'.

    For shapes that are known only after a checkpoint has been opened; shapes written in the file
    are checked by `check_layout`.
    """
    found = architecture_problems(architecture, role, parallel, sequence_length)
    return [problem.text for problem in found]


def rule_problems(config: RunConfig) -> list[Problem]:
    """Collect what the rules that hold for any number of processes find."""
    return [problem for rule in _RULES for problem in rule(config)]


def _models(config: RunConfig) -> Iterator[Problem]:
    for role, model in _roles(config):
        yield from source_problems(model, role)
        if model.architecture is not None:
            yield from architecture_problems(
                model.architecture, role, config.parallel, config.data.sequence_length
            )


def _vocabularies(config: RunConfig) -> Iterator[Problem]:
    sizes = {
        role: model.architecture.vocab_size
        for role, model in _roles(config)
        if model.architecture is not None and model.architecture.vocab_size is not None
    }
    if len(set(sizes.values())) > 1:
        student, teacher = (f"{role}.architecture.vocab_size" for role in ("student", "teacher"))
        yield Problem(
            (student, teacher),
            f"{student} = {sizes['student']} but {teacher} = {sizes['teacher']}: teacher and "
            "student must share one vocabulary; use models of one tokenizer",
        )


def _pipeline(config: RunConfig) -> Iterator[Problem]:
    parallel = config.parallel
    if parallel.virtual_pipeline is not None and parallel.pipeline < 2:
        yield Problem(
            ("parallel.virtual_pipeline", "parallel.pipeline"),
            f"parallel.virtual_pipeline = {parallel.virtual_pipeline}: interleaving needs "
            f"parallel.pipeline >= 2, not {parallel.pipeline}; raise it or set "
            "parallel.virtual_pipeline=null",
        )


def _sequence(config: RunConfig) -> Iterator[Problem]:
    parallel, length = config.parallel, config.data.sequence_length
    if parallel.sequence and parallel.tensor < 2:
        yield Problem(
            ("parallel.sequence", "parallel.tensor"),
            "parallel.sequence = true: sequence parallelism needs parallel.tensor >= 2, not "
            f"{parallel.tensor}; raise it or set parallel.sequence=false",
        )
    if parallel.sequence and length % (parallel.tensor * parallel.context):
        yield Problem(
            ("data.sequence_length", "parallel.sequence", "parallel.tensor", "parallel.context"),
            f"data.sequence_length = {length}: with parallel.sequence it must be a multiple of "
            f"parallel.tensor * parallel.context = {parallel.tensor * parallel.context}",
        )
    if parallel.context > 1 and length % (2 * parallel.context):
        yield Problem(
            ("data.sequence_length", "parallel.context"),
            f"data.sequence_length = {length}: with parallel.context = {parallel.context} it "
            f"must be a multiple of 2 * parallel.context = {2 * parallel.context}",
        )


def _experts(config: RunConfig) -> Iterator[Problem]:
    shapes = [model.architecture for _, model in _roles(config)]
    if config.parallel.expert > 1 and all(s is not None and s.moe is None for s in shapes):
        yield Problem(
            ("parallel.expert", "student.architecture.moe", "teacher.architecture.moe"),
            f"parallel.expert = {config.parallel.expert}: no model here has experts; set "
            "parallel.expert=1 or give an architecture.moe section",
        )


def _sources(config: RunConfig) -> Iterator[Problem]:
    data = config.data
    for name, sources in (
        ("data.sources", data.sources),
        ("data.validation_sources", data.validation_sources),
    ):
        for index, source in enumerate(sources):
            yield from _source(f"{name}.{index}", source)


def _source(name: str, source: SourceConfig) -> Iterator[Problem]:
    keys = (f"{name}.paths", f"{name}.format")
    if source.format == "python_stdlib" and source.paths:
        yield Problem(
            keys, f"{name}.paths: format python_stdlib finds its own files; leave paths out"
        )
    if source.format != "python_stdlib" and not source.paths:
        yield Problem(keys, f"{name}.paths: format {source.format} needs at least one path")


def _tokenizer(config: RunConfig) -> Iterator[Problem]:
    tokenizer = config.data.tokenizer
    path, size = "data.tokenizer.path", "data.tokenizer.train_vocab_size"
    from_model = any(model.hf is not None for _, model in _roles(config))
    if tokenizer.path is None and tokenizer.train_vocab_size is None and not from_model:
        yield Problem(
            (path, size),
            f"data.tokenizer: give either {path} or {size}, or a model's student.hf or teacher.hf",
        )
    if tokenizer.path is not None and tokenizer.train_vocab_size is not None:
        yield Problem(
            (path, size),
            f"{path} = {tokenizer.path!r} and {size} = {tokenizer.train_vocab_size}: give only "
            "one of the two",
        )
    for index, source in enumerate(config.data.sources):
        if source.format == "megatron" and tokenizer.train_vocab_size is not None:
            yield Problem(
                (size, f"data.sources.{index}.format"),
                f"{size} = {tokenizer.train_vocab_size}: data.sources.{index} is tokenised "
                f"already; give the folder of its tokenizer in {path}",
            )


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
    if schedule.min_learning_rate > config.optimizer.learning_rate:
        yield Problem(
            ("schedule.min_learning_rate", "optimizer.learning_rate"),
            f"schedule.min_learning_rate = {schedule.min_learning_rate} is above "
            f"optimizer.learning_rate = {config.optimizer.learning_rate}; lower it",
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
    if validation.samples and not data.validation_fraction and not data.validation_sources:
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


def _backend(config: RunConfig) -> Iterator[Problem]:
    if config.runtime.backend == "nccl" and config.runtime.device == "cpu":
        yield Problem(
            ("runtime.backend", "runtime.device"),
            "runtime.backend = 'nccl': needs runtime.device = 'cuda', not 'cpu'; use 'gloo' or "
            "'auto' on a CPU",
        )


def _roles(config: RunConfig) -> Iterator[tuple[str, ModelConfig]]:
    yield "student", config.student
    if config.teacher is not None:
        yield "teacher", config.teacher


_RULES: tuple[Callable[[RunConfig], Iterator[Problem]], ...] = (
    _models,
    _vocabularies,
    _pipeline,
    _sequence,
    _experts,
    _sources,
    _tokenizer,
    objective_problems,
    _schedule,
    _optimizer,
    _batch,
    _validation,
    _checkpoint,
    _backend,
)


def _world_problems(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Find what the number of processes makes wrong."""
    parallel, train = config.parallel, config.train
    model_ranks = parallel.tensor * parallel.pipeline * parallel.context
    if world_size % model_ranks:
        yield Problem(
            ("parallel.tensor", "parallel.pipeline", "parallel.context"),
            f"parallel.tensor * parallel.pipeline * parallel.context = {parallel.tensor} * "
            f"{parallel.pipeline} * {parallel.context} = {model_ranks} does not divide the "
            f"{world_size} processes; start a multiple of {model_ranks} or change the layout",
        )
        return
    data_ranks = world_size // model_ranks
    if data_ranks * parallel.context % parallel.expert:
        yield Problem(
            ("parallel.expert",),
            f"parallel.expert = {parallel.expert}: must divide the data-parallel times context "
            f"size, {data_ranks} * {parallel.context} on {world_size} processes",
        )
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

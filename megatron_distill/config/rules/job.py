"""Rules over several keys that hold for every job, whether a student is trained or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import get_args

from megatron_distill.config.messages import Problem
from megatron_distill.config.rules.model import architecture_problems, source_problems
from megatron_distill.config.schema import CaptureConfig, JobConfig, RunConfig, SourceConfig
from megatron_distill.config.schema.data import ConversationFormat, PathlessFormat, TokenizedFormat

__all__ = [
    "capture_problems",
    "job_problems",
    "layout_problems",
    "repeated_names",
    "store_problems",
]


_CONVERSATION_FORMATS = get_args(ConversationFormat)


def job_problems(job: JobConfig) -> Iterator[Problem]:
    """Find what the rules say that hold for any job and any number of processes."""
    for rule in _RULES:
        yield from rule(job)


def _models(job: JobConfig) -> Iterator[Problem]:
    for role, model in job.models.items():
        yield from source_problems(model, role)
        if model.architecture is not None:
            yield from architecture_problems(
                model.architecture, role, job.parallel, job.data.sequence_length
            )


def _vocabularies(job: JobConfig) -> Iterator[Problem]:
    sizes = {
        role: model.architecture.vocab_size
        for role, model in job.models.items()
        if model.architecture is not None and model.architecture.vocab_size is not None
    }
    if len(set(sizes.values())) > 1:
        student, teacher = (f"{role}.architecture.vocab_size" for role in ("student", "teacher"))
        yield Problem(
            (student, teacher),
            f"{student} = {sizes['student']} but {teacher} = {sizes['teacher']}: teacher and "
            "student must share one vocabulary; use models of one tokenizer",
        )


def _pipeline(job: JobConfig) -> Iterator[Problem]:
    parallel = job.parallel
    if parallel.virtual_pipeline is not None and parallel.pipeline < 2:
        yield Problem(
            ("parallel.virtual_pipeline", "parallel.pipeline"),
            f"parallel.virtual_pipeline = {parallel.virtual_pipeline}: interleaving needs "
            f"parallel.pipeline >= 2, not {parallel.pipeline}; raise it or set "
            "parallel.virtual_pipeline=null",
        )


def _sequence(job: JobConfig) -> Iterator[Problem]:
    parallel, length = job.parallel, job.data.sequence_length
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


def _experts(job: JobConfig) -> Iterator[Problem]:
    shapes = [model.architecture for model in job.models.values()]
    if job.parallel.expert > 1 and all(s is not None and s.moe is None for s in shapes):
        yield Problem(
            ("parallel.expert", "student.architecture.moe", "teacher.architecture.moe"),
            f"parallel.expert = {job.parallel.expert}: no model here has experts; set "
            "parallel.expert=1 or give an architecture.moe section",
        )


def _sources(job: JobConfig) -> Iterator[Problem]:
    data = job.data
    is_stored = job.teacher is not None and job.teacher.store is not None
    if not data.sources and not is_stored:
        yield Problem(
            ("data.sources",),
            "data.sources = []: no corpus is named; give at least one, or teacher.store to train "
            "on the samples of a store",
        )
    for name, sources in (
        ("data.sources", data.sources),
        ("data.validation_sources", data.validation_sources),
    ):
        for index, source in enumerate(sources):
            yield from _source(f"{name}.{index}", source)
        yield from repeated_names(name, [source.log_name for source in sources])


def repeated_names(key: str, names: Sequence[str]) -> Iterator[Problem]:
    """Find the sources of one list that the log would call the same."""
    for index, name in enumerate(names):
        first = names.index(name)
        if first < index:
            yield Problem(
                (f"{key}.{index}.name", f"{key}.{first}.name"),
                f"{key}.{index}.name: the log calls this source {name!r} and {key}.{first} as "
                "well; give one of them another name",
            )


def _conversations(job: JobConfig) -> Iterator[Problem]:
    data = job.data
    sources = (*data.sources, *data.validation_sources)
    has_conversations = any(source.conversation is not None for source in sources)
    if has_conversations and not data.isolate_documents:
        yield Problem(
            ("data.isolate_documents", "data.sources"),
            "data.isolate_documents = false: conversations in one sequence must not see each "
            "other; set it to true",
        )
    asked = {
        "distill_on_prompt": data.distill_on_prompt,
        "train_on": data.train_on != "all_responses",
    }
    for name in (name for name, is_asked in asked.items() if is_asked and not has_conversations):
        yield Problem(
            (f"data.{name}", "data.sources"),
            f"data.{name} = {getattr(data, name)!r}: says something of conversations, and no "
            "source has a `conversation` section; give one or leave it out",
        )


def _source(name: str, source: SourceConfig) -> Iterator[Problem]:
    keys = (f"{name}.paths", f"{name}.format")
    has_paths = source.format not in get_args(PathlessFormat)
    if source.paths and not has_paths:
        yield Problem(
            keys, f"{name}.paths: format {source.format} finds its own files; leave paths out"
        )
    if has_paths and not source.paths:
        yield Problem(keys, f"{name}.paths: format {source.format} needs at least one path")
    if source.conversation is not None and source.format not in _CONVERSATION_FORMATS:
        yield Problem(
            (f"{name}.conversation", f"{name}.format"),
            f"{name}.conversation: rows of format {', '.join(_CONVERSATION_FORMATS)} hold "
            f"conversations, those of format {source.format} do not; leave it out",
        )


def _tokenizer(job: JobConfig) -> Iterator[Problem]:
    tokenizer = job.data.tokenizer
    path, size = "data.tokenizer.path", "data.tokenizer.train_vocab_size"
    values = {
        path: tokenizer.path,
        "data.tokenizer.encoding": tokenizer.encoding,
        size: tokenizer.train_vocab_size,
    }
    given = {key: value for key, value in values.items() if value is not None}
    from_model = any(model.hf or model.store for model in job.models.values())
    if not given and not from_model:
        yield Problem(
            tuple(values),
            f"data.tokenizer: give one of {', '.join(values)}, or a model's student.hf or "
            "teacher.hf, or teacher.store",
        )
    if len(given) > 1:
        said = " and ".join(f"{key} = {value!r}" for key, value in given.items())
        yield Problem(tuple(given), f"{said}: give only one of them")
    for index, source in enumerate(job.data.sources):
        is_tokenized = source.format in get_args(TokenizedFormat)
        if is_tokenized and tokenizer.train_vocab_size is not None:
            yield Problem(
                (size, f"data.sources.{index}.format"),
                f"{size} = {tokenizer.train_vocab_size}: data.sources.{index} is tokenised "
                f"already; give the folder of its tokenizer in {path}",
            )


def _backend(job: JobConfig) -> Iterator[Problem]:
    if job.runtime.backend == "nccl" and job.runtime.device == "cpu":
        yield Problem(
            ("runtime.backend", "runtime.device"),
            "runtime.backend = 'nccl': needs runtime.device = 'cuda', not 'cpu'; use 'gloo' or "
            "'auto' on a CPU",
        )


_RULES: tuple[Callable[[JobConfig], Iterator[Problem]], ...] = (
    _models,
    _vocabularies,
    _pipeline,
    _sequence,
    _experts,
    _sources,
    _conversations,
    _tokenizer,
    _backend,
)


def layout_problems(job: JobConfig, world_size: int) -> Iterator[Problem]:
    """Find what keeps the layout off this number of processes."""
    parallel = job.parallel
    model_ranks = parallel.tensor * parallel.pipeline * parallel.context
    if world_size % model_ranks:
        yield Problem(
            ("parallel.tensor", "parallel.pipeline", "parallel.context"),
            f"parallel.tensor * parallel.pipeline * parallel.context = {parallel.tensor} * "
            f"{parallel.pipeline} * {parallel.context} = {model_ranks} does not divide the "
            f"{world_size} processes; start a multiple of {model_ranks} or change the layout",
        )
    elif world_size // (parallel.tensor * parallel.pipeline) % parallel.expert:
        yield Problem(
            ("parallel.expert",),
            f"parallel.expert = {parallel.expert}: must divide the data-parallel times context "
            f"size, {world_size // model_ranks} * {parallel.context} on {world_size} processes",
        )


def capture_problems(config: CaptureConfig) -> Iterator[Problem]:
    """Say what of a capture contradicts itself."""
    store, teacher = config.store, config.teacher
    if teacher is None:
        yield Problem(
            ("teacher",), "teacher = null: nobody speaks; give teacher.hf or teacher.checkpoint"
        )
    elif teacher.store is not None:
        yield Problem(
            ("teacher.store",),
            "teacher.store: a store is captured from a model; give teacher.hf or "
            "teacher.checkpoint, and where the store goes in store.path",
        )
    if config.parallel.virtual_pipeline is not None:
        yield Problem(
            ("parallel.virtual_pipeline",),
            f"parallel.virtual_pipeline = {config.parallel.virtual_pipeline}: belongs to training; "
            "a teacher that only speaks runs without, leave it out",
        )
    if store.job >= store.jobs:
        yield Problem(
            ("store.job", "store.jobs"),
            f"store.job = {store.job}: jobs are counted from 0 and store.jobs = {store.jobs}; "
            "lower the first or raise the second",
        )
    if list(store.temperatures) != sorted(set(store.temperatures)) or any(
        temperature <= 0 or temperature == 1 for temperature in store.temperatures
    ):
        yield Problem(
            ("store.temperatures",),
            f"store.temperatures = {list(store.temperatures)}: list positive numbers other than 1, "
            "ascending",
        )
    if store.mode == "sampled" and (store.top_p is not None or store.temperatures):
        yield Problem(
            ("store.mode", "store.top_p", "store.temperatures"),
            "store.mode = 'sampled': draws are not cut and are of temperature 1; leave store.top_p "
            "and store.temperatures out",
        )


def store_problems(config: RunConfig) -> Iterator[Problem]:
    """Say what of the run does not go with a teacher that is a store."""
    store = None if config.teacher is None else config.teacher.store
    data = config.data
    if store is None:
        return
    yield from repeated_names("teacher.store", [entry.log_name for entry in store])
    if data.sources and len(store) > 1:
        yield Problem(
            ("teacher.store", "data.sources"),
            f"teacher.store names {len(store)} entries and data.sources are given: only one store "
            "can be joined with a corpus, by the numbers of its samples; leave data.sources out to "
            "train on the samples of the stores",
        )
    if data.validation_sources and not data.sources:
        yield Problem(
            ("data.validation_sources", "data.sources"),
            "data.validation_sources: without data.sources, samples of the stores are held out; "
            "leave them out, or give data.sources",
        )
    if data.tokenizer.train_vocab_size is not None and not data.sources:
        yield Problem(
            ("data.tokenizer.train_vocab_size", "data.sources"),
            f"data.tokenizer.train_vocab_size = {data.tokenizer.train_vocab_size}: a tokenizer is "
            "trained on data.sources, and there are none; leave it out to use that of the store",
        )
    if not config.objective.terms:
        yield Problem(
            ("objective.terms", "teacher.store"),
            "objective.terms = []: nothing is learned from teacher.store; add a term, or set "
            "teacher=null",
        )

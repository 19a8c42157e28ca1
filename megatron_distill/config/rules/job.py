"""Rules over several keys that hold for training and for capture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, get_args

from megatron_distill.config.messages import Problem, without_effect
from megatron_distill.config.rules.alignment import is_aligned, two_tokenizers_problems
from megatron_distill.config.rules.model import architecture_problems, source_problems
from megatron_distill.config.rules.teacher_parallel import (
    own_layouts,
    parallel_key,
    teacher_parallel,
    teacher_parallel_problems,
    under_key,
)
from megatron_distill.config.rules.teacher_ranks import (
    TeacherRanks,
    has_own_ranks,
    ranks_key,
    sends_top_k,
)
from megatron_distill.config.rules.teacher_tokenizers import aligned_role
from megatron_distill.config.rules.transformer_engine import fp8_problems, tensor_overlap_problems
from megatron_distill.config.schema import (
    CaptureConfig,
    JobConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    SourceConfig,
)
from megatron_distill.config.schema.data import ConversationFormat, PathlessFormat, TokenizedFormat
from megatron_distill.errors import counted

__all__ = [
    "capture_problems",
    "job_problems",
    "layout_problems",
    "repeated_names",
    "store_problems",
]


_CONVERSATION_FORMATS = get_args(ConversationFormat)


def job_problems(job: JobConfig) -> Iterator[Problem]:
    """Collect the problems of the rules for any job and any number of processes."""
    for rule in _RULES:
        yield from rule(job)


def _models(job: JobConfig) -> Iterator[Problem]:
    for role, model in job.models.items():
        yield from source_problems(model, role)
        if model.architecture is not None:
            own = model.sequence_length
            found = architecture_problems(
                model.architecture,
                role,
                job.parallel if role == "student" else teacher_parallel(job, role),
                own or job.data.sequence_length,
                length_key=f"{role}.sequence_length" if own else "data.sequence_length",
            )
            yield from under_key(found, parallel_key(job, role))


def _pipeline(job: JobConfig) -> Iterator[Problem]:
    parallel, key = job.parallel, "parallel.virtual_pipeline"
    if parallel.virtual_pipeline is None:
        return
    if isinstance(job, CaptureConfig):
        reason = "in a capture, which runs forward passes only"
        yield without_effect(key, parallel.virtual_pipeline, reason, instead=None)
    elif parallel.pipeline < 2:
        reason = f"with parallel.pipeline = {parallel.pipeline}"
        yield without_effect(key, parallel.virtual_pipeline, reason, instead=None)


def _layers_per_stage(job: JobConfig) -> Iterator[Problem]:
    """One number per stage; the sum is compared with the depth where that is known."""
    parallel = job.parallel
    for role in ("student", "teacher"):
        layers: tuple[int, ...] | None = getattr(parallel.layers_per_stage, role)
        if layers is None:
            continue
        own = teacher_parallel(job) if role == "teacher" else parallel
        pipeline = f"{parallel_key(job, role)}.pipeline"
        key, keys = f"parallel.layers_per_stage.{role}", [pipeline]
        model = job.models.get(role)
        if model is None or model.store is not None:
            has = "has no student" if role == "student" else "has no live teacher"
            yield without_effect(key, list(layers), f"because this job {has}", instead=None)
            continue
        stages, words = own.pipeline, f"{pipeline} = {own.pipeline}"
        if role == "student" and parallel.virtual_pipeline is not None:
            keys.append("parallel.virtual_pipeline")
            stages *= parallel.virtual_pipeline
            words += f" times parallel.virtual_pipeline = {parallel.virtual_pipeline}"
        if min(layers) < 1:
            yield Problem(
                (key,), f"{key} = {list(layers)}: each stage needs a layer; write 1 or more for it"
            )
        if len(layers) != stages:
            yield Problem(
                (key, *keys),
                f"{key} = {list(layers)}: {counted(len(layers), 'number')}, but {words} needs one "
                f"for each of {counted(stages, 'stage')}; list {stages}",
            )


def _offloading(job: JobConfig) -> Iterator[Problem]:
    for role, model in job.models.items():
        reason = None
        if role == "student":
            reason = "for a student"
        elif model.store is not None:
            reason = f"with {role}.store, which has no hidden states"
        elif job.parallel.pipeline == 1 and not _runs_before_student(job, model):
            reason = "with parallel.pipeline = 1: the states of one micro-batch exist at a time"
        elif _moves_top_k_alone(job, role):
            reason = f"with {role}.transfer.what = 'top_k' and no objective.features: only ids move"
        if model.offload and (role == "student" or model.store is not None):
            why = "for a student" if role == "student" else "with a store, which has no weights"
            yield without_effect(f"{role}.offload", value=True, reason=why, instead=False)
        if model.shard_weights and (role == "student" or model.store is not None):
            why = "for a student, whose optimizer.distributed shards its state"
            why = why if role == "student" else "with a store, which has no weights"
            key = f"{role}.shard_weights"
            yield without_effect(key, value=True, reason=why, instead=False)
        if model.offload_hidden and reason is not None:
            yield without_effect(f"{role}.offload_hidden", value=True, reason=reason, instead=False)


def _moves_top_k_alone(job: JobConfig, role: str) -> bool:
    """Whether a top-k moves between two layouts on the same ranks, without hidden states."""
    is_moved = sends_top_k(job, role) and not has_own_ranks(job, role)
    return is_moved and isinstance(job, RunConfig) and not job.objective.features


def _runs_before_student(job: JobConfig, teacher: ModelConfig) -> bool:
    """Whether a live teacher with one pipeline stage runs a whole step before the student.

    Losses measured in the step run the student twice, and the teacher once; with `raw_losses =
    "previous"` in the first step. Weights that rest on the host come to the device once.
    """
    if not isinstance(job, RunConfig):
        return False
    rests = teacher.offload and not teacher.shard_weights
    return rests or job.objective.balance.mode in ("magnitude", "gradient_norm")


def _sequence(job: JobConfig) -> Iterator[Problem]:
    length = job.data.sequence_length
    yield from _sequence_of(job.parallel, length)
    for role, layout in own_layouts(job):
        yield from under_key(_sequence_of(layout, length), f"{role}.parallel")


def _sequence_of(parallel: ParallelConfig, length: int) -> Iterator[Problem]:
    if parallel.sequence and parallel.tensor < 2:
        reason = f"with parallel.tensor = {parallel.tensor}"
        yield without_effect("parallel.sequence", value=True, reason=reason, instead=False)
    elif parallel.sequence and length % (parallel.tensor * parallel.context):
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
    """Find expert-parallel sizes of models without experts."""
    layouts = {"parallel": job.parallel}
    layouts |= {f"{role}.parallel": layout for role, layout in own_layouts(job)}
    for name, layout in layouts.items():
        models = [m for role, m in job.models.items() if parallel_key(job, role) == name]
        shapes = [model.architecture for model in models]
        if layout.expert > 1 and all(s is not None and s.moe is None for s in shapes):
            reason = "because no model here has experts (architecture.moe)"
            yield without_effect(f"{name}.expert", layout.expert, reason, instead=1)


def _sources(job: JobConfig) -> Iterator[Problem]:
    data = job.data
    is_stored = job.teacher is not None and job.teacher.store is not None
    if not data.sources and not is_stored:
        yield Problem(
            ("data.sources",),
            "data.sources = []: add a source, or set teacher.store to train on the samples of a "
            "store",
        )
    for name, sources in (
        ("data.sources", data.sources),
        ("data.validation_sources", data.validation_sources),
    ):
        for index, source in enumerate(sources):
            yield from _source(f"{name}.{index}", source)
        yield from repeated_names(name, [source.log_name for source in sources])


def repeated_names(key: str, names: Sequence[str]) -> Iterator[Problem]:
    """Find the sources of one list that have the same name in the log."""
    for index, name in enumerate(names):
        first = names.index(name)
        if first < index:
            yield Problem(
                (f"{key}.{index}.name", f"{key}.{first}.name"),
                f"{key}.{index}.name = {name!r}: {key}.{first} has the same name in the log; set "
                "another name for one of the two",
            )


def _conversations(job: JobConfig) -> Iterator[Problem]:
    data = job.data
    sources = (*data.sources, *data.validation_sources)
    has_conversations = any(source.conversation is not None for source in sources)
    if has_conversations and not data.isolate_documents:
        yield Problem(
            ("data.isolate_documents", "data.sources"),
            "data.isolate_documents = false: no attention may cross from one conversation to "
            "another in a sequence; set it to true",
        )
    settings: dict[str, object] = {"distill_on_prompt": False, "train_on": "all_responses"}
    for name, default in settings.items():
        value = getattr(data, name)
        if not has_conversations and value != default:
            reason = "because no source has a `conversation` section"
            yield without_effect(f"data.{name}", value, reason, instead=default)


def _source(name: str, source: SourceConfig) -> Iterator[Problem]:
    keys = (f"{name}.paths", f"{name}.format")
    has_paths = source.format not in get_args(PathlessFormat)
    if source.paths and not has_paths:
        reason = f"with {name}.format = {source.format!r}"
        yield without_effect(f"{name}.paths", source.paths, reason, instead=[])
    if has_paths and not source.paths:
        yield Problem(keys, f"{name}.paths = []: format {source.format} needs at least one path")
    if source.conversation is not None and source.format not in _CONVERSATION_FORMATS:
        yield Problem(
            (f"{name}.conversation", f"{name}.format"),
            f"{name}.conversation: format {source.format} has no conversations, only "
            f"{', '.join(_CONVERSATION_FORMATS)}; remove the section or change {name}.format",
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
    readers = dict(job.models)
    if is_aligned(job):
        readers.pop(aligned_role(job), None)  # it has a tokenizer of its own
    from_model = any(model.hf or model.store for model in readers.values())
    if not given and not from_model:
        yield Problem(
            tuple(values),
            f"data.tokenizer: set one of {', '.join(values)}, student.hf, teacher.hf or "
            "teacher.store"
            if not is_aligned(job)
            else f"data.tokenizer: set one of {', '.join(values)} or student.hf to the student's "
            "tokenizer",
        )
    if len(given) > 1:
        settings = " and ".join(f"{key} = {value!r}" for key, value in given.items())
        yield Problem(tuple(given), f"{settings}: set only one of them")
    for index, source in enumerate(job.data.sources):
        is_tokenized = source.format in get_args(TokenizedFormat)
        if is_tokenized and tokenizer.train_vocab_size is not None:
            yield Problem(
                (size, f"data.sources.{index}.format"),
                f"{size} = {tokenizer.train_vocab_size}: data.sources.{index} is already "
                f"tokenised; set {path} to the folder of its tokenizer",
            )


def _backend(job: JobConfig) -> Iterator[Problem]:
    if job.runtime.backend == "nccl" and job.runtime.device == "cpu":
        yield Problem(
            ("runtime.backend", "runtime.device"),
            "runtime.backend = 'nccl' needs runtime.device = 'cuda', not 'cpu'; set "
            "runtime.backend to 'gloo' or 'auto'",
        )


_RULES: tuple[Callable[[JobConfig], Iterator[Problem]], ...] = (
    _models,
    _pipeline,
    _layers_per_stage,
    _offloading,
    _sequence,
    _experts,
    _sources,
    _conversations,
    _tokenizer,
    _backend,
    fp8_problems,
    tensor_overlap_problems,
    teacher_parallel_problems,
)


def layout_problems(
    job: JobConfig, world_size: int, *, teachers: TeacherRanks = ()
) -> Iterator[Problem]:
    """Find reasons why the layouts do not fit this number of processes.

    `teachers`: how many of these run one teacher alone, by role.
    """
    own = dict(teachers)
    students = _Ranks(world_size - sum(own.values()))
    if own:
        keys = tuple(ranks_key(job, role) for role in own)
        students = replace(students, of="the student", keys=(_MORE_PROCESSES, *keys))
    yield from _processes(job.parallel, students)
    layouts = dict(own_layouts(job)) | {role: teacher_parallel(job, role) for role in own}
    for role, layout in layouts.items():
        ranks = students
        if role in own:
            ranks = _Ranks(
                own[role],
                of="the teacher" if role == "teacher" else role,
                keys=(ranks_key(job, role),),
            )
        yield from under_key(_processes(layout, ranks), f"{role}.parallel")


_MORE_PROCESSES: Final = (
    "--processes (of torchrun --nproc-per-node, of a submission --ranks-per-node)"
)


@dataclass(frozen=True)
class _Ranks:
    """The ranks of a role, and what changes their number; `of` "": of the whole launch."""

    count: int
    of: str = ""
    keys: tuple[str, ...] = (_MORE_PROCESSES,)

    def __str__(self) -> str:
        if self.of:
            return f"the {counted(self.count, 'rank')} of {self.of}"
        return counted(self.count, "process", "processes")


def _processes(parallel: ParallelConfig, ranks: _Ranks) -> Iterator[Problem]:
    model_ranks, count = parallel.tensor * parallel.pipeline * parallel.context, ranks.count
    if count % model_ranks:
        unit = ("rank", "ranks") if ranks.of else ("process", "processes")
        there = f"{ranks.of} has" if ranks.of else f"there {'is' if count == 1 else 'are'}"
        yield Problem(
            ("parallel.tensor", "parallel.pipeline", "parallel.context"),
            f"parallel.tensor * parallel.pipeline * parallel.context = {parallel.tensor} * "
            f"{parallel.pipeline} * {parallel.context}: the layout needs a multiple of "
            f"{counted(model_ranks, *unit)}; {there} {count:,}. Set {', '.join(ranks.keys)} or one "
            "of these keys",
        )
    elif count // (parallel.tensor * parallel.pipeline) % parallel.expert:
        yield Problem(
            ("parallel.expert",),
            f"parallel.expert = {parallel.expert}: must divide data-parallel size * "
            f"parallel.context = {count // model_ranks} * {parallel.context} on {ranks}",
        )


def capture_problems(config: CaptureConfig) -> Iterator[Problem]:
    """Find contradictions within a capture."""
    store, teacher = config.store, config.teacher
    if teacher is None:
        yield Problem(
            ("teacher",),
            "teacher is required to capture a store; set teacher.hf or teacher.checkpoint",
        )
    elif teacher.store is not None:
        yield Problem(
            ("teacher.store",),
            "teacher.store: a capture runs a model and cannot read a store; set teacher.hf or "
            "teacher.checkpoint, and store.path to the folder of the new store",
        )
    if config.capture.aligned:
        yield from _aligned_capture(config)
    for name in ("tokenizer", "sequence_length"):
        is_given = teacher is not None and getattr(teacher, name) is not None
        if is_given and not config.capture.aligned:
            yield Problem(
                (f"teacher.{name}", f"data.{name}", "capture.aligned"),
                f"teacher.{name}: the teacher of this capture has the student's tokens; set "
                f"data.{name} instead, or capture.aligned=true for terms with an alignment",
            )
    for name in ("ranks", "nodes"):
        value = None if teacher is None else getattr(teacher, name)
        if value is not None:
            reason = "in a capture, whose ranks all run the teacher"
            yield without_effect(f"teacher.{name}", value, reason, instead=None)
    if teacher is not None and teacher.offload:
        reason = "in a capture, which has no student"
        yield without_effect("teacher.offload", value=True, reason=reason, instead=False)
    if store.job >= store.jobs:
        yield Problem(
            ("store.job", "store.jobs"),
            f"store.job = {store.job}: with store.jobs = {store.jobs} the jobs are 0 to "
            f"{store.jobs - 1}; lower store.job or raise store.jobs",
        )
    if list(store.temperatures) != sorted(set(store.temperatures)) or any(
        temperature <= 0 or temperature == 1 for temperature in store.temperatures
    ):
        yield Problem(
            ("store.temperatures",),
            f"store.temperatures = {list(store.temperatures)}: list positive numbers other than 1 "
            "in ascending order",
        )
    if store.mode == "sampled" and store.top_p is not None:
        reason = "with store.mode = 'sampled'"
        yield without_effect("store.top_p", store.top_p, reason, instead=None)
    if store.mode == "sampled" and store.temperatures:
        reason = "with store.mode = 'sampled', which draws at temperature 1"
        yield without_effect("store.temperatures", store.temperatures, reason, instead=[])


def _aligned_capture(config: CaptureConfig) -> Iterator[Problem]:
    """Find settings that contradict a capture for terms with an alignment."""
    yield from two_tokenizers_problems(config, "capture.aligned")
    size = config.data.tokenizer.train_vocab_size
    if size is not None:
        yield Problem(
            ("data.tokenizer.train_vocab_size", "capture.aligned"),
            f"data.tokenizer.train_vocab_size = {size}: with capture.aligned = true it must exist, "
            "since the run that the store is for reads the same; set data.tokenizer.path",
        )


def store_problems(config: RunConfig) -> Iterator[Problem]:
    """Find settings of the run that contradict a teacher store."""
    store = None if config.teacher is None else config.teacher.store
    data = config.data
    if store is None:
        return
    yield from repeated_names("teacher.store", [entry.log_name for entry in store])
    if data.sources and len(store) > 1:
        yield Problem(
            ("teacher.store", "data.sources"),
            f"teacher.store has {len(store)} entries, but only one store can be joined with "
            "data.sources; remove data.sources to train on the samples of the stores",
        )
    reason = "without data.sources"
    if data.validation_sources and not data.sources:
        names = [source.log_name for source in data.validation_sources]
        why = f"{reason}: samples of the stores are held out"
        yield without_effect("data.validation_sources", names, why, instead=[])
    vocab_size = data.tokenizer.train_vocab_size
    if vocab_size is not None and not data.sources:
        why = f"{reason}: the store's tokenizer is used"
        yield without_effect("data.tokenizer.train_vocab_size", vocab_size, why, instead=None)
    if not config.objective.terms:
        yield Problem(
            ("objective.terms", "teacher.store"),
            "objective.terms = []: a store serves distillation terms only; add a term, or set "
            "teacher=null",
        )

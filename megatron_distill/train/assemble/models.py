"""From a configuration to models, the objective's terms, and process groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from megatron_distill.config import (
    ArchitectureConfig,
    JobConfig,
    ModelConfig,
    ParallelConfig,
    RuntimeConfig,
    TermConfig,
    check_architecture,
    parallel_key,
    teacher_parallel,
)
from megatron_distill.data.tokenizers.open import Vocabulary, holds_tokenizer
from megatron_distill.errors import ConfigError, counted
from megatron_distill.log import get_logger
from megatron_distill.losses import ChunkTerm, Term, TermTeachers
from megatron_distill.models.architecture import Architecture, Execution, Fp8, WeightShards
from megatron_distill.models.hugging_face.model import HuggingFaceWeights, ModelDescription
from megatron_distill.models.user_buffers import TensorOverlap, UserBuffers
from megatron_distill.runtime.collectives import together
from megatron_distill.runtime.groups import (
    Groups,
    Layout,
    create_groups,
    destroy_groups,
    seed_everything,
)
from megatron_distill.train.checkpoint.folder import Description, assets_of, resolve_checkpoint
from megatron_distill.train.checkpoint.reader import CheckpointWeights
from megatron_distill.train.model_source import (
    ModelSource,
    describe_checked,
    describe_on_first_rank,
    evenly_spread,
)
from megatron_distill.train.run_state import check_same_model, saved_architecture

_LOGGER = get_logger(__name__)
_TEACHER_SEED_OFFSET = 1


def layout_of(parallel: ParallelConfig) -> Layout:
    """Translate the parallel sizes."""
    return Layout(**parallel.model_dump(exclude={"layers_per_stage"}))


@contextmanager
def job_groups(
    parallel: ParallelConfig, runtime: RuntimeConfig, *, seed: int, trains: bool
) -> Iterator[Groups]:
    """Create the process groups of a job and their random state.

    Only a training job splits its stages into chunks. The groups are destroyed afterwards, so that
    another job may follow in the same processes. Raises ConfigError on all ranks.
    """
    whole = layout_of(parallel)
    layout = whole if trains else whole.without_virtual_stages()
    groups = create_groups(layout, timeout_minutes=runtime.timeout_seconds / 60)
    try:
        seed_everything(seed, groups)
        yield groups
    finally:
        destroy_groups()


def resolve_model(config: JobConfig, role: str, vocabulary: Vocabulary) -> ModelSource:
    """Return the source of a role's model, with an architecture that fits this job.

    Raises ConfigError or CheckpointError on all ranks: nothing there, another tokenizer, a
    vocabulary smaller than the tokenizer's, or a shape that this layout cannot hold.

    Collective: world, short objects.
    """
    path = config.models[role].hf
    described = None if path is None else _described(path, role, vocabulary)
    with together():
        return read_model(config, role, vocabulary, described)


def _described(path: str, role: str, vocabulary: Vocabulary) -> ModelDescription:
    """Read the description of a Hugging Face folder; a warning tells of rows without a token."""
    folder = Path(path).expanduser()
    described = describe_on_first_rank(folder)
    rows = described.architecture.vocab_size
    if vocabulary.size < rows and not holds_tokenizer(folder):
        _LOGGER.warning(
            "%s.hf = %r has no tokenizer to compare: its last %d of %d rows count as padding",
            *(role, path, rows - vocabulary.size, rows),
        )
    return described


def read_model(
    config: JobConfig,
    role: str,
    vocabulary: Vocabulary | None,
    described: ModelDescription | None = None,
) -> ModelSource:
    """Return the result of `resolve_model`, in a process without a world.

    `vocabulary` None: not known yet, and compared with nothing. `described` is that of the model's
    `hf`, where it is known. Raises ConfigError or CheckpointError.
    """
    model = config.models[role]
    length = model.sequence_length or config.data.sequence_length
    if model.hf is not None:
        folder = Path(model.hf).expanduser()
        found = described or describe_checked(folder)
        source = ModelSource(found.architecture, lambda: HuggingFaceWeights(folder, found))
    elif model.checkpoint is not None:
        source = _in_checkpoint(model.checkpoint, model.architecture, vocabulary, length)
    elif model.architecture is not None:
        size = _ANY_SIZE if vocabulary is None else vocabulary.size
        source = ModelSource(Architecture.from_dict(model.architecture.resolved(length, size)))
    else:
        raise ConfigError(
            f"{role} has no source; give {role}.hf, {role}.architecture or {role}.checkpoint"
        )
    if model.keep_layers is not None or model.num_layers is not None:
        source = source.with_layers(_copied_layers(model, role, source.architecture.num_layers))
    architecture = source.architecture
    if vocabulary is not None and architecture.vocab_size < vocabulary.size:
        raise ConfigError(_too_small(model, role, architecture.vocab_size, vocabulary.size))
    shape = ArchitectureConfig.model_validate(architecture.as_dict())
    parallel = config.parallel if role == "student" else teacher_parallel(config, role)
    key = parallel_key(config, role)
    problems = check_architecture(shape, role, parallel, length, key=key)
    if problems:
        raise ConfigError("\n".join(problems))
    return source


_ANY_SIZE = 1 << 15  # of a vocabulary that is not known yet


def has_model(section: ModelConfig) -> bool:
    """Return whether a section names a model, and not only stores."""
    return any(x is not None for x in (section.hf, section.checkpoint, section.architecture))


def _too_small(model: ModelConfig, role: str, size: int, wanted: int) -> str:
    """Return the error for a vocabulary smaller than the tokenizer's, with the key to change."""
    source = "hf" if model.hf is not None else "checkpoint"
    if model.architecture is not None:
        return (
            f"{role}.architecture.vocab_size is {size}, but the tokenizer has {wanted} tokens; set "
            f"it to {wanted} or more"
        )
    return (
        f"{role}.{source} = {getattr(model, source)!r}: its vocabulary has {size} tokens, but the "
        f"tokenizer has {wanted}; set data.tokenizer.path to the tokenizer of that model"
    )


def _in_checkpoint(
    checkpoint: str, shape: ArchitectureConfig | None, vocabulary: Vocabulary | None, length: int
) -> ModelSource:
    folder = resolve_checkpoint(checkpoint)
    description = Description.read(folder)
    saved = wanted = saved_architecture(description, folder)
    if shape is not None:
        size = max(saved.vocab_size, 0 if vocabulary is None else vocabulary.size)
        wanted = Architecture.from_dict(shape.resolved(length, size))
    tokenizer = description.tokenizer if vocabulary is None else vocabulary.identity
    check_same_model(description, wanted, tokenizer, folder)
    return ModelSource(wanted, lambda: CheckpointWeights(folder, saved))


def _copied_layers(model: ModelConfig, role: str, available: int) -> tuple[int, ...]:
    """Return the layers to copy; raises ConfigError where the source has fewer."""
    if model.keep_layers is not None:
        if model.keep_layers[-1] >= available:
            raise ConfigError(
                f"{role}.keep_layers = {list(model.keep_layers)}: the source has "
                f"{counted(available, 'layer')}, 0 to {available - 1}, counted from 0"
            )
        return model.keep_layers
    count = model.num_layers
    assert count is not None
    if count > available:
        raise ConfigError(
            f"{role}.num_layers = {count}: the source has only {counted(available, 'layer')}; "
            "lower it"
        )
    return evenly_spread(count, available)


def teacher_seed(seed: int) -> int:
    """Return the seed of a teacher's random weights, which differs from the student's."""
    return seed + _TEACHER_SEED_OFFSET


def tensor_overlap(
    runtime: RuntimeConfig, *, samples: int, length: int, resources: ExitStack
) -> TensorOverlap | None:
    """Return the overlap of a job's tensor-parallel messages, if it is on.

    Its buffers are freed with `resources`. samples, length: of a micro-batch.
    """
    if not runtime.tp_comm_overlap:
        return None
    buffers = UserBuffers()
    resources.callback(buffers.close)
    return TensorOverlap(buffers, samples, length)


def teacher_execution(
    run: Execution, section: ModelConfig, layers: tuple[int, ...] | None, key: str = "teacher"
) -> Execution:
    """Return the settings of a teacher's computation.

    layers: of each stage; None: even. key: of its section.
    """
    fp8 = Fp8(section.fp8, f"{key}.fp8") if section.fp8 else None
    shards = WeightShards(section.offload) if section.shard_weights else None
    overlap = run.tensor_overlap
    if overlap is not None:
        overlap = replace(overlap, length=section.sequence_length or overlap.length)
    return replace(
        run, fp8=fp8, layers_per_stage=layers, weight_shards=shards, tensor_overlap=overlap
    )


def build_terms(sections: Sequence[TermConfig], vocab_size: int) -> tuple[Term | ChunkTerm, ...]:
    """Translate the configured terms.

    Raises ConfigError, on all ranks, for a top-k of more than the tokenizer's `vocab_size` ids.
    """
    for index, term in enumerate(sections):
        if term.top_k is not None and term.top_k > vocab_size:
            raise ConfigError(
                f"objective.terms.{index}.top_k is {term.top_k}, but the vocabulary has "
                f"{vocab_size} tokens; lower it, or leave it out to compare all"
            )
    return tuple(map(_built, sections))


def _built(term: TermConfig) -> Term | ChunkTerm:
    """Translate a term; a field that its kind does not have is left out."""
    kind = Term if term.alignment is None else ChunkTerm
    given = term.values_for(kind)
    if term.teacher is not None:
        given["teachers"] = TermTeachers.of({term.teacher: 1.0})
    elif term.teachers is not None:
        given["teachers"] = TermTeachers.of(term.teachers, term.mixture)
    return kind(**given, parameters=term.parameters, temperatures=term.temperatures)


def export_source(student: ModelConfig) -> Path | None:
    """Return the Hugging Face folder of the student's initial weights, if there is one."""
    if student.hf is not None:
        return Path(student.hf).expanduser()
    if student.checkpoint is not None:
        return assets_of(resolve_checkpoint(student.checkpoint))
    return None

"""From a configuration to models, the objective's terms, and process groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from megatron_distill.config import (
    JobConfig,
    ModelConfig,
    ParallelConfig,
    RuntimeConfig,
    TermConfig,
)
from megatron_distill.data.tokenizers.open import Vocabulary, holds_tokenizer
from megatron_distill.errors import ConfigError, counted
from megatron_distill.log import get_logger
from megatron_distill.losses import ChunkTerm, Term, TermTeachers
from megatron_distill.models.execution import Execution, Fp8, WeightShards
from megatron_distill.models.hugging_face.description import ModelDescription
from megatron_distill.models.hugging_face.model import HuggingFaceWeights, describe_checked
from megatron_distill.models.user_buffers import TensorOverlap, UserBuffers
from megatron_distill.models.weights import WeightSource
from megatron_distill.runtime.collectives import together
from megatron_distill.runtime.groups import Groups, create_groups, destroy_groups, seed_everything
from megatron_distill.train.assemble.shapes import layout_of, read_shape
from megatron_distill.train.checkpoint.description import (
    Description,
    assets_of,
    resolve_checkpoint,
    saved_architecture,
)
from megatron_distill.train.checkpoint.reader import CheckpointWeights
from megatron_distill.train.model_source import (
    ModelSource,
    describe_on_first_rank,
)

_LOGGER = get_logger(__name__)
_TEACHER_SEED_OFFSET = 1


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
            "%s.hf = %r has no tokenizer to compare: it ends in %s of padding, of %d in all",
            *(role, path, counted(rows - vocabulary.size, "row"), rows),
        )
    return described


def read_model(
    config: JobConfig,
    role: str,
    vocabulary: Vocabulary | None,
    described: ModelDescription | None = None,
) -> ModelSource:
    """Return the result of `resolve_model`, in a process without a world.

    The arguments are those of `read_shape`, which reads descriptions alone; here the headers of a
    Hugging Face model's files are checked as well. Raises ConfigError or CheckpointError.
    """
    model = config.models[role]
    if model.hf is not None:
        described = described or describe_checked(Path(model.hf).expanduser())
    shape = read_shape(config, role, vocabulary, described)
    open_weights = _saved_weights(model, described) if model.has_weights else None
    return ModelSource(shape.architecture, open_weights, shape.keep_layers)


def _saved_weights(
    model: ModelConfig, described: ModelDescription | None
) -> Callable[[], WeightSource]:
    """Return what opens the weights of a Hugging Face folder or a checkpoint."""
    if model.hf is not None:
        assert described is not None, "read with the shape"
        return partial(HuggingFaceWeights, Path(model.hf).expanduser(), described)
    assert model.checkpoint is not None, "the caller asks only for weights that are saved"
    folder = resolve_checkpoint(model.checkpoint)
    return partial(CheckpointWeights, folder, saved_architecture(Description.read(folder), folder))


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
    weights = term.teachers if term.teacher is None else {term.teacher: 1.0}
    if weights is not None:
        given["teachers"] = TermTeachers.of(
            weights, term.mixture, score=term.score, alpha=term.score_alpha
        )
    return kind(**given, parameters=term.parameters, temperatures=term.temperatures)


def export_source(student: ModelConfig) -> Path | None:
    """Return the Hugging Face folder of the student's initial weights, if there is one."""
    if student.hf is not None:
        return Path(student.hf).expanduser()
    if student.checkpoint is not None:
        return assets_of(resolve_checkpoint(student.checkpoint))
    return None

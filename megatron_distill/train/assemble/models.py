"""From a configuration to models: student, teacher, objective."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_distill.config import (
    PARAMETERS,
    ArchitectureConfig,
    ModelConfig,
    ObjectiveConfig,
    ParallelConfig,
    RuntimeConfig,
    TermConfig,
    check_architecture,
)
from megatron_distill.data.tokenizers.open import holds_tokenizer
from megatron_distill.errors import CheckpointError, ConfigError, counted
from megatron_distill.log import get_logger
from megatron_distill.losses import Term
from megatron_distill.models.architecture import Architecture, Execution, Recompute
from megatron_distill.models.gpt import HiddenStateGPT, align_head, build_gpt, vocab_shard
from megatron_distill.models.hugging_face.families import family_named
from megatron_distill.models.hugging_face.model import (
    HuggingFaceWeights,
    ModelDescription,
    describe,
)
from megatron_distill.models.weights import WeightSource, fill
from megatron_distill.ops import LogitRule, VocabShard
from megatron_distill.runtime.collectives import together
from megatron_distill.runtime.groups import (
    Groups,
    Layout,
    create_groups,
    destroy_groups,
    seed_everything,
)
from megatron_distill.runtime.launch import PRECISIONS, Device
from megatron_distill.store import CaptureSettings
from megatron_distill.train.assemble.tokenizer import Vocabulary
from megatron_distill.train.checkpoint.folder import Description, assets_of, resolve_checkpoint
from megatron_distill.train.checkpoint.reader import CheckpointWeights
from megatron_distill.train.objective import TokenObjective
from megatron_distill.train.run_state import check_same_model, saved_architecture
from megatron_distill.train.teachers.live import HostStates, OnlineTeacher

_LOGGER = get_logger(__name__)
_TEACHER_SEED_OFFSET = 1


def build_student(
    origin: Origin,
    *,
    seed: int,
    groups: Groups,
    execution: Execution,
    layers: tuple[int, ...] | None = None,
) -> list[HiddenStateGPT]:
    """Build the student's chunks with the weights of its origin, or random ones.

    `layers` of each stage, in the order of the forward pass; None: even.
    """
    if layers is not None and len(set(layers)) > 1:
        _LOGGER.info("student: %s layers per pipeline stage", ", ".join(map(str, layers)))
    execution = replace(execution, layers_per_stage=layers)
    return _build(origin, groups=groups, execution=execution, seed=seed)


def build_online_teacher(
    origin: Origin,
    *,
    seed: int,
    sequence_length: int,
    groups: Groups,
    execution: Execution,
    shard: VocabShard,
    layers: tuple[int, ...] | None = None,
    offload_hidden: bool = False,
) -> OnlineTeacher:
    """Build the frozen model; its head has the columns of `shard`.

    The model may have more or fewer rows than the one that `shard` belongs to, but all of its real
    ids. `layers` of each stage; None: even. `offload_hidden`: with pipeline stages, hidden states
    wait for the student in host memory.
    """
    execution = replace(execution, layers_per_stage=layers)
    (model,) = _build(
        origin, groups=groups, execution=execution, seed=teacher_seed(seed), interleaved=False
    )
    model.requires_grad_(False)
    model.eval()
    own = vocab_shard(origin.architecture, groups, tokens=shard.size)
    head = None
    if groups.is_last_stage:
        weight = model.head_weight().detach()
        head = align_head(weight, own=own, wanted=shard, group=groups.tensor)
    return OnlineTeacher(
        model=model,
        architecture=origin.architecture,
        head_weight=head,
        groups=groups,
        sequence_length=sequence_length,
        host_states=_host_states(groups, execution.device) if offload_hidden else None,
    )


def _host_states(groups: Groups, device: torch.device) -> HostStates | None:
    """Return the host memory for hidden states, on the stage that has them."""
    if device.type == "cpu" and groups.world.rank() == 0:
        _LOGGER.warning("teacher.offload_hidden = true has no effect on a CPU")
    return HostStates(device) if groups.is_last_stage else None


def teacher_seed(seed: int) -> int:
    """Return the seed of a teacher's random weights, which differs from the student's."""
    return seed + _TEACHER_SEED_OFFSET


def build_objective(
    section: ObjectiveConfig,
    terms: Sequence[Term],
    architecture: Architecture,
    *,
    metrics: tuple[str, ...],
    shard: VocabShard,
    groups: Groups,
) -> TokenObjective:
    """Translate the configured objective for a student of this architecture.

    `metrics` are the names of figures that are measured beside the losses; `shard` has the columns
    of this rank's head.
    """
    return TokenObjective(
        ce_weight=section.ce_weight,
        terms=terms,
        metrics=metrics,
        chunk_tokens=section.chunk_tokens,
        shard=shard,
        logit_rule=LogitRule(architecture.logit_softcap, architecture.logit_scale),
        groups=groups,
    )


def live_metrics(terms: Sequence[Term]) -> tuple[str, ...]:
    """Return the names of the reported metrics of a live teacher."""
    ranked = ("topk_mass",) if any(term.top_k is not None for term in terms) else ()
    return ("teacher_ce", "student_entropy", "teacher_entropy", "top1_agreement", *ranked)


def stored_metrics(settings: CaptureSettings) -> tuple[str, ...]:
    """Return the names of the reported metrics of a stored teacher."""
    scalars = ("teacher_ce", "teacher_entropy") if settings.is_complete else ()
    return (*scalars, "student_entropy", *settings.kind.metrics)


def build_terms(sections: Sequence[TermConfig], vocab_size: int) -> tuple[Term, ...]:
    """Translate the configured terms.

    Raises ConfigError, on all ranks, for a top-k of more than the tokenizer's `vocab_size` ids.
    """
    for index, term in enumerate(sections):
        if term.top_k is not None and term.top_k > vocab_size:
            raise ConfigError(
                f"objective.terms.{index}.top_k is {term.top_k}, but the vocabulary has "
                f"{vocab_size} tokens; lower it, or leave it out to compare all"
            )
    schedules = {"weight_schedule", "temperature_schedule"}
    return tuple(
        Term(
            **term.model_dump(exclude={*PARAMETERS, *schedules}),
            parameters=term.parameters,
            temperatures=_temperatures(term),
        )
        for term in sections
    )


def export_source(student: ModelConfig) -> Path | None:
    """Return the Hugging Face folder of the student's initial weights, if there is one."""
    if student.hf is not None:
        return Path(student.hf).expanduser()
    if student.checkpoint is not None:
        return assets_of(resolve_checkpoint(student.checkpoint))
    return None


def _temperatures(term: TermConfig) -> tuple[float, float] | None:
    schedule = term.temperature_schedule
    if schedule is None or schedule.to == term.temperature:
        return None
    return term.temperature, schedule.to


def _build(
    origin: Origin,
    *,
    groups: Groups,
    execution: Execution,
    seed: int,
    interleaved: bool = True,
) -> list[HiddenStateGPT]:
    chunks = build_gpt(
        origin.architecture,
        groups=groups,
        execution=execution,
        seed=seed if origin.open_weights is None else None,
        interleaved=interleaved,
    )
    if origin.open_weights is not None:
        origin.fill(chunks, groups)
    return chunks


@dataclass(frozen=True)
class Origin:
    """A model's architecture and the source of its weights; `open_weights` None: random ones."""

    architecture: Architecture
    open_weights: Callable[[], WeightSource] | None = None
    keep_layers: tuple[int, ...] | None = None

    def fill(self, chunks: Sequence[HiddenStateGPT], groups: Groups) -> None:
        """Read this rank's slices of the weights; raises CheckpointError on all ranks."""
        assert self.open_weights is not None
        with together():
            fill(chunks, self.open_weights(), groups=groups, keep_layers=self.keep_layers)


def find_origin(
    model: ModelConfig,
    role: str,
    vocabulary: Vocabulary,
    *,
    parallel: ParallelConfig,
    sequence_length: int,
) -> Origin:
    """Return the origin of a section's model, with an architecture that fits this run.

    Raises ConfigError or CheckpointError on all ranks: nothing there, another tokenizer, a
    vocabulary smaller than the tokenizer's, or a shape that this layout cannot hold.

    Collective: world, short objects.
    """
    described = None
    if model.hf is not None:
        folder = Path(model.hf).expanduser()
        described = _described_on_first_rank(folder)
        rows = described.architecture.vocab_size
        if vocabulary.size < rows and not holds_tokenizer(folder):
            _LOGGER.warning(
                "%s.hf = %r has no tokenizer to compare: its last %d of %d rows count as padding",
                *(role, model.hf, rows - vocabulary.size, rows),
            )
    with together():
        return read_origin(
            model,
            role,
            vocabulary,
            parallel=parallel,
            sequence_length=sequence_length,
            described=described,
        )


def read_origin(
    model: ModelConfig,
    role: str,
    vocabulary: Vocabulary,
    *,
    parallel: ParallelConfig,
    sequence_length: int,
    described: ModelDescription | None = None,
) -> Origin:
    """Return the result of `find_origin`, in a process without a world.

    `described` is that of `model.hf`, where it is known. Raises ConfigError or CheckpointError. An
    unknown vocabulary size is not compared.
    """
    if model.hf is not None:
        folder = Path(model.hf).expanduser()
        found = described or _described_and_checked(folder)
        origin = Origin(found.architecture, lambda: HuggingFaceWeights(folder, found))
    elif model.checkpoint is not None:
        origin = _from_checkpoint(model.checkpoint, model.architecture, vocabulary, sequence_length)
    elif model.architecture is not None:
        origin = Origin(_described(model.architecture, sequence_length, vocabulary.size))
    else:
        raise ConfigError(
            f"{role} has no source; give {role}.hf, {role}.architecture or {role}.checkpoint"
        )
    if model.keep_layers is not None or model.num_layers is not None:
        origin = _shallower(origin, _kept(model, role, origin.architecture.num_layers))
    architecture = origin.architecture
    if vocabulary.is_known and architecture.vocab_size < vocabulary.size:
        raise ConfigError(_too_small(model, role, architecture.vocab_size, vocabulary.size))
    shape = ArchitectureConfig.model_validate(architecture.as_dict())
    problems = check_architecture(shape, role, parallel, sequence_length)
    if problems:
        raise ConfigError("\n".join(problems))
    return origin


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


def _described_and_checked(folder: Path) -> ModelDescription:
    """Read config.json and every file's header."""
    described = describe(folder)
    HuggingFaceWeights(folder, described).check()
    return described


def _described_on_first_rank(folder: Path) -> ModelDescription:
    """Read a folder's description on one rank and broadcast it."""
    said: list[tuple[str, dict[str, object]] | None] = [None]
    with together():
        if dist.get_rank() == 0:
            described = _described_and_checked(folder)
            said = [(described.family.model_type, described.architecture.as_dict())]
    dist.broadcast_object_list(said, src=0)
    assert said[0] is not None
    model_type, fields = said[0]
    family = family_named(model_type, where=str(folder))
    return ModelDescription(family, Architecture.from_dict(fields))


def _from_checkpoint(
    checkpoint: str, shape: ArchitectureConfig | None, vocabulary: Vocabulary, sequence_length: int
) -> Origin:
    folder = resolve_checkpoint(checkpoint)
    description = Description.read(folder)
    saved = saved_architecture(description, folder)
    wanted, identity = saved, vocabulary.identity
    if shape is not None:
        size = saved.vocab_size
        if vocabulary.is_known:
            size = max(size, vocabulary.size)
        wanted = _described(shape, sequence_length, size)
    if not vocabulary.is_known:
        identity = description.tokenizer
    check_same_model(description, wanted, identity, folder)
    return Origin(wanted, lambda: CheckpointWeights(folder, saved))


def _described(
    described: ArchitectureConfig, sequence_length: int, vocab_size: int
) -> Architecture:
    """Return the architecture of a section, with defaults for its length and vocabulary."""
    fields = described.model_dump()
    moe = fields["moe"]
    if moe is not None:
        moe["ffn_hidden_size"] = moe["ffn_hidden_size"] or described.ffn_hidden_size
    heads = described.num_attention_heads
    defaults = {
        "num_kv_heads": heads,
        "head_size": described.hidden_size // heads,
        "vocab_size": vocab_size,
        "max_position_embeddings": sequence_length,
    }
    for name, value in defaults.items():
        if fields[name] is None:
            fields[name] = value
    return Architecture.from_dict(fields)


def _kept(model: ModelConfig, role: str, available: int) -> tuple[int, ...]:
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


def evenly_spread(count: int, available: int) -> tuple[int, ...]:
    """Return `count` of `available` layers at even distances, including the first and the last."""
    if count == 1:
        return (0,)
    gaps = count - 1
    return tuple((2 * i * (available - 1) + gaps) // (2 * gaps) for i in range(count))


def _shallower(origin: Origin, kept: tuple[int, ...]) -> Origin:
    if origin.open_weights is None:
        raise CheckpointError(
            "keep_layers and num_layers take layers from weights, and these are random"
        )
    architecture = origin.architecture
    sliding = architecture.sliding_layers
    if sliding is not None:
        sliding = tuple(index for index, layer in enumerate(kept) if layer in sliding)
    shape = replace(architecture, num_layers=len(kept), sliding_layers=sliding)
    return replace(origin, architecture=shape, keep_layers=kept)


@contextmanager
def job_groups(
    parallel: ParallelConfig, runtime: RuntimeConfig, *, seed: int, trains: bool
) -> Iterator[Groups]:
    """Create the process groups of a job and their random state.

    Only a training job splits its stages into chunks. The groups are destroyed afterwards, so that
    another job may follow in the same processes. Raises ConfigError on all ranks.
    """
    layout = Layout(
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        virtual_pipeline=parallel.virtual_pipeline if trains else None,
        context=parallel.context,
        expert=parallel.expert,
        sequence=parallel.sequence,
    )
    groups = create_groups(layout, timeout_minutes=runtime.timeout_seconds / 60)
    try:
        seed_everything(seed, groups)
        yield groups
    finally:
        destroy_groups()


def execution_on(
    device: Device, *, precision: str, recompute: Recompute | None = None
) -> Execution:
    """Return the execution settings of models on this device."""
    return Execution(
        dtype=PRECISIONS[precision],
        device=device.torch_device,
        recompute=recompute or Recompute(),
    )

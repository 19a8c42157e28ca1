"""From a configuration to the planner's values, its layout as a choice, and the layout rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Final, Literal

from megatron_distill.config import (
    ArchitectureConfig,
    DataConfig,
    FeatureConfig,
    JobConfig,
    ModelConfig,
    ObjectiveConfig,
    RunConfig,
    TermConfig,
    TokenizerConfig,
    check_architecture,
    check_features,
    is_aligned,
    matched_layers,
    named_teachers,
    own_tokenizers,
    parallel_key,
    routed_terms,
    teacher_parallel,
)
from megatron_distill.errors import ConfigError
from megatron_distill.models.architecture import Architecture
from megatron_distill.models.flops import balanced_stages, forward_flops_per_token
from megatron_distill.models.hugging_face.description import describe_for_plan
from megatron_distill.models.pipeline_stages import even_layers
from megatron_distill.planning.device import reading_seconds
from megatron_distill.planning.run import (
    Choice,
    ChunkLoss,
    LayerPair,
    LossTerm,
    PlannedRun,
    SharedTeacher,
    TeacherPlace,
)
from megatron_distill.planning.tries.choices import ShapeRule
from megatron_distill.runtime.layout import Layout
from megatron_distill.train.assemble.shapes import layout_of, read_shape

__all__ = [
    "all_unplanned",
    "assumed_roles",
    "configured_choice",
    "open_shapes",
    "planned_run",
    "shape_rule",
    "teacher_places",
    "tokenizer_paths",
    "unplanned",
    "vocabulary_note",
    "with_documents",
]

_STORE_IDS: Final = 64
# By the mode of the balance, the measure of the student's first pass of a step.
_MEASURED: Final[Mapping[str, Literal["losses", "gradients"]]] = {
    "magnitude": "losses",
    "gradient_norm": "gradients",
}
_ALIGNING: Final = 2  # processes of a run on a machine of several cores


def open_shapes(
    config: JobConfig, *, rows: Mapping[str, int] | None = None
) -> dict[str, Architecture]:
    """Return the shapes of all models by role; of a Hugging Face folder only config.json is read.

    A teacher that is only a store has none. rows: sizes of vocabularies by role, where tokenizers
    have been read. Raises ConfigError or CheckpointError: a model does not exist, or does not fit
    its layout.
    """
    rows = rows or {}
    models, tokenizer = config.models, config.data.tokenizer

    def shape(role: str) -> Architecture:
        section = models[role]
        path = section.hf
        described = None if path is None else describe_for_plan(Path(path).expanduser())
        found = read_shape(config, role, None, described).architecture
        trained = _tokenizer(section, tokenizer).train_vocab_size
        if _has_rows_of_tokenizer(section):
            # A tokenizer that the run will train has the size of its key.
            return replace(found, vocab_size=rows.get(role) or trained or found.vocab_size)
        return found

    shapes = {role: shape(role) for role, model in models.items() if model.has_model}
    assumed = [role for role in assumed_roles(models, tokenizer) if role not in rows]
    for role in assumed:
        # A model with the same tokenizer has about as many rows.
        known = [
            other.vocab_size
            for name, other in shapes.items()
            if name not in assumed
            and _tokenizer(models[name], tokenizer) == _tokenizer(models[role], tokenizer)
        ]
        if known:
            shapes[role] = replace(shapes[role], vocab_size=known[0])
    return shapes


@dataclass(frozen=True)
class Unplanned:
    """A part of a configuration that the planner does not know.

    key: of the part. reason: why, with the key. remedy: for a plan.
    """

    key: str
    reason: str
    remedy: str


# Of one of several teachers; a store needs no memory of a device.
_OTHER_PLACES: Final = ("store", "ranks", "nodes", "parallel", "tokenizer")


def unplanned(config: RunConfig, *, only_memory: bool = False) -> Unplanned | None:
    """Return the first of several teachers whose place or samples the planner does not know.

    only_memory: its time is not asked for.
    """
    return next(all_unplanned(config, only_memory=only_memory), None)


def all_unplanned(config: RunConfig, *, only_memory: bool = False) -> Iterator[Unplanned]:
    """Yield all parts that the planner does not know; arguments as of `unplanned`."""
    for name, model in (config.teachers or {}).items():
        for key in _OTHER_PLACES[1:] if only_memory else _OTHER_PLACES:
            if getattr(model, key) is not None:
                yield Unplanned(
                    f"teachers.{name}.{key}",
                    f"teachers.{name}.{key}: a plan has several teachers on the student's ranks "
                    "alone, in its layout and with its tokenizer",
                    f"set teachers.{name}.{key}=null for the plan",
                )
    for name in own_tokenizers(config) if config.teachers else ():
        # Named by a term with an alignment, or with a sequence length of its own.
        yield Unplanned(
            f"teachers.{name}.tokenizer",
            f"teachers.{name} has a tokenizer of its own, and a plan has several teachers with the "
            "student's alone",
            f"leave teachers.{name} and its terms out of the plan",
        )
    if only_memory or not config.teachers or not routed_terms(config):
        return
    for index, source in enumerate(config.data.sources):
        if source.teacher_field is not None:
            yield Unplanned(
                f"data.sources.{index}.teacher_field",
                f"data.sources.{index}.teacher_field = {source.teacher_field!r}: a plan does not "
                "read the rows, so that it does not know how many each teacher has",
                f"set data.sources.{index}.teacher_field=null and objective.routing_weights for "
                "the plan",
            )


def vocabulary_note(
    models: Mapping[str, ModelConfig],
    tokenizer: TokenizerConfig,
    shapes: Mapping[str, Architecture],
) -> str | None:
    """Return a sentence on the vocabulary's size in `open_shapes` where it is assumed, or None.

    tokenizer: of the data.
    """
    assumed = assumed_roles(models, tokenizer)
    if not assumed:
        return None
    (size,) = {shapes[role].vocab_size for role in assumed}
    keys = " and ".join(f"{role}.architecture.vocab_size" for role in assumed)
    return f"Assumed: a vocabulary of {size:,} rows, since no tokenizer is read here; set {keys}"


def assumed_roles(models: Mapping[str, ModelConfig], tokenizer: TokenizerConfig) -> list[str]:
    """Return the roles whose vocabulary has the size of a tokenizer that is not known yet."""
    return [
        role
        for role, model in models.items()
        if _reads_size(model) and _tokenizer(model, tokenizer).train_vocab_size is None
    ]


def _has_rows_of_tokenizer(section: ModelConfig) -> bool:
    shape = section.architecture
    return shape is not None and shape.vocab_size is None and section.checkpoint is None


def _tokenizer(model: ModelConfig, tokenizer: TokenizerConfig) -> TokenizerConfig:
    return model.tokenizer or tokenizer


def tokenizer_paths(models: Mapping[str, ModelConfig]) -> dict[str, str | None]:
    """Return the tokenizers whose size is that of a model's vocabulary, by role.

    None: that of the data. One of the model's own without a path is left out.
    """
    own = {role: one.tokenizer for role, one in models.items() if _reads_size(one)}
    return {
        role: None if tokenizer is None else tokenizer.path
        for role, tokenizer in own.items()
        if tokenizer is None or tokenizer.path is not None
    }


def _reads_size(section: ModelConfig) -> bool:
    return section.has_model and _has_rows_of_tokenizer(section)


def planned_run(config: RunConfig, shapes: Mapping[str, Architecture]) -> PlannedRun:
    """Return the run without its layout; `shapes` as of `open_shapes`."""
    train, optimizer, section = config.train, config.optimizer, config.teacher
    balance = config.objective.balance
    transfer = None if section is None else section.transfer
    several = _several(config, shapes)
    teacher = shapes.get("teacher")
    if several:
        teacher = max((one.shape for one in several), key=_forward_work)
    live = [model for role, model in config.models.items() if role != "student"]
    return PlannedRun(
        student=shapes["student"],
        teacher=teacher,
        several=several,
        mixed=max((len(term.teachers or ()) for term in config.objective.terms), default=0) or 1,
        sends_heads=any(entry.loss == "attention" for entry in config.objective.features),
        paired_layers=_paired_layers(config.objective.features, shapes),
        projector=_projector(config.objective, shapes),
        shares_projector=config.objective.projector.shared,
        sequence_length=config.data.sequence_length,
        teacher_length=None if section is None else section.sequence_length,
        losses=tuple(sorted(map(_in_words, config.objective.terms))),
        terms=tuple(
            LossTerm(term.top_k, term.support != "renormalized", term.divergence)
            for term in config.objective.terms
            if term.alignment is None
        ),
        chunk_losses=tuple(
            ChunkLoss(term.alignment, term.top_k, term.uncommon_top_k)
            for term in config.objective.terms
            if term.alignment is not None
        ),
        global_batch_size=train.global_batch_size,
        steps=train.steps,
        validation_samples=config.validation.samples,
        validation_interval=config.validation.interval,
        precision=train.precision,
        student_fp8=train.fp8 is not None,
        teacher_fp8=bool(live) and all(model.fp8 is not None for model in live),
        chunk_tokens=config.objective.chunk_tokens,
        is_distributed=optimizer.distributed,
        overlaps_gradients=optimizer.overlap_grad_reduce,
        overlaps_parameters=optimizer.overlap_param_gather,
        bucket_size=optimizer.bucket_size,
        shards_teacher=section is not None and section.shard_weights,
        offloads_hidden=bool(live) and all(model.offload_hidden for model in live),
        keeps_signals=balance.mode in _MEASURED,
        # With `previous` the first step alone measures.
        measures=None if balance.raw_losses == "previous" else _MEASURED.get(balance.mode),
        rests=section is not None and section.offload,
        steps_ahead=1 if section is None else section.steps_ahead,
        sent_ids=transfer.k if transfer is not None and transfer.what == "top_k" else None,
        store_ids=max((term.top_k or 0 for term in config.objective.terms), default=0)
        or _STORE_IDS,
        row_blocks=any(map(_takes_row_blocks, config.objective.terms)),
        overlaps_tensor=config.runtime.tp_comm_overlap,
        reading_seconds=_reading_seconds(config),
    )


def with_documents(run: PlannedRun, data: DataConfig, length: int | None) -> PlannedRun:
    """Return the run with documents of so many tokens in its samples; None: one per sample.

    Raises ConfigError: attention crosses from one document to the next, or samples are shorter.
    """
    if length is None:
        return run
    if not data.isolate_documents:
        raise ConfigError(
            f"--document-length {length}: with data.isolate_documents=false attention sees whole "
            "sequences; leave the length out"
        )
    if length > run.sequence_length:
        raise ConfigError(
            f"--document-length {length}: a sample has data.sequence_length = "
            f"{run.sequence_length} tokens; give at most these"
        )
    return replace(run, document_length=length)


def _in_words(term: TermConfig) -> str:
    """Return the parts of a term that decide its work."""
    parts = [term.divergence, f"top-k {term.top_k}" if term.top_k is not None else "whole"]
    parts += [] if term.top_k is None else [term.support]
    parts += [term.mixture] if term.teachers is not None else []
    return " ".join(parts)


def _takes_row_blocks(term: TermConfig) -> bool:
    """Return whether no kernel computes all of a term: `PlannedRun.row_blocks`."""
    sorts = term.divergence == "adaptive_kl" and term.top_k is None
    return sorts or term.alignment is not None or term.teachers is not None


def _reading_seconds(config: RunConfig) -> float:
    """Return `PlannedRun.reading_seconds`, by the sources' shares of the samples."""
    sources, workers = config.data.sources, config.data.workers
    if not sources:
        return 0.0
    texts = [one for one in sources if not one.is_tokenized and one.conversation is None]
    share = sum(one.weight for one in texts) / sum(one.weight for one in sources)
    if not is_aligned(config):
        return reading_seconds(texts=share, aligned_by=None)
    # The run's own choice depends on its machine's cores, which a plan does not know.
    return reading_seconds(texts=share, aligned_by=_ALIGNING if workers is None else workers)


def _paired_layers(
    features: tuple[FeatureConfig, ...], shapes: Mapping[str, Architecture]
) -> tuple[LayerPair, ...]:
    """Return `PlannedRun.paired_layers`. Raises ConfigError: a model does not have such a layer."""
    if not features or "teacher" not in shapes:
        return ()
    layers = shapes["student"].num_layers, shapes["teacher"].num_layers
    check_features(features, *layers)
    return tuple(
        LayerPair(ours, theirs, entry.loss)
        for entry in features
        for ours, theirs in matched_layers(entry, *layers)
    )


def _projector(objective: ObjectiveConfig, shapes: Mapping[str, Architecture]) -> tuple[int, ...]:
    """Return `PlannedRun.projector`, the sizes of `train.assemble.distillation`."""
    wanted = objective.projector
    is_asked = any(entry.loss != "attention" for entry in objective.features)
    if not is_asked or "teacher" not in shapes:
        return ()
    student, teacher = shapes["student"].hidden_size, shapes["teacher"].hidden_size
    if student == teacher and not wanted.always:
        return ()
    within = (wanted.hidden_size or teacher,) if wanted.kind == "mlp" else ()
    return (student, *within, teacher)


def _forward_work(shape: Architecture) -> float:
    return forward_flops_per_token(shape, sequence_length=1)


def _several(config: RunConfig, shapes: Mapping[str, Architecture]) -> tuple[SharedTeacher, ...]:
    """Return several teachers with their shares of the samples; empty where there is one.

    Stores are left out, and rows that name their teachers count for all of them alike. A plan has
    neither, and the memory of a run does not depend on them.
    """
    live = sorted(name for name, one in (config.teachers or {}).items() if one.store is None)
    named = named_teachers(config.objective.terms)
    shares = dict.fromkeys(live, 0.0)
    weights = config.objective.routing_weights or {}
    total = sum(source.weight for source in config.data.sources)
    for source in config.data.sources if routed_terms(config) else ():
        drawn = {source.teacher: 1.0} if source.teacher is not None else weights
        if source.teacher_field is not None:
            drawn = dict.fromkeys(live, 1.0)
        for name in drawn.keys() & shares.keys():
            shares[name] += source.weight / total * drawn[name] / sum(drawn.values())
    sections = config.teachers or {}
    return tuple(
        SharedTeacher(
            name,
            shapes[f"teachers.{name}"],
            1.0 if name in named else shares[name],
            rests=sections[name].offload,
            shards=sections[name].shard_weights,
        )
        for name in live
        if name in named or shares[name]
    )


def teacher_places(config: RunConfig) -> tuple[TeacherPlace, ...]:
    """Return the places of the teacher that this configuration allows."""
    teacher, objective = config.teacher, config.objective
    if config.teachers:
        return ("shared",)
    if teacher is None:
        return ("none",)
    if teacher.store is not None:
        return ("store",)
    asks = bool(objective.terms or objective.features)
    return ("shared", "own ranks") if asks else ("shared",)


def configured_choice(config: RunConfig, run: PlannedRun, *, ranks: int, teachers: int) -> Choice:
    """Return the layout that the configuration has on `ranks`, of which `teachers` are its own."""
    train, layout = config.train, layout_of(config.parallel)
    place: TeacherPlace = "none"
    if config.teacher is not None:
        place = "own ranks" if teachers else "shared"
        place = "store" if config.teacher.store is not None else place
    elif run.several:
        place = "shared"
    is_live = place in ("shared", "own ranks")
    given = config.parallel.layers_per_stage
    # One of several has no section `teacher`, and this is the student's layout.
    own = layout_of(teacher_parallel(config)) if is_live else None
    teacher_layers: tuple[int, ...] = ()
    if own is not None and run.teacher is not None:
        teacher_layers = given.teacher or even_layers(run.teacher.num_layers, own.pipeline)
    choice = Choice(
        layout=layout,
        ranks=ranks - teachers,
        micro_batch_size=train.micro_batch_size,
        layers=given.student or (),
        recompute=train.recompute,
        modules=train.recompute_modules if train.recompute == "selective" else (),
        recomputed_layers=train.recompute_layers,
        place=place,
        teacher_layout=own,
        teacher_layers=teacher_layers,
        teacher_ranks=teachers,
    )
    if given.student:
        return choice
    layers = balanced_stages(
        run.student,
        choice.head_in_stages(run),
        sequence_length=run.sequence_length,
        teacher_length=run.teacher_length,
        stages=layout.stages,
        is_recomputed=train.recompute == "full" and train.recompute_layers is None,
    )
    return replace(choice, layers=layers)


def shape_rule(config: JobConfig, shapes: Mapping[str, Architecture]) -> ShapeRule:
    """Return the rules of the configuration on shapes and a layout, as the planner asks them.

    The role `teacher` is each of several.
    """
    sections = {
        role: ArchitectureConfig.model_validate(shape.as_dict()) for role, shape in shapes.items()
    }
    lengths = {
        role: config.models[role].sequence_length or config.data.sequence_length for role in shapes
    }
    keys = {role: parallel_key(config, role) for role in shapes}
    base = config.parallel.model_copy(
        update={"layers_per_stage": type(config.parallel.layers_per_stage)()}
    )

    @lru_cache(maxsize=4096)
    def first_problem(role: str, layout: Layout) -> str | None:
        is_first = role == ("student" if "student" in shapes else "teacher")
        waits = is_first if layout.tensor == 1 else not layout.sequence
        if config.runtime.tp_comm_overlap and waits:
            return (
                f"runtime.tp_comm_overlap = true: {keys[role]}.tensor = {layout.tensor}, "
                f"{keys[role]}.sequence = {str(layout.sequence).lower()} has no messages to overlap"
            )
        parallel = base.model_copy(update=vars(layout))
        for name in [role] if role in sections else sorted({*sections} - {"student"}):
            found = check_architecture(
                sections[name], name, parallel, lengths[name], key=keys[name]
            )
            if found:
                return found[0]
        return None

    return first_problem

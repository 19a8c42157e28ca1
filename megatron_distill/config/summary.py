"""A configuration in words: the rows of the banner that a job begins with.

A row is a label and a text; an empty label continues the row above.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from megatron_distill.config.rules.teacher_parallel import own_layouts, teacher_parallel
from megatron_distill.config.schema import (
    DataConfig,
    ModelConfig,
    ObjectiveConfig,
    ParallelConfig,
    RunConfig,
    SourceConfig,
    TermConfig,
    TrainConfig,
    ValueScheduleConfig,
)
from megatron_distill.errors import counted

__all__ = [
    "SummaryRow",
    "data_row",
    "layout_row",
    "run_heading",
    "run_rows",
    "source_in_words",
    "sources_in_words",
    "step_sizes",
]

SummaryRow = tuple[str, str]

_MOST_TERMS: Final = 3
_MOST_SOURCES: Final = 3


def run_rows(
    config: RunConfig,
    *,
    world_size: int,
    feature_pairs: int,
    moved: str | None = None,
    own_ranks: Mapping[str, int] | None = None,
) -> Iterator[SummaryRow]:
    """Yield layout, objective and data of a run.

    moved: bytes of a step's outputs of a teacher with its own layout; None without such a teacher.
    own_ranks: by role, of each teacher that has some; the rest are on all ranks of the student.
    """
    precision = f"{config.train.precision}{_recomputed(config.train)}"
    yield layout_row(config.parallel, world_size, precision)
    if moved is not None:
        own = own_ranks or {}
        found = dict(own_layouts(config)) | {role: teacher_parallel(config, role) for role in own}
        words = "; ".join(
            f"{role}: {'its own ' if role in own else ''}"
            f"{_layout(parallel, own.get(role, world_size))}"
            for role, parallel in found.items()
        )
        yield (
            "",
            f"{words}; {moved} of {'its' if len(found) == 1 else 'their'} outputs move in a step",
        )
    terms = config.objective.terms if config.has_teacher else ()
    yield from _objective(config.objective, terms, feature_pairs)
    stores = config.teacher.store or () if config.teacher else ()
    label, text = data_row(config.data, [entry.log_name for entry in stores])
    yield label, f"{text}; {counted(config.validation.samples, 'sample')} held out"


def layout_row(parallel: ParallelConfig, world_size: int, precision: str) -> SummaryRow:
    """Return the ranks with their dimensions, and the precision."""
    return "layout", f"{_layout(parallel, world_size)}; {precision}"


def data_row(data: DataConfig, stores: Sequence[str] = ()) -> SummaryRow:
    """Return the blend of sources; without sources the samples of the stores."""
    names = f"samples of the store: {', '.join(stores)}"
    blend = _blend(data.sources) if data.sources else names
    return "data", f"{blend}; {data.sequence_length} tokens a sample"


def run_heading(config: RunConfig) -> str:
    """Return the job and its folder."""
    job = "distillation" if config.has_teacher else "training"
    return f"{job} into {config.output}"


def step_sizes(config: RunConfig) -> dict[str, int]:
    """Return the sizes of a run's steps by the names of their keys."""
    train, length = config.train, config.data.sequence_length
    sizes = train.model_dump(include={"steps", "global_batch_size", "micro_batch_size"})
    return {**sizes, "sequence_length": length}


def sources_in_words(
    models: Mapping[str, ModelConfig],
    num_layers: Mapping[str, int],
    stored_samples: Mapping[str, int],
) -> dict[str, str]:
    """Return the source of each model's weights by role; of a stored teacher, its stores.

    num_layers: of the models; a stored teacher has none, but samples.
    """
    return {
        role: source_in_words(model, num_layers[role])
        if role in num_layers
        else _stored(model, stored_samples[role])
        for role, model in models.items()
    }


def _stored(teacher: ModelConfig, samples: int) -> str:
    paths = ", ".join(entry.path for entry in teacher.store or ())
    return f"stored, {counted(samples, 'sample')}: {paths}"


def source_in_words(model: ModelConfig, num_layers: int) -> str:
    """Return the folder of a model's weights, with the number of layers taken from it."""
    path = model.hf or model.checkpoint
    if path is None:
        return "random weights"
    is_shallower = model.keep_layers is not None or model.num_layers is not None
    return f"{counted(num_layers, 'layer')} of {path}" if is_shallower else path


def _recomputed(train: TrainConfig) -> str:
    """Return the recomputed activations in words, empty if there are none."""
    if train.recompute == "none":
        return ""
    if train.recompute == "selective":
        return f", recompute {' and '.join(train.recompute_modules)}"
    if train.recompute_layers is None:
        return ", recompute all layers"
    return f", recompute {counted(train.recompute_layers, 'layer')} per stage"


def _layout(parallel: ParallelConfig, world_size: int) -> str:
    sizes = {
        "tensor": parallel.tensor,
        "pipeline": parallel.pipeline,
        "context": parallel.context,
        "data": world_size // (parallel.tensor * parallel.pipeline * parallel.context),
    }
    shared = " x ".join(f"{name} {count}" for name, count in sizes.items() if count > 1)
    extra = [f"expert {parallel.expert}"] if parallel.expert > 1 else []
    if parallel.virtual_pipeline is not None:
        extra.append(f"virtual pipeline {parallel.virtual_pipeline}")
    if parallel.sequence:
        extra.append("sequence parallel")
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    return ", ".join([f"{ranks} = {shared}" if shared else ranks, *extra])


def _objective(
    objective: ObjectiveConfig, terms: Sequence[TermConfig], feature_pairs: int
) -> Iterator[tuple[str, str]]:
    ce = _scheduled(objective.ce_weight, objective.ce_weight_schedule)
    yield "objective", f"  {ce} x cross-entropy"
    shown = terms if len(terms) <= _MOST_TERMS else terms[: _MOST_TERMS - 1]
    for term in shown:
        yield "", f"+ {_term(term)}"
    if len(shown) < len(terms):
        rest = ", ".join(term.alignment or term.divergence for term in terms[len(shown) :])
        yield "", f"+ {len(terms) - len(shown)} more terms: {rest}"
    if objective.features:
        losses = ", ".join(f"{entry.weight:g} x {entry.loss}" for entry in objective.features)
        yield "", f"+ features: {losses}; {counted(feature_pairs, 'pair')} of layers"
    balance = objective.balance
    alpha = _scheduled(balance.alpha, balance.alpha_schedule)
    yield "balance", f"{balance.mode}, alpha {alpha}"


def _term(term: TermConfig) -> str:
    weight = _scheduled(term.weight, term.weight_schedule)
    options = ", ".join(f"{name} {value:g}" for name, value in term.parameters.items())
    name = f"{term.divergence} ({options})" if options else term.divergence
    temperature = _scheduled(term.temperature, term.temperature_schedule)
    squared = ", times T^2" if term.scale_by_temperature_squared else ""
    if term.alignment is not None:
        kind = "" if term.alignment == "uld" else f" {term.divergence}"
        top = "" if term.top_k is None else f", top {term.top_k}"
        named = term.teacher or ", ".join(term.teachers or ())
        return (
            f"{term.alignment}{kind} between two tokenizers{f' from {named}' if named else ''}, "
            f"temperature {term.temperature:g}{top}"
        )
    if term.teacher is not None:
        name += f" from {term.teacher}"
    elif term.teachers is not None:
        shares = " + ".join(f"{weight:g} {own}" for own, weight in term.teachers.items())
        name += f" from {term.mixture} {shares}"
        if term.score is not None:
            name += f", weighted by {term.score} times {term.score_alpha:g}"
    support = "whole vocabulary" if term.top_k is None else f"top {term.top_k}, {term.support}"
    return f"{weight} x {name}, temperature {temperature}{squared}, {support}"


def _scheduled(value: float, schedule: ValueScheduleConfig | None) -> str:
    if schedule is None or schedule.to == value:
        return f"{value:g}"
    return f"({value:g} to {schedule.to:g}, {schedule.kind})"


def _blend(sources: Sequence[SourceConfig]) -> str:
    total = sum(source.weight for source in sources)
    shown = sources if len(sources) <= _MOST_SOURCES else sources[: _MOST_SOURCES - 1]
    texts = [f"{source.log_name} {source.weight / total:.1%}" for source in shown]
    if len(shown) < len(sources):
        texts.append(f"{len(sources) - len(shown)} more sources")
    return ", ".join(texts)

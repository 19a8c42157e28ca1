"""The lines printed at the start of a run or a capture, from its configuration and models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from math import prod
from typing import Final

from megatron_distill.config import (
    DataConfig,
    ModelConfig,
    ObjectiveConfig,
    ParallelConfig,
    SourceConfig,
    StoreConfig,
    TermConfig,
    TrainConfig,
    ValueScheduleConfig,
)
from megatron_distill.errors import counted
from megatron_distill.models.architecture import Architecture
from megatron_distill.models.weights import parameters
from megatron_distill.runtime.progress import short_count, size
from megatron_distill.store import Plan
from megatron_distill.train.throughput import MemoryOfRank

__all__ = ["capture_banner", "run_banner"]

_LABEL_WIDTH: Final = 11
_MOST_TERMS: Final = 3
_MOST_SOURCES: Final = 3


def run_banner(
    *,
    output: str,
    student: tuple[ModelConfig, Architecture],
    teacher: tuple[ModelConfig, Architecture | None] | None,
    objective: ObjectiveConfig,
    data: DataConfig,
    train: TrainConfig,
    parallel: ParallelConfig,
    memory: MemoryOfRank,
    stored_samples: int,
    source_names: Sequence[str],
    held_out: int,
    feature_pairs: int,
    world_size: int,
    start_step: int,
) -> str:
    """Return at most 14 lines: output, models, layout, objective, data, steps, memory.

    teacher: without an architecture it is stored.
    """
    rows = [("student", _model(*student))]
    if teacher is not None:
        section, shape = teacher
        paths = ", ".join(entry.path for entry in section.store or ())
        stored = f"stored, {stored_samples:,} samples: {paths}"
        rows.append(("teacher", stored if shape is None else _model(section, shape)))
    names = ", ".join(source_names)
    blend = _blend(data.sources) if data.sources else f"samples of the store: {names}"
    terms = objective.terms if teacher is not None else ()
    rows += [
        ("layout", f"{_layout(parallel, world_size)}; {train.precision}{_recomputed(train)}"),
        *_objective(objective, terms, feature_pairs),
        ("data", f"{blend}; {data.sequence_length} tokens a sample; {held_out:,} samples held out"),
        ("steps", _steps(train, data.sequence_length, start_step)),
        *_memory(memory, pipeline=parallel.pipeline),
    ]
    return _aligned(f"{'distillation' if teacher else 'training'} into {output}", rows)


def capture_banner(
    store: StoreConfig,
    plan: Plan,
    *,
    teacher: tuple[ModelConfig, Architecture],
    data: DataConfig,
    parallel: ParallelConfig,
    precision: str,
    memory: MemoryOfRank,
    world_size: int,
) -> str:
    """Return the lines of a capture: output, teacher, layout, data, store, memory."""
    settings = plan.settings
    entries = f"{'top' if settings.kind.is_ranked else 'sampled'}-{settings.k} {settings.codec}"
    tokens = short_count(plan.samples * settings.sequence_length)
    job = f", job {store.job} of {store.jobs}" if store.jobs > 1 else ""
    rows = [
        ("teacher", _model(*teacher)),
        ("layout", f"{_layout(parallel, world_size)}; {precision}"),
        ("data", f"{_blend(data.sources)}; {data.sequence_length} tokens a sample"),
        (
            "store",
            f"{entries}; {plan.samples:,} samples = {tokens} tokens, {plan.shards} shards{job}",
        ),
        *_memory(memory, pipeline=parallel.pipeline),
    ]
    return _aligned(f"capture into {store.path}", rows)


def _memory(memory: MemoryOfRank, *, pipeline: int) -> Iterator[tuple[str, str]]:
    """Yield the sum, and the parts that are not zero."""
    parts = {name.replace("_", " "): count for name, count in asdict(memory).items()}
    stage = " (the loss chunk: of the last stage)" if pipeline > 1 else ""
    yield (
        "memory",
        f"{size(sum(parts.values()))} of a rank{stage}, without the layers' activations:",
    )
    yield "", ", ".join(f"{name} {size(count)}" for name, count in parts.items() if count)


def _aligned(heading: str, rows: Sequence[tuple[str, str]]) -> str:
    lines = [f"  {label:<{_LABEL_WIDTH}}{text}" for label, text in rows]
    return "\n".join([heading, *lines])


def _model(section: ModelConfig, shape: Architecture) -> str:
    moe = shape.moe
    inner = (
        f"{moe.num_experts} experts of {moe.ffn_hidden_size}, {moe.top_k} per token"
        if moe
        else f"ffn {shape.ffn_hidden_size}"
    )
    total, active = _parameter_counts(shape)
    counts = f"{_count(total)} parameters"
    if moe:
        counts += f" ({_count(active)} active)"
    return (
        f"{shape.num_layers} layers, hidden {shape.hidden_size}, {inner}; {counts}; "
        f"{_source_of(section, shape)}"
    )


def _source_of(model: ModelConfig, shape: Architecture) -> str:
    path = model.hf or model.checkpoint
    if path is None:
        return "random weights"
    is_shallower = model.keep_layers is not None or model.num_layers is not None
    return f"{shape.num_layers} layers of {path}" if is_shallower else path


def _parameter_counts(shape: Architecture) -> tuple[int, int]:
    """Return the number of all parameters, and of those active for one token."""
    total = active = 0
    for parameter in parameters(shape):
        count = prod(parameter.shape) * prod(parameter.leading_shape(shape))
        total += count
        if parameter.per_expert and shape.moe is not None:
            count = count // shape.moe.num_experts * shape.moe.top_k
        active += count
    return total, active


def _count(number: int) -> str:
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g}{unit}"
    return str(number)


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
        rest = ", ".join(term.divergence for term in terms[len(shown) :])
        yield "", f"+ {len(terms) - len(shown)} more terms: {rest}"
    if objective.features:
        losses = ", ".join(f"{entry.weight:g} x {entry.loss}" for entry in objective.features)
        yield "", f"+ features: {losses}; {feature_pairs} pairs of layers"
    balance = objective.balance
    alpha = _scheduled(balance.alpha, balance.alpha_schedule)
    yield "balance", f"{balance.mode}, alpha {alpha}"


def _term(term: TermConfig) -> str:
    weight = _scheduled(term.weight, term.weight_schedule)
    options = ", ".join(f"{name} {value:g}" for name, value in term.parameters.items())
    name = f"{term.divergence} ({options})" if options else term.divergence
    temperature = _scheduled(term.temperature, term.temperature_schedule)
    squared = ", times T^2" if term.scale_by_temperature_squared else ""
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


def _steps(train: TrainConfig, length: int, start_step: int) -> str:
    tokens = train.global_batch_size * length
    resumed = f"from step {start_step}; " if start_step else ""
    return (
        f"{train.steps:,}; {resumed}{train.global_batch_size:,} samples = {short_count(tokens)} "
        f"tokens each, {short_count(train.steps * tokens)} in all; micro-batch "
        f"{train.micro_batch_size}"
    )

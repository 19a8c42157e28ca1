"""The lines printed at the start of a run or a capture, from its configuration and models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import torch

from megatron_distill.config import (
    CaptureConfig,
    JobConfig,
    ModelConfig,
    RunConfig,
    SourceConfig,
    TermConfig,
    TrainConfig,
    ValueScheduleConfig,
)
from megatron_distill.errors import counted
from megatron_distill.models.architecture import Architecture
from megatron_distill.models.weights import parameters
from megatron_distill.ops.workspace import chunk_tokens_for
from megatron_distill.runtime.launch import PRECISIONS
from megatron_distill.runtime.progress import short_count, size
from megatron_distill.store import Plan
from megatron_distill.train.assemble.sources import source_names

__all__ = ["MemoryOfRank", "RankParameters", "capture_banner", "run_banner"]

_LABEL_WIDTH: Final = 11
_MOST_TERMS: Final = 3
_MOST_SOURCES: Final = 3
_FP32: Final = 4


@dataclass(frozen=True)
class RankParameters:
    """Parameter counts of both models on this rank; `experts` are a part of `student`."""

    student: int = 0
    experts: int = 0
    teacher: int = 0

    @classmethod
    def of(
        cls, student: Sequence[torch.nn.Module], teacher: torch.nn.Module | None
    ) -> RankParameters:
        """Count the parameters of the built models."""
        mine = [parameter for chunk in student for parameter in chunk.parameters()]
        return cls(
            student=sum(parameter.numel() for parameter in mine),
            # Megatron-Core marks parameters that differ between data-parallel ranks.
            experts=sum(p.numel() for p in mine if not getattr(p, "allreduce", True)),
            teacher=sum(p.numel() for p in teacher.parameters()) if teacher else 0,
        )


@dataclass(frozen=True)
class MemoryOfRank:
    """Bytes of one rank by formula; excludes the activations of the layers."""

    weights: int
    gradients: int
    optimizer: int
    teacher: int
    loss_chunk: int

    @classmethod
    def of_run(
        cls,
        config: RunConfig,
        mine: RankParameters,
        student: Architecture,
        *,
        world_size: int,
        device: torch.device,
    ) -> MemoryOfRank:
        """Weights in the run's precision, fp32 gradients, and Adam's moments in fp32.

        With bf16 the optimizer also has fp32 weights; `optimizer.distributed` shards its
        state over the data and context ranks.
        """
        width = PRECISIONS[config.train.precision].itemsize
        state = _FP32 * (2 if width == _FP32 else 3)
        parallel = config.parallel
        replicas = world_size // (parallel.tensor * parallel.pipeline)
        expert_ranks = parallel.expert if parallel.expert > 1 else parallel.tensor
        expert_replicas = world_size // (parallel.pipeline * expert_ranks)
        if not config.optimizer.distributed:
            replicas = expert_replicas = 1
        dense = mine.student - mine.experts
        tokens = config.train.micro_batch_size * config.data.sequence_length // parallel.context
        heads = 2 if mine.teacher else 1
        return cls(
            weights=mine.student * width,
            gradients=mine.student * _FP32,
            optimizer=state * (-(-dense // replicas) + -(-mine.experts // expert_replicas)),
            teacher=mine.teacher * width,
            loss_chunk=heads
            * width
            * _chunk_logits(config.objective.chunk_tokens, tokens, student, config, device),
        )

    @classmethod
    def of_capture(
        cls,
        config: CaptureConfig,
        mine: RankParameters,
        teacher: Architecture,
        *,
        device: torch.device,
    ) -> MemoryOfRank:
        """The frozen teacher and one chunk of its logits."""
        width = PRECISIONS[config.capture.precision].itemsize
        tokens = config.capture.micro_batch_size * config.data.sequence_length
        tokens //= config.parallel.context
        logits = _chunk_logits(config.capture.chunk_tokens, tokens, teacher, config, device)
        return cls(0, 0, 0, mine.teacher * width, width * logits)

    def rows(self, *, pipeline: int) -> Iterator[tuple[str, str]]:
        """Yield the sum, and the parts that are not zero."""
        parts = {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "teacher": self.teacher,
            "loss chunk": self.loss_chunk,
        }
        stage = " (the loss chunk: of the last stage)" if pipeline > 1 else ""
        total = size(sum(parts.values()))
        yield "memory", f"{total} of a rank{stage}, without the layers' activations:"
        yield "", ", ".join(f"{name} {size(count)}" for name, count in parts.items() if count)


def _chunk_logits(
    chosen: int | None, tokens: int, model: Architecture, config: JobConfig, device: torch.device
) -> int:
    tensor = config.parallel.tensor
    columns = model.padded_vocab_size(tensor) // tensor
    return columns * min(tokens, chosen or chunk_tokens_for(columns, device))


def run_banner(
    config: RunConfig,
    *,
    student: Architecture,
    teacher: Architecture | None,
    stored_samples: int | None,
    feature_pairs: int,
    mine: RankParameters,
    world_size: int,
    start_step: int,
    device: torch.device,
) -> str:
    """Return at most 14 lines: output, models, layout, objective, data, steps, memory."""
    memory = MemoryOfRank.of_run(config, mine, student, world_size=world_size, device=device)
    rows = [("student", _model(student, config.student))]
    if teacher is not None and config.teacher is not None:
        rows.append(("teacher", _model(teacher, config.teacher)))
    elif config.teacher is not None and config.teacher.store is not None:
        paths = ", ".join(entry.path for entry in config.teacher.store)
        rows.append(("teacher", f"stored, {stored_samples:,} samples: {paths}"))
    execution = config.train.precision + _recomputed(config.train)
    rows += [
        ("layout", f"{_layout(config, world_size)}; {execution}"),
        *_objective(config, feature_pairs),
        ("data", _data(config)),
        ("steps", _steps(config, start_step)),
        *memory.rows(pipeline=config.parallel.pipeline),
    ]
    heading = "distillation" if config.teacher else "training"
    return _aligned(f"{heading} into {config.output}", rows)


def capture_banner(
    config: CaptureConfig,
    plan: Plan,
    *,
    teacher: Architecture,
    mine: RankParameters,
    world_size: int,
    device: torch.device,
) -> str:
    """Return the lines of a capture: output, teacher, layout, data, store, memory."""
    assert config.teacher is not None, "the rules of a capture ask for one"
    memory = MemoryOfRank.of_capture(config, mine, teacher, device=device)
    settings = plan.settings
    kept = f"{'top' if settings.mode == 'top_k' else 'sampled'}-{settings.k} {settings.codec}"
    tokens = short_count(plan.samples * settings.sequence_length)
    job = f", job {config.store.job} of {config.store.jobs}" if config.store.jobs > 1 else ""
    rows = [
        ("teacher", _model(teacher, config.teacher)),
        ("layout", f"{_layout(config, world_size)}; {config.capture.precision}"),
        ("data", f"{_blend(config.data.sources)}; {config.data.sequence_length} tokens a sample"),
        ("store", f"{kept}; {plan.samples:,} samples = {tokens} tokens, {plan.shards} shards{job}"),
        *memory.rows(pipeline=config.parallel.pipeline),
    ]
    return _aligned(f"capture into {config.store.path}", rows)


def _aligned(heading: str, rows: Sequence[tuple[str, str]]) -> str:
    lines = [f"  {label:<{_LABEL_WIDTH}}{text}" for label, text in rows]
    return "\n".join([heading, *lines])


def _model(shape: Architecture, model: ModelConfig) -> str:
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
        f"{_source_of(model, shape)}"
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


def _layout(config: JobConfig, world_size: int) -> str:
    parallel = config.parallel
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


def _objective(config: RunConfig, feature_pairs: int) -> Iterator[tuple[str, str]]:
    objective = config.objective
    ce = _scheduled(objective.ce_weight, objective.ce_weight_schedule)
    yield "objective", f"  {ce} x cross-entropy"
    terms = objective.terms if config.teacher is not None else ()
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


def _data(config: RunConfig) -> str:
    data = config.data
    blend = (
        _blend(data.sources)
        if data.sources
        else "samples of the store: " + ", ".join(source_names(config, held_out=False))
    )
    held_out = f"{config.validation.samples:,} samples held out"
    return f"{blend}; {data.sequence_length} tokens a sample; {held_out}"


def _blend(sources: Sequence[SourceConfig]) -> str:
    total = sum(source.weight for source in sources)
    shown = sources if len(sources) <= _MOST_SOURCES else sources[: _MOST_SOURCES - 1]
    texts = [f"{source.log_name} {source.weight / total:.1%}" for source in shown]
    if len(shown) < len(sources):
        texts.append(f"{len(sources) - len(shown)} more sources")
    return ", ".join(texts)


def _steps(config: RunConfig, start_step: int) -> str:
    train, length = config.train, config.data.sequence_length
    tokens = train.global_batch_size * length
    resumed = f"from step {start_step}; " if start_step else ""
    return (
        f"{train.steps:,}; {resumed}{train.global_batch_size:,} samples = {short_count(tokens)} "
        f"tokens each, {short_count(train.steps * tokens)} in all; micro-batch "
        f"{train.micro_batch_size}"
    )

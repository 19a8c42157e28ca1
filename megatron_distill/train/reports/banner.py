"""The banner of a job: rows about its models, steps, store and memory, aligned under a heading."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from math import prod
from typing import Final

import torch

from megatron_distill.errors import counted
from megatron_distill.models.architecture import Architecture
from megatron_distill.models.execution import Execution
from megatron_distill.models.parameters import parameters, places
from megatron_distill.runtime.progress import short_count, size
from megatron_distill.store import Plan
from megatron_distill.train.run_state import RunState
from megatron_distill.train.throughput import MemoryOfRank, RankParameters, chunk_logits

__all__ = [
    "banner_text",
    "memory_of_run",
    "memory_rows",
    "model_row",
    "parameter_counts",
    "run_banner",
    "steps_row",
    "store_row",
]

_Row = tuple[str, str]  # label, text
_LABEL_WIDTH: Final = 11


def banner_text(heading: str, rows: Iterable[_Row]) -> str:
    """Return the heading and the rows, one line each; an empty label continues the row above."""
    lines = [f"  {label:<{_LABEL_WIDTH}}{text}" for label, text in rows]
    return "\n".join([heading, *lines])


def model_row(role: str, shape: Architecture, source: str) -> _Row:
    """Return a model's sizes and the source of its weights."""
    moe = shape.moe
    inner = f"ffn {shape.ffn_hidden_size}"
    if moe:
        dense = f"{counted(len(moe.dense_layers), 'dense layer')} of {shape.ffn_hidden_size}, "
        inner = dense if moe.dense_layers else ""
        inner += f"{moe.num_experts} experts of {moe.ffn_hidden_size}, {moe.top_k} per token"
        if moe.shared_ffn_hidden_size:
            inner += f" and a shared one of {moe.shared_ffn_hidden_size}"
    total, active = parameter_counts(shape)
    counts = f"{_count(total)} parameters"
    if moe:
        counts += f" ({_count(active)} active)"
    sizes = f"{counted(shape.num_layers, 'layer')}, hidden {shape.hidden_size}, {inner}; {counts}"
    return _of_role(role, f"{sizes}; {source}")


def _of_role(role: str, text: str) -> _Row:
    label, _, name = role.partition("s.")  # one of several: teachers.<name>
    return label, f"{name}: {text}" if name else text


def steps_row(
    *,
    steps: int,
    start_step: int,
    global_batch_size: int,
    micro_batch_size: int,
    sequence_length: int,
) -> _Row:
    """Return the steps of a run, its samples per step and its tokens."""
    tokens = global_batch_size * sequence_length
    resumed = f"from step {start_step}; " if start_step else ""
    return (
        "steps",
        f"{steps:,}; {resumed}{counted(global_batch_size, 'sample')} = "
        f"{short_count(tokens)} tokens each, "
        f"{short_count(steps * tokens)} in all; micro-batch {micro_batch_size}",
    )


def store_row(plan: Plan, *, job: int, jobs: int) -> _Row:
    """Return the contents of a store that `jobs` jobs write."""
    settings = plan.settings
    entries = f"{'top' if settings.kind.is_ranked else 'sampled'}-{settings.k} {settings.codec}"
    tokens = short_count(plan.samples * settings.sequence_length)
    part = f", job {job} of {jobs}" if jobs > 1 else ""
    shards = f"{counted(plan.shards, 'shard')}{part}"
    samples = counted(plan.samples, "sample")
    return "store", f"{entries}; {samples} = {tokens} tokens, {shards}"


def run_banner(
    heading: str,
    shapes: Mapping[str, Architecture],
    sources: Mapping[str, str],
    settings: Iterable[_Row],
    memory: MemoryOfRank,
    *,
    stages: int,
) -> str:
    """Return the lines that describe a run at its start, at most 15.

    shapes: of the models by role; a stored teacher has none. sources: of all models' weights, by
    role. settings: rows of the configuration. stages: of the pipeline.
    """
    models = [
        model_row(role, shapes[role], source) if role in shapes else _of_role(role, source)
        for role, source in sources.items()
    ]
    return banner_text(heading, [*models, *settings, *memory_rows(memory, pipeline=stages)])


def memory_of_run(
    state: RunState,
    teachers: Sequence[torch.nn.Module],
    execution: Execution,
    *,
    chunk_tokens: int | None,
    micro_batch_size: int,
    is_distributed: bool,
    head_copy: int = 0,
) -> MemoryOfRank:
    """Return the memory of this rank by formula, for the built models of a run.

    chunk_tokens: of the loss; None: chosen by the device. is_distributed: the optimizer is.
    head_copy: numbers of a teacher's head beside its model.
    """
    student = state.student
    groups = student.groups
    counts = RankParameters.of(student.chunks, teachers)
    tokens = micro_batch_size * student.sequence_length // groups.context.size()
    return MemoryOfRank.of_run(
        replace(counts, teacher=counts.teacher + head_copy),
        dtype=execution.dtype,
        logits=chunk_logits(
            chunk_tokens,
            tokens,
            state.architecture,
            tensor=groups.tensor.size(),
            device=execution.device,
        ),
        layout=groups.layout,
        world_size=groups.world.size(),
        is_distributed=is_distributed,
    )


def memory_rows(memory: MemoryOfRank, *, pipeline: int) -> Iterator[_Row]:
    """Yield the sum, and the parts that are not zero."""
    parts = {name.replace("_", " "): count for name, count in asdict(memory).items()}
    stage = " (the loss chunk: of the last stage)" if pipeline > 1 else ""
    yield (
        "memory",
        f"{size(sum(parts.values()))} of a rank{stage}, without the layers' activations:",
    )
    yield "", ", ".join(f"{name} {size(count)}" for name, count in parts.items() if count)


def parameter_counts(shape: Architecture) -> tuple[int, int]:
    """Return the number of all parameters, and of those active for one token."""
    total = active = 0
    for parameter in parameters(shape):
        count = prod(parameter.shape) * sum(1 for _ in places(parameter, shape))
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

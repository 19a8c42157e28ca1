"""Megatron-Core inside a pool worker: prepared, with the groups of one layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_distill.runtime.mcore_patches import prepare_megatron_core

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from megatron_distill.models.architecture import Architecture
    from megatron_distill.models.generation.model import CachedGPT
    from megatron_distill.models.gpt import HiddenStateGPT
    from megatron_distill.runtime.batch import Batch
    from megatron_distill.runtime.groups import Groups
    from megatron_distill.train.checkpoint.description import Description
    from megatron_distill.train.objective import TokenObjective
    from megatron_distill.train.step import Student
    from megatron_distill.train.teachers.live import OnlineTeacher

    Parts = dict[tuple[str, tuple[int, ...]], Tensor]

SMALL: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "head_size": 8,
    "vocab_size": 200,
    "max_position_embeddings": 32,
    "vocab_divisible_by": 8,
}


@contextmanager
def megatron_groups(**layout: Any) -> Iterator[Groups]:
    """Process groups of a layout in the pool's current world, gone afterwards."""
    prepare_megatron_core(on_cuda=False)
    from megatron_distill.runtime.groups import (
        Layout,
        create_groups,
        destroy_groups,
        seed_everything,
    )

    groups = create_groups(Layout(**layout), timeout_minutes=5)
    seed_everything(1, groups)
    try:
        yield groups
    finally:
        destroy_groups()


def build(architecture: Architecture, groups: Groups, *, seed: int | None) -> list[HiddenStateGPT]:
    """Build this rank's part of a model in fp32 on the CPU."""
    import torch

    from megatron_distill.models.execution import Execution
    from megatron_distill.models.gpt import build_gpt

    execution = Execution(torch.float32, torch.device("cpu"))
    return list(build_gpt(architecture, groups=groups, execution=execution, seed=seed))


def student_of(
    architecture: Architecture,
    groups: Groups,
    *,
    length: int,
    positions: int,
    recompute: str = "none",
    overlap: bool = False,
) -> Student:
    """A student of seed 11 with Megatron's gradient buffers, whole on every rank.

    length: of a sequence; positions: in a step, by which gradients are divided.
    """
    import torch

    from megatron_distill.config import OptimizerConfig
    from megatron_distill.models.execution import Execution, Recompute
    from megatron_distill.models.gpt import build_gpt
    from megatron_distill.train.optimizer import connect_schedule, wrap_data_parallel
    from megatron_distill.train.step import Student

    execution = Execution(torch.float32, torch.device("cpu"), Recompute.of(recompute))
    chunks = build_gpt(architecture, groups=groups, execution=execution, seed=11)
    plain = OptimizerConfig(distributed=False, overlap_grad_reduce=overlap)
    wrapped = wrap_data_parallel(chunks, plain, groups=groups)
    connect_schedule(wrapped, plain, positions=positions)
    return Student(chunks, wrapped, groups, length)


def teacher_of(
    architecture: Architecture, groups: Groups, *, length: int, seed: int = 12
) -> OnlineTeacher:
    """A frozen teacher."""
    import torch

    from megatron_distill.models.execution import Execution
    from megatron_distill.models.gpt import build_gpt
    from megatron_distill.train.teachers.live import OnlineTeacher

    execution = Execution(torch.float32, torch.device("cpu"))
    (model,) = build_gpt(
        architecture, groups=groups, execution=execution, seed=seed, interleaved=False
    )
    model.freeze()
    head = model.head_weight().detach() if groups.is_last_stage else None
    return OnlineTeacher(model, architecture, head, groups, length)


def objective_of(architecture: Architecture, groups: Groups, **given: Any) -> TokenObjective:
    """The objective of a student; given: further arguments of `TokenObjective`."""
    from megatron_distill.models.gpt import vocab_shard
    from megatron_distill.ops import LogitRule
    from megatron_distill.train.objective import TokenObjective

    return TokenObjective(
        shard=vocab_shard(architecture, groups), logit_rule=LogitRule(None, 1.0), groups=groups,
        **given,
    )  # fmt: skip


def writer_of(architecture: Architecture, groups: Groups, **settings: Any) -> CachedGPT:
    """A model with a cache on the CPU, of seed 11; settings: see `CachedGPT`."""
    import torch

    from megatron_distill.models.generation.model import CachedGPT

    chunks = build(architecture, groups, seed=11)
    return CachedGPT(chunks, architecture, groups, torch.device("cpu"), **settings)


def saved_description(architecture: dict[str, Any], *, tokenizer: str = "") -> Description:
    """The description of a checkpoint after the first step."""
    from megatron_distill.train.checkpoint.description import Description

    return Description(
        step=1, tokens=0, bad_steps=0, architecture=architecture, tokenizer=tokenizer, layout="",
        data={},
    )  # fmt: skip


def save_checkpoint(
    folder: Path, chunks: Sequence[HiddenStateGPT], architecture: Architecture, groups: Groups
) -> Path:
    """Save a model as the one checkpoint of a run's folder of checkpoints; returns its folder."""
    from megatron_distill.train.checkpoint.folder import CheckpointFolder
    from megatron_distill.train.checkpoint.state import model_shards

    checkpoints = CheckpointFolder(folder, keep=1, asynchronous=False)
    checkpoints.prepare()
    checkpoints.save(model_shards(chunks, groups), saved_description(architecture.as_dict()))
    (saved,) = folder.glob("step_*")
    return saved


def rows_of(batch: Batch, rows: list[int] | slice) -> Batch:
    """Some of the sequences of a micro-batch."""
    names = ("tokens_bs", "labels_bs", "ce_mask_bs", "kd_mask_bs", "position_ids_bs")
    cut = {name: getattr(batch, name)[rows] for name in (*names, "document_ids_bS", "sample_ids_b")}
    return replace(batch, **cut, documents=None)


def parts_of(chunks: Sequence[HiddenStateGPT], groups: Groups) -> Parts:
    """The contents of the chunks' parameters, by key and place in the global tensor."""
    from megatron_distill.models.weights import sharded_tensors

    found: Parts = {}
    for part in sharded_tensors(chunks, groups):
        data = part.data.detach().clone()
        found[part.key, part.global_offset] = data[None] if part.prepend_axis_num else data
    return found


def small_architecture(**changes: Any) -> Architecture:
    """Return a GPT of a few thousand weights."""
    prepare_megatron_core(on_cuda=False)
    from megatron_distill.models.architecture import Architecture

    return Architecture.from_dict({**SMALL, **changes})

"""Parts common to both subjects: shapes, weights, data, data parallelism, optimizer."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from benchmarks.steps.cases import Body, Case
from megatron_distill.config import OptimizerConfig, ScheduleConfig
from megatron_distill.data.collation import document_positions
from megatron_distill.models.architecture import Architecture, MixtureOfExperts
from megatron_distill.models.execution import Execution
from megatron_distill.models.gpt import HiddenStateGPT, build_gpt
from megatron_distill.runtime.batch import Batch, StepBatches
from megatron_distill.runtime.groups import Groups
from megatron_distill.runtime.launch import PRECISIONS
from megatron_distill.train.optimizer import build_optimizer, build_schedule

STUDENT_SEED, TEACHER_SEED, DATA_SEED = 11, 12, 13
OPTIMIZER = OptimizerConfig(learning_rate=1e-3)
SCHEDULE = ScheduleConfig(decay="constant")
_SCHEDULE_STEPS = 1000
# Larger than in training: distributions far from uniform, so that a mistake changes the KL.
_INIT_STD = 0.05


@dataclass(frozen=True)
class StepFigures:
    """Global means of one step, and the seconds of this rank's phases where they are known."""

    ce: float
    kd: float
    phases: dict[str, float] | None = None


class StepSubject(Protocol):
    """A training step that can be repeated."""

    models: Sequence[torch.nn.Module]  # student chunks and teacher
    training: TrainingState

    def step(self, batches: StepBatches) -> StepFigures:
        """Take one optimizer step."""


@dataclass(frozen=True)
class TrainingState:
    """Gradient buffers, optimizer and learning rate of a student."""

    wrapped: Sequence[DistributedDataParallel]
    optimizer: ChainedOptimizer
    schedule: OptimizerParamScheduler


def training_state(
    wrapped: Sequence[DistributedDataParallel], *, dtype: torch.dtype
) -> TrainingState:
    """Build Megatron's distributed AdamW over wrapped chunks, the same for both subjects."""
    optimizer = build_optimizer(wrapped, OPTIMIZER, SCHEDULE, dtype=dtype)
    schedule = build_schedule(optimizer, OPTIMIZER, SCHEDULE, steps=_SCHEDULE_STEPS)
    return TrainingState(wrapped, optimizer, schedule)


def architecture(body: Body, case: Case) -> Architecture:
    """Return a body with the case's vocabulary and positions."""
    moe = None
    if body.num_experts is not None:
        moe = MixtureOfExperts(body.num_experts, 2, body.ffn_hidden_size)
    return Architecture(
        num_layers=body.num_layers,
        hidden_size=body.hidden_size,
        ffn_hidden_size=body.ffn_hidden_size,
        num_attention_heads=body.num_attention_heads,
        num_kv_heads=body.num_kv_heads,
        head_size=body.hidden_size // body.num_attention_heads,
        vocab_size=case.workload.vocab_size,
        max_position_embeddings=case.workload.sequence_length,
        init_std=_INIT_STD,
        moe=moe,
    )


def execution(case: Case, device: torch.device) -> Execution:
    """Return the case's execution settings: no recomputation."""
    return Execution(dtype=PRECISIONS[case.precision], device=device)


def random_gpt(
    shape: Architecture, run: Execution, *, groups: Groups, seed: int, interleaved: bool = True
) -> list[HiddenStateGPT]:
    """Build a model's chunks with random weights, the same for both subjects of a case.

    On a GPU they are drawn there: on the host an 8B model takes a minute.
    """
    on_cuda = run.device.type == "cuda"
    chunks = build_gpt(
        shape,
        groups=groups,
        execution=run,
        seed=None if on_cuda else seed,
        interleaved=interleaved,
    )
    if on_cuda:
        draw_on_device(chunks, std=shape.init_std, seed=seed)
    return chunks


@torch.no_grad()
def draw_on_device(chunks: Sequence[torch.nn.Module], *, std: float, seed: int) -> None:
    """Fill matrices with normal numbers and vectors, all gains of norms here, with ones."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            own_seed = seed + zlib.crc32(name.encode())
            generator = torch.Generator(parameter.device).manual_seed(own_seed)
            parameter.normal_(0.0, std, generator=generator)


def random_batches(case: Case, step: int, *, groups: Groups, device: torch.device) -> StepBatches:
    """Return fixed random tokens of one step, all of them trained; the same for both subjects."""
    workload, data_parallel = case.workload, case.ranks.data_parallel
    generator = torch.Generator().manual_seed(DATA_SEED + step)
    size, length = workload.micro_batch_size, workload.sequence_length
    micro_batches = []
    for number in range(workload.micro_batches):
        tokens = torch.randint(
            workload.vocab_size, (data_parallel, size, length + 1), generator=generator
        )
        first = size * (groups.data.rank() * workload.micro_batches + number)
        documents = [workload.documents(first + sample) for sample in range(size)]
        batch = _batch(tokens[groups.data.rank()], documents)
        shard = batch.context_shard(groups.context.rank(), groups.context.size())
        micro_batches.append(shard.with_trained_rows().to(device))
    count = case.tokens_per_step
    return StepBatches(tuple(micro_batches), ce_tokens=count, kd_tokens=count, positions=count)


def _batch(tokens_bS1: torch.Tensor, documents: Sequence[Sequence[int]]) -> Batch:
    size, length = tokens_bS1.shape[0], tokens_bS1.shape[1] - 1
    everywhere = torch.ones(size, length, dtype=torch.bool)
    document_ids_bS = torch.stack(
        [torch.arange(len(own)).repeat_interleave(torch.tensor(own)) for own in documents]
    )
    return Batch(
        tokens_bs=tokens_bS1[:, :-1].contiguous(),
        labels_bs=tokens_bS1[:, 1:].contiguous(),
        ce_mask_bs=everywhere,
        kd_mask_bs=everywhere,
        position_ids_bs=document_positions(document_ids_bS),
        document_ids_bS=document_ids_bS,
        sequence_index_s=torch.arange(length),
        sample_ids_b=torch.arange(size),
        isolate_documents=max(map(len, documents)) > 1,
    )
